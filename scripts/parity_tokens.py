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
from parity_reference import IGNORE, MICRO_BATCH, NUM_MICRO, SEQ_LEN, Layout, Step, plain_model
from torch import Tensor

Weights = Callable[[int, int], Tensor]  # of a rank's place on dp and sp: weight of each token


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

    def weightings(self) -> Iterator[tuple[str, Weights]]:
        """Wrong sums over the right losses: each token's weight, up to a factor, on a rank."""
        own, dp, micro, part, valid = self.own, self.dp, self.micro, self.slice, self.valid
        sp = self.layout.sp
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
            yield words, lambda d, s, w=weights: w.double()
        yield "not summed over sp, only over dp", lambda d, s: (valid * (part == s)).double()
        yield "not summed over dp, only over sp", lambda d, s: (valid * (dp == d)).double()
        if sp > 1:
            mine = lambda d, s: valid & (dp == d) & (part == s)  # noqa: E731
        else:
            mine = lambda d, s: valid & (dp == d)  # noqa: E731
        yield "not summed over dp x sp: each rank has only its own", lambda d, s: mine(d, s) * 1.0
        yield (
            "divided by the rank's own number of loss tokens after the sum",
            lambda d, s: valid / mine(d, s).sum().clamp(min=1),
        )

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
