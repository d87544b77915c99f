"""Adapters on every layout against one process, and the promises of CASES 38 and 39."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from conftest import close, lively_weights, tiny_config, tiny_model, uneven_rows
from layout_runs import SETTINGS, train
from torch.utils.checkpoint import checkpoint

from minitrain.bf16_optimizer import BF16Optimizer
from minitrain.data_sharder import shard_batch
from minitrain.launch import run_ranks
from minitrain.lora import (
    LoRAConfig,
    LoRALinear,
    add_lora,
    lora_parameters,
    merge_lora,
    seed_dropout,
)
from minitrain.mesh import Axis, Mesh, init_mesh
from minitrain.model_sharder import gather_state_dict

CONFIG = tiny_config(qkv_bias=True)
LAYOUTS = {  # name -> ranks, settings
    "tp2": (2, {"tp": 2}),
    "tp4, 2 kv heads": (4, {"tp": 4}),
    "sp2": (2, {"sp": 2}),
    "sp2 tp2": (4, {"sp": 2, "tp": 2}),
    "dp2": (2, {}),
    "tp2 split activations": (2, {"tp": 2, "tp_split_activations": True}),
    "tp4 split activations": (4, {"tp": 4, "tp_split_activations": True}),
    "dp2 tp2, optimizer not sharded": (4, {"tp": 2, "shard_optimizer": False}),
}


def lively_lora(model, spec, mesh, seed: int = 3) -> None:
    """Fill B with numbers, so that A's first gradient is not zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in lora_parameters(model).items():
        if name.endswith("lora_B"):
            drawn = torch.randn(spec.shapes[name], generator=generator, dtype=torch.float64)
            mine = drawn if spec[name] is None else drawn.chunk(mesh.tp.size)[mesh.tp.rank]
            param.detach().copy_(0.2 * mine)


def adapted(mesh, lora=LoRAConfig(rank=3), config=CONFIG, **options):  # noqa: B008
    """A tiny float64 model with adapters, and its ShardSpec."""
    model, spec = tiny_model(config, lively_weights(config), mesh, **options)
    add_lora(model, lora, mesh, spec)
    return model, spec


def steps(changes: dict, lora: LoRAConfig, num_steps: int = 5, checkpointed: bool = False):
    """Run train_step on this rank: norms, first gradients and final weights, whole."""
    settings = replace(SETTINGS, batch_size=4, micro_batch_size=1, **changes)
    mesh = init_mesh(settings.sp, settings.tp)
    model, spec = adapted(mesh, lora, split_activations=settings.tp_split_activations)
    lively_lora(model, spec, mesh)
    if checkpointed:
        model.run_block = lambda *call: checkpoint(*call, use_reentrant=False)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    shards = mesh.dp_sp if settings.shard_optimizer else Axis("none")
    make = train.adamw(settings, torch.device("cpu"))
    optimizer = BF16Optimizer(model.named_parameters(), make, shards.size, shards.rank)
    assert set(optimizer.params) == set(lora_parameters(model))
    norms = []
    for step in range(num_steps):
        seed_dropout(0, step, mesh)
        micro_batches = shard_batch(uneven_rows(), mesh).split(1)
        metrics = train.train_step(model, optimizer, micro_batches, mesh, spec, settings)
        norms.append(metrics["grad_norm"].item())
    params = dict(model.named_parameters())
    mine = {n: p.detach().clone() for n, p in lora_parameters(model).items() if spec[n] is None}
    return SimpleNamespace(
        norms=norms,
        weights=gather_state_dict(model, spec, mesh),
        replicated=mine,
        base_unchanged=all(torch.equal(params[n], old) for n, old in frozen.items()),
    )


@cache
def one_process(lora: LoRAConfig):
    return steps({}, lora)


def check(results: list, expected) -> None:
    for got in results:
        assert got.norms == pytest.approx(expected.norms, rel=1e-10)
        assert got.base_unchanged
        for name, weight in expected.weights.items():
            close(got.weights[name], weight, 1e-10)
        for name, factor in got.replicated.items():
            assert torch.equal(factor, results[0].replicated[name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_process(layout):
    """Red when dA or dB is a part of itself on some rank, counted twice in the norm, or A's start
    depends on the layout; or when the base changes.
    """
    ranks, changes = LAYOUTS[layout]
    lora = LoRAConfig(rank=3, alpha=5.0, rslora=True)
    check(run_ranks(steps, ranks, changes, lora), one_process(lora))


@pytest.mark.parametrize("layout", ["tp2", "tp4, 2 kv heads", "tp2 split activations"])
def test_dropout_masks_do_not_depend_on_tp(layout):
    """Red when tp ranks drop different inputs of one activation, or the same ones of different."""
    lora = LoRAConfig(rank=3, dropout=0.3)
    ranks, changes = LAYOUTS[layout]
    check(run_ranks(steps, ranks, changes, lora), one_process(lora))
    assert one_process(lora).norms != one_process(LoRAConfig(rank=3)).norms


def test_activation_checkpointing_changes_nothing():
    """Red when adapters get no gradient behind a checkpoint, or the second forward draws another
    mask.
    """
    lora = LoRAConfig(rank=3, dropout=0.3)
    check([steps({}, lora, checkpointed=True)], one_process(lora))


def test_gradients_are_those_of_the_formula():
    """Red when scale, A or B is used otherwise than in W + alpha / r * B A."""
    model, spec = adapted(Mesh(), LoRAConfig(rank=2, alpha=6.0))
    lively_lora(model, spec, Mesh())
    plain, _ = tiny_model(CONFIG, lively_weights(CONFIG))
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            layer = plain.get_submodule(name)
            layer.weight.detach().add_(3.0 * module.lora_B @ module.lora_A)
    batch = shard_batch(uneven_rows(), Mesh())
    for each in (model, plain):
        train.summed_loss(each, batch, Mesh(), SETTINGS).backward()
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            grad = plain.get_submodule(name).weight.grad
            close(module.lora_B.grad, 3.0 * grad @ module.lora_A.T, 1e-11)
            close(module.lora_A.grad, 3.0 * module.lora_B.T @ grad, 1e-11)


def logits(model) -> torch.Tensor:
    batch = shard_batch(uneven_rows(), Mesh())
    with torch.no_grad():
        return model(batch.input_ids, batch.position_ids)


def test_starts_at_the_base_and_merges_to_the_same_logits():
    """Red when B is not zero at the start, dropout acts in eval, or merging changes the function,
    leaves adapters behind, or touches the tied embedding.
    """
    tied = tiny_config(tie_embeddings=True)
    base, base_spec = tiny_model(tied, lively_weights(tied))
    model, spec = adapted(Mesh(), LoRAConfig(rank=3, dropout=0.5), tied)
    assert torch.equal(logits(model), logits(base))
    embedding = model.model.embed_tokens.weight.detach().clone()
    lively_lora(model, spec, Mesh())
    assert not torch.equal(logits(model), logits(model))
    model.eval()
    before = logits(model)
    assert torch.equal(before, logits(model))
    merge_lora(model, spec)
    close(logits(model), before)
    assert (logits(model) - logits(base)).abs().max() > 0.01
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert spec == base_spec and spec.shapes == base_spec.shapes
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in base.named_parameters()]


def merged_on_tp(num_kv_heads: int) -> dict[str, torch.Tensor]:
    mesh = init_mesh(1, torch.distributed.get_world_size())
    model, spec = adapted(mesh, config=tiny_config(num_kv_heads=num_kv_heads))
    lively_lora(model, spec, mesh)
    merge_lora(model, spec)
    return gather_state_dict(model, spec, mesh)


@pytest.mark.parametrize(("tp", "num_kv_heads"), [(2, 2), (4, 2), (2, 1)])
def test_merges_on_every_layout(tp, num_kv_heads):
    """Red when a rank merges another rank's part of the update."""
    config = tiny_config(num_kv_heads=num_kv_heads)
    model, spec = adapted(Mesh(), config=config)
    lively_lora(model, spec, Mesh())
    merge_lora(model, spec)
    for weights in run_ranks(merged_on_tp, tp, num_kv_heads):
        for name, param in model.named_parameters():
            close(weights[name], param.detach())


def test_bf16_merge_rounds_once():
    """Red when the update is rounded to bf16 before it is added."""
    model, spec = tiny_model(CONFIG, lively_weights(CONFIG), dtype=torch.bfloat16)
    add_lora(model, LoRAConfig(rank=3), Mesh(), spec)
    lively_lora(model, spec, Mesh())
    module = model.model.layers[1].mlp.down_proj
    update = module.lora_B.float() @ module.lora_A.float() * module.scale
    expected = (module.weight.float() + update).bfloat16()
    merge_lora(model)
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"targets": ("q_proj", "lm_head")}, "not on lm_head: a tied head and embedding are one"),
        ({"targets": ("embed_tokens",)}, "not on embed_tokens"),
        ({"targets": ("qproj",)}, "'qproj' is none. This model has down_proj, gate_proj, k_proj,"),
        ({"rank": 17}, r"rank 17, but model.layers.0.self_attn.k_proj.weight is \[16, 32\]"),
        ({"rank": 0}, "at least 1"),
        ({"targets": ()}, "0 targets"),
    ],
)
def test_refuses_what_cannot_be_adapted(changes, words):
    """Red when a wrong target or rank passes, or changes the model before it is refused."""
    model, spec = tiny_model(CONFIG, lively_weights(CONFIG))
    names = list(spec)
    with pytest.raises(ValueError, match=words):
        add_lora(model, LoRAConfig(**changes), Mesh(), spec)
    assert list(spec) == names == [n for n, p in model.named_parameters() if p.requires_grad]


def test_refuses_a_second_adapter_and_an_empty_merge():
    """Red when an adapter is put on an adapter, or merging nothing passes silently."""
    model, spec = adapted(Mesh())
    with pytest.raises(ValueError, match="Merge it first"):
        add_lora(model, LoRAConfig(), Mesh(), spec)
    merge_lora(model, spec)
    with pytest.raises(ValueError, match="has none"):
        merge_lora(model, spec)


def test_targets_choose_layers():
    """Red when a target reaches layers whose names only end alike, or others than named."""
    _, spec = adapted(Mesh(), LoRAConfig(targets=("model.layers.1.mlp.up_proj", "v_proj")))
    chosen = [name for name in spec if name.endswith("lora_A")]
    assert chosen == [
        "model.layers.0.self_attn.v_proj.lora_A",
        "model.layers.1.self_attn.v_proj.lora_A",
        "model.layers.1.mlp.up_proj.lora_A",
    ]
    with pytest.raises(ValueError, match="'proj' is none"):
        adapted(Mesh(), LoRAConfig(targets=("proj",)))
