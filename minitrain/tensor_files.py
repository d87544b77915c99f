"""Safetensors files: check their headers against a model, read them slice by slice, write them
tensor by tensor.

The format: 8 bytes with the length of the header, little-endian; the header, JSON of name -> dtype,
shape and data_offsets; then the tensors' bytes.
Source: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
COPY_AGAIN = "Copy it again from where the model comes from."
Shapes = dict[str, tuple[int, ...]]


def find_tensors(directory: Path, shapes: Shapes, tied: bool) -> dict[str, Path]:
    """Check the headers of a directory's files against a model: tensor name -> file.

    shapes    of the model's parameters
    tied      the head is the embedding: a second copy of it is left out, if it is one

    Raises    ValueError when a file is missing, cut off or pickled, and when a tensor is missing,
              not of this model, quantised or of another shape
    """
    headers = {file: read_header(file) for file in _weight_files(directory)}
    where = {name: file for file, header in headers.items() for name in header}
    found = {name: headers[file][name] for name, file in where.items()}
    for name in [name for name in found if name.endswith("rotary_emb.inv_freq")]:
        del found[name]  # older versions saved this table, which follows from config.json
    if tied and "lm_head.weight" in found:
        _check_tied(where, headers, "lm_head.weight", "model.embed_tokens.weight")
        del found["lm_head.weight"]
    missing = [name for name in shapes if name not in found]
    extra = [name for name in found if name not in shapes]
    if missing or extra:
        hint = "config.json and the weights must belong together: copy both again."
        if missing == ["lm_head.weight"]:
            hint = "If the head is the embedding, set tie_word_embeddings to true in config.json."
        raise ValueError(
            f"the weights must be those of config.json's model, {len(shapes)} tensors, but of them "
            f"{_some(missing)} missing in {directory}, and {_some(extra)} there but not of this "
            f"model. {hint}"
        )
    for name, shape in shapes.items():
        dtype, found_shape, *_ = found[name]
        if dtype not in DTYPES:
            raise ValueError(
                f"tensors must be {', '.join(DTYPES)}, but {name} in {where[name]} is {dtype}. Get "
                "the weights as they were before they were quantised."
            )
        if found_shape != shape:
            raise ValueError(
                f"{name} must have shape {list(shape)} by config.json, but in {where[name]} it has "
                f"{list(found_shape)}. config.json and the weights must belong together: copy both "
                "again."
            )
    return {name: where[name] for name in shapes}


def read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Read what a file holds: name -> dtype, shape, first byte, byte behind the last.

    Raises    ValueError when it is no safetensors file or shorter than it says
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(start - 8) if start <= size else "")
            header.pop("__metadata__", None)
            tensors = {
                name: (e["dtype"], tuple(e["shape"]), *(start + n for n in e["data_offsets"]))
                for name, e in header.items()
            }
        except (ValueError, AttributeError, KeyError, TypeError):
            raise ValueError(
                f"{file} must be a safetensors file, but its header cannot be read; it has "
                f"{size:,} bytes. {COPY_AGAIN}"
            ) from None
    for name, (*_, end) in tensors.items():
        if end > size:
            raise ValueError(
                f"{file} is cut off: {name} ends at byte {end:,}, but the file has {size:,}. "
                f"{COPY_AGAIN}"
            )
    return tensors


def tensor_reader(files: dict[str, Path]) -> Callable[[str, tuple[slice, ...]], Tensor]:
    """A reader for fill_weights: takes slices out of files, of which one is open at a time.

    files     tensor name -> file
    """
    opened = {}

    def read(name: str, slices: tuple[slice, ...]) -> Tensor:
        if any(part.stop == part.start for part in slices):
            return torch.empty([part.stop - part.start for part in slices])
        if files[name] not in opened:
            opened.clear()
            opened[files[name]] = safe_open(files[name], framework="pt")
        return opened[files[name]].get_slice(name)[slices]

    return read


def plan_files(shapes: Shapes, dtype: torch.dtype, max_bytes: int) -> dict[str, Shapes]:
    """Spread tensors over files of at most max_bytes each: file name -> shapes.

    A tensor larger than that gets a file of its own. Names are those of transformers.
    """
    groups: list[Shapes] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = prod(shape) * dtype.itemsize
        if groups[-1] and filled + size > max_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    of = len(groups)
    return {f"model-{n:05d}-of-{of:05d}.safetensors": g for n, g in enumerate(groups, start=1)}


def write_index(directory: Path, files: dict[str, Shapes], dtype: torch.dtype) -> None:
    """Write the index that says which tensor is in which file; none is needed for one file."""
    if len(files) > 1:
        sizes = [prod(shape) for shapes in files.values() for shape in shapes.values()]
        index = {
            "metadata": {"total_size": sum(sizes) * dtype.itemsize},
            "weight_map": {name: file for file, shapes in files.items() for name in shapes},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_tensors(file: Path, shapes: Shapes, dtype: torch.dtype, tensors: Iterable) -> None:
    """Write a file whose tensors come one by one, so that one at a time is in memory.

    tensors   host tensors of this dtype, in the order of shapes
    """
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        entry = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        header[name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            assert tuple(tensor.shape) == shape and tensor.dtype == dtype, name
            stream.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())


def read_json(file: Path) -> dict:
    """Read a JSON object; ValueError names the file when there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"a model directory must have {file.name}, but {file.parent} has none. Check the path, "
            "or copy the file from where the model comes from."
        ) from None
    except ValueError as error:
        raise ValueError(f"{file} must be JSON, but is not: {error}. {COPY_AGAIN}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} must be a JSON object, but is another value. {COPY_AGAIN}")
    return content


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors files that a directory's weights are in."""
    index = directory / INDEX
    if not index.is_file():
        if (directory / "model.safetensors").is_file():
            return [directory / "model.safetensors"]
        pickled = next(directory.glob("pytorch_model*"), None)
        why = f"only {pickled.name}, a pickle, which can run any code" if pickled else "neither"
        raise ValueError(
            f"weights must be in model.safetensors or {INDEX}, but {directory} has {why}. Load the "
            "model in transformers and save it with save_pretrained, or get its .safetensors files."
        )
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index} must have a weight_map, tensor -> file. {COPY_AGAIN}")
    files = []
    for name in sorted(set(names.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(
                f"{index} must name .safetensors files beside it, but names {name!r}. {COPY_AGAIN}"
            )
        if not (directory / name).is_file():
            raise ValueError(
                f"{index} names the file {name}, but {directory} has none. Copy that file from "
                "where the model comes from."
            )
        files.append(directory / name)
    return files


def _check_tied(where: dict[str, Path], headers: dict, head: str, embedding: str) -> None:
    """Refuse a tied model whose file has a head that is not the embedding, compared byte for byte
    (transformers would then keep both).
    """
    entries = [headers[where[name]][name] for name in (head, embedding) if name in where]
    if len(entries) == 2 and entries[0][:2] == entries[1][:2]:
        one, other = (
            np.memmap(where[name], np.uint8, "r", begin, (end - begin,))
            for name, (*_, begin, end) in zip((head, embedding), entries)
        )
        step = 2**24  # bytes compared at once
        if all(
            np.array_equal(one[i : i + step], other[i : i + step]) for i in range(0, len(one), step)
        ):
            return
    if len(entries) == 2:
        raise ValueError(
            f"in a tied model {head} must equal {embedding}, but in {where[head]} they differ. Set "
            "tie_word_embeddings to false in config.json, to train both."
        )


def _some(names: list[str]) -> str:
    """'no tensor is', 'model.norm.weight is', '40 tensors (a, b, c, ...) are'."""
    if len(names) < 2:
        return f"{names[0] if names else 'no tensor'} is"
    return f"{len(names)} tensors ({', '.join(names[:3])}{', ...' * (len(names) > 3)}) are"
