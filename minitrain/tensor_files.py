"""Safetensors files: check them against a model, read them slice by slice, plan new ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
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
    found = {name: file for file, header in headers.items() for name in header}
    if tied and HEAD in found and EMBEDDING in found and _equal(found, HEAD, EMBEDDING):
        del found[HEAD]
    wrong = [f"{name} is missing" for name in shapes if name not in found]
    for name, file in found.items():
        dtype, shape = headers[file][name]
        if name not in shapes and not name.endswith("rotary_emb.inv_freq"):  # of older versions
            wrong.append(f"{name} is not of this model")
        elif name in shapes and (dtype not in DTYPES or shape != shapes[name]):
            where = f"{name} in {file.name}"
            wrong.append(f"{where} is {dtype} {list(shape)} instead of {list(shapes[name])}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"the weights in {directory} must be the {len(shapes)} tensors of config.json's model, "
            f"as {', '.join(DTYPES)}, but {', '.join(wrong[:3])}{more}. Copy config.json and the "
            "unquantised weights from one place, and see that its tie_word_embeddings is true if "
            "the head is the embedding, otherwise false."
        )
    return {name: found[name] for name in shapes}


def read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read what a file holds: name -> dtype, shape. ValueError when it is not all there."""
    try:
        with safe_open(file, framework="pt") as tensors:
            parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {name: (p.get_dtype(), tuple(p.get_shape())) for name, p in parts.items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{file} must be a whole safetensors file, but reading says: {error}. {COPY_AGAIN}"
        ) from None


def tensor_reader(files: dict[str, Path]) -> Callable[[str, tuple[slice, ...]], Tensor]:
    """Make a reader for fill_weights out of tensor name -> file; one file is open at a time."""
    opened = lru_cache(maxsize=1)(partial(safe_open, framework="pt"))
    return lambda name, slices: opened(files[name]).get_slice(name)[slices]


def plan_files(shapes: Shapes, dtype: torch.dtype, max_bytes: int) -> dict[str, list[str]]:
    """Spread tensors over files of max_bytes, or of one larger tensor: file -> tensor names."""
    groups, filled = [[]], 0
    for name, shape in shapes.items():
        size = prod(shape) * dtype.itemsize
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": g for n, g in enumerate(groups, 1)}


def read_json(file: Path) -> dict:
    """Read a JSON object; ValueError names the file when there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        content = error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must be a JSON object, but: {content!r:.200}. {COPY_AGAIN}")
    return content


def _weight_files(directory: Path) -> list[Path]:
    index, single = directory / INDEX, directory / "model.safetensors"
    if not index.is_file() and not single.is_file():
        raise ValueError(
            f"weights must be in model.safetensors or {INDEX}, but {directory} has neither; a "
            "pickle (pytorch_model.bin) can run any code and is not read. Load the model in "
            "transformers and save it with save_pretrained, or get its .safetensors files."
        )
    names = [single.name]
    if index.is_file():
        names = list(read_json(index).get("weight_map", {}).values())
        if bad := [name for name in names if Path(str(name)).name != name]:
            raise ValueError(
                f"{index} must name files beside it, but names {bad[0]!r}. {COPY_AGAIN}"
            )
    return [directory / name for name in sorted(set(names))]


def _equal(files: dict[str, Path], one: str, other: str) -> bool:
    """Compare two tensors, 1,024 rows at a time."""
    a, b = (safe_open(files[name], framework="pt").get_slice(name) for name in (one, other))
    starts = range(0, a.get_shape()[0], 1024)
    same = (torch.equal(a[i : i + 1024], b[i : i + 1024]) for i in starts)
    return (a.get_shape(), a.get_dtype()) == (b.get_shape(), b.get_dtype()) and all(same)
