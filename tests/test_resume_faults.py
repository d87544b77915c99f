"""Faults around checkpoints, each with its exact end: full disks, changed settings, two runs at
once.
"""

import errno
import json
import os
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from resume_runs import complete, end, last_step, reach, result, settings, start, until

from minitrain import checkpoint
from minitrain.checkpoint_files import write_pieces
from minitrain.resume import fingerprint, lock, saved_steps


@contextmanager
def small_disk(directory: Path, options: str):
    """A file system of its own in directory, where that can be made."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    if os.name != "posix" or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """No rank waits 10 seconds for torchrun to end it: there is none here."""
    monkeypatch.setattr("minitrain.setup.time", SimpleNamespace(sleep=lambda seconds: None))


def full_disk(steps: set[int], rank: int):
    """write_pieces on a disk that is full on one rank when these steps are saved."""

    def write(file: Path, pieces: dict) -> dict:
        step = int(file.parent.name.split("-")[1].split(".")[0])
        if step in steps and file.name == f"rank-{rank:05d}.safetensors":
            file.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return write_pieces(file, pieces)

    return write


def test_full_disk_is_a_warning(tmp_path, monkeypatch):
    """Red when a full disk ends training, costs the old checkpoint, or leaves half a new one."""
    monkeypatch.setattr(checkpoint, "write_pieces", full_disk({8, 12}, rank=1))
    config = settings(tmp_path, steps=20, save_every=4, keep_last=1)
    said = complete(config, 2)
    for step in (8, 12):
        assert (
            f"warning: the checkpoint of step {step} could not be saved: [Errno 28] No space"
            in said
        )
    assert said.count("warning: ") == 2
    assert [p.name for p in (config.out / "checkpoints").iterdir()] == ["step-00000020"]


def test_full_disk_at_the_end_is_an_error(tmp_path, monkeypatch):
    """Red when a run ends with status 0 without its last checkpoint, or the older one is gone."""
    config = settings(tmp_path, steps=8, save_every=4)
    complete(replace(config, out=tmp_path / "unbroken"), 2)
    monkeypatch.setattr(checkpoint, "write_pieces", full_disk({8}, rank=0))
    codes, said = end(start(config, 2))
    assert codes == [1, 1]
    assert "error: the last checkpoint, of step 8, could not be saved: [Errno 28]" in said
    assert saved_steps(config.out / "checkpoints") == [4]
    assert result(config.out) == result(tmp_path / "unbroken")  # the weights are there
    monkeypatch.undo()
    complete(replace(config, resume=True), 2)
    assert result(config.out) == result(tmp_path / "unbroken")


def test_really_full_disk(tmp_path):
    """Red when only the disk that the tests make up is survived."""
    with small_disk(tmp_path / "disk", "size=1500k"):
        ballast = tmp_path / "disk/ballast"
        config = settings(tmp_path, steps=10_000, save_every=2, keep_last=1)
        config = replace(config, out=tmp_path / "disk/run")
        checkpoints = config.out / "checkpoints"
        run = start(config, said=tmp_path / "said")
        until(run, lambda: saved_steps(checkpoints))

        def full() -> bool:
            with suppress(OSError):  # little enough is free that no second checkpoint fits
                ballast.write_bytes(b"0" * 1_150_000)
            return "could not be saved: [Errno 28] No space" in run.said.read_text()

        until(run, full)
        assert saved_steps(checkpoints)
        ballast.unlink()
        step = last_step(run.out) + 6
        until(run, lambda: max(saved_steps(checkpoints)) > step)
        run.processes[0].terminate()
        codes, said = end(run)
        assert codes == [0], said


def test_read_only_directory(tmp_path):
    """Red when a directory that cannot be written ends in a traceback, or only after training."""
    with small_disk(tmp_path / "disk", "ro"):
        config = replace(settings(tmp_path, steps=2), out=tmp_path / "disk/run")
        codes, words = end(start(config, said=tmp_path / "said"))
        assert codes == [1]
        assert words == (
            f"error: --out {config.out} must be a directory that can be written: Read-only file "
            "system. Pass another.\n"
        )


def test_one_run_a_directory(tmp_path):
    """Red when two runs write to one directory, or a killed one keeps the next from starting."""
    config = settings(tmp_path, steps=10_000, save_every=2, resume=True)
    run = start(config)
    reach(run, 3)
    codes, said = end(start(config, said=tmp_path / "second.said"))
    assert codes == [1]
    assert f"error: one run at a time can write to --out {config.out}, and process " in said
    assert f"process {run.processes[0].pid} on " in said
    run.processes[0].kill()
    run.processes[0].join()
    lock(config.out).close()


def test_without_a_checkpoint_the_run_starts(tmp_path):
    """Red when --resume needs a checkpoint or says nothing, or a run is overwritten without it."""
    config = settings(tmp_path, steps=3, resume=True)
    assert "checkpoints: the run starts at step 1" in complete(config)
    assert "checkpoints: the run starts at step 1" in complete(config)
    codes, said = end(start(replace(config, resume=False)))
    assert codes == [1] and "already holds a run. Pass --resume to go on with it" in said


CHANGES = {
    "batch_size": (8, "--batch-size was 4 and is 8"),
    "seq_len": (12, "--seq-len was 16 and is 12"),
    "seed": (1, "--seed was 0 and is 1"),
    "schedule": ("constant", "--schedule was cosine and is constant"),
    "steps": (9, "--steps was 6 and is 9"),
}


@pytest.mark.parametrize("name", [*CHANGES, "data"])
def test_changed_settings_are_refused(tmp_path, name):
    """Red when a run goes on with other settings or data unasked, does not say which, or refuses
    although --resume-anyway was passed; when the refusal has changed the run's directory.
    """
    config = settings(tmp_path, steps=6, save_every=3)
    complete(config)
    files = [config.out / file for file in ("metrics.jsonl", "config.json")]
    before = [file.read_bytes() for file in files]
    if name == "data":
        changed = replace(config, resume=True)
        (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
        words = "--data was ['rows.jsonl of "
    else:
        value, words = CHANGES[name]
        changed = replace(config, resume=True, **{name: value})
    codes, said = end(start(changed))
    assert codes == [1] and words in said and "--resume-anyway" in said
    assert [file.read_bytes() for file in files] == before
    assert words in complete(replace(changed, resume_anyway=True))


def test_settings_that_do_not_matter(tmp_path):
    """Red when a run cannot go on with another micro-batch, other saving, or a moved model."""
    config = settings(tmp_path, steps=6, save_every=3)
    complete(config)
    (tmp_path / "moved").mkdir()
    (tmp_path / "model").rename(tmp_path / "moved/model")
    moved = {"model": str(tmp_path / "moved/model"), "resume": True}
    said = complete(replace(config, **moved, micro_batch_size=2, save_every=1, keep_last=5))
    assert "going on after step 6" in said


def test_longer_constant_runs(tmp_path):
    """Red when a constant rate, which does not depend on the length, cannot go on for longer."""
    config = settings(tmp_path, steps=6, save_every=3, schedule="constant")
    complete(config)
    complete(replace(config, steps=9, resume=True))
    assert last_step(config.out) == 9


def test_fingerprint_of_token_files(tmp_path):
    """Red when a token file with another end or a text with another middle passes for the same."""
    for name, places in (("a.bin", (0, -1)), ("a.txt", (0, 2_000_000, -1))):
        content = bytearray(4_000_000)
        (tmp_path / name).write_bytes(content)
        before = fingerprint(tmp_path / name)
        for place in places:
            content[place] ^= 1
            (tmp_path / name).write_bytes(content)
            assert fingerprint(tmp_path / name) != before
            content[place] ^= 1


def test_damaged_newest_is_named(tmp_path):
    """Red when a run falls back to an older checkpoint or starts anew without a word, and when it
    cannot go on from the older one once the damaged one is deleted (CASES 35).
    """
    config = settings(tmp_path, steps=9, save_every=3, resume=True)
    complete(config)
    newest = config.out / "checkpoints/step-00000009"
    piece = newest / "rank-00000.safetensors"
    piece.write_bytes(piece.read_bytes()[:-1])
    codes, said = end(start(config))
    assert codes == [1] and str(piece) in said and f"delete {newest} to go on from" in said
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    assert "going on after step 6" in complete(config)


@pytest.mark.parametrize("choice", ["skip", "stop"])
def test_nonfinite_gradients(tmp_path, choice):
    """Red when the rows of a step without a finite gradient are not kept, or ranks differ in what
    they do about it; when the save under way is lost as the run stops.
    """
    config = settings(tmp_path, steps=4, save_every=1, lr=1e30, warmup_steps=0)
    run = start(replace(config, on_nonfinite=choice, batch_size=8), 2)
    codes, said = end(run)
    kept = [json.loads(line) for line in (config.out / "nonfinite.jsonl").read_text().splitlines()]
    assert kept[0]["step"] == 2 and len(kept[0]["rows"]) == 8
    assert all(0 <= row < 29 for row in kept[0]["rows"])
    if choice == "skip":
        assert codes == [0, 0] and [record["step"] for record in kept] == [2, 3, 4]
        assert said.count("update skipped") == 3
    else:
        assert codes == [1, 1] and len(kept) == 1
        assert "error: the gradient norm of step 2 is " in said
        assert saved_steps(config.out / "checkpoints") == [1]


def test_leftovers_are_cleared_away(tmp_path):
    """Red when what a killed save has left takes part in a later one, or stays for ever."""
    config = settings(tmp_path, steps=4, save_every=2)
    left = config.out / "checkpoints/.step-00000002.1"
    left.mkdir(parents=True)
    (left / "rank-00007.safetensors").write_text("old")
    complete(replace(config, resume=True))
    names = sorted(path.name for path in (config.out / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004"]
    for name in names:
        assert len(list((config.out / "checkpoints" / name).iterdir())) == 2


def test_mistakes_of_ours_are_not_swallowed(tmp_path, monkeypatch):
    """Red when any other error of the writer's thread passes for a full disk."""

    def broken(file, pieces):
        raise ZeroDivisionError

    monkeypatch.setattr(checkpoint, "write_pieces", broken)
    codes, said = end(start(settings(tmp_path, steps=4, save_every=2)))
    assert codes == [1] and "ZeroDivisionError" in said
