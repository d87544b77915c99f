"""The run's log: what is said; metrics.jsonl under bad numbers, kills, full disks; text plots."""

import io
import json
import math
import os
import re
import resource
import signal
import sys
import threading
from functools import partial

import pytest
import torch
from checkpoint_runs import save_checkpoint
from conftest import tiny_config

from minitrain.bf16_optimizer import BF16Optimizer
from minitrain.checkpoint import load_checkpoint
from minitrain.corpus import train_tokenizer
from minitrain.dataset import open_dataset
from minitrain.huggingface import load_model, save_model
from minitrain.log import RunLog, progress, read_metrics
from minitrain.mesh import Mesh
from minitrain.text_plot import text_plot


def record(step: int, **changes) -> dict:
    fields = {"step": step, "loss": 5.12341, "grad_norm": 0.81234, "lr": 1e-3}
    return fields | {"loss_tokens": 64, "tokens_per_second": 6123.4, "skipped": False} | changes


def run_log(out, steps, total=40, **settings) -> None:
    log = RunLog(out, 0, total, **settings)
    for step in steps:
        log.step(record(step))
    log.close()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_step_lines_without_terminal(tmp_path, capsys):
    """Red when lines come at other steps than the first, log_every's and the last."""
    run_log(tmp_path, range(1, 26), total=25, log_every=10)
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    figures = "loss 5.1234  grad norm 0.8123  lr 1.0e-03  6,123 tokens/s"
    assert lines.pop(0) == f"step   1/25  {figures}"
    assert [line[: len(figures) + 15] for line in lines[:2]] == [
        f"step  10/25  {figures}  ",
        f"step  20/25  {figures}  ",
    ]
    assert lines[0].endswith(" left")
    assert lines[2] == f"step  25/25  {figures}"


def test_bar_on_a_terminal(tmp_path, capsys, monkeypatch):
    """Red when the bar lacks loss, norm or rate, or when what is said does not go to stdout."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    log = RunLog(tmp_path, 0, 40, first_step=10)
    log.step(record(11))
    log.say("two\nlines")
    log.step(record(40))
    log.close()
    assert "two\nlines" in capsys.readouterr().out
    assert "11/40" in terminal.getvalue()
    assert "40/40" in terminal.getvalue()
    assert "loss 5.1234, grad norm 0.8123, lr 1.0e-03, 6,123 tokens/s" in terminal.getvalue()


def test_other_ranks_are_silent(tmp_path, capsys):
    """Red when a rank other than 0 prints or writes."""
    log = RunLog(tmp_path / "run", 1, 40)
    log.say("text")
    log.step(record(1))
    log.evaluation({"step": 1, "eval_loss": 2.0, "eval_tokens": 3})
    log.close()
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "run").exists()


def test_skipped_updates_are_said_and_valid_json(tmp_path, capsys):
    """Red when NaN or inf reach the file as such (no JSON), or a skipped step is silent."""
    log = RunLog(tmp_path, 0, 40, log_every=1000)
    log.step(record(1, loss=None, grad_norm=0.0, loss_tokens=0, skipped=True))
    log.step(record(2, loss=math.nan, grad_norm=math.inf, skipped=True))
    log.step(record(3, grad_norm=-math.inf, skipped=True))
    log.evaluation({"step": 3, "eval_loss": math.nan, "eval_tokens": 0})
    log.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [line["step"] for line in lines] == [1, 2, 3, 3]
    assert [line["loss"] for line in lines[:3]] == [None, None, 5.12341]
    assert [line["grad_norm"] for line in lines[:3]] == [0.0, None, None]
    assert all(line["skipped"] is True for line in lines[:3])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "step   1/40  update skipped: no token of the step has a loss"
    assert said[1] == "step   2/40  update skipped: loss nan, gradient norm inf"


def test_each_line_is_in_the_file_at_once(tmp_path):
    """Red when lines wait in a buffer, which a kill would lose."""
    log = RunLog(tmp_path, 0, 40)
    for step in (1, 2):
        log.step(record(step))
        assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == step
    log.close()


def test_resume_leaves_no_gap_and_no_repeat(tmp_path):
    """Red when lines of steps made again stay, evaluations included, or a cut line does."""
    path = tmp_path / "metrics.jsonl"
    log = RunLog(tmp_path, 0, 40)
    log.evaluation({"step": 0, "eval_loss": 8.3, "eval_tokens": 9})
    for step in range(1, 8):
        log.step(record(step))
        if step % 2 == 0:
            log.evaluation({"step": step, "eval_loss": 8.0, "eval_tokens": 9})
    log.close()
    with path.open("ab") as file:
        file.write(b'{"step": 8, "lo')  # killed while writing
    log = RunLog(tmp_path, 0, 40, first_step=4)
    log.evaluation({"step": 4, "eval_loss": 8.0, "eval_tokens": 9})  # it is there already
    for step in (5, 6):
        log.step(record(step))
    log.evaluation({"step": 6, "eval_loss": 8.0, "eval_tokens": 9})
    log.close()
    metrics = read_metrics(path)
    assert [m["step"] for m in metrics if "loss" in m] == [1, 2, 3, 4, 5, 6]
    assert [m["step"] for m in metrics if "eval_loss" in m] == [0, 2, 4, 6]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_says_what_is_missing(tmp_path, capsys):
    """Red when a damaged or short file is taken for a whole one, in silence."""
    run_log(tmp_path, [1, 2, 3])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\0\0\0\n")
    capsys.readouterr()
    run_log(tmp_path, [], first_step=5)
    said = capsys.readouterr().out
    assert "the lines of 2 steps are missing" in said
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_full_disk_warns_once_and_catches_up(tmp_path, capsys):
    """Red when a full disk ends the run, warns at each step, or leaves half a line or a gap."""
    path = tmp_path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = RunLog(tmp_path, 0, 40, log_every=1000)
    log.step(record(1, padding="x" * 100_000))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
        for step in (2, 3, 4):
            log.step(record(step, padding="x" * 100_000))
        full = path.read_bytes()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert full.endswith(b"\n")
    assert full.count(b"\n") == 1
    said = capsys.readouterr().out
    assert said.count("warning") == 1
    assert "Training goes on" in said
    log.step(record(5))
    log.close()
    assert [m["step"] for m in read_metrics(path)] == [1, 2, 3, 4, 5]


def test_read_metrics_tolerates_only_a_cut_last_line(tmp_path):
    """Red when a line cut off by a kill is an error, or a bad line before it is none."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": 2.0}]
    path.write_text('{"step": 1}\nno json\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: .*'no json'"):
        read_metrics(path)


def test_progress_is_quiet_without_terminal(capsys, monkeypatch):
    """Red when a long operation fills a log file with bars, or shows none on a terminal."""
    assert list(progress(range(3), "reading")) == [0, 1, 2]
    with progress(5, "saving") as bar:
        bar.update(2)
    assert capsys.readouterr() == ("", "")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    list(progress(range(3), "reading", rank=1))
    assert terminal.getvalue() == ""
    list(progress(range(3), "reading"))
    assert "reading" in terminal.getvalue()


def test_a_killed_rank_takes_no_bar_with_it():
    """Red when bars share a lock with forked ranks, which one that is killed keeps for ever, or
    start a thread, whose locks a fork copies as they are.
    """
    threads = threading.active_count()
    lock = progress(range(2), "here").get_lock()
    assert threading.active_count() == threads
    child = os.fork()
    if child == 0:
        progress(1, "there").get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert lock.acquire(True, 5)
    lock.release()


def test_long_operations_have_bars(tmp_path, monkeypatch):
    """Red when tokenizing, reading or writing weights, evaluating or resuming shows no bar, or one
    that another rank or a log file sees.
    """
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    mesh, cpu, config = Mesh(), torch.device("cpu"), tiny_config()
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 9)

    def bars(action) -> set[str]:
        terminal.truncate(0)
        action()
        return set(re.findall(r"([a-z]+):", terminal.getvalue()))

    assert bars(lambda: train_tokenizer(["one text", "another"], 300)) == {"tokenizer"}
    read = partial(open_dataset, [tmp_path / "rows.jsonl"], None, 4)
    assert bars(read) == {"tokenizing"} and bars(partial(read, quiet=True)) == set()
    data = read()
    assert bars(lambda: list(data.evaluation_batches(2))) == {"evaluating"}
    data = read(quiet=True)
    assert bars(lambda: list(data.evaluation_batches(2))) == set()
    assert bars(lambda: load_model(config, mesh, cpu, torch.float32)) == {"weights"}
    model, spec = load_model(config, mesh, cpu, torch.float32)
    write = partial(save_model, tmp_path / "m", model, config, spec, mesh, dtype=torch.float32)
    assert bars(write) == {"saving"}
    assert bars(lambda: load_model(tmp_path / "m", mesh, cpu, torch.float32)) == {"weights"}
    optimizer = BF16Optimizer(model.named_parameters(), torch.optim.AdamW)
    save_checkpoint(tmp_path / "c", 1, optimizer, spec, mesh)
    assert bars(lambda: load_checkpoint(tmp_path / "c", optimizer, spec, mesh)) == {"resuming"}


def test_text_plot_puts_points_where_they_are():
    """Red when axes are mirrored, numbers are off, or a later curve hides behind an earlier."""
    points = [(x, 10 - x / 10) for x in range(101)]
    text = text_plot({"falls": points, "flat": [(40, 6.0)], "bad": [(1, math.nan), (2, None)]})
    lines = text.splitlines()
    assert text.isascii()
    assert max(map(len, lines)) <= 72
    assert len(lines) == 16 + 3
    assert lines[0].startswith("10 +*")  # the top is the first point's 10
    assert lines[15].rstrip().endswith("*")
    assert lines[15].startswith(" 0 +")  # the bottom is the last point's 0
    middle = next(line for line in lines if "o" in line)
    assert abs(middle.index("o") - (4 + 27)) <= 1  # at 40 % of the width, over the label 40
    assert abs(lines[17].index("40") - (4 + 27)) <= 1
    assert lines[18].split() == ["*", "falls", "o", "flat"]


@pytest.mark.parametrize(
    "points",
    [[(3, 2.0)], [(0, 0.0), (1, 0.0)], [(1e9, 1e-12), (2e9, 3e-12)], [(1, -5.0), (2, 1e30)]],
)
def test_text_plot_takes_any_numbers(points):
    """Red when one point, a constant, or very small or large numbers cannot be drawn."""
    for width, height in ((20, 3), (72, 16)):
        lines = text_plot({"curve": points}, width, height).splitlines()
        assert len(lines) == height + 3
        assert sum(line.count("*") for line in lines) == len({p[0] for p in points}) + 1
    assert text_plot({"none": []}) == "nothing to draw yet"
