"""The checkpoints of a run: one run a directory, saving in the background, going on where it ended.

out/lock             held by rank 0 as long as its process lives
out/checkpoints/     step-00000040/, ...; names that begin with a dot are unfinished or outdated
out/nonfinite.jsonl  the rows of steps whose gradient was not finite
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import socket
import zlib
from dataclasses import asdict
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path

import torch

from minitrain.agreement import Interrupt, first_error, host_axis, tell_all, together
from minitrain.bf16_optimizer import BF16Optimizer
from minitrain.checkpoint import load_checkpoint, pieces_on_host, publish, write_rank
from minitrain.checkpoint_files import read_manifest
from minitrain.collectives import all_reduce
from minitrain.corpus import BUILTIN
from minitrain.mesh import Mesh, ShardSpec

SAMPLE = 2**20  # bytes at the start and at the end of a token file that tell it from others
SHAPING = (
    *("model", "data", "batch_size", "seq_len", "pack", "shuffle", "on_bad_row", "lr", "seed"),
    *("warmup_steps", "schedule", "steps", "weight_decay", "adam_betas", "adam_eps"),
    *("max_grad_norm", "dtype", "lora_rank", "lora_alpha", "lora_dropout", "lora_rslora"),
    "lora_targets",
)


class Checkpoints:
    """Save, resume and stop a run: made before the run directory is written to, then begin().

    Training waits for the copy to the host; a thread writes it. When a step's end finds that every
    rank has written, rank 0 makes the checkpoint visible, in a thread as well. A save that fails,
    on a full disk, is a warning; the next one tries again; the last one is an error.

    step           of the last save; at first that which a resumed run goes on from, else 0
    stopped        whether a signal asked the run to end

    Communicates   words over all ranks
    Raises         ValueError on every rank: another run writes to out; a setting has changed that
                   makes it another run; the newest checkpoint is damaged
    """

    def __init__(self, config, mesh: Mesh):
        self.config, self.mesh, self.host = config, mesh, host_axis(mesh.device)
        self.directory = config.out / "checkpoints"
        self.writer = self.publisher = self.interrupt = None
        self.thread = ThreadPool(1)  # does not keep a dying process alive
        self.stopped, self.failed, self.words = False, "", ""
        self.step, self.attempt, self.buffers = 0, 0, {}
        with together(self.host):
            if mesh.rank == 0:
                self._claim()
        self.step = max(map(int, tell_all(str(self.step), self.host)))

    def _claim(self) -> None:
        """On rank 0: lock the run directory, clear away what is unfinished, find where to go on."""
        self.lock = lock(self.config.out)
        for leftover in self.directory.glob(".step-*"):
            shutil.rmtree(leftover)
        self.settings = shaping_settings(self.config)
        if not self.config.resume:
            return
        self.step = max(saved_steps(self.directory), default=0)
        if not self.step:
            self.words = f"no checkpoint in {self.directory}: the run starts at step 1"
            return
        path = checkpoint_path(self.directory, self.step)
        self.words = f"going on after step {self.step}, from {path}"
        old, new = read_manifest(path)["settings"], self.settings
        changed = [
            f"--{name.replace('_', '-')} was {old.get(name)} and is {new.get(name)}"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
        if changed and not self.config.resume_anyway:
            raise ValueError(
                f"a resumed run must keep the settings that shape it, but not as in {path}: "
                f"{'; '.join(changed)}. Pass the old ones, another --out, or --resume-anyway."
            )
        if changed:
            self.words += f", with other settings: {'; '.join(changed)}"

    def begin(self, optimizer: BF16Optimizer, shard_spec: ShardSpec, log) -> None:
        """Load the newest checkpoint when resuming; from here on signals wait for a step's end."""
        self.optimizer, self.shard_spec, self.log = optimizer, shard_spec, log
        if self.words:
            log.say(self.words)
        if self.step:
            path = checkpoint_path(self.directory, self.step)
            load_checkpoint(path, optimizer, shard_spec, self.mesh)
        self.interrupt = Interrupt()

    def wanted(self, step: int) -> bool:
        """Whether to save after this step, as it is due or a rank was told to stop: then stopped is
        True. To be asked once a step, on every rank; equal on all.

        Makes the checkpoint under way visible once every rank has written its part.

        Communicates   all-reduce of two numbers over all ranks, on the host
        """
        writing = self.writer is not None and not self.writer.ready()
        mine = torch.tensor([self.interrupt.asked, writing], dtype=torch.int64)
        stop, still_writing = all_reduce(mine, self.host).tolist()
        if self.writer is not None and not still_writing:
            self._publish()
        last, every = step == self.config.steps, self.config.save_every
        self.stopped = stop > 0 and not last
        return self.stopped or (every > 0 and (last or step % every == 0))

    def save(self, step: int) -> None:
        """Begin to save; waits for the save before. Every rank must call it."""
        self.wait()
        self.attempt += 1
        self.step, self.failed = step, ""
        self.part = self.directory / f".step-{step:08d}.{self.attempt}"
        tensors = pieces_on_host(self.optimizer, self.shard_spec, self.mesh, self.buffers)
        self.writer = self.thread.apply_async(write_rank, (self.part, self.mesh.rank, tensors))

    def wait(self) -> None:
        """Wait until the save under way is over, on every rank."""
        if self.writer is not None:
            self._publish()
        published, self.publisher = self.publisher, None
        self._note(failure(published))

    def _publish(self) -> None:
        """Wait for the writer; rank 0 makes the checkpoint visible when no rank's has failed."""
        written, self.writer = self.writer, None
        if not self._note(failure(written)) and self.mesh.rank == 0:
            self.publisher = self.thread.apply_async(self._make_visible)

    def _make_visible(self) -> None:
        path = checkpoint_path(self.directory, self.step)
        publish(self.part, path, self.step, self.mesh, self.settings)
        for old in sorted(saved_steps(self.directory))[: -self.config.keep_last]:
            outdated = self.directory / f".step-{old:08d}.old"
            checkpoint_path(self.directory, old).rename(outdated)  # never half a visible one
            shutil.rmtree(outdated)

    def _note(self, error: OSError | None) -> bool:
        """Tell every rank of a failed save; whether there was one."""
        words = first_error(error, self.host)
        if words and self.mesh.rank == 0:
            shutil.rmtree(self.part, ignore_errors=True)
            self.log.say(
                f"warning: the checkpoint of step {self.step} could not be saved: {words}. "
                "Training goes on, and the next save tries again."
            )
        self.failed = self.failed or words
        return bool(words)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Wait for the last save, unless ranks are missing, and let go of the directory.

        Raises   OSError on every rank when the last save failed
        """
        self.interrupt.release()
        if error is not None and not isinstance(error, FloatingPointError):
            return
        self.wait()
        self.thread.close()
        if self.mesh.rank == 0:
            self.lock.close()
        if self.failed:
            raise OSError(
                f"the last checkpoint, of step {self.step}, could not be saved: {self.failed}."
            )
        if self.stopped:
            self.log.say(
                f"stopped after step {self.step}, which is saved in {self.directory}. To go on, "
                "run the same command with --resume."
            )


def failure(task: AsyncResult | None) -> OSError | None:
    """Wait for the end; any other error is a mistake of ours, and raised."""
    try:
        if task is not None:
            task.get()
    except OSError as error:
        return error
    return None


def lock(out: Path):
    """Make the run directory and lock it until this process ends; ValueError when another process
    has it, or it cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / "lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--out {out} must be a directory that can be written: {error.strerror}. Pass another."
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(
            f"one run at a time can write to --out {out}, and {file.read()} does. Wait for its "
            "end, or pass another --out."
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def saved_steps(directory: Path) -> list[int]:
    """Steps of which there is a checkpoint."""
    return [int(path.name.removeprefix("step-")) for path in directory.glob("step-" + 8 * "[0-9]")]


def shaping_settings(config) -> dict:
    """The settings that change a run's numbers, and what identifies its data, as JSON has them."""
    settings = {name: value for name, value in asdict(config).items() if name in SHAPING}
    settings["model"] = Path(config.model).name
    settings["data"] = [fingerprint(Path(path)) for path in config.data or ["stdlib"]]
    if config.schedule == "constant":
        del settings["steps"]
    return json.loads(json.dumps(settings, default=str))


def fingerprint(file: Path) -> str:
    """A data file's name, size and checksum, of the whole text or of a token file's two ends."""
    if str(file) in BUILTIN:
        return f"{file} of Python {platform.python_version()}"
    size, checksum = file.stat().st_size, 0
    with file.open("rb") as stream:
        while part := stream.read(SAMPLE):
            checksum = zlib.crc32(part, checksum)
            if file.suffix == ".bin" and stream.tell() < size - SAMPLE:
                stream.seek(size - SAMPLE)
    return f"{file.name} of {size:,} bytes, checksum {checksum:08x}"
