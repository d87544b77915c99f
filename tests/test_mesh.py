"""The rank grid: who sits where, and what is refused in words."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from minitrain.collectives import all_reduce
from minitrain.launch import run_ranks
from minitrain.mesh import Axis, Mesh, check_layout, check_model, init_mesh


def place(sp: int, tp: int) -> dict:
    mesh = init_mesh(sp, tp)
    axes = {"dp": mesh.dp, "sp": mesh.sp, "tp": mesh.tp, "dp_sp": mesh.dp_sp}
    me = torch.tensor([10.0**mesh.rank])
    return {
        "rank": mesh.rank,
        "places": {name: (axis.rank, axis.size) for name, axis in axes.items()},
        "members": {name: axis.group.ranks if axis.group else None for name, axis in axes.items()},
        "sums": {name: all_reduce(me, axis).item() for name, axis in axes.items()},
        "table": mesh.describe(),
        "world_size": mesh.world_size,
    }


def test_tp_is_fastest_then_sp_then_dp():
    """Neighbours in the wrong axis: sums over an axis mix ranks that hold other things."""
    ranks = run_ranks(place, 8, 2, 2)
    for r, got in enumerate(ranks):
        d, s, t = r // 4, r // 2 % 2, r % 2
        assert (got["rank"], got["world_size"]) == (r, 8)
        assert got["places"] == {"dp": (d, 2), "sp": (s, 2), "tp": (t, 2), "dp_sp": (r // 2, 4)}
        want = {
            "dp": [t + 2 * s, t + 2 * s + 4],
            "sp": [t + 4 * d, t + 4 * d + 2],
            "tp": [r - t, r - t + 1],
            "dp_sp": [t, t + 2, t + 4, t + 6],
        }
        assert got["members"] == want
        # Powers of ten show who took part; most of these groups lack global rank 0 (case 28).
        assert got["sums"] == {
            name: sum(10.0**member for member in members) for name, members in want.items()
        }


def test_describe_draws_the_grid():
    """The table printed at the start shows other ranks than the groups have."""
    table = run_ranks(place, 8, 2, 2)[0]["table"].splitlines()
    assert table[0] == "8 ranks = dp 2 x sp 2 x tp 2"
    assert table[1] == "  dp 0: sp 0: ranks 0 1 | sp 1: ranks 2 3"
    assert table[2] == "  dp 1: sp 0: ranks 4 5 | sp 1: ranks 6 7"


@pytest.mark.parametrize("sp, tp", [(1, 1), (3, 1), (1, 3)])
def test_axes_of_size_one_have_no_group(sp, tp):
    """An axis of size 1 communicates."""
    for got in run_ranks(place, 3, sp, tp):
        for name, (_, size) in got["places"].items():
            assert (got["members"][name] is None) == (size == 1)


def test_one_process_needs_no_process_group():
    """A single process cannot make a mesh without torchrun."""
    mesh = init_mesh()
    assert mesh.world_size == 1 and mesh.rank == 0
    assert mesh.describe() == "1 ranks = dp 1 x sp 1 x tp 1"
    assert mesh.dp == Axis("dp") and mesh.tp.group is None


def test_mesh_is_a_frozen_value():
    """Rank state can be changed under way."""
    for value, name in ((Mesh(), "dp"), (Axis("dp"), "rank")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, None)


@pytest.mark.parametrize(
    "world, sp, tp, words",
    [
        (6, 2, 2, ["2 * 2 = 4", "6 processes are running", "4 or 8", "--sp 1"]),
        (1, 2, 1, ["2 * 1 = 2", "1 process is running", "--nproc_per_node 2"]),
        (2, 1, 4, ["1 * 4 = 4", "2 processes are running", "--nproc_per_node 4"]),
        (4, 0, 1, ["--sp", "at least 1", "0"]),
        (4, 1, -1, ["--tp", "at least 1", "-1"]),
    ],
)
def test_world_size_must_fit(world, sp, tp, words):
    """A layout that does not fit hangs or is silently changed, instead of numbers, rule and fix."""
    with pytest.raises(ValueError) as error:
        check_layout(world, sp, tp)
    for word in words:
        assert word in str(error.value)


def test_dp_is_what_is_left():
    """dp is not world / (sp * tp)."""
    assert [check_layout(8, sp, tp) for sp, tp in ((1, 1), (2, 1), (2, 2), (4, 2))] == [8, 4, 2, 1]


@pytest.mark.parametrize(
    "sp, tp, heads, kv_heads, width, words",
    [
        (1, 2, 9, 3, 64, ["query heads", "9 heads", "1 * 2 = 2", "1, 3, 9"]),
        (8, 1, 4, 2, 64, ["query heads", "4 heads", "8 * 1 = 8", "1, 2, 4"]),
        (2, 2, 12, 6, 64, ["kv heads", "6 kv heads", "2 * 2 = 4"]),
        (2, 3, 6, 2, 66, ["kv heads", "2 kv heads", "tp", "3"]),
        (3, 2, 6, 3, 64, ["kv heads", "3 kv heads", "tp", "2"]),
        (1, 4, 4, 2, 66, ["feed-forward", "66", "4"]),
    ],
)
def test_model_must_fit_the_layout(sp, tp, heads, kv_heads, width, words):
    """Heads cut in pieces, or paired with another kv head, with no word said (case 26)."""
    with pytest.raises(ValueError) as error:
        check_model(sp, tp, heads, kv_heads, width)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "sp, tp, heads, kv_heads",
    [(1, 1, 9, 3), (2, 2, 4, 2), (4, 1, 4, 1), (1, 4, 8, 2), (4, 2, 8, 4)],
)
def test_fitting_models_are_accepted(sp, tp, heads, kv_heads):
    """A layout that works is refused."""
    check_model(sp, tp, heads, kv_heads, 64)


def test_wrong_layout_is_refused_alike_on_every_rank():
    """One rank raises and the others wait for it in a process group."""
    with pytest.raises(RuntimeError) as error:
        run_ranks(place, 3, 2, 1)
    for rank in range(3):
        assert f"rank {rank}: " in str(error.value)
    assert "world size must be a multiple of sp * tp" in str(error.value)
