"""Settings that this machine cannot fulfil: one sentence, before anything is made."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from layout_runs import train
from resume_runs import end, settings, start

from minitrain.setup import check_out, check_settings

SPEED = train.TrainConfig()


def test_profile_needs_its_steps(tmp_path):
    """Red when --profile is negative or longer than the run, which would leave no trace."""
    config = replace(SPEED, out=tmp_path, steps=4)
    check_settings(replace(config, profile=2), 1)
    with pytest.raises(ValueError, match=r"--profile must not be negative, not -1"):
        check_settings(replace(config, profile=-1), 1)
    rule = r"--profile 3 needs 5 steps, 2 of them to warm up, but --steps is 4. Pass --steps 5"
    with pytest.raises(ValueError, match=rule):
        check_settings(replace(config, profile=3), 1)


@pytest.mark.parametrize(
    ("kind", "variable", "value", "words"),
    [
        ("cpu", "PATH", "", r"a C\+\+ compiler, but there is no g\+\+"),
        ("auto", "CXX", "nowhere/g++", r"a C\+\+ compiler, but there is no nowhere/g\+\+"),
        ("cuda", "CC", "nowhere/gcc", r"a C compiler, but there is no nowhere/gcc"),
        ("xla", "PATH", "", None),
        ("neuron", "PATH", "", None),
    ],
)
def test_compile_needs_a_compiler(tmp_path, monkeypatch, kind, variable, value, words):
    """Red when --compile without a compiler ends in a traceback of torch, in the first step; or is
    refused where a compiler of the device's own does it.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, value)
    config = replace(SPEED, out=tmp_path, compile=True, device=kind)
    if words is None:
        return check_settings(config, 1)
    with pytest.raises(ValueError, match=f"--compile needs {words}.*set C.* or leave out"):
        check_settings(config, 1)


def test_a_failed_start_does_not_hold_its_directory(tmp_path):
    """Red when a run that never made a step must be deleted by hand before it starts again."""
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "checkpoints").mkdir()
    check_out(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="already holds a run"):
        check_out(tmp_path)


def test_torch_looks_for_the_same_compiler(monkeypatch):
    """Red when torch would take another compiler on the CPU than the check looks for."""
    code = "import torch._inductor.config as c; print(c.cpp.cxx[-1])"
    monkeypatch.delenv("CXX", raising=False)
    for value in ("g++", "some/other"):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        assert out.strip() == value or sys.platform == "darwin"
        monkeypatch.setenv("CXX", "some/other")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compile": True}, "error: --compile needs a C++ compiler, but there is no nowhere."),
        ({"device": "cuda"}, "error: --device cuda needs a CUDA GPU and a CUDA build of torch"),
    ],
)
def test_a_run_ends_in_one_sentence(tmp_path, monkeypatch, changes, words):
    """Red when what the machine lacks is found after the run directory was made."""
    if "device" in changes and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setenv("CXX", "nowhere")
    config = replace(settings(tmp_path, steps=2), **changes)
    codes, said = end(start(config))
    assert codes == [1] and said.startswith(words) and said.count("\n") == 1, said
    assert not config.out.exists()
