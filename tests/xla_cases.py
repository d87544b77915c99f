"""What the XLA tests run in a process of its own: train.py's own train_step on XLA CPU devices.

python tests/xla_cases.py '{"run": "train_case", "devices": 4, "settings": {"tp": 2}, "steps": 6}'

The last line of the output is the result of every rank as JSON. On Device() train_case is the
reference.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch
from conftest import lively_weights, tiny_config
from layout_runs import train
from xla_lockstep import host_operators, run_devices

from minitrain.bf16_optimizer import BF16Optimizer
from minitrain.data_sharder import shard_batch
from minitrain.device import Device
from minitrain.lora import LoRAConfig, add_lora, seed_dropout
from minitrain.memory import save_memory
from minitrain.mesh import Axis, init_mesh
from minitrain.model import CausalLM
from minitrain.model_sharder import fill_weights, shard_model
from minitrain.setup import DTYPES

SETTINGS = train.TrainConfig(
    batch_size=8,
    micro_batch_size=1,
    seq_len=12,
    lr=3e-3,
    steps=20,
    warmup_steps=3,
    tile_tokens=0,
    dtype="fp32",
)


def rows_of(step: int, packed: bool, rows: int = 8, length: int = 12) -> SimpleNamespace:
    """A global batch that is another at every step: tokens, masks, the row without labels, the
    borders of documents. Step 4 has no loss token at all.
    """
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 64, (rows, length), generator=generator)
    labels = ids.masked_fill(torch.rand(rows, length, generator=generator) < 0.3, -100)
    masked = step % 4 * 2
    labels[masked : masked + 2] = -100  # all rows of one rank of dp 4
    if step == 4:
        labels[:] = -100
    batch = SimpleNamespace(input_ids=ids, labels=labels)
    if packed:
        starts = torch.rand(rows, length, generator=generator) < 0.25
        place = torch.arange(length).expand(rows, length)
        begins = torch.where(starts, place, 0).cummax(1).values
        batch.documents, batch.position_ids = starts.long().cumsum(1), place - begins
    return batch


def build(mesh, settings, config):
    """Model, ShardSpec and optimizer on the mesh's device, as train.py's main makes them."""
    weights, device = lively_weights(config), mesh.device
    with torch.device("meta"):
        model = CausalLM(config)
    spec = shard_model(model, mesh, split_activations=settings.tp_split_activations)
    read = lambda name, part: weights[name][part]  # noqa: E731
    fill_weights(model, spec, mesh, device.torch_device, DTYPES[settings.dtype], read)
    if settings.lora_rank:
        adapter = LoRAConfig(rank=settings.lora_rank, dropout=settings.lora_dropout)
        add_lora(model, adapter, mesh, spec)
    save_memory(model, device, settings.activation_checkpointing, settings.tile_tokens)
    shards = mesh.dp_sp if settings.shard_optimizer else Axis("none")
    make_optimizer = train.adamw(settings, device.torch_device)
    optimizer = BF16Optimizer(model.named_parameters(), make_optimizer, shards.size, shards.rank)
    return model, spec, optimizer


def train_case(device: Device, case: dict) -> list[dict]:
    """Train on this rank's device.

    case      settings: what differs from SETTINGS; model: from tiny_config; steps; packed

    Returns   one record a step: loss, grad_norm, skipped, and on xla the programs compiled and the
              operators that ran on the host inside train_step, of all ranks
    """
    settings = replace(SETTINGS, **case.get("settings", {}))
    mesh = init_mesh(settings.sp, settings.tp, device)
    model, spec, optimizer = build(mesh, settings, tiny_config(**case.get("model", {})))
    on_xla = device.kind == "xla"
    records = []
    for step in range(case["steps"]):
        batch = shard_batch(rows_of(step, case.get("packed", False)), mesh)
        micro_batches = batch.split(settings.micro_batch_size, device.torch_device)
        seed_dropout(settings.seed, step, mesh)
        device.sync()
        before = (device.compilations(), host_operators()) if on_xla else None
        device.barrier()
        metrics = train.train_step(model, optimizer, micro_batches, mesh, spec, settings)
        if case.get("reads"):  # the mistake that the counters must show
            metrics["loss"].item()
        device.barrier()
        record = {}
        if on_xla:
            ran = host_operators().items()
            record["compiled"] = device.compilations() - before[0]
            record["on_host"] = {k: n - before[1].get(k, 0) for k, n in ran}
        device.barrier()
        for name in ("loss", "grad_norm", "skipped"):
            record[name] = metrics[name].item()
        records.append(record)
    return records


def overfit(device: Device, case: dict) -> dict:
    """Learn one sentence by heart, in bf16, padded rows under a mask, as the seeds' authors did."""
    settings = replace(SETTINGS, dtype="bf16", **case["settings"])
    mesh = init_mesh(settings.sp, settings.tp, device)
    model, spec, optimizer = build(mesh, settings, tiny_config())
    ids = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(3)).repeat(8, 1)
    rows = SimpleNamespace(input_ids=ids, labels=ids.clone())
    rows.labels[:, 9:] = -100
    losses = []
    for _ in range(case["steps"]):
        micro_batches = shard_batch(rows, mesh).split(
            settings.micro_batch_size, device.torch_device
        )
        metrics = train.train_step(model, optimizer, micro_batches, mesh, spec, settings)
        losses.append(metrics["loss"].item())
    return {"first": losses[0], "last": losses[-1]}


def dropout_masks(device: Device, case: dict) -> list:
    """Zeros of y and of x's gradient, for y = dropout(x) of two checkpointed calls, twice."""

    def drop(x):
        return x * (torch.rand(64, device=x.device) > 0.5)

    masks = []
    for seed in (5, 6):
        device.seed(seed)
        x, z = (torch.ones(64).to(device.torch_device).requires_grad_() for _ in range(2))
        y, w = device.checkpoint(drop, x), device.checkpoint(drop, z)
        (y.sum() + w.sum()).backward()
        device.sync()
        masks += [[t.cpu().tolist() for t in pair] for pair in ((y, x.grad), (w, z.grad))]
    return masks


def rank_as_constant(device: Device, case: dict) -> None:
    """A rank's number as a Python constant: every rank compiles another program."""
    x = torch.ones(3).to(device.torch_device)[device.rank() :][:1]
    group = device.make_group([list(range(case["devices"]))], device.rank())
    group.all_reduce_(x, "sum")
    device.sync()


def doctor(device: Device, case: dict) -> list[str]:
    """What scripts/doctor.py finds wrong, and its report."""
    from doctor import examine

    rows = examine(device, case["sp"], case["tp"])
    return [f"{'FAILED ' if row.failed else ''}{row.check}: {row.words}" for row in rows]


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    run = globals()[wanted["run"]]
    print(json.dumps(run_devices(lambda device: run(device, wanted), wanted["devices"])))
