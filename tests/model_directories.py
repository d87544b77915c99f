"""A small model's directory, for tests that damage it or save it again."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from conftest import lively_weights, tiny_config, tiny_model

from minitrain.huggingface import save_model
from minitrain.mesh import Mesh


def make_plain(directory: Path) -> Path:
    """Write an untied model in several files, with a tokenizer of 64 ids."""
    config = tiny_config()
    model, spec = tiny_model(config, lively_weights(config), dtype=torch.float32)
    tokenizer = SimpleNamespace(
        save=lambda directory: (directory / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": {"a": 0, "b": 63}}, "added_tokens": []})
        )
    )
    options = {"dtype": torch.float32, "tokenizer": tokenizer, "max_shard_bytes": 30_000}
    save_model(directory, model, config, spec, Mesh(), **options)
    return directory


def edit(file: Path, change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
