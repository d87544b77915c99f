"""The devices a rank can run on, and the collectives of each: the only file that imports an
accelerator package.

A `Device` belongs to one rank and is passed in, never a global. What it makes for an axis of the
mesh is a *group*: four functional collectives (they return a new tensor) and one in-place sum.
Everything above this file is written once.
"""

from __future__ import annotations

import os
import resource
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

KINDS = ("auto", "cpu", "cuda")
REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renamed two collectives; 2.9 has only the older names.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# The launcher kills a job whose ranks do not all arrive; slow loading must not look like that.
STARTUP_TIMEOUT = timedelta(minutes=30)


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

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        parts = torch.stack(x.chunk(self.size, split_dim))  # one part for each rank, in order
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.process_group)
        return torch.cat(received.unbind(), concat_dim)


class Device:
    """One rank's device: where its tensors live and how its process groups are made.

    kind           "cpu" or "cuda"
    torch_device   torch.device to put tensors on
    """

    kind = "cpu"
    backend = "gloo"

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def init_process_group(self, rank: int, world_size: int, **rendezvous) -> None:
        """Join the default process group; called before any tensor is on the device."""
        dist.init_process_group(
            self.backend, rank=rank, world_size=world_size, timeout=STARTUP_TIMEOUT, **rendezvous
        )

    def rank(self) -> int:
        """This process's number among all, 0 when it runs alone."""
        return dist.get_rank() if dist.is_initialized() else 0

    def world_size(self) -> int:
        """Number of processes, 1 when it runs alone."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def make_group(self, all_ranks: list[list[int]], rank: int) -> TorchGroup:
        """Make every group of an axis (all ranks must call it alike) and return this rank's."""
        groups = [TorchGroup(ranks, dist.new_group(ranks)) for ranks in all_ranks]
        return next(group for group in groups if rank in group.ranks)

    def sync(self) -> None:
        """End of a compiled graph on lazy devices; nothing to do here."""

    def wait(self) -> None:
        """Wait until everything asked of the device is done (for timing and memory figures)."""

    def memory_peak_bytes(self) -> int | None:
        """Peak memory since the start: of the process on cpu, of the allocator on an accelerator."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def peak_flops(self) -> float | None:
        """bf16 operations per second that the maker states; None when unknown."""
        return None

    def random_state(self) -> Tensor:
        """State of the generator that dropout draws from on this device, a byte tensor on the host."""
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        """Restore what random_state returned."""
        torch.set_rng_state(state)


class CudaDevice(Device):
    kind = "cuda"
    backend = "nccl"

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(self.torch_device)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def memory_peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated()

    def peak_flops(self) -> float | None:
        name = torch.cuda.get_device_name()
        known = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}
        return next((peak for part, peak in known.items() if part in name), None)

    def random_state(self) -> Tensor:
        return torch.cuda.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state)


def pick_device(kind: str = "auto") -> Device:
    """Return this rank's device.

    kind      "cpu", "cuda", or "auto": cuda when there is one, else cpu

    Raises    ValueError when the kind is unknown or not on this machine
    """
    if kind not in KINDS:
        raise ValueError(f"device must be one of {', '.join(KINDS)}, not {kind!r}.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device cuda needs a CUDA GPU and a CUDA build of torch; torch {torch.__version__} "
            "finds none. Pass --device cpu, or install a CUDA build."
        )
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        return CudaDevice()
    return Device()
