"""Sum gradients over the ranks that saw other tokens (dp x sp), never average them.

Plain: one all-reduce, and every rank updates everything. Sharded optimizer (ZeRO-1):
reduce-scatter, each rank updates its piece, all-gather of the rounded parameters. For n gradients
in float32 and bf16 parameters a rank of R sends 8 n (R-1)/R bytes plain, 4 n (R-1)/R + 2 n (R-1)/R
sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

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
    Communicates   over axis: all-reduce of the float32 gradients, or reduce-scatters when sharded;
                   what start_reduction has begun is waited for
    Raises         ValueError when start_reduction was called with another axis
    """
    if optimizer.reduction or (axis.size > 1 and not optimizer.keeps_main_grads):
        (optimizer.reduction or Reduction(optimizer, axis)).finish(axis)
    elif optimizer.num_shards == 1:
        mains = {name: optimizer.take_main_grad(name) for name in optimizer.params}
        reduce_gradients_(mains, axis)
        optimizer.main_grads.update(mains)
    else:
        mains = list(optimizer.main_grads.values())
        mine = axis.group.reduce_scatter(torch.cat(mains, 1), 0)[0]
        optimizer.grads.update(zip(optimizer.params, mine.split([g.shape[1] for g in mains])))
    return optimizer.grads


def start_reduction(optimizer: BF16Optimizer, axis: Axis) -> None:
    """Let the next backward pass, the last of a step, sum the main gradients beside it: each bucket
    as soon as it is complete. Until reduce_main_grads, which waits for them, main_grads are in use.

    Communicates   over axis, as reduce_main_grads, in buckets of 64 MiB, on every rank in the same
                   order; nothing on devices that compile
    Source         PyTorch DDP (Li et al. 2020), section 3.2
    """
    if optimizer.reduction is not None:  # of a step that was broken off
        optimizer.reduction.remove_hooks()
    if axis.size > 1 and not optimizer.keeps_main_grads:
        reduction = optimizer.reduction = Reduction(optimizer, axis)
        for name, param in optimizer.params.items():
            hook = param.register_post_accumulate_grad_hook(partial(reduction.add, name))
            reduction.hooks.append(hook)


class Reduction:
    """The sums of one step, bucket by bucket, those of the last parameters first."""

    def __init__(self, optimizer: BF16Optimizer, axis: Axis):
        self.optimizer, self.axis = optimizer, axis
        names = list(optimizer.params)
        self.buckets = [names[at] for at in _buckets(list(optimizer.params.values()))][::-1]
        self.added: set[str] = set()
        self.begun, self.under_way, self.hooks = 0, [], []

    def add(self, name: str, param: Tensor) -> None:
        """The backward pass has this gradient: begin the sums whose turn has come."""
        if name in self.added:
            raise RuntimeError(
                f"{name} got a second gradient after start_reduction, when its sum can have begun. "
                "Call it before the last backward pass of a step."
            )
        self.optimizer.accumulate_grads(name)
        self.added.add(name)
        while self.begun < len(self.buckets) and self.added.issuperset(self.buckets[self.begun]):
            self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        names, shards = self.buckets[self.begun], self.optimizer.num_shards
        parts = [self.optimizer.take_main_grad(name).reshape(shards, -1) for name in names]
        whole = (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).flatten()
        mine = whole if shards == 1 else whole.new_empty(whole.numel() // shards)
        self.under_way.append((self.axis.group.begin_sum(whole, mine), whole, mine, names))
        self.begun += 1
        if len(self.under_way) > 2:  # whole is a copy: not all of them at a time
            self._end()

    def _end(self) -> None:
        work, _, mine, names = self.under_way.pop(0)
        work.wait()
        masters = [self.optimizer.masters[name] for name in names]
        for name, master, grad in zip(names, masters, mine.split([m.numel() for m in masters])):
            self.optimizer.grads[name] = grad.view_as(master)

    def finish(self, axis: Axis) -> None:
        """Begin the sums that have not begun, and wait for all."""
        self.remove_hooks()
        if axis != self.axis:
            raise ValueError(
                "start_reduction and reduce_main_grads must be given the same axis, not "
                f"{self.axis.name} and {axis.name}."
            )
        while self.begun < len(self.buckets):
            self._begin()
        while self.under_way:
            self._end()

    def remove_hooks(self) -> None:
        """The next backward pass is an ordinary one."""
        for hook in self.hooks:
            hook.remove()
        self.optimizer.reduction = None


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
