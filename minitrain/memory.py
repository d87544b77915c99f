"""Memory that grows with what is needed: checkpointed blocks, their inputs on the host, tiled MLPs.

Each trades computation, or copies over the bus, for memory, and changes no number. The tiles of the
loss are in loss_reducer.head_cross_entropy_sum. Sources: activation checkpointing (Chen et al.
2016); tiles of the MLP and offloaded block inputs as in Arctic long sequence training (Bekman et
al. 2025).

Shapes: N tokens (rows x sequence), n those of a tile, D model.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

from minitrain.attention import keep_attention
from minitrain.collectives import copy_to
from minitrain.device import Device
from minitrain.kernels import exact_dtype, swiglu
from minitrain.lora import LoRALinear
from minitrain.model import CausalLM, ModelConfig


def save_memory(
    model: CausalLM, device: Device, activation_checkpointing: str = "none", tile_tokens: int = 0
) -> None:
    """Make a sharded model, adapters included, train in less memory, in place.

    activation_checkpointing   none; full: a block keeps its input and, on cpu and cuda, what its
                               attention returned, and computes the rest again in the backward pass,
                               with the same random numbers; offload: a block keeps its input alone,
                               moved to pinned host memory, whence it comes back while the block
                               above is computed. On cpu offload is full
    tile_tokens                tokens of the MLP computed at a time, the same in both passes; 0: all

    Raises                     ValueError for a tile below 0, an unknown mode, or offload on a
                               device it is not written for
    """
    _check(activation_checkpointing, tile_tokens, device.kind)
    if device.kind == "cpu":
        _tell_allocator(give_back=activation_checkpointing != "none")
    if activation_checkpointing != "none":
        on_host = activation_checkpointing == "offload" and device.kind == "cuda"
        model.run_block = _checkpointed(device, HostStore() if on_host else None)
    for block in model.model.layers if tile_tokens else ():
        block.mlp = TiledMLP(block.mlp, tile_tokens, device)


def check_memory_settings(config, model_config: ModelConfig) -> None:
    """Refuse settings that cannot work, before anything is made.

    config    scripts/train.py's TrainConfig

    Raises    ValueError as save_memory, and when the host has not the memory for offload: the bytes
              of h_bsD for each block, on each of this host's ranks
    """
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    _check(config.activation_checkpointing, config.tile_tokens, kind)
    if config.activation_checkpointing != "offload" or kind == "cpu":
        return
    tokens = config.micro_batch_size * -(-config.seq_len // config.sp)
    itemsize = {"bf16": 2, "fp32": 4, "fp64": 8}[config.dtype]
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    wanted = ranks * model_config.num_layers * tokens * model_config.hidden_size * itemsize
    if wanted > (free := _free_host_bytes()):
        raise ValueError(
            f"offload keeps the inputs of {model_config.num_layers} blocks in host memory: "
            f"{tokens:,} tokens x {model_config.hidden_size} x {itemsize} bytes on each of {ranks} "
            f"ranks: {wanted / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free. Pass a smaller "
            "--micro-batch-size, a larger --sp, or --activation-checkpointing full."
        )


def _check(activation_checkpointing: str, tile_tokens: int, kind: str) -> None:
    if tile_tokens < 0:
        raise ValueError(
            f"a tile must have at least one token, but --tile-tokens is {tile_tokens}. Pass 0 for "
            "no tiles."
        )
    if activation_checkpointing not in ("none", "full", "offload"):
        raise ValueError(
            "activation checkpointing must be none, full or offload, not "
            f"{activation_checkpointing!r}."
        )
    if activation_checkpointing == "offload" and kind not in ("cpu", "cuda"):
        raise ValueError(
            f"offload needs pinned host memory, which the {kind} device does not offer. Pass "
            "--activation-checkpointing full."
        )


def _free_host_bytes() -> int:
    """Memory that programs can still have, page cache included where the system tells."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = [line for line in lines if line.startswith("MemAvailable:")]
        return int(found[0].split()[1]) * 1024
    except (OSError, IndexError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _tell_allocator(give_back: bool) -> None:
    """Say what glibc does with freed tensors on cpu; other C libraries: nothing.

    It keeps them, as fresh pages cost more than filling them: SmolLM2-135M, 2 x 512 tokens: 8 %
    less time at the same peak. With checkpointing it gives those of 4 MiB and more back, as in its
    heap an aligned block that is freed is a little too small for the next of its size: 4,096
    tokens: 0.7 GB less, at 5 % more time.
    """
    with suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 65536 if give_back else 0)  # M_MMAP_MAX
        mallopt(-3, 4 << 20)  # M_MMAP_THRESHOLD
        mallopt(-1, 64 << 20 if give_back else -1)  # M_TRIM_THRESHOLD; -1: never


# Activation checkpointing


def _checkpointed(device: Device, store: HostStore | None) -> Callable[..., Tensor]:
    """A run_block that keeps the block's inputs and its attention's result; with a store the inputs
    alone, h on the host.
    """
    keep = {} if store or device.compiles else keep_attention()

    def run_block(block: nn.Module, h_bsD: Tensor, *rest) -> Tensor:
        if not torch.is_grad_enabled():
            return block(h_bsD, *rest)
        if store is None:
            return device.checkpoint(block, h_bsD, *rest, **keep)
        # What checkpoint keeps passes through these hooks: h, and the tables all blocks share.
        place, shape = h_bsD.data_ptr(), h_bsD.shape

        def pack(x: Tensor) -> Tensor | int:
            return store.put(x) if x.data_ptr() == place and x.shape == shape else x

        def unpack(kept: Tensor | int) -> Tensor:
            return store.take(kept) if isinstance(kept, int) else kept

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return device.checkpoint(block, h_bsD, *rest)

    return run_block


class HostStore:
    """A stack of tensors in pinned host memory, copied beside the computation. CUDA only; written,
    never run.

    The backward pass takes them in the opposite order; when it takes one, the next is on its way.
    """

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.host: list[Tensor] = []
        self.arriving: dict[int, tuple[Tensor, torch.cuda.Event]] = {}

    def put(self, x: Tensor) -> int:
        """Start the copy to the host and return the tensor's number, from 0."""
        kept = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream())  # until x is computed
        with torch.cuda.stream(self.stream):
            kept.copy_(x, non_blocking=True)
        x.record_stream(self.stream)  # so that x's memory is not given away before it is read
        self.host.append(kept)
        return len(self.host) - 1

    def take(self, number: int) -> Tensor:
        """The tensor, on the device; start the copy of the one below it."""
        self._fetch(number)
        x, arrived = self.arriving.pop(number)
        if number > 0:
            self._fetch(number - 1)
        del self.host[number:]
        torch.cuda.current_stream().wait_event(arrived)
        x.record_stream(torch.cuda.current_stream())
        return x

    def _fetch(self, number: int) -> None:
        if number not in self.arriving:
            with torch.cuda.stream(self.stream):
                x = self.host[number].to("cuda", non_blocking=True)
                self.arriving[number] = x, self.stream.record_event()


# Tiles of the MLP


class TiledMLP(nn.Module):
    """A model.MLP, plain or parallel, with the activations of tile_tokens tokens at a time.

    Only its input is kept for the backward pass, which computes each tile again. Parameters keep
    their names, and each gets one gradient, summed over the tiles in float32 and rounded once.

    Communicates   as the MLP: what enters and leaves the tensor-parallel region, once, not per tile
    """

    def __init__(self, mlp: nn.Module, tile_tokens: int, device: Device):
        super().__init__()
        self.enter = mlp.enter
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.tile_tokens, self.device = tile_tokens, device
        self.adapters = [x for x in (self.gate_proj, self.up_proj) if isinstance(x, LoRALinear)]

    def forward(self, x_bsD: Tensor) -> Tensor:
        x_bsD = self.enter(x_bsD)
        x_ND, down = x_bsD.flatten(0, 1), self.down_proj
        if x_ND.shape[0] <= self.tile_tokens:
            return down(swiglu(self.gate_proj(x_bsD), self.up_proj(x_bsD)))
        parallel = hasattr(down, "leave")  # a part of the sum over tp: added up after the tiles

        def run(x_nD: Tensor) -> Tensor:
            h_nf = swiglu(self.gate_proj(x_nD), self.up_proj(x_nD))
            return down.partial(h_nf) if parallel else down(h_nf)

        y_bsD = self._tiles(run, x_ND).unflatten(0, x_bsD.shape[:2])
        return down.leave(y_bsD) if parallel else y_bsD

    @torch.compiler.disable  # a compiled block has the tiles between two graphs
    def _tiles(self, run: Callable[[Tensor], Tensor], x_ND: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return torch.cat([run(x_nD) for x_nD in x_ND.split(self.tile_tokens)])
        params = [p for p in self.parameters() if p.requires_grad]
        inputs = params
        for adapter in self.adapters:  # their gradient is summed over tp once, after the tiles
            adapter.A_is_copied = True
            inputs = [copy_to(p, adapter.tp) if p is adapter.lora_A else p for p in inputs]
        draws = self.training and any(getattr(m, "dropout", 0) for m in self.children())
        kept = _Keep.apply(torch.empty(0, device=x_ND.device, requires_grad=True), x_ND)
        state = self.device.random_state() if draws else None
        return _Tiles.apply(self, run, params, state, kept, x_ND, *inputs)


class _Keep(torch.autograd.Function):
    """Keep x for _Tiles. Apart from it, and before it: a checkpointed block that is computed again
    stops at the last tensor that is kept, and so leaves the MLP out.
    """

    @staticmethod
    def forward(ctx, anchor, x_ND):
        ctx.save_for_backward(x_ND)
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Tiles(torch.autograd.Function):
    """run(x_ND), a tile at a time in both passes."""

    @staticmethod
    def forward(ctx, mlp, run, params, state, kept, x_ND, *inputs):
        ctx.mlp, ctx.run, ctx.params, ctx.state, ctx.keeper = mlp, run, params, state, kept.grad_fn
        return torch.cat([run(x_nD) for x_nD in x_ND.split(mlp.tile_tokens)])

    @staticmethod
    def backward(ctx, grad_ND):
        mlp, params, device = ctx.mlp, ctx.params, ctx.mlp.device
        (x_ND,) = ctx.keeper.saved_tensors
        if ctx.state is not None:
            now = device.random_state()
            device.set_random_state(ctx.state)
        totals: list[Tensor | None] = [None] * len(params)
        grad_x_ND = torch.empty_like(x_ND)
        tiles = (t.split(mlp.tile_tokens) for t in (x_ND, grad_ND, grad_x_ND))
        for x_nD, grad_nD, grad_x_nD in zip(*tiles):
            x_nD = x_nD.detach().requires_grad_()
            with torch.enable_grad():
                y_nD = ctx.run(x_nD)
            grad_x, *grads = torch.autograd.grad(y_nD, [x_nD, *params], grad_nD, allow_unused=True)
            grad_x_nD.copy_(grad_x)
            for i, grad in enumerate(grads):
                if grad is not None:  # what is added after the tiles gets its gradient there
                    grad = grad.to(exact_dtype(grad.dtype))
                    totals[i] = grad if totals[i] is None else totals[i].add_(grad)
        if ctx.state is not None:
            device.set_random_state(now)
        return *[None] * 5, grad_x_ND, *[None if t is None else t.to(x_ND.dtype) for t in totals]
