"""The path of TorchNeuron, on a stand-in that accepts only what the real device does."""

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import tiny_config
from layout_runs import train
from neuron_stand_in import Programs, StandIn
from xla_cases import SETTINGS, build, rows_of, train_case

from minitrain import environment
from minitrain.bf16_optimizer import BF16Optimizer
from minitrain.data_sharder import shard_batch
from minitrain.device import Device, NeuronDevice, pick_device
from minitrain.launch import run_ranks
from minitrain.mesh import init_mesh

if not hasattr(dist, "ProcessGroupGloo"):
    pytest.skip("needs gloo", allow_module_level=True)


def start_stand_in(store: str) -> StandIn:
    """Leave run_ranks' own process group and join the stand-in's, on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    device = StandIn()
    device.init_process_group(rank, world, store=dist.FileStore(store, world))
    return device


def on_stand_in(fn, world_size: int) -> list:
    """Run fn(device) on ranks joined by the stand-in."""
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "neuron")
        return run_ranks(lambda: fn(start_stand_in(store)), world_size)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize(
    ("world", "settings"),
    [(2, {"tp": 2}), (4, {"sp": 2, "tp": 2}), (4, {"shard_optimizer": False})],
    ids=["tp 2", "sp 2 x tp 2", "dp 4"],
)
def test_layouts_use_only_what_the_backend_takes(world, settings, packed):
    """Red when a collective is uneven, empty, strided, of a dtype, or on a group that neuron has
    not; and when the numbers are not those of one process.
    """
    case = {"steps": 5, "packed": packed, "settings": {"micro_batch_size": 2, **settings}}
    kept = {k: v for k, v in case["settings"].items() if k not in ("sp", "tp")}
    want = train_case(Device(), {**case, "settings": kept})
    for records in on_stand_in(lambda device: train_case(device, case), world):
        for record, expected in zip(records, want, strict=True):
            assert record["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert record["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
            assert record["skipped"] == expected["skipped"]


def test_the_stand_in_refuses():
    """Red when the stand-in would let through what the real backend does not have."""

    def fn(device):
        world, pair = dist.get_world_size(), dist.new_group([0, 1])
        refused = []
        for call in (
            lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2), [1, 1], [1, 1]),
            lambda: dist.all_reduce(torch.ones(2, dtype=torch.float64)),
            lambda: dist.all_reduce(torch.ones(0)),
            lambda: dist.barrier(group=pair),
        ):
            try:
                call()
            except (ValueError, NotImplementedError):
                refused.append(True)
        device.barrier()  # goes over gloo
        return world, len(refused), dist.get_backend(), dist.get_backend(device.host_group)

    assert on_stand_in(fn, 2) == [(2, 4, "neuron", "gloo")] * 2


def test_a_step_compiles_once_and_never_waits(monkeypatch):
    """Red when a step reads a number, makes float64, or meets a new shape or constant: packed rows,
    other masks, rates and token counts at every step.
    """
    supported = lambda *_: ["cpu"]  # noqa: E731  AdamW's capturable path, as on neuron
    adam = sys.modules["torch.optim.adam"]
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", supported)
    device = StandIn()
    settings = replace(SETTINGS, micro_batch_size=4, max_grad_norm=3.8, tile_tokens=16)
    mesh = init_mesh(1, 1, device)
    model, spec, _ = build(mesh, settings, tiny_config())

    def adamw(groups):
        rate = torch.zeros((), dtype=torch.float32)
        return torch.optim.AdamW(groups, lr=rate, capturable=True, foreach=False)

    optimizer = BF16Optimizer(model.named_parameters(), adamw)
    seen = []
    for step in range(6):
        batch = shard_batch(rows_of(step, packed=True), mesh)
        with Programs() as programs:
            micro_batches = batch.split(settings.micro_batch_size)
            train.train_step(model, optimizer, micro_batches, mesh, spec, settings)
        seen.append(programs.seen)
    assert len(seen[0]) > 100
    for step in range(2, 6):
        assert seen[step] <= seen[1], seen[step] - seen[1]


def test_a_changing_alpha_is_a_new_program():
    """Red when Programs does not see the mistake of p.add_(u, alpha=-lr)."""
    seen = []
    for lr in (0.1, 0.2):
        with Programs() as programs:
            torch.ones(3).add_(torch.ones(3), alpha=-lr)
        seen.append(programs.seen)
    assert seen[0] != seen[1]


def test_the_device_is_refused_in_words():
    """Red when a machine without Trainium, or fp64 on it, ends in a traceback."""
    with pytest.raises(ValueError, match=r"torch-neuronx 2\.13 or later"):
        pick_device("neuron")


def test_float64_is_refused(monkeypatch):
    """Red when --dtype fp64 would be computed in float32 without a word."""
    monkeypatch.setattr(environment, "has_neuron", lambda: True)
    with pytest.raises(ValueError, match="float64"):
        environment.check_environment("neuron", ("neuron",), "fp64")


def test_programs_and_environment(monkeypatch):
    """Red when blocks are not compiled by neuron's own compiler, or failing operators may fall
    back.
    """
    monkeypatch.delenv("TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS", raising=False)
    device = NeuronDevice()
    assert os.environ.pop("TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS") == "1"
    assert device.compile_args == {"backend": "neuron", "dynamic": False}
    assert device.compiles
