"""Masters, main gradients, skipped updates, and pieces of them."""

import copy
import math

import pytest
import torch
from torch import nn

from minitrain.bf16_optimizer import BF16Optimizer

OPTIMIZERS = {
    "fused_adamw": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01), fused=True),
    "fused_adamw_number": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adamw_foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=True),
    "sgd_momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01),
}
EVERY = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
SHAPES = {"matrix": (5, 3), "norm": (7,), "one": (1,)}
YES, NO = torch.tensor([True]), torch.tensor([False])


def params_of(dtype=torch.float32, seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {n: torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}
    return {n: nn.Parameter(w.to(dtype)) for n, w in drawn.items()}


def give_grads(params: dict[str, nn.Parameter], seed: int) -> None:
    for place, param in enumerate(params.values()):
        generator = torch.Generator().manual_seed(100 * seed + place)
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def update(optimizer: BF16Optimizer, seed: int, lr=0.01, skip=None) -> None:
    give_grads(optimizer.params, seed)
    update_with(optimizer, lr, skip)


def update_with(optimizer: BF16Optimizer, lr=0.01, skip=None) -> None:
    optimizer.accumulate_grads()
    if optimizer.num_shards > 1:  # grad_reducer's part, on one rank
        optimizer.grads |= {n: g[optimizer.shard_rank] for n, g in optimizer.main_grads.items()}
    optimizer.step(lr, skip)


def everything(optimizer: BF16Optimizer) -> list[torch.Tensor]:
    """All that an update may change: model, masters, moments, step counters, number of updates."""
    state = [
        (key, value.detach().clone())
        for master in optimizer.masters.values()
        for key, value in sorted(optimizer.optimizer.state.get(master, {}).items())
        if isinstance(value, torch.Tensor)
    ]
    tensors = [*optimizer.params.values(), *optimizer.masters.values(), optimizer.updates]
    return [t.detach().clone() for t in tensors] + [value for _, value in state]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others))


@EVERY
def test_float32_equals_the_bare_optimizer(make):
    """Groups, learning rate or gradients do not reach the wrapped optimizer."""
    params, bare = params_of(), params_of()
    optimizer = BF16Optimizer(params.items(), make)
    groups = [{"params": [bare["matrix"]]}, {"params": [bare["norm"], bare["one"]]}]
    groups[1]["weight_decay"] = 0.0
    plain = make(groups)
    for step in range(4):
        update(optimizer, step)
        give_grads(bare, step)
        plain.step()
    assert all(torch.equal(params[n], bare[n]) for n in params)
    assert optimizer.updates.item() == 4


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [0, 2])
def test_a_skipped_update_changes_nothing(make, dtype, before):
    """A step without tokens or with NaN moves weights, moments or counters, even as the very
    first (3, 23); or the updates after it are skipped too.
    """
    optimizer = BF16Optimizer(params_of(dtype).items(), make)
    never = BF16Optimizer(params_of(dtype).items(), make)
    for step in range(before):
        update(optimizer, step, skip=NO)
        update(never, step)
    want = everything(optimizer)
    give_grads(optimizer.params, 9)
    optimizer.params["matrix"].grad[0, 0] = math.nan
    optimizer.accumulate_grads()
    optimizer.step(0.01, skip=YES)
    after = everything(optimizer)
    assert same(want, after[: len(want)])
    assert not any(t.any() for t in after[len(want) :])  # state made by a first, skipped step
    assert not optimizer.main_grads
    for step, skip in ((5, None), (6, NO), (7, None)):
        update(optimizer, step, skip=skip)
        update(never, step)
    assert same(everything(optimizer), everything(never))


@EVERY
@pytest.mark.parametrize("num_shards", [2, 3])
def test_shards_equal_the_whole(make, num_shards):
    """A piece starts at the wrong place, padding moves, or decay falls on a norm's piece."""
    whole = BF16Optimizer(params_of().items(), make)
    shards = [
        BF16Optimizer(params_of().items(), make, num_shards, rank) for rank in range(num_shards)
    ]
    for step in range(3):
        for optimizer in (whole, *shards):
            update(optimizer, step, skip=YES if step == 1 else NO)
    for n, master in whole.masters.items():
        joined = torch.cat([shard.masters[n].detach() for shard in shards])
        assert torch.equal(joined[: master.numel()], master.detach().flatten()), n
        assert not joined[master.numel() :].any()
        assert joined.numel() == num_shards * math.ceil(master.numel() / num_shards)


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_main_grads_are_as_the_docstring_says(num_shards):
    """Red when main_grads have another shape or order, exist before a gradient or after an update,
    or a parameter without one is not zeros.
    """
    optimizer = BF16Optimizer(params_of().items(), torch.optim.SGD, num_shards)
    assert not optimizer.main_grads
    give_grads(optimizer.params, 1)
    optimizer.params["norm"].grad = None
    grads = {n: p.grad.clone() for n, p in optimizer.params.items() if p.grad is not None}
    optimizer.accumulate_grads()
    assert optimizer.main_grads.keys() == grads.keys()
    for n, grad in grads.items():
        assert optimizer.params[n].grad is None
        flat = optimizer.main_grads[n].reshape(-1)
        assert torch.equal(flat[: grad.numel()], grad.flatten()) and not flat[grad.numel() :].any()
        assert (optimizer.main_grads[n].shape == grad.shape) == (num_shards == 1)
    size = math.ceil(7 / num_shards)
    norm = optimizer.take_main_grad("norm")
    assert not norm.any() and norm.shape == ((7,) if num_shards == 1 else (num_shards, size))
    optimizer.step(0.01)
    assert not optimizer.main_grads and not optimizer.grads
    assert all(m.grad is None for m in optimizer.masters.values())


@pytest.mark.parametrize("name", ["fused_adamw", "fused_adamw_number", "adamw", "sgd_momentum"])
def test_learning_rate_as_number_or_tensor(name):
    """A tensor's rate is rounded to another, or the first rate stays for ever."""
    results = []
    for convert in (float, torch.tensor, lambda lr: torch.tensor([lr])):
        optimizer = BF16Optimizer(params_of().items(), OPTIMIZERS[name])
        for step, lr in enumerate((0.5, 0.0, 0.25)):
            before = everything(optimizer)[: len(SHAPES)]
            update(optimizer, step, convert(lr))
            assert same(before, everything(optimizer)[: len(SHAPES)]) == (lr == 0.0)
        results.append(everything(optimizer))
    assert same(results[0], results[1]) and same(results[0], results[2])


@pytest.mark.parametrize("name", ["fused_adamw", "adamw"])
def test_small_updates_are_not_lost_in_bf16(name):
    """bf16 weights updated without masters stay at 1.0 (case 29)."""
    bf16 = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    fp32, plain = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizers = [BF16Optimizer([("w", p)], OPTIMIZERS[name]) for p in (bf16, fp32)]
    bare = torch.optim.AdamW([plain], lr=1e-3, weight_decay=0.0)
    for _ in range(1000):
        for optimizer, param in zip(optimizers, (bf16, fp32)):
            param.grad = torch.ones_like(param)
            optimizer.accumulate_grads()
            optimizer.step(1e-3)
            assert torch.equal(param.detach(), optimizer.masters["w"].detach().to(param.dtype))
        plain.grad = torch.ones_like(plain)
        bare.step()
    assert fp32.abs().max() < 1e-3 and bf16.float().abs().max() < 1e-3
    assert torch.equal(optimizers[0].masters["w"], optimizers[1].masters["w"])
    assert plain[0].item() == 1.0
    assert optimizers[0].updates.item() == 1000
    step = optimizers[0].optimizer.state[optimizers[0].masters["w"]]["step"]
    assert step.item() == 1000  # a counter in bf16 stops at 256 (case 31)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_micro_batches_are_summed_in_float32(num_shards):
    """1024 gradients of 1e-3 summed in bf16 end at 0.5 (case 30)."""
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = BF16Optimizer([("w", param)], torch.optim.SGD, num_shards)
    for _ in range(1024):
        param.grad = torch.full_like(param, 1e-3)
        optimizer.accumulate_grads()
    total = optimizer.main_grads["w"].reshape(-1)[:4]
    want = 1024 * torch.tensor(1e-3, dtype=torch.bfloat16).item()
    assert total.dtype == torch.float32
    assert torch.allclose(total, torch.full((4,), want), rtol=1e-5) and abs(want - 1.02) < 0.01


@pytest.mark.parametrize("num_shards", [1, 2])
def test_weight_decay_is_for_matrices_only(num_shards):
    """Norms and biases decay, also as flat pieces of a sharded optimizer (case 32)."""
    params = {"matrix": nn.Parameter(torch.ones(2, 2)), "norm": nn.Parameter(torch.ones(4))}
    optimizer = BF16Optimizer(
        params.items(),
        lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, fused=True),
        num_shards,
    )
    for _ in range(100):
        for param in params.values():
            param.grad = torch.zeros_like(param)
        update_with(optimizer)
    matrix, norm = (optimizer.masters[n].detach().flatten() for n in ("matrix", "norm"))
    assert torch.allclose(matrix, torch.full_like(matrix, 0.999**100), rtol=1e-5)
    assert abs(matrix[0].item() - 0.9048) < 1e-4
    assert (norm == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_of_masters_and_main_grads(dtype):
    """float64 checked in float32, or bf16 trained in bf16."""
    optimizer = BF16Optimizer(params_of(dtype).items(), OPTIMIZERS["fused_adamw"])
    want = torch.promote_types(dtype, torch.float32)
    assert {m.dtype for m in optimizer.masters.values()} == {want}
    give_grads(optimizer.params, 0)
    optimizer.accumulate_grads()
    assert {g.dtype for g in optimizer.main_grads.values()} == {want}
    optimizer.step(0.01)
    assert {p.dtype for p in optimizer.params.values()} == {dtype}


def test_frozen_parameters_are_left_alone():
    """A frozen parameter gets masters, moments, decay or a place in the norm."""
    params = params_of()
    params["matrix"].requires_grad_(False)
    before = params["matrix"].clone()
    optimizer = BF16Optimizer(params.items(), OPTIMIZERS["adamw"])
    for param in optimizer.params.values():
        param.grad = torch.ones_like(param)
    optimizer.accumulate_grads()
    assert set(optimizer.masters) == set(optimizer.grads) == {"norm", "one"}
    optimizer.step(0.01)
    assert torch.equal(params["matrix"], before)


def test_a_parameter_without_gradient_adds_nothing():
    """A parameter that no token reached stops the step (case 2)."""
    optimizer = BF16Optimizer(params_of().items(), OPTIMIZERS["fused_adamw"])
    optimizer.params["norm"].grad = torch.ones(7)
    optimizer.accumulate_grads()
    assert list(optimizer.main_grads) == ["norm"] and optimizer.main_grads["norm"].all()
    optimizer.step(0.01)


def test_masters_survive_where_bf16_rounds():
    """Masters rebuilt from rounded weights lose what they had gained (case 31)."""
    optimizer = BF16Optimizer(params_of(torch.bfloat16).items(), OPTIMIZERS["sgd"])
    update(optimizer, 0, lr=1e-4)
    kept = copy.deepcopy({n: m.detach() for n, m in optimizer.masters.items()})
    rebuilt = BF16Optimizer(optimizer.params.items(), OPTIMIZERS["sgd"]).masters
    assert any(not torch.equal(kept[n], rebuilt[n].detach()) for n in kept)
