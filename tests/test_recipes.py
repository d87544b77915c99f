"""The README's "Change one thing": each change is applied to a copy of scripts/train.py and run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from layout_runs import ROOT  # puts scripts/ on the path
from parity import ParityConfig, check_layout_numbers
from parity_reference import Layout
from parity_run import Variant
from safetensors.torch import load_file

TRAIN = (ROOT / "scripts/train.py").read_text()
WANDB = """
import json
def note(**record):
    with open("wandb.jsonl", "a") as file:
        file.write(json.dumps(record, default=str) + "\\n")
def init(**settings):
    note(**settings)
def log(record, step):
    note(step=step, loss=record["loss"])
"""


def recipes() -> dict[str, list[str]]:
    """Each diff of the section: first words of its title -> its hunks."""
    readme = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"## Change one thing\n.*?```diff\n(.*?)```\n", readme, re.DOTALL)
    parts = re.split(r"^# ([^,:.(]*\w).*\n", block, flags=re.MULTILINE)[1:]
    return {title: text.strip("\n").split("\n@@\n") for title, text in zip(parts[::2], parts[1::2])}


RECIPES = recipes()


def apply(hunks: list[str], source: str = TRAIN) -> str:
    """Replace what each hunk takes away, and its context, which must be there exactly once."""
    for hunk in hunks:
        lines = hunk.split("\n")
        old = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
        new = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
        assert f"\n{source}".count(f"\n{old}") == 1, f"not one place in train.py reads\n{old}"
        source = source.replace(old, new)
    return source


def changed(title: str, directory: Path) -> Path:
    path = directory / "my_train.py"
    path.write_text(apply(RECIPES[title]))
    return path


def run(script: Path, directory: Path, *arguments, processes: int = 1) -> list[dict]:
    """A short run in directory/out; its metrics."""
    ids = torch.randint(0, 4096, (64, 64), generator=torch.Generator().manual_seed(0)).tolist()
    data = directory / "rows.jsonl"
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), script, "--data", data]
    command += ["--steps", "3", "--batch-size", "8", "--micro-batch-size", "2", "--seq-len", "64"]
    command += ["--device", "cpu", "--dtype", "fp32", "--warmup-steps", "0", "--out", "out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{directory}"}
    command = [*map(str, command), *arguments]
    options = {"cwd": directory, "env": environment, "capture_output": True, "text": True}
    result = subprocess.run(command, timeout=180, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads(line) for line in (directory / "out/metrics.jsonl").open()]


def final(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "out/final/model.safetensors")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The shipped file's run: metrics, final weights."""
    directory = tmp_path_factory.mktemp("plain")
    return run(ROOT / "scripts/train.py", directory), final(directory)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Weights before training: after a step at no rate to speak of."""
    directory = tmp_path_factory.mktemp("start")
    run(ROOT / "scripts/train.py", directory, "--steps", "1", "--lr", "1e-30")
    return final(directory)


def test_there_are_seven_of_at_most_ten_lines():
    """Red when a recipe is missing, or is longer than ten changed lines."""
    assert len(RECIPES) == 7, list(RECIPES)
    for title, hunks in RECIPES.items():
        signs = [line[:1] for hunk in hunks for line in hunk.split("\n")]
        assert set(signs) <= {"+", "-", " ", ""}, title
        assert signs.count("+") >= 1 and signs.count("+") + signs.count("-") <= 10, title


@pytest.mark.parametrize("processes", [1, 2])
def test_another_optimizer(tmp_path, plain, processes):
    """Red when another torch optimizer does not train, sharded or not, or trains as AdamW."""
    metrics = run(changed("Another optimizer", tmp_path), tmp_path, processes=processes)
    assert metrics[0]["loss"] == pytest.approx(plain[0][0]["loss"], rel=1e-6)
    assert metrics[2]["loss"] < metrics[0]["loss"] and not metrics[2]["skipped"]
    assert metrics[2]["loss"] != pytest.approx(plain[0][2]["loss"], rel=1e-6)


def test_another_loss(tmp_path, plain):
    """Red when the z-loss is not 1e-4 times a squared logsumexp of about log(4096), or changes with
    the layout.
    """
    path = changed("Another loss", tmp_path)
    more = run(path, tmp_path)[0]["loss"] - plain[0][0]["loss"]
    assert more == pytest.approx(1e-4 * torch.tensor(4096.0).log().item() ** 2, rel=0.05)
    config = ParityConfig(train_file=path, own=True)
    for layout in (Layout(2, 1, 1), Layout(2, 2, 2)):
        assert check_layout_numbers(config, layout, [Variant(True, 0.05)])[1] == []


def test_frozen_embeddings(tmp_path, plain, start):
    """Red when a frozen embedding moves, or nothing else does."""
    metrics = run(changed("Freeze the embeddings", tmp_path), tmp_path)
    frozen, name = final(tmp_path), "model.embed_tokens.weight"
    assert torch.equal(frozen[name], start[name])
    moved = [n for n in frozen if not torch.equal(frozen[n], start[n])]
    assert len(moved) == len(frozen) - 1 and not torch.equal(plain[1][name], start[name])
    assert metrics[0]["grad_norm"] < plain[0][0]["grad_norm"]


def test_own_data(tmp_path):
    """Red when own batches are not read, their masks are lost, or a layout changes the numbers."""
    path = changed("Your own data", tmp_path)
    one = run(path, tmp_path)
    assert [record["loss_tokens"] for record in one] == [8 * 32] * 3
    (tmp_path / "two").mkdir()
    two = run(path, tmp_path / "two", "--sp", "2", processes=2)
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=1e-5)


def test_weights_and_biases(tmp_path, plain):
    """Red when a step is not sent, or by every rank. The package is a stand-in that notes calls."""
    path = changed("Log to Weights & Biases", tmp_path)
    (tmp_path / "wandb.py").write_text(WANDB)
    run(path, tmp_path, "--tp", "2", processes=2)
    started, *steps = [json.loads(line) for line in (tmp_path / "wandb.jsonl").open()]
    assert started["project"] == "minitrain" and started["config"]["steps"] == 3
    assert [record["step"] for record in steps] == [1, 2, 3]
    want = [record["loss"] for record in plain[0]]
    assert [record["loss"] for record in steps] == pytest.approx(want, rel=1e-4)


def test_gradient_noise_scale(tmp_path, plain):
    """Red when noise and signal are not those of the definition: gradients of random rows are
    nearly all noise, and the step itself must be as before.
    """
    path = changed("Gradient noise scale", tmp_path)
    metrics = run(path, tmp_path)
    tokens = metrics[0]["loss_tokens"]
    for record, before in zip(metrics, plain[0]):
        assert record["loss"] == pytest.approx(before["loss"], rel=1e-6)
        square = record["signal"] + record["noise"] / tokens  # E |g|^2 of a batch of these tokens
        assert square == pytest.approx(record["grad_norm"] ** 2, rel=1e-4)
        assert record["noise"] > 0
    assert (
        check_layout_numbers(ParityConfig(train_file=path), Layout(2, 1, 2), [Variant(True, 0.05)])[
            1
        ]
        == []
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_average_of_weights(tmp_path, plain, start, processes):
    """Red when the final weights are not between the first and the last, near the first after three
    updates at 1 %.
    """
    run(changed("Average the weights", tmp_path), tmp_path, processes=processes)
    average = final(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    far, near = ((w[name] - start[name]).norm().item() for w in (plain[1], average))
    assert 0.01 * far < near < 0.03 * far
