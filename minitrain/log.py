"""What a run says: rank 0's progress bar, its step lines, and metrics.jsonl.

Needs no torch. metrics.jsonl is always JSON: a number that is not finite is written as null.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

from minitrain.text_plot import text_plot as text_plot  # for those who look for it here


class RunLog:
    """Rank 0's progress bar, step lines and metrics.jsonl; on other ranks every method does
    nothing.

    On a terminal there is a bar. Elsewhere every log_every-th step is a line on stdout, as is every
    step whose update was skipped.

    out           run directory, made if need be; None: nothing is written
    rank          of all processes; only 0 speaks and writes
    total_steps   last step's number
    first_step    steps already made, when a run is resumed; what metrics.jsonl says about later
                  ones is cut off, as they will be made again
    log_every     steps between lines
    """

    def __init__(
        self,
        out: Path | None,
        rank: int,
        total_steps: int,
        first_step: int = 0,
        log_every: int = 1,
    ):
        self.speaks, self.total_steps, self.log_every = rank == 0, total_steps, log_every
        self.bar, self.metrics, self.evaluated = None, None, set()
        self.first: tuple[int, float] | None = None  # first step logged, and when
        if not self.speaks:
            return
        if out is not None:
            path = Path(out) / "metrics.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            last, self.evaluated, lost = cut_metrics(path, first_step)
            if lost:
                self.say(f"{path}: {lost} unreadable lines were left out.")
            if last < first_step:
                self.say(f"{path} ends at step {last}: steps up to {first_step} are missing in it.")
            self.metrics = MetricsFile(path, self.say)
        self.lines = not (sys.stderr.isatty() and sys.stdout.isatty())

    def say(self, text: str) -> None:
        """Print one or more lines, above the bar."""
        if self.speaks and self.bar is not None:
            self.bar.write(text, file=sys.stdout)
        elif self.speaks:
            print(text, flush=True)

    def step(self, record: dict) -> None:
        """Log one step: metrics.jsonl, bar, and a line when it is due.

        record   the fields of metrics.jsonl as Python numbers; `step` counts from 1. loss None: the
                 step had no loss token. Without `skipped`, an update without a finite loss and norm
                 counts as skipped
        """
        if not self.speaks:
            return
        finite = [_finite(record.get(name, 0.0)) for name in ("loss", "grad_norm")]
        record = {"skipped": not all(finite)} | record
        if self.metrics is not None:
            self.metrics.add(record)
        step, last = record["step"], record["step"] == self.total_steps
        self.first = self.first or (step, time.monotonic())
        self._move_bar(record)
        if record["skipped"]:
            self.say(f"{self._place(step)}  update skipped: {_why_skipped(record)}")
        elif self.lines and (last or step % self.log_every == 0):
            self.say("  ".join([self._place(step), *_figures(record), *self._left(step)]))
        if last:
            self._end_bar()

    def evaluation(self, record: dict) -> None:
        """Log one evaluation: {"step", "eval_loss", "eval_tokens"}, said and in metrics.jsonl,
        where each step has at most one.
        """
        if not self.speaks:
            return
        if self.metrics is not None and record["step"] not in self.evaluated:
            self.metrics.add(record)
        self.evaluated.add(record["step"])
        loss, tokens = _number(record["eval_loss"], ".4f"), record["eval_tokens"]
        self.say(f"{self._place(record['step'])}  held-out loss {loss}  over {tokens:,} tokens")

    def close(self) -> None:
        """End the bar and the file."""
        self._end_bar()
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = None

    def _move_bar(self, record: dict) -> None:
        """The bar begins at the first step, so that its rate does not count what came before."""
        if not sys.stderr.isatty():
            return
        step = record["step"]
        if self.bar is None:
            self.bar = tqdm(total=self.total_steps, initial=step, unit=" steps", dynamic_ncols=True)
        self.bar.set_postfix_str(", ".join(_figures(record, short=True)), refresh=False)
        self.bar.update(step - self.bar.n)

    def _end_bar(self) -> None:
        if self.bar is not None:
            self.bar.refresh()
            self.bar.close()
            self.bar = None

    def _place(self, step: int) -> str:
        width = len(str(self.total_steps))
        return f"step {step:{width + 1}}/{self.total_steps}"

    def _left(self, step: int) -> list[str]:
        """Time to the end, from the mean of the steps since the first one logged."""
        first, then = self.first
        if step == first or step == self.total_steps:
            return []
        seconds = (time.monotonic() - then) / (step - first) * (self.total_steps - step)
        return [f"{tqdm.format_interval(seconds)} left"]


class MetricsFile:
    """metrics.jsonl, a whole line at a time, in the file system's hands when add returns.

    When the disk is full, that is said once, training goes on, and the lines wait in memory (some
    200 bytes a step) until there is space again.
    """

    def __init__(self, path: Path, say):
        self.path, self.say, self.waiting, self.warned = path, say, b"", False
        self.file = path.open("ab", buffering=0)
        self.size = self.file.seek(0, os.SEEK_END)

    def add(self, record: dict) -> None:
        line = {name: value if _finite(value) else None for name, value in record.items()}
        self.waiting += json.dumps(line, allow_nan=False).encode() + b"\n"
        try:
            written = self.file.write(self.waiting)
            if written < len(self.waiting):
                self.file.truncate(self.size)  # no part of a line stays
                raise OSError(f"only {written} of {len(self.waiting)} bytes could be written")
        except OSError as error:
            if not self.warned:
                self.say(
                    f"warning: {self.path} cannot be written ({error.strerror or error}). Training "
                    "goes on, and the lines are kept until they can. Free some space."
                )
            self.warned = True
        else:
            self.size, self.waiting = self.size + written, b""

    def close(self) -> None:
        if self.waiting:
            count = self.waiting.count(b"\n")
            self.say(f"warning: the last {count} lines of {self.path} could not be written.")
        self.file.close()


def cut_metrics(path: Path, last_step: int) -> tuple[int, set[int], int]:
    """Drop the lines about steps after last_step, atomically, and lines that are no JSON object.

    Returns   (last step that is left, 0 if none; steps whose evaluation is left; unreadable lines
              dropped, not counting a last one that was cut off)
    """
    if not path.exists():
        return 0, set(), 0
    lines = path.read_bytes().split(b"\n")
    records = [_parse(line) for line in lines[:-1]]  # what follows the last newline was cut off
    kept = [(i, r) for i, r in enumerate(records) if r is not None and r["step"] <= last_step]
    text = b"".join(lines[i] + b"\n" for i, _ in kept)
    if text != b"\n".join(lines):
        part = path.with_name(f"{path.name}.part")
        with part.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    steps = [record["step"] for _, record in kept if "eval_loss" not in record]
    evaluated = {record["step"] for _, record in kept if "eval_loss" in record}
    return max(steps, default=0), evaluated, sum(record is None for record in records)


def read_metrics(path: Path) -> list[dict]:
    """Read the lines of metrics.jsonl, of steps and of evaluations, in order.

    A last line that was cut off, by a kill or because it is being written, is left out.

    Raises   ValueError with file and line number for any other line that is no metrics
    """
    records = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], 1):
        record = _parse(line)
        if record is None:
            raise ValueError(
                f'{path}:{number}: a line of metrics must be a JSON object with "step", but is '
                f"{line[:60].decode(errors='replace')!r}. Delete that line."
            )
        records.append(record)
    return records


def progress(iterable_or_total: Iterable | int, what: str, rank: int = 0) -> tqdm:
    """Show a long operation's progress on rank 0's terminal; quiet when stderr is none.

    iterable_or_total   what to go through; or a count, to be moved on by .update(n)
    what                a word or two in front of the bar
    """
    count = isinstance(iterable_or_total, int)
    return tqdm(
        None if count else iterable_or_total,
        total=iterable_or_total if count else None,
        desc=what,
        disable=rank != 0 or not sys.stderr.isatty(),
        dynamic_ncols=True,
        leave=False,
    )


def _figures(record: dict, short: bool = False) -> list[str]:
    """The words of a step line, of what the record has."""
    formats = {
        "loss": ("loss ", ".4f", ""),
        "grad_norm": ("grad norm ", ".4f", ""),
        "lr": ("lr ", ".1e", ""),
        "tokens_per_second": ("", ",.0f", " tokens/s"),
    }
    return [
        f"{before}{_number(record[name], form)}{after}"
        for name, (before, form, after) in formats.items()
        if name in record and not (short and name == "lr")
    ]


def _why_skipped(record: dict) -> str:
    if record.get("loss_tokens") == 0 or record.get("loss", 0.0) is None:
        return "no token of the step has a loss"
    return f"loss {record.get('loss')}, gradient norm {record.get('grad_norm')}"


def _number(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)


def _finite(value) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _parse(line: bytes) -> dict | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if whole else None
