"""Saving model directories: whole or not at all, with everything that belongs to the model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import CPU
from model_directories import edit, make_plain
from safetensors.torch import load_file

from minitrain.huggingface import inspect_model, load_model, read_config, save_model
from minitrain.launch import run_ranks
from minitrain.lora import LoRAConfig, add_lora
from minitrain.mesh import Mesh, init_mesh


@pytest.fixture
def plain(tmp_path):
    return make_plain(tmp_path / "plain")


def load_and_save(source: Path, out: Path, **options):
    model, spec = load_model(source, Mesh(), CPU, torch.float32)
    options = {"dtype": torch.bfloat16, "source_dir": source} | options
    save_model(out, model, options.pop("config", model.config), spec, Mesh(), **options)


def test_the_rest_of_a_directory_is_carried_over(plain, tmp_path):
    """Tokenizer or generation settings change or vanish, or config.json loses a field."""
    (plain / "generation_config.json").write_text('{"temperature": 0.6}  ')
    (plain / "chat_template.jinja").write_text("{{ messages }}")
    (plain / "README.md").write_text("no model file")
    edit(plain / "config.json", lambda c: c.update(unsloth_version="1", eos_token_id=[1, 2]))
    load_and_save(plain, tmp_path / "deep" / "out")
    for name in ("generation_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (tmp_path / "deep/out" / name).read_bytes() == (plain / name).read_bytes()
    assert not (tmp_path / "deep/out/README.md").exists()
    old, new = (json.loads((d / "config.json").read_text()) for d in (plain, tmp_path / "deep/out"))
    assert new == old | {"torch_dtype": "bfloat16"}
    saved = load_file(tmp_path / "deep/out/model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in saved.values())


def test_what_changed_is_written_into_the_old_config(plain, tmp_path):
    """An untied or rescaled model is saved with the config.json of the one it was made from."""
    edit(plain / "config.json", lambda c: c.update(rope_parameters={"rope_theta": 3e4}))
    config = replace(read_config(plain), max_position=4096, rope_theta=7e4)
    load_and_save(plain, tmp_path / "out", config=config)
    assert read_config(tmp_path / "out") == config


def test_an_older_directory_is_replaced_whole(plain, tmp_path):
    """Files of an older save stay beside the new ones, or somebody's own files are deleted."""
    out = tmp_path / "out"
    (tmp_path / ".out.part").mkdir()  # left by a save that was killed
    load_and_save(plain, out, max_shard_bytes=30_000)
    load_and_save(plain, out)
    assert sorted(f.name for f in out.iterdir()) == [
        *("config.json", "model.safetensors", "tokenizer.json")
    ]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["out", "plain"]
    (out / "notes.txt").write_text("mine")
    with pytest.raises(
        ValueError, match=r"out could not be written: it exists and holds notes.txt"
    ):
        load_and_save(plain, out)
    assert (out / "notes.txt").exists() and inspect_model(out)


def fail_on_rank_0(source: Path, out: Path) -> str:
    import resource
    import signal

    mesh = init_mesh(tp=2)
    model, spec = load_model(source, mesh, CPU, torch.float32)
    if mesh.rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_400, 8_400))
    options = {"dtype": torch.float32, "max_shard_bytes": 12_000}
    with pytest.raises(ValueError) as error:
        save_model(out, model, model.config, spec, mesh, **options)
    return str(error.value)


def test_a_full_disk_ends_every_rank(plain, tmp_path):
    """Rank 0 fails alone and the others hang, or half a directory stays behind."""
    for message in run_ranks(fail_on_rank_0, 4, plain, tmp_path / "out"):
        assert "File too large" in message and "Nothing was left behind" in message
    assert [file.name for file in tmp_path.iterdir()] == ["plain"]


def test_models_with_adapters_are_not_saved_silently(plain, tmp_path):
    """A model is saved without its adapters, or with tensors that transformers leaves out."""
    model, spec = load_model(plain, Mesh(), CPU, torch.float32)
    add_lora(model, LoRAConfig(rank=2), Mesh(), spec)
    with pytest.raises(ValueError, match=r"has model\.layers\.0\..*lora_A\. Merge them first"):
        save_model(tmp_path / "o", model, model.config, spec, Mesh(), dtype=torch.float32)
