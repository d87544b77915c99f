"""Start the process groups: from torchrun's environment, or as children of a test or notebook."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

from minitrain.device import STARTUP_TIMEOUT, Device


def launched_world_size() -> int:
    """Number of processes that torchrun started, before any process group exists; else 1."""
    return int(os.environ.get("WORLD_SIZE", 1))


def launched_rank() -> int:
    """This process's number among them."""
    return int(os.environ.get("RANK", 0))


def init_distributed(device: Device) -> None:
    """Join the process group that torchrun describes in the environment, if it started us.

    Communicates   the rendezvous; waits up to 30 minutes for all ranks: slow loading is no failure
    """
    rank, world_size = launched_rank(), launched_world_size()
    if world_size > 1:
        restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
        meeting = {"store": _fresh_store(rank, world_size)} if restarts else {}
        device.init_process_group(rank, world_size, **meeting)


def _fresh_store(rank: int, world_size: int) -> dist.Store:
    """torchrun's store without what ranks wrote into it before a restart, which newer ones would
    take for addresses of each other (pytorch issue 135712; agents count restarts apart).

    Rank 0 draws a name and tells it to each rank that asks, until all ranks have it. Nobody asks
    twice by the same word, so that no answer is an old one.
    """
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=STARTUP_TIMEOUT))
    if rank > 0:
        word = uuid.uuid4().hex
        store.set(f"asked by {rank}", word)
        name = store.get(f"answer to {word}").decode()
        store.set(f"{name} is known to {rank}", "")
        return dist.PrefixStore(name, store)
    name, others = uuid.uuid4().hex, set(range(1, world_size))
    while others:
        for other in others:
            if store.check([f"asked by {other}"]):
                store.set(f"answer to {store.get(f'asked by {other}').decode()}", name)
        others = {other for other in others if not store.check([f"{name} is known to {other}"])}
        time.sleep(0.05)
    return dist.PrefixStore(name, store)


def set_timeout(seconds: float) -> None:
    """Let collectives fail after this long, once training runs; start-up has a longer time-out."""
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def shut_down() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def run_ranks(fn: Callable, world_size: int, *args, timeout_s: float = 60) -> list:
    """Run fn(*args) on world_size CPU ranks, one process each, joined by gloo.

    fn          may be defined in a notebook; runs with one thread, inside a process group
    args        given to every rank
    timeout_s   seconds until all ranks must have ended

    Returns     list of what fn returned, one per rank (picklable)
    Raises      RuntimeError with each failing rank's traceback; the others are then ended.
                TimeoutError
    """
    method = "fork" if sys.platform == "linux" else "spawn"  # fork also carries a notebook's fn
    context = multiprocessing.get_context(method)
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        pipes, processes = [], []
        for rank in range(world_size):
            receive, send = context.Pipe(duplex=False)
            given = (send, rank, world_size, store, fn, args)
            process = context.Process(target=_rank_main, args=given)
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        try:
            return _collect(pipes, processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank_main(pipe, rank: int, world_size: int, store: str, fn: Callable, args: tuple) -> None:
    try:
        torch.set_num_threads(1)
        Device().init_process_group(rank, world_size, store=dist.FileStore(store, world_size))
        dist.barrier()  # an early error must not break the connecting of the others
        result = (True, fn(*args))
        dist.barrier()  # nobody leaves while another still needs its sockets
        dist.destroy_process_group()
        message = pickle.dumps(result)
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a forked child must not run the parent's exit handlers


def _collect(pipes: list, processes: list, timeout_s: float) -> list:
    """Every rank's message; after a failure the others have a moment to report theirs."""
    results, failures = {}, {}
    silent = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + timeout_s
    while silent and (ready := wait(silent, max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            rank = silent.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                ok, value = False, f"died with exit code {processes[rank].exitcode}"
            (results if ok else failures)[rank] = value
        if failures:
            deadline = min(deadline, time.monotonic() + 2)
    if failures:
        raise RuntimeError("\n".join(f"rank {r}: {text}" for r, text in sorted(failures.items())))
    if silent:
        late = list(silent.values())
        raise TimeoutError(f"ranks {late} of {len(pipes)} had not ended after {timeout_s} s.")
    return [results[rank] for rank in range(len(pipes))]
