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


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        # torch.compile makes a view that leaves the graph anew outside, without this backward.
        return x.clone() if torch.compiler.is_compiling() else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.group.all_reduce(grad, "sum"), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return group.all_reduce(x, "sum")

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return group.all_gather(x, dim)

    @staticmethod
    def backward(ctx, grad):
        return ctx.group.reduce_scatter(grad, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return group.reduce_scatter(x, dim)

    @staticmethod
    def backward(ctx, grad):
        return ctx.group.all_gather(grad, ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, split_dim, concat_dim):
        ctx.group, ctx.dims = group, (split_dim, concat_dim)
        return group.all_to_all(x, split_dim, concat_dim)

    @staticmethod
    def backward(ctx, grad):
        split_dim, concat_dim = ctx.dims
        return ctx.group.all_to_all(grad, concat_dim, split_dim), None, None, None


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
    return x if axis.size == 1 else _CopyTo.apply(x, axis.group)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Leave a region where each rank computed a part of the sum: add the parts up.

    Returns        the sum, equal on every rank of the axis
    Communicates   forward only: all-reduce over axis, x's bytes
    Source         Megatron-LM's g
    """
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis.group)


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Join the ranks' slices along dim, in the order of the axis; sum and slice the gradient.

    Communicates   forward all-gather, backward reduce-scatter over axis, each of the whole's bytes
    """
    return x if axis.size == 1 else _AllGather.apply(x, axis.group, dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum over the axis, keep this rank's slice along dim, a multiple of the axis in size.

    Communicates   forward reduce-scatter, backward all-gather over axis, each of the whole's bytes
    """
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis.group, dim)


def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Cut x along split_dim, send part i to rank i, and join what arrives along concat_dim.

    Communicates   forward and backward: all-to-all over axis, x's bytes each
    """
    return x if axis.size == 1 else _AllToAll.apply(x, axis.group, split_dim, concat_dim)
