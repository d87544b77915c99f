"""Short runs that are saved, on any layout: shared by the tests of checkpoints."""

from dataclasses import replace
from pathlib import Path

import torch
from conftest import lively_weights, tiny_config, uneven_rows
from layout_runs import SETTINGS, build, train

from minitrain.agreement import host_axis, together
from minitrain.bf16_optimizer import BF16Optimizer
from minitrain.checkpoint import pieces_on_host, publish, write_rank
from minitrain.collectives import all_gather
from minitrain.data_sharder import shard_batch
from minitrain.lora import LoRAConfig, add_lora
from minitrain.mesh import init_mesh
from minitrain.model_sharder import gather_state_dict

MODEL = tiny_config(vocab_size=63)  # odd: tp 2 pads the embedding and the head
TINY = replace(SETTINGS, batch_size=4, micro_batch_size=1, seq_len=12, lr=1e-2)
# name -> (world size, sp, tp, shard optimizer)
LAYOUTS = {"1": (1, 1, 1, False), "tp2": (2, 1, 2, False)}
for name, (world, sp, tp) in {
    "dp2": (2, 1, 1),
    "sp2": (2, 2, 1),
    "dp2xtp2": (4, 1, 2),
    "dp2xsp2xtp2": (8, 2, 2),
}.items():
    LAYOUTS |= {name: (world, sp, tp, False), f"{name} sharded": (world, sp, tp, True)}
SAVED = [name for name in LAYOUTS if name != "1"]


def fresh(layout: str, lora: bool = False, dtype: str = "fp64", mesh=None):
    """Mesh, settings and an untrained run on this rank."""
    _, sp, tp, shard = LAYOUTS[layout]
    settings = replace(TINY, sp=sp, tp=tp, shard_optimizer=shard, dtype=dtype)
    mesh = mesh or init_mesh(sp, tp)
    run = build(mesh, settings, MODEL, lively_weights(MODEL))
    if lora:
        add_lora(run.model, LoRAConfig(rank=4), mesh, run.spec)
        axis = mesh.dp_sp
        shards = (axis.size, axis.rank) if shard else (1, 0)
        make_optimizer = train.adamw(settings, torch.device("cpu"))
        run.optimizer = BF16Optimizer(run.model.named_parameters(), make_optimizer, *shards)
    return mesh, settings, run


def steps(mesh, settings, run, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        micro_batches = shard_batch(uneven_rows(vocab_size=63), mesh).split(1)
        args = run.model, run.optimizer, micro_batches, mesh, run.spec, settings
        losses.append(train.train_step(*args)["loss"].item())
    return losses


def whole_state(optimizer, spec, mesh) -> dict[str, torch.Tensor]:
    """Masters and moments put together by collectives: name -> whole tensor."""
    state = {"updates": optimizer.updates.clone()}
    for name, master in optimizer.masters.items():
        for key, tensor in {"master": master, **optimizer.optimizer.state[master]}.items():
            tensor = tensor.detach().clone()
            if tensor.shape == master.shape:
                if optimizer.num_shards > 1:
                    param = optimizer.params[name]
                    tensor = all_gather(tensor, mesh.dp_sp, 0)[: param.numel()].view(param.shape)
                if spec[name] is not None:
                    size = spec.shapes[name][spec[name]]
                    tensor = all_gather(tensor, mesh.tp, spec[name]).narrow(spec[name], 0, size)
            state[f"{key}/{name}"] = tensor
    return state


def save_checkpoint(path: Path, step: int, optimizer, spec, mesh, settings: dict | None = None):
    """What resume.Checkpoints does over several steps and in threads, at once; on every rank."""
    part = path.with_name(f".{path.name}.part")
    with together(host_axis(mesh.device)):
        write_rank(part, mesh.rank, pieces_on_host(optimizer, spec, mesh, {}))
    with together(host_axis(mesh.device)):
        if mesh.rank == 0:
            publish(part, path, step, mesh, settings or {})


def save_run(layout: str, path: Path, lora: bool):
    mesh, settings, run = fresh(layout, lora)
    steps(mesh, settings, run, 3)
    save_checkpoint(path, 3, run.optimizer, run.spec, mesh, {"note": layout})
    state = whole_state(run.optimizer, run.spec, mesh)
    model = gather_state_dict(run.model, run.spec, mesh)
    losses = steps(mesh, settings, run, 1)
    return (state, model, losses) if mesh.rank == 0 else None
