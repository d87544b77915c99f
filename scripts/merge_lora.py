"""Merge an adapter into its base: a plain Hugging Face directory, for whatever reads one.

python scripts/merge_lora.py runs/default/final merged
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from minitrain.adapter_files import base_of, load_adapter
from minitrain.huggingface import inspect_model, load_model, save_model
from minitrain.lora import merge_lora
from minitrain.mesh import Mesh
from minitrain.tensor_files import DTYPES, read_header

NAMED_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class MergeConfig:
    """Merge an adapter into its base: weight + scale * B A, for every layer that has one."""

    adapter: tyro.conf.Positional[Path]
    """Directory with adapter_config.json and adapter_model.safetensors, such as a run's final/."""
    out: tyro.conf.Positional[Path]
    """Directory to write: config.json, weights, and the base's tokenizer files. Replaces a model
    there.
    """
    base: Path | None = None
    """Directory of the base model. None: where adapter_config.json says it is."""
    dtype: Literal["same", "bf16", "fp32", "fp64"] = "same"
    """Of the weights. same: as the base's files; each merged weight is rounded to it once."""


def main(config: MergeConfig) -> None:
    """Load the base, add the adapter, merge, write."""
    base, mesh = config.base or base_of(config.adapter), Mesh()
    if config.out.resolve() == base.resolve():
        raise ValueError(f"the merged model must not replace its base, {base}. Pass another OUT.")
    _, files = inspect_model(base)
    name, file = next(iter(files.items()))
    dtype = NAMED_DTYPES.get(config.dtype, DTYPES[read_header(file)[name][0]])
    model, spec = load_model(base, mesh, torch.device("cpu"), dtype)
    adapter = load_adapter(config.adapter, model, mesh, spec)
    merge_lora(model, spec)
    save_model(config.out, model, model.config, spec, mesh, dtype=dtype, source_dir=base)
    print(
        f"merged: rank {adapter.rank}, scale {adapter.scale:g}, into "
        f"{', '.join(adapter.targets)} of {base}; written to {config.out}"
    )


if __name__ == "__main__":
    try:
        main(tyro.cli(MergeConfig))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
