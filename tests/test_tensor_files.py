"""Reading model directories: every bad file is a named error before memory is made."""

import json
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import CPU, tiny_config
from model_directories import edit, make_plain
from safetensors.torch import load_file, save_file

from minitrain import huggingface
from minitrain.families import config_fields
from minitrain.huggingface import has_weights, inspect_model, load_model, resolve_model
from minitrain.mesh import Mesh
from minitrain.tensor_files import plan_files


@pytest.fixture
def plain(tmp_path):
    return make_plain(tmp_path / "plain")


def edit_tensors(directory: Path, change) -> None:
    """Join the files into one, with other tensors."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (directory / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def rename_all(tensors):
    for name in list(tensors):
        tensors[f"base.{name}"] = tensors.pop(name)


INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00004.safetensors"
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
DAMAGES = {
    "config missing": (
        lambda d: (d / "config.json").unlink(),
        "plain/config.json must be a JSON object, but: FileNotFoundError",
    ),
    "config no JSON": (
        lambda d: (d / "config.json").write_text("{"),
        "config.json must be a JSON object, but: JSONDecodeError",
    ),
    "tensor missing": (
        lambda d: edit_tensors(d, lambda t: t.pop(NORM)),
        "in .*plain must be the 21 tensors .*, but model.norm.weight is missing. Copy",
    ),
    "head missing": (
        lambda d: edit_tensors(d, lambda t: t.pop("lm_head.weight")),
        "lm_head.weight is missing.*tie_word_embeddings is true if the head is the embedding",
    ),
    "tensor extra": (
        lambda d: edit_tensors(d, lambda t: t.update({"score.weight": torch.ones(2)})),
        "score.weight is not of this model",
    ),
    "other names": (
        lambda d: edit_tensors(d, rename_all),
        "model.embed_tokens.weight is missing, .* and 39 more",
    ),
    "shape": (
        lambda d: edit_tensors(d, lambda t: t.update({NORM: torch.ones(31)})),
        r"model.norm.weight in model.safetensors is F32 \[31\] instead of \[32\]",
    ),
    "quantised": (
        lambda d: edit_tensors(d, lambda t: t.update({NORM: torch.ones(32, dtype=torch.int8)})),
        "as F64, F32, F16, BF16, but model.norm.weight in model.safetensors is I8",
    ),
    "two heads": (
        lambda d: edit(d / "config.json", lambda c: c.update(tie_word_embeddings=True)),
        "lm_head.weight is not of this model.*tie_word_embeddings .* otherwise false",
    ),
    "truncated": (
        lambda d: (d / FIRST).write_bytes((d / FIRST).read_bytes()[:-5]),
        f"{FIRST} must be a whole safetensors file, but .*: incomplete metadata|MetadataIncomplete",
    ),
    "header cut": (
        lambda d: (d / FIRST).write_bytes((d / FIRST).read_bytes()[:50]),
        f"{FIRST} must be a whole safetensors file",
    ),
    "not safetensors": (
        lambda d: (d / FIRST).write_bytes(b"<html>no</html>"),
        f"{FIRST} must be a whole safetensors file",
    ),
    "file missing": (lambda d: (d / FIRST).unlink(), f"{FIRST} must be a whole .* No such file"),
    "index broken": (lambda d: (d / INDEX).write_text("[]"), f"{INDEX} must be a JSON object"),
    "file outside": (
        lambda d: edit(d / INDEX, lambda c: c["weight_map"].update({NORM: f"../{FIRST}"})),
        rf"{INDEX} must name files beside it, but names '../{FIRST}'",
    ),
    "no weight map": (lambda d: (d / INDEX).write_text("{}"), "21 tensors .* is missing, "),
    "no weights": (
        lambda d: [file.unlink() for file in d.glob("model*")],
        "weights must be in model.safetensors or .*has neither",
    ),
    "pickled": (
        lambda d: [shutil.move(file, d / "pytorch_model.bin") for file in d.glob("model*")],
        r"has neither; a pickle \(pytorch_model.bin\) can run any code",
    ),
    "tokenizer": (
        lambda d: edit(d / "tokenizer.json", lambda t: t["model"]["vocab"].update(c=64)),
        "tokenizer.json has 64, vocab_size is 64",
    ),
    "added token": (
        lambda d: edit(d / "tokenizer.json", lambda t: t["added_tokens"].append({"id": 70})),
        "tokenizer.json has 70, vocab_size is 64",
    ),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damaged_directories_are_named_errors(plain, monkeypatch, damage):
    """A wrong file is loaded, or the error comes after memory was made, or names nothing."""
    inspect_model(plain)
    monkeypatch.setattr(huggingface, "fill_weights", lambda *a: pytest.fail("memory was made"))
    change, words = DAMAGES[damage]
    change(plain)
    with pytest.raises(ValueError, match=words):
        load_model(plain, Mesh(), CPU, torch.float32)


def test_harmless_extras_are_tolerated(plain):
    """An old rotary table, or a second copy of a tied head, keeps a good model from loading."""

    def change(tensors):
        tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    edit_tensors(plain, change)
    edit(plain / "config.json", lambda c: c.update(tie_word_embeddings=True))
    model, _ = load_model(plain, Mesh(), CPU, torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_layout_is_checked_before_reading(plain):
    """A layout that cannot split the model ends in a hang or a torch error."""
    mesh = Mesh(tp=SimpleNamespace(size=3, rank=0))
    with pytest.raises(ValueError, match=r"query heads must be a multiple of sp \* tp: 4 heads"):
        load_model(plain, mesh, CPU, torch.float32)


def test_random_weights_come_from_a_config():
    """A preset, or a directory without weights, cannot be trained from scratch."""
    one, _ = load_model(tiny_config(), Mesh(), CPU, torch.float32, seed=1)
    two, _ = load_model(tiny_config(), Mesh(), CPU, torch.float32, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))


def test_names_are_directories_or_hub_ids(tmp_path, monkeypatch):
    """A name that is no directory ends in a traceback instead of how to get the model."""
    assert resolve_model(str(tmp_path)) == tmp_path and not has_weights(tmp_path)
    with pytest.raises(
        ValueError, match=r"there is no directory ./nowhere/at/all\. Check the path"
    ):
        resolve_model("./nowhere/at/all")
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(
        ValueError, match=r"huggingface_hub.*pip install huggingface_hub.*hf download a/b"
    ):
        resolve_model("a/b")

    def refuse(name, allow_patterns):
        raise OSError("404 Not Found\nmore")

    hub = SimpleNamespace(snapshot_download=refuse)
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", hub)
    with pytest.raises(ValueError, match=r"failed: 404 Not Found\. .* `hf download a/b"):
        resolve_model("a/b")
    hub.snapshot_download = lambda name, allow_patterns: tmp_path / name
    assert resolve_model("a/b") == tmp_path / "a/b"


def test_files_are_filled_up_to_the_limit():
    """A tensor larger than the limit is lost or splits a file, or names are not transformers'."""
    shapes = {"a": (10,), "b": (10,), "c": (100,), "d": (1,)}
    files = plan_files(shapes, torch.float32, 80)
    assert [list(group) for group in files.values()] == [["a", "b"], ["c"], ["d"]]
    assert list(files)[1] == "model-00002-of-00003.safetensors"
    assert list(plan_files(shapes, torch.float32, 484)) == ["model.safetensors"]


def test_a_huge_header_length_is_no_memory_error(tmp_path):
    """A file whose first bytes claim a header of exabytes makes the loader ask for them."""
    (tmp_path / "config.json").write_text(json.dumps(config_fields(tiny_config())))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**63 - 1) + b"{}")
    with pytest.raises(ValueError, match="must be a whole safetensors file"):
        inspect_model(tmp_path)
