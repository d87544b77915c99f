"""Checkpoints: saved on one layout, loaded on any other, bitwise."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_runs import LAYOUTS, SAVED, fresh, save_checkpoint, save_run, steps, whole_state
from safetensors import safe_open

from minitrain.bf16_optimizer import BF16Optimizer
from minitrain.checkpoint import load_checkpoint
from minitrain.checkpoint_files import MANIFEST, PieceFile, read_manifest
from minitrain.launch import run_ranks
from minitrain.model_sharder import gather_state_dict


def load_runs(layout: str, paths: dict[str, Path], lora: bool):
    found, mesh = {}, None
    for source, path in paths.items():
        mesh, settings, run = fresh(layout, lora, mesh=mesh)
        assert load_checkpoint(path, run.optimizer, run.spec, mesh) == 3
        state = whole_state(run.optimizer, run.spec, mesh)
        model = gather_state_dict(run.model, run.spec, mesh)
        found[source] = state, model, steps(mesh, settings, run, 1)
    return found if mesh.rank == 0 else None


def same_everywhere(directory: Path, sources: list[str], targets: list[str], lora: bool = False):
    paths, saved = {source: directory / source for source in sources}, {}
    for source in sources:
        saved[source] = run_ranks(save_run, LAYOUTS[source][0], source, paths[source], lora)[0]
    for target in targets:
        loaded = run_ranks(load_runs, LAYOUTS[target][0], target, paths, lora)[0]
        for source in sources:
            for want, got in zip(saved[source][:2], loaded[source][:2]):
                assert want.keys() == got.keys()
                for name in want:
                    assert torch.equal(want[name], got[name]), (source, target, name)
            want, got = saved[source][2], loaded[source][2]
            assert got == pytest.approx(want, rel=1e-10, abs=0), (source, target)


def test_every_layout_to_every_other(tmp_path):
    """Red when a piece is put in another place of the tensor than it came from (CASES 34), when
    masters are made from the model, or padding takes part.
    """
    same_everywhere(tmp_path, SAVED, list(LAYOUTS))


def test_lora_to_other_layouts(tmp_path):
    """Red when adapters are saved or split otherwise than they are trained (CASES 34 with LoRA)."""
    same_everywhere(tmp_path, ["dp2xtp2 sharded", "tp2"], ["1", "dp2", "dp2xtp2"], lora=True)
    names = set()
    for file in (tmp_path / "tp2").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    assert all("lora_" in name for name in names if name.startswith("master/"))


def test_masters_are_saved(tmp_path):
    """Red when masters are made again from bf16 weights (CASES 31), and when counters are bf16,
    which stops at 256.
    """
    mesh, settings, run = fresh("1", dtype="bf16")
    steps(mesh, settings, run, 1)
    run.optimizer.updates.fill_(300)
    name, master = next(iter(run.optimizer.masters.items()))
    run.optimizer.optimizer.state[master]["step"].fill_(300)
    save_checkpoint(tmp_path / "c", 300, run.optimizer, run.spec, mesh)
    _, _, other = fresh("1", dtype="bf16")
    load_checkpoint(tmp_path / "c", other.optimizer, other.spec, mesh)
    assert torch.equal(other.optimizer.masters[name], master)
    assert not torch.equal(master, master.bfloat16().float())
    state = other.optimizer.optimizer.state[other.optimizer.masters[name]]
    assert other.optimizer.updates == 300 and state["step"] == 300
    assert steps(mesh, settings, other, 1) == steps(mesh, settings, run, 1)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adamax, torch.optim.Muon])
def test_other_optimizers(tmp_path, optimizer):
    """Red when only AdamW's state is saved."""
    options = {torch.optim.SGD: {"momentum": 0.9}}.get(optimizer, {})

    def made():
        mesh, settings, run = fresh("1")
        params = [(n, p) for n, p in run.model.named_parameters() if p.ndim == 2]
        run.optimizer = BF16Optimizer(params, lambda groups: optimizer(groups, lr=1e-2, **options))
        return mesh, settings, run

    mesh, settings, run = made()
    steps(mesh, settings, run, 2)
    save_checkpoint(tmp_path / "c", 2, run.optimizer, run.spec, mesh)
    _, _, other = made()
    other.model.load_state_dict(run.model.state_dict())
    load_checkpoint(tmp_path / "c", other.optimizer, other.spec, mesh)
    assert steps(mesh, settings, other, 2) == steps(mesh, settings, run, 2)


def test_files_are_plain_safetensors(tmp_path):
    """Red when name, shape and place of a piece cannot be read from its file."""
    run_ranks(save_run, 2, "dp2 sharded", tmp_path / "c", False)
    with safe_open(tmp_path / "c/rank-00001.safetensors", "pt") as file:
        pieces = json.loads(file.metadata()["pieces"])
        assert pieces["master/model.embed_tokens.weight"] == [
            *([63, 32], [[0, 63], [0, 32]]),
            *(1008, 2016),
        ]
        assert file.get_tensor("exp_avg/model.embed_tokens.weight").shape == (1008,)
    manifest = json.loads((tmp_path / "c" / MANIFEST).read_text())
    assert manifest["step"] == 3 and manifest["settings"] == {"note": "dp2 sharded"}
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        *("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors")
    ]


def read_ranges(path: Path, shard: bool):
    mesh, _, run = fresh("dp2xtp2 sharded" if shard else "dp2xtp2")
    verified, spans = PieceFile._verified, []

    def counted(self, number, begin, end):
        spans.append((self.path.name, begin, end))
        return verified(self, number, begin, end)

    PieceFile._verified = counted
    load_checkpoint(path, run.optimizer, run.spec, mesh)
    PieceFile._verified = verified
    return spans


@pytest.mark.parametrize("source", ["1", "dp2xtp2 sharded", "dp2xsp2xtp2"])
def test_every_byte_is_read_once(tmp_path, monkeypatch, source):
    """Red when a rank reads a byte twice, or, sharded, reads what only others need."""
    monkeypatch.setattr("minitrain.checkpoint_files.BLOCK", 256)
    run_ranks(save_run, LAYOUTS[source][0], source, tmp_path / "c", False)
    size = sum(entry["bytes"] for entry in read_manifest(tmp_path / "c")["files"].values())
    for shard in (False, True):
        for spans in run_ranks(read_ranges, 4, tmp_path / "c", shard):
            assert len(spans) == len(set(spans))
            total = sum(end - begin for _, begin, end in spans)
            assert total < (0.6 if shard and source == "dp2xtp2 sharded" else 1) * size
