"""Attention over exchanged heads against attention over the whole sequence."""

import functools

import pytest
import torch
from conftest import ONE, close, counting_mesh, lively_weights, tiny_config, tiny_model

from minitrain.launch import run_ranks
from minitrain.mesh import Axis, init_mesh
from minitrain.model import causal_attention
from minitrain.ulysses import ulysses_attention

B, S, K = 2, 8, 4


def drawn(*shape, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def naive_attention(q_bSHK, k_bSGK, v_bSGK, documents_bS, scale):
    """Softmax by hand, with a mask: no code of minitrain's."""
    q, k, v = (x.transpose(1, 2) for x in (q_bSHK, k_bSGK, v_bSGK))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    sees = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().expand(q.shape[0], 1, -1, -1)
    if documents_bS is not None:
        sees = sees & (documents_bS[:, None, :, None] == documents_bS[:, None, None, :])
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~sees, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def exchanged(heads: int, kv_heads: int, packed: bool):
    sp = init_mesh(torch.distributed.get_world_size()).sp
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0] * 7 + [1]]) if packed else None
    qkv = [drawn(B, S, n, K, seed=n + i) for i, n in enumerate((heads, kv_heads, kv_heads))]
    whole = [x.clone().requires_grad_() for x in qkv]
    want = naive_attention(*whole, documents, 0.3)
    w = drawn(B, S, heads, K, seed=9)
    (want.sin() * w).sum().backward()

    mine = [x.chunk(sp.size, 1)[sp.rank].clone().requires_grad_() for x in qkv]
    got = ulysses_attention(causal_attention, sp)(*mine, documents, 0.3)
    (got.sin() * w.chunk(sp.size, 1)[sp.rank]).sum().backward()
    close(got.detach(), want.detach().chunk(sp.size, 1)[sp.rank])
    for x, dense in zip(mine, whole):
        close(x.grad, dense.grad.chunk(sp.size, 1)[sp.rank])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "sp, heads, kv_heads",
    [(1, 4, 2), (2, 4, 4), (2, 4, 2), (2, 4, 1), (4, 8, 4), (4, 8, 2), (4, 4, 1)],
)
def test_equals_attention_over_the_whole_sequence(sp, heads, kv_heads, packed):
    """Heads paired with another kv head, slices in the wrong order, or gradients of the copies of
    a kv head not summed (case 26).
    """
    run_ranks(exchanged, sp, heads, kv_heads, packed)


def test_one_rank_calls_the_core_itself():
    """One process pays for an exchange."""
    assert ulysses_attention(causal_attention, ONE) is causal_attention


@pytest.mark.parametrize("sp, heads, kv_heads", [(4, 6, 4), (4, 8, 6), (2, 6, 3)])
def test_heads_that_do_not_fit_are_refused(sp, heads, kv_heads):
    """sp cuts heads in pieces."""
    x, y = torch.zeros(1, 2, heads, K), torch.zeros(1, 2, kv_heads, K)
    with pytest.raises(ValueError, match=rf"sp {sp}, {heads} query heads, {kv_heads} kv heads"):
        ulysses_attention(causal_attention, Axis("sp", sp))(x, y, y)


def slices_of_a_model(sp_size: int, tp_size: int, config, packed: bool):
    """Run the model on this rank's slice; gather the logits of the whole rows."""
    mesh = counting_mesh(sp_size, tp_size)
    model, _ = tiny_model(config, lively_weights(config), mesh)
    ids = torch.arange(16).view(1, 16)
    split = 5 if packed else 0
    positions = torch.cat([torch.arange(split), torch.arange(16 - split)])[None]
    documents = torch.tensor([[0] * split + [1] * (16 - split)]) if packed else None
    mine = [x.chunk(sp_size, 1)[mesh.sp.rank] for x in (ids, positions)]
    logits = model(*mine, documents)
    forward = mesh.sp.group.take("all_to_all")
    logits.sum().backward()
    backward = mesh.sp.group.take("all_to_all")
    whole = logits.detach()
    for axis, dim in ((mesh.sp, 1), (mesh.tp, 2)):
        whole = axis.group.all_gather(whole, dim) if axis.size > 1 else whole
    return whole, forward, backward


@functools.cache
def dense_logits(config, packed: bool):
    model, _ = tiny_model(config, lively_weights(config))
    ids = torch.arange(16).view(1, 16)
    parts = [ids[:, :5], ids[:, 5:]] if packed else [ids]
    return torch.cat([model(x, torch.arange(x.shape[1])[None]) for x in parts], 1).detach()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sp, tp", [(2, 1), (4, 1), (2, 2)])
def test_model_on_slices(sp, tp, packed):
    """Positions that restart with the slice (case 27), documents that see each other (case 13), or
    more than 4 all-to-alls a layer forward and 4 backward.
    """
    config = tiny_config()
    for logits, forward, backward in run_ranks(slices_of_a_model, sp * tp, sp, tp, config, packed):
        close(logits, dense_logits(config, packed), 1e-12)
        assert (forward, backward) == (4 * config.num_layers, 4 * config.num_layers)
