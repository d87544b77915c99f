"""The judge: a dense Llama and a whole training step in float64, in plain torch. It shares no code
with minitrain, knows no ranks, no micro-batches, no padding and no masks between documents: one
document at a time goes through the model by itself.

Shapes: S tokens of one document, D model, H query heads, K head size, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

IGNORE = -100


class Document(NamedTuple):
    """ids and labels of one document, the labels not shifted, -100 = no loss."""

    ids: list[int]
    labels: list[int]


class Result(NamedTuple):
    """What reference_steps found: an entry for each step; grads are those before clipping."""

    losses: list[float]
    norms: list[float]
    grads: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def documents_of(batch) -> list[Document]:
    """The documents of a global batch.

    batch     a list of {"input_ids", "labels"}, or an object with input_ids [B, S] and, if it has
              them, labels [B, S] and position_ids [B, S], 0 where a document begins
    """
    if isinstance(batch, list):
        return [Document(row["input_ids"], row["labels"]) for row in batch]
    ids = torch.as_tensor(batch.input_ids).tolist()
    labels, positions = getattr(batch, "labels", None), getattr(batch, "position_ids", None)
    labels = ids if labels is None else torch.as_tensor(labels).tolist()
    whole = [list(range(len(row))) for row in ids]
    positions = whole if positions is None else torch.as_tensor(positions).tolist()
    found = []
    for row_ids, row_labels, row_positions in zip(ids, labels, positions):
        starts = [t for t, position in enumerate(row_positions) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(row_ids)]):
            found.append(Document(row_ids[start:end], row_labels[start:end]))
    return found


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def frequencies(config) -> Tensor:
    """Radians per position of each pair of a head's elements, one by one, as the Llama 3.1 paper's
    code has it.
    """
    found, scaling = [], config.rope_scaling
    for pair in range(config.head_dim // 2):
        f = config.rope_theta ** (-2 * pair / config.head_dim)
        if scaling and scaling["type"] == "linear":
            f /= scaling["factor"]
        elif scaling:
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            original = scaling["original_max_position"]
            wave = 2 * math.pi / f
            if wave > original / low:
                f /= scaling["factor"]
            elif wave > original / high:
                blend = (original / wave - low) / (high - low)
                f = (1 - blend) * f / scaling["factor"] + blend * f
        found.append(f)
    return torch.tensor(found, dtype=torch.float64)


def rotated(x_HSK: Tensor, config) -> Tensor:
    """Rotary embedding as a complex product: element i is the real, i + K/2 the imaginary part."""
    angle = torch.arange(x_HSK.shape[1], dtype=torch.float64)[:, None] * frequencies(config)
    real, imaginary = x_HSK.chunk(2, -1)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def reference_model(config, weights: dict[str, Tensor]):
    """A function of one document's ids [S] that returns its logits [S, V].

    config    anything with the fields of minitrain's ModelConfig
    weights   Hugging Face name -> whole tensor; converted to float64; without lm_head.weight the
              head is tied to the embedding
    """
    p = {name: w if w.dtype == torch.float64 else w.double() for name, w in weights.items()}
    eps = config.norm_eps

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ p[f"{name}.weight"].T
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    def attention(x_SD: Tensor, layer: int) -> Tensor:
        at, length = f"model.layers.{layer}.self_attn", x_SD.shape[0]
        q, k, v = (
            linear(x_SD, f"{at}.{c}_proj").view(length, -1, config.head_dim).transpose(0, 1)
            for c in "qkv"
        )
        if config.qk_norm:
            q = normed(q, p[f"{at}.q_norm.weight"], eps)
            k = normed(k, p[f"{at}.k_norm.weight"], eps)
        if config.rope_layers is None or config.rope_layers[layer]:
            q, k = rotated(q, config), rotated(k, config)
        group = config.num_heads // config.num_kv_heads
        scale = config.attention_scale or 1 / math.sqrt(config.head_dim)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        heads = []
        for head in range(config.num_heads):
            scores = (q[head] @ k[head // group].T * scale).masked_fill(future, -math.inf)
            heads.append(scores.softmax(-1) @ v[head // group])
        return linear(torch.cat(heads, -1), f"{at}.o_proj")

    def mlp(x_SD: Tensor, layer: int) -> Tensor:
        at = f"model.layers.{layer}.mlp"
        gate = linear(x_SD, f"{at}.gate_proj")
        return linear(gate * gate.sigmoid() * linear(x_SD, f"{at}.up_proj"), f"{at}.down_proj")

    def logits(ids) -> Tensor:
        x = p["model.embed_tokens.weight"][torch.as_tensor(ids)] * config.embedding_multiplier
        for i in range(config.num_layers):
            at = f"model.layers.{i}"
            y = attention(normed(x, p[f"{at}.input_layernorm.weight"], eps), i)
            x = x + config.residual_multiplier * y
            y = mlp(normed(x, p[f"{at}.post_attention_layernorm.weight"], eps), i)
            x = x + config.residual_multiplier * y
        x = normed(x, p["model.norm.weight"], eps) / config.logits_divisor
        return x @ p.get("lm_head.weight", p["model.embed_tokens.weight"]).T

    return logits


def reference_loss(model, documents: list[Document], smoothing: float = 0.0) -> tuple[Tensor, int]:
    """Summed cross-entropy of all labels, position t predicting label t + 1, and their number."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, labels in documents:
        at = [t for t in range(len(ids) - 1) if labels[t + 1] != IGNORE]
        if not at:
            continue
        logp = model(ids)[at].log_softmax(-1)
        picked = logp[range(len(at)), [labels[t + 1] for t in at]]
        total = total - ((1 - smoothing) * picked + smoothing * logp.mean(-1)).sum()
        count += len(at)
    return total, count


def reference_steps(
    weights: dict[str, Tensor],
    config,
    batches: list,
    *,
    lr: float | list[float],
    steps: int | None = None,
    max_norm: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    smoothing: float = 0.0,
) -> Result:
    """Train: loss = sum / number of loss tokens of the batch, clipping as torch's
    clip_grad_norm_, AdamW with decay on matrices only. A batch without a loss token changes
    nothing.

    batches   global batches, see documents_of; used again from the first when there are fewer
    lr        one for all steps, or one for each
    steps     number of steps; default: one for each batch
    """
    p = {name: w.double().clone().requires_grad_() for name, w in weights.items()}
    first = {name: torch.zeros_like(w) for name, w in p.items()}
    second = {name: torch.zeros_like(w) for name, w in p.items()}
    losses, norms, all_grads, updates = [], [], [], 0
    for step in range(len(batches) if steps is None else steps):
        documents = documents_of(batches[step % len(batches)])
        total, count = reference_loss(reference_model(config, p), documents, smoothing)
        if count == 0:
            grads = {name: torch.zeros_like(w) for name, w in p.items()}
        else:
            grads = dict(zip(p, torch.autograd.grad(total / count, list(p.values()))))
        norm = math.sqrt(sum((g * g).sum().item() for g in grads.values()))
        losses.append(total.item() / max(count, 1))
        norms.append(norm)
        all_grads.append(grads)
        if count == 0:
            continue
        updates += 1
        rate = lr[step] if isinstance(lr, list) else lr
        scale = min(1.0, max_norm / (norm + 1e-6))
        with torch.no_grad():
            for name, w in p.items():
                g, m, v = grads[name] * scale, first[name], second[name]
                m.copy_(betas[0] * m + (1 - betas[0]) * g)
                v.copy_(betas[1] * v + (1 - betas[1]) * g * g)
                if w.ndim > 1:
                    w -= rate * weight_decay * w
                corrected = (v / (1 - betas[1] ** updates)).sqrt() + eps
                w -= rate * m / (1 - betas[0] ** updates) / corrected
    return Result(losses, norms, all_grads, {name: w.detach() for name, w in p.items()})
