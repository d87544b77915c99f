"""Data made one step ahead on a thread: the same run, the same errors, the same ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from layout_runs import ROOT, train
from resume_runs import complete, end, last_step, result, settings, start
from token_files import write_token_file

from minitrain.data_sharder import Batch, one_ahead
from minitrain.dataset import Dataset

ENDLESS = """
import sys, threading
from minitrain.data_sharder import one_ahead
def items():
    yield 1
    threading.Event().wait()
print(next(one_ahead(items())))
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """No rank waits 10 seconds for torchrun to end it: there is none here."""
    monkeypatch.setattr("minitrain.setup.time", SimpleNamespace(sleep=lambda seconds: None))


def test_one_thread_makes_the_next_item_and_no_more():
    """Red when items come in another order, are made two ahead, or each by another thread."""
    begun, threads = [threading.Event() for _ in range(7)], set()

    def items():
        for n in range(5):
            threads.add(threading.current_thread())
            begun[n].set()
            yield n

    seen = []
    for n in one_ahead(items()):
        assert n == 4 or begun[n + 1].wait(60)  # while the caller has n
        assert not begun[n + 2].is_set()
        seen.append(n)
    assert seen == [0, 1, 2, 3, 4] and len(threads) == 1
    (thread,) = threads
    assert thread is not threading.current_thread()
    thread.join(60)
    assert not thread.is_alive()
    assert list(one_ahead([])) == []


@pytest.mark.parametrize("how", ["break", "error here", "error there"])
def test_the_thread_ends_with_the_loop(how):
    """Red when a loop that is left early leaves the thread, or an error comes early or as another
    one.
    """
    mistake, seen, threads = ValueError("rows.jsonl:3: bad"), [], []

    def items():
        threads.append(threading.current_thread())
        yield from (0, 1)
        if how == "error there":
            raise mistake
        yield 2

    ahead = one_ahead(items())
    with pytest.raises(ValueError) as caught:
        for n in ahead:
            seen.append(n)
            if n == 1 and how == "error here":
                raise mistake
            if n == 1 and how == "break":
                ahead.close()
                raise mistake
    assert caught.value is mistake and seen == [0, 1]
    del caught
    ahead.close()
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_a_stuck_thread_does_not_keep_the_process(tmp_path):
    """Red when a process cannot end while a disk does not answer."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"capture_output": True, "text": True, "timeout": 120, "env": environment}
    done = subprocess.run([sys.executable, "-c", ENDLESS], **options)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2, "lora_dropout": 0.3}])
def test_a_run_is_bitwise_the_same(tmp_path, monkeypatch, changes):
    """Red when the thread changes the order of rows, or draws from the generator of dropout."""
    config = settings(tmp_path, steps=9, save_every=4, **changes)
    complete(config, 2)
    monkeypatch.setattr(train, "one_ahead", iter)
    complete(replace(config, out=tmp_path / "in_line"), 2)
    if not changes:
        assert result(config.out) == result(tmp_path / "in_line")
    names = [path / "metrics.jsonl" for path in (config.out, tmp_path / "in_line")]
    losses = [[json.loads(line)["loss"] for line in name.open()] for name in names]
    assert losses[0] == losses[1] and len(losses[0]) == 9


def test_a_row_that_cannot_be_used_ends_every_rank(tmp_path, monkeypatch):
    """Red when an error of the thread is a traceback or a hang, or comes at another step than in
    the loop itself.
    """
    config = settings(tmp_path, steps=9)
    path = write_token_file(tmp_path / "rows.bin", [[1, 2, 3]] * 40 + [[99, 1, 2]] + [[1]] * 9)
    header = json.loads((tmp_path / "rows.bin.json").read_text())
    (tmp_path / "rows.bin.json").write_text(json.dumps(header | {"largest_id": 0}))
    config = replace(config, data=(path,), shuffle=False, pack=True)  # in the third batch
    reason = "error: token ids must be below the model's vocabulary of 63, but a token file holds"
    for out in (config.out, tmp_path / "in_line"):
        codes, said = end(start(replace(config, out=out), 2))
        assert codes == [1, 1]
        assert said.count(reason) == 2 and "(on rank 1)" in said and "Traceback" not in said
        assert last_step(out) == 1  # the second's figures were not read yet
        monkeypatch.setattr(train, "one_ahead", iter)


def test_a_stop_does_not_wait_for_the_next_rows(tmp_path, monkeypatch):
    """Red when SIGTERM during a step waits for a thread that is stuck with the rows of the next."""
    config = settings(tmp_path, steps=9)
    said, batch, step = config.out.with_suffix(".said"), Dataset.batch, train.train_step
    stuck = threading.Event()

    def stuck_batch(self, number, size):
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            stuck.set()
            threading.Event().wait()
        return batch(self, number, size)

    def patient_step(model, optimizer, *rest):
        while optimizer.updates == 2 and "SIGTERM: stopping" not in said.read_text():
            assert stuck.wait(60)
            time.sleep(0.002)
        return step(model, optimizer, *rest)

    monkeypatch.setattr(Dataset, "batch", stuck_batch)
    monkeypatch.setattr(train, "train_step", patient_step)
    codes, words = end(start(config))
    assert codes == [0] and "stopped after step 3" in words
    monkeypatch.undo()
    unbroken = replace(config, out=tmp_path / "unbroken")
    complete(replace(config, resume=True))
    complete(unbroken)
    assert result(config.out) == result(unbroken.out)


def test_batches_are_copied_from_pinned_memory_on_cuda(monkeypatch):
    """Red when a copy to a GPU waits. There is none: what is asked of the tensors is noted."""
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: asked.append("pin") or x)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device, **how: asked.append(how) or x)
    ids = torch.zeros(2, 4, dtype=torch.int64)
    Batch(ids, ids, ids, ids).to(torch.device("cuda"))
    assert asked == ["pin"] * 3 + [{"non_blocking": True}] * 3
