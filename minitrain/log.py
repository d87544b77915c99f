"""What a run says: rank 0's progress bar, its step lines, and metrics.jsonl.

Needs no torch. metrics.jsonl is always JSON: a number that is not finite is written as null.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from threading import RLock

from tqdm import tqdm


class Bar(tqdm):
    """tqdm without its lock, which a forked rank takes from all others when it is killed, and
    without its thread, which may hold that lock during a fork.
    """

    monitor_interval = 0

    def __init__(self, *args, **settings):
        super().__init__(*args, miniters=1, dynamic_ncols=True, **settings)


Bar.set_lock(RLock())


class RunLog:
    """Rank 0's bar, step lines and metrics.jsonl; on other ranks every method does nothing.

    On a terminal there is a bar, elsewhere a line on stdout for the first step, every log_every
    steps, and for a skip.

    out          run directory, made if need be; None: nothing is written
    rank         of all processes; only 0 speaks and writes
    total_steps  last step's number
    first_step   steps made before, when a run is resumed; what metrics.jsonl says about later ones
                 is cut off, as they will be made again
    log_every    steps between lines
    """

    def __init__(self, out: Path | None, rank: int, total_steps: int, first_step=0, log_every=1):
        self.speaks, self.total_steps, self.log_every = rank == 0, total_steps, log_every
        self.on_terminal = sys.stderr.isatty() and sys.stdout.isatty()
        self.bar, self.file, self.waiting, self.warned = None, None, b"", False
        self.evaluated: set[int] = set()  # steps whose evaluation is in the file
        self.first: tuple[int, float] | None = None  # first step logged, and when
        if self.speaks and out is not None:
            self.path = Path(out) / "metrics.jsonl"
            self._cut(first_step)
            self.file = self.path.open("ab", buffering=0)

    def say(self, text: str) -> None:
        """Print one or more lines, above the bar."""
        if self.speaks and self.bar is not None:
            self.bar.write(text, file=sys.stdout)
        elif self.speaks:
            print(text, flush=True)

    def step(self, record: dict) -> None:
        """Log one step: metrics.jsonl, bar, and a line when it is due.

        record   the fields of metrics.jsonl as Python numbers; `step` counts from 1. loss None: the
                 step had no loss token
        """
        if not self.speaks:
            return
        self._write(record)
        step, last = record["step"], record["step"] == self.total_steps
        place, figures, first = self._place(step), _figures(record), self.first is None
        self.first = self.first or (step, time.monotonic())
        if sys.stderr.isatty():
            # The bar begins at the first step, so that its rate does not count what came before.
            self.bar = self.bar or Bar(total=self.total_steps, initial=step, unit=" steps")
            self.bar.set_postfix_str(", ".join(figures), refresh=False)
            self.bar.update(step - self.bar.n)
        if record.get("skipped"):
            why = f"loss {record['loss']}, gradient norm {record['grad_norm']}"
            why = "no token of the step has a loss" if record["loss"] is None else why
            self.say(f"{place}  update skipped: {why}")
        elif not self.on_terminal and (last or first or step % self.log_every == 0):
            self.say("  ".join([place, *figures, *self._left(step)]))
        if last:
            self._end_bar()

    def evaluation(self, record: dict) -> None:
        """Log {"step", "eval_loss", "eval_tokens"}; metrics.jsonl has at most one of a step."""
        if not self.speaks:
            return
        if record["step"] not in self.evaluated:
            self._write(record)
        self.evaluated.add(record["step"])
        loss, tokens = record["eval_loss"], record["eval_tokens"]
        self.say(f"{self._place(record['step'])}  held-out loss {loss:.4f}  over {tokens:,} tokens")

    def close(self) -> None:
        """End the bar and the file."""
        self._end_bar()
        if self.waiting:
            count = self.waiting.count(b"\n")
            self.say(f"warning: the last {count} lines of {self.path} could not be written.")
        if self.file is not None:
            self.file.close()
            self.file = None

    def _end_bar(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _place(self, step: int) -> str:
        return f"step {step:{len(str(self.total_steps)) + 1}}/{self.total_steps}"

    def _left(self, step: int) -> list[str]:
        """Time to the end, from the mean of the steps since the first one logged."""
        first, then = self.first
        if step == first or step == self.total_steps:
            return []
        seconds = (time.monotonic() - then) / (step - first) * (self.total_steps - step)
        return [f"{tqdm.format_interval(seconds)} left"]

    def _cut(self, last_step: int) -> None:
        """Drop the lines about later steps, and what a crash made of a line; atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        pairs = [(line, _parse(line)) for line in lines]
        kept = [(line, record) for line, record in pairs if record and record["step"] <= last_step]
        part = self.path.with_name(f"{self.path.name}.part")
        with part.open("wb") as file:
            file.writelines(line + b"\n" for line, _ in kept)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path)
        self.evaluated = {record["step"] for _, record in kept if "eval_loss" in record}
        if missing := last_step - sum("eval_loss" not in record for _, record in kept):
            self.say(f"{self.path}: the lines of {missing} steps are missing in it.")

    def _write(self, record: dict) -> None:
        """Add a whole line, in the file system's hands when this returns. While the disk is full,
        the lines wait in memory, some 200 bytes a step.
        """
        if self.file is None:
            return
        line = json.loads(json.dumps(record), parse_constant=lambda name: None)  # NaN, Infinity
        self.waiting += json.dumps(line, allow_nan=False).encode() + b"\n"
        size = self.file.seek(0, os.SEEK_END)
        try:
            if self.file.write(self.waiting) < len(self.waiting):
                self.file.truncate(size)  # no part of a line stays
                raise OSError("no space left")
            self.waiting = b""
        except OSError as error:
            if not self.warned:
                then = "Training goes on, and the lines are kept until there is space."
                self.say(f"warning: {self.path} cannot be written ({error}). {then}")
            self.warned = True


def read_metrics(path: Path) -> list[dict]:
    """Read the lines of metrics.jsonl, of steps and of evaluations, in order.

    A last line that was cut off, by a kill or because it is being written, is left out.

    Raises   ValueError with file and line number for any other line that is no metrics
    """
    records = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], 1):
        records.append(_parse(line))
        if records[-1] is None:
            text = line[:60].decode(errors="replace")
            rule = 'a line of metrics must be a JSON object with "step"'
            raise ValueError(f"{path}:{number}: {rule}, but is {text!r}. Delete that line.")
    return records


def progress(iterable_or_total: Iterable | int, what: str, rank: int = 0) -> Bar:
    """Show a long operation's progress on rank 0's terminal; quiet when stderr is none.

    iterable_or_total   what to go through; or a count, to be moved on by .update(n)
    what                a word or two in front of the bar
    """
    is_count = isinstance(iterable_or_total, int)
    settings = {"total" if is_count else "iterable": iterable_or_total, "desc": what}
    hidden = rank != 0 or not sys.stderr.isatty()
    return Bar(**settings, disable=hidden, leave=False)


def _figures(record: dict) -> list[str]:
    """The words of a step line, of what the record has."""
    formats = {"loss": "loss {:.4f}", "grad_norm": "grad norm {:.4f}", "lr": "lr {:.1e}"}
    formats["tokens_per_second"] = "{:,.0f} tokens/s"
    found = {name: record.get(name) for name in formats}
    return [formats[name].format(value) for name, value in found.items() if value is not None]


def _parse(line: bytes) -> dict | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
