"""Check an installation: does this machine compute what it should? Prints a table to paste.

python scripts/doctor.py                            the best device here
python scripts/doctor.py --device xla               torch-xla (on CPU devices: PJRT_DEVICE=CPU)
torchrun --nproc_per_node 4 scripts/doctor.py       several ranks: also their collectives

Every rank checks; rank 0 prints. Exit status 1 when anything failed on any rank.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Literal

import torch
import tyro
from torch import Tensor

sys.path.insert(0, os.path.dirname(__file__))
from train import TrainConfig, adamw, train_step

from minitrain.agreement import host_axis, tell_all
from minitrain.bf16_optimizer import BF16Optimizer
from minitrain.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from minitrain.data_sharder import shard_batch
from minitrain.device import Device, pick_device
from minitrain.environment import notes, traps
from minitrain.launch import init_distributed, launched_rank, shut_down
from minitrain.mesh import Axis, Mesh, init_mesh
from minitrain.model import CausalLM, ModelConfig
from minitrain.model_sharder import fill_weights, random_weights, shard_model
from minitrain.setup import DTYPES

PACKAGES = (
    "torch",
    "torch-xla",
    "torch-neuronx",
    "neuronx-cc",
    "neuronx-distributed",
    "libneuronxla",
)
MODEL = ModelConfig(256, 64, 128, 2, num_heads=8, num_kv_heads=8, head_dim=8)
STEPS = 3


@dataclass(frozen=True)
class Row:
    """One line of the report. failed: the words are what is wrong."""

    check: str
    words: str
    failed: bool = False


def versions(device: Device) -> Iterator[Row]:
    """What is installed."""
    found = [f"python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    yield Row("packages", ", ".join(found))
    yield Row("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    for words in notes(device):
        yield Row("note", words)


def numbers(device: Device) -> Iterator[Row]:
    """float32 must hold 24 bits, and the operators must be there."""
    exact = torch.tensor([1.0 + 2.0**-20, 1.0]).to(device.torch_device)
    kept = (exact[0] - exact[1]).item() == 2.0**-20
    yield Row("float32", "24 bits" if kept else "fewer bits than 24: 1 + 2^-20 became 1", not kept)


def collectives(mesh: Mesh) -> Iterator[Row]:
    """Each collective on each axis, against numbers that are known."""
    for axis in (mesh.dp, mesh.sp, mesh.tp, mesh.dp_sp):
        if axis.size == 1:
            continue
        wrong = []
        for name, (call, want) in known_answers(axis, mesh.device).items():
            got = call()
            mesh.device.sync()
            if not torch.equal(got.cpu(), want):
                wrong.append(f"{name} gave {got.flatten().tolist()}, not {want.flatten().tolist()}")
        words = "; ".join(wrong) or "all-reduce, max, all-gather, reduce-scatter, all-to-all"
        yield Row(f"collectives, {axis.name} {axis.size}", words, bool(wrong))


def known_answers(axis: Axis, device: Device) -> dict[str, tuple[Callable[[], Tensor], Tensor]]:
    """Name -> the call, and what it must return. Row i of rank r's tensor is 10 r + i."""
    every_nn = 10.0 * torch.arange(axis.size)[:, None] + torch.arange(axis.size)
    x_n1 = every_nn[axis.rank].to(device.torch_device)[:, None]
    mine, total = every_nn[:, axis.rank], every_nn.sum(0)
    return {
        "all-reduce": (lambda: all_reduce(x_n1, axis), total[:, None]),
        "max": (lambda: all_reduce(x_n1, axis, "max"), every_nn.amax(0)[:, None]),
        "all-gather": (lambda: all_gather(x_n1, axis, 0), every_nn.reshape(-1, 1)),
        "reduce-scatter": (lambda: reduce_scatter(x_n1, axis, 0), total[axis.rank].view(1, 1)),
        "all-to-all": (lambda: all_to_all(x_n1, axis, 0, 1), mine[None]),
    }


def three_steps(mesh: Mesh, config: TrainConfig) -> tuple[list[float], list[int | None]]:
    """Losses of STEPS updates of a small model, and the programs compiled so far after each."""
    device, dtype = mesh.device, DTYPES[config.dtype]
    with torch.device("meta"):
        model = CausalLM(MODEL)
    spec = shard_model(model, mesh)
    reader = random_weights(MODEL, spec.shapes, seed=0)
    fill_weights(model, spec, mesh, device.torch_device, dtype, reader)
    make_optimizer = adamw(config, device.torch_device)
    named = model.named_parameters()
    optimizer = BF16Optimizer(named, make_optimizer, mesh.dp_sp.size, mesh.dp_sp.rank)
    losses, compiled = [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 256, (config.batch_size, 32), generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
        batch = shard_batch(SimpleNamespace(input_ids=ids, labels=labels), mesh)
        micro_batches = batch.split(config.micro_batch_size, device.torch_device)
        metrics = train_step(model, optimizer, micro_batches, mesh, spec, config)
        losses.append(metrics["loss"].item())
        compiled.append(device.compilations())
    return losses, compiled


def training(mesh: Mesh) -> Iterator[Row]:
    """train.py's own step here in float32, and in this process alone on the CPU in float64."""
    rows = 4 * mesh.dp.size
    config = TrainConfig(batch_size=rows, micro_batch_size=2, dtype="fp32", warmup_steps=0)
    losses, compiled = three_steps(mesh, config)
    exact = three_steps(Mesh(), replace(config, dtype="fp64"))[0]
    off = max(abs(a - b) for a, b in zip(losses, exact))
    words = f"losses {', '.join(f'{x:.6f}' for x in losses)}; off float64 on the CPU by {off:.1e}"
    yield Row(f"{STEPS} training steps", words, not off < 1e-4)
    if compiled[0] is not None:
        new = [after - before for before, after in zip([0, *compiled], compiled)]
        words = f"{', '.join(map(str, new))} in steps 1 to {STEPS}"
        yield Row("programs compiled", words, new[-1] > 0)
    names = mesh.device.fallback_operators()
    yield Row("operators on the host", ", ".join(names) or "none", bool(names))
    memory = mesh.device.memory_peak_bytes()
    yield Row("peak memory", "unknown" if memory is None else f"{memory / 1e6:,.0f} MB")


def checked(check: Callable[..., Iterator[Row]], *args) -> list[Row]:
    """The rows of a check; an error in it is a failure of its own."""
    rows = []
    try:
        rows.extend(check(*args))
    except Exception as error:
        first = str(error).strip().splitlines() or [""]
        rows.append(Row(check.__name__, f"{type(error).__name__}: {first[0]}", True))
    return rows


def examine(device: Device, sp: int, tp: int) -> list[Row]:
    """All checks on this rank."""
    rows = checked(versions, device) + checked(numbers, device)
    rows += [Row("environment", words) for words in traps(device.kind)]
    mesh = init_mesh(sp, tp, device)
    rows.append(Row("layout", mesh.describe().splitlines()[0]))
    return rows + checked(collectives, mesh) + checked(training, mesh)


def main(
    device: Literal["auto", "cpu", "cuda", "xla", "neuron"] = "auto", sp: int = 1, tp: int = 1
) -> None:
    """Check an installation and print a table; exit status 1 when something is wrong.

    Args:
        device: what to check; auto is cuda or neuron when there is one, else cpu.
        sp: ranks that share each row, as in train.py.
        tp: ranks that share each matrix, as in train.py.
    """
    try:
        this = pick_device(device)
        init_distributed(this)
        rows = examine(this, sp, tp)
    except ValueError as error:
        if launched_rank() == 0:
            print(f"FAILED  {error}")
        sys.exit(1)
    failed = [row for row in rows if row.failed]
    said = tell_all("; ".join(f"{row.check}: {row.words}" for row in failed), host_axis(this))
    if this.rank() == 0:
        width = max(len(row.check) for row in rows)
        for row in rows:
            print(f"{'FAILED' if row.failed else 'ok':6}  {row.check:{width}}  {row.words}")
        for rank, words in enumerate(said):
            if words and rank:
                print(f"FAILED  rank {rank}: {words}")
        print(
            "all is well" if not any(said) else "something is wrong: see the lines that say FAILED"
        )
    shut_down()
    sys.exit(1 if any(said) else 0)


if __name__ == "__main__":
    tyro.cli(main)
