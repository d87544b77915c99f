"""The loss: token counts, and summed cross-entropy, the vocabulary split over tp, tile by tile.

Sums only: the one division, by the number of loss tokens of the whole step, is train_step's.

Shapes: N tokens (rows x sequence), D model, V vocabulary; lower case is this rank's share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minitrain.collectives import all_reduce
from minitrain.data_sharder import IGNORE, Batch
from minitrain.kernels import exact_dtype, product
from minitrain.mesh import Axis
from minitrain.tensor_parallel import first_of_rank

CACHED = 2**20  # logits that a cache holds in float32
SLICE = 8192  # rows of the head


def count_tokens(micro_batches: Sequence[Batch], axis: Axis) -> Tensor:
    """Count the loss tokens of a whole step: all micro-batches, all ranks of the axis (dp_sp).

    Returns        int64 tensor of one element, equal on every rank
    Communicates   all-reduce over axis, 8 bytes
    """
    counts = [(batch.labels != IGNORE).sum() for batch in micro_batches]
    return all_reduce(torch.stack(counts).sum().view(1), axis)


def _loss_and_grad_(
    x_Nv: Tensor, labels_N: Tensor, tp: Axis, ignore: int, vocab_size: int, smoothing: float
) -> Tensor:
    """Return the loss of each token, and turn its logits into their gradient, in place.

    Ignored tokens: exactly zero in both. With p = softmax(x) over the whole vocabulary and
    smoothing e, loss = logsumexp(x) - (1 - e) x[label] - e mean(x) and gradient = p - (1 - e)
    onehot(label) - e / V. Communicates: all-reduces over tp of N maxima and of 3 N sums.
    """
    size, first = x_Nv.shape[1], first_of_rank(tp, x_Nv.shape[1], x_Nv.device)
    exists_v = None
    if size * tp.size > vocab_size:  # padded rows of the head: no probability, no gradient
        exists_v = torch.arange(size, device=x_Nv.device) + first < vocab_size
        x_Nv.masked_fill_(~exists_v, -torch.inf)
    x_Nv.sub_(all_reduce(x_Nv.amax(1), tp, "max")[:, None])
    valid_N = labels_N != ignore
    local_N = labels_N - first
    inside_N = (local_N >= 0) & (local_N < size) & valid_N
    local_N1 = torch.where(inside_N, local_N, 0)[:, None]
    at_label_N = x_Nv.gather(1, local_N1)[:, 0].masked_fill(~inside_N, 0.0)
    sum_x_N = at_label_N
    if smoothing:
        sum_x_N = (x_Nv if exists_v is None else x_Nv.masked_fill(~exists_v, 0.0)).sum(1)
    x_Nv.exp_()
    sums = all_reduce(torch.stack([x_Nv.sum(1), at_label_N, sum_x_N]), tp)
    sum_exp_N, at_label_N, sum_x_N = sums
    loss_N = sum_exp_N.log() - (1 - smoothing) * at_label_N - smoothing / vocab_size * sum_x_N

    x_Nv.mul_((valid_N / sum_exp_N)[:, None])
    x_Nv.scatter_add_(1, local_N1, -(1 - smoothing) * inside_N[:, None].to(x_Nv.dtype))
    if smoothing:
        even_Nv = valid_N[:, None] if exists_v is None else valid_N[:, None] & exists_v
        x_Nv.sub_(smoothing / vocab_size * even_Nv.to(x_Nv.dtype))
    return loss_N.masked_fill(~valid_N, 0.0)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_Nv, labels_N, tp, ignore, vocab_size, smoothing):
        x_Nv = logits_Nv.to(exact_dtype(logits_Nv.dtype), copy=True)
        loss_N = _loss_and_grad_(x_Nv, labels_N, tp, ignore, vocab_size, smoothing)
        ctx.save_for_backward(x_Nv.to(logits_Nv.dtype))
        return loss_N.sum()

    @staticmethod
    def backward(ctx, grad_loss):
        (grad_Nv,) = ctx.saved_tensors
        return (grad_Nv * grad_loss).to(grad_Nv.dtype), *[None] * 5


def cross_entropy_sum(
    logits: Tensor,
    labels: Tensor,
    tp: Axis,
    ignore_index: int = IGNORE,
    *,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Sum the cross-entropy of all tokens that have a label; logits may be split over tp.

    logits         [..., v], any float dtype; computed in at least float32; not changed
    labels         int64 [...], ids of the whole vocabulary, already shifted, or ignore_index
    vocab_size     true size of the vocabulary when the last ranks' logits are padding; None: v * tp

    Returns        scalar in nats, float32 (float64 for float64 logits), equal on every rank of tp;
                   0 without labels
    Communicates   forward: all-reduces over tp of 4 numbers a token
    """
    vocab_size = vocab_size or logits.shape[-1] * tp.size
    flat = logits.reshape(-1, logits.shape[-1])
    return _CrossEntropySum.apply(
        flat, labels.reshape(-1), tp, ignore_index, vocab_size, label_smoothing
    )


class _HeadCrossEntropySum(torch.autograd.Function):
    """Logits exist a tile at a time; the forward pass makes the gradients of hidden and head."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_vD, labels_N, tp, tile, ignore, vocab_size, smoothing):
        N, V = hidden_ND.shape[0], weight_vD.shape[0]
        exact = exact_dtype(hidden_ND.dtype)
        total = torch.zeros((), dtype=exact, device=hidden_ND.device)
        grad_hidden = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        wants_weight, grad_weight = ctx.needs_input_grad[1], None
        if wants_weight and tile < N:
            grad_weight = torch.zeros_like(weight_vD, dtype=exact)
        # Without ranks to wait for, a cpu turns logits into gradients in rows that its cache holds.
        small = tp.size == 1 and hidden_ND.device.type == "cpu"
        logits_nv = hidden_ND.new_empty(min(tile, N), V)  # for all tiles: fresh memory costs time
        for start in range(0, N, tile):
            h, labels = hidden_ND[start : start + tile], labels_N[start : start + tile]
            logits = product(h, weight_vD.T, out=logits_nv[: len(h)])
            rows = max(1, CACHED // V) if small else len(h)
            for part, part_labels in zip(logits.split(rows), labels.split(rows)):
                x = part.to(exact, copy=True)
                loss = _loss_and_grad_(x, part_labels, tp, ignore, vocab_size, smoothing)
                total += loss.sum()
                part.copy_(x)
            if grad_hidden is not None:
                product(logits, weight_vD, out=grad_hidden[start : start + tile])
            if grad_weight is not None:  # in slices: the product is never whole beside the sum
                slices = grad_weight.split(SLICE), logits.split(SLICE, 1)
                for grad_sD, logits_ns in zip(*slices):
                    grad_sD += product(logits_ns.T, h)
            elif wants_weight:  # the only tile: a single product needs no sum
                grad_weight = product(logits.T, h)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight_vD.dtype
        return total

    @staticmethod
    def backward(ctx, grad_loss):
        def scaled(grad):  # and rounded, without a second copy in float32
            rounded = torch.empty_like(grad, dtype=ctx.dtype)
            for part, exact in zip(rounded.split(SLICE), grad.split(SLICE)):
                part.copy_(exact * grad_loss)
            return rounded

        return *(None if g is None else scaled(g) for g in ctx.saved_tensors), *[None] * 6


def head_cross_entropy_sum(
    hidden: Tensor,
    weight_vD: Tensor,
    labels: Tensor,
    tp: Axis,
    ignore_index: int = IGNORE,
    *,
    tile_tokens: int = 0,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """cross_entropy_sum(hidden @ weight.T, labels), with the logits of one tile at a time.

    hidden         [..., D], already inside the head's tensor-parallel region (model.enter)
    weight_vD      the head's matrix, or this rank's rows of it; frozen: its gradient is not made
    tile_tokens    tokens per tile; 0: all at once

    Returns        as cross_entropy_sum; gradients are summed over tiles in float32
    Communicates   forward: all-reduces over tp of 4 numbers a token
    Source         Liger kernel's fused linear cross-entropy (Hsu et al. 2024)
    """
    if not torch.is_grad_enabled():  # which the function cannot see
        hidden, weight_vD = hidden.detach(), weight_vD.detach()
    flat = hidden.reshape(-1, hidden.shape[-1])
    tile = tile_tokens or flat.shape[0]
    vocab_size = vocab_size or weight_vD.shape[0] * tp.size
    return _HeadCrossEntropySum.apply(
        flat, weight_vD, labels.reshape(-1), tp, tile, ignore_index, vocab_size, label_smoothing
    )
