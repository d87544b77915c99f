"""Each layer that holds a share against the whole layer: outputs and every gradient in float64."""

import pytest
import torch
from conftest import ONE, close
from torch import nn

from minitrain.collectives import all_gather
from minitrain.launch import run_ranks
from minitrain.mesh import Axis, init_mesh
from minitrain.model import RMSNorm
from minitrain.tensor_parallel import (
    ColumnParallelLinear,
    EnterRegion,
    PartialGradientNorm,
    ReplicatedHeadsLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    share,
)

B, S, D = 2, 8, 12
TP = pytest.mark.parametrize("tp", [1, 2, 4])
SPLIT = pytest.mark.parametrize("split", [False, True])


def drawn(*shape, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def filled(module: nn.Module) -> nn.Module:
    """The same float64 weights on every rank."""
    module = module.double()
    for place, param in enumerate(module.parameters()):
        param.data = drawn(*param.shape, seed=10 + place)
    return module


def my_slice(whole: torch.Tensor, tp: Axis, dim: int) -> torch.Tensor:
    """This rank's slice as a leaf of its own."""
    return whole.detach().chunk(tp.size, dim)[tp.rank].clone().requires_grad_()


def leaf(whole: torch.Tensor) -> torch.Tensor:
    return whole.detach().clone().requires_grad_()


def shares_close(module: nn.Module, dense: nn.Module, tp: Axis, dims: dict[str, int | None]):
    """Every gradient is this rank's slice of the dense one, or all of it where dims says None."""
    for name, param in module.named_parameters():
        want = dict(dense.named_parameters())[name].grad
        close(param.grad, want if dims[name] is None else share(want, tp, dims[name]))


def column(bias: bool, copied: bool, width: int):
    tp = init_mesh(1, torch.distributed.get_world_size()).tp
    dense = filled(nn.Linear(D, width, bias=bias))
    x, w = leaf(drawn(B, S, D)), drawn(B, S, width, seed=2)
    y = dense(x)
    (y.sin() * w).sum().backward()

    layer, x_mine = ColumnParallelLinear(dense, tp, input_is_copied=copied), leaf(x)
    y_mine = layer(EnterRegion(tp)(x_mine) if copied else x_mine)
    (y_mine.sin() * share(w, tp, 2)).sum().backward()
    close(all_gather(y_mine.detach(), tp, 2)[..., :width], y.detach())
    close(x_mine.grad, x.grad)
    shares_close(layer, dense, tp, {"weight": 0, "bias": 0})


@TP
@pytest.mark.parametrize(
    "bias, copied, width", [(False, False, 8), (True, False, 8), (True, True, 8), (True, True, 11)]
)
def test_column_parallel_linear(tp, bias, copied, width):
    """The input's gradient is one rank's part, or summed twice; bias or padding cut wrong."""
    run_ranks(column, tp, bias, copied, width)


def row(bias: bool, split: bool):
    tp = init_mesh(1, torch.distributed.get_world_size()).tp
    dense = filled(nn.Linear(8, D, bias=bias))
    x, w = leaf(drawn(B, S, 8)), drawn(B, S, D, seed=2)
    y = dense(x)
    (y.sin() * w).sum().backward()

    layer, x_mine = RowParallelLinear(dense, tp, split), my_slice(x, tp, 2)
    y_mine = layer(x_mine)
    want, w_mine = (my_slice(t, tp, 1).detach() if split else t for t in (y.detach(), w))
    (y_mine.sin() * w_mine).sum().backward()
    close(y_mine.detach(), want)
    close(x_mine.grad, my_slice(x.grad, tp, 2).detach())
    shares_close(layer, dense, tp, {"weight": 1, "bias": None})


@TP
@SPLIT
@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_linear(tp, bias, split):
    """The bias is added once a rank, or under split activations gets one rank's gradient only."""
    run_ranks(row, tp, bias, split)


def two_layers(split: bool):
    """EnterRegion, column, row: what every block does, input and output split or whole."""
    tp = init_mesh(1, torch.distributed.get_world_size()).tp
    up, down = filled(nn.Linear(D, 8)), filled(nn.Linear(8, D))
    x, w = leaf(drawn(B, S, D)), drawn(B, S, D, seed=2)
    y = x + down(up(x).sin())
    (y * w).sum().backward()

    column = ColumnParallelLinear(up, tp, input_is_copied=True)
    row, enter = RowParallelLinear(down, tp, split), EnterRegion(tp, split)
    x_mine = my_slice(x, tp, 1) if split else leaf(x)
    y_mine = x_mine + row(column(enter(x_mine)).sin())
    cut = (lambda t: my_slice(t, tp, 1).detach()) if split else (lambda t: t)
    (y_mine * cut(w)).sum().backward()
    close(y_mine.detach(), cut(y.detach()))
    close(x_mine.grad, cut(x.grad))
    shares_close(column, up, tp, {"weight": 0, "bias": 0})
    shares_close(row, down, tp, {"weight": 1, "bias": None})


@TP
@SPLIT
def test_region_of_column_and_row(tp, split):
    """A region's input gets one rank's gradient, or its output is summed twice."""
    run_ranks(two_layers, tp, split)


def embedding(vocab: int, split: bool):
    tp = init_mesh(1, torch.distributed.get_world_size()).tp
    dense = filled(nn.Embedding(vocab, D))
    generator = torch.Generator().manual_seed(4)
    ids, w = torch.randint(0, vocab, (B, S), generator=generator), drawn(B, S, D, seed=2)
    ids[0, 0], ids[0, 1] = 0, vocab - 1
    y = dense(ids)
    (y.sin() * w).sum().backward()

    layer = VocabParallelEmbedding(dense, tp, split)
    y_mine = layer(ids)
    cut = (lambda t: my_slice(t, tp, 1).detach()) if split else (lambda t: t)
    (y_mine.sin() * cut(w)).sum().backward()
    close(y_mine.detach(), cut(y.detach()))
    shares_close(layer, dense, tp, {"weight": 0})
    return layer.weight.shape[0]


@TP
@SPLIT
@pytest.mark.parametrize("vocab", [8, 11, 5])
def test_vocab_parallel_embedding(tp, split, vocab):
    """Ids of other ranks look up a row, or a vocabulary that tp does not divide loses its end."""
    assert run_ranks(embedding, tp, vocab, split) == [-(-vocab // tp)] * tp


def replicated_heads(heads: int, bias: bool):
    tp = init_mesh(1, torch.distributed.get_world_size()).tp
    dense = filled(nn.Linear(D, heads * 4, bias=bias))
    x, w = leaf(drawn(B, S, D)), drawn(B, S, tp.size, 4, seed=2)
    y = dense(x).unflatten(-1, (heads, 4))
    of_rank = y.repeat_interleave(tp.size // heads, 2)  # the kv head of each rank's query heads
    (of_rank.sin() * w).sum().backward()

    layer, x_mine = ReplicatedHeadsLinear(dense, tp, heads), leaf(x)
    y_mine = layer(EnterRegion(tp)(x_mine))
    (y_mine.sin() * w[:, :, tp.rank]).sum().backward()
    close(y_mine.detach(), of_rank[:, :, tp.rank].detach())
    close(x_mine.grad, x.grad)
    shares_close(layer, dense, tp, {"weight": None, "bias": None})
    return [param.grad for param in layer.parameters()]


@pytest.mark.parametrize("heads, tp", [(1, 2), (2, 4), (1, 4)])
@pytest.mark.parametrize("bias", [False, True])
def test_replicated_kv_heads(heads, tp, bias):
    """A rank takes another head than its queries', or replicas' gradients differ (case 26)."""
    ranks = run_ranks(replicated_heads, tp, heads, bias)
    for grads in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads, ranks[0]))


def norm(dim: int):
    """A norm that sees this rank's heads (dim 2) or positions (dim 1)."""
    tp = init_mesh(1, torch.distributed.get_world_size()).tp
    dense = filled(RMSNorm(D, 1e-5))
    x, w = leaf(drawn(B, S, 4, D)), drawn(B, S, 4, D, seed=2)
    (dense(x).sin() * w).sum().backward()

    layer, x_mine = PartialGradientNorm(dense, tp), my_slice(x, tp, dim)
    y_mine = layer(x_mine)
    (y_mine.sin() * my_slice(w, tp, dim).detach()).sum().backward()
    close(y_mine.detach(), my_slice(dense(x), tp, dim).detach())
    close(x_mine.grad, my_slice(x.grad, tp, dim).detach())
    shares_close(layer, dense, tp, {"weight": None})


@TP
@pytest.mark.parametrize("dim", [1, 2])
def test_partial_gradient_norm(tp, dim):
    """A q/k norm's weight gets the gradient of this rank's heads only (case 25)."""
    run_ranks(norm, tp, dim)


@pytest.mark.parametrize("size, sizes", [(8, [2, 2, 2, 2]), (11, [3, 3, 3, 2]), (5, [2, 2, 1, 0])])
@pytest.mark.parametrize("dim", [0, 1])
def test_share_pads_the_last_ranks_with_zeros(size, sizes, dim):
    """A dimension that tp does not divide: rows lost, repeated, or padded with leftovers."""
    whole = torch.arange(1.0, 1 + size * 3).view(size, 3).movedim(0, dim)
    parts = [share(whole, Axis("tp", 4, rank), dim) for rank in range(4)]
    assert {part.shape[dim] for part in parts} == {-(-size // 4)}
    assert torch.equal(torch.cat(parts, dim).narrow(dim, 0, size), whole)
    filled = [int((part.narrow(1 - dim, 0, 1) != 0).sum()) for part in parts]
    assert filled == sizes
    assert torch.equal(share(whole, ONE, dim), whole)
