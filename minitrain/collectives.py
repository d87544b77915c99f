"""Differentiable communication along one axis of the mesh.

Each function is the identity on an axis of size 1. The pairs, as Megatron-LM calls them (Shoeybi et
al. 2019, section 3):

    function         forward          backward
    copy_to          identity         all-reduce (sum)
    reduce_from      all-reduce       identity
    all_gather       all-gather       reduce-scatter
    reduce_scatter   reduce-scatter   all-gather
    all_to_all       all-to-all       all-to-all back

Own autograd functions, because torch's differentiable ones fail on groups without global rank 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minitrain.mesh import Axis

SUM = ("all_reduce", "sum")


class _Pair(torch.autograd.Function):
    """there and back: the name of the group's method and its arguments; None: the identity."""

    @staticmethod
    def forward(ctx, x, group, there, back):
        ctx.group, ctx.back = group, back
        if there is None:
            # torch.compile makes a view that leaves the graph anew outside, without this backward.
            return x.clone() if torch.compiler.is_compiling() else x.view_as(x)
        return _call(group, there, x)

    @staticmethod
    def backward(ctx, grad):
        return _call(ctx.group, ctx.back, grad) if ctx.back else grad, None, None, None


def _call(group, method: tuple, x: Tensor) -> Tensor:
    name, *arguments = method
    return getattr(group, name)(x, *arguments)


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Reduce a tensor over the axis; not differentiable: for counts, norms and metrics.

    op             "sum", "max" or "min"

    Returns        a tensor without gradient, equal on every rank of the axis
    Communicates   all-reduce over axis, x's bytes
    """
    x = x.detach()
    return x if axis.size == 1 else axis.group.all_reduce(x, op)


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Enter a region where each rank computes with its own share: sums x's gradients over the axis.

    Returns        x
    Communicates   backward only: all-reduce over axis, x's bytes
    Source         Megatron-LM's f
    """
    return x if axis.size == 1 else _Pair.apply(x, axis.group, None, SUM)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Leave a region where each rank computed a part of the sum: add the parts up.

    Returns        the sum, equal on every rank of the axis
    Communicates   forward only: all-reduce over axis, x's bytes
    Source         Megatron-LM's g
    """
    return x if axis.size == 1 else _Pair.apply(x, axis.group, SUM, None)


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Join the ranks' slices along dim, in the order of the axis; sum and slice the gradient.

    Communicates   forward all-gather, backward reduce-scatter over axis, each of the whole's bytes
    """
    there, back = ("all_gather", dim), ("reduce_scatter", dim)
    return x if axis.size == 1 else _Pair.apply(x, axis.group, there, back)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum over the axis, keep this rank's slice along dim, a multiple of the axis in size.

    Communicates   forward reduce-scatter, backward all-gather over axis, each of the whole's bytes
    """
    there, back = ("reduce_scatter", dim), ("all_gather", dim)
    return x if axis.size == 1 else _Pair.apply(x, axis.group, there, back)


def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Cut x along split_dim, send part i to rank i, and join what arrives along concat_dim.

    Communicates   forward and backward: all-to-all over axis, x's bytes each
    """
    there, back = ("all_to_all", split_dim, concat_dim), ("all_to_all", concat_dim, split_dim)
    return x if axis.size == 1 else _Pair.apply(x, axis.group, there, back)
