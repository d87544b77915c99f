"""The files of a checkpoint: pieces of tensors as safetensors, and a manifest of checksums.

    step-00000040/
      rank-00000.safetensors   what rank 0 wrote: flat pieces; which, says the header's metadata
      rank-00001.safetensors
      manifest.json            format, version, step, settings; size and checksums of each file

A file has a CRC-32 for its header and one for each MiB of data, so that a reader verifies all that
it uses and reads little else. A changed byte always changes a CRC-32; these are no protection
against people, and need none: nothing here can be executed. Needs no ranks.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor

FORMAT, VERSION = "minitrain checkpoint", 1
BLOCK = 2**20  # bytes of data under one checksum
MANIFEST = "manifest.json"
FILE_NAME = re.compile(r"rank-\d{5}\.safetensors")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Piece:
    """A range of a flattened share of a tensor.

    shape        of the whole tensor
    share        (start, stop) in each dim: a part of the whole, that which a rank of tp has
    begin, end   range of elements of the share, flattened row by row
    """

    shape: tuple[int, ...]
    share: tuple[tuple[int, int], ...]
    begin: int
    end: int

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Piece:
        return cls(tuple(shape), tuple((0, size) for size in shape), 0, prod(shape))


def overlaps(source: Piece, target: Piece) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of elements that two pieces of a tensor have in common.

    Shares may differ in one dim. Returns (first in source, in target, from their begins; count).
    """
    runs = [(0, 0, prod(stop - start for start, stop in source.share))]
    if source.share != target.share:
        pairs = list(zip(source.share, target.share))
        (dim,) = (d for d, (a, b) in enumerate(pairs) if a != b)
        (s0, s1), (t0, t1) = pairs[dim]
        low, high = max(s0, t0), min(s1, t1)
        inner = prod(stop - start for start, stop in source.share[dim + 1 :])
        outer = prod(stop - start for start, stop in source.share[:dim])
        rows = range(outer if low < high else 0)
        starts = ((i * (s1 - s0) + low - s0, i * (t1 - t0) + low - t0) for i in rows)
        runs = ((s * inner, t * inner, (high - low) * inner) for s, t in starts)
    for s, t, count in runs:
        first = max(s, source.begin, s + target.begin - t)
        last = min(s + count, source.end, s + target.end - t)
        if first < last:
            yield first - source.begin, first - s + t - target.begin, last - first


def write_pieces(file: Path, pieces: dict[str, tuple[Tensor, Piece]]) -> dict:
    """Write a file and wait until it is on the disk.

    pieces    name -> flat host tensor, and which piece it is; names begin with what the tensor is:
              "master/model.norm.weight"

    Returns   the manifest's entry: bytes, header_bytes, crc32 of the header and of each block
    Raises    OSError when there is no room
    """
    described = {name: astuple(piece) for name, (_, piece) in pieces.items()}
    header, end = {"__metadata__": {"pieces": json.dumps(described)}}, 0
    for name, (tensor, _) in pieces.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        dtype, shape = DTYPE_NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8 bytes
    text = len(text).to_bytes(8, "little") + text
    sums, filled = [zlib.crc32(text)], BLOCK  # bytes in the last block
    with file.open("wb") as stream:
        stream.write(text)
        for tensor, _ in pieces.values():
            data = memoryview(tensor.view(torch.uint8).numpy())
            while data:
                if filled == BLOCK:
                    sums, filled = [*sums, 0], 0
                part, data = data[: BLOCK - filled], data[BLOCK - filled :]
                sums[-1] = zlib.crc32(part, sums[-1])
                filled += len(part)
                stream.write(part)
    fsync(file)
    return {"bytes": len(text) + end, "header_bytes": len(text), "crc32": sums}


class PieceFile:
    """A file of pieces, of which every byte used is verified, and read once if used in order.

    pieces    name -> Piece

    Raises    ValueError naming the file, here and in read, when it is not as its entry says
    """

    def __init__(self, path: Path, entry: dict):
        self.path, self.entry, self.block = path, entry, lru_cache(1)(self._block)
        try:
            self.stream = path.open("rb")
        except FileNotFoundError:
            raise damaged(path, "is missing") from None
        size = os.fstat(self.stream.fileno()).st_size
        if size != entry["bytes"]:
            raise damaged(path, f"has {size:,} bytes instead of {entry['bytes']:,}")
        header = json.loads(bytes(self._verified(0, 0, entry["header_bytes"])[8:]))
        described = json.loads(header.pop("__metadata__")["pieces"])
        self.pieces = {
            name: Piece(tuple(shape), tuple(map(tuple, share)), begin, end)
            for name, (shape, share, begin, end) in described.items()
        }
        self.where = {n: (DTYPES[e["dtype"]], e["data_offsets"][0]) for n, e in header.items()}

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Return elements first to first + count of a piece."""
        dtype, offset = self.where[name]
        begin = offset + first * dtype.itemsize
        end = begin + count * dtype.itemsize
        data = bytearray()
        for block in range(begin // BLOCK, -(-end // BLOCK)):
            start = block * BLOCK
            data += self.block(block)[max(0, begin - start) : end - start]
        return torch.frombuffer(data, dtype=dtype)

    def _block(self, number: int) -> memoryview:
        begin = self.entry["header_bytes"] + number * BLOCK
        return self._verified(number + 1, begin, min(begin + BLOCK, self.entry["bytes"]))

    def _verified(self, number: int, begin: int, end: int) -> memoryview:
        self.stream.seek(begin)
        data = self.stream.read(end - begin)
        if len(data) < end - begin or zlib.crc32(data) != self.entry["crc32"][number]:
            raise damaged(self.path, f"is not as it was written, in bytes {begin:,} to {end:,}")
        return memoryview(data)


def write_manifest(directory: Path, fields: dict) -> None:
    """Write the manifest last of all and wait until it is on the disk."""
    text = _manifest_text({"format": FORMAT, "version": VERSION, **fields})
    (directory / MANIFEST).write_bytes(text)
    fsync(directory / MANIFEST)
    fsync(directory)


def read_manifest(directory: Path) -> dict:
    """Read and verify a manifest.

    Raises    ValueError when it is missing, damaged, or of a newer version
    """
    file = directory / MANIFEST
    try:
        text = file.read_bytes()
        fields = json.loads(text)
        known, version = fields["format"] == FORMAT, int(fields["version"])
    except FileNotFoundError:
        raise damaged(file, "is missing") from None
    except (ValueError, KeyError, TypeError):
        raise damaged(file, "cannot be read") from None
    if known and version > VERSION:
        raise ValueError(
            f"{directory} was written by a newer minitrain, in version {version} of the format; "
            f"this one reads version {VERSION}. Update minitrain."
        )
    fields.pop("crc32", None)
    if not known or text != _manifest_text(fields):
        raise damaged(file, "is not as it was written")
    strays = [name for name in fields["files"] if not FILE_NAME.fullmatch(name)]
    if strays:
        raise damaged(file, f"must name files beside it, but names {strays[0]!r}")
    return fields


def _manifest_text(fields: dict) -> bytes:
    """The one way to write these fields, with a checksum over them."""
    checksum = zlib.crc32(json.dumps(fields).encode())
    return json.dumps({**fields, "crc32": checksum}).encode() + b"\n"


def damaged(file: Path, what: str) -> ValueError:
    """The error for a checkpoint that cannot be trusted."""
    return ValueError(
        f"{file} {what}: the checkpoint is damaged, and nothing of it is used. Copy it again, or "
        f"delete {file.parent} to go on from the checkpoint before it."
    )


def fsync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a directory, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
