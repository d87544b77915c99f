"""How documents lie in rows: packed, padded, cut; what is learnt, and what sees what."""

import json

import numpy as np
import pytest
from token_files import write_token_file

from minitrain.dataset import open_dataset


class Letters:
    """A tokenizer whose ids are the letters' code points, and 0 the eos."""

    eos_id, pad_id = 0, 0

    def encode_batch(self, texts):
        return [list(map(ord, text)) for text in texts]

    def encode_with_offsets(self, texts):
        return [(list(map(ord, text)), [(i, i + 1) for i in range(len(text))]) for text in texts]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [path]


def token_rows(path, *rows):
    """Write rows of (input_ids, labels or None)."""
    keys = ("input_ids", "labels")
    return write(path, [dict(zip(keys, row if row[1] else row[:1], strict=False)) for row in rows])


def random_rows(seed, count, longest, masked=True):
    """Rows of random length and mask; each starts with an id of its own."""
    random, rows = np.random.default_rng(seed), []
    for number in range(count):
        ids = [1000 + number, *random.integers(1, 99, random.integers(1, longest)).tolist()]
        mask = random.integers(0, len(ids)) if masked else 0
        rows.append((ids, [-100] * mask + ids[mask:]))
    return rows


def numbers_of(rows):
    """Each position's document; counted from the positions where rows are not packed."""
    return np.cumsum(rows.position_ids == 0, axis=1) - 1


def documents_of(rows):
    """Take a batch apart into its documents: (ids, labels) of each, paddings included."""
    found = []
    for ids, labels, positions, numbers in zip(
        rows.input_ids, rows.labels, rows.position_ids, numbers_of(rows), strict=True
    ):
        for number in range(numbers.max() + 1):
            here = numbers == number
            assert positions[here].tolist() == list(range(here.sum()))
            assert np.ptp(np.flatnonzero(here)) + 1 == here.sum()
            found.append((ids[here].tolist(), labels[here].tolist()))
    return found


def shifted(rows):
    """Shift labels as training does, written out on its own: none across a document's border."""
    labels = np.full_like(rows.labels, -100)
    numbers = numbers_of(rows)
    same = numbers[:, 1:] == numbers[:, :-1]
    labels[:, :-1] = np.where(same, rows.labels[:, 1:], -100)
    return labels


def test_packed_documents_restart_positions(tmp_path):
    """Red when positions run on, or a label crosses a border (case 13)."""
    paths = token_rows(tmp_path / "a.jsonl", ([10, 11, 12], None), ([20, 21, 22, 23], None))
    rows = open_dataset(paths, None, 7, shuffle=False).rows([0])
    assert rows.input_ids.tolist() == [[10, 11, 12, 20, 21, 22, 23]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert rows.documents.tolist() == [[0, 0, 0, 1, 1, 1, 1]]
    assert shifted(rows).tolist() == [[11, 12, -100, 21, 22, 23, -100]]


def test_text_rows_find_their_documents_by_eos(tmp_path):
    """Red when a stream's documents see each other, or one begins at its eos instead of after."""
    paths = write(tmp_path / "a.jsonl", [{"text": "ab"}, {"text": "cde"}, {"text": "f"}])
    dataset = open_dataset(paths, Letters(), 6, shuffle=False)
    rows = dataset.rows(range(2))
    a, b, c, d, e, f = range(97, 103)
    assert rows.input_ids.tolist() == [[a, b, 0, c, d, e], [0, f, 0, 0, 0, 0]]
    assert rows.labels.tolist() == [[a, b, 0, c, d, e], [0, f, 0, -100, -100, -100]]
    assert rows.documents.tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 1, 2, 2, 2]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 1, 0, 1, 2]]
    assert "3 documents in 2 rows of 6 tokens, 75.0 % filled: 9 tokens, 5 of" in dataset.summary
    assert (shifted(rows) != -100).sum() == 5


@pytest.mark.parametrize("lengths", [[4, 4], [4, 3, 1, 4], [3, 2, 7], [12], [1, 1, 1, 1, 4]])
def test_loss_tokens_of_a_stream(tmp_path, lengths):
    """Red when a document that ends with its row is counted as a border inside one."""
    paths = write(tmp_path / "a.jsonl", [{"text": "x" * (length - 1)} for length in lengths])
    dataset = open_dataset(paths, Letters(), 4)
    count = (shifted(dataset.rows(range(dataset.num_rows))) != -100).sum()
    assert f" {count} of them with loss" in dataset.summary


@pytest.mark.parametrize("pack", [True, False])
def test_eos_that_is_also_the_padding_keeps_its_label(tmp_path, pack):
    """Red when padding is told from text by its id: the real eos would not be learnt (case 14)."""
    paths = write(tmp_path / "a.jsonl", [{"text": "ab"}])
    rows = open_dataset(paths, Letters(), 5, pack=pack).rows([0])
    assert rows.input_ids.tolist() == [[97, 98, 0, 0, 0]]
    assert rows.labels.tolist() == [[97, 98, 0, -100, -100]]


@pytest.mark.parametrize(("masked", "count"), [(0, 7), (3, 5)])
def test_loss_tokens_are_counted_after_the_shift(tmp_path, masked, count):
    """Red when labels are counted before the shift: 8 and 5 instead of 7 and 5 (case 5)."""
    ids = list(range(1, 9))
    paths = token_rows(tmp_path / "a.jsonl", (ids, [-100] * masked + ids[masked:]))
    assert f"8 tokens, {count} of them with loss" in open_dataset(paths, None, 8).summary


@pytest.mark.parametrize("pack", [True, False])
def test_rows_that_lose_their_loss_tokens_are_dropped_and_counted(tmp_path, pack):
    """Red when a prompt longer than the row stays as a row without loss, unsaid (case 15)."""
    long, border = list(range(1, 9)), [-100] * 4 + [5, 6, 7, 8]
    paths = token_rows(tmp_path / "a.jsonl", (long, border), (long, long), ([9, 9], [-100, 9]))
    dataset = open_dataset(paths, None, 4, pack=pack, shuffle=False)
    assert dataset.num_rows == 2
    assert dataset.rows([0, 1]).input_ids.tolist() == [[1, 2, 3, 4], [9, 9, 0, 0]]
    assert "2 rows longer than 4 tokens were cut there; 1 of them dropped" in dataset.summary
    with pytest.raises(ValueError, match=r"no row left to learn from in .*; 1 of them dropped"):
        open_dataset(token_rows(tmp_path / "b.jsonl", (long, border)), None, 4, pack=pack)


@pytest.mark.parametrize("seq_len", [12, 40, 333])
def test_packing_keeps_every_document_whole_and_once(tmp_path, seq_len):
    """Red when first fit loses, splits, repeats or alters a document, or fills rows badly."""
    rows = random_rows(seq_len, 1500, 12)
    rows = [row for row in rows if any(label != -100 for label in row[1][1:])]
    paths = token_rows(tmp_path / "a.jsonl", *rows)
    dataset = open_dataset(paths, None, seq_len)
    found = documents_of(dataset.rows(range(dataset.num_rows)))
    real = [document for document in found if document[0][0] >= 1000]
    assert sorted(real) == sorted(rows)
    assert all(set(labels) == {-100} for ids, labels in found if ids[0] < 1000)
    assert sum(len(ids) for ids, _ in rows) > 0.95 * dataset.num_rows * seq_len
    again = open_dataset(paths, None, seq_len).rows(range(dataset.num_rows))
    assert np.array_equal(again.input_ids, dataset.rows(range(dataset.num_rows)).input_ids)


def test_packed_and_padded_rows_hold_the_same_loss_tokens(tmp_path):
    """Red when packing changes what is learnt: numbers must not depend on it."""
    paths = token_rows(tmp_path / "a.jsonl", *random_rows(3, 200, 20))
    counts = []
    for pack in (True, False):
        dataset = open_dataset(paths, None, 16, pack=pack)
        labels = shifted(dataset.rows(range(dataset.num_rows)))
        counts.append(sorted(labels[labels != -100].tolist()))
        assert f" {len(counts[-1]):,} of them with loss" in dataset.summary
    assert counts[0] == counts[1]


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 64])
@pytest.mark.parametrize("pack", [True, False])
def test_long_text_is_cut_into_rows(tmp_path, length, pack):
    """Red when a text longer than a row loses its rest, at lengths around the row's end."""
    text = "".join(chr(100 + i) for i in range(length - 1))
    paths = write(tmp_path / "a.jsonl", [{"text": text}])
    dataset = open_dataset(paths, Letters(), 8, pack=pack, shuffle=False)
    rows = dataset.rows(range(dataset.num_rows))
    learnt = rows.labels[rows.labels != -100].tolist()
    whole = [*map(ord, text), 0]
    lonely = not pack and length > 8 and length % 8 == 1  # one token alone predicts nothing
    assert learnt == (whole[:-1] if lonely else whole)
    assert f" {(shifted(rows) != -100).sum()} of them with loss" in dataset.summary
    assert ("1 texts longer than 8 tokens go on in the next row" in dataset.summary) == (length > 8)


def test_mixed_rows(tmp_path):
    """Red when rows of several forms, in several files, lose order, mask or borders."""
    first = write(tmp_path / "a.jsonl", [{"text": "abcdefg"}, {"input_ids": [1, 2]}])
    second = write(tmp_path / "b.jsonl", [{"prompt": "x", "completion": "y", "text": "no"}])
    write_token_file(tmp_path / "c.bin", [[5, 6]])
    paths = [*first, *second, tmp_path / "c.bin"]
    dataset = open_dataset(paths, Letters(), 5, shuffle=False)
    found = documents_of(dataset.rows(range(dataset.num_rows)))
    for ids, labels in (
        ([97, 98, 99, 100, 101], [97, 98, 99, 100, 101]),
        ([102, 103, 0], [102, 103, 0]),
        ([1, 2], [1, 2]),
        ([120, 121, 0], [-100, 121, 0]),
        ([5, 6, 0], [5, 6, 0]),
    ):
        assert (ids, labels) in found
