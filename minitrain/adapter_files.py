"""Adapters in and out, as peft's adapter_config.json and adapter_model.safetensors.

The names in the file are `base_model.model.<layer>.lora_A.weight`, [R, in], and lora_B, [out, R].
Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from minitrain.huggingface import resolve_model, write_directory
from minitrain.lora import LoRAConfig, adapted_layers, add_lora, lora_parameters
from minitrain.mesh import Mesh, ShardSpec
from minitrain.model import CausalLM
from minitrain.model_sharder import share_slices, whole_tensor
from minitrain.tensor_files import DTYPES, read_header, read_json, tensor_reader

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
FACTOR = re.compile(re.escape(PREFIX) + r"(.+)\.(lora_A|lora_B)\.weight")
# Fields of adapter_config.json that say nothing about what the adapter computes. The tensors
# themselves say which layers have one.
NEUTRAL = {
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "inference_mode"),
    *("peft_version", "revision", "runtime_config", "task_type", "exclude_modules"),
    *("layers_pattern", "layers_to_transform", "target_modules", "init_lora_weights"),
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "qalora_group_size"),
    *("megatron_config", "megatron_core"),
}
STARTS = (True, False, "gaussian", "orthogonal", "eva")  # the others start from a changed base


def is_adapter(directory: str | Path) -> bool:
    """Whether a directory holds an adapter and no model."""
    return (Path(directory) / CONFIG).is_file() and not (Path(directory) / "config.json").exists()


def base_of(directory: str | Path) -> Path:
    """The model directory that an adapter was made for, or a download of its hub id.

    Raises    ValueError when it is not where adapter_config.json says
    """
    file = Path(directory) / CONFIG
    name = read_json(file).get("base_model_name_or_path")
    try:
        return resolve_model(name or "")
    except ValueError as error:
        raise ValueError(
            f"the base of an adapter must be where base_model_name_or_path in {file} says, which "
            f"is {name!r}: {error} Or write the right path into that file."
        ) from None


def read_adapter_config(directory: str | Path) -> LoRAConfig:
    """Read the settings of an adapter; its targets are the layers that its tensors are for.

    Raises    ValueError when it is no plain LoRA, or a tensor in it is no factor of one
    """
    file = Path(directory) / CONFIG
    fields = read_json(file)
    kind = {"peft_type": fields.pop("peft_type", None), "bias": fields.pop("bias", "none")}
    rank, alpha = fields.pop("r", None), fields.pop("lora_alpha", None)
    dropout, rslora = fields.pop("lora_dropout", 0.0), fields.pop("use_rslora", False)
    other = {k: v for k, v in fields.items() if v and k not in NEUTRAL}
    if fields.get("init_lora_weights", True) not in STARTS:
        other["init_lora_weights"] = fields["init_lora_weights"]
    if kind != {"peft_type": "LORA", "bias": "none"} or other:
        wrong = other or kind
        raise ValueError(
            f"an adapter must be plain LoRA, but {file} has "
            f"{', '.join(f'{k} = {v!r}' for k, v in wrong.items())}. Merge it in peft "
            "(merge_and_unload) and load the merged model."
        )
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise ValueError(
            f"an adapter must have numbers r and lora_alpha, but in {file} they are {rank!r} and "
            f"{alpha!r}. Copy it again from where the adapter comes from."
        )
    layers = list(dict.fromkeys(layer for layer, _ in _factors(Path(directory))))
    return LoRAConfig(rank, float(alpha), float(dropout), tuple(layers), bool(rslora))


def check_same(directory: str | Path, wanted: LoRAConfig, layers: Collection[str]) -> None:
    """Refuse to go on with the training of an adapter under other settings than its own.

    layers    the names of all that the wanted targets choose

    Raises    ValueError with the flags to pass
    """
    has = read_adapter_config(directory)
    same = all(getattr(has, n) == getattr(wanted, n) for n in ("rank", "alpha", "rslora"))
    if not same or set(has.targets) != set(layers):
        targets = dict.fromkeys(name.rpartition(".")[2] for name in has.targets)
        raise ValueError(
            f"training of an adapter goes on with its own settings: pass --lora-rank {has.rank} "
            f"--lora-alpha {has.alpha:g} {'--lora-rslora ' * has.rslora}--lora-targets "
            f"{' '.join(targets)}. Or merge {directory} (scripts/merge_lora.py), to train all of "
            "the model."
        )


def load_adapter(
    directory: str | Path,
    model: CausalLM,
    mesh: Mesh,
    shard_spec: ShardSpec,
    *,
    dropout: float = 0.0,
) -> LoRAConfig:
    """Add an adapter from files to a sharded model, in place; each rank reads only its share.

    model        the adapter's base, after shard_model, weights filled in
    dropout      in training from now on, whatever it was before

    Returns      the adapter's settings
    Raises       ValueError naming file, tensor and sizes when the adapter is for another base;
                 those of read_adapter_config and adapted_layers
    """
    config, file = read_adapter_config(directory), Path(directory) / WEIGHTS
    found, shapes = _factors(Path(directory)), shard_spec.shapes
    other = f"an adapter must be loaded into the model it was made for, but {file} is for another"
    for (layer, factor), shape in found.items():
        weight = shapes.get(f"{layer}.weight")
        if layer.startswith("model.layers.") and weight is None:
            raise ValueError(f"{other}: this model has no layer {layer}.")
        partner = "lora_B" if factor == "lora_A" else "lora_A"
        if (layer, partner) not in found:
            raise ValueError(f"{file} has {layer}.{factor}, but no {partner}. Copy it again.")
        if weight is None:
            continue  # the head or the embedding: adapted_layers says why not
        needed = (config.rank, weight[1]) if factor == "lora_A" else (weight[0], config.rank)
        if shape != needed:
            raise ValueError(
                f"{other}: by this model's {layer}.weight, {list(weight)}, and r "
                f"{config.rank}, {factor} must be {list(needed)}, but it is {list(shape)}."
            )
    short = replace(config, targets=tuple(dict.fromkeys(n.rpartition(".")[2] for n, _ in found)))
    whole = adapted_layers(shapes, config)
    config = replace(short if adapted_layers(shapes, short) == whole else config, dropout=dropout)
    add_lora(model, config, mesh, shard_spec)
    params = lora_parameters(model)
    read = tensor_reader({f"{PREFIX}{name}.weight": file for name in params})
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(read(f"{PREFIX}{name}.weight", share_slices(name, shard_spec, mesh)))
    return config


@torch.no_grad()
def save_adapter(
    path: str | Path,
    model: CausalLM,
    config: LoRAConfig,
    shard_spec: ShardSpec,
    mesh: Mesh,
    base: str | Path,
) -> None:
    """Write the adapter of a model as peft reads it; every rank must call it.

    config         what add_lora was called with
    base           directory of the base model; written down, so that it can be found

    Communicates   all-gather over tp of the factors that are split
    Raises         ValueError of write_directory
    """
    params, whole = lora_parameters(model), {}
    for name, param in params.items():
        tensor = whole_tensor(name, param, shard_spec, mesh)
        whole[f"{PREFIX}{name}.weight"] = tensor.cpu().contiguous()
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": config.rank}
    fields |= {"lora_alpha": config.alpha, "lora_dropout": config.dropout, "fan_in_fan_out": False}
    fields |= {"use_rslora": config.rslora, "target_modules": list(config.targets)}
    fields |= {"base_model_name_or_path": str(Path(base).resolve()), "inference_mode": True}
    write_directory(path, [(WEIGHTS, whole)], {CONFIG: fields}, mesh, names={CONFIG})


def _factors(directory: Path) -> dict[tuple[str, str], tuple[int, ...]]:
    """The tensors of an adapter: (layer, lora_A or lora_B) -> shape."""
    file = directory / WEIGHTS
    if not file.is_file():
        raise ValueError(
            f"an adapter must have {WEIGHTS}, but {directory} has none. A pickle (.bin) is not "
            "read: load it in peft and save it with save_pretrained."
        )
    factors = {}
    for name, (dtype, shape, *_) in read_header(file).items():
        match = FACTOR.fullmatch(name)
        if not match or dtype not in DTYPES:
            raise ValueError(
                f"an adapter's tensors must be factors of linear layers, {PREFIX}<layer>.lora_A."
                f"weight and lora_B, in {', '.join(DTYPES)}, but {file} has {name}, {dtype} "
                f"{list(shape)}. Merge it in peft (merge_and_unload) and load the merged model."
            )
        factors[match.group(1), match.group(2)] = shape
    return factors
