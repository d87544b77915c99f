"""One global norm, every gradient counted once, equal on every rank."""

import math

import pytest
import torch
from conftest import counting_mesh
from torch import nn

from minitrain.bf16_optimizer import BF16Optimizer
from minitrain.grad_clipper import clip_grad_norm_
from minitrain.grad_reducer import reduce_gradients_, reduce_main_grads
from minitrain.launch import run_ranks
from minitrain.mesh import Mesh, init_mesh


def split_and_replicated(max_norm: float, sp: int):
    """Shards with gradients 3 and 4 over tp, and 12 on every rank."""
    mesh = init_mesh(sp, 2)
    grads = {
        "split": torch.tensor([3.0 + mesh.tp.rank], dtype=torch.float64),
        "replicated": torch.tensor([12.0], dtype=torch.float64),
    }
    norm = clip_grad_norm_(grads, {"split": 0, "replicated": None}, mesh, max_norm)
    return norm.item(), grads["split"].item(), grads["replicated"].item()


@pytest.mark.parametrize("world, sp", [(2, 1), (4, 1), (4, 2)])
def test_every_gradient_counts_once(world, sp):
    """The replicated one counted on each rank (17.69), a rank's own shards alone (12.37), or the
    norm of one layout times another's (case 20).
    """
    for rank, got in enumerate(run_ranks(split_and_replicated, world, 1.3, sp)):
        want = (13.0, 0.3 + 0.1 * (rank % 2), 1.2)
        assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("max_norm", [math.inf, 13.1, 1e9])
def test_no_clipping_below_the_limit(max_norm):
    """Gradients are scaled up to the limit, or the norm is not made when clipping is off (22)."""
    for rank, got in enumerate(run_ranks(split_and_replicated, 2, max_norm, 1)):
        assert got == (13.0, 3.0 + rank, 12.0)


@pytest.mark.parametrize("max_norm", [0.5, 1.0, 100.0])
def test_equals_torchs_clipping(max_norm):
    """Another epsilon or factor than torch.nn.utils.clip_grad_norm_."""
    grads = {f"p{i}": torch.randn(4, 3 + i, dtype=torch.float64) for i in range(3)}
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads.values()]
    for param, grad in zip(params, grads.values()):
        param.grad = grad.clone()
    want = torch.nn.utils.clip_grad_norm_(params, max_norm)
    norm = clip_grad_norm_(grads, dict.fromkeys(grads), Mesh(), max_norm)
    assert norm.item() == pytest.approx(want.item(), rel=1e-14)
    for param, grad in zip(params, grads.values()):
        assert torch.allclose(grad, param.grad, rtol=1e-14)


def clipped_after_the_sum():
    mesh = init_mesh()
    grads = {"w": torch.tensor([[3.0, 0.0], [0.0, 4.0]][mesh.dp.rank])}
    reduce_gradients_(grads, mesh.dp_sp)
    return clip_grad_norm_(grads, {"w": None}, mesh, math.inf).item(), grads["w"].tolist()


def test_the_norm_is_that_of_the_sum():
    """Norms of the parts, before they were reduced (case 21)."""
    assert run_ranks(clipped_after_the_sum, 2) == [(5.0, [3.0, 4.0])] * 2


def by_pieces(tp: int, shard: bool):
    """The norm of main gradients, whole or in pieces over dp_sp, with a part split over tp."""
    mesh = counting_mesh(1, tp)
    axis = mesh.dp_sp
    generator = torch.Generator().manual_seed(axis.rank)
    shared = torch.randn(7, generator=generator, dtype=torch.float64)
    whole = torch.randn(4 * tp, 3, generator=generator, dtype=torch.float64)
    mine = whole.chunk(tp)[mesh.tp.rank]
    params = {"norm": nn.Parameter(shared * 0), "matrix": nn.Parameter(mine * 0)}
    params["frozen"] = nn.Parameter(shared, requires_grad=False)
    shards = (axis.size, axis.rank) if shard else (1, 0)
    optimizer = BF16Optimizer(params.items(), torch.optim.SGD, *shards)
    params["norm"].grad, params["matrix"].grad = shared, mine
    optimizer.accumulate_grads()
    grads = reduce_main_grads(optimizer, axis)
    spec = {"norm": None, "matrix": 0, "frozen": None}
    for group in (mesh.dp_sp.group, mesh.tp.group):
        if group:
            group.calls.clear()
    norm = clip_grad_norm_(grads, spec, mesh, 1.0, pieces=shard)
    calls = {name: getattr(mesh, name).group.calls for name in ("dp_sp", "tp") if tp > 1}
    squares = {n: (grads[n] ** 2).sum().item() for n in grads}
    return norm.item(), calls, squares


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dp", [2, 3])
def test_pieces_have_the_norm_of_the_whole(dp, tp):
    """Only this rank's pieces are counted, or replicated ones by every rank of dp (20, 24)."""
    whole = run_ranks(by_pieces, dp * tp, tp, False)
    pieces = run_ranks(by_pieces, dp * tp, tp, True)
    norms = [norm for norm, _, _ in whole + pieces]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-13)
    assert len({norm for norm, _, _ in pieces}) == 1  # bitwise equal: all ranks decide alike
    sums = sum(sum(squares.values()) for _, _, squares in pieces)
    if tp == 1:
        assert sums == pytest.approx(1.0, rel=1e-5)  # clipped to norm 1.0, in pieces
    else:
        for _, calls, _ in pieces:
            assert calls == {"dp_sp": [("all_reduce", 8)], "tp": [("all_reduce", 8)]}
        for _, calls, _ in whole:
            assert calls == {"dp_sp": [], "tp": [("all_reduce", 8)]}


def not_finite_on_one_rank(value: float, where: str, rank: int, pieces: bool):
    mesh = init_mesh(1, 2)
    grads = {"split": torch.ones(3), "replicated": torch.ones(2)}
    if mesh.rank == rank:
        grads[where][0] = value
    spec = {"split": 0, "replicated": None}
    return torch.isfinite(clip_grad_norm_(grads, spec, mesh, 1.0, pieces=pieces)).item()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["split", "replicated"])
def test_every_rank_sees_what_is_not_finite(where, value):
    """One rank skips the update and the others make it (case 23)."""
    for rank in (0, 3):
        found = run_ranks(not_finite_on_one_rank, 4, value, where, rank, True)
        assert found == [False] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_norm_is_at_least_float32(dtype):
    """Squares of bf16 gradients summed in bf16."""
    grads = {"w": torch.full((10000,), 0.01, dtype=dtype)}
    norm = clip_grad_norm_(grads, {"w": None}, Mesh(), math.inf)
    assert norm.dtype == torch.promote_types(dtype, torch.float32) and norm.shape == (1,)
    assert norm.item() == pytest.approx(100 * torch.tensor(0.01, dtype=dtype).item(), rel=1e-5)


def test_zero_gradients_stay_zero():
    """0 / 0: a step without gradients gives NaN."""
    grads = {"w": torch.zeros(3)}
    assert clip_grad_norm_(grads, {"w": None}, Mesh(), 1.0).item() == 0
    assert not grads["w"].any()
