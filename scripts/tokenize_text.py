"""Turn text files of any size into token files, which train.py maps into memory.

python scripts/tokenize_text.py a.txt b.jsonl --tokenizer models/smollm2 --out tokens
python scripts/train.py --model models/smollm2 --data tokens/a.txt.bin tokens/b.jsonl.bin

Uses all cores; memory stays flat. Run it again after an interruption: it goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from minitrain.corpus import Tokenizer
from minitrain.dataset import TOKEN_DTYPES
from minitrain.documents import CHUNK_ROWS, Row, check_readable, encode_rows, read_rows
from minitrain.log import progress

CHUNKS_PER_SAVE = 16  # between notes of how far a file is


@dataclass(frozen=True)
class TokenizeConfig:
    """Turn text files into token files: FILE.bin, and FILE.bin.json, which says what it holds."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """.txt files (each one document), or .jsonl files of {"text"} rows (each row one). Rows with
    labels (messages, prompt and completion) have no place in a token file."""
    tokenizer: Path
    """Directory with tokenizer.json, and tokenizer_config.json that names the eos token: the
    model's own."""
    out: Path
    """Directory for the token files."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """What to do with a row that cannot be used: stop with its file and line, or skip and count it.
    """


class TokenFile:
    """A token file in the making, and a note beside it of how far it is.

    path        the .bin file; until it is whole, path.part and path.part.json are there instead
    identity    what the tokens are made of; a part that is made of anything else is begun again
    """

    def __init__(self, path: Path, identity: dict, vocab_size: int):
        self.path, self.part = path, Path(f"{path}.part")
        self.dtype = "uint16" if vocab_size <= 2**16 else "uint32"
        self.note = {"read": 0, "count": 0, "documents": 0, "largest_id": 0, "bad_rows": 0}
        found = read_json(f"{self.part}.json")
        if self.part.exists() and found and found["identity"] == identity:
            self.note = found
        self.note |= {"identity": identity, "dtype": self.dtype}
        self.file = self.part.open("ab")
        self.file.truncate(self.note["count"] * TOKEN_DTYPES[self.dtype].itemsize)

    def add(self, row: Row, ids: np.ndarray | None) -> None:
        """Write a row's ids; None: it was a bad row."""
        self.note["read"] += row.size
        if ids is None:
            self.note["bad_rows"] += 1
            return
        self.file.write(ids.astype(TOKEN_DTYPES[self.dtype]).tobytes())
        self.note["count"] += len(ids)
        self.note["documents"] += row.form != "part"
        self.note["largest_id"] = max(self.note["largest_id"], int(ids.max(initial=0)))

    def save(self) -> None:
        """Note how far the file is, after its tokens are on the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())
        write_json(f"{self.part}.json", self.note)

    def finish(self, header: dict) -> dict:
        """Make the file appear, whole, and its header, which is returned."""
        self.save()
        self.file.close()
        header = {**header, **self.note}
        os.replace(self.part, self.path)
        write_json(f"{self.path}.json", header)
        os.remove(f"{self.part}.json")
        return header


def read_json(path: str) -> dict | None:
    """A JSON object; None when there is none, or a crash has made something else of it."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_json(path: str, value: dict) -> None:
    """Write a JSON file whole or not at all."""
    Path(f"{path}.tmp").write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(f"{path}.tmp", path)


def tokenize(source: Path, config: TokenizeConfig, tokenizer: Tokenizer) -> str:
    """Make one file's token file, or the rest of it; return what there is to say about it."""
    stat, path = source.stat(), config.out / f"{source.name}.bin"
    identity = {"file": source.name, "bytes": stat.st_size, "modified_ns": stat.st_mtime_ns}
    identity["tokenizer_sha256"] = hashlib.sha256(tokenizer.definition.encode()).hexdigest()
    whole = read_json(f"{path}.json")
    if path.exists() and whole and whole.get("identity") == identity:
        return f"{path} is there already: {whole['count']:,} tokens"
    out = TokenFile(path, identity, tokenizer.vocab_size)
    begin = out.note["read"]
    with progress(stat.st_size, source.name) as bar:
        bar.update(begin)
        rows, chunks = read_rows(source, begin), 0
        while chunk := list(islice(rows, CHUNK_ROWS)):
            add_rows(out, chunk, config.on_bad_row, tokenizer)
            bar.update(out.note["read"] - bar.n)
            chunks += 1
            if chunks % CHUNKS_PER_SAVE == 0:
                out.save()
    header = out.finish({"tokenizer": str(config.tokenizer), "eos_id": tokenizer.eos_id})
    words = f"{path}: {counted(header, 'documents')}, {header['count']:,} tokens"
    words += f", gone on with after {begin:,} bytes" if begin else ""
    return words + (f", {counted(header, 'bad_rows')} skipped" if header["bad_rows"] else "")


def counted(header: dict, name: str) -> str:
    """A count of the header in words: 1 bad row."""
    words = name.replace("_", " ")
    return f"{header[name]:,} {words.removesuffix('s') if header[name] == 1 else words}"


def add_rows(out: TokenFile, rows: list[Row], on_bad_row: str, tokenizer: Tokenizer) -> None:
    """Encode rows on all cores and write them."""
    for row in rows:
        if row.form in ("messages", "prompt"):
            raise ValueError(
                f'{row.where}: a token file has no labels, so that rows must be {{"text"}}, but '
                "this one says what is to be learnt. Give this file to train.py as it is."
            )
    for row, ids, labels in encode_rows(rows, tokenizer, None, tokenizer.vocab_size):
        reason = "a token file has no labels." if labels is not None else row.value
        bad = row.form == "bad" or labels is not None
        if bad and on_bad_row == "stop":
            raise ValueError(f"{row.where}: {reason} Correct the row, or pass --on-bad-row skip.")
        out.add(row, None if bad else ids)


def main(config: TokenizeConfig) -> None:
    """Check all files, then make one token file after the other."""
    names = [source.name for source in config.files]
    for source in config.files:
        check_readable(source)
        if source.suffix == ".bin":
            raise ValueError(f"{source} is a token file already. Pass .txt or .jsonl files.")
        if names.count(source.name) > 1:
            raise ValueError(f"two files are called {source.name}. Write them to two --out.")
    tokenizer = Tokenizer.load(config.tokenizer)
    config.out.mkdir(parents=True, exist_ok=True)
    for source in config.files:
        print(tokenize(source, config, tokenizer), flush=True)


if __name__ == "__main__":
    try:
        main(tyro.cli(TokenizeConfig))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from here")
