"""One layout of parity.py: run a train file's own train_step on its ranks, note what each saw."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType

import torch
from parity_reference import (
    BETAS,
    DECAY,
    EPS,
    LR,
    MICRO_BATCH,
    NUM_MICRO,
    SEQ_LEN,
    STEPS,
    WARMUP,
    Layout,
)
from torch import Tensor

from minitrain import bf16_optimizer, data_sharder
from minitrain.dataset import Rows
from minitrain.mesh import Axis, init_mesh
from minitrain.model import CausalLM
from minitrain.model_sharder import fill_weights, shard_model

SHOULD_DEFINE = ("TrainConfig", "train_step", "adamw")


@dataclass(frozen=True)
class Variant:
    """How a layout is run: max_norm inf leaves the gradients as they were summed."""

    shard_optimizer: bool
    max_norm: float

    @property
    def name(self) -> str:
        clipped = "clipped" if self.max_norm < float("inf") else "not clipped"
        return f"{clipped}, optimizer {'sharded' if self.shard_optimizer else 'whole'}"


@dataclass
class Seen:
    """What one rank saw in one step.

    metrics    what train_step returned, as numbers
    grads      name -> this rank's share of what the optimizer read in its first call; pieces when
               sharded
    calls      how often optimizer.step was called
    weights    name -> this rank's share after the step
    """

    metrics: dict[str, float]
    grads: dict[str, Tensor]
    calls: int
    weights: dict[str, Tensor]


def load_train_file(path: Path) -> ModuleType:
    """Import a train file by its path.

    Raises   ValueError when it does not exist or lacks what is checked
    """
    if not path.is_file():
        raise ValueError(f"--train-file must be a copy of scripts/train.py, but {path} is no file.")
    spec = importlib.util.spec_from_file_location("checked_train_file", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    missing = [name for name in SHOULD_DEFINE if not hasattr(module, name)]
    if missing:
        raise ValueError(f"{path} must define {', '.join(SHOULD_DEFINE)}; {missing} are missing.")
    return module


def make_settings(train: ModuleType, layout: Layout, variant: Variant, split: bool):
    """The file's own TrainConfig, with its own defaults for fields that parity does not know."""
    values = {
        "steps": len(STEPS),
        "batch_size": layout.batch_size,
        "micro_batch_size": MICRO_BATCH,
        "seq_len": SEQ_LEN,
        "lr": LR,
        "warmup_steps": WARMUP,
        "schedule": "constant",
        "weight_decay": DECAY,
        "adam_betas": BETAS,
        "adam_eps": EPS,
        "max_grad_norm": variant.max_norm,
        "sp": layout.sp,
        "tp": layout.tp,
        "tp_split_activations": split,
        "shard_optimizer": variant.shard_optimizer,
        "dtype": "fp64",
        "tile_tokens": 16,
        "device": "cpu",
    }
    known = {field.name for field in fields(train.TrainConfig)}
    return train.TrainConfig(**{name: v for name, v in values.items() if name in known})


def run_rank(
    path: Path, layout: Layout, variants: list[Variant], split: bool, alone: bool = False
) -> tuple:
    """On one rank: every variant's steps.

    alone     one process trains the layout's rows, in one micro-batch

    Returns   a list of Seen for each variant, and the ShardSpec's dims
    """
    train = load_train_file(path)
    mesh = init_mesh() if alone else init_mesh(layout.sp, layout.tp)
    cpu, micro_batch = torch.device("cpu"), layout.batch_size if alone else MICRO_BATCH
    shard_batch = getattr(train, "shard_batch", data_sharder.shard_batch)
    make = getattr(train, "BF16Optimizer", bf16_optimizer.BF16Optimizer)
    weights, batches, found = layout.weights(), [as_rows(b) for b in layout.batches()], []
    for variant in variants:
        config = make_settings(train, layout, variant, split)
        with torch.device("meta"):
            model = CausalLM(layout.model_config())
        spec = shard_model(model, mesh, split_activations=split)
        read = lambda name, part: weights[name][part]  # noqa: E731
        fill_weights(model, spec, mesh, cpu, torch.float64, read)
        shards = mesh.dp_sp if variant.shard_optimizer else Axis("none")
        adamw = train.adamw(config, cpu)
        optimizer = make(model.named_parameters(), adamw, shards.size, shards.rank)
        noted = _note_steps(optimizer)
        found.append([])
        for rows in batches:
            noted.clear()
            micro_batches = shard_batch(rows, mesh).split(micro_batch, cpu)
            metrics = train.train_step(model, optimizer, micro_batches, mesh, spec, config)
            numbers = {k: float(v) for k, v in metrics.items()}
            after = {n: p.detach().clone() for n, p in model.named_parameters()}
            found[-1].append(Seen(numbers, noted[0] if noted else {}, len(noted), after))
    return found, dict(spec)


def as_rows(batch) -> Rows:
    """A global batch as the dataset gives it."""
    fields = (batch.input_ids, batch.labels, batch.position_ids, batch.documents)
    return Rows(*(None if x is None else x.numpy() for x in fields))


def _note_steps(optimizer) -> list[dict[str, Tensor]]:
    """Note the gradients that each call of optimizer.step reads."""
    noted, step = [], optimizer.step

    def noting(*args, **kwargs):
        noted.append({name: g.detach().clone() for name, g in optimizer.grads.items()})
        return step(*args, **kwargs)

    optimizer.step = noting
    return noted


def cut(whole: Tensor, dim: int | None, layout: Layout, rank: int, pieces: bool) -> Tensor:
    """The share of a whole tensor that a rank holds: split over tp, padded with zeros, and, for the
    gradients of a sharded optimizer, one flat piece of dp * sp.
    """
    d, s, t = layout.coordinates(rank)
    if dim is not None:
        size = -(-whole.shape[dim] // layout.tp)
        padded = list(whole.shape)
        padded[dim] = size * layout.tp
        out = whole.new_zeros(padded)
        out.narrow(dim, 0, whole.shape[dim]).copy_(whole)
        whole = out.narrow(dim, t * size, size)
    if not pieces or layout.dp * layout.sp == 1:
        return whole
    shards = layout.dp * layout.sp
    piece = -(-whole.numel() // shards)
    flat = torch.nn.functional.pad(whole.reshape(-1), (0, shards * piece - whole.numel()))
    return flat.view(shards, piece)[d * layout.sp + s]


def describe(layout: Layout) -> str:
    """The size of the check, in words."""
    return (
        f"{layout.name}: {layout.batch_size} rows x {SEQ_LEN} tokens in {NUM_MICRO} micro-batches, "
        f"{len(STEPS)} steps, float64"
    )
