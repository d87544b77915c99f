"""train.py's own train_step on torch-xla, with real collectives between CPU devices.

Each case runs in a process of its own (tests/xla_cases.py): a process has one XLA runtime.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from minitrain.device import Device

TESTS = Path(__file__).parent
DIFFERENT_PROGRAMS = 70  # xla_lockstep's exit status

pytestmark = pytest.mark.skipif(
    find_spec("torch_xla") is None, reason="needs torch 2.9 with torch-xla 2.9"
)


def start(case: dict) -> subprocess.CompletedProcess:
    """Run a case on XLA devices."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(TESTS / "xla_cases.py"), json.dumps(case)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


def on_xla(case: dict) -> list:
    """The case's result, one per rank."""
    done = start(case)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def on_cpu(case: dict) -> list[dict]:
    """The same case in this process, without XLA, on one rank."""
    from xla_cases import train_case

    layout = ("sp", "tp", "tp_split_activations")
    settings = {k: v for k, v in case["settings"].items() if k not in layout}
    return train_case(Device(), {**case, "settings": settings})


def check(case: dict) -> None:
    """The numbers of one process; flat compile counts; nothing read and nothing left to the
    host.
    """
    ranks, want = on_xla({"run": "train_case", **case}), on_cpu(case)
    for records in ranks:
        for step, (record, expected) in enumerate(zip(records, want, strict=True)):
            for name in ("loss", "grad_norm"):
                assert record[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), step
            assert record["skipped"] == expected["skipped"] == (step == 4)
            assert step < 2 or record["compiled"] == 0, f"step {step} compiled"
            assert not any(record["on_host"].values()), record["on_host"]


FULL = {"activation_checkpointing": "full", "tile_tokens": 5}
CASES = {
    "one device, 8 micro-batches": (1, {}),
    "dp 4, a rank without labels": (4, {"micro_batch_size": 2}),
    "dp 4, unsharded": (4, {"micro_batch_size": 1, "shard_optimizer": False, **FULL}),
    "tp 4, fewer kv heads, LoRA": (4, {"tp": 4, "micro_batch_size": 4, "lora_rank": 2}),
    "sp 2 x tp 2": (4, {"sp": 2, "tp": 2, "micro_batch_size": 4, **FULL}),
    "dp 2 x sp 2 x tp 2": (8, {"sp": 2, "tp": 2, "micro_batch_size": 2}),
    "dp 2 x sp 2 x tp 2, split activations, LoRA": (
        8,
        {
            "sp": 2,
            "tp": 2,
            "micro_batch_size": 2,
            "tp_split_activations": True,
            "lora_rank": 2,
            "shard_optimizer": False,
            **FULL,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layouts_give_the_numbers_of_one_process(name):
    """Red when a collective, an offset, a skipped step or a program differs on XLA; fp32, 6
    steps.
    """
    devices, settings = CASES[name]
    check({"devices": devices, "steps": 6, "settings": settings, "packed": "sp 2" in name})


def test_nothing_compiles_after_the_second_step():
    """Red when the rate, clipping, masks, documents or token counts enter a program as
    constants.
    """
    settings = {"tp": 2, "micro_batch_size": 2, "max_grad_norm": 3.8, "schedule": "cosine"}
    check({"devices": 4, "steps": 20, "settings": settings, "packed": True})


def test_a_read_is_counted():
    """Red when the counters that the other tests trust do not show an .item() in the step."""
    ranks = on_xla({"run": "train_case", "devices": 1, "steps": 1, "reads": True})
    assert ranks[0][0]["on_host"]["aten::_local_scalar_dense"] == 1


def test_another_program_on_another_rank_is_reported():
    """Red when the harness would let ranks run different programs, which hang on real devices."""
    done = start({"run": "rank_as_constant", "devices": 2})
    assert done.returncode == DIFFERENT_PROGRAMS, done.stderr[-4000:]
    assert "another program" in done.stderr


def test_recomputed_blocks_drop_the_same_inputs():
    """Red when activation checkpointing draws other masks in the backward pass, or one for all."""
    (masks,) = on_xla({"run": "dropout_masks", "devices": 1})
    for forward, backward in masks:
        assert forward == backward
    drawn = {tuple(forward) for forward, _ in masks}
    assert len(drawn) == len(masks)
    assert all(0 < sum(mask) < len(mask) for mask in drawn)


@pytest.mark.parametrize(("rank", "bound"), [(0, 0.02), (8, 0.3)], ids=["full", "LoRA"])
@pytest.mark.parametrize("devices", [2, 4], ids=["tp 2", "dp 2 x tp 2"])
def test_overfits_one_sentence(devices, rank, bound):
    """Red when training on XLA in bf16 does not learn a padded row by heart: full, and LoRA, whose
    frozen head bounds how sure it can be.
    """
    settings = {"tp": 2, "micro_batch_size": 4, "lr": 1e-2, "lora_rank": rank, "warmup_steps": 0}
    settings |= {"schedule": "constant", "weight_decay": 0.0}
    case = {"run": "overfit", "devices": devices, "steps": 25, "settings": settings}
    for result in on_xla(case):
        assert result["first"] > 5
        assert result["last"] < bound


def run_script(directory: Path, out: str, *more: str) -> list[float]:
    """Train a tiny model with scripts/train.py; losses, those of evaluations too."""
    text, model = directory / "text.jsonl", directory / "model"
    rows = [{"input_ids": [(i * j) % 61 for j in range(20 + i)]} for i in range(40)]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model.mkdir(exist_ok=True)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "model_type": "llama"}
    (model / "config.json").write_text(json.dumps(shape | {"rms_norm_eps": 1e-5}))
    flags = f"--model {model} --data {text} --out {directory / out} --steps 4 --batch-size 4 "
    flags += "--micro-batch-size 2 --seq-len 32"
    command = [sys.executable, str(TESTS.parent / "scripts/train.py"), *flags.split(), *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = (directory / out / "metrics.jsonl").read_text().splitlines()
    return [x.get("loss", x.get("eval_loss")) for x in map(json.loads, lines)]


def test_the_script_trains_on_xla(tmp_path):
    """Red when train.py itself does not run on XLA: packed data, evaluation, final files."""
    flags = ("--eval-data", str(tmp_path / "text.jsonl"), "--dtype", "fp32")
    on_xla = run_script(tmp_path, "xla", "--device", "xla", *flags)
    on_cpu = run_script(tmp_path, "cpu", "--device", "cpu", *flags)
    assert on_xla == pytest.approx(on_cpu, rel=1e-5)
    assert (tmp_path / "xla/final/model.safetensors").exists()


def test_resumes_bit_for_bit(tmp_path):
    """Red when a checkpoint on XLA leaves something out: weights, moments, counts, dropout."""
    flags = ["--device", "xla", "--save-every", "2", "--lora-rank", "2", "--lora-dropout", "0.2"]
    flags += ["--activation-checkpointing", "full"]
    whole = run_script(tmp_path, "run", *flags)
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000004")
    assert run_script(tmp_path, "run", *flags, "--resume") == whole
