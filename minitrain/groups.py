"""The collectives along one axis of the mesh, as a rank calls them: what a Device makes.

A group has four functional collectives (they return a new tensor) and one in-place sum.
collectives.py makes them differentiable.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renamed two collectives; 2.9 has only the older names.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchGroup:
    """The collectives of one torch.distributed process group (gloo, nccl)."""

    def __init__(self, ranks: list[int], process_group: dist.ProcessGroup):
        self.ranks, self.process_group, self.size = ranks, process_group, len(ranks)

    def all_reduce_(self, x: Tensor, op: str) -> None:
        dist.all_reduce(x, REDUCE_OPS[op], group=self.process_group)

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        self.all_reduce_(x, op)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        x = x.movedim(dim, 0).contiguous()
        whole = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        ALL_GATHER(whole, x, group=self.process_group)
        return whole.movedim(0, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        x = x.movedim(dim, 0).contiguous()
        part = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        REDUCE_SCATTER(part, x, group=self.process_group)
        return part.movedim(0, dim)

    def begin_sum(self, x: Tensor, mine: Tensor) -> dist.Work:
        """Begin to sum flat x over the ranks: in place where mine is x, else this rank's part of it
        into mine.
        """
        if mine is x:
            return dist.all_reduce(x, group=self.process_group, async_op=True)
        return REDUCE_SCATTER(mine, x, group=self.process_group, async_op=True)

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        parts = torch.stack(x.chunk(self.size, split_dim))  # one part for each rank, in order
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.process_group)
        return torch.cat(received.unbind(), concat_dim)


class XlaGroup:
    """torch-xla's collectives along one axis.

    Always all groups of the axis, alike on every rank: with its own group alone each rank would
    compile another program. Never torch.distributed's all-to-all, which here ignores groups, nor
    xm.reduce_gradients, which divides by the world.
    """

    def __init__(self, xm, all_ranks: list[list[int]], rank: int):
        self.xm, self.where = xm, {"groups": all_ranks, "pin_layout": False}
        self.ranks = next(ranks for ranks in all_ranks if rank in ranks)
        self.size = len(self.ranks)

    def all_reduce_(self, x: Tensor, op: str) -> None:
        x.copy_(self.all_reduce(x, op))

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        return self.xm.all_reduce(op, x, **self.where)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return self.xm.all_gather(x, dim, **self.where)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.xm.reduce_scatter("sum", x, 1.0, dim, self.size, **self.where)

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        return self.xm.all_to_all(x, split_dim, concat_dim, self.size, **self.where)
