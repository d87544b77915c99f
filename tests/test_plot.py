"""scripts/plot.py: what it reads, smooths and draws, as picture and as text."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "plot.py"


@pytest.fixture(scope="module")
def plot():
    spec = importlib.util.spec_from_file_location("plot", SCRIPT)
    sys.modules["plot"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_run(directory: Path, steps: int = 40, loss: float = 5.0) -> Path:
    directory.mkdir(exist_ok=True)
    lines = [{"step": 0, "eval_loss": 8.0, "eval_tokens": 100}]
    for step in range(1, steps + 1):
        fields = {"grad_norm": 2.0 / step, "lr": 1e-3, "tokens_per_second": 6000.0}
        skipped = step == 7
        line = {"step": step, "loss": None if skipped else loss, "tokens_seen": step * 512}
        lines.append(line | fields | {"skipped": skipped})
    lines.append({"step": steps, "eval_loss": 5.5, "eval_tokens": 100})
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 41, "lo'
    (directory / "metrics.jsonl").write_text(text)
    return directory


def run_script(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_reads_curves(plot, tmp_path):
    """Red when a step without loss becomes a point, or evaluations lose their place in tokens."""
    run = plot.read_run(write_run(tmp_path / "a") / "metrics.jsonl", "a", "steps")
    assert [x for x, _ in run.curves["loss"]] == [s for s in range(1, 41) if s != 7]
    assert run.curves["eval_loss"] == [(0, 8.0), (40, 5.5)]
    assert run.skipped == [7]
    run = plot.read_run(tmp_path / "a" / "metrics.jsonl", "a", "tokens")
    assert run.curves["eval_loss"] == [(0, 8.0), (40 * 512, 5.5)]
    assert run.curves["grad_norm"][1] == (2 * 512, 1.0)


def test_moving_mean(plot):
    """Red when the mean lags behind a falling curve, or loses points at the ends."""
    line = [(x, 100.0 - x) for x in range(20)]
    means = plot.moving_mean(line, 5)
    assert [x for x, _ in means] == [x for x, _ in line]
    assert [y for _, y in means[:-2]] == pytest.approx([y for _, y in line[:-2]])
    assert means[-1][1] == pytest.approx((81 + 82 + 83) / 3)
    assert plot.moving_mean(line, 1) == line
    assert plot.moving_mean([], 5) == []


def test_picture_of_two_runs(plot, tmp_path):
    """Red when no PNG is written, a run is missing in it, or smoothing is not in the label."""
    matplotlib_figure = pytest.importorskip("matplotlib.figure")
    runs = (write_run(tmp_path / "a"), write_run(tmp_path / "b", loss=4.0))
    out = tmp_path / "ab.png"
    result = run_script(*runs, "--out", out)
    assert result.stdout == f"wrote {out}\n", result.stderr
    assert out.read_bytes().startswith(b"\x89PNG")
    axes = matplotlib_figure.Figure().subplots()
    loaded = [plot.read_run(run / "metrics.jsonl", run.name, "steps") for run in runs]
    plot.draw_field(axes, loaded, "loss", 21)
    assert axes.get_legend_handles_labels()[1] == [
        f"{name}: {label}"
        for name in "ab"
        for label in (
            "loss, mean of 21 steps (thin: each step)",
            "held-out loss",
            "update skipped (1 times)",
        )
    ]


@pytest.mark.parametrize("arguments", [[], ["--x", "tokens"], ["--smooth", 1]])
def test_picture_of_one_run(tmp_path, arguments):
    """Red when a run of one step, or with no step yet, cannot be drawn, or a part file stays."""
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "a", steps=1)
    assert run_script(run, *arguments).returncode == 0
    (run / "metrics.jsonl").write_text("")
    result = run_script(run, *arguments)
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in run.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_text_without_matplotlib(plot, tmp_path, monkeypatch, capsys):
    """Red when a missing matplotlib is an error, or the text lacks a curve."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot.main(plot.PlotConfig((write_run(tmp_path / "a"), write_run(tmp_path / "b"))))
    out = capsys.readouterr().out
    assert "pip install matplotlib" in out
    for words in (*plot.FIELDS.values(), "a: held-out loss", "b: loss", "a: 1 updates skipped"):
        assert words in out
    assert not (tmp_path / "curves.png").exists()


def test_tensorboard(tmp_path):
    """Red when a point is missing in the events, written twice, or a missing package not said."""
    run, events = write_run(tmp_path / "a"), tmp_path / "events"
    for _ in range(2):
        result = run_script(run, "--tensorboard", events)
    if importlib.util.find_spec("tensorboard") is None:
        assert result.returncode == 1 and "pip install tensorboard" in result.stderr
        return
    assert result.returncode == 0, result.stderr
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written = EventAccumulator(str(events / "a")).Reload()
    assert [(e.step, e.value) for e in written.Scalars("eval_loss")] == [(0, 8.0), (40, 5.5)]
    assert [e.step for e in written.Scalars("loss")] == [s for s in range(1, 41) if s != 7]


def test_watch_draws_again_when_a_file_grows(plot, tmp_path, capsys):
    """Red when --watch ends on a missing file, draws without need, or misses new lines."""
    run, seen = tmp_path / "a", []

    def pause(seconds: float) -> None:
        assert seconds == 5
        seen.append(capsys.readouterr().out)
        if len(seen) == 2:
            write_run(run)
        if len(seen) == 4:
            with (run / "metrics.jsonl").open("a") as file:
                file.write('ss": 3.0}\n')
        if len(seen) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plot.main(plot.PlotConfig((run,), text=True, watch=5), pause)
    assert seen[0] == f"waiting for {run / 'metrics.jsonl'}\n"
    assert [bool(text) for text in seen] == [True, False, True, False, True]
    assert "held-out loss" in seen[2]


def test_names_tell_runs_apart(plot, tmp_path):
    """Red when two runs of the same directory name cannot be told apart."""
    paths = (tmp_path / "x" / "run", tmp_path / "y" / "run")
    assert list(plot.metrics_files(paths).values()) == [str(path) for path in paths]
    assert list(plot.metrics_files(paths[:1]).values()) == ["run"]


def test_says_what_is_wrong(tmp_path):
    """Red when a mistake gives a traceback, or exit status 0."""
    run = write_run(tmp_path / "a")
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "metrics.jsonl").write_text("no json\n{}\n")
    for arguments, words in [
        ([tmp_path / "none"], "there is no"),
        ([], "at least one run"),
        ([run, "--smooth", 4], "--smooth must be odd"),
        ([run, "--out", tmp_path / "a.jpg"], "must end in .png"),
        ([bad], "metrics.jsonl:1"),
    ]:
        result = run_script(*arguments)
        assert result.returncode == 1, result.stdout
        assert words in result.stderr
        assert "Traceback" not in result.stderr
