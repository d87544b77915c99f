"""Rows and global batches: which rows make up a step is a function of (seed, step) alone.

documents.py reads files, packing.py lays documents out in rows; here they are put in order and
served. Nothing here knows of ranks.

B rows of a batch, S tokens of a row.
"""

import json
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minitrain.documents import IGNORE, check_readable, read_documents
from minitrain.packing import lay_out, lay_out_token_file

TOKEN_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class Rows:
    """Hold a global batch, full length, the labels not yet shifted.

    input_ids      [B, S] int64
    labels         [B, S] int64, -100 = no loss
    position_ids   [B, S] int64, from 0 at each document
    documents      [B, S] int64, number of the document in its row; padding has a number of its own.
                   None when rows are not packed: padding comes last, where no document sees it
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    documents: np.ndarray | None


class Dataset:
    """Serve rows and global batches; made by open_dataset.

    num_rows   rows of one epoch
    summary    one line for the start of a run
    """

    def __init__(
        self, sources: list, seq_len: int, *, pack, shuffle, seed, pad_id, vocab_size, notes
    ):
        self.sources, self.seq_len, self.pack = sources, seq_len, pack
        self.shuffle, self.seed = shuffle, seed
        self.pad_id, self.vocab_size = pad_id, vocab_size
        self.ends = np.cumsum([source.num_rows for source in sources])
        self.num_rows = int(self.ends[-1])
        self.summary = _summary(sources, seq_len, notes)
        self._permutations: dict[int, np.ndarray] = {}

    def rows(self, indices) -> Rows:
        """Return rows by their number in file order, 0 to num_rows - 1; -1 is a row of padding."""
        B, S = len(indices), self.seq_len
        ids_BS = np.full((B, S), self.pad_id, np.int64)
        labels_BS = np.full((B, S), IGNORE, np.int64)
        starts_BS = np.zeros((B, S), bool)  # a document, or the padding, begins here
        starts_BS[:, 0] = True
        for row, index in enumerate(map(int, indices)):
            if not -1 <= index < self.num_rows:
                raise IndexError(
                    f"rows go from 0 to {self.num_rows - 1}, but {index} is asked for."
                )
            if index >= 0:
                n = int(np.searchsorted(self.ends, index, side="right"))
                local = index - int(self.ends[n]) + self.sources[n].num_rows
                self.sources[n].fill(local, ids_BS[row], labels_BS[row], starts_BS[row])
        if self.vocab_size is not None and ids_BS.max(initial=0) >= self.vocab_size:
            raise ValueError(
                f"token ids must be below the model's vocabulary of {self.vocab_size}, but a token "
                f"file holds {ids_BS.max()}. Make the file with the model's own tokenizer."
            )
        places_S = np.arange(S)
        begins_BS = np.maximum.accumulate(np.where(starts_BS, places_S, 0), axis=1)
        documents_BS = np.cumsum(starts_BS, axis=1) - 1 if self.pack else None
        return Rows(ids_BS, labels_BS, places_S - begins_BS, documents_BS)

    def batch(self, step: int, batch_size: int) -> Rows:
        """Return the global batch of step `step`, counted from 0."""
        return self.rows(self.row_numbers(step, batch_size))

    def row_numbers(self, step: int, batch_size: int) -> np.ndarray:
        """Return which rows make up the global batch of step `step`.

        Rows form one endless stream, epoch after epoch, each epoch in a fresh order; a step takes
        the next batch_size of it.
        """
        stream = np.arange(step * batch_size, (step + 1) * batch_size)
        epochs, places = np.divmod(stream, self.num_rows)
        if self.shuffle:
            orders = {epoch: self._permutation(epoch) for epoch in np.unique(epochs).tolist()}
            pairs = zip(epochs.tolist(), places, strict=True)
            places = np.array([orders[epoch][place] for epoch, place in pairs])
        return places

    def evaluation_batches(self, batch_size: int) -> Iterator[Rows]:
        """Yield each row once, in file order; rows of padding complete the last batch."""
        for begin in range(0, self.num_rows, batch_size):
            indices = np.arange(begin, begin + batch_size)
            yield self.rows(np.where(indices < self.num_rows, indices, -1))

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            for old in sorted(self._permutations)[:-1]:  # a batch may span two epochs: keep one
                del self._permutations[old]
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._permutations[epoch] = generator.permutation(self.num_rows)
        return self._permutations[epoch]


def open_dataset(
    paths: list[Path],
    tokenizer,
    seq_len: int,
    *,
    pack: bool = True,
    shuffle: bool = True,
    seed: int = 0,
    on_bad_row: str = "stop",
    vocab_size: int | None = None,
    chat=None,
) -> Dataset:
    """Read data files and lay their documents out in rows of seq_len tokens.

    Text longer than a row is cut into several. A document with labels is cut off at the row's end;
    one that loses all its loss tokens by that is dropped and counted in the summary.

    paths        .txt (one document), .jsonl (one row a line), .bin (token file, memory-mapped)
    tokenizer    corpus.Tokenizer, or None for rows of input_ids and token files
    pack         several documents a row that do not see each other; False: one, right-padded
    shuffle      a fresh complete permutation each epoch; False: file order
    on_bad_row   "stop" raises at the first bad row; "skip" leaves bad rows out and counts them
    vocab_size   the model's; ids from here on are errors
    chat         object with encode(messages) -> (ids, labels), for rows of messages

    Raises       ValueError for wrong settings, unreadable or blank files, and bad rows, the latter
                 as "file:line: reason"
    """
    paths = [Path(path) for path in paths]
    _check_settings(paths, seq_len, seed, on_bad_row)
    sources, notes = [], []
    if texts := [path for path in paths if path.suffix != ".bin"]:
        documents = read_documents(
            texts, tokenizer, chat=chat, vocab_size=vocab_size, on_bad_row=on_bad_row
        )
        if bad := documents.bad_rows:
            notes.append(f"{len(bad):,} bad rows skipped, the first: {bad[0]}")
        eos_id = tokenizer.eos_id if tokenizer is not None else None
        sources.append(lay_out(documents, seq_len, pack, eos_id, notes))
    for path in paths:
        if path.suffix == ".bin":
            tokens, header = read_token_file(path, vocab_size)
            sources.append(lay_out_token_file(tokens, header, seq_len, pack))
    if not any(source.num_rows for source in sources):
        files = ", ".join(map(str, paths)) or "no file"
        raise ValueError(f"no row left to learn from in {files}. {'; '.join(notes)}".strip())
    pad_id = tokenizer.pad_id if tokenizer is not None else 0
    if vocab_size is not None and pad_id >= vocab_size:
        pad_id = 0  # any id will do: padding has no loss, and no document sees it
    return Dataset(
        sources,
        seq_len,
        pack=pack,
        shuffle=shuffle,
        seed=seed,
        pad_id=pad_id,
        vocab_size=vocab_size,
        notes=notes,
    )


def _check_settings(paths: list[Path], seq_len: int, seed: int, on_bad_row: str):
    if seq_len < 2:
        raise ValueError(
            f"--seq-len must be at least 2, since one token predicts the next, but is {seq_len}."
        )
    if on_bad_row not in ("stop", "skip"):
        raise ValueError(f"--on-bad-row must be stop or skip, but is {on_bad_row}.")
    if seed < 0:
        raise ValueError(f"--seed must be 0 or more, but is {seed}.")
    for path in paths:
        check_readable(path)


def write_token_file(
    path: Path,
    documents: Iterable,
    *,
    dtype: str,
    tokenizer_name: str,
    eos_id: int | None,
) -> dict:
    """Write documents as one stream of little-endian token ids, and `<path>.json`, which says what
    they are. Memory is one document's; a crash leaves no file that looks whole.

    documents        sequences of ids without eos; eos_id is added to each, unless it is None
    dtype            "uint16" or "uint32"
    tokenizer_name   for people: which tokenizer made the ids

    Returns          the header: dtype, tokenizer, count (of tokens), eos_id, documents, largest_id
    """
    if dtype not in TOKEN_DTYPES:
        raise ValueError(f"dtype of a token file must be uint16 or uint32, but is {dtype}.")
    path, limit = Path(path), int(np.iinfo(TOKEN_DTYPES[dtype]).max)
    header = {"dtype": dtype, "tokenizer": tokenizer_name, "count": 0, "eos_id": eos_id}
    header |= {"documents": 0, "largest_id": 0}
    tail = [] if eos_id is None else [eos_id]
    unique = uuid.uuid4().hex  # several processes may write the same file
    part, header_part = (Path(f"{path}{end}.{unique}.part") for end in ("", ".json"))
    try:
        with part.open("wb") as file:
            for document in documents:
                ids = np.array([*document, *tail], np.int64)
                if len(ids) and not 0 <= ids.min() <= ids.max() <= limit:
                    wrong = ids.min() if ids.min() < 0 else ids.max()
                    raise ValueError(f"{dtype} holds ids from 0 to {limit}, but one is {wrong}.")
                ids.astype(TOKEN_DTYPES[dtype]).tofile(file)
                header["count"] += len(ids)
                header["documents"] += 1
                header["largest_id"] = max(header["largest_id"], int(ids.max(initial=0)))
        header_part.write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)
        os.replace(header_part, f"{path}.json")
    finally:
        part.unlink(missing_ok=True)
        header_part.unlink(missing_ok=True)
    return header


def read_token_file(path: Path, vocab_size: int | None = None) -> tuple[np.memmap, dict]:
    """Memory-map a token file and read its header; ValueError when the two do not fit together."""
    path, beside = Path(path), Path(f"{path}.json")
    needed = '{"dtype": "uint16" or "uint32", "tokenizer": ..., "count": ..., "eos_id": ...}'
    try:
        header = json.loads(beside.read_text(encoding="utf-8"))
        dtype, count = TOKEN_DTYPES[header["dtype"]], int(header["count"])
    except FileNotFoundError:
        raise ValueError(f"token file {path} needs a header {beside}: {needed}.") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{beside} must be the header of a token file: {needed}.") from None
    size = path.stat().st_size
    if size != count * dtype.itemsize or count == 0:
        raise ValueError(
            f"token file {path} must hold at least one token, and as many as its header says: "
            f"{count:,} of {dtype.itemsize} bytes, but it has {size:,} bytes. Make it again."
        )
    if vocab_size is not None and header.get("largest_id", 0) >= vocab_size:
        raise ValueError(
            f"token ids must be below the model's vocabulary of {vocab_size}, but {path} holds "
            f"{header['largest_id']} (tokenizer: {header.get('tokenizer')}). Make it with the "
            "model's own tokenizer."
        )
    return np.memmap(path, dtype, mode="r"), header


def _summary(sources: list, seq_len: int, notes: list[str]) -> str:
    rows, tokens, loss = (
        sum(getattr(source, name) for source in sources)
        for name in ("num_rows", "num_tokens", "num_loss_tokens")
    )
    counts = [source.num_documents for source in sources]
    documents = "" if None in counts else f"{sum(counts):,} documents in "
    about = "" if all(source.exact for source in sources) else "about "
    fill = 100 * tokens / (rows * seq_len)
    line = (
        f"{documents}{rows:,} rows of {seq_len} tokens, {fill:.1f} % filled: {tokens:,} tokens, "
        f"{about}{loss:,} of them with loss"
    )
    return "; ".join([line, *notes])
