"""Labels shifted once on whole rows, then padded and sliced: no token lost or counted twice."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ONE, uneven_rows

from minitrain.data_sharder import Batch, shard_batch, shift_labels
from minitrain.loss_reducer import count_tokens, cross_entropy_sum
from minitrain.mesh import Axis, Mesh


def mesh_of(dp: int, sp: int, tp: int, rank: int) -> Mesh:
    """A mesh without groups: shard_batch must not communicate."""
    d, s, t = rank // (sp * tp), rank // tp % sp, rank % tp
    return Mesh(
        Axis("dp", dp, d), Axis("sp", sp, s), Axis("tp", tp, t), Axis("dp_sp", dp * sp, d * sp + s)
    )


def all_ranks(rows, dp: int = 1, sp: int = 1, tp: int = 1) -> list[Batch]:
    return [shard_batch(rows, mesh_of(dp, sp, tp, rank)) for rank in range(dp * sp * tp)]


def rows_of(ids, **others):
    return SimpleNamespace(input_ids=torch.as_tensor(ids), **others)


def test_shift_before_slicing():
    """Each slice shifted by itself: the last token of a slice loses its label (case 4)."""
    first, second = all_ranks(rows_of([list(range(8))]), sp=2)
    assert first.labels.tolist() == [[1, 2, 3, 4]]
    assert second.labels.tolist() == [[5, 6, 7, -100]]
    assert second.input_ids.tolist() == [[4, 5, 6, 7]]
    assert second.position_ids.tolist() == [[4, 5, 6, 7]]
    assert count_tokens([first, second], ONE).item() == 7


@pytest.mark.parametrize("sp", [1, 2, 4])
def test_logits_that_know_the_next_token_have_no_loss(sp):
    """Labels not shifted, or shifted twice (case 4)."""
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    knowing = torch.nn.functional.one_hot(ids.roll(-1, 1), 10).float() * 20
    total = 0.0
    for rank, batch in enumerate(all_ranks(rows_of(ids), sp=sp)):
        logits = knowing.chunk(sp, 1)[rank]
        total += cross_entropy_sum(logits, batch.labels, ONE).item()
    assert total / 7 < 1e-6


@pytest.mark.parametrize("masked, count", [(0, 7), (3, 5), (8, 0)])
def test_tokens_are_counted_after_the_shift(masked, count):
    """Label 0, which nothing predicts, is counted (case 5)."""
    ids = torch.arange(8)[None]
    labels = ids.clone()
    labels[:, :masked] = -100
    batches = all_ranks(rows_of(ids, labels=labels), sp=2)
    counts = count_tokens(batches, ONE)
    assert counts.dtype == torch.int64 and counts.tolist() == [count]


def test_no_label_crosses_a_document_border():
    """The end of one document predicts the start of the next (case 13)."""
    ids = torch.tensor([[10, 11, 12, 20, 21, 22, 23]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    want = [[11, 12, -100, 21, 22, 23, -100]]
    assert shift_labels(ids, positions).tolist() == want
    parts = all_ranks(rows_of(ids, position_ids=positions), sp=2)
    assert torch.cat([part.labels for part in parts], 1).tolist() == [[*want[0], -100]]
    assert torch.cat([part.position_ids for part in parts], 1)[0, :7].tolist() == [
        *positions[0].tolist()
    ]


@pytest.mark.parametrize("sp, tp, padded", [(2, 1, 8), (4, 1, 8), (1, 4, 8), (2, 2, 8), (3, 1, 9)])
def test_rows_are_padded_to_equal_slices(sp, tp, padded):
    """A row length that sp does not divide: unequal slices, or padding that counts (case 16)."""
    ids = torch.arange(1, 8).repeat(2, 1)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2)
    batches = all_ranks(rows_of(ids, documents=documents), sp=sp, tp=tp)
    assert {batch.labels.shape for batch in batches} == {(2, padded // sp)}
    labels = torch.cat([batch.labels for batch in batches[::tp]], 1)
    assert labels[0].tolist() == [2, 3, 4, 5, 6, 7, -100] + [-100] * (padded - 7)
    for batch in batches:
        assert batch.documents.shape == (2, padded)
        assert torch.equal(batch.documents[:, :7], documents)
        assert not (batch.documents[:, 7:] <= 1).any()  # padding is no part of the last document


@pytest.mark.parametrize("dp, sp, tp", [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 2, 2)])
def test_every_token_is_on_one_rank_and_its_tp_neighbours(dp, sp, tp):
    """Rows dropped, repeated or out of order, or tp neighbours with other data (17)."""
    rows = uneven_rows(num_rows=4, length=12, packed=True)
    batches = all_ranks(rows, dp, sp, tp)
    whole = shard_batch(rows, Mesh())
    for name in ("input_ids", "labels", "position_ids"):
        for t in range(tp):
            grid = [getattr(batch, name) for batch in batches[t::tp]]
            lines = [torch.cat(grid[d * sp : (d + 1) * sp], 1) for d in range(dp)]
            assert torch.equal(torch.cat(lines), getattr(whole, name))
    documents = [batch.documents for batch in batches[:: sp * tp]]
    assert torch.equal(torch.cat(documents), rows.documents)
    counts = sum(count_tokens([batch], ONE).item() for batch in batches[::tp])
    assert counts == count_tokens([whole], ONE).item()


def test_numpy_rows_of_a_dataset():
    """Rows as the dataset gives them (numpy arrays) are refused or take another path."""

    @dataclass
    class Rows:
        input_ids: np.ndarray
        labels: np.ndarray
        position_ids: np.ndarray
        documents: np.ndarray

    rows = uneven_rows(packed=True)
    arrays = Rows(
        rows.input_ids.numpy(),
        rows.labels.numpy(),
        rows.position_ids.numpy(),
        rows.documents.numpy(),
    )
    got, want = shard_batch(arrays, Mesh()), shard_batch(rows, Mesh())
    for name in ("input_ids", "labels", "position_ids", "documents"):
        assert torch.equal(getattr(got, name), getattr(want, name))
    assert np.array_equal(arrays.labels, rows.labels.numpy())


def test_a_batch_that_dp_does_not_divide_is_refused():
    """Ranks get unequal numbers of rows, and of collectives: a hang."""
    with pytest.raises(ValueError, match=r"6 rows on dp 4.*--batch-size"):
        all_ranks(rows_of(torch.zeros(6, 4, dtype=torch.int64)), dp=4)


def test_micro_batches_are_all_rows_in_order():
    """The short last micro-batch is dropped (case 6), or documents go with other rows."""
    batch = shard_batch(uneven_rows(num_rows=7, packed=True), Mesh())
    parts = batch.split(3)
    assert [len(part.labels) for part in parts] == [3, 3, 1]
    for name in ("input_ids", "labels", "position_ids", "documents"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))
    whole = shard_batch(rows_of(torch.zeros(4, 4, dtype=torch.int64)), Mesh())
    assert [part.documents for part in whole.split(2)] == [None, None]
    assert count_tokens(parts, ONE).item() == count_tokens([batch], ONE).item()


def test_documents_stay_on_the_host():
    """Reading documents' lengths waits for the device in every layer."""
    batch = shard_batch(uneven_rows(packed=True), Mesh())
    for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        moved = batch.to(torch.device(kind))
        assert moved.labels.device.type == moved.input_ids.device.type == kind
        assert moved.position_ids.device.type == kind
        assert torch.equal(moved.documents, batch.documents)
        assert moved.documents.device.type == "cpu"
