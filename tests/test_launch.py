"""Starting ranks, and what is said when one of them fails."""

import multiprocessing
import os
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from minitrain import launch
from minitrain.device import Device, pick_device
from minitrain.launch import run_ranks


def test_results_come_in_rank_order():
    """Results in the order of arrival, or arguments lost."""

    def fn(factor, offset):
        return torch.tensor([dist.get_rank() * factor + offset]), torch.get_num_threads()

    got = run_ranks(fn, 4, 10, 1)
    assert [(value.item(), threads) for value, threads in got] == [
        (10 * r + 1, 1) for r in range(4)
    ]


def test_large_results_pass():
    """A result larger than a pipe's buffer blocks its rank for ever."""
    got = run_ranks(lambda: torch.ones(2**20), 2)
    assert [value.sum().item() for value in got] == [2**20] * 2


def test_a_parent_that_used_threads_and_autograd_can_start_ranks():
    """A fork after the parent's own backward passes or thread pools hangs or raises."""
    weight = torch.randn(256, 256, requires_grad=True)

    def learn():
        weight.grad = None
        (weight @ weight).sum().backward()
        return weight.grad.sum().item()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    here = learn()
    got = run_ranks(learn, 2, timeout_s=20)
    torch.set_num_threads(before)
    assert got == pytest.approx([here] * 2, rel=1e-4)


def test_a_failing_rank_shows_its_traceback_and_ends_the_others(tmp_path):
    """The reader sees a time-out instead of the error, or ranks stay behind."""

    def broken_function():
        rank = dist.get_rank()
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        if rank == 1:
            raise KeyError("the reason")
        threading.Event().wait()

    started = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        run_ranks(broken_function, 3, timeout_s=50)
    text = str(error.value)
    assert "rank 1: Traceback" in text and "broken_function" in text and "the reason" in text
    assert "rank 0:" not in text and "rank 2:" not in text
    assert time.monotonic() - started < 40  # the others never end by themselves
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_every_failing_rank_is_shown():
    """Only the first of several tracebacks is kept."""

    def fn():
        raise ValueError(f"from {dist.get_rank()}")

    with pytest.raises(RuntimeError) as error:
        run_ranks(fn, 3)
    assert all(f"from {rank}" in str(error.value) for rank in range(3))


def test_a_killed_rank_is_named():
    """A rank that the system kills (no memory) leaves no word, or a half-hour wait."""

    def fn():
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RuntimeError, match=r"rank 2: died with exit code -9"):
        run_ranks(fn, 3, timeout_s=50)


def test_timeout_names_the_late_ranks():
    """A rank that never ends blocks the test run, or is not named."""

    def fn():
        if dist.get_rank() == 1:
            threading.Event().wait()
        return dist.get_rank()

    with pytest.raises(TimeoutError) as error:
        run_ranks(fn, 2, timeout_s=2)
    assert "1" in str(error.value) and "2 s" in str(error.value)


def test_a_result_that_cannot_be_sent_is_an_error():
    """A rank whose result cannot be pickled ends without a word."""
    with pytest.raises(RuntimeError, match=r"pickle|Can't get local object"):
        run_ranks(lambda: lambda: None, 2)


def test_init_distributed_reads_torchruns_environment():
    """The rank or world size is not torchrun's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def rank_main(rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(port)
        device = Device()
        launch.init_distributed(device)
        x = torch.tensor([rank + 1])
        dist.all_reduce(x)
        queue.put((device.rank(), device.world_size(), x.item(), launch.launched_rank()))
        launch.shut_down()

    processes = [context.Process(target=rank_main, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted(queue.get() for _ in processes) == [(0, 2, 3, 0), (1, 2, 3, 1)]


def test_one_process_joins_nothing(monkeypatch):
    """Started without torchrun, it waits for others."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    launch.init_distributed(Device())
    assert not dist.is_initialized()
    assert (launch.launched_world_size(), launch.launched_rank()) == (1, 0)
    assert (Device().rank(), Device().world_size()) == (0, 1)
    launch.set_timeout(5)
    launch.shut_down()


def test_training_timeout_ends_a_lonely_collective():
    """The long start-up time-out stays in force, and a lost rank is noticed half an hour later."""
    seen = multiprocessing.get_context("fork").Event()

    def fn():
        launch.set_timeout(1)
        if dist.get_rank() == 1:
            seen.wait(30)
            return
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            seen.set()

    with pytest.raises(RuntimeError, match=r"(?i)rank 0: .*timed out"):
        run_ranks_and_flatten(fn)
    assert seen.is_set()


def run_ranks_and_flatten(fn) -> None:
    """run_ranks, its tracebacks on one line so that a pattern can span them."""
    try:
        run_ranks(fn, 2, timeout_s=40)
    except RuntimeError as error:
        raise RuntimeError(" ".join(str(error).split())) from None


def test_unknown_or_absent_devices_are_refused_in_words():
    """An unknown device falls back to the cpu."""
    with pytest.raises(ValueError, match=r"auto, cpu, cuda.*'gpu'"):
        pick_device("gpu")
    assert pick_device("cpu").kind == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--device cpu"):
            pick_device("cuda")
        assert pick_device("auto").kind == "cpu"
