"""The tokens of a global batch with the mistakes that can be made with them, for
parity_mistakes.py.

A wrong sum is the right losses with other weights than 1 / loss tokens: means of means, parts left
out, ranks not summed. Wrong labels, positions or documents give other losses.

Shapes: B rows of the global batch, S tokens per row, padded to the slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from parity_reference import (
    IGNORE,
    LR,
    MICRO_BATCH,
    NUM_MICRO,
    SEQ_LEN,
    WARMUP,
    Layout,
    Step,
    plain_model,
)
from parity_run import Seen, Variant, cut
from torch import Tensor

MATCH = 1e-7  # relative; a coincidence is far less likely than rounding


class Tokens:
    """The tokens of one global batch: where each is computed, and its loss in the plain model."""

    def __init__(self, layout: Layout, step: Step, rows):
        self.layout, self.rows = layout, rows
        self.model = plain_model(layout.model_config(), step.state[0])
        pad = -rows.input_ids.shape[1] % (layout.sp * layout.tp)
        self.ids = F.pad(rows.input_ids, (0, pad))
        self.unshifted = F.pad(rows.labels, (0, pad), value=IGNORE)
        self.positions = F.pad(rows.position_ids, (0, pad))
        packed = rows.documents is not None
        self.documents = F.pad(rows.documents, (0, pad), value=2**20) if packed else None
        self.t = torch.arange(self.ids.shape[1]).expand_as(self.ids)
        self.row = torch.arange(self.ids.shape[0])[:, None].expand_as(self.ids)
        self.length = self.ids.shape[1] // layout.sp
        self.slice = self.t // self.length
        self.dp = self.row // (self.ids.shape[0] // layout.dp)
        self.micro = self.row // MICRO_BATCH % NUM_MICRO
        self.labels = self.shift(self.unshifted)
        self.valid = self.labels != IGNORE
        self.loss = self.losses(self.labels)

    def shift(self, labels: Tensor, ends: Tensor | None = None) -> Tensor:
        """Labels one position earlier, none across a document's end or another border."""
        last = F.pad(self.positions[:, 1:] == 0, (0, 1), value=True) if ends is None else ends
        return F.pad(labels[:, 1:], (0, 1), value=IGNORE).masked_fill(last, IGNORE)

    def losses(self, labels: Tensor, positions=None, documents=None) -> Tensor:
        """Loss of each token [B, S], with a graph to the parameters; 0 without a label."""
        positions = self.positions if positions is None else positions
        logits = self.model(
            self.ids, positions, self.documents if documents is None else documents[0]
        )
        options = {"ignore_index": IGNORE, "reduction": "none"}
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options).view_as(labels)

    def own(self, *places: Tensor) -> Tensor:
        """1 / the number of loss tokens that share these places, 0 where there is no label."""
        key = torch.zeros_like(self.t)
        for place in places:
            key = key * (int(place.max()) + 1) + place
        counts = key[self.valid].bincount(minlength=int(key.max()) + 1)
        return self.valid / counts[key].clamp(min=1).double()

    def grads(self, loss: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Gradient of the weighted sum of losses."""
        params = dict(self.model.named_parameters())
        total = (loss * weights).sum()
        return dict(zip(params, torch.autograd.grad(total, params.values(), retain_graph=True)))

    def weightings(self) -> Iterator[tuple[str, Tensor]]:
        """Wrong sums over the right losses: each token's weight, up to a factor."""
        own, dp, micro, part, valid = self.own, self.dp, self.micro, self.slice, self.valid
        for words, weights in (
            ("mean of means: every micro-batch is divided by its own loss tokens on its rank",
             own(dp, micro, part)),
            ("mean of means: every rank divides by its own loss tokens, not the global number",
             own(dp, part)),
            ("mean of means: every micro-batch is divided by its own loss tokens", own(micro)),
            ("the number of loss tokens is not summed over dp", own(dp)),
            ("the number of loss tokens is not summed over sp", own(part)),
            ("mean of means: every row is divided by its own loss tokens", own(self.row)),
            ("the last micro-batch is left out", valid * (micro < NUM_MICRO - 1)),
            ("the first micro-batch is left out", valid * (micro > 0)),
            ("only the last micro-batch counts: its gradients replace those before",
             valid * (micro == NUM_MICRO - 1)),
            ("labels are shifted after slicing: each sp slice loses its last label",
             valid * ((self.t + 1) % self.length != 0)),
        ):  # fmt: skip
            yield words, weights.double()

    def partial_sums(self) -> Iterator[tuple[str, Callable[[int], Tensor], bool]]:
        """Sums that miss ranks: the rows of a dp rank that are in it, and whether it is one
        slice's.
        """
        mine = lambda d: self.valid & (self.dp == d)  # noqa: E731
        if self.layout.sp > 1:
            yield "not summed over sp, only over dp", lambda d: self.valid, True
        yield "not summed over dp, only over sp", mine, False
        yield "not summed over dp x sp: each rank has only its own", mine, True

    def rank_grads(self, weights: Tensor, s: int) -> dict[str, Tensor]:
        """The part of a weighted sum's gradient that arises on slice s, whose positions alone pass
        through its parameters; losses of later slices are in it.
        """
        within, busy = self.slice[0] == s, []

        def hook(module, args, out):
            if busy:
                return None
            busy.append(1)
            fixed = {name: p.detach() for name, p in module.named_parameters()}
            frozen = torch.func.functional_call(module, fixed, args)
            busy.clear()
            return torch.where(within[:, None], out, frozen)

        leaves = [
            m for m in self.model.modules() if "weight" in dict(m.named_parameters(recurse=False))
        ]
        hooks = [leaf.register_forward_hook(hook) for leaf in leaves]
        grads = self.grads(self.losses(self.labels), weights)
        for handle in hooks:
            handle.remove()
        return grads

    def other_losses(self) -> Iterator[tuple[str, Tensor]]:
        """Losses with wrong labels, positions or documents."""
        sliced = (self.t + 1) % self.length == 0
        every_token = F.pad(self.rows.input_ids, (0, self.ids.shape[1] - SEQ_LEN), value=IGNORE)
        for words, labels in (
            ("labels are not shifted: each token predicts itself", self.unshifted),
            ("labels are shifted twice: each token predicts the one after the next",
             self.shift(self.labels)),
            ("labels are shifted twice: each token predicts the one after the next",
             self.shift(self.labels, sliced)),
            ("masked tokens are trained on: labels of prompts and padding must be -100",
             self.shift(every_token)),
        ):  # fmt: skip
            yield words, self.losses(labels)
        if self.layout.sp > 1:
            words = "positions restart on each sp slice: they must count through the whole row"
            yield words, self.losses(self.labels, self.t % self.length)
            apart = self.slice + (0 if self.documents is None else self.documents * 64)
            words = "attention stays within each sp slice: heads and sequence are not exchanged"
            yield words, self.losses(self.labels, documents=[apart])
        if self.documents is not None:
            words = "documents of a packed row see each other: pass batch.documents to the model"
            yield words, self.losses(self.labels, documents=[None])
            words = "positions run on through a packed row: they must restart with each document"
            yield words, self.losses(self.labels, self.t)


class Finding:
    """One wrong step of one variant, and what explains it."""

    def __init__(self, layout, dims, variant: Variant, steps: list[Step], index: int, seen):
        self.layout, self.dims, self.variant, self.index = layout, dims, variant, index
        self.step, self.before = steps[index], steps[:index]
        self.seen: list[Seen] = [rank[index] for rank in seen]
        self.tokens = Tokens(layout, self.step, layout.batches()[index])

    def vector(self, grads_of: Callable[[int, int], dict[str, Tensor]]) -> Tensor:
        """What all ranks would hold, joined: shares of the whole gradient of each (dp, sp)."""
        known, parts = {}, []
        for rank in range(self.layout.world):
            d, s, _ = self.layout.coordinates(rank)
            known[d, s] = known.get((d, s)) or grads_of(d, s)
            parts += self.shares(rank, known[d, s]).values()
        return torch.cat([part.reshape(-1) for part in parts])

    def shares(self, rank: int, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """A rank's share of a whole gradient, a piece when the optimizer is sharded."""
        sharded = self.variant.shard_optimizer
        return {n: cut(g, self.dims[n], self.layout, rank, sharded) for n, g in grads.items()}

    def places(self) -> list[tuple[int, int]]:
        """Each rank's place on dp and sp."""
        return [self.layout.coordinates(rank)[:2] for rank in range(self.layout.world)]

    def rank_grads(self, d: int, s: int) -> dict[str, Tensor]:
        """The right gradient that a rank holds before the sum over dp x sp."""
        rows = self.tokens.valid & (self.tokens.dp == d)
        return self.tokens.rank_grads(rows.double() / self.step.loss_tokens, s)

    def lr_of(self, offset: int) -> float:
        """The right rate of an update before or after this one."""
        return LR * min(1.0, max(0.0, self.step.lr / LR * WARMUP + offset) / WARMUP)

    def metric(self, name: str) -> Tensor:
        """A metric of all ranks."""
        return torch.tensor([seen.metrics[name] for seen in self.seen], dtype=torch.float64)


def near(got: Tensor, want: Tensor | float, tolerance: float = MATCH) -> bool:
    """Equal up to rounding, relative to the largest entry."""
    want = torch.as_tensor(want, dtype=torch.float64).expand_as(got)
    return bool((got - want).abs().max() <= tolerance * want.abs().max())


def parallel(got: Tensor, want: Tensor) -> bool:
    """Equal up to rounding and one factor."""
    return bool(want.any()) and near(got, want * (got @ want / (want @ want)))
