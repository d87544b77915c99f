"""LoRA: train a low-rank update of chosen linear layers and leave the rest of the model as it is.

y = W x + scale * B (A x), with A [R, in] random and B [out, R] zero, so that training starts at the
base model. Under tp each factor is laid out like the side of W that it touches:

    layer                      W is split on   A            B
    column parallel            out             replicated   split on out
    row parallel               in              split on in  replicated
    replicated kv heads, or    nothing         replicated   replicated
    tp 1

Shapes: b rows, s sequence, R LoRA rank, and a layer's [out, in] weight; lower case is this rank's
share. Source: LoRA (Hu et al. 2021); names of parameters and settings are those of peft.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minitrain.collectives import copy_to
from minitrain.kernels import linear
from minitrain.mesh import Axis, Mesh, ShardSpec
from minitrain.model import CausalLM, exact_dtype
from minitrain.tensor_parallel import (
    ColumnParallelLinear,
    ReplicatedHeadsLinear,
    RowParallelLinear,
    first_of_rank,
    leave_region,
    share,
)

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoRAConfig:
    """What adapters look like.

    rank      R, at least 1 and at most the smaller side of every adapted matrix
    alpha     the update is scaled by alpha / rank
    dropout   share of an adapter's inputs set to zero in training, from 0 to below 1
    targets   last names of linear layers in the blocks (q_proj), or whole names of some of them
              (model.layers.0.self_attn.q_proj)
    rslora    scale by alpha / sqrt(rank) instead, so that the update does not shrink with the rank
              (rank-stabilised LoRA, Kalajdzievski 2023)
    seed      fixes A's start, on every layout alike
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = LORA_TARGETS
    rslora: bool = False
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class LoRALinear(nn.Module):
    """A frozen linear layer, plain or parallel, and its adapter; weight and bias keep their names.

    layer     the layer whose place this one takes
    lora_A, lora_B   this rank's share of the factors, [R, in] and [out, R]

    Communicates   forward, row parallel: all-reduce (or with split activations reduce-scatter) over
                   tp of y_bsO and h_bsR together. Backward, column parallel and replicated heads:
                   all-reduce of A's gradient, [R, in]; the other choice, A's output, has a row for
                   every token, which is more as a rule. Backward, replicated heads and split
                   activations: of B's gradient
    """

    def __init__(self, layer: nn.Module, lora_A: Tensor, lora_B: Tensor, config: LoRAConfig):
        super().__init__()
        self.layer = (layer,)  # in a tuple it is no child, which would rename its parameters
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_A, self.lora_B = nn.Parameter(lora_A), nn.Parameter(lora_B)
        self.scale, self.dropout = config.scale, config.dropout
        self.tp = getattr(layer, "tp", Axis("tp"))
        self.A_is_copied = False  # the caller sums A's gradient over tp (memory.TiledMLP)

    def forward(self, x_bsi: Tensor) -> Tensor:
        layer, B = self.layer[0], self.lora_B
        if isinstance(layer, RowParallelLinear):
            return self.leave(self.partial(x_bsi))
        y_bso = layer(x_bsi)
        # Each rank's outputs are others: their gradients are parts of A's, summed by copy_to.
        if isinstance(layer, ColumnParallelLinear) and not layer.input_is_copied:
            x_bsi = copy_to(x_bsi, self.tp)
        A = self.lora_A if self.A_is_copied else copy_to(self.lora_A, self.tp)
        B = layer.pick(B) if isinstance(layer, ReplicatedHeadsLinear) else B
        return y_bso + linear(self._scaled(x_bsi, A), B)

    def partial(self, x_bsi: Tensor) -> Tensor:
        """This rank's part of y and of h, side by side: [b, s, O + R] (row parallel, or plain)."""
        return torch.cat([linear(x_bsi, self.weight), self._scaled(x_bsi, self.lora_A)], -1)

    def leave(self, partial: Tensor) -> Tensor:
        """Add the ranks' parts up; only then B, so that its gradient is complete."""
        split_sequence = getattr(self.layer[0], "split_sequence", False)
        y_bsO, h_bsR = leave_region(partial, self.tp, split_sequence).split(
            [self.weight.shape[0], self.lora_A.shape[0]], -1
        )
        B = copy_to(self.lora_B, self.tp) if split_sequence else self.lora_B
        y_bsO = y_bsO + linear(h_bsR, B)
        return y_bsO if self.bias is None else y_bsO + self.bias

    def _scaled(self, x_bsi: Tensor, A: Tensor) -> Tensor:
        if not (self.dropout and self.training):
            return linear(x_bsi, A) * self.scale
        return linear(self._drop(x_bsi), A) * (self.scale / (1 - self.dropout))

    def _drop(self, x_bsi: Tensor) -> Tensor:
        """Set some inputs to zero, the same ones on every tp: a mask is drawn for the whole width.

        From the device's generator: seed_dropout sets it, activation checkpointing restores it.
        """
        parts = self.tp.size if isinstance(self.layer[0], RowParallelLinear) else 1
        *rows, width = x_bsi.shape
        keep = torch.rand(*rows, parts, width, device=x_bsi.device) >= self.dropout
        rank = first_of_rank(self.tp if parts > 1 else Axis("tp"), 1, x_bsi.device)
        return x_bsi.masked_fill(~keep.index_select(-2, rank).squeeze(-2), 0.0)


def add_lora(model: CausalLM, config: LoRAConfig, mesh: Mesh, shard_spec: ShardSpec) -> None:
    """Give chosen layers of a sharded model adapters, in place, and freeze everything else.

    model        after shard_model, weights filled in; adapters get their device and dtype
    shard_spec   gets the adapters' names, dims and whole shapes

    Raises       ValueError of adapted_layers; when the model has adapters already
    """
    shapes = adapted_layers(shard_spec.shapes, config)
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        raise ValueError("a model can have one adapter, but has one. Merge it first: merge_lora.")
    model.requires_grad_(False)
    for name, (num_out, num_in) in shapes.items():
        layer = model.get_submodule(name)
        row, column = (isinstance(layer, c) for c in (RowParallelLinear, ColumnParallelLinear))
        A = _random_factor(f"{name}.lora_A", config, num_in)
        A = share(A, mesh.tp, 1) if row else A
        B = layer.weight.new_zeros(layer.weight.shape[0], config.rank)
        model.set_submodule(name, LoRALinear(layer, A.to(layer.weight), B, config))
        shard_spec[f"{name}.lora_A"] = 1 if row else None
        shard_spec[f"{name}.lora_B"] = 0 if column else None
        shard_spec.shapes[f"{name}.lora_A"] = (config.rank, num_in)
        shard_spec.shapes[f"{name}.lora_B"] = (num_out, config.rank)


def adapted_layers(
    shapes: dict[str, tuple[int, ...]], config: LoRAConfig
) -> dict[str, tuple[int, int]]:
    """Find the layers that get adapters: name -> [out, in]. Needs no weights, so can come first.

    shapes    parameter name -> whole shape of the model

    Raises    ValueError when a target is no linear layer of a block (the head and the embedding are
              not), or the rank is more than a matrix has
    """
    linears = {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if name.startswith("model.layers.") and name.endswith(".weight") and len(shape) == 2
    }
    chosen = {}
    for target in config.targets:
        found = {n: s for n, s in linears.items() if n == target or n.endswith(f".{target}")}
        if not found:
            raise ValueError(_no_target(target, linears))
        chosen |= found
    if config.rank < 1 or not chosen:
        raise ValueError(
            f"LoRA needs a rank of at least 1 and at least one target, but has rank {config.rank} "
            f"and {len(config.targets)} targets. For full fine-tuning leave LoRA out."
        )
    for name, shape in chosen.items():
        if config.rank > min(shape):
            raise ValueError(
                f"a LoRA rank must be at most the smaller side of the matrix: rank {config.rank}, "
                f"but {name}.weight is {list(shape)}. Pass a rank of at most {min(shape)}, or "
                "leave that layer out of the targets."
            )
    return {name: chosen[name] for name in linears if name in chosen}


@torch.no_grad()
def merge_lora(model: CausalLM, shard_spec: ShardSpec | None = None) -> None:
    """Add the adapters to the weights, W + scale * B A, and take them out: a plain model again.

    The sum is made in at least float32 and rounded once. A tied embedding is never touched: no
    adapter can be on the head (see adapted_layers). Every parameter is trainable again.

    shard_spec   the adapters' names are taken out of it
    Raises       ValueError when there is no adapter
    """
    adapters = {n: m for n, m in model.named_modules() if isinstance(m, LoRALinear)}
    if not adapters:
        raise ValueError("a model must have an adapter to merge, but has none. See add_lora.")
    for name, module in adapters.items():
        layer = module.layer[0]
        exact = exact_dtype(layer.weight.dtype)
        update = module.lora_B.to(exact) @ module.lora_A.to(exact)
        layer.weight.copy_(layer.weight.to(exact) + module.scale * update)
        model.set_submodule(name, layer)
        for factor in ("lora_A", "lora_B") if shard_spec else ():
            del shard_spec[f"{name}.{factor}"], shard_spec.shapes[f"{name}.{factor}"]
    model.requires_grad_(True)


def base_spec(shard_spec: ShardSpec) -> ShardSpec:
    """The spec without the adapters."""
    base = {n: dim for n, dim in shard_spec.items() if not n.endswith((".lora_A", ".lora_B"))}
    return ShardSpec(base, {name: shard_spec.shapes[name] for name in base})


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """This rank's share of all adapters: name -> parameter."""
    named = model.named_parameters()
    return {name: p for name, p in named if name.endswith((".lora_A", ".lora_B"))}


def seed_dropout(seed: int, step: int, mesh: Mesh) -> None:
    """Make a step's masks a function of seed and step: equal along tp, others along dp and sp."""
    mesh.device.seed(zlib.crc32(f"{seed} {step} {mesh.dp_sp.rank}".encode()))


def _random_factor(name: str, config: LoRAConfig, num_in: int) -> Tensor:
    """A's start, uniform within 1 / sqrt(in), from seed and name alone: alike on every layout."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{config.seed} {name}".encode()))
    bound = num_in**-0.5
    return torch.empty(config.rank, num_in).uniform_(-bound, bound, generator=generator)


def _no_target(target: str, linears: dict[str, tuple[int, ...]]) -> str:
    last = target.rpartition(".")[2]
    if last in ("lm_head", "embed_tokens"):
        return (
            f"an adapter can be on linear layers of the blocks, but not on {last}: a tied head and "
            "embedding are one matrix, so that an update of one would change the other, and the "
            f"loss multiplies by the head's matrix itself. Take {last} out of the targets."
        )
    names = sorted({name.rpartition(".")[2] for name in linears})
    return (
        f"LoRA targets must be names of linear layers, but {target!r} is none. This model has "
        f"{', '.join(names)}."
    )
