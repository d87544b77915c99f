"""The plan's formulas against what the model keeps and sends."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import counting_mesh, lively_weights, tiny_model
from test_memory import CONFIG, gradients, kept_bytes, made, tokens

from minitrain.device import Device
from minitrain.launch import run_ranks
from minitrain.memory import save_memory

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import plan
from plan import Layout, PlanConfig

ONE = PlanConfig(dtype="fp64", activation_checkpointing="none", tile_tokens=0, process_gb=0)


@pytest.mark.parametrize("mode, tile", [("none", 0), ("none", 8), ("full", 0), ("full", 8)])
def test_activations_are_what_the_model_keeps(mode, tile):
    """Red when a layer keeps something that the formula does not know, or no longer keeps it."""
    length, kept = 64, []
    for layers in (2, 4):
        deep = replace(CONFIG, num_layers=layers)
        model, _ = tiny_model(deep, lively_weights(deep))
        save_memory(model, Device(), mode, tile)
        kept.append(kept_bytes(model, length))
    layout = Layout(1, 1, 1, CONFIG, replace(ONE, seq_len=length, tile_tokens=tile))
    assert (kept[1] - kept[0]) / 2 == pytest.approx(plan.kept(layout, mode), rel=0.02)


def _bytes(sp: int, tp: int, mode: str, ids) -> dict[str, float]:
    """Bytes that this rank sends in a forward and backward pass, as plan.sent counts them."""
    mesh = counting_mesh(sp, tp)
    mine = ids.chunk(sp, 1)[mesh.sp.rank]
    gradients(made(mode, 4, mesh), mine)
    found = {}
    for name, factor in (("sp", 1), ("tp", 2)):
        axis = getattr(mesh, name)
        calls = axis.group.calls if axis.size > 1 else []
        found[name] = factor * sum(size for _, size in calls) * (axis.size - 1) / axis.size
    return found


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("sp, tp", [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_bytes_are_what_the_model_sends(sp, tp, mode):
    """Red when an exchange is forgotten, or counted twice when a block is computed again."""
    config = replace(ONE, activation_checkpointing=mode, tile_tokens=4, seq_len=32)
    planned = plan.sent(Layout(1, sp, tp, CONFIG, replace(config, devices=1)), 0)
    measured = run_ranks(_bytes, sp * tp, sp, tp, mode, tokens(32), timeout_s=60)[0]
    for axis in ("sp", "tp"):
        assert measured[axis] == pytest.approx(planned[axis], rel=0.05), axis


def test_parameters_are_counted_once_and_split():
    """Red when a tied head counts twice, or what tp replicates is divided."""
    count = plan.parameters(Layout(1, 1, 1, CONFIG, ONE))
    assert count == sum(p.numel() for p in made().parameters())
    tied = replace(CONFIG, tie_embeddings=True)
    assert count - plan.parameters(Layout(1, 1, 1, tied, ONE)) == 64 * 32
    norms_and_biases = CONFIG.num_layers * 3 * 32 + 32
    half = plan.parameters(Layout(1, 1, 2, CONFIG, ONE))
    assert half == (count - norms_and_biases) / 2 + norms_and_biases


def test_optimizer_is_divided_only_when_sharded():
    """Red when ZeRO-1's saving is promised without it."""
    sharded = plan.memory(Layout(2, 2, 1, CONFIG, ONE), 1000)["optimizer"]
    whole = plan.memory(Layout(2, 2, 1, CONFIG, replace(ONE, shard_optimizer=False)), 1000)
    assert (sharded, whole["optimizer"]) == (3 * 8 * 1000 / 4, 3 * 8 * 1000)


def test_table_names_every_layout_and_why_not():
    """Red when a layout that the rules refuse is offered, or one that they allow is missing."""
    text = plan.plan(PlanConfig(model="tiny", devices=8, memory_gb=1, seq_len=65536))
    *table, last = text.splitlines()[2:]
    names = {tuple(int(n) for n in line[:12].split("x")) for line in table}
    assert names == {
        (d, s, t)
        for d in (1, 2, 4, 8)
        for s in (1, 2, 4)
        for t in (1, 2, 4)
        if d * s * t == 8 and s * t <= 4
    }
    fits = [line.split()[-4] for line in table]
    assert fits == sorted(fits, reverse=True) and {"yes", "no"} == set(fits)
    assert "need more than 1 GB" in last and "query heads must be a multiple of sp * tp (" in last


def test_settings_without_meaning_are_refused():
    """Red when a plan for no device is made."""
    with pytest.raises(ValueError, match="--devices must be positive, not 0"):
        plan.plan(PlanConfig(devices=0))
