"""Checkpoints that must not be loaded: damaged, of a later version, of another model."""

import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from checkpoint_runs import MODEL, fresh, save_checkpoint, save_run
from conftest import lively_weights
from layout_runs import build

from minitrain.checkpoint import load_checkpoint
from minitrain.checkpoint_files import MANIFEST, write_manifest
from minitrain.launch import run_ranks


def saved_once(directory: Path) -> Path:
    run_ranks(save_run, 2, "dp2", directory / "c", False)
    return directory / "c"


def refusal(path: Path, layout: str = "1") -> str:
    mesh, _, run = fresh(layout)
    with pytest.raises(ValueError) as caught:
        load_checkpoint(path, run.optimizer, run.spec, mesh)
    return str(caught.value)


def test_damaged_pieces_are_refused(tmp_path):
    """Red when a piece that is cut off, altered, missing, or of another checkpoint is loaded (CASES
    35), and when the error does not name the file and what to do.
    """
    path, other = saved_once(tmp_path), tmp_path / "other"
    run_ranks(save_run, 2, "sp2", other, False)
    piece = path / "rank-00001.safetensors"
    whole = piece.read_bytes()
    foreign = (other / piece.name).read_bytes()
    assert len(foreign) == len(whole)
    flipped = bytearray(whole)
    flipped[-9] ^= 1
    for content in (whole[:-1], bytes(flipped), foreign, b"", whole + b"0"):
        piece.write_bytes(content)
        words = refusal(path)
        assert str(piece) in words and f"delete {path} to go on" in words
    piece.unlink()
    assert f"{piece} is missing" in refusal(path)
    shutil.copy(other / MANIFEST, path / MANIFEST)
    assert "rank-0000" in refusal(path)
    (path / MANIFEST).unlink()
    assert "manifest.json is missing" in refusal(path)


def test_newer_versions_are_refused(tmp_path):
    """Red when a later format is read as if it were this one."""
    path = saved_once(tmp_path)
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace('"version": 1', '"version": 2'))
    assert "newer minitrain, in version 2" in refusal(path)


def test_names_cannot_leave_the_directory(tmp_path):
    """Red when a manifest can name a file elsewhere."""
    (tmp_path / "c").mkdir()
    write_manifest(tmp_path / "c", {"files": {"../rank-00000.safetensors": {}}})
    assert "must name files beside it" in refusal(tmp_path / "c")


def test_other_models_are_refused(tmp_path):
    """Red when a checkpoint of another model is loaded in part."""
    path = saved_once(tmp_path)
    mesh, settings, _ = fresh("1")
    for change in ({"vocab_size": 64}, {"num_layers": 3}, {"tie_embeddings": True}):
        config = replace(MODEL, **change)
        run = build(mesh, settings, config, lively_weights(config))
        before = {name: master.clone() for name, master in run.optimizer.masters.items()}
        with pytest.raises(ValueError, match="must be of the model that is trained, but "):
            load_checkpoint(path, run.optimizer, run.spec, mesh)
        assert all(torch.equal(before[n], m) for n, m in run.optimizer.masters.items())


def one_rank_fails(path: Path):
    mesh, _, run = fresh("dp2 sharded")
    try:
        load_checkpoint(path, run.optimizer, run.spec, mesh)
    except ValueError as error:
        return str(error)


def test_all_ranks_refuse_together(tmp_path):
    """Red when a rank whose files are whole goes on alone, and hangs."""
    run_ranks(save_run, 2, "dp2 sharded", tmp_path / "c", False)
    piece = tmp_path / "c/rank-00001.safetensors"
    content = bytearray(piece.read_bytes())
    content[-9] ^= 1
    piece.write_bytes(content)
    first, second = run_ranks(one_rank_fails, 2, tmp_path / "c")
    assert first == second and str(piece) in first


def test_ten_thousand_changed_bytes(tmp_path):
    """Red when one flipped or cut byte anywhere in a checkpoint is loaded silently."""
    mesh, settings, _ = fresh("1")
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_layers": 1}
    config = replace(MODEL, **sizes, num_heads=2, num_kv_heads=1, head_dim=4)
    run = build(mesh, settings, config, lively_weights(config))
    save_checkpoint(tmp_path / "c", 3, run.optimizer, run.spec, mesh)
    files = {file: file.read_bytes() for file in (tmp_path / "c").iterdir()}
    random = Random(0)
    for number in range(10_000):
        file = random.choice(list(files))  # the manifest is small, and as important
        whole = files[file]
        place = random.randrange(len(whole))
        with file.open("r+b") as stream:
            stream.seek(place)
            cut = number % 10 == 0
            if cut:
                stream.truncate()
            else:
                stream.write(bytes([whole[place] ^ random.randrange(1, 256)]))
            stream.flush()
            with pytest.raises(ValueError, match=r"rank-00000|manifest.json|newer"):
                load_checkpoint(tmp_path / "c", run.optimizer, run.spec, mesh)
            stream.seek(place)
            stream.write(whole[place:] if cut else whole[place : place + 1])
    load_checkpoint(tmp_path / "c", run.optimizer, run.spec, mesh)
