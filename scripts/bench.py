"""How fast is a training step here? Against the machine's own matrix product, a bare loop, a peer.

python scripts/bench.py                        the main job's model
python scripts/bench.py --shape smollm2-135m --batch-size 2 --micro-batch-size 2 --seq-len 512
--peer

minitrain and the peer are measured in processes of their own, in turn, train_step and the bare loop
in one process, step by step: processes alone differ by 5 %. The table shows medians. FLOPs are the
model's: 6 a weight and token, attention causal, nothing for what checkpointing computes twice.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
import train
import tyro

from minitrain.bf16_optimizer import BF16Optimizer
from minitrain.data_sharder import shard_batch
from minitrain.device import pick_device
from minitrain.environment import check_compiler
from minitrain.kernels import product
from minitrain.launch import init_distributed
from minitrain.log import progress
from minitrain.mesh import init_mesh
from minitrain.model import flops_per_token
from minitrain.setup import make_model

PHASES = {  # function of train_step -> the phase it is
    "count_tokens": "count",
    "summed_loss": "forward",
    "reduce_main_grads": "reduce",
    "clip_grad_norm_": "clip",
}


@dataclass(frozen=True)
class BenchConfig:
    """Measure training steps on random tokens."""

    shape: str = "tiny"
    """A preset of scripts/train.py, or a model directory."""
    batch_size: int = 16
    """Rows of a step."""
    micro_batch_size: int = 4
    """Rows of a forward and backward."""
    seq_len: int = 256
    """Tokens a row."""
    steps: int = 8
    """Counted steps, after 2 that are not."""
    rounds: int = 3
    """Processes for each measurement; the median counts."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of parameters and activations."""
    activation_checkpointing: Literal["none", "full", "offload"] = "none"
    """As in scripts/train.py."""
    tile_tokens: int = 1024
    """As in scripts/train.py."""
    compile: bool = False
    """As in scripts/train.py."""
    lora_rank: int = 0
    """As in scripts/train.py."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """As in scripts/train.py."""
    ranks: int = 1
    """Data-parallel processes; on cpu they share the threads."""
    peer: bool = False
    """Also the Hugging Face Trainer on the same work; needs transformers and accelerate."""
    out: Path | None = None
    """JSON file for the figures."""


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second of a product of two 2,048 x 2,048 matrices, the best of 20."""
    a = torch.randn(2048, 2048, device=device).to(dtype)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        product(a, a)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * 2048**3 / best


def timed(function, phase: str, spent: dict[str, float], wait):
    """The function, its wall time added to spent[phase]."""

    def run(*args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        wait()
        spent[phase] = spent.get(phase, 0.0) + time.perf_counter() - start
        return result

    return run


def bare_step(model, optimizer, micro_batches, mesh, spec, config):
    """Forward, backward, optimizer: no counting, norm, clipping or skipping."""
    divisor = sum(batch.labels.numel() for batch in micro_batches)
    for batch in micro_batches:
        (train.summed_loss(model, batch, mesh, config) / divisor).backward()
        optimizer.accumulate_grads()
    optimizer.step(config.lr)


def measure(bench: BenchConfig) -> dict:
    """Train on this process; one JSON object of figures."""
    names = ("batch_size", "micro_batch_size", "seq_len", "dtype", "tile_tokens", "compile")
    names += ("activation_checkpointing", "lora_rank")
    settings = {name: getattr(bench, name) for name in names}
    config = replace(train.TrainConfig(), model=bench.shape, **settings)
    device = pick_device(bench.device)
    init_distributed(device)
    mesh = init_mesh(device=device)
    model, spec, _ = make_model(config, mesh)
    make_optimizer = train.adamw(config, device.torch_device)
    shards = mesh.dp_sp
    optimizer = BF16Optimizer(model.named_parameters(), make_optimizer, shards.size, shards.rank)
    size = (bench.batch_size, bench.seq_len)
    ids = torch.randint(0, model.config.vocab_size, size, generator=torch.Generator())
    batch = shard_batch(SimpleNamespace(input_ids=ids), mesh)
    micro_batches = batch.split(bench.micro_batch_size, device.torch_device)

    def run(step) -> float:
        start = time.perf_counter()
        step(model, optimizer, micro_batches, mesh, spec, config)
        device.wait()
        return time.perf_counter() - start

    steps = [train.train_step] + [bare_step] * (bench.ranks == 1)  # it knows nothing of ranks
    rounds = [[run(step) for step in steps] for _ in range(2 + bench.steps)]
    seconds, *bare = (statistics.median(times) for times in zip(*rounds[2:]))
    peak = device.memory_peak_bytes()
    spent: dict[str, float] = {}
    for name, phase in PHASES.items():
        setattr(train, name, timed(getattr(train, name), phase, spent, device.wait))
    for name, phase in (("accumulate_grads", "accumulate"), ("step", "optimizer")):
        setattr(optimizer, name, timed(getattr(optimizer, name), phase, spent, device.wait))
    whole = sum(run(train.train_step) for _ in range(3))
    spent["backward"] = whole - sum(spent.values())  # and the little that is in no phase
    tokens = bench.batch_size * bench.seq_len
    flops = tokens * flops_per_token(model.config, bench.seq_len)
    rate = bench.ranks * matmul_rate(device.torch_device, next(model.parameters()).dtype)
    return {
        "tokens_per_second": tokens / seconds,
        "matmul_share": flops / seconds / rate,
        "matmul_tflops": rate / 1e12,
        "memory_mb": peak / 2**20 if peak else None,
        "over_bare_loop": seconds / bare[0] - 1 if bare else None,
        "phases": {name: share / whole for name, share in spent.items()},
    }


def hf_trainer(bench: BenchConfig) -> dict:
    """The same work by the Hugging Face Trainer as its users run it: bf16 autocast, fp32
    weights.
    """
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from minitrain.families import config_fields
    from minitrain.setup import find_model

    fields = config_fields(find_model(bench.shape)[0])
    model = LlamaForCausalLM(LlamaConfig(**fields))
    if bench.lora_rank:
        import peft

        linears = peft.LoraConfig(r=bench.lora_rank, target_modules="all-linear")
        model = peft.get_peft_model(model, linears)
    rows = (bench.steps + 2) * bench.batch_size
    ids = torch.randint(0, model.config.vocab_size, (rows, bench.seq_len))
    times = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            times.append(time.perf_counter())

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=bench.micro_batch_size,
        gradient_accumulation_steps=bench.batch_size // bench.micro_batch_size,
        max_steps=bench.steps + 2,
        bf16=bench.dtype == "bf16",
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=bench.activation_checkpointing != "none",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row.clone()} for row in ids]
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Clock()]).train()
    seconds = statistics.median(b - a for a, b in pairwise(times[1:]))
    peak = pick_device(bench.device).memory_peak_bytes()
    tokens = bench.batch_size * bench.seq_len
    return {"tokens_per_second": tokens / seconds, "memory_mb": peak / 2**20}


def in_a_process(bench: BenchConfig, what: str) -> dict:
    """Measure in a fresh process, so that peak memory is its own."""
    flags = {key: value for key, value in asdict(bench).items() if key not in ("peer", "out")}
    code = f"import bench; c = bench.BenchConfig(**{flags!r}); "
    call = "hf_trainer" if what == "peer" else "measure"
    code += f"import json; print(json.dumps(bench.{call}(c)))"
    here = str(Path(__file__).parent)
    command, environment = [sys.executable, "-c", code], dict(os.environ)
    if bench.ranks > 1 and what != "peer":
        launcher = "torch.distributed.run", "--standalone", "--no-python"
        command[1:1] = "-m", *launcher, f"--nproc_per_node={bench.ranks}", sys.executable
        threads = max(1, torch.get_num_threads() // bench.ranks)
        environment["OMP_NUM_THREADS"] = str(threads)
    done = subprocess.run(
        command, cwd=here, capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"measuring {what!r} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main(bench: BenchConfig) -> None:
    """Measure in turn, print a table, write the JSON."""
    pick_device(bench.device)
    if bench.compile:
        check_compiler(bench.device)
    kinds = ["step"] + ["peer"] * bench.peer
    runs = {kind: [] for kind in kinds}
    for kind in progress(kinds * bench.rounds, "measuring"):
        runs[kind].append(in_a_process(bench, kind))
    figures = {
        kind: {
            key: statistics.median(run[key] for run in results)
            for key in results[0]
            if isinstance(results[0][key], float)
        }
        for kind, results in runs.items()
    }
    print(f"{bench.shape}, {bench.batch_size} x {bench.seq_len} tokens, {bench.dtype}")
    for kind, values in figures.items():
        share = values.get("matmul_share")
        words = f"{kind:5} {values['tokens_per_second']:10,.0f} tokens/s"
        words += f"   {values['memory_mb']:8,.0f} MB" if "memory_mb" in values else ""
        words += f"   {share:6.1%} of {values['matmul_tflops']:.2f} TFLOP/s" if share else ""
        print(words)
    if "over_bare_loop" in figures["step"]:
        over = figures["step"]["over_bare_loop"]
        print(f"train_step over the bare loop: {over:+.1%} time")
    if bench.peer:
        pairs = zip(runs["step"], runs["peer"])
        ratio = statistics.median(a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs)
        memory = figures["step"]["memory_mb"] / figures["peer"]["memory_mb"]
        print(f"against the peer: {ratio:.2f} x tokens/s, {memory:.2f} x memory")
    phases = runs["step"][0]["phases"].items()
    print("phases: " + ", ".join(f"{name} {share:.1%}" for name, share in phases))
    if bench.out:
        bench.out.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main(tyro.cli(BenchConfig))
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
