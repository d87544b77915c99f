"""Gradients are summed over dp x sp, never averaged; pieces and wholes give the same model."""

import pytest
import torch
from conftest import ONE, counting_mesh
from torch import nn

from minitrain import grad_reducer
from minitrain.bf16_optimizer import BF16Optimizer
from minitrain.grad_reducer import (
    gather_params,
    reduce_gradients_,
    reduce_main_grads,
    start_reduction,
)
from minitrain.launch import run_ranks
from minitrain.mesh import Axis, init_mesh

SHAPES = {"matrix": (5, 3), "norm": (7,), "one": (1,), "wide": (2, 8)}


def of_rank(rank: int, dtype=torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {n: torch.randn(shape, generator=generator, dtype=dtype) for n, shape in SHAPES.items()}


def summed(bucket: int, as_dict: bool):
    grad_reducer.BUCKET_NUMEL = bucket
    mesh = counting_mesh(sp=2)
    axis = mesh.dp_sp
    grads = of_rank(axis.rank)
    transposed = grads["matrix"].t().contiguous().t()  # not contiguous, and of the same values
    grads["matrix"] = transposed
    kept = dict(grads)
    reduce_gradients_(grads if as_dict else grads.values(), axis)
    for n in SHAPES:
        want = sum(of_rank(rank)[n] for rank in range(axis.size))
        assert grads[n] is kept[n] and torch.allclose(grads[n], want, rtol=1e-14), n
    return axis.group.calls


@pytest.mark.parametrize("as_dict", [True, False])
@pytest.mark.parametrize("bucket, calls", [(1000, 1), (16, 3), (8, 3), (1, 4)])
def test_gradients_are_summed(bucket, calls, as_dict):
    """Gradients averaged, summed over dp alone, or a bucket lost at its border (41)."""
    for made in run_ranks(summed, 4, bucket, as_dict):
        assert [name for name, _ in made] == ["all_reduce"] * calls
        assert sum(size for _, size in made) == 8 * (15 + 7 + 1 + 16)


def test_one_rank_communicates_nothing():
    """An axis of size 1 has no group to call."""
    grads = of_rank(0)
    reduce_gradients_(grads, ONE)
    assert all(torch.equal(grads[n], of_rank(0)[n]) for n in SHAPES)


def trained(dtype: torch.dtype, shard: bool, steps: int, size: int):
    """Some updates from gradients that differ by rank; returns the model and bytes by call."""
    axis = counting_mesh().dp_sp
    params = {n: nn.Parameter(w.to(dtype)) for n, w in of_rank(100).items()}
    optimizer = BF16Optimizer(
        params.items(),
        lambda groups: torch.optim.AdamW(groups, lr=0.01),
        num_shards=axis.size if shard else 1,
        shard_rank=axis.rank if shard else 0,
    )
    for step in range(steps):
        for n, grad in of_rank(10 * step + axis.rank).items():
            params[n].grad = (grad * 8).round().div(8).to(dtype)  # sums are exact in any order
        optimizer.accumulate_grads()
        grads = reduce_main_grads(optimizer, axis)
        assert grads.keys() == params.keys()
        optimizer.step(0.01)
        gather_params(optimizer, axis)
    calls = axis.group.calls if size > 1 else []
    return {n: p.detach() for n, p in params.items()}, calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_sharded_equals_unsharded_bitwise(size, dtype):
    """A piece goes to another place, padding enters, or ranks end with different models."""
    whole = run_ranks(trained, size, dtype, False, 3, size)
    pieces = run_ranks(trained, size, dtype, True, 3, size)
    for model, _ in [*whole[1:], *pieces]:
        assert all(torch.equal(model[n], w) for n, w in whole[0][0].items())
    start = of_rank(100)
    assert not any(torch.equal(whole[0][0][n], w.to(dtype)) for n, w in start.items())


def test_bytes_on_the_wire():
    """More is sent than one sum of the main gradients, or one scatter and one gather of bf16."""
    n = 15 + 7 + 1 + 16  # divided by 3 ranks: pieces of 5, 3, 1, 6
    for _, calls in run_ranks(trained, 3, torch.bfloat16, False, 1, 3):
        assert calls == [("begin_sum", 4 * n)]
    for _, calls in run_ranks(trained, 3, torch.bfloat16, True, 1, 3):
        assert calls == [("begin_sum", 4 * 3 * 15), ("all_gather", 2 * 15)]


def a_rank_without_tokens():
    """One rank has no gradient at all: it takes part with zeros."""
    axis = init_mesh().dp_sp
    param = nn.Parameter(torch.zeros(4))
    optimizer = BF16Optimizer([("w", param)], torch.optim.SGD)
    if axis.rank == 0:
        param.grad = torch.ones(4)
        optimizer.accumulate_grads()
    return reduce_main_grads(optimizer, axis)["w"]


def test_a_rank_without_gradients_takes_part():
    """A rank whose loss has no token leaves the collective out: the others hang (case 2)."""
    for grad in run_ranks(a_rank_without_tokens, 2, timeout_s=20):
        assert grad.tolist() == [1.0] * 4


def overlapped(shard: bool, bucket: int, silent: str):
    """The sum beside a backward pass, and after it, of gradients that differ by rank; in place of
    one parameter's gradient there is none.
    """
    grad_reducer.BUCKET_NUMEL = bucket
    axis = counting_mesh().dp_sp
    sums = []
    for begins in (False, True):
        params = {n: nn.Parameter(torch.ones(shape).double()) for n, shape in SHAPES.items()}
        shards = (axis.size, axis.rank) if shard else (1, 0)
        optimizer = BF16Optimizer(params.items(), torch.optim.SGD, *shards)
        for micro in range(2):
            if begins and micro == 1:
                start_reduction(optimizer, axis)
            grads = of_rank(10 * micro + axis.rank)
            sum((grads[n] * p).sum() for n, p in params.items() if n != silent).backward()
            optimizer.accumulate_grads()
        axis.group.calls.clear()
        begun = optimizer.reduction.begun if begins else 0
        sums.append({n: g.clone() for n, g in reduce_main_grads(optimizer, axis).items()})
    return sums, begun, optimizer.reduction


@pytest.mark.parametrize("silent", ["", "norm"])
@pytest.mark.parametrize("bucket", [1000, 16, 3])
@pytest.mark.parametrize("shard", [False, True])
def test_the_sum_beside_the_backward_pass_is_the_same(shard, bucket, silent):
    """Red when a bucket is summed before its last gradient, twice, never, or into another place; or
    when nothing is begun before the backward pass has ended.
    """
    for (after, beside), begun, left in run_ranks(overlapped, 3, shard, bucket, silent):
        assert left is None and after.keys() == beside.keys()
        assert all(torch.allclose(beside[n], g, rtol=1e-14) for n, g in after.items())
        assert begun == {
            (1000, ""): 1,
            (16, ""): 3,
            (3, ""): 4,
            (3, "norm"): 2,
            (16, "norm"): 1,
        }.get((bucket, silent), 0)


def misused(second: str):
    axis = init_mesh().dp_sp
    param = nn.Parameter(torch.ones(2))
    optimizer = BF16Optimizer([("w", param)], torch.optim.SGD)
    start_reduction(optimizer, axis)
    (param.sum() * 2).backward()
    if second == "backward":
        param.sum().backward()
    reduce_main_grads(optimizer, Axis("dp") if second == "axis" else axis)


@pytest.mark.parametrize(
    "second, words",
    [("backward", "w got a second gradient after start_reduction"), ("axis", "the same axis, not")],
)
def test_misuse_of_start_reduction(second, words):
    """Red when a gradient after the sum is lost in silence, or the sum is over other ranks."""
    with pytest.raises(Exception, match=words):
        run_ranks(misused, 2, second, timeout_s=20)


def broken_off():
    axis = init_mesh().dp_sp
    params = {n: nn.Parameter(torch.ones(1)) for n in "ab"}
    optimizer = BF16Optimizer(params.items(), torch.optim.SGD)
    for _ in range(2):  # the first ends before its backward pass
        start_reduction(optimizer, axis)
    sum(params.values()).backward()
    return [grad.item() for grad in reduce_main_grads(optimizer, axis).values()]


def test_a_step_that_was_broken_off():
    """Red when hooks of an earlier step add each gradient once more."""
    assert run_ranks(broken_off, 2) == [[2.0, 2.0]] * 2
