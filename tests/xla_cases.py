"""What the XLA tests run in a process of its own: train.py's own train_step on XLA CPU devices.

python tests/xla_cases.py '{"devices": 4, "settings": {"tp": 2}, "steps": 6}'

The last line of the output is the result as JSON. run_case(Device(), case) is the reference.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch
import xla_lockstep
from conftest import lively_weights, tiny_config
from layout_runs import train

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


def run_case(device: Device, case: dict) -> list[dict]:
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
        before = (device.compilations(), xla_lockstep.host_operators()) if on_xla else None
        device.barrier()
        metrics = train.train_step(model, optimizer, micro_batches, mesh, spec, settings)
        device.barrier()
        record = {}
        if on_xla:
            ran = xla_lockstep.host_operators().items()
            record["compiled"] = device.compilations() - before[0]
            record["on_host"] = {k: n - before[1].get(k, 0) for k, n in ran}
        device.barrier()
        for name in ("loss", "grad_norm", "skipped"):
            record[name] = metrics[name].item()
        records.append(record)
    return records


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    results = xla_lockstep.run_devices(lambda device: run_case(device, wanted), wanted["devices"])
    print(json.dumps(results))
