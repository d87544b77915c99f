"""What parity.py compares with: small uneven data, and a few updates on one process in float64.

Shares nothing with the step that is checked: the plain model reads one document at a time,
F.cross_entropy scores it, torch clips and updates.

Shapes: B rows of the global batch, S tokens per row, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from minitrain.model import CausalLM, ModelConfig

IGNORE, SEQ_LEN, MICRO_BATCH, NUM_MICRO = -100, 22, 2, 3
LR, WARMUP, BETAS, EPS, DECAY = 0.01, 3, (0.9, 0.95), 1e-8, 0.1
STEPS = (
    "rows of different lengths",
    "micro-batches, slices and ranks without a loss token",
    "packed rows",
    "no loss token at all",
    "rows of different lengths again",
)


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, and the model and rows that fit them."""

    dp: int = 1
    sp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.sp * self.tp

    @property
    def batch_size(self) -> int:
        return self.dp * MICRO_BATCH * NUM_MICRO

    @property
    def name(self) -> str:
        sizes = {"dp": self.dp, "sp": self.sp, "tp": self.tp}
        return " x ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1) or "one process"

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """A rank's place on dp, sp and tp."""
        return rank // (self.sp * self.tp), rank // self.tp % self.sp, rank % self.tp

    def model_config(self) -> ModelConfig:
        """A Llama of two layers; two kv heads where the layout allows it, a vocabulary that no tp
        divides.
        """
        parts = self.sp * self.tp
        fits = all(2 % n == 0 or n % 2 == 0 for n in (parts, self.tp))
        return ModelConfig(
            vocab_size=53,
            hidden_size=32,
            intermediate_size=math.lcm(24, self.tp),
            num_layers=2,
            num_heads=math.lcm(4, parts),
            num_kv_heads=2 if fits else 1,
            head_dim=8,
        )

    def weights(self) -> dict[str, Tensor]:
        """Whole float64 weights from a seed; norms are not ones, so that every part matters."""
        with torch.device("meta"):
            shapes = {n: p.shape for n, p in CausalLM(self.model_config()).named_parameters()}
        generator = torch.Generator().manual_seed(0)
        drawn = {n: torch.randn(s, generator=generator).double() for n, s in sorted(shapes.items())}
        return {n: 0.2 * w + (1.0 if "norm" in n else 0.0) for n, w in drawn.items()}

    def batches(self) -> list[SimpleNamespace]:
        """The global batch of each of STEPS: input_ids, labels (not shifted), position_ids,
        documents.
        """
        return [self._batch(step) for step in range(len(STEPS))]

    def _batch(self, step: int) -> SimpleNamespace:
        generator = torch.Generator().manual_seed(step)
        shape = (self.batch_size, SEQ_LEN)
        ids = torch.randint(0, 53, shape, generator=generator)
        t_BS, row_B1 = torch.arange(SEQ_LEN).expand(shape), torch.arange(shape[0])[:, None]
        micro_B1 = row_B1 // MICRO_BATCH % NUM_MICRO
        # Every micro-batch has its own number of loss tokens: prompts and ends of different length.
        masked = t_BS < (row_B1 * 5 + step) % 7 + 2 * micro_B1
        masked |= t_BS >= SEQ_LEN - (row_B1 * 3) % 5
        positions, documents = t_BS, None
        if step == 1:
            masked |= (micro_B1 == 1) | (t_BS > SEQ_LEN // 2)
            if self.dp > 1:
                masked |= row_B1 >= shape[0] - shape[0] // self.dp
        if step == 2:
            starts = (t_BS - row_B1) % 9 == 4
            documents = starts.cumsum(1)
            positions = t_BS - torch.where(starts, t_BS, 0).cummax(1).values
        if step == 3:
            masked = torch.ones_like(masked)
        labels = ids.masked_fill(masked, IGNORE)
        return SimpleNamespace(
            input_ids=ids, labels=labels, position_ids=positions, documents=documents
        )


@dataclass
class Step:
    """One update on one process. weights are those after it, state (weights, AdamW's) before it.

    grads    of loss_sum / loss_tokens, before clipping; scale is what clipping multiplies them with
    """

    state: tuple[dict, dict | None]
    loss: float
    loss_tokens: int
    grad_norm: float
    lr: float
    grads: dict[str, Tensor]
    scale: float
    weights: dict[str, Tensor]


def plain_model(config: ModelConfig, weights: dict[str, Tensor]) -> CausalLM:
    """The plain model in float64 with a copy of these weights."""
    model = CausalLM(config).double()
    model.load_state_dict({name: w.clone() for name, w in weights.items()})
    return model


def summed_loss(model: CausalLM, rows: SimpleNamespace) -> tuple[Tensor, int]:
    """Cross-entropy summed over all labels, a document at a time, and their number."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, labels, positions in zip(rows.input_ids, rows.labels, rows.position_ids):
        starts = [t for t, position in enumerate(positions.tolist()) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(ids)]):
            targets = labels[start + 1 : end]
            if (targets == IGNORE).all():
                continue
            logits = model(ids[None, start:end], torch.arange(end - start)[None])[0, :-1]
            total = total + F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
            count += int((targets != IGNORE).sum())
    return total, count


def adamw_update(
    config: ModelConfig, state: tuple, grads: dict[str, Tensor], lr: float, variant: str = ""
) -> tuple[dict, dict]:
    """Weights, and AdamW's state, after one update from a state; a variant makes a mistake on
    purpose: "all" or "none" are decayed, "L2" adds the decay to the gradient.
    """
    weights, optimizer_state = state
    model = plain_model(config, weights)
    params = dict(model.named_parameters())
    matrices = [p for p in params.values() if p.ndim > 1]
    others = [p for p in params.values() if p.ndim == 1]
    decay = 0.0 if variant in ("none", "L2") else DECAY
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": others, "weight_decay": decay if variant == "all" else 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPS, foreach=False)
    if optimizer_state:
        saved = {**optimizer.state_dict(), "state": optimizer_state}
        optimizer.load_state_dict(saved)
    for name, p in params.items():
        p.grad = grads[name] + (DECAY * p.detach() if variant == "L2" and p.ndim > 1 else 0)
    optimizer.step()
    return {n: p.detach() for n, p in params.items()}, optimizer.state_dict()["state"]


@lru_cache
def reference_steps(layout: Layout, max_norm: float) -> list[Step]:
    """All updates on one process in float64; a step without a loss token changes nothing."""
    config, state = layout.model_config(), (layout.weights(), None)
    steps, updates = [], 0
    for rows in layout.batches():
        model = plain_model(config, state[0])
        loss_sum, count = summed_loss(model, rows)
        lr, loss, norm, scale = LR * min(1.0, (updates + 1) / WARMUP), 0.0, 0.0, 1.0
        grads = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        after = state
        if count:
            (loss_sum / count).backward()
            loss = (loss_sum / count).item()
            grads = {n: p.grad.clone() for n, p in model.named_parameters()}
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
            scale = min(1.0, max_norm / (norm + 1e-6))
            clipped = {n: p.grad for n, p in model.named_parameters()}
            after, updates = adamw_update(config, state, clipped, lr), updates + 1
        steps.append(Step(state, loss, count, norm, lr, grads, scale, after[0]))
        state = after
    return steps
