"""What a run says and leaves: records of steps, a profile, last words, the final weights."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from minitrain.adapter_files import save_adapter
from minitrain.dataset import Dataset
from minitrain.environment import precompiling
from minitrain.generate import generate
from minitrain.huggingface import save_model
from minitrain.log import RunLog, read_metrics
from minitrain.lora import base_spec
from minitrain.mesh import Mesh, ShardSpec
from minitrain.model import CausalLM, ModelConfig, flops_per_token
from minitrain.setup import PROFILE_WARM_UP, lora_config
from minitrain.text_plot import text_plot

PROMPT_TOKENS, NEW_TOKENS = 48, 64


def step_record(
    step: int,
    metrics: dict[str, Tensor],
    seconds: float,
    rows: Dataset,
    model_config: ModelConfig,
    config,
    mesh: Mesh,
) -> dict:
    """One line of metrics.jsonl, from what train_step returned; reading it waits for the device.

    seconds   wall time of the step

    Other one-element tensors that train_step returned are in the record under their names. When the
    gradient was not finite, the rows' numbers are kept in nonfinite.jsonl.

    Raises    FloatingPointError then, on every rank, when --on-nonfinite is stop
    """
    tokens = config.batch_size * config.seq_len
    flops = tokens * flops_per_token(model_config, config.seq_len)
    peak = mesh.device.peak_flops()
    loss_tokens = int(metrics["loss_tokens"])
    record = {
        "step": step,
        "loss": float(metrics["loss"]) if loss_tokens else None,
        "grad_norm": float(metrics["grad_norm"]),
        "lr": float(metrics["lr"]),
        "loss_tokens": loss_tokens,
        "tokens_seen": step * tokens,
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
        "mfu": flops / seconds / (peak * mesh.world_size) if peak else None,
        "memory_peak_bytes": mesh.device.memory_peak_bytes(),
        "skipped": bool(metrics["skipped"]),
    }
    record |= {name: float(value) for name, value in metrics.items() if name not in record}
    if step == 1 and mesh.rank == 0 and (names := mesh.device.fallback_operators()):
        warnings.warn(f"slow: these operators ran on the host: {', '.join(names)}", stacklevel=1)
    if record["skipped"] and loss_tokens and not precompiling():
        file = config.out / "nonfinite.jsonl"
        if mesh.rank == 0 and hasattr(rows, "row_numbers"):  # one's own data may have none
            numbers = rows.row_numbers(step - 1, config.batch_size).tolist()
            kept = {"step": step, "rows": numbers, "grad_norm": str(record["grad_norm"])}
            with file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(kept) + "\n")
        if config.on_nonfinite == "stop":
            raise FloatingPointError(
                f"the gradient norm of step {step} is {record['grad_norm']} and --on-nonfinite is "
                f"stop; nothing was saved since. The rows of the step are in {file}. Lower --lr, "
                "or pass --on-nonfinite skip."
            )
    return record


def profiled(steps: Iterable, config, mesh: Mesh, log: RunLog) -> Iterator:
    """Go through a loop's steps; of --profile many, after two, leave what every rank did in out/.

    profile-0.json.gz   every call, operator and kernel; opened by https://ui.perfetto.dev
    memory-0.pickle     on cuda: allocations since the first step; https://pytorch.org/memory_viz

    The time of the step after them includes the writing of the files.
    """
    steps = iter(steps)
    if config.profile:
        on_cuda, file = mesh.device.kind == "cuda", config.out / f"profile-{mesh.rank}.json.gz"
        if on_cuda:
            torch.cuda.memory._record_memory_history()
        yield from islice(steps, PROFILE_WARM_UP)
        with torch.profiler.profile(with_stack=True) as profile:
            yield from islice(steps, config.profile)
        profile.export_chrome_trace(str(file))
        log.say(f"profile: {file}; open it at https://ui.perfetto.dev")
        if on_cuda:
            torch.cuda.memory._dump_snapshot(config.out / f"memory-{mesh.rank}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
    yield from steps


@torch.no_grad()
def final_words(model: CausalLM, tokenizer, rows: Dataset, config, mesh: Mesh) -> str:
    """What to say at the end: a continuation of a held-out prompt (one process only), the loss
    curve, what was trained and for how long, where it is, and what to do next.
    """
    parts = []
    if tokenizer is not None and mesh.world_size == 1:
        prompt = rows.rows([0]).input_ids[0, :PROMPT_TOKENS].tolist()
        more = generate(model, prompt, NEW_TOKENS, temperature=0.0, eos_id=tokenizer.eos_id)
        parts += ["held-out prompt:", tokenizer.decode(prompt)]
        parts += ["its continuation by the model:", tokenizer.decode(more)]
    records = read_metrics(config.out / "metrics.jsonl") if mesh.rank == 0 else []
    if not records:
        return ""
    losses, held_out = ([(r["step"], r.get(k)) for r in records] for k in ("loss", "eval_loss"))
    parts.append(text_plot({"loss": losses, "held-out loss": held_out}))
    steps, final = [r for r in records if "step_seconds" in r], config.out / "final"
    what = f"a rank-{config.lora_rank} adapter of " if config.lora_rank else ""
    what += config.model
    tokens = steps[-1]["tokens_seen"]
    took = tqdm.format_interval(sum(r["step_seconds"] for r in steps))
    parts += [f"trained: {what}, {len(steps):,} steps, {tokens:,} tokens, {took} (mm:ss)"]
    parts += [f"final weights: {final}", f"curves: python scripts/plot.py {config.out}"]
    if config.lora_rank:
        parts += [f"next: python scripts/merge_lora.py {final} {config.out / 'merged'}"]
    elif tokenizer is not None:
        parts += [f'next: python scripts/sample.py {final} --prompt "..."']
    return "\n".join(parts)


def save_final(
    config, model: CausalLM, shard_spec: ShardSpec, mesh: Mesh, model_dir: Path | None, tokenizer
) -> None:
    """Write out/final: a Hugging Face directory, or with LoRA an adapter's.

    model_dir   what the model was made from; None: an adapter also gets its base, as out/base
    """
    final, base = config.out / "final", model_dir or config.out / "base"
    if config.lora_rank:
        save_adapter(final, model, lora_config(config), shard_spec, mesh, base)
    if not config.lora_rank or model_dir is None:
        path, dtype = base if config.lora_rank else final, model.lm_head.weight.dtype
        made_of = {"source_dir": model_dir, "tokenizer": tokenizer}
        save_model(path, model, model.config, base_spec(shard_spec), mesh, dtype=dtype, **made_of)
