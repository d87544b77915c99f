"""torchrun brings a killed rank's group back from the newest checkpoint."""

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from layout_runs import ROOT
from resume_runs import arguments, complete, reach, result, settings

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@contextmanager
def launch(config, *options: str, said: Path) -> Iterator[SimpleNamespace]:
    """torchrun with options, in the background until the end of the block."""
    command = [*TORCHRUN, *options, str(ROOT / "scripts/train.py"), *arguments(config)]
    process = subprocess.Popen(
        command,
        stdout=said.open("w"),
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    process.is_alive = lambda: process.poll() is None
    try:
        yield SimpleNamespace(processes=[process], out=config.out, said=said)
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its ranks
            process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ranks_of(run) -> list[int]:
    """Process ids of a torchrun's ranks."""
    (agent,) = run.processes
    return list(map(int, Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()))


@pytest.mark.parametrize("alone", [["--standalone"], ["--master-port={}"]], ids=["c10d", "static"])
def test_a_killed_rank_is_restarted(tmp_path, alone):
    """Red when --max-restarts does not go on from the newest checkpoint, or not bit for bit."""
    config = settings(tmp_path, steps=300, save_every=10, resume=True)
    said, alone = tmp_path / "said", [option.format(free_port()) for option in alone]
    with launch(config, "--nproc_per_node=2", "--max-restarts=1", *alone, said=said) as run:
        reach(run, 35, 240)
        os.kill(ranks_of(run)[1], signal.SIGKILL)
        assert run.processes[0].wait(240) == 0, said.read_text()
    assert "going on after step " in said.read_text()
    check(config, tmp_path)


def test_two_agents_restart_together(tmp_path):
    """Red when a rank killed on one machine does not bring back those on another."""
    config = settings(tmp_path, steps=300, save_every=10, resume=True)
    options = ["--nnodes=2", "--nproc_per_node=1", "--max-restarts=2", "--rdzv-backend=c10d"]
    options += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", f"--rdzv-id={random.random()}"]
    files = [tmp_path / f"said{n}" for n in (0, 1)]
    with (
        launch(config, *options, said=files[0]) as first,
        launch(config, *options, said=files[1]) as second,
    ):
        reach(first, 35, 240)
        os.kill(ranks_of(second)[0], signal.SIGKILL)
        codes = [run.processes[0].wait(240) for run in (first, second)]
    said = "".join(file.read_text() for file in files)
    assert codes == [0, 0], said
    assert "going on after step " in said
    check(config, tmp_path)


def check(config, directory: Path) -> None:
    """The result must be that of an unbroken run."""
    unbroken = settings(directory, steps=300, out=directory / "unbroken")
    complete(unbroken, 2)
    assert result(config.out) == result(unbroken.out)
