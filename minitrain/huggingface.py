"""Hugging Face model directories in and out: config.json, weights, tokenizer files.

Parameters of CausalLM have Hugging Face's own names, so that nothing is mapped. Reading takes each
rank's share of one tensor at a time; writing holds one whole tensor at a time. Nothing is ever
unpickled, and no code of a model directory is run.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from minitrain.collectives import all_gather, all_reduce
from minitrain.families import config_fields, parse_config
from minitrain.mesh import Mesh, ShardSpec, check_model
from minitrain.model import CausalLM, ModelConfig
from minitrain.model_sharder import fill_weights, random_weights, shard_model
from minitrain.tensor_files import (
    INDEX,
    find_tensors,
    plan_files,
    read_json,
    tensor_reader,
    write_index,
    write_tensors,
)

CARRIED = {  # files that a saved directory takes over unchanged
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", "chat_template.json"),
}
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "tokenizer.model"]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(name: str | Path) -> Path:
    """Find the directory of a model: name itself, or a download of the hub id it is.

    Raises    ValueError that says how to get the directory
    """
    if Path(name).is_dir():
        return Path(name)
    if not HUB_ID.fullmatch(str(name)):
        raise ValueError(
            f"a model must be a directory or a hub id, owner/name, but there is no directory "
            f"{name}. Check the path and the working directory."
        )
    how = f"Run `hf download {name} --local-dir DIR` where there is network, and pass DIR."
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(
            f"a hub id needs the package huggingface_hub, and there is no directory {name}. "
            f"Run `pip install huggingface_hub`. {how}"
        ) from None
    try:
        return Path(snapshot_download(str(name), allow_patterns=HUB_FILES))
    except Exception as error:  # network, rights, no such model: dozens of types
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"there is no directory {name}, and the hub says: {reason} {how}"
        ) from None


def read_config(directory: str | Path) -> ModelConfig:
    """Read a model's shape from config.json; ValueError names what is wrong with it."""
    file = Path(directory) / "config.json"
    return parse_config(read_json(file), str(file))


def has_weights(directory: str | Path) -> bool:
    """Whether a directory has weights of any kind, even of one that load_model refuses."""
    kinds = ("*.safetensors", INDEX, "pytorch_model*")
    return any(next(Path(directory).glob(kind), None) is not None for kind in kinds)


def inspect_model(directory: str | Path) -> tuple[ModelConfig, dict[str, Path]]:
    """Check everything about a model's files that can be known without reading the weights.

    Returns   the config, and which file each tensor is in
    Raises    ValueError naming file, tensor and sizes
    """
    config = read_config(directory)
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in CausalLM(config).named_parameters()}
    files = find_tensors(Path(directory), shapes, config.tie_embeddings)
    tokenizer = Path(directory) / "tokenizer.json"
    if tokenizer.is_file():
        _check_tokenizer(tokenizer, config.vocab_size)
    return config, files


def load_model(
    source: str | Path | ModelConfig,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    split_activations: bool = False,
) -> tuple[CausalLM, ShardSpec]:
    """Make this rank's share of a model; peak memory is the share and one slice more.

    source              a directory with weights, or a config for random ones
    dtype               of the parameters; weights are converted
    seed                of random weights, which are the same on every layout
    split_activations   see shard_model

    Returns             the model, and which of its parameters are split
    Raises              ValueError of inspect_model and check_model: before memory is made, and
                        alike on every rank
    """
    config, files = (source, None) if isinstance(source, ModelConfig) else inspect_model(source)
    heads = config.num_heads, config.num_kv_heads
    check_model(mesh.sp.size, mesh.tp.size, *heads, config.intermediate_size)
    with torch.device("meta"):
        model = CausalLM(config)
    spec = shard_model(model, mesh, split_activations=split_activations)
    read = random_weights(config, spec.shapes, seed) if files is None else tensor_reader(files)
    fill_weights(model, spec, mesh, device, dtype, read)
    return model, spec


def save_model(
    path: str | Path,
    model: nn.Module | dict[str, Tensor],
    config: ModelConfig,
    spec: ShardSpec,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    source_dir: str | Path | None = None,
    tokenizer=None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a directory that transformers loads; every rank must call it.

    It appears under its name only when whole, and replaces an older one there.

    model             the sharded model, or its state: name -> this rank's share
    dtype             of the file
    source_dir        the model this one was made from: tokenizer files and generation_config.json
                      are carried over, and the fields of config.json that did not change
    tokenizer         corpus.Tokenizer to save instead
    max_shard_bytes   larger models are written as several files with an index

    Communicates      all-gather over tp of every split parameter, one at a time
    Raises            OSError on every rank when it cannot be written; nothing is then left behind.
                      ValueError when no model family can express the model
    """
    state = model if isinstance(model, dict) else dict(model.named_parameters())
    if missing := [name for name in spec.shapes if name not in state]:
        raise ValueError(
            f"a model must have every parameter of its spec to be saved, but {missing[0]} is not "
            "there. Merge adapters first (merge_lora)."
        )
    path, device = Path(path), state[next(iter(spec.shapes))].device
    fields = updated_config(config, dtype, source_dir)
    files = plan_files({name: spec.shapes[name] for name in spec}, dtype, max_shard_bytes)
    part = path.parent / f".{path.name}.part"
    error, writes = None, mesh.rank == 0
    if writes:
        error = _attempt(_begin, path, part, sum(map(prod, spec.shapes.values())) * dtype.itemsize)
    _agree(error, path, part, mesh, device)
    for name, shapes in files.items():
        tensors = _whole_tensors(state, list(shapes), spec, mesh, dtype)
        if writes:
            error = _attempt(write_tensors, part / name, shapes, dtype, tensors)
        if mesh.dp_sp.rank == 0:
            for _ in tensors:  # the writer's tp neighbours; after an error the writer too
                pass
        _agree(error, path, part, mesh, device)
    if writes:
        error = _attempt(write_index, part, files, dtype)
        error = error or _attempt(_finish, path, part, fields, source_dir, tokenizer)
    _agree(error, path, part, mesh, device)


def updated_config(
    config: ModelConfig, dtype: torch.dtype, source_dir: str | Path | None = None
) -> dict:
    """The fields for config.json; those of source_dir's are kept, save what changed.

    Raises    ValueError when no model family, or not that of source_dir, can express the model
    """
    if source_dir is None:
        fields = config_fields(config)
    else:
        fields = read_json(Path(source_dir) / "config.json")
        old = config_fields(read_config(source_dir), fields["model_type"])
        new = config_fields(config, fields["model_type"])
        fields |= {key: value for key, value in new.items() if value != old[key]}
        if any(new[key] != old[key] for key in ("rope_theta", "rope_scaling")):
            fields.pop("rope_parameters", None)
            fields |= {key: new[key] for key in ("rope_theta", "rope_scaling")}
    spelling = "dtype" if "dtype" in fields else "torch_dtype"
    return fields | {spelling: str(dtype).removeprefix("torch.")}


@torch.no_grad()
def _whole_tensors(
    state: dict[str, Tensor], names: list[str], spec: ShardSpec, mesh: Mesh, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield whole tensors, without padding, on the host of every rank of this tp group."""
    for name in names:
        whole, dim = state[name].detach().to(dtype), spec[name]
        if dim is not None:
            whole = all_gather(whole, mesh.tp, dim).narrow(dim, 0, spec.shapes[name][dim])
        yield whole.cpu()


def _attempt(action, *args) -> OSError | None:
    """Run what may fail on rank 0 alone; the error is raised later, on every rank."""
    try:
        action(*args)
    except OSError as error:
        return error
    return None


def _agree(error, path: Path, part: Path, mesh: Mesh, device: torch.device) -> None:
    """Raise on every rank when rank 0 has an error, so that no rank waits for it."""
    failed = torch.tensor([float(error is not None)]).to(device)
    failed = all_reduce(all_reduce(failed, mesh.tp, "max"), mesh.dp_sp, "max")
    if not failed.item():
        return
    if mesh.rank == 0:
        shutil.rmtree(part, ignore_errors=True)
    why = (error.strerror or error) if error else "rank 0's message says why"
    raise OSError(
        f"{path} could not be written: {why}. Nothing was left behind. Make room or choose another "
        "directory, and save again."
    ) from error


def _begin(path: Path, part: Path, num_bytes: int) -> None:
    ours = CARRIED | {"config.json", INDEX}
    if path.is_dir():
        for file in path.iterdir():
            if file.name not in ours and file.suffix != ".safetensors":
                raise FileExistsError(f"it exists and holds {file.name}, which is no model's file")
    elif path.exists():
        raise FileExistsError("it exists and is a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(part, ignore_errors=True)  # of a save that was killed
    part.mkdir()
    free = shutil.disk_usage(part).free
    if free < num_bytes:
        raise OSError(f"it needs {num_bytes:,} bytes, and {free:,} are free on the disk")


def _finish(path: Path, part: Path, fields: dict, source_dir, tokenizer) -> None:
    text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
    (part / "config.json").write_text(text, encoding="utf-8")
    for name in CARRIED if source_dir is not None else ():
        if (Path(source_dir) / name).is_file():
            shutil.copyfile(Path(source_dir) / name, part / name)
    if tokenizer is not None:
        tokenizer.save(part)
    old = path.parent / f".{path.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    part.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _check_tokenizer(file: Path, vocab_size: int) -> None:
    """Refuse a tokenizer that makes ids the embedding has no row for."""
    definition = read_json(file)
    try:
        vocabulary = definition["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        added = [token["id"] for token in definition.get("added_tokens", [])]
        largest = max([*ids, *added])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{file} must be a tokenizer, but has no vocabulary.") from None
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer's ids must be below config.json's vocab_size: {file} has {largest}, "
            f"vocab_size is {vocab_size}. Take the tokenizer that belongs to the model, or enlarge "
            "the embedding first (transformers: resize_token_embeddings)."
        )
