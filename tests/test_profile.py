"""--profile: a trace that can be read, of the steps it says, of a run that it does not change."""

import gzip
import inspect
import json
from dataclasses import replace
from types import SimpleNamespace

import torch
from layout_runs import train
from resume_runs import complete, end, result, settings, start

from minitrain.report import profiled

PHASES = ["train_step", "count_tokens", "reduce_main_grads", "clip_grad_norm_", "gather_params"]


def test_a_trace_holds_the_phases_of_its_steps(tmp_path):
    """Red when a rank leaves no trace, one that is no JSON, of more or fewer steps than asked for,
    or without the functions of train_step; or when a profiled run is another run.
    """
    config = settings(tmp_path, steps=6, profile=2)
    said = complete(config, 2)
    assert f"profile: {config.out}/profile-0.json.gz; open it at" in said
    for rank in (0, 1):
        with gzip.open(config.out / f"profile-{rank}.json.gz") as file:
            events = json.load(file)["traceEvents"]
        calls = [e["name"].split(": ")[-1] for e in events if e.get("cat") == "python_function"]
        assert {name: calls.count(name) for name in PHASES} == dict.fromkeys(PHASES, 2)
        assert calls.count("summed_loss") == 2 * 2  # micro-batches a step, of four rows on dp 2
        operators = {e["name"] for e in events if e.get("cat") == "cpu_op"}
        assert {"aten::mm", "aten::_fused_adamw_"} <= operators
    complete(replace(config, profile=0, out=tmp_path / "plain"), 2)
    assert not list((tmp_path / "plain").glob("profile*"))
    assert result(config.out) == result(tmp_path / "plain")


def test_the_steps_after_two(tmp_path, monkeypatch):
    """Red when the profiler runs in other steps than the third on, or drops a step of the loop.

    The memory calls, which need CUDA, are noted: they must fit torch's own.
    """
    noted = []
    for name in ("_record_memory_history", "_dump_snapshot"):
        fits = inspect.signature(getattr(torch.cuda.memory, name))
        note = lambda *a, _n=name, _f=fits, **k: noted.append(_n) or _f.bind(*a, **k)  # noqa: E731
        monkeypatch.setattr(torch.cuda.memory, name, note)
    config = train.TrainConfig(out=tmp_path, profile=3)
    mesh = SimpleNamespace(rank=0, device=SimpleNamespace(kind="cuda"))
    log = SimpleNamespace(say=noted.append)
    seen = []
    for step in profiled(range(1, 8), config, mesh, log):
        seen.append((step, torch.autograd._profiler_enabled()))
    assert seen == [(n, 3 <= n <= 5) for n in range(1, 8)]
    first, words, *rest = noted
    assert (first, rest) == ("_record_memory_history", ["_dump_snapshot", first])
    assert words.startswith("profile: ")


def test_a_run_directory_that_cannot_be_written(tmp_path):
    """Red when the trace's directory is found wanting only after training."""
    (tmp_path / "file").write_text("")
    config = settings(tmp_path, steps=6, profile=2)
    run = start(replace(config, out=tmp_path / "file" / "run"), said=tmp_path / "said")
    codes, said = end(run)
    assert codes == [1] and said.startswith("error: --out ")
    assert "must be a directory that can be written: Not a directory" in said
