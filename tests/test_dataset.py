"""Order of rows and token files. A global batch is a function of (seed, step) alone."""

import json

import numpy as np
import pytest
from token_files import write_token_file

from minitrain import dataset
from minitrain.corpus import train_tokenizer
from minitrain.dataset import open_dataset


def token_rows(path, *rows):
    """Write rows of (input_ids, labels or None)."""
    keys = ("input_ids", "labels")
    rows = [dict(zip(keys, row if row[1] else row[:1], strict=False)) for row in rows]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return [path]


def test_rows_masked_in_the_file_keep_their_place(tmp_path):
    """Red when a fully masked row is dropped without packing: step n would take other rows."""
    rows = [([i, i, i], [-100] * 3 if i % 3 == 0 else [-100, i, i]) for i in range(1, 25)]
    dataset = open_dataset(
        token_rows(tmp_path / "a.jsonl", *rows), None, 4, pack=False, shuffle=False
    )
    assert dataset.num_rows == 24
    for step in range(3):
        first = dataset.batch(step, 8).input_ids[:, 0].tolist()
        assert first == list(range(8 * step + 1, 8 * step + 9))
    assert "8 rows kept that never had a loss token" in dataset.summary


@pytest.mark.parametrize(("rows", "batch"), [(7, 3), (8, 8), (5, 13), (1, 4)])
def test_epochs_are_complete_permutations(tmp_path, rows, batch):
    """Red when an epoch repeats or misses a row, or the order depends on the batch (case 17)."""
    paths = token_rows(tmp_path / "a.jsonl", *[([i, 1], None) for i in range(rows)])
    dataset = open_dataset(paths, None, 2, pack=False, seed=5)
    steps = -(-4 * rows // batch)
    stream = np.concatenate([dataset.batch(s, batch).input_ids[:, 0] for s in range(steps)])
    epochs = stream[: 4 * rows].reshape(4, rows)
    assert (np.sort(epochs, axis=1) == np.arange(rows)).all()
    if rows > 4:
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4
    fresh = open_dataset(paths, None, 2, pack=False, seed=5)
    assert (
        fresh.batch(steps - 1, batch).input_ids.tolist()
        == dataset.batch(steps - 1, batch).input_ids.tolist()
    )
    one = [int(fresh.batch(n, 1).input_ids[0, 0]) for n in range(4 * rows)]
    assert one == epochs.ravel().tolist()


def test_seeds_give_other_orders_and_file_order_needs_none(tmp_path):
    """Red when the seed is ignored, or --no-shuffle shuffles."""
    paths = token_rows(tmp_path / "a.jsonl", *[([i, 1], None) for i in range(50)])
    orders = [
        open_dataset(paths, None, 2, pack=False, seed=seed, shuffle=shuffle).batch(0, 50).input_ids
        for seed, shuffle in ((0, True), (1, True), (0, False))
    ]
    assert orders[0].tolist() != orders[1].tolist()
    assert orders[2][:, 0].tolist() == list(range(50))


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_evaluation_takes_each_row_once_in_fixed_shapes(tmp_path, batch):
    """Red when the last rows are left out or repeated, or the last batch is smaller (case 11)."""
    paths = token_rows(tmp_path / "a.jsonl", *[([i + 1, 1], None) for i in range(5)])
    batches = list(open_dataset(paths, None, 3, pack=False).evaluation_batches(batch))
    assert {rows.labels.shape for rows in batches} == {(batch, 3)}
    labels = np.concatenate([rows.labels for rows in batches])
    assert labels[:5, 0].tolist() == [1, 2, 3, 4, 5]
    assert (labels[5:] == -100).all()


class TestTokenFiles:
    def test_ids_and_borders(self, tmp_path):
        """Red when ids or document borders of a token file change on the way."""
        path = tmp_path / "a.bin"
        write_token_file(path, [[1, 2], [], [70000]], dtype="uint32")
        rows = open_dataset([path], None, 8).rows([0])
        assert rows.documents.tolist() == [[0, 0, 0, 1, 2, 2, 3, 3]]
        one_each = open_dataset([path], None, 8, pack=False, shuffle=False)
        assert one_each.rows(range(3)).labels[:, :3].tolist() == [
            [1, 2, 0],
            [0, -100, -100],
            [70000, 0, -100],
        ]

    def test_a_file_larger_than_memory_costs_nothing(self, tmp_path):
        """Red when opening a token file reads it or builds an index: this one has 256 GB."""
        path, count = tmp_path / "a.bin", 2**37
        with path.open("wb") as file:
            try:
                file.truncate(2 * count)
            except OSError:
                pytest.skip("this file system has no sparse files so large")
        header = {"dtype": "uint16", "tokenizer": "t", "count": count, "eos_id": 1}
        (tmp_path / "a.bin.json").write_text(json.dumps(header))
        dataset = open_dataset([path], None, 4096, shuffle=False)
        assert dataset.num_rows == 2**25
        assert dataset.batch(2**22 - 1, 8).labels.sum() == 0
        path.unlink()

    def test_broken_files_are_named(self, tmp_path):
        """Red when a cut file, a missing header or another model's ids are trained on."""
        path = tmp_path / "a.bin"
        write_token_file(path, [[1, 2, 300]], eos_id=None)
        with pytest.raises(ValueError, match=r"below the model's vocabulary of 256, but .* 300"):
            open_dataset([path], None, 4, vocab_size=256)
        header = json.loads((tmp_path / "a.bin.json").read_text())
        del header["largest_id"]
        (tmp_path / "a.bin.json").write_text(json.dumps(header))
        with pytest.raises(ValueError, match="vocabulary of 256, but a token file holds 300"):
            open_dataset([path], None, 4, vocab_size=256).batch(0, 1)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ValueError, match="3 of 2 bytes, but it has 5 bytes"):
            open_dataset([path], None, 4)
        (tmp_path / "a.bin.json").write_text('{"dtype": "float32", "count": 3}')
        with pytest.raises(ValueError, match="needs a header"):
            open_dataset([path], None, 4)
        (tmp_path / "a.bin.json").unlink()
        with pytest.raises(ValueError, match=r"needs a header .*a\.bin\.json"):
            open_dataset([path], None, 4)


class TestCache:
    def test_tokens_are_made_once(self, tmp_path, monkeypatch):
        """Red when each rank or run tokenizes again, or labels, borders or reasons get lost."""
        paths = token_rows(tmp_path / "a.jsonl", ([1, 2, 3], [-100, 2, 3]), ([4, 5], None))
        with paths[0].open("a") as file:
            file.write('\n{"text": 5}')
        settings = {"seq_len": 4, "shuffle": False, "on_bad_row": "skip"}
        fresh = open_dataset(paths, None, **settings)
        first = open_dataset(paths, None, cache_dir=tmp_path, **settings)
        monkeypatch.setattr(dataset, "read_documents", None)
        for again in (first, open_dataset(paths, None, cache_dir=tmp_path, **settings)):
            assert again.summary == fresh.summary
            for name, values in vars(again.rows([0, 1])).items():
                assert np.array_equal(values, getattr(fresh.rows([0, 1]), name)), name
        assert "1 bad row skipped, the first: " in fresh.summary
        assert len(list(tmp_path.glob("tokens-*"))) == 1

    def test_a_change_is_seen(self, tmp_path):
        """Red when the cache outlives the contents of a file, the settings or the tokenizer."""
        texts = [train_tokenizer(["abc" * 9], 257), train_tokenizer(["abc" * 9], 258)]
        path = tmp_path / "a.txt"
        for count, text in enumerate(("abc", "abd"), start=1):
            path.write_text(text)
            for tokenizer in texts:
                rows = open_dataset([path], tokenizer, 8, cache_dir=tmp_path).rows([0])
                ids = rows.input_ids[0, : len(tokenizer.encode(text))]
                assert tokenizer.decode(ids) == text
            assert len(list(tmp_path.glob("tokens-*"))) == 2 * count
        with pytest.raises(ValueError, match="ids from 0 to 9, but found"):
            open_dataset([path], texts[0], 8, cache_dir=tmp_path, vocab_size=10)
        assert len(list(tmp_path.iterdir())) == 5
