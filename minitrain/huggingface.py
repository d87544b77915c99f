"""Hugging Face model directories in and out: config.json, weights, tokenizer files.

Parameters of CausalLM have Hugging Face's own names, so that nothing is mapped. Reading takes each
rank's share of one tensor at a time; rank 0 writes one file at a time. Nothing is ever unpickled,
and no code of a model directory is run.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Container, Iterable, Iterator
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from minitrain.agreement import host_axis, together
from minitrain.checkpoint_files import fsync
from minitrain.families import config_fields, parse_config
from minitrain.log import progress
from minitrain.mesh import Mesh, ShardSpec, check_model
from minitrain.model import CausalLM, ModelConfig
from minitrain.model_sharder import fill_weights, random_weights, shard_model, whole_tensor
from minitrain.tensor_files import INDEX, find_tensors, plan_files, read_json, tensor_reader

CARRIED = {  # files that a saved directory takes over unchanged
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", "chat_template.json"),
}
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "tokenizer.model"]


def resolve_model(name: str | Path) -> Path:
    """Find the directory of a model: name itself, or a download of the hub id it is; ValueError."""
    if Path(name).is_dir():
        return Path(name)
    rule = f"a model must be a directory or a hub id, owner/name, but there is no directory {name}"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)):
        raise ValueError(f"{rule}. Check the path and the working directory.")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(name), allow_patterns=HUB_FILES))
    except Exception as error:  # no package, network, rights, such model: dozens of types
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{rule}, and the download failed: {reason}. Where there is network, run `pip install "
            f"huggingface_hub` and `hf download {name} --local-dir DIR`, and pass DIR."
        ) from None


def read_config(directory: str | Path) -> ModelConfig:
    """Read a model's shape from config.json; ValueError names what is wrong with it."""
    file = Path(directory) / "config.json"
    return parse_config(read_json(file), str(file))


def has_weights(directory: str | Path) -> bool:
    """Whether a directory has weights of any kind, even of one that load_model refuses."""
    return any(any(Path(directory).glob(k)) for k in ("*.safetensors*", "pytorch_model*"))


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
    definition = read_json(tokenizer) if tokenizer.is_file() else {}
    vocabulary = definition.get("model", {}).get("vocab", {})  # token -> id; of unigrams a list
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    largest = max([*ids, *(token["id"] for token in definition.get("added_tokens", []))], default=0)
    if largest >= config.vocab_size:
        raise ValueError(
            f"the tokenizer's ids must be below config.json's vocab_size: {tokenizer} has "
            f"{largest}, vocab_size is {config.vocab_size}. Take the tokenizer that belongs to the "
            "model, or enlarge the embedding first (transformers: resize_token_embeddings)."
        )
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
    with progress(len(spec), "weights", mesh.rank) as bar:
        fill_weights(model, spec, mesh, device, dtype, lambda *x: (read(*x), bar.update())[0])
    return model, spec


def save_model(
    path: str | Path,
    model: nn.Module,
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

    dtype             of the file
    source_dir        the model this one was made from: its tokenizer files, generation_config.json
                      and config.json are carried over, save what changed
    tokenizer         corpus.Tokenizer to save instead
    max_shard_bytes   of a file, and of rank 0's memory; larger models get several and an index

    Communicates      all-gather over tp of every split parameter, one at a time
    Raises            ValueError of write_directory, and when no model family can express the model
    """
    if adapters := [name for name in spec if name.endswith("lora_A")]:
        raise ValueError(
            f"a model must be saved without adapters, but it has {adapters[0]}. Merge them first "
            "(merge_lora), or save them alone (save_adapter)."
        )
    source = Path(source_dir) if source_dir is not None else None
    fields = read_json(source / "config.json") if source else config_fields(config)
    if source and config != read_config(source):
        fields.pop("rope_parameters", None)  # rope_theta and rope_scaling are written
        fields |= config_fields(config, fields["model_type"])
    fields["dtype" if "dtype" in fields else "torch_dtype"] = str(dtype).removeprefix("torch.")
    files = plan_files({name: spec.shapes[name] for name in spec}, dtype, max_shard_bytes)
    rest = {"config.json": fields}
    if len(files) > 1:
        where = {name: file for file, names in files.items() for name in names}
        size = sum(map(prod, spec.shapes.values())) * dtype.itemsize
        rest[INDEX] = {"metadata": {"total_size": size}, "weight_map": where}

    def add_tokenizer(part: Path) -> None:
        for name in CARRIED if source else ():
            if (source / name).is_file():
                shutil.copyfile(source / name, part / name)
        if tokenizer is not None:
            tokenizer.save(part)

    def whole_files() -> Iterator[tuple[str, dict[str, Tensor]]]:
        for file, names in progress(files.items(), "saving", mesh.rank):
            tensors = {}
            for name in names:
                whole = whole_tensor(name, model.get_parameter(name).to(dtype), spec, mesh)
                if mesh.rank == 0:
                    tensors[name] = whole.cpu().contiguous()
            yield file, tensors

    write_directory(path, whole_files(), rest, mesh, CARRIED | {*rest, INDEX}, add_tokenizer)


def write_directory(
    path: str | Path,
    files: Iterable[tuple[str, dict[str, Tensor]]],
    rest: dict[str, dict],
    mesh: Mesh,
    names: Container[str],
    add: Callable[[Path], None] = lambda part: None,
) -> None:
    """Write a directory on rank 0, whole and on the disk before it appears under its name, where it
    replaces an older one; every rank must call it.

    files     safetensors: name, and on rank 0 name -> tensor; may communicate
    rest      JSON: name -> content
    names     what else than .safetensors an older one may hold; anything more would be lost
    add       f(directory) writes what else there is

    Raises    ValueError on every rank when it cannot be written; nothing is then left behind
    """
    path, files = Path(path), iter(files)
    part, old = (path.with_name(f".{path.name}.{kind}") for kind in ("part", "old"))
    with together(host_axis(mesh.device)):
        try:
            if mesh.rank == 0:
                for file in path.iterdir() if path.exists() else ():
                    if file.name not in names and file.suffix != ".safetensors":
                        lost = f"it exists and holds {file.name}, which would be lost"
                        raise FileExistsError(lost)
                shutil.rmtree(part, ignore_errors=True)  # of a save that was killed
                part.mkdir(parents=True)
                for name, tensors in files:
                    save_file(tensors, part / name, {"format": "pt"})
                    tensors.clear()
                for name, content in rest.items():
                    text = json.dumps(content, indent=2, ensure_ascii=False)
                    (part / name).write_text(text + "\n", encoding="utf-8")
                add(part)
                for file in part.iterdir():
                    fsync(file)
                shutil.rmtree(old, ignore_errors=True)
                if path.exists():
                    path.rename(old)
                part.rename(path)
                shutil.rmtree(old, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(part, ignore_errors=True)
            raise OSError(
                f"{path} could not be written: {getattr(error, 'strerror', None) or error}. "
                "Nothing was left behind. Make room or choose another directory, and save again."
            ) from None
        finally:
            for _ in files:
                pass  # the collectives in it are every rank's
