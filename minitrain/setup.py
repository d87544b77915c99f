"""From settings to the objects of a run: everything main() needs before the first step.

All checks on settings are here and run on every rank alike, before process groups and memory are
made, so that a mistake ends in one sentence instead of a hang.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from minitrain.adapter_files import base_of, check_same, is_adapter, load_adapter
from minitrain.agreement import broken_connection, missing_ranks
from minitrain.chat import ChatTemplate, has_chat_template
from minitrain.corpus import BUILTIN, Tokenizer, builtin_data, cached_tokenizer
from minitrain.dataset import Dataset, open_dataset
from minitrain.device import Device
from minitrain.documents import check_readable, sample_texts
from minitrain.environment import check_compiler, notes
from minitrain.huggingface import has_weights, inspect_model, load_model, read_config, resolve_model
from minitrain.launch import launched_rank, launched_world_size
from minitrain.log import RunLog
from minitrain.lora import LoRAConfig, adapted_layers, add_lora
from minitrain.memory import check_memory_settings, save_memory
from minitrain.mesh import Mesh, ShardSpec, check_layout, check_model
from minitrain.model import CausalLM, ModelConfig
from minitrain.resume import Checkpoints

PROFILE_WARM_UP = 2  # steps before those that --profile looks at
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}

# Shapes to train from scratch; "tiny" is the main job's, 3.8 million parameters. The numbers:
# vocabulary, hidden size, feed-forward width, layers, heads, kv heads, head size, positions.
PRESETS = {
    "tiny": ModelConfig(4096, 256, 768, 4, 4, 2, 32, tie_embeddings=True),
    "smollm2-135m": ModelConfig(
        49152, 576, 1536, 30, 9, 3, 64, 8192, rope_theta=100000.0, tie_embeddings=True
    ),
    "llama-3.2-1b": ModelConfig(
        128256, 2048, 8192, 16, 32, 8, 64, 131072, rope_theta=500000.0, tie_embeddings=True
    ),
}


def check_settings(config, world_size: int) -> None:
    """Refuse settings that cannot work, before anything is made.

    config       scripts/train.py's TrainConfig
    world_size   processes that were started

    Raises       ValueError with the rule, the numbers and the fix
    """
    dp = check_layout(world_size, config.sp, config.tp)
    positive = "steps batch_size micro_batch_size lr max_grad_norm log_every keep_last"
    not_negative = "warmup_steps weight_decay eval_every save_every adam_eps seed profile"
    for name in f"{positive} timeout_minutes {not_negative}".split():
        value, flag = getattr(config, name), "--" + name.replace("_", "-")
        if not (value >= 0 if name in not_negative.split() else value > 0):
            rule = "not be negative" if name in not_negative.split() else "be positive"
            raise ValueError(f"{flag} must {rule}, not {value}.")
    if not math.isfinite(config.lr):
        raise ValueError(f"--lr must be a finite number, not {config.lr}.")
    if not all(0 <= beta < 1 for beta in config.adam_betas):
        raise ValueError(
            f"--adam-betas must be two numbers from 0 to below 1: {config.adam_betas}."
        )
    if config.seq_len < 2:
        raise ValueError(
            f"--seq-len must be at least 2, not {config.seq_len}: position t predicts token t + 1."
        )
    if config.batch_size % (unit := dp * config.micro_batch_size):
        raise ValueError(
            f"the batch must be a multiple of dp * micro-batch: {config.batch_size} rows, "
            f"dp {dp} * {config.micro_batch_size} = {unit}. Pass --batch-size "
            f"{-(-config.batch_size // unit) * unit}, or a smaller --micro-batch-size."
        )
    if config.profile and config.steps < (needed := PROFILE_WARM_UP + config.profile):
        raise ValueError(
            f"--profile {config.profile} needs {needed} steps, {PROFILE_WARM_UP} of them to warm "
            f"up, but --steps is {config.steps}. Pass --steps {needed}, or a smaller --profile."
        )
    if config.compile:
        check_compiler(config.device)
    for path in (*config.data, *config.eval_data):
        if str(path) not in BUILTIN:
            check_readable(path)
    model, _ = find_model(config.model)
    check_model(config.sp, config.tp, model.num_heads, model.num_kv_heads, model.intermediate_size)
    check_lora(config, model)
    check_memory_settings(config, model)
    check_out(config.out, config.resume)


def check_out(out: Path, resume: bool = False) -> None:
    """Refuse a run directory that cannot be one, or, without resume, that holds a run: not what a
    failed start has left; ValueError.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; pass a directory.")
    metrics, saved = out / "metrics.jsonl", out / "checkpoints"
    has_steps = metrics.is_file() and metrics.stat().st_size > 0
    if not resume and (has_steps or (saved.is_dir() and any(saved.iterdir()))):
        raise ValueError(
            f"--out {out} already holds a run. Pass --resume to go on with it, or another --out."
        )


def start_run(config, mesh: Mesh, script: Path) -> tuple[RunLog, Checkpoints]:
    """Make the run directory on rank 0 (config.json, a copy of the script), or find where a resumed
    run goes on, and say what will be done. ValueError of Checkpoints, on every rank.
    """
    checkpoints = Checkpoints(config, mesh)
    if mesh.rank == 0:
        settings = json.dumps(asdict(config), indent=1, default=str)
        (config.out / "config.json").write_text(settings + "\n", encoding="utf-8")
        if script.resolve() != (config.out / "train.py").resolve():
            shutil.copyfile(script, config.out / "train.py")
    log = RunLog(config.out, mesh.rank, config.steps, checkpoints.step, config.log_every)
    log.say("\n".join([mesh.describe(), describe_batch(config, mesh), *notes(mesh.device)]))
    return log, checkpoints


def describe_batch(config, mesh: Mesh) -> str:
    """What follows from the settings, in words."""
    rows, micro, dp = config.batch_size, config.micro_batch_size, mesh.dp.size
    count = rows // (dp * micro)
    return (
        f"{rows:,} rows x {config.seq_len:,} tokens = {rows * config.seq_len:,} tokens a step: "
        f"dp {dp} x {count} micro-batch{'es' * (count > 1)} of {micro} row{'s' * (micro > 1)}"
    )


def open_data(
    config, model_dir: Path | None, model_config: ModelConfig, device: Device, log
) -> tuple[Tokenizer | None, Dataset, Dataset | None]:
    """Open the training and held-out rows with the model's tokenizer; for a preset, with one that
    is trained on the training files. Rank 0 goes first, and the others find what it cached.

    Returns   tokenizer or None, training rows, held-out rows or None
    """
    if launched_rank() != 0:
        device.barrier()
    files = list(config.data) or ([Path("stdlib")] if model_dir is None else [])
    tokenizer, chat, cache = None, None, config.out / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    if not files:
        kinds = f".txt, .jsonl or .bin files, or {' or '.join(BUILTIN)}"
        raise ValueError(f"--model {config.model} needs --data: {kinds}.")
    made = dict.fromkeys(f for f in (*files, *config.eval_data) if str(f) in BUILTIN)
    for name in made:
        log.say(f"data: {name}, made of Python {platform.python_version()}'s own sources")
        made[name] = builtin_data(str(name), cache)
    held_out = [made[f][1] if f in made else f for f in config.eval_data]
    held_out = held_out or [made[f][1] for f in files if f in made]
    files = [made[f][0] if f in made else f for f in files]
    if model_dir is None and (texts := list(sample_texts(files))):
        tokenizer = cached_tokenizer(texts, cache, model_config.vocab_size)
        megabytes = sum(map(len, texts)) / 1e6
        what = f"{tokenizer.vocab_size:,} entries, trained on {megabytes:.1f} MB of the data"
        log.say(f"tokenizer: byte-level BPE of {what}")
    elif model_dir and (model_dir / "tokenizer.json").exists():
        tokenizer = Tokenizer.load(model_dir)
        chat = ChatTemplate.load(model_dir, tokenizer) if has_chat_template(model_dir) else None

    names = ("seq_len", "pack", "shuffle", "seed", "on_bad_row")
    settings = {name: getattr(config, name) for name in names}
    settings |= {"vocab_size": model_config.vocab_size, "chat": chat, "cache_dir": cache}
    settings["quiet"] = launched_rank() != 0
    train_rows = open_dataset(files, tokenizer, **settings)
    log.say(f"training: {train_rows.summary}")
    held_out_rows = open_dataset(held_out, tokenizer, **settings) if held_out else None
    if held_out_rows:
        log.say(f"held out: {held_out_rows.summary}")
    if launched_rank() == 0:
        device.barrier()
    return tokenizer, train_rows, held_out_rows


def lora_config(config) -> LoRAConfig:
    """The adapters that the settings ask for."""
    names = ("rank", "alpha", "dropout", "targets", "rslora")
    return LoRAConfig(**{n: getattr(config, f"lora_{n}") for n in names}, seed=config.seed)


def check_lora(config, model_config: ModelConfig) -> None:
    """Refuse settings of adapters that cannot work with a model; ValueError."""
    wanted = lora_config(config)
    if wanted.rank < 0 or not 0 <= wanted.dropout < 1 or not 0 < wanted.alpha < math.inf:
        raise ValueError(
            "--lora-rank must be 0 or more, --lora-alpha above 0, --lora-dropout from 0 to below "
            f"1, but they are {wanted.rank}, {wanted.alpha} and {wanted.dropout}."
        )
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in CausalLM(model_config).named_parameters()}
    layers = adapted_layers(shapes, wanted) if wanted.rank else {}
    if is_adapter(config.model):
        check_same(config.model, wanted, layers)


def find_model(name: str) -> tuple[ModelConfig, Path | None]:
    """Shape of a preset or of a model directory, and the directory, None for a preset. An adapter's
    directory stands for its base.
    """
    if name in PRESETS:
        return PRESETS[name], None
    directory = base_of(name) if is_adapter(name) else resolve_model(name)
    config = inspect_model(directory)[0] if has_weights(directory) else read_config(directory)
    return config, directory


def make_model(config, mesh: Mesh) -> tuple[CausalLM, ShardSpec, Path | None]:
    """Make this rank's share of the model, the same model on every layout; with LoRA, adapted.

    Returns   model, ShardSpec, and the model directory; None for a preset. Weights are read from
              the directory when it has them, else random
    """
    model_config, directory = find_model(config.model)
    source = directory if directory and has_weights(directory) else model_config
    where = mesh, mesh.device.torch_device, DTYPES[config.dtype]
    split = config.tp_split_activations
    model, spec = load_model(source, *where, seed=config.seed, split_activations=split)
    if is_adapter(config.model):
        load_adapter(config.model, model, mesh, spec, dropout=config.lora_dropout)
    elif config.lora_rank:
        add_lora(model, lora_config(config), mesh, spec)
    save_memory(model, mesh.device, config.activation_checkpointing, config.tile_tokens)
    for block in model.model.layers if config.compile else ():
        block.compile(**mesh.device.compile_args)
    return model, spec, directory


def run_main(main, config) -> None:
    """Run main(config); what is no mistake of ours becomes one sentence, and exit status 1."""
    try:
        main(config)
    except (ValueError, OSError, FloatingPointError) as error:
        found_by = ""
        if launched_rank() > 0:
            # torchrun ends all ranks when the first exits: rank 0 must have spoken by then. If it
            # has not ended this one after 10 seconds, rank 0 does not know of the mistake.
            time.sleep(10)
            found_by = f" (on rank {launched_rank()})"
        print(f"error: {error}{found_by}", file=sys.stderr, flush=True)
        sys.exit(1)
    except RuntimeError as error:
        if broken_connection(error) and (missing := missing_ranks()):
            names = f"rank {', '.join(map(str, missing))} of {launched_world_size()}"
            print(
                f"error: {names} died or hangs, found by rank {launched_rank()}: {error}. Look at "
                "what that rank said last, then run the same command with --resume.",
                file=sys.stderr,
            )
            sys.exit(1)
        raise
