"""The rank grid: world = dp x sp x tp, as frozen values that are passed in.

tp is fastest (neighbours), then sp, then dp. With 8 ranks, sp 2, tp 2:

    dp 0 | sp 0: ranks 0 1 | sp 1: ranks 2 3
    dp 1 | sp 0: ranks 4 5 | sp 1: ranks 6 7

Ranks along tp see the same tokens, along sp consecutive slices of the same rows, along dp others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minitrain.device import Device


@dataclass(frozen=True)
class Axis:
    """One direction of the grid, as this rank sees it.

    name    "dp", "sp", "tp" or "dp_sp"
    size    number of ranks along the axis
    rank    this rank's place on it, 0 .. size-1
    group   the collectives of device.py; None when size is 1, where every collective is a no-op
    """

    name: str
    size: int = 1
    rank: int = 0
    group: Any = None


@dataclass(frozen=True)
class Mesh:
    """The axes of the grid. dp_sp is dp and sp together: the ranks whose gradients are summed.

    device   this rank's device
    """

    dp: Axis = Axis("dp")
    sp: Axis = Axis("sp")
    tp: Axis = Axis("tp")
    dp_sp: Axis = Axis("dp_sp")
    device: Device = field(default_factory=Device)

    @property
    def world_size(self) -> int:
        return self.dp_sp.size * self.tp.size

    @property
    def rank(self) -> int:
        return self.dp_sp.rank * self.tp.size + self.tp.rank

    def describe(self) -> str:
        """The grid as a small table, a line for each dp rank."""
        dp, sp, tp = self.dp.size, self.sp.size, self.tp.size
        lines = [f"{self.world_size} ranks = dp {dp} x sp {sp} x tp {tp}"]
        for d in range(dp if self.world_size > 1 else 0):
            starts = [(d * sp + s) * tp for s in range(sp)]
            rows = [" ".join(str(start + t) for t in range(tp)) for start in starts]
            cells = (f"sp {s}: ranks {row}" for s, row in enumerate(rows))
            lines.append(f"  dp {d}: " + " | ".join(cells))
        return "\n".join(lines)


class ShardSpec(dict):
    """Which parameters are split over tp: name -> dim, or None when every rank holds the whole.

    shapes   name -> shape of the whole tensor, without the padding of a vocabulary
    """

    def __init__(self, dims: dict[str, int | None], shapes: dict[str, tuple[int, ...]]):
        super().__init__(dims)
        self.shapes = shapes


def check_layout(world_size: int, sp: int = 1, tp: int = 1) -> int:
    """Return dp, what is left of the processes.

    Raises    ValueError when world_size is not a multiple of sp * tp
    """
    for name, size in (("sp", sp), ("tp", tp)):
        if size < 1:
            raise ValueError(f"--{name} must be at least 1, not {size}.")
    if world_size % (sp * tp):
        lower = world_size // (sp * tp) * sp * tp
        fits = f"{lower} or {lower + sp * tp}" if lower else str(sp * tp)
        running = "1 process is" if world_size == 1 else f"{world_size} processes are"
        raise ValueError(
            f"world size must be a multiple of sp * tp: {sp} * {tp} = {sp * tp}, but {running} "
            f"running. Start with torchrun --nproc_per_node {fits}, or pass --sp 1 --tp 1."
        )
    return world_size // (sp * tp)


def check_model(
    sp: int, tp: int, num_heads: int, num_kv_heads: int, intermediate_size: int
) -> None:
    """Refuse a layout that cannot split this model evenly.

    Raises    ValueError: query heads must be a multiple of sp * tp; kv heads must divide or be
              divided by it; the feed-forward width must be a multiple of tp
    """
    parts = sp * tp
    if num_heads % parts:
        fits = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ValueError(
            f"query heads must be a multiple of sp * tp: {num_heads} heads, {sp} * {tp} = {parts}. "
            f"Choose --sp and --tp so that their product is one of {', '.join(map(str, fits))}."
        )
    for what, ranks in (("sp * tp", parts), ("tp", tp)):
        if num_kv_heads % ranks and ranks % num_kv_heads:
            raise ValueError(
                f"kv heads must be a multiple of {what} or divide it: {num_kv_heads} kv heads, "
                f"{sp} * {tp} = {parts}. Choose another --sp or --tp."
            )
    if intermediate_size % tp:
        raise ValueError(
            f"the feed-forward width must be a multiple of tp: it is {intermediate_size}, tp {tp}. "
            "Choose another --tp."
        )


def init_mesh(sp: int = 1, tp: int = 1, device: Device | None = None) -> Mesh:
    """Lay out the running processes as dp x sp x tp.

    sp, tp    sizes of the sequence and tensor axes; dp is what is left
    device    the rank's device, which makes the groups; None: cpu

    Returns        Mesh; every rank must call it with the same arguments
    Communicates   makes the process groups of the four axes
    Raises         ValueError when the number of processes is not a multiple of sp * tp
    """
    device = device or Device()
    world, rank = device.world_size(), device.rank()
    dp = check_layout(world, sp, tp)

    order = list(range(world))
    if device.nxd is not None:  # so that its layers can stand beside ours
        state = device.nxd.parallel_layers.parallel_state
        groups = state.initialize_model_parallel(tp, mesh_only=True).tp_groups
        order = [rank for group in groups for rank in group]

    def axis(name: str, size: int, stride: int) -> Axis:
        """The axis along which neighbours are `stride` places apart."""
        if size == 1:
            return Axis(name)
        starts = [place for place in range(world) if place // stride % size == 0]
        all_ranks = [[order[start + stride * i] for i in range(size)] for start in starts]
        place = order.index(rank) // stride % size
        return Axis(name, size, place, device.make_group(all_ranks, rank))

    sizes = {"dp": (dp, sp * tp), "sp": (sp, tp), "tp": (tp, 1), "dp_sp": (dp * sp, tp)}
    axes = {name: axis(name, *size_and_stride) for name, size_and_stride in sizes.items()}
    return Mesh(**axes, device=device)
