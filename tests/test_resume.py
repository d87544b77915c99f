"""Runs that are killed, stopped and gone on with: in the end as if nothing had happened."""

import os
import signal
import time
from dataclasses import replace
from functools import partial
from random import Random

import pytest
from resume_runs import complete, end, last_step, reach, result, settings, start, until

from minitrain.agreement import missing_ranks

KILLS = int(os.environ.get("MINITRAIN_KILLS", 8))


def checkpoints(out) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_killed_at_random_moments(tmp_path):
    """Red when a killed run, during a step or a save, goes on otherwise than it would have (CASES
    33, 35): weights and metrics end bitwise as those of an unbroken run. MINITRAIN_KILLS=50 for the
    long version.
    """
    held_out = {"eval_data": (tmp_path / "held.jsonl",), "eval_every": 7}
    config = settings(tmp_path, steps=60, save_every=2, resume=True, **held_out)
    complete(replace(config, out=tmp_path / "unbroken"), 2)
    random, unfinished = Random(0), 0
    for kill in range(KILLS):
        run = start(config, 2)
        reach(run, 60 * kill // KILLS - random.randint(0, 2))
        time.sleep(random.random() * 0.05)
        assert all(process.is_alive() for process in run.processes), run.said.read_text()
        for process in random.sample(run.processes, 2):
            process.kill()
            process.join()
        names = checkpoints(config.out) if (config.out / "checkpoints").exists() else []
        unfinished += any(name.startswith(".") for name in names)
    complete(config, 2)
    print(f"{KILLS} kills, {unfinished} of them during a save")
    assert result(config.out) == result(tmp_path / "unbroken")
    assert checkpoints(config.out) == ["step-00000058", "step-00000060"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("lora", [0, 4])
def test_stopped_by_a_signal(tmp_path, number, lora):
    """Red when a signal to one rank ends the run otherwise than after a step, saved, with status 0
    and words on how to go on; or when three parts are not bitwise the whole (CASES 33, with LoRA).
    """
    config = settings(tmp_path, steps=24, lora_rank=lora, lora_dropout=0.1 if lora else 0.0)
    complete(replace(config, out=tmp_path / "unbroken"), 2)
    config = replace(config, resume=True)
    for part in (1, 2):
        run = start(config, 2)
        reach(run, 6 * part)
        os.kill(run.processes[part % 2].pid, number)
        codes, said = end(run)
        assert codes == [0, 0], said
        step = last_step(config.out)
        assert 6 * part <= step < 24
        assert checkpoints(config.out)[-1] == f"step-{step:08d}"
        assert f"stopped after step {step}, which is saved" in said
        assert "run the same command with --resume" in said
        assert not (config.out / "final").exists()
    complete(config, 2)
    assert result(config.out) == result(tmp_path / "unbroken")


def test_second_interrupt_ends_at_once(tmp_path):
    """Red when a second Ctrl-C waits for a step that never ends."""
    run = start(settings(tmp_path, steps=10_000), 2)
    reach(run, 3)
    os.kill(run.processes[1].pid, signal.SIGSTOP)  # rank 0 now waits in a collective
    os.kill(run.processes[0].pid, signal.SIGINT)
    until(run, lambda: "SIGINT: stopping" in run.said.read_text())
    os.kill(run.processes[0].pid, signal.SIGINT)
    run.processes[0].join(10)
    assert run.processes[0].exitcode == 130
    run.processes[1].kill()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_missing_rank_is_named(tmp_path, monkeypatch, number):
    """Red when a rank hangs or dies and nobody says which."""
    monkeypatch.setattr("minitrain.setup.missing_ranks", partial(missing_ranks, 3.0))
    run = start(settings(tmp_path, steps=10_000, timeout_minutes=0.05), 3 + 1)
    reach(run, 3)
    os.kill(run.processes[2].pid, number)
    run.processes[0].join(30)
    run.processes[2].kill()
    codes, said = end(run)
    assert "error: rank 2 of 4 died or hangs, found by rank" in said
    assert codes == [1, 1, -signal.SIGKILL, 1], said


def test_other_layout_goes_on(tmp_path):
    """Red when a run that goes on with other ranks gets other rows or another state (CASES 34, 37:
    in the middle of warm-up).
    """
    options = {"steps": 16, "save_every": 5, "warmup_steps": 10, "dtype": "fp64"}
    config = settings(tmp_path, **options, micro_batch_size=2)
    complete(replace(config, out=tmp_path / "unbroken"))
    _, whole = result(tmp_path / "unbroken")
    layouts = [(2, {"sp": 2}), (4, {"tp": 2}), (2, {"micro_batch_size": 1}), (1, {})]
    for world_size, changes in layouts:
        run = start(replace(config, resume=True, **changes), world_size)
        reach(run, last_step(config.out) + 5)
        for process in run.processes:
            process.kill()
            process.join()
    complete(replace(config, resume=True, tp=2), 2)
    _, records = result(config.out)
    assert len(records) == len(whole) == 16
    for got, want in zip(records, whole):
        assert got == pytest.approx(want, rel=1e-10, abs=0)
    assert records[4]["lr"] == pytest.approx(0.5 * config.lr, rel=1e-15)
