"""Tiles, activation checkpointing and packing change memory and speed, never the numbers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from layout_runs import SETTINGS, build, expected, golden_file, run_steps, train

from minitrain.attention import variable_length_attention
from minitrain.data_sharder import shard_batch
from minitrain.dataset import open_dataset
from minitrain.launch import run_ranks
from minitrain.mesh import init_mesh
from minitrain.model import causal_attention
from minitrain.model_sharder import gather_state_dict

LAYOUTS = {  # name -> ranks, settings
    "one process": (1, {}),
    "dp2": (2, {}),
    "sp2": (2, {"sp": 2}),
    "tp2": (2, {"tp": 2}),
    "tp2, split activations": (2, {"tp": 2, "tp_split_activations": True}),
    "dp2 sp2 tp2": (8, {"sp": 2, "tp": 2}),
}
MODES = ("none", "full", "offload")
TILES = (1, 3, 7, 16, 0)
STEPS = 2


def modes_and_tiles(steps: int) -> list[dict]:
    """Every tile size in the mode with most to it, every mode at one tile size."""
    pairs = [("full", tile) for tile in TILES] + [(mode, 7) for mode in ("none", "offload")]
    return [{"activation_checkpointing": m, "tile_tokens": t, "steps": steps} for m, t in pairs]


def run_all(data, layout: dict) -> list[SimpleNamespace]:
    return [run_steps(data, {**layout, **case}, STEPS) for case in modes_and_tiles(STEPS)]


def same(got: SimpleNamespace, want: SimpleNamespace, tolerance: float = 1e-9) -> None:
    """Assert that losses, norms and weights agree, relative to the largest."""
    assert got.losses == pytest.approx(want.losses, rel=tolerance)
    assert got.norms == pytest.approx(want.norms, rel=tolerance)
    for name, weight in want.weights.items():
        assert (got.weights[name] - weight).abs().max() <= tolerance * weight.abs().max(), name


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return golden_file(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def plain(data):
    """One process, no tiles, nothing computed again: the golden numbers."""
    run = run_steps(data, {"tile_tokens": 0}, STEPS)
    golden = expected()[:STEPS]
    assert run.losses == pytest.approx([step["loss"] for step in golden], rel=1e-9)
    assert run.norms == pytest.approx([step["grad_norm"] for step in golden], rel=1e-9)
    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_settings_change_no_number(data, plain, layout):
    """Red when a tile is lost or counted twice, or a block is not computed again as it was."""
    ranks, settings = LAYOUTS[layout]
    for run in run_ranks(run_all, ranks, data, settings, timeout_s=180)[0]:
        same(run, plain)


def run_packed(data, changes: dict, indices: list[int]) -> SimpleNamespace:
    """STEPS updates on the same rows every time; -1 is a row of padding."""
    settings = replace(SETTINGS, batch_size=len(indices), **changes)
    mesh = init_mesh(settings.sp, settings.tp)
    run = build(mesh, settings)
    rows = open_dataset([data], None, settings.seq_len, pack=settings.pack, shuffle=False)
    losses, norms = [], []
    for _ in range(STEPS):
        batch = shard_batch(rows.rows(indices), mesh).split(settings.micro_batch_size)
        metrics = train.train_step(run.model, run.optimizer, batch, mesh, run.spec, settings)
        losses.append(metrics["loss"].item())
        norms.append(metrics["grad_norm"].item())
    weights = gather_state_dict(run.model, run.spec, mesh)
    return SimpleNamespace(losses=losses, norms=norms, weights=weights, rows=rows.num_rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packing_changes_no_number(data, tmp_path, layout):
    """Red when packed documents see each other, their positions run on, or a row of padding counts:
    the same documents, one a row, give other numbers.
    """
    few = tmp_path / "few.jsonl"
    few.write_text("".join(data.read_text().splitlines(keepends=True)[:8]))
    alone = run_packed(few, {"tile_tokens": 0}, list(range(8)))
    packed = {"pack": True, "seq_len": 101, "micro_batch_size": 1}  # 101: sp has to pad it
    ranks, settings = LAYOUTS[layout]
    for case in ({"activation_checkpointing": "full", "tile_tokens": 7}, {"tile_tokens": 0}):
        changes = {**packed, **settings, **case}
        run = run_ranks(run_packed, ranks, few, changes, [0, 1, 2, -1], timeout_s=120)[0]
        assert run.rows == 3
        same(run, alone)


def host_kernel(q, k, v, ends, ends_k, longest, longest_k, *, scale, window_size, enable_gqa):
    """What torch's varlen_attn computes, by calls of the plain core: it exists on cuda only."""
    lengths = ends.diff().tolist()
    assert (longest, longest_k) == (max(lengths), max(lengths)) and ends.dtype == torch.int32
    assert window_size == (-1, 0) and enable_gqa and torch.equal(ends, ends_k)
    parts = zip(*(x.split(lengths) for x in (q, k, v)))
    return torch.cat([causal_attention(*(x[None] for x in p), None, scale)[0] for p in parts])


def test_one_kernel_call_for_all_documents():
    """Red when documents of two rows are taken for one, or the row's lengths are miscounted."""
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [2, 2, 3, 3, 3, 3]])
    q, k, v = (torch.randn(2, 6, heads, 8).bfloat16() for heads in (4, 2, 2))
    core = variable_length_attention(causal_attention, host_kernel)
    want = causal_attention(q, k, v, documents, 0.3)
    assert (core(q, k, v, documents, 0.3) - want).abs().max() < 1e-2
    q, k, v = q.double(), k.double(), v.double()  # not the kernel's: the plain core
    assert torch.equal(core(q, k, v, documents, 0.3), causal_attention(q, k, v, documents, 0.3))
