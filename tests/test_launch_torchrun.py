"""Real torchrun: what a user sees of settings that cannot work, and of a rank that dies."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from layout_runs import ROOT

TRAIN = ROOT / "scripts/train.py"


def torchrun(processes: int, *arguments, cwd) -> subprocess.Popen:
    """Start train.py under torchrun, standard output and error together."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(processes), TRAIN, "--device", "cpu", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, cwd=cwd, **pipes)


BAD_SETTINGS = {
    "world": (6, ("--sp", "2", "--tp", "2"), "sp * tp: 2 * 2 = 4, but 6 processes are running"),
    "heads": (2, ("--tp", "2", "--model", "smollm2-135m"), "9 heads, 1 * 2 = 2"),
    "sp": (8, ("--sp", "8",), "4 heads, 8 * 1 = 8"),
    "batch": (4, ("--batch-size", "6"), "6 rows, dp 4 * "),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_impossible_settings_end_in_one_sentence(tmp_path, name):
    """Each rank prints, none does as rank 0 is killed first, or ranks wait for each other."""
    processes, arguments, words = BAD_SETTINGS[name]
    run = torchrun(processes, *arguments, cwd=tmp_path)
    output, _ = run.communicate(timeout=120)
    errors = re.findall(r"^error: .*", output, re.MULTILINE)
    assert len(errors) == 1 and words in errors[0], output
    assert run.returncode == 1
    assert "on rank" not in errors[0] and "Gloo" not in output
    ours = re.findall(r'File ".*/(?:scripts|minitrain)/\w+.py", line', output)
    assert not ours, output  # no traceback, on any rank
    assert not list(tmp_path.iterdir())  # nothing was made


def test_a_killed_rank_is_named_and_the_rest_end(tmp_path):
    """The survivors wait for the dead rank until a time-out, or nobody says which it was."""
    small = ("--steps", "100000", "--seq-len", "32", "--micro-batch-size", "1", "--batch-size", "2")
    run = torchrun(2, *small, "--tp", "2", "--log-every", "1", "--out", "run", cwd=tmp_path)
    try:
        lines = []
        for line in run.stdout:
            lines.append(line)
            if (tmp_path / "run/metrics.jsonl").exists() and "loss" in line:
                break
        os.kill(rank_process(run.pid, 1), signal.SIGKILL)
        killed = time.monotonic()
        output, _ = run.communicate(timeout=120)
        assert time.monotonic() - killed < 60  # not the training time-out of ten minutes
    finally:
        run.kill()
    assert run.returncode == 1
    assert re.search(r"rank\s+: 1 .*\n\s*exitcode\s+: -9 ", output), "".join(lines) + output


def rank_process(launcher: int, rank: int) -> int:
    """Process id of a rank that this torchrun started."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher)], capture_output=True)
    for pid in map(int, found.stdout.split()):
        with open(f"/proc/{pid}/environ", "rb") as file:
            if f"LOCAL_RANK={rank}".encode() in file.read().split(b"\0"):
                return pid
    raise AssertionError(f"torchrun has no rank {rank}")
