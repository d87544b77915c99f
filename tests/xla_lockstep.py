"""Several torch-xla CPU devices as threads of one process, with real collectives; torch-xla 2.9.

XLA_THREAD_POOL_SIZE           an execution holds one of XLA's threads while it waits for the other
                               devices; with the default, one a core, they never meet
XLA_ENABLE_PARAM_ALIASING=0    a donated buffer makes the first device wait inside sync
sync                           a collective meets only within the very same executable, so rank 0
                               compiles and starts first; the others then find its program
one autograd thread a rank     autograd must not move a backward pass to another rank's thread
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from minitrain.device import XlaDevice

DIFFERENT = 70  # exit status when the ranks traced different programs


def host_operators() -> dict[str, int]:
    """Operators that ran on the host, with their counts; reading a number is one of them."""
    import torch_xla.debug.metrics as metrics

    names = [name for name in metrics.counter_names() if name.startswith("aten::")]
    return {name: int(metrics.counter_value(name)) for name in names}


class LockstepDevice(XlaDevice):
    """An XlaDevice whose sync lets rank 0 compile and start first, and reports other programs."""

    def __init__(self, meet: threading.Barrier):
        super().__init__()
        self.meet = meet

    def barrier(self) -> None:
        self.meet.wait()

    def sync(self) -> None:
        first = self.rank() == 0
        self.meet.wait()
        if first:
            self.torch_xla.sync(wait=False)
        self.meet.wait()
        before = self.compilations()
        if not first:
            self.torch_xla.sync(wait=False)
        if (
            self.compilations() > before
        ):  # the devices would wait for each other, and be ended in 10 s
            print(f"rank {self.rank()} traced another program than rank 0", file=sys.stderr)
            sys.stderr.flush()
            os._exit(DIFFERENT)
        self.meet.wait()


def run_devices(fn: Callable[[XlaDevice], object], count: int, timeout_s: float = 120) -> list:
    """Run fn(device) on `count` CPU devices; once per process, before any backward pass.

    Returns   what fn returned, one per rank
    """
    threads = str(max(16, 4 * count))
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(count), "NPROC": threads}
    os.environ |= {"XLA_THREAD_POOL_SIZE": threads, "XLA_ENABLE_PARAM_ALIASING": "0"}
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ.setdefault("XLA_FLAGS", quick)
    import torch
    from torch_xla._internal import pjrt

    meet = threading.Barrier(count, timeout=timeout_s)

    def rank_main():
        with torch.autograd.set_multithreading_enabled(False):
            try:
                return fn(LockstepDevice(meet))
            except BaseException:
                meet.abort()
                raise

    results = pjrt._run_thread_per_device(0, 1, rank_main, pjrt.initialize_multiprocess)
    return [results[rank] for rank in sorted(results)]
