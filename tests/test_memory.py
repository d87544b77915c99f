"""Tiled MLPs, checkpointed blocks, offload: what they keep, how often they compute, what they
send.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import close, counting_mesh, lively_weights, tiny_config, tiny_model
from layout_runs import SETTINGS
from torch.utils._python_dispatch import TorchDispatchMode

from minitrain import memory
from minitrain.device import Device
from minitrain.grad_reducer import reduce_gradients_
from minitrain.launch import run_ranks
from minitrain.lora import LoRAConfig, add_lora, lora_parameters
from minitrain.memory import check_memory_settings, save_memory
from minitrain.mesh import Mesh, init_mesh

CONFIG = tiny_config(mlp_bias=True)
LORA = LoRAConfig(rank=3, dropout=0.5)


def made(mode: str = "none", tile: int = 0, mesh=None, lora: LoRAConfig | None = None, **options):
    mesh = mesh or Mesh()
    model, spec = tiny_model(CONFIG, lively_weights(CONFIG), mesh, **options)
    if lora:
        add_lora(model, lora, mesh, spec)
        for name, param in lora_parameters(model).items():
            if name.endswith("lora_B"):
                torch.nn.init.constant_(param, 0.1)
    save_memory(model, mesh.device, mode, tile)
    return model


def tokens(length: int, rows: int = 1):
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 64, (rows, length), generator=generator)


def gradients(model, ids) -> dict[str, torch.Tensor]:
    """Of the mean of squared logits, with the same random numbers every time."""
    torch.manual_seed(0)
    model.zero_grad()
    model(ids, torch.arange(ids.shape[1]).expand_as(ids)).pow(2).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name in want:
        close(got[name], want[name])


@pytest.mark.parametrize("length", [1, 3, 5, 9, 10, 12])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_tiled_mlp_of_any_length(length, mode):
    """Red when a tile that is not full is lost, or counts twice (case 8)."""
    tile = -(-length // 4)
    want = gradients(made(), tokens(length))
    same(gradients(made(mode, tile), tokens(length)), want)


def test_one_gradient_contribution_for_each_parameter():
    """Red when autograd adds up a gradient for each tile, in bf16 (case 8)."""
    mlp = made(tile=4).model.layers[0].mlp
    seen, edges = set(), Counter()
    todo = [mlp(torch.randn(1, 12, 32, dtype=torch.float64, requires_grad=True)).grad_fn]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if following is not None:
                edges[getattr(following, "variable", None)] += 1
                todo.append(following)
    assert {name: edges[p] for name, p in mlp.named_parameters()} == {
        name: 1 for name, _ in mlp.named_parameters()
    }


def _different_lengths(mode: str) -> float:
    mesh = init_mesh()
    grads = gradients(made(mode, 2, mesh), tokens(4 + 8 * mesh.dp.rank))
    reduce_gradients_(grads, mesh.dp_sp)
    return sum(g.sum().item() for g in grads.values())


@pytest.mark.parametrize("mode", ["none", "full"])
def test_ranks_with_different_numbers_of_tiles_end(mode):
    """Red, after a time-out, when each tile communicates over dp (case 8)."""
    first, second = run_ranks(_different_lengths, 2, mode, timeout_s=30)
    assert first == second


def _collectives(lora: bool, split: bool) -> tuple:
    mesh = counting_mesh(tp=2)
    found = []
    for tile in (0, 4):
        adapters = replace(LORA, dropout=0.0) if lora else None
        model = made("none", tile, mesh, adapters, split_activations=split)
        mesh.tp.group.calls.clear()
        found.append((gradients(model, tokens(12)), list(mesh.tp.group.calls)))
    same(found[1][0], found[0][0])
    return [sorted(calls) for _, calls in found]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_tiles_send_nothing_more(lora, split):
    """Red when a tile has a collective of its own: adapters' gradients, or the row-parallel sum."""
    plain, tiled = run_ranks(_collectives, 2, lora, split, timeout_s=60)[0]
    assert tiled == plain


@pytest.mark.parametrize("mode", ["none", "full"])
def test_random_numbers_are_drawn_again(mode):
    """Red when a tile, or a block, drops other inputs the second time."""
    ids = tokens(12)
    model = made("none", 4, lora=LORA)
    for block in model.model.layers:  # the same tiles in the same order, all kept by autograd

        def tiles(run, x_ND, mlp=block.mlp):
            return torch.cat([run(x_nD) for x_nD in x_ND.split(mlp.tile_tokens)])

        block.mlp._tiles = tiles
    want = gradients(model, ids)
    same(gradients(made(mode, 4, lora=LORA), ids), want)
    kept_all = gradients(made("none", 4, lora=replace(LORA, dropout=0.0)), ids)
    assert any((kept_all[name] != want[name]).any() for name in want)


def test_frozen_layers_below_an_adapter_still_learn():
    """Red when a checkpointed block without trainable input cuts the graph (case 38)."""
    lora = replace(LORA, dropout=0.0)
    want = gradients(made(lora=lora), tokens(9))
    assert len(want) == len(lora_parameters(made(lora=lora)))
    same(gradients(made("full", 4, lora=lora), tokens(9)), want)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_blocks(mode):
    """Red when the compiler looks into the tiles, and loses what they keep."""
    model = made(mode, 4)
    for block in model.model.layers:
        block.compile(backend="aot_eager")
    same(gradients(model, tokens(9)), gradients(made(), tokens(9)))


class Attention(TorchDispatchMode):
    """Notes what each forward pass of attention returns."""

    def __init__(self):
        super().__init__()
        self.calls, self.results = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "attention" in str(func) and "backward" not in str(func):
            self.calls += 1
            self.results += result
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_attention_is_computed_once(mode, dtype):
    """Red when a checkpointed block computes its attention again, or in other numbers."""
    model = made(mode).to(dtype)
    ids = tokens(128)
    with Attention() as attention:
        found = gradients(model, ids)
    assert attention.calls == CONFIG.num_layers
    same(found, gradients(made().to(dtype), ids))


@pytest.mark.parametrize("mode, runs", [("none", 2), ("full", 2)])
def test_a_checkpointed_mlp_is_not_computed_three_times(mode, runs):
    """Red when a block that is computed again includes the tiles, which compute themselves
    again.
    """
    model = made(mode, 4)
    calls = []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: calls.append(1))
    gradients(model, tokens(12))
    assert len(calls) == runs * 3


def kept_bytes(model, length: int) -> int:
    """Bytes that a forward pass keeps for the backward pass, parameters left out. Of attention,
    which is never computed again, what it returned.
    """
    params = {p.data_ptr() for p in model.parameters()}
    kept = {}

    def pack(x):
        if x.data_ptr() not in params:
            storage = x.untyped_storage()
            kept[storage.data_ptr()] = (storage.nbytes(), x)  # x is held, or its place is reused
        return x

    ids = tokens(length)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), Attention() as attention:
        model.hidden(ids, torch.arange(length).expand_as(ids))
    for x in attention.results:
        pack(x)
    return sum(size for size, _ in kept.values())


def test_what_is_kept_grows_by_one_input_and_one_attention_a_block():
    """Red when checkpointing keeps more than a block's input and what attention returned, or tiles
    keep the MLP's activations.
    """
    per_token = {
        key: (kept_bytes(made(*key), 64) - kept_bytes(made(*key), 32)) / 32 / 8
        for key in (("none", 0), ("none", 8), ("full", 8))
    }
    hidden, wide, layers = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.num_layers
    assert per_token["none", 8] <= per_token["none", 0] - 3 * wide * layers
    # Beside the inputs: ids, two RoPE tables, the final norm.
    attention = CONFIG.num_heads * (CONFIG.head_dim + 1)
    ends = 1 + CONFIG.head_dim + 4 * hidden
    assert per_token["full", 8] <= (hidden + attention) * layers + ends
    assert per_token["full", 8] >= (hidden + attention) * layers  # all of it was seen


class ListStore(list):
    """Stands in for HostStore, which needs CUDA."""

    def put(self, x) -> int:
        self.append(x.clone())
        return len(self) - 1

    def take(self, number: int):
        assert number == len(self) - 1, "not the opposite order"
        return self.pop()


def test_offload_keeps_the_inputs_in_its_store(monkeypatch):
    """Red when an input stays on the device as well, or comes back to the wrong block."""
    stores = []
    monkeypatch.setattr(memory, "HostStore", lambda: stores.append(ListStore()) or stores[-1])
    mesh = Mesh(device=Device())
    mesh.device.kind = "cuda"
    model = made("offload", 4, mesh)
    ids = tokens(9)
    hidden = model.hidden(ids, torch.arange(9).expand_as(ids))
    assert len(stores[0]) == CONFIG.num_layers
    hidden.sum().backward()
    assert not stores[0]
    same(gradients(model, ids), gradients(made(), ids))


@pytest.mark.parametrize(
    "changes, free, words",
    [
        ({"tile_tokens": -1}, 1e12, "at least one token, but --tile-tokens is -1"),
        ({"activation_checkpointing": "some"}, 1e12, "none, full or offload, not 'some'"),
        ({"activation_checkpointing": "offload", "device": "xla"}, 1e12, "which the xla device"),
        ({"activation_checkpointing": "offload", "device": "cuda"}, 1e3, r"0\.0 GB are free"),
    ],
)
def test_settings_that_cannot_work(monkeypatch, changes, free, words):
    """Red when a bad tile, or offload without host memory, is found only in the first step."""
    monkeypatch.setattr(memory, "_free_host_bytes", lambda: free)
    with pytest.raises(ValueError, match=words):
        check_memory_settings(replace(SETTINGS, **changes), CONFIG)


def test_settings_that_work():
    """Red when offload is refused on cpu, where it is full, or tile 0, which is no tile."""
    for mode in ("none", "full", "offload"):
        changes = {"activation_checkpointing": mode, "tile_tokens": 0, "device": "cpu"}
        check_memory_settings(replace(SETTINGS, **changes), CONFIG)
    assert memory._free_host_bytes() > 0
