"""What the ranks agree on beside the numbers of training: errors, when to stop, who is missing.

All on the host and over gloo, so that no device waits and nothing is compiled.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from minitrain.device import Device, TorchGroup
from minitrain.mesh import Axis

WORDS = 1000  # bytes that a rank can say


def host_axis(device: Device) -> Axis:
    """All ranks along one axis, for tensors on the host."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size == 1:
        return Axis("host")
    group = TorchGroup(list(range(size)), device.host_group or dist.group.WORLD)
    return Axis("host", size, dist.get_rank(), group)


def tell_all(words: str, host: Axis) -> list[str]:
    """Give every rank the words of every rank, in order.

    Communicates   all-gather over host of 1,000 bytes
    """
    if host.size == 1:
        return [words]
    data = words.encode()[:WORDS]
    mine = torch.frombuffer(bytearray(data.ljust(WORDS, b"\0")), dtype=torch.uint8)
    rows = host.group.all_gather(mine[None], 0)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows]


def first_error(error: Exception | None, host: Axis) -> str:
    """The words of the first rank that has an error, on every rank; "" when none has."""
    said = tell_all(str(error) if error else "", host)
    return next((words for words in said if words), "")


@contextmanager
def together(host: Axis) -> Iterator[None]:
    """Do on each rank what may fail on one alone; a ValueError or OSError of any rank is raised on
    every rank, in its words, so that no rank waits for it.

    Communicates   as tell_all
    Raises         ValueError
    """
    error = None
    try:
        yield
    except (ValueError, OSError) as caught:
        error = caught
    if words := first_error(error, host):
        raise ValueError(words) from error


class Interrupt:
    """SIGTERM and Ctrl-C ask for an end after the step; a second Ctrl-C ends at once.

    A thread listens: in a collective, where the main thread may wait, Python runs no handler.

    asked    whether one has come to this process
    """

    def __init__(self) -> None:
        self.asked = False
        listen, self.wake = os.pipe()
        os.set_blocking(self.wake, False)
        self.wake_before = signal.set_wakeup_fd(self.wake)
        numbers = (signal.SIGTERM, signal.SIGINT)
        self.before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        threading.Thread(target=self._listen, args=(listen,), daemon=True).start()

    def _listen(self, listen: int) -> None:
        while received := os.read(listen, 1):
            number = received[0]
            if self.asked and number == signal.SIGINT:
                os._exit(128 + number)
            if number in self.before and not self.asked:
                self.asked = True
                if int(os.environ.get("RANK", 0)) == 0:
                    name = signal.Signals(number).name
                    words = f"\n{name}: stopping after this step; Ctrl-C again ends at once.\n"
                    os.write(2, words.encode())
        os.close(listen)

    def release(self) -> None:
        """Handle signals as before."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.wake_before)
        os.close(self.wake)


def broken_connection(error: RuntimeError) -> bool:
    """Whether an error is that of a collective whose ranks did not all take part."""
    of_ranks = isinstance(error, dist.DistError) or "gloo" in str(error)
    return of_ranks and dist.is_initialized()


def missing_ranks(seconds: float = 5.0) -> list[int]:
    """Call the roll after a collective has failed: the ranks that died or hang do not answer.

    Communicates   a key of each rank in the store that the ranks met at
    """
    missing = list(range(dist.get_world_size()))
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"roll call {dist.get_rank()}", "here")
        deadline = time.monotonic() + seconds
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not store.check([f"roll call {rank}"])]
            time.sleep(0.05)
    except dist.DistError:  # the store was rank 0's
        return [0]
    return missing
