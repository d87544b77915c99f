"""The devices a rank can run on: the only file that imports an accelerator package.

A `Device` belongs to one rank and is passed in, never a global: torch-xla's CPU devices are threads
of one process. Everything above this file is written once.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from importlib.util import find_spec
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from minitrain.environment import check_environment, check_xla_world, has_neuron
from minitrain.groups import TorchGroup, XlaGroup

# The launcher kills a job whose ranks do not all arrive; slow loading must not look like that.
STARTUP_TIMEOUT = timedelta(minutes=30)


class Device:
    """One rank's device: where its tensors live and how its process groups are made.

    kind           "cpu", "cuda", "xla" or "neuron"
    torch_device   torch.device to put tensors on
    compiles       every new shape or constant is a new program: xla, neuron
    overlaps       it sends gradients while it computes others: cuda
    compile_args   of nn.Module.compile
    host_group     process group for barriers and host objects; None: the default one serves
    nxd            neuronx-distributed where there is one, for mesh.py and attention.py
    """

    kind, backend = "cpu", "gloo"
    compiles = overlaps = False
    compile_args: ClassVar[dict] = {}
    nxd = None
    host_group: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def init_process_group(self, rank: int, world_size: int, **rendezvous) -> None:
        """Join the default process group; called before any tensor is on the device."""
        dist.init_process_group(
            self.backend, rank=rank, world_size=world_size, timeout=STARTUP_TIMEOUT, **rendezvous
        )
        if self.backend != "gloo":
            self.host_group = dist.new_group(backend="gloo")

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

    def barrier(self) -> None:
        """Wait for every rank; nothing to wait for alone."""
        if dist.is_initialized():
            dist.barrier(group=self.host_group)

    def sync(self) -> None:
        """End of a compiled graph on lazy devices; nothing to do here. Tests may replace it."""

    def checkpoint(self, fn: Callable, *args, **keep):
        """fn(*args), of which only args are kept for the backward pass: it computes fn again.

        keep    context_fn of torch.utils.checkpoint: what else is kept
        """
        return checkpoint(fn, *args, use_reentrant=False, **keep)

    def fallback_operators(self) -> list[str]:
        """Operators that ran on the host so far, because the device has none of them."""
        return []

    def compilations(self) -> int | None:
        """Programs compiled so far; None where nothing counts them."""
        return None

    def wait(self) -> None:
        """Wait until everything asked of the device is done (for timing and memory figures)."""

    def memory_peak_bytes(self) -> int | None:
        """Peak memory since the start: of the process on cpu, else of the device's allocator."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def peak_flops(self) -> float | None:
        """bf16 operations per second that the maker states; None when unknown."""
        return None

    def seed(self, seed: int) -> None:
        """Seed the generator that dropout draws from on this device."""
        torch.manual_seed(seed)

    def random_state(self) -> Tensor:
        """That generator's state, a byte tensor on the host."""
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        """Restore what random_state returned."""
        torch.set_rng_state(state)


class AcceleratorDevice(Device):
    """What torch.cuda and torch.neuron have in common."""

    @property
    def module(self):
        """torch.cuda or torch.neuron."""
        return getattr(torch, self.kind)

    def wait(self) -> None:
        self.module.synchronize()

    def memory_peak_bytes(self) -> int | None:
        self.wait()
        return self.module.max_memory_allocated()

    def random_state(self) -> Tensor:
        return self.module.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        self.module.set_rng_state(state)


class CudaDevice(AcceleratorDevice):
    """NVIDIA GPUs."""

    kind, backend = "cuda", "nccl"
    overlaps = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(self.torch_device)

    def peak_flops(self) -> float | None:
        name = torch.cuda.get_device_name()
        known = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}
        return next((peak for part, peak in known.items() if part in name), None)


class XlaDevice(Device):
    """torch-xla: lazy; the operators between two calls of sync are one compiled program."""

    kind = backend = "xla"
    compiles = True
    compile_args: ClassVar[dict] = {"disable": True}  # everything is compiled anyway

    def __init__(self) -> None:
        if find_spec("torch_neuronx"):  # read when torch_xla is imported
            os.environ.setdefault("NEURON_CC_FLAGS", "--model-type=transformer --auto-cast=none")
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics
        import torch_xla.distributed.xla_backend  # makes the process group "xla" known
        import torch_xla.runtime as xr
        import torch_xla.utils.checkpoint

        self.torch_xla, self.xm, self.xr = torch_xla, xm, xr

    @cached_property
    def torch_device(self) -> torch.device:
        return self.torch_xla.device()

    @cached_property
    def hardware(self) -> str:
        """CPU, TPU or NEURON."""
        return self.xr.device_type() or "CPU"

    @cached_property
    def nxd(self):
        if self.hardware != "NEURON" or not find_spec("neuronx_distributed"):
            return None
        import neuronx_distributed.kernels.flash_attn
        import neuronx_distributed.parallel_layers.parallel_state

        return neuronx_distributed

    def init_process_group(self, rank: int, world_size: int, **rendezvous) -> None:
        super().init_process_group(rank, world_size, **rendezvous)
        check_xla_world(self.xr.world_size(), world_size, self.hardware)

    def rank(self) -> int:
        return self.xr.global_ordinal()

    def world_size(self) -> int:
        return self.xr.world_size()

    def make_group(self, all_ranks: list[list[int]], rank: int) -> XlaGroup:
        return XlaGroup(self.xm, all_ranks, rank)

    def sync(self) -> None:
        self.torch_xla.sync()

    def wait(self) -> None:
        self.sync()
        self.xm.wait_device_ops()

    def checkpoint(self, fn: Callable, *args):
        # It sees gradients only through its inputs: with frozen embeddings none asks for one.
        if not any(isinstance(x, Tensor) and x.requires_grad for x in args):
            args = (args[0].detach().requires_grad_(), *args[1:])
        return self.torch_xla.utils.checkpoint.checkpoint(fn, *args, use_reentrant=True)

    def fallback_operators(self) -> list[str]:
        names = self.torch_xla.debug.metrics.counter_names()
        return sorted({n for n in names if n.startswith("aten::")} - {"aten::_local_scalar_dense"})

    def compilations(self) -> int | None:
        return self.torch_xla.debug.metrics.counter_value("UncachedCompile") or 0

    def memory_peak_bytes(self) -> int | None:
        if self.hardware == "CPU":
            return super().memory_peak_bytes()
        try:
            return self.xm.get_memory_info(self.torch_device)["peak_bytes_used"]
        except (RuntimeError, KeyError):  # not every runtime tells
            return None

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self.xm.set_rng_state(seed)

    def random_state(self) -> Tensor:
        return torch.tensor(list(self.xm.get_rng_state().to_bytes(8, "little")), dtype=torch.uint8)

    def set_random_state(self, state: Tensor) -> None:
        self.xm.set_rng_state(int.from_bytes(bytes(state.tolist()), "little"))


class NeuronDevice(AcceleratorDevice):
    """TorchNeuron, the native stack: one process per logical core."""

    kind = backend = "neuron"
    compiles = True
    compile_args: ClassVar[dict] = {"backend": "neuron", "dynamic": False}

    def __init__(self) -> None:
        # An operator that the device has and that fails must not quietly run on the host instead.
        os.environ.setdefault("TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS", "1")

    @cached_property
    def torch_device(self) -> torch.device:
        return torch.device("neuron")

    def init_process_group(self, rank: int, world_size: int, **rendezvous) -> None:
        super().init_process_group(rank, world_size, **rendezvous)  # first: it starts the runtime
        self.module.set_device(int(os.environ.get("LOCAL_RANK", 0)))

    def peak_flops(self) -> float | None:
        return 158e12  # of a logical core of Trn2 and Trn3, which is two physical ones

    def fallback_operators(self) -> list[str]:
        import torch_neuronx

        return sorted(map(str, torch_neuronx.get_fallback_ops()))


DEVICES = {"cpu": Device, "cuda": CudaDevice, "xla": XlaDevice, "neuron": NeuronDevice}


def pick_device(kind: str = "auto", dtype: str = "") -> Device:
    """Return this rank's device.

    kind      "cpu", "cuda", "neuron", "xla", or "auto": cuda or neuron when there is one, else cpu
    dtype     the run's --dtype, to refuse fp64 where there is none

    Raises    ValueError when the kind is unknown or not on this machine, or when the environment
              would change the precision
    """
    if kind == "auto":
        found = {"cuda": torch.cuda.is_available(), "neuron": has_neuron()}
        kind = next((name for name, there in found.items() if there), "cpu")
    check_environment(kind, tuple(DEVICES), dtype)
    return DEVICES[kind]()
