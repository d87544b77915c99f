"""A stand-in for TorchNeuron on CPU tensors, which accepts only what the real one does.

Facts from torch-neuronx's public source of April 2026: a process group written in Python with these
collectives; equal splits only; barriers on the default group only; nothing empty; float64 and long
integers are narrowed; a static argument (the alpha of add and sub) or a new shape is a new program.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minitrain.device import NeuronDevice

DTYPES = {torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64}
# Reading a number waits; shapes that depend on data cannot be compiled.
REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2")


class StrictGroup(dist.ProcessGroup):
    """gloo behind the methods of TorchNeuron's process group."""

    def __init__(self, store, rank: int, size: int, is_world: bool, timeout):
        super().__init__(rank, size)
        self.gloo, self.is_world = dist.ProcessGroupGloo(store, rank, size, timeout), is_world

    def getBackendName(self):
        return "neuron"

    def _set_group_name(self, name):
        self.name = name

    @property
    def group_name(self):
        return self.name

    def allreduce(self, tensors, options):
        check(*tensors)
        return self.gloo.allreduce(tensors, options)

    def all_gather_single(self, whole, part, options):
        check(whole, part)
        return self.gloo._allgather_base(whole, part, options)

    def reduce_scatter_single(self, part, whole, options):
        check(part, whole)
        return self.gloo._reduce_scatter_base(part, whole, options)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def alltoall_base(self, received, sent, out_splits, in_splits, options):
        check(received, sent)
        if out_splits or in_splits or sent.shape[0] % self.size():
            raise NotImplementedError("neuron: uneven all_to_all")
        return self.gloo.alltoall_base(received, sent, out_splits, in_splits, options)

    def barrier(self, opts):
        if not self.is_world:
            raise NotImplementedError("neuron: barrier on a subgroup")
        return self.gloo.barrier(opts)


def check(*tensors: Tensor) -> None:
    """Refuse tensors that the real backend refuses."""
    for x in tensors:
        if x.dtype not in DTYPES or x.dim() == 0 or x.numel() == 0 or not x.is_contiguous():
            raise ValueError(f"neuron: no collective of {x.dtype} {tuple(x.shape)} {x.stride()}")


class StandIn(NeuronDevice):
    """NeuronDevice with its tensors on the CPU."""

    def __init__(self):
        super().__init__()
        self.torch_device = torch.device("cpu")
        groups = []

        def make(store, rank, size, timeout):
            groups.append(StrictGroup(store, rank, size, not groups, timeout))
            return groups[-1]

        dist.Backend.register_backend("neuron", make, devices=["cpu"])

    @property
    def module(self):
        return SimpleNamespace(set_device=lambda number: None, synchronize=lambda: None)

    def fallback_operators(self):
        return []


class Programs(TorchDispatchMode):
    """Note each operator with what it is compiled for; refuse what waits, or is not there."""

    def __init__(self):
        super().__init__()
        self.seen: set[tuple] = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name, kwargs = operator._overloadpacket.__name__, kwargs or {}
        if name in REFUSED:
            raise RuntimeError(f"neuron: {name} in the step")
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        out = operator(*args, **kwargs)
        for x in torch.utils._pytree.tree_leaves(out):
            if torch.is_tensor(x) and x.dtype == torch.float64:
                raise RuntimeError(f"neuron: {name} makes float64")
        shapes = tuple((tuple(x.shape), x.dtype) for x in tensors)
        self.seen.add((name, shapes, kwargs.get("alpha")))
        return out
