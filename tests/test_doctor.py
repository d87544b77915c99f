"""scripts/doctor.py: passes where all is well, and says in words what is not."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from minitrain.device import Device
from minitrain.launch import run_ranks
from minitrain.mesh import Axis, init_mesh

SCRIPT = Path(__file__).parent.parent / "scripts/doctor.py"
sys.path.insert(0, str(SCRIPT.parent))
import doctor  # noqa: E402

HAS_XLA = find_spec("torch_xla") is not None
needs_xla = pytest.mark.skipif(not HAS_XLA, reason="needs torch 2.9 with torch-xla 2.9")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *command]
    env |= environment
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def words_of(rows: list) -> str:
    return "\n".join(f"{row.check}: {row.words}" for row in rows)


def test_passes_on_the_cpu():
    """Red when the command does not run, or finds fault with a machine that is well."""
    done = run(str(SCRIPT), "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well" in done.stdout
    assert "FAILED" not in done.stdout
    assert f"torch {doctor.version('torch')}" in done.stdout


def test_passes_on_four_ranks():
    """Red when a collective's known answer is wrong, or a layout changes the losses."""
    for rows in run_ranks(lambda: doctor.examine(Device(), 2, 2), 4):
        assert not any(row.failed for row in rows), words_of(rows)
        assert {row.check for row in rows} >= {"collectives, sp 2", "collectives, tp 2"}


class DeafGroup:
    """Collectives that do nothing, as when every process believes that it is alone."""

    def __init__(self, group):
        self.group = group

    def __getattr__(self, name):
        return getattr(self.group, name)

    def all_reduce(self, x, op):
        return x.clone()

    def all_reduce_(self, x, op):
        pass


def test_collectives_that_do_nothing_are_found():
    """Red when ranks that do not hear each other pass."""

    def fn():
        mesh = init_mesh(tp=2)
        deaf = Axis("tp", 2, mesh.tp.rank, DeafGroup(mesh.tp.group))
        mesh = replace(mesh, tp=deaf)
        return list(doctor.collectives(mesh)), list(doctor.training(mesh))

    for collectives, training in run_ranks(fn, 2):
        assert "all-reduce gave" in words_of([row for row in collectives if row.failed])
        assert any(row.failed for row in training), words_of(training)


def test_an_error_in_a_check_is_a_line_of_the_table():
    """Red when one broken check hides the others behind a traceback."""

    def breaks():
        yield doctor.Row("first", "fine")
        raise RuntimeError("no such operator\nand more")

    rows = doctor.checked(breaks)
    assert [row.failed for row in rows] == [False, True]
    assert rows[1].words == "RuntimeError: no such operator"


@pytest.mark.skipif(HAS_XLA, reason="torch-xla is here")
def test_missing_torch_xla_is_said():
    """Red when a missing package is a traceback."""
    done = run(str(SCRIPT), "--device", "xla")
    assert done.returncode == 1
    assert "needs torch-xla" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_missing_trainium_is_said():
    """Red when --device neuron fails in other words than ours."""
    done = run(str(SCRIPT), "--device", "neuron")
    assert done.returncode == 1
    assert "torch-neuronx 2.13 or later" in done.stdout


@needs_xla
def test_passes_on_xla():
    """Red when a step compiles again, runs on the host, or differs from the CPU's."""
    done = run(str(SCRIPT), "--device", "xla", PJRT_DEVICE="CPU")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "programs compiled" in done.stdout


@needs_xla
def test_passes_on_four_xla_devices():
    """Red when XLA's collectives give other answers than the known ones."""
    from test_xla import on_xla

    for lines in on_xla({"run": "doctor", "devices": 4, "sp": 1, "tp": 2}):
        assert not [line for line in lines if line.startswith("FAILED")]
        assert any(line.startswith("collectives, tp 2") for line in lines)


@needs_xla
def test_narrowed_numbers_are_refused():
    """Red when XLA_USE_BF16 quietly makes float32 tensors 16 bits wide."""
    done = run(str(SCRIPT), "--device", "xla", PJRT_DEVICE="CPU", XLA_USE_BF16="1")
    assert done.returncode == 1
    assert "XLA_USE_BF16 is set" in done.stdout


@needs_xla
def test_a_world_that_xla_does_not_see_is_refused():
    """Red when torchrun's processes each train alone on CPU devices."""
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2"]
    done = run(*torchrun, str(SCRIPT), "--device", "xla", PJRT_DEVICE="CPU")
    assert done.returncode == 1
    assert "sees 1 of the 2" in done.stdout
