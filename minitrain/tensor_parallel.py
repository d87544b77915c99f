"""Layers that hold one rank's share of a weight and give the same output as the whole layer.

Shapes: B rows, S sequence, D model, V vocabulary, and a layer's [out, in] weight; lower case is
this rank's share. Source: Megatron-LM (Shoeybi 2019); split activations: Korthikanti 2022.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.collectives import all_gather, copy_to, reduce_from, reduce_scatter
from minitrain.kernels import linear
from minitrain.mesh import Axis
from minitrain.model import RMSNorm, rms_norm


def share(whole: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's slice of a tensor along dim, filled up with zeros where dim does not divide."""
    size = -(-whole.shape[dim] // axis.size)
    start = min(axis.rank * size, whole.shape[dim])
    part = whole.narrow(dim, start, min(size, whole.shape[dim] - start))
    return F.pad(part, [0, 0] * (whole.ndim - 1 - dim) + [0, size - part.shape[dim]])  # a copy


def first_of_rank(axis: Axis, size: int, device: torch.device) -> Tensor:
    """axis.rank * size as a tensor: a Python number would give each rank another compiled graph."""
    return torch.tensor([axis.rank * size]).to(device)


def parameter(whole: Tensor | None, axis: Axis, dim: int | None) -> nn.Parameter | None:
    """This rank's share as a parameter; dim None: all of it. None stays None (no bias)."""
    if whole is None:
        return None
    whole = whole.detach()
    return nn.Parameter(whole.clone() if dim is None else share(whole, axis, dim))


class ColumnParallelLinear(nn.Module):
    """A linear layer whose outputs are split over tp: y_bso = x_bsI @ W_oI.T + b_o.

    linear            the whole layer; its rows are padded with zeros when tp does not divide them
    input_is_copied   the caller has already passed x through copy_to (one for q, k and v together)

    Communicates      backward: all-reduce of x's gradient over tp, unless input_is_copied
    """

    def __init__(self, linear: nn.Linear, tp: Axis, input_is_copied: bool = False):
        super().__init__()
        self.weight, self.bias = parameter(linear.weight, tp, 0), parameter(linear.bias, tp, 0)
        self.tp, self.input_is_copied = tp, input_is_copied

    def forward(self, x_bsI: Tensor) -> Tensor:
        x_bsI = x_bsI if self.input_is_copied else copy_to(x_bsI, self.tp)
        return linear(x_bsI, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer whose inputs are split over tp: y_bsO = sum over tp of x_bsi @ W_Oi.T, + b_O.

    split_sequence    return this rank's slice of the sequence (dim 1) instead of the whole

    Communicates      forward: all-reduce (or reduce-scatter) of y over tp
    """

    def __init__(self, linear: nn.Linear, tp: Axis, split_sequence: bool = False):
        super().__init__()
        self.weight, self.bias = parameter(linear.weight, tp, 1), parameter(linear.bias, tp, None)
        self.tp, self.split_sequence = tp, split_sequence

    def forward(self, x_bsi: Tensor) -> Tensor:
        return self.leave(self.partial(x_bsi))

    def partial(self, x_bsi: Tensor) -> Tensor:
        """This rank's part of the sum; needs no communication."""
        return linear(x_bsi, self.weight)

    def leave(self, partial_bsO: Tensor) -> Tensor:
        """Add the ranks' parts up, and the bias."""
        y_bsO = leave_region(partial_bsO, self.tp, self.split_sequence)
        if self.bias is None:
            return y_bsO
        return y_bsO + (copy_to(self.bias, self.tp) if self.split_sequence else self.bias)


class ReplicatedHeadsLinear(nn.Module):
    """The k or v projection with fewer kv heads than tp ranks: each rank holds all, computes one.

    Rank t's query heads all use kv head t // (tp / heads). Replicas' gradients are summed.

    Communicates   backward: all-reduce of the weight's gradient over tp
    """

    def __init__(self, linear: nn.Linear, tp: Axis, num_heads: int):
        super().__init__()
        self.weight, self.bias = (parameter(w, tp, None) for w in (linear.weight, linear.bias))
        self.tp, self.num_heads = tp, num_heads

    def pick(self, whole: Tensor) -> Tensor:
        """The rows of this rank's head; the gradient is that of all heads, summed over tp."""
        head = first_of_rank(self.tp, 1, whole.device) * self.num_heads // self.tp.size
        heads = copy_to(whole, self.tp).unflatten(0, (self.num_heads, -1))
        return heads.index_select(0, head)[0]

    def forward(self, x_bsD: Tensor) -> Tensor:
        bias = None if self.bias is None else self.pick(self.bias)
        return linear(x_bsD, self.pick(self.weight), bias)


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are split over tp: each rank looks up its ids, the sum is the whole.

    split_sequence   return this rank's slice of the sequence (dim 1) instead of the whole

    Communicates     forward: all-reduce (or reduce-scatter) of h_bsD over tp
    """

    def __init__(self, embedding: nn.Embedding, tp: Axis, split_sequence: bool = False):
        super().__init__()
        self.weight = parameter(embedding.weight, tp, 0)
        self.tp, self.split_sequence = tp, split_sequence

    def forward(self, ids_bs: Tensor) -> Tensor:
        local_bs = ids_bs - first_of_rank(self.tp, self.weight.shape[0], ids_bs.device)
        inside_bs = (local_bs >= 0) & (local_bs < self.weight.shape[0])
        h_bsD = F.embedding(torch.where(inside_bs, local_bs, 0), self.weight)
        h_bsD = h_bsD * inside_bs[..., None].to(h_bsD.dtype)
        return leave_region(h_bsD, self.tp, self.split_sequence)


class PartialGradientNorm(RMSNorm):
    """An RMS norm that sees only this rank's heads or positions.

    Communicates   backward: all-reduce of the weight's gradient over tp
    """

    def __init__(self, norm: RMSNorm, tp: Axis):
        nn.Module.__init__(self)
        self.weight, self.eps, self.tp = parameter(norm.weight, tp, None), norm.eps, tp

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, copy_to(self.weight, self.tp), self.eps)


class EnterRegion(nn.Module):
    """The input of a tensor-parallel region: all of x on every rank, gradients summed over tp.

    Communicates   backward: all-reduce over tp; with split_sequence all-gather forward,
                   reduce-scatter backward
    """

    def __init__(self, tp: Axis, split_sequence: bool = False):
        super().__init__()
        self.tp, self.split_sequence = tp, split_sequence

    def forward(self, x_bsD: Tensor) -> Tensor:
        return all_gather(x_bsD, self.tp, 1) if self.split_sequence else copy_to(x_bsD, self.tp)


def leave_region(partial_bsD: Tensor, tp: Axis, split_sequence: bool) -> Tensor:
    """Sum the ranks' parts; keep the whole, or this rank's slice of the sequence."""
    return reduce_scatter(partial_bsD, tp, 1) if split_sequence else reduce_from(partial_bsD, tp)
