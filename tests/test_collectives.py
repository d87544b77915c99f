"""Each collective against what its mathematics says, on every axis of a 2 x 2 x 2 mesh.

gradcheck runs in step on all ranks: every rank holds the same whole input, one part for each member
of the axis, and differentiates the sum of what all members made of it.
"""

import pytest
import torch
from conftest import ONE, counting_mesh

from minitrain import collectives
from minitrain.launch import run_ranks
from minitrain.mesh import init_mesh

AXES = ("dp", "sp", "tp", "dp_sp")


class PartOf(torch.autograd.Function):
    """whole[rank]; backward joins the members' gradients, so that the input is one leaf of all."""

    @staticmethod
    def forward(ctx, whole, axis):
        ctx.axis = axis
        return whole[axis.rank].clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.axis.group.all_gather(grad[None], 0), None


class TotalOf(torch.autograd.Function):
    """Sum over the members of a rank's own number: the objective of all of them."""

    @staticmethod
    def forward(ctx, x, axis):
        return axis.group.all_reduce(x, "sum")

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def gradcheck(name: str, axis, *args) -> bool:
    """Compare backward with differences; weights that differ by rank and place make any mix-up
    visible. All but tp take gradcheck's fast mode: one direction.
    """
    generator = torch.Generator().manual_seed(3)
    size = axis.size
    whole = torch.randn(size, size, size, 2, generator=generator, dtype=torch.float64)
    weights = torch.randn(size, 2 * size**3, generator=generator, dtype=torch.float64)
    replicated_in, replicated_out = name == "copy_to", name == "reduce_from"

    def objective(whole):
        x = whole[0].clone() if replicated_in else PartOf.apply(whole, axis)
        y = getattr(collectives, name)(x, axis, *args)
        member = 0 if replicated_out else axis.rank
        value = (y.sin() * weights[member][: y.numel()].view_as(y)).sum()
        return value if replicated_out else TotalOf.apply(value, axis)

    whole.requires_grad_()
    return torch.autograd.gradcheck(objective, whole, atol=1e-8, fast_mode=axis.name != "tp")


def check_all_gradients():
    mesh = init_mesh(2, 2)
    done = []
    for name in AXES:
        axis = getattr(mesh, name)
        for function, *args in (
            ("copy_to",),
            ("reduce_from",),
            ("all_gather", 0),
            ("all_gather", 1),
            ("all_gather", 2),
            ("reduce_scatter", 1),
            ("all_to_all", 1, 2),
            ("all_to_all", 1, 0),
            ("all_to_all", 0, 2),
        ):
            assert gradcheck(function, axis, *args), (name, function, args)
            done.append((name, function))
    return len(done)


def test_gradients_on_every_axis():
    """A backward that forgets a sum, sums twice, or sends parts to the wrong rank; groups without
    global rank 0 that fail (case 28).
    """
    assert run_ranks(check_all_gradients, 8) == [36] * 8


def forward_values(name: str):
    axis = getattr(init_mesh(2, 2), name)
    n, r = axis.size, axis.rank
    # Element [i, j] of member r is 100 r + 10 i + j.
    base = 10.0 * torch.arange(2 * n)[:, None] + torch.arange(2 * n)
    members = [100.0 * member + base for member in range(n)]
    x = members[r].clone()
    got = {
        "sum": collectives.all_reduce(x, axis),
        "max": collectives.all_reduce(x, axis, "max"),
        "min": collectives.all_reduce(x, axis, "min"),
        "reduce_from": collectives.reduce_from(x, axis),
        "copy_to": collectives.copy_to(x, axis),
        "gather0": collectives.all_gather(x, axis, 0),
        "gather1": collectives.all_gather(x, axis, 1),
        "scatter0": collectives.reduce_scatter(x, axis, 0),
        "scatter1": collectives.reduce_scatter(x, axis, 1),
        "to_all": collectives.all_to_all(x, axis, split_dim=0, concat_dim=1),
        "back": collectives.all_to_all(x, axis, split_dim=1, concat_dim=0),
    }
    total = torch.stack(members).sum(0)
    mine = slice(2 * r, 2 * r + 2)
    want = {
        "sum": total,
        "max": members[-1],
        "min": members[0],
        "reduce_from": total,
        "copy_to": x,
        "gather0": torch.cat(members, 0),
        "gather1": torch.cat(members, 1),
        "scatter0": total[mine],
        "scatter1": total[:, mine],
        "to_all": torch.cat([member[mine] for member in members], 1),
        "back": torch.cat([member[:, mine] for member in members], 0),
    }
    assert torch.equal(x, members[r]), "the input was changed"
    return [key for key in want if not torch.equal(got[key], want[key])]


@pytest.mark.parametrize("axis", AXES)
def test_values_on_every_axis(axis):
    """Parts in another order than the axis's, the wrong dim, or an input overwritten."""
    assert run_ranks(forward_values, 8, axis) == [[]] * 8


def dtypes():
    tp = init_mesh(1, 2).tp
    wrong = []
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int64):
        x = torch.arange(4).to(dtype) + tp.rank
        if collectives.all_reduce(x, tp).tolist() != [1, 3, 5, 7]:
            wrong.append(dtype)
        both = collectives.all_gather(x, tp, 0)
        if both.tolist() != [0, 1, 2, 3, 1, 2, 3, 4] or both.dtype != dtype:
            wrong.append(dtype)
        if collectives.reduce_scatter(x, tp, 0).tolist() != [[1, 3], [5, 7]][tp.rank]:
            wrong.append(dtype)
    return wrong


def test_dtypes():
    """A collective fails on bf16 or counts, or changes the dtype."""
    assert run_ranks(dtypes, 2) == [[], []]


def test_axis_of_size_one_changes_nothing():
    """One process runs another path: a copy, a sum, a missing group."""
    x = torch.randn(2, 4, requires_grad=True)
    for y in (
        collectives.copy_to(x, ONE),
        collectives.reduce_from(x, ONE),
        collectives.all_gather(x, ONE, 0),
        collectives.reduce_scatter(x, ONE, 0),
        collectives.all_to_all(x, ONE, 0, 1),
    ):
        assert y is x


@pytest.mark.parametrize("size", [1, 2])
def test_all_reduce_cuts_the_graph(size):
    """A metric keeps the whole step's activations alive, on one process only."""

    def fn():
        x = torch.ones(2, requires_grad=True)
        return collectives.all_reduce(x * 2, init_mesh(1, size).tp).requires_grad

    assert run_ranks(fn, size) == [False] * size


def calls_of_each():
    tp = counting_mesh(1, 2).tp
    seen = {}
    for name, *args in (
        ("copy_to",),
        ("reduce_from",),
        ("all_gather", 0),
        ("reduce_scatter", 0),
        ("all_to_all", 0, 1),
    ):
        x = torch.ones(4, 4, requires_grad=True)
        y = getattr(collectives, name)(x, tp, *args)
        forward = list(tp.group.calls)
        y.sum().backward()
        seen[name] = (forward, tp.group.calls[len(forward) :])
        tp.group.calls.clear()
    return seen


def test_each_communicates_what_its_docstring_says():
    """A second collective hides in one of them."""
    whole, half = 64, 32
    for seen in run_ranks(calls_of_each, 2):
        assert seen == {
            "copy_to": ([], [("all_reduce", whole)]),
            "reduce_from": ([("all_reduce", whole)], []),
            "all_gather": ([("all_gather", whole)], [("reduce_scatter", 2 * whole)]),
            "reduce_scatter": ([("reduce_scatter", whole)], [("all_gather", half)]),
            "all_to_all": ([("all_to_all", whole)], [("all_to_all", whole)]),
        }
