"""A plain causal language model of the Llama family; knows nothing of ranks, needs torch only.

Parameter names are those of Hugging Face's files. The sharder acts from outside, at three kinds of
places: linear layers are replaced, `enter` modules (identity here) mark where a tensor-parallel
region begins, and `attention.core` is any function with the signature of `causal_attention`.

Shapes: B rows, S sequence, D model, H query heads, G kv heads, K head size, F feed-forward, V
vocabulary. Lower case is this rank's share; here, on one rank, both are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.kernels import Linear, exact_dtype, rms_norm, swiglu

Rope = tuple[Tensor, Tensor]  # cos and sin of each position's angles, [b, s, 1, K / 2]


@dataclass(frozen=True)
class ModelConfig:
    """Shape and variant of a model.

    rope_scaling          None, {"type": "linear", "factor"}, or {"type": "llama3", "factor",
                          "low_freq_factor", "high_freq_factor", "original_max_position"}
    qkv_bias, o_bias, mlp_bias   biases on those linears
    qk_norm               RMS norm of each query and key head, before the rotary embedding (Qwen3)
    rope_layers           one bool a layer, False for layers without rotary embedding (SmolLM3);
                          None: all have it
    attention_scale       factor on q.k; None: head_dim ** -0.5
    embedding_multiplier, residual_multiplier, logits_divisor   Granite's multipliers
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_layers: tuple[bool, ...] | None = None
    attention_scale: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0


def scaled(x: Tensor, factor: float) -> Tensor:
    """x * factor; most families have no such factor, and then nothing is computed."""
    return x if factor == 1 else x * factor


def rope_frequencies(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Angle per position of each pair of head elements, [K / 2].

    Source    RoFormer (Su et al. 2021); llama3 scaling as in Llama 3.1: long waves are slowed by
              `factor`, short ones kept, those between blended
    """
    exponent = torch.arange(0, config.head_dim, 2, device=device).to(dtype) / config.head_dim
    frequency = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling["type"] == "linear":
        return frequency / scaling["factor"]
    if scaling["type"] != "llama3":
        raise ValueError(f"rope scaling must be linear or llama3, not {scaling['type']!r}.")
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position"] * frequency / (2 * math.pi)  # over the original length
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * keep + frequency / scaling["factor"] * (1 - keep)


def rope_tables(config: ModelConfig, position_ids_bs: Tensor, dtype: torch.dtype) -> Rope:
    """The angles of each position; only the results are rounded to dtype."""
    exact = exact_dtype(dtype)
    frequency = rope_frequencies(config, position_ids_bs.device, exact)
    angle = (position_ids_bs[..., None].to(exact) * frequency).unsqueeze(2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rope(x_bshK: Tensor, rope: Rope) -> Tensor:
    """Rotate element i of each head together with element i + K/2."""
    cos, sin = rope
    first, second = x_bshK.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def fused_attention(q_bSHK: Tensor, k_bSGK: Tensor, v_bSGK: Tensor, scale: float) -> Tensor:
    """Causal attention of rows of one document, by torch's kernel; one query sees all: o_bSHK."""
    q, k, v = (x.transpose(1, 2) for x in (q_bSHK, k_bSGK, v_bSGK))
    settings = {"is_causal": q.shape[2] > 1, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    return F.scaled_dot_product_attention(q, k, v, **settings).transpose(1, 2)


def causal_attention(
    q_bSHK: Tensor,
    k_bSGK: Tensor,
    v_bSGK: Tensor,
    documents_bS: Tensor | None,
    scale: float,
    attend: Callable[..., Tensor] = fused_attention,
) -> Tensor:
    """Attend to earlier positions of the same document; no mask is made.

    documents_bS   number of each position's document within its row, rising; None: the whole row is
                   one document. A host tensor: each document is then one call, so a packed row
                   costs the sum of the squares of its documents, not the square of the sum
    attend         what is called for each

    Returns        o_bSHK
    """
    if documents_bS is None or bool((documents_bS[:, 0] == documents_bS[:, -1]).all()):
        return attend(q_bSHK, k_bSGK, v_bSGK, scale)
    rows = []
    for row, documents in enumerate(documents_bS):
        lengths = torch.unique_consecutive(documents, return_counts=True)[1].tolist()
        parts = (x[row : row + 1].split(lengths, 1) for x in (q_bSHK, k_bSGK, v_bSGK))
        rows.append(torch.cat([attend(*part, scale) for part in zip(*parts)], 1))
    return torch.cat(rows)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention; the projections may hold a share of the heads."""

    def __init__(self, config: ModelConfig, use_rope: bool):
        super().__init__()
        D, H, G, K = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.enter = nn.Identity()
        self.q_proj = Linear(D, H * K, bias=config.qkv_bias)
        self.k_proj = Linear(D, G * K, bias=config.qkv_bias)
        self.v_proj = Linear(D, G * K, bias=config.qkv_bias)
        self.o_proj = Linear(H * K, D, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(K, config.norm_eps), RMSNorm(K, config.norm_eps)
        self.head_dim, self.qk_norm, self.use_rope = K, config.qk_norm, use_rope
        self.scale = config.attention_scale or K**-0.5
        self.core = causal_attention

    def forward(self, x_bsD: Tensor, rope: Rope, documents_bS: Tensor | None) -> Tensor:
        x_bsD = self.enter(x_bsD)
        q_bshK, k_bsgK, v_bsgK = (
            project(x_bsD).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            q_bshK, k_bsgK = self.q_norm(q_bshK), self.k_norm(k_bsgK)
        if self.use_rope:
            q_bshK, k_bsgK = apply_rope(q_bshK, rope), apply_rope(k_bsgK, rope)
        o_bshK = self.core(q_bshK, k_bsgK, v_bsgK, documents_bS, self.scale)
        return self.o_proj(o_bshK.flatten(2))


class MLP(nn.Module):
    """SwiGLU feed-forward (Shazeer 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.enter = nn.Identity()
        self.gate_proj = Linear(D, width, bias=bias)
        self.up_proj = Linear(D, width, bias=bias)
        self.down_proj = Linear(width, D, bias=bias)

    def forward(self, x_bsD: Tensor) -> Tensor:
        x_bsD = self.enter(x_bsD)
        return self.down_proj(swiglu(self.gate_proj(x_bsD), self.up_proj(x_bsD)))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, use_rope: bool):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, use_rope)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)
        self.residual_multiplier = config.residual_multiplier

    def forward(self, x_bsD: Tensor, rope: Rope, documents_bS: Tensor | None) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x_bsD), rope, documents_bS)
        x_bsD = x_bsD + scaled(attended, self.residual_multiplier)
        fed = self.mlp(self.post_attention_layernorm(x_bsD))
        return x_bsD + scaled(fed, self.residual_multiplier)


class Decoder(nn.Module):
    """Embedding, blocks and final norm: the `model.` in Hugging Face's parameter names."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        use_rope = config.rope_layers or (True,) * config.num_layers
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, use) for use in use_rope)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class CausalLM(nn.Module):
    """The whole model: token ids to logits.

    enter       where the head's tensor-parallel region begins
    run_block   how a block is called; memory.py replaces it to checkpoint activations
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.enter = nn.Identity()
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.run_block = lambda block, *inputs: block(*inputs)
        self.tie()

    def tie(self) -> None:
        """Make the head share the embedding's storage, if so configured; call after moving."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def hidden(
        self, input_ids_bs: Tensor, position_ids_bs: Tensor, documents_bS: Tensor | None = None
    ) -> Tensor:
        """Everything but the head: what the loss multiplies with the head's matrix, tile by tile.

        input_ids_bs, position_ids_bs   int64; positions restart at 0 with each document
        documents_bS                    see causal_attention

        Returns                         h_bsD
        """
        h_bsD = scaled(self.model.embed_tokens(input_ids_bs), self.config.embedding_multiplier)
        rope = rope_tables(self.config, position_ids_bs, h_bsD.dtype)
        for block in self.model.layers:
            h_bsD = self.run_block(block, h_bsD, rope, documents_bS)
        return self.enter(scaled(self.model.norm(h_bsD), 1 / self.config.logits_divisor))

    def forward(
        self, input_ids_bs: Tensor, position_ids_bs: Tensor, documents_bS: Tensor | None = None
    ) -> Tensor:
        """Return logits_bsv."""
        return self.lm_head(self.hidden(input_ids_bs, position_ids_bs, documents_bS))


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Floating-point operations of one token's forward and backward pass.

    6 for each weight that multiplies (2 forward, 4 backward; the head counts, the embedding look-up
    does not), and for attention 6 H K S a layer: half of 12 H K S, since a token sees half the row.

    Source   PaLM (Chowdhery et al. 2022), appendix B
    """
    D, H, G, K = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    block = D * K * (2 * H + 2 * G) + 3 * D * config.intermediate_size
    weights = config.num_layers * block + D * config.vocab_size
    return 6 * weights + 6 * config.num_layers * H * K * seq_len
