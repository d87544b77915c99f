"""Sum gradients over the ranks that saw other tokens (dp x sp), never average them.

Plain: one all-reduce, and every rank updates everything. Sharded optimizer (ZeRO-1):
reduce-scatter, each rank updates its piece, all-gather of the rounded parameters. For n gradients
in float32 and bf16 parameters a rank of R sends 8 n (R-1)/R bytes plain, 4 n (R-1)/R + 2 n (R-1)/R
sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from minitrain.bf16_optimizer import BF16Optimizer
from minitrain.mesh import Axis

BUCKET_NUMEL = 16 * 2**20  # 64 MiB of float32: large enough to fill any wire


def reduce_gradients_(grads: dict[str, Tensor] | Iterable[Tensor], axis: Axis) -> None:
    """Sum each gradient over the axis, in place.

    grads          tensors, or name -> tensor, of one dtype; any shapes

    Communicates   all-reduces over axis of all gradients, small ones joined in buckets of 64 MiB
    """
    if axis.size == 1:
        return
    small: list[Tensor] = []
    for grad in grads.values() if isinstance(grads, dict) else grads:
        if grad.is_contiguous() and grad.numel() >= BUCKET_NUMEL:
            axis.group.all_reduce_(grad, "sum")
        else:
            small.append(grad)
    for bucket in (small[at] for at in _buckets(small)):
        joined = torch.cat([g.reshape(-1) for g in bucket])
        axis.group.all_reduce_(joined, "sum")
        for grad, total in zip(bucket, joined.split([g.numel() for g in bucket])):
            grad.copy_(total.view_as(grad))


def _buckets(tensors: list[Tensor]) -> Iterator[slice]:
    """Cut a list where the next tensor would make more than BUCKET_NUMEL elements."""
    begin = held = 0
    for place, tensor in enumerate(tensors):
        if place > begin and held + tensor.numel() > BUCKET_NUMEL:
            yield slice(begin, place)
            begin, held = place, 0
        held += tensor.numel()
    if tensors:
        yield slice(begin, len(tensors))


@torch.no_grad()
def reduce_main_grads(optimizer: BF16Optimizer, axis: Axis) -> dict[str, Tensor]:
    """Sum the main gradients over the axis (dp_sp).

    Returns        optimizer.grads: name -> complete gradient, or this rank's piece of it when the
                   optimizer is sharded
    Communicates   over axis: all-reduce of the float32 gradients, or reduce-scatters when sharded
    """
    buffer, mains = optimizer.buffer, list(optimizer.main_grads.values())
    if optimizer.num_shards == 1:
        reduce_gradients_(mains if buffer is None else [buffer], axis)
    elif buffer is not None:
        width = BUCKET_NUMEL // optimizer.num_shards  # in slices: gloo copies what it is given
        for mine, part in zip(optimizer.shard_buffer.split(width), buffer.split(width, 1)):
            mine.copy_(axis.group.reduce_scatter(part, 0)[0])
    else:
        mine = axis.group.reduce_scatter(torch.cat(mains, 1), 0)[0]
        for grad, part in zip(optimizer.grads.values(), mine.split([g.shape[1] for g in mains])):
            grad.copy_(part)
    return optimizer.grads


@torch.no_grad()
def gather_params(optimizer: BF16Optimizer, axis: Axis) -> None:
    """Give every rank the whole updated parameters, rounded to the model's dtype; nothing to do
    when not sharded.

    Communicates   all-gathers over axis of the model's parameters in their own dtype, in buckets
    """
    if optimizer.num_shards == 1:
        return
    params, masters = list(optimizer.params.values()), list(optimizer.masters.values())
    for at in _buckets(params):
        mine = torch.cat([m.detach().to(params[0].dtype) for m in masters[at]])
        whole = axis.group.all_gather(mine[None], 0)  # [num_shards, n]
        for param, pieces in zip(params[at], whole.split([m.numel() for m in masters[at]], 1)):
            param.copy_(pieces.reshape(-1)[: param.numel()].view_as(param))
