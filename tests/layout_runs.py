"""Run scripts/train.py's own train_step on the golden data, on any layout: shared by several
tests.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from minitrain.bf16_optimizer import BF16Optimizer
from minitrain.data_sharder import shard_batch
from minitrain.dataset import open_dataset
from minitrain.memory import save_memory
from minitrain.mesh import Axis, init_mesh
from minitrain.model import CausalLM, ModelConfig
from minitrain.model_sharder import fill_weights, gather_state_dict, shard_model
from minitrain.setup import DTYPES

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
sys.path.insert(0, str(ROOT / "scripts"))
import train  # noqa: E402

CONFIG = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=176,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
)
SETTINGS = train.TrainConfig(
    steps=20,
    batch_size=8,
    micro_batch_size=2,
    seq_len=48,
    pack=False,
    shuffle=False,
    lr=1e-3,
    warmup_steps=0,
    schedule="constant",
    dtype="fp64",
)


def expected(key: str = "float64_decay_matrices_only") -> list[dict]:
    """The golden losses and norms of 20 steps."""
    return json.loads((GOLDEN / "expected.json").read_text())[key]["steps"]


def golden_file(directory: Path) -> Path:
    """tokens.json as rows of a .jsonl file."""
    path = directory / "tokens.jsonl"
    samples = json.loads((GOLDEN / "tokens.json").read_text())
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


def build(mesh, settings, model_config=CONFIG, weights=None, **options):
    """Model, ShardSpec and optimizer of this rank, with golden weights."""
    weights = weights or load_file(GOLDEN / "model/model.safetensors")
    with torch.device("meta"):
        model = CausalLM(model_config)
    spec = shard_model(model, mesh, split_activations=settings.tp_split_activations)
    dtype = DTYPES[settings.dtype]
    cpu = torch.device("cpu")
    fill_weights(model, spec, mesh, cpu, dtype, lambda name, part: weights[name][part])
    save_memory(model, mesh.device, settings.activation_checkpointing, settings.tile_tokens)
    for block in model.model.layers if settings.compile else ():
        block.compile()
    shards = mesh.dp_sp if settings.shard_optimizer else Axis("none")
    optimizer = BF16Optimizer(
        model.named_parameters(), train.adamw(settings, cpu), shards.size, shards.rank
    )
    return SimpleNamespace(model=model, spec=spec, optimizer=optimizer)


def run_steps(data: Path, changes: dict, steps: int | None = None) -> SimpleNamespace:
    """Train on this rank; returns losses, norms and the whole final weights.

    data      .jsonl file
    changes   fields of TrainConfig that differ from SETTINGS
    """
    settings = replace(SETTINGS, **changes)
    mesh = init_mesh(settings.sp, settings.tp)
    run = build(mesh, settings)
    rows = open_dataset(
        [data], None, settings.seq_len, pack=settings.pack, shuffle=False, vocab_size=256
    )
    losses, norms = [], []
    for step in range(steps or settings.steps):
        batch = shard_batch(rows.batch(step, settings.batch_size), mesh)
        micro_batches = batch.split(settings.micro_batch_size)
        metrics = train.train_step(
            run.model, run.optimizer, micro_batches, mesh, run.spec, settings
        )
        losses.append(metrics["loss"].item())
        norms.append(metrics["grad_norm"].item())
    weights = gather_state_dict(run.model, run.spec, mesh)
    return SimpleNamespace(losses=losses, norms=norms, weights=weights)
