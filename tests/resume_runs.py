"""Start scripts/train.py's main as forked ranks that can be killed, stopped and signalled."""

import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from random import Random
from types import SimpleNamespace

import torch
from layout_runs import train

from minitrain.setup import run_main

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 63,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
EXACT = ("step", "loss", "grad_norm", "lr", "loss_tokens", "tokens_seen", "skipped")
EXACT += ("eval_loss", "eval_tokens")


def settings(directory: Path, **changes):
    """A run of a model of 20,000 parameters on rows of random tokens, an epoch every 7 steps."""
    model, rows, held_out = (directory / name for name in ("model", "rows.jsonl", "held.jsonl"))
    if not model.exists():
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG))
        random = Random(0)
        for path, count in ((rows, 29), (held_out, 5)):
            ids = [
                [random.randrange(63) for _ in range(random.randint(9, 16))] for _ in range(count)
            ]
            path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids))
    fixed = {"model": str(model), "data": (rows,), "out": directory / "run", "pack": False}
    sizes = {"batch_size": 4, "micro_batch_size": 1, "seq_len": 16, "warmup_steps": 3}
    return train.TrainConfig(**{**fixed, **sizes, "dtype": "fp32", **changes})


def arguments(config) -> list[str]:
    """The command line of a run."""
    words = []
    for name, value in vars(config).items():
        if value == getattr(train.TrainConfig(), name):
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, tuple) else (value,)
            words += [f"--{flag}", *map(str, values)]
    return words


def start(config, world_size: int = 1, said: Path | None = None) -> SimpleNamespace:
    """Start a run in the background: processes, and the file that has all they say."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = said or config.out.with_suffix(".said")
    said.write_text("")
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_rank, args=(config, rank, world_size, port, said))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return SimpleNamespace(processes=processes, said=said, out=config.out)


def _rank(config, rank: int, world_size: int, port: int, said: Path) -> None:
    code = 1
    try:
        sys.stdout = sys.stderr = said.open("a", buffering=1)  # pytest has put others there
        for number in (1, 2):
            os.dup2(sys.stdout.fileno(), number)
        torch.set_num_threads(1)
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
        places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in places.items()})
        run_main(train.main, config)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end(run, timeout_s: float = 60) -> tuple[list[int], str]:
    """Wait for all ranks: exit codes, and what was said."""
    deadline = time.monotonic() + timeout_s
    for process in run.processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in run.processes]
    for process in run.processes:
        if process.is_alive():
            process.kill()
            process.join()
    assert None not in codes, f"{codes} after {timeout_s} s: {run.said.read_text()}"
    return codes, run.said.read_text()


def complete(config, world_size: int = 1, timeout_s: float = 60) -> str:
    """Run to the end, which must be a good one; what was said."""
    codes, said = end(start(config, world_size), timeout_s)
    assert codes == [0] * world_size, said
    return said


def last_step(out: Path) -> int:
    """The last step in metrics.jsonl, 0 if none."""
    path = out / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def until(run, condition, timeout_s: float = 60) -> None:
    """Wait until a condition is true, or the run has ended."""
    deadline = time.monotonic() + timeout_s
    while not condition() and any(process.is_alive() for process in run.processes):
        assert time.monotonic() < deadline, run.said.read_text()
        time.sleep(0.002)


def reach(run, step: int, timeout_s: float = 60) -> None:
    """Wait until a run has logged a step, or has ended."""
    until(run, lambda: last_step(run.out) >= step, timeout_s)


def result(out: Path) -> tuple[bytes, list[dict]]:
    """What a run is compared by: the bytes of its weights, and every figure that is no time."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    weights = next((out / "final").glob("*.safetensors")).read_bytes()
    return weights, [{key: r[key] for key in EXACT if key in r} for r in records]
