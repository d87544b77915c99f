"""Rows and global batches: which rows make up a step is a function of (seed, step) alone.

documents.py reads files, packing.py lays documents out in rows; here they are put in order and
served. Nothing here knows of ranks.

B rows of a batch, S tokens of a row.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from minitrain.corpus import write_whole
from minitrain.documents import IGNORE, Documents, check_readable, read_documents
from minitrain.log import progress
from minitrain.packing import lay_out, lay_out_token_file

TOKEN_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class Rows:
    """A global batch, full length, the labels not yet shifted; each [B, S] int64.

    labels         -100 = no loss
    position_ids   from 0 at each document
    documents      number of the document in its row; padding has a number of its own. None when
                   rows are not packed: padding comes last, where no document sees it
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

    def __init__(self, sources, seq_len, *, pack, shuffle, seed, pad_id, vocab_size, notes, quiet):
        self.sources, self.seq_len, self.pack = sources, seq_len, pack
        self.shuffle, self.seed, self.pad_id, self.vocab_size = shuffle, seed, pad_id, vocab_size
        self.quiet = quiet
        self.ends = np.cumsum([source.num_rows for source in sources])
        self.num_rows = int(self.ends[-1])
        self.summary = "; ".join([_summary(sources, seq_len), *notes])
        self._permutation = lru_cache(2)(self._new_permutation)  # a batch may span two epochs

    def rows(self, indices) -> Rows:
        """Return rows by their number in file order, 0 to num_rows - 1; -1 is a row of padding."""
        B, S = len(indices), self.seq_len
        ids_BS = np.full((B, S), self.pad_id, np.int64)
        labels_BS = np.full((B, S), IGNORE, np.int64)
        starts_BS = np.zeros((B, S), bool)  # a document, or the padding, begins here
        starts_BS[:, 0] = True
        for row, index in enumerate(map(int, indices)):
            assert -1 <= index < self.num_rows, f"row {index} of {self.num_rows}"
            if index >= 0:
                n = int(np.searchsorted(self.ends, index, side="right"))
                local = index - int(self.ends[n]) + self.sources[n].num_rows
                self.sources[n].fill(local, ids_BS[row], labels_BS[row], starts_BS[row])
        _check_largest(ids_BS.max(initial=0), self.vocab_size, "a token file")
        places_S = np.arange(S)
        begins_BS = np.maximum.accumulate(np.where(starts_BS, places_S, 0), axis=1)
        documents_BS = np.cumsum(starts_BS, axis=1) - 1 if self.pack else None
        return Rows(ids_BS, labels_BS, places_S - begins_BS, documents_BS)

    def batch(self, step: int, batch_size: int) -> Rows:
        """Return the global batch of step `step`, counted from 0."""
        return self.rows(self.row_numbers(step, batch_size))

    def row_numbers(self, step: int, batch_size: int) -> np.ndarray:
        """Return which rows make up the global batch of step `step`.

        Rows are an endless stream, each epoch in a fresh order; a step takes the next batch_size.
        """
        stream = np.arange(step * batch_size, (step + 1) * batch_size)
        epochs, places = np.divmod(stream, self.num_rows)
        if not self.shuffle:
            return places
        pairs = zip(epochs.tolist(), places, strict=True)
        return np.array([self._permutation(epoch)[place] for epoch, place in pairs])

    def evaluation_batches(self, batch_size: int) -> Iterator[Rows]:
        """Yield each row once, in file order; rows of padding complete the last batch."""
        for begin in progress(range(0, self.num_rows, batch_size), "evaluating", self.quiet):
            indices = np.arange(begin, begin + batch_size)
            yield self.rows(np.where(indices < self.num_rows, indices, -1))

    def _new_permutation(self, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.num_rows)


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
    cache_dir: Path | None = None,
    quiet: bool = False,
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
    chat         chat.ChatTemplate, for rows of messages
    cache_dir    where tokens are kept, and found by the next who opens the same files
    quiet        no progress bar

    Raises       ValueError for unreadable or blank files, and bad rows as "file:line: reason"
    """
    paths, sources, notes = [Path(path) for path in paths], [], []
    for path in paths:
        check_readable(path)
    if texts := [path for path in paths if path.suffix != ".bin"]:
        settings = {"vocab_size": vocab_size, "on_bad_row": on_bad_row, "quiet": quiet}
        documents = _tokenize(texts, tokenizer, cache_dir, chat=chat, **settings)
        if bad := documents.bad_rows:
            plural = "s" if len(bad) > 1 else ""
            notes.append(f"{len(bad):,} bad row{plural} skipped, the first: {bad[0]}")
        sources.append(lay_out(documents, seq_len, pack, tokenizer and tokenizer.eos_id, notes))
    for path in paths:
        if path.suffix == ".bin":
            sources.append(lay_out_token_file(*read_token_file(path, vocab_size), seq_len, pack))
    if not any(source.num_rows for source in sources):
        files = ", ".join(map(str, paths)) or "no file"
        raise ValueError(f"no row left to learn from in {files}. {'; '.join(notes)}".strip())
    pad_id = tokenizer.pad_id if tokenizer is not None else 0
    pad_id = pad_id if pad_id < (vocab_size or 2**31) else 0  # any id will do: no document sees it
    settings = {"pack": pack, "shuffle": shuffle, "seed": seed, "vocab_size": vocab_size}
    return Dataset(sources, seq_len, pad_id=pad_id, notes=notes, quiet=quiet, **settings)


def read_token_file(path: Path, vocab_size: int | None = None) -> tuple[np.memmap, dict]:
    """Memory-map a token file and read its header; ValueError when the two do not fit together.

    scripts/tokenize_text.py makes such files.
    """
    path, beside = Path(path), Path(f"{path}.json")
    try:
        header = json.loads(beside.read_text(encoding="utf-8"))
        dtype, count = TOKEN_DTYPES[header["dtype"]], int(header["count"])
    except (OSError, ValueError, KeyError, TypeError):
        needed = '{"dtype": "uint16" or "uint32", "tokenizer": ..., "count": ..., "eos_id": ...}'
        raise ValueError(f"token file {path} needs a header {beside}: {needed}.") from None
    size, needed = path.stat().st_size, f"{count:,} of {dtype.itemsize} bytes"
    if size != count * dtype.itemsize or count == 0:
        rule = f"token file {path} must hold as many tokens as its header says, at least one"
        raise ValueError(f"{rule}: {needed}, but it has {size:,} bytes. Make it again.")
    _check_largest(header.get("largest_id", 0), vocab_size, path)
    return np.memmap(path, dtype, mode="r"), header


def _tokenize(paths: list[Path], tokenizer, cache_dir, *, chat, quiet, **settings) -> Documents:
    """Read documents, or find what came of the same files, tokenizer, template and settings."""
    if cache_dir is None:
        return read_documents(paths, tokenizer, chat=chat, quiet=quiet, **settings)
    words = tokenizer and (tokenizer.definition, tokenizer.eos_token), chat and chat.definition
    key = hashlib.sha256(repr(("1", words, settings, paths)).encode())
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                key.update(block)
    cache = Path(cache_dir) / f"tokens-{key.hexdigest()[:16]}.safetensors"
    if not cache.exists():
        fields = vars(read_documents(paths, tokenizer, chat=chat, quiet=quiet, **settings))
        arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
        rest = json.dumps({name: fields[name] for name in ("all_text", "bad_rows")})
        write_whole(cache, lambda part: save_file(arrays, part, {"rest": rest}))
    with safe_open(cache, "numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return Documents(**arrays, **json.loads(file.metadata()["rest"]))


def _check_largest(token: int, vocab_size: int | None, file: object) -> None:
    if vocab_size is not None and token >= vocab_size:
        rule = f"token ids must be below the model's vocabulary of {vocab_size}"
        fix = "Make the file with the model's own tokenizer."
        raise ValueError(f"{rule}, but {file} holds {token}. {fix}")


def _summary(sources: list, seq_len: int) -> str:
    names = ("num_rows", "num_tokens", "num_loss_tokens")
    rows, tokens, loss = (sum(getattr(source, name) for source in sources) for name in names)
    counts = [source.num_documents for source in sources]
    documents = "" if None in counts else f"{sum(counts):,} documents in "
    fill = 100 * tokens / (rows * seq_len)
    about = "" if all(source.exact for source in sources) else "about "
    return (
        f"{documents}{rows:,} rows of {seq_len} tokens, {fill:.1f} % filled: "
        f"{tokens:,} tokens, {about}{loss:,} of them with loss"
    )
