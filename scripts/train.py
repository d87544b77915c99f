"""Train a causal language model: the settings, the step, the loop. Copy this file and change it.

python scripts/train.py                                           the main job, no download
python scripts/train.py --help                                    every flag
torchrun --nproc_per_node 4 scripts/train.py --sp 2 --tp 2        on four processes
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor

from minitrain.bf16_optimizer import BF16Optimizer
from minitrain.collectives import all_reduce
from minitrain.data_sharder import Batch, one_ahead, shard_batch
from minitrain.dataset import Dataset
from minitrain.device import pick_device
from minitrain.grad_clipper import clip_grad_norm_
from minitrain.grad_reducer import gather_params, reduce_main_grads, start_reduction
from minitrain.launch import init_distributed, launched_world_size, set_timeout, shut_down
from minitrain.log import RunLog
from minitrain.lora import LORA_TARGETS, seed_dropout
from minitrain.loss_reducer import count_tokens, head_cross_entropy_sum
from minitrain.mesh import Axis, Mesh, ShardSpec, init_mesh
from minitrain.model import CausalLM
from minitrain.report import final_words, profiled, save_final, step_record
from minitrain.resume import Checkpoints
from minitrain.schedule import learning_rate
from minitrain.setup import check_settings, make_model, open_data, run_main, start_run


@dataclass(frozen=True)
class TrainConfig:
    """Train a causal language model. Without arguments: a small Llama on Python's own sources."""

    model: str = "tiny"
    """A preset (tiny, smollm2-135m, llama-3.2-1b: random weights), a directory, or a hub id."""
    data: tuple[Path, ...] = ()
    """.txt, .jsonl, .bin token files; or stdlib-chat. None: stdlib, Python's own source files."""
    eval_data: tuple[Path, ...] = ()
    """Held-out files of the same kinds; each row counts once, weighted by its loss tokens."""
    out: Path = Path("runs/default")
    """Run directory: metrics.jsonl, config.json, a copy of train.py, checkpoints, final/."""

    steps: int = 500
    """Updates of the weights. The data starts again, in a new order, when it ends."""
    batch_size: int = 16
    """Rows of the global batch, over all processes: a multiple of dp * micro-batch-size."""
    micro_batch_size: int = 4
    """Rows per forward and backward on one rank. Changes memory and speed, never the numbers."""
    seq_len: int = 256
    """Tokens per row, at least 2; padded to a multiple of sp."""
    pack: bool = True
    """Fill rows with several documents that do not see each other; off: one of them a row."""
    shuffle: bool = True
    """A fresh complete permutation of the rows each epoch, from the seed; off: file order."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """A row that cannot be used: stop with its file and line, or skip and count it."""

    lr: float = 2e-3
    """Peak learning rate, per update."""
    warmup_steps: int = 20
    """Updates over which the rate rises linearly to lr: update n of w has lr * n / w."""
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    """After warm-up: constant; cosine, to lr / 10 at the end; wsd: the last fifth falls to zero."""
    weight_decay: float = 0.1
    """AdamW's decay per update, times the rate; on matrices only, not on norms and biases."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment, each from 0 to below 1."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: float = 1.0
    """Largest L2 norm of the whole gradient; longer ones are scaled down, with inf none is."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """When the gradient holds an inf or NaN: skip that update on all ranks, or stop the run."""

    sp: int = 1
    """Ulysses sequence parallelism: ranks that share each row. sp * tp must divide the processes
    and the model's query heads; dp is what is left."""
    tp: int = 1
    """Tensor parallelism: ranks that share each matrix."""
    tp_split_activations: bool = False
    """Keep activations between blocks split over tp along the sequence: less memory."""
    shard_optimizer: bool = True
    """Split masters and moments over dp * sp (ZeRO-1). The same numbers either way."""

    dtype: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Of parameters and activations. bf16 trains fp32 masters; fp64 is all float64, to check."""
    activation_checkpointing: Literal["none", "full", "offload"] = "none"
    """full: keep each block's input and attention's output; offload: its input, on the host."""
    tile_tokens: int = 1024
    """Tokens per tile of the loss and the MLP: less memory, a tiled MLP runs twice; 0: no tiles."""
    compile: bool = False
    """Compile each block with torch.compile; the first step then takes longer."""

    lora_rank: int = 0
    """Rank of LoRA adapters; only these are trained and saved. 0: full fine-tuning."""
    lora_alpha: float = 16.0
    """Adapters are scaled by alpha / rank."""
    lora_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, so that the update does not shrink with the rank."""
    lora_dropout: float = 0.0
    """Share of an adapter's inputs set to zero in training, from 0 to below 1."""
    lora_targets: tuple[str, ...] = LORA_TARGETS
    """Names of the linear layers that get adapters."""

    save_every: int = 0
    """Steps between checkpoints, written in the background; 0: only when the run is interrupted."""
    keep_last: int = 2
    """Checkpoints to keep, at least 1; the newest whole one is never deleted."""
    resume: bool = False
    """Go on from the newest whole checkpoint in out, on any layout; without one, start."""
    resume_anyway: bool = False
    """Resume although a setting that shapes the run (data, batch, seed, schedule) has changed."""

    eval_every: int = 250
    """Steps between evaluations on eval-data; 0: only before the first step and after the last."""
    log_every: int = 10
    """Steps between lines of progress where there is no terminal; metrics.jsonl has every step."""
    profile: int = 0
    """Steps, after two, of which a trace (on cuda also of memory) is left in out; 0: none."""
    device: Literal["auto", "cpu", "cuda", "xla", "neuron"] = "auto"
    """auto: cuda or neuron when there is one, else cpu; xla (torch-xla) only when asked for."""
    timeout_minutes: float = 10.0
    """How long ranks wait for one another before the run ends; start-up has half an hour."""
    seed: int = 0
    """Fixes initial weights and the order of the data, on every layout alike."""


def summed_loss(model: CausalLM, batch: Batch, mesh: Mesh, config: TrainConfig) -> Tensor:
    """Cross-entropy of a micro-batch in nats, summed over this rank's loss tokens: never a mean."""
    hidden = model.hidden(batch.input_ids, batch.position_ids, batch.documents)
    return head_cross_entropy_sum(
        hidden,
        model.lm_head.weight,
        batch.labels,
        mesh.tp,
        tile_tokens=config.tile_tokens,
        vocab_size=model.config.vocab_size,
    )


def train_step(
    model: CausalLM,
    optimizer: BF16Optimizer,
    micro_batches: list[Batch],
    mesh: Mesh,
    shard_spec: ShardSpec,
    config: TrainConfig,
) -> dict[str, Tensor]:
    """Make one update from one global batch, of which this rank has its share as micro-batches.

    Returns   one-element tensors, equal on every rank: loss (nats per loss token), grad_norm
              (before clipping), lr, loss_tokens, skipped. Only reading them waits.
    """
    # 1. Count the loss tokens of the whole step: all micro-batches, all ranks.
    loss_tokens = count_tokens(micro_batches, mesh.dp_sp)
    divisor = loss_tokens.clamp(min=1)
    loss_sum = torch.zeros(1, device=divisor.device)
    mesh.device.sync()  # on xla here a program ends; elsewhere nothing happens

    # 2. Forward and backward, a micro-batch at a time. Losses are sums, divided once and globally;
    #    the gradients add up in float32 main gradients.
    for batch in micro_batches:
        micro_loss_sum = summed_loss(model, batch, mesh, config)
        if mesh.device.overlaps and batch is micro_batches[-1]:
            start_reduction(optimizer, mesh.dp_sp)  # the sum of 3., beside this backward pass
        (micro_loss_sum / divisor).backward()
        optimizer.accumulate_grads()
        loss_sum = loss_sum + micro_loss_sum.detach().view(1)
        mesh.device.sync()

    # 3. Sum over the ranks that saw other tokens. Never average.
    loss = all_reduce(loss_sum, mesh.dp_sp) / divisor
    grads = reduce_main_grads(optimizer, mesh.dp_sp)

    # 4. One norm for the whole model, then clip: after the sum, before the update.
    sharded = optimizer.num_shards > 1
    grad_norm = clip_grad_norm_(grads, shard_spec, mesh, config.max_grad_norm, pieces=sharded)

    # 5. Update the masters and round them into the model, unless there is nothing to learn from or
    #    the gradient is not finite: then nothing changes, on all ranks as the norm is global.
    skipped = (loss_tokens == 0) | ~torch.isfinite(grad_norm)
    lr = learning_rate(optimizer.updates, config)
    optimizer.step(lr, skipped)
    gather_params(optimizer, mesh.dp_sp)
    mesh.device.sync()
    return {
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": lr,
        "loss_tokens": loss_tokens,
        "skipped": skipped,
    }


@torch.no_grad()
def evaluate(model: CausalLM, data: Dataset, mesh: Mesh, config: TrainConfig) -> dict[str, float]:
    """Loss on held-out rows: each row once, weighted by loss tokens, equal on every rank."""
    model.eval()
    loss_sum, tokens = 0.0, 0
    for rows in data.evaluation_batches(mesh.dp.size * config.micro_batch_size):
        batch = shard_batch(rows, mesh).to(mesh.device.torch_device)
        loss_sum += summed_loss(model, batch, mesh, config)
        tokens += count_tokens([batch], mesh.dp_sp)
        mesh.device.sync()
    model.train()
    loss = all_reduce(loss_sum.view(1), mesh.dp_sp) / tokens
    return {"eval_loss": loss.item(), "eval_tokens": int(tokens)}


def train(
    model: CausalLM,
    optimizer: BF16Optimizer,
    shard_spec: ShardSpec,
    train_rows: Dataset,
    held_out_rows: Dataset | None,
    mesh: Mesh,
    config: TrainConfig,
    log: RunLog,
    checkpoints: Checkpoints,
) -> None:
    """The loop: rows, step, metrics, evaluation, checkpoint; until the end, or a signal to stop."""
    if held_out_rows and checkpoints.step == 0:
        log.evaluation({"step": 0, **evaluate(model, held_out_rows, mesh, config)})
    started, unread = time.perf_counter(), None
    steps = range(checkpoints.step + 1, config.steps + 1)
    batches = (shard_batch(train_rows.batch(step - 1, config.batch_size), mesh) for step in steps)
    for step, batch in profiled(zip(steps, one_ahead(batches)), config, mesh, log):
        micro_batches = batch.split(config.micro_batch_size, mesh.device.torch_device)
        seed_dropout(config.seed, step, mesh)
        metrics = train_step(model, optimizer, micro_batches, mesh, shard_spec, config)
        if unread:  # the step before, read while the device computes this one
            log.step(step_record(*unread, train_rows, model.config, config, mesh))
        save, every = checkpoints.wanted(step), config.eval_every
        evaluates = held_out_rows and (step == config.steps or (every and step % every == 0))
        pause = save or evaluates or step == config.steps
        if pause:
            mesh.device.wait()
        now = time.perf_counter()
        unread, started = (step, metrics, now - started), now
        if pause:
            log.step(step_record(*unread, train_rows, model.config, config, mesh))
            if evaluates:
                log.evaluation({"step": step, **evaluate(model, held_out_rows, mesh, config)})
            if save:
                checkpoints.save(step)
            if checkpoints.stopped:
                return
            unread, started = None, time.perf_counter()


def adamw(config: TrainConfig, device: torch.device) -> Callable[[list[dict]], torch.optim.AdamW]:
    """What BF16Optimizer makes its optimizer with; a rate in a tensor never recompiles."""
    fused = device.type in ("cpu", "cuda")
    dtype = torch.float64 if config.dtype == "fp64" else torch.float32
    return lambda groups: torch.optim.AdamW(
        groups,
        lr=torch.tensor(config.lr, dtype=dtype, device=device),
        betas=config.adam_betas,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=fused,  # it raises on xla
        capturable=not fused,  # its step counts stay on the device
    )


def main(config: TrainConfig) -> None:
    """Check, set up, train, and leave a Hugging Face directory in out/final."""
    check_settings(config, launched_world_size())
    device = pick_device(config.device, config.dtype)
    init_distributed(device)
    mesh = init_mesh(config.sp, config.tp, device)
    log, checkpoints = start_run(config, mesh, Path(__file__))
    model, shard_spec, model_dir = make_model(config, mesh)
    tokenizer, *rows = open_data(config, model_dir, model.config, device, log)
    shards = mesh.dp_sp if config.shard_optimizer else Axis("none")
    make_optimizer = adamw(config, device.torch_device)
    optimizer = BF16Optimizer(model.named_parameters(), make_optimizer, shards.size, shards.rank)
    checkpoints.begin(optimizer, shard_spec, log)
    set_timeout(60 * config.timeout_minutes)

    with checkpoints:  # at the end the last one is waited for
        train(model, optimizer, shard_spec, *rows, mesh, config, log, checkpoints)
        if not checkpoints.stopped:
            save_final(config, model, shard_spec, mesh, model_dir, tokenizer)
            log.say(final_words(model, tokenizer, rows[1] or rows[0], config, mesh))
    log.close()
    shut_down()


if __name__ == "__main__":
    run_main(main, tyro.cli(TrainConfig))
