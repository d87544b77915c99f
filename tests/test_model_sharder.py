"""The whole sharded model against the dense one, on every kind of layout."""

import functools
from types import SimpleNamespace

import pytest
import torch
from conftest import close, counting_mesh, lively_weights, tiny_config, tiny_model, uneven_rows
from reference import documents_of, reference_loss, reference_model

from minitrain.data_sharder import shard_batch
from minitrain.launch import run_ranks
from minitrain.loss_reducer import cross_entropy_sum, head_cross_entropy_sum
from minitrain.mesh import Mesh, ShardSpec, init_mesh
from minitrain.model import CausalLM
from minitrain.model_sharder import (
    fill_weights,
    gather_state_dict,
    random_weights,
    shard_model,
    share_slices,
)

CONFIGS = {
    "untied": tiny_config(),
    "tied": tiny_config(tie_embeddings=True),
    "odd_vocabulary": tiny_config(vocab_size=61),
    "tied_odd_vocabulary": tiny_config(vocab_size=61, tie_embeddings=True),
    "everything": tiny_config(
        vocab_size=61,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm=True,
        rope_layers=(True, False),
        residual_multiplier=0.5,
    ),
}
# name -> dp, sp, tp, split_activations
LAYOUTS = {
    "one": (1, 1, 1, False),
    "dp2": (2, 1, 1, False),
    "tp2": (1, 1, 2, False),
    "tp2_split": (1, 1, 2, True),
    "tp4_replicated_kv": (1, 1, 4, False),
    "tp4_replicated_kv_split": (1, 1, 4, True),
    "sp2": (1, 2, 1, False),
    "sp4": (1, 4, 1, False),
    "sp2_tp2": (1, 2, 2, False),
    "sp2_tp2_split": (1, 2, 2, True),
    "dp2_sp2_tp2": (2, 2, 2, False),
}


def rows_of(kind: str, vocab_size: int):
    """Global batches: "plain", of odd length and "packed", or with labels in one half only."""
    packed = kind == "packed"
    rows = uneven_rows(length=13 if packed else 16, vocab_size=vocab_size, packed=packed)
    if kind == "second_half":  # of each row: an sp rank has none
        rows.labels[:, :9] = -100
        rows.labels[:, 9:] = rows.input_ids[:, 9:]
    if kind == "last_rows":  # a dp rank has none
        rows.labels[:2] = -100
    return rows


@functools.cache
def dense(name: str, kind: str):
    """The judge's logits, loss and gradients for rows_of(kind)."""
    config = CONFIGS[name]
    rows = rows_of(kind, config.vocab_size)
    leaves = {n: w.requires_grad_() for n, w in lively_weights(config).items()}
    model, documents = reference_model(config, leaves), documents_of(rows)
    total, _ = reference_loss(model, documents)
    total.backward()
    logits = torch.cat([model(d.ids).detach() for d in documents]).unflatten(
        0, rows.input_ids.shape
    )
    return rows, logits, total.item(), {n: w.grad for n, w in leaves.items()}


def gather(parts: dict, spec: ShardSpec, mesh: Mesh) -> dict[str, torch.Tensor]:
    """gather_state_dict for gradients."""
    holder = SimpleNamespace(named_parameters=lambda: parts.items())
    return gather_state_dict(holder, spec, mesh)


def sharded(name: str, layout: tuple[int, int, int, bool], kind: str, tiled: bool):
    """Forward and backward on this rank; compare with the judge's numbers, here."""
    _, sp, tp, split = layout
    config, mesh = CONFIGS[name], init_mesh(sp, tp)
    rows, want_logits, want_loss, want_grads = dense(name, kind)
    model, spec = tiny_model(config, lively_weights(config), mesh, split_activations=split)
    batch = shard_batch(rows, mesh)
    inputs = (batch.input_ids, batch.position_ids, batch.documents)

    if tiled:
        hidden = model.hidden(*inputs)
        loss = head_cross_entropy_sum(
            hidden,
            model.lm_head.weight,
            batch.labels,
            mesh.tp,
            tile_tokens=7,
            vocab_size=config.vocab_size,
        )
    else:
        logits = model(*inputs)
        loss = cross_entropy_sum(logits, batch.labels, mesh.tp, vocab_size=config.vocab_size)
        whole = logits.detach()
        for axis, dim in ((mesh.sp, 1), (mesh.tp, 2), (mesh.dp, 0)):
            whole = axis.group.all_gather(whole, dim) if axis.size > 1 else whole
        close(whole[..., : config.vocab_size], want_logits)
    loss.backward()

    total = loss.detach().clone()
    grads = {n: p.grad for n, p in model.named_parameters()}
    if mesh.dp_sp.size > 1:
        mesh.dp_sp.group.all_reduce_(total, "sum")
        for grad in grads.values():
            mesh.dp_sp.group.all_reduce_(grad, "sum")
    assert abs(total.item() / want_loss - 1) < 1e-12
    gathered = gather(grads, spec, mesh)
    assert gathered.keys() == want_grads.keys()
    for n, want in want_grads.items():
        close(gathered[n], want)
    for n, grad in grads.items():  # padded rows of the vocabulary
        rows_here = share_slices(n, spec, mesh)[0]
        assert not grad[rows_here.stop - rows_here.start :].any(), n
    return {n: grad for n, grad in grads.items() if spec[n] is None}


def world(layout: str) -> int:
    dp, sp, tp, _ = LAYOUTS[layout]
    return dp * sp * tp


def assert_all_ranks_equal(ranks: list[dict]) -> None:
    for replicated in ranks[1:]:
        for n, grad in ranks[0].items():
            assert torch.equal(grad, replicated[n]), n


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_loss_and_gradients_equal_the_dense_model(layout, config):
    """Any sum over tp or sp missing, doubled or misplaced; tied gradients missing a part (24);
    replicated parameters with different gradients (25, 26); padding that leaves a trace (10).
    """
    dense(config, "plain")  # made once here, inherited by every fork
    ranks = run_ranks(sharded, world(layout), config, LAYOUTS[layout], "plain", False)
    assert_all_ranks_equal(ranks)


@pytest.mark.parametrize("kind", ["second_half", "last_rows"])
@pytest.mark.parametrize("layout", ["dp2", "sp2", "sp2_tp2_split", "dp2_sp2_tp2"])
def test_a_rank_without_labels_takes_part(layout, kind):
    """A rank with only -100 labels gives NaN, or leaves a collective out (case 2)."""
    dense("tied", kind)
    run_ranks(sharded, world(layout), "tied", LAYOUTS[layout], kind, False, timeout_s=30)


@pytest.mark.parametrize("layout", ["one", "tp2", "sp2", "sp2_tp2_split", "dp2_sp2_tp2"])
def test_packed_rows_and_tiled_loss(layout):
    """Documents see each other under sp, tiles lose a part of the gradient, or a row length that
    sp does not divide leaves a trace (7, 13, 16).
    """
    dense("tied_odd_vocabulary", "packed")
    run_ranks(sharded, world(layout), "tied_odd_vocabulary", LAYOUTS[layout], "packed", True)


def calls_per_axis(split: bool):
    config, mesh = tiny_config(), counting_mesh(1, 2)
    model, _ = tiny_model(config, lively_weights(config), mesh, split_activations=split)
    batch = shard_batch(uneven_rows(length=16), mesh)
    calls = mesh.tp.group.calls
    logits = model(batch.input_ids, batch.position_ids)
    forward = [name for name, _ in calls]
    calls.clear()
    loss = cross_entropy_sum(logits, batch.labels, mesh.tp)
    of_loss = [size for _, size in calls]
    calls.clear()
    loss.backward()
    return forward, of_loss, [name for name, _ in calls]


def test_tensor_parallel_communication():
    """More than 2 all-reduces a layer forward and 2 backward, one for the embedding, one for the
    head's input, and 4 numbers a token for the loss.
    """
    tokens, layers = 4 * 16, 2
    for forward, of_loss, backward in run_ranks(calls_per_axis, 2, False):
        assert forward == ["all_reduce"] * (2 * layers + 1)
        assert of_loss == [8 * tokens, 8 * 3 * tokens]
        assert backward == ["all_reduce"] * (2 * layers + 1)


def test_split_activations_communicate_the_same():
    """Split activations cost more than a gather and a scatter where an all-reduce was, and the
    norms' sums.
    """
    layers = 2
    for forward, _, backward in run_ranks(calls_per_axis, 2, True):
        assert sorted(forward) == ["all_gather"] * (2 * layers + 1) + ["reduce_scatter"] * (
            2 * layers + 1
        )
        norms = 2 * layers + 1
        assert sorted(backward) == ["all_gather"] * (2 * layers + 1) + ["all_reduce"] * norms + [
            "reduce_scatter"
        ] * (2 * layers + 1)


def made_from_seed(sp: int, tp: int, name: str, dtype: torch.dtype):
    config, mesh = CONFIGS[name], init_mesh(sp, tp)
    with torch.device("meta"):
        model = CausalLM(config)
    spec = shard_model(model, mesh)
    read = random_weights(config, spec.shapes, seed=5)
    fill_weights(model, spec, mesh, torch.device("cpu"), dtype, read)
    assert {p.dtype for p in model.parameters()} == {dtype}
    if config.tie_embeddings:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    return gather_state_dict(model, spec, mesh)


@pytest.mark.parametrize("name", ["tied_odd_vocabulary", "everything"])
def test_one_seed_is_one_model_on_every_layout(name):
    """Another layout starts from other weights, or an exported file has padding, two copies of a
    kv head or of a tied head (10, 26, 36).
    """
    config = CONFIGS[name]
    want = run_ranks(made_from_seed, 1, 1, 1, name, torch.float32)[0]
    plain = {n: tuple(p.shape) for n, p in CausalLM(config).named_parameters()}
    assert {n: tuple(w.shape) for n, w in want.items()} == plain
    for sp, tp in ((1, 2), (1, 4), (2, 2)):
        for got in run_ranks(made_from_seed, sp * tp, sp, tp, name, torch.float32):
            assert got.keys() == want.keys()
            assert all(torch.equal(got[n], want[n]) for n in want)
    rounded = run_ranks(made_from_seed, 2, 1, 2, name, torch.bfloat16)[0]
    assert all(torch.equal(rounded[n], w.to(torch.bfloat16)) for n, w in want.items())


def test_random_weights():
    """The initial spread is another: residual outputs not scaled down, norms not 1, biases not 0;
    or another seed gives the same model.
    """
    config = tiny_config(hidden_size=256, vocab_size=512, o_bias=True)
    with torch.device("meta"):
        shapes = {n: tuple(p.shape) for n, p in CausalLM(config).named_parameters()}
    read, other = (random_weights(config, shapes, seed) for seed in (0, 1))
    for n, shape in shapes.items():
        weight = read(n, tuple(slice(0, size) for size in shape))
        if len(shape) == 1:
            assert (weight == (0.0 if n.endswith("bias") else 1.0)).all()
            continue
        want = 0.02 / 2 if n.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        assert abs(weight.std().item() / want - 1) < 0.05
        assert not torch.equal(weight, other(n, tuple(slice(0, size) for size in shape)))


def sliced_from_weights(tp: int):
    """Shard a model that already has weights."""
    config, mesh = CONFIGS["tied_odd_vocabulary"], init_mesh(1, tp)
    weights = lively_weights(config)
    model = CausalLM(config).double()
    model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    spec = shard_model(model, mesh)
    got = gather_state_dict(model, spec, mesh)
    return got.keys() == weights.keys() and all(torch.equal(got[n], w) for n, w in weights.items())


@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_with_weights_keeps_them(tp):
    """Slicing and gathering are not each other's inverse."""
    assert run_ranks(sliced_from_weights, tp, tp) == [True] * tp


def test_shard_spec_names_what_is_split():
    """A replicated parameter is taken for a split one: the norm counts it twice (case 20)."""

    def fn():
        with torch.device("meta"):
            model = CausalLM(CONFIGS["everything"])
        return dict(shard_model(model, init_mesh(1, 4)))

    spec = run_ranks(fn, 4)[0]
    at = "model.layers.0."
    assert {n for n, dim in spec.items() if dim == 1} == {
        f"model.layers.{i}.{n}.weight"
        for i in (0, 1)
        for n in ("self_attn.o_proj", "mlp.down_proj")
    }
    split = ("q_proj.weight", "q_proj.bias", "gate_proj.bias", "up_proj.weight", "lm_head.weight")
    for n, dim in spec.items():
        if n.endswith(split) or n == "model.embed_tokens.weight":
            assert dim == 0, n
        elif "norm" in n or "k_proj" in n or "v_proj" in n or n.endswith(("o_proj.bias",)):
            assert dim is None, n
    assert spec[f"{at}mlp.down_proj.bias"] is None
