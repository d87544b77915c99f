"""Summed cross-entropy over a split, padded vocabulary, tile by tile, against F.cross_entropy."""

import pytest
import torch
import torch.nn.functional as F
from conftest import ONE, close
from torch import Tensor

from minitrain.data_sharder import Batch
from minitrain.launch import run_ranks
from minitrain.loss_reducer import count_tokens, cross_entropy_sum, head_cross_entropy_sum
from minitrain.mesh import init_mesh
from minitrain.tensor_parallel import EnterRegion, share

LABELS = torch.tensor([4, 5, -100, 0, 9, -100])


def drawn(*shape, seed: int = 1, dtype=torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def dense(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """torch's own loss and gradient."""
    logits = logits.detach().clone().requires_grad_()
    loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    loss.backward()
    return loss.detach(), logits.grad


def split_over_tp(logits: Tensor, labels: Tensor, pad_value: float, smoothing: float):
    """Loss and gradient of this rank's logits, padding filled with pad_value."""
    tp = init_mesh(1, torch.distributed.get_world_size()).tp
    vocab = logits.shape[1]
    padded = F.pad(logits, (0, -vocab % tp.size), value=pad_value)
    mine = share(padded, tp, 1).requires_grad_()
    before = mine.detach().clone()
    loss = cross_entropy_sum(mine, labels, tp, vocab_size=vocab, label_smoothing=smoothing)
    loss.backward()
    assert torch.equal(mine.detach(), before), "the caller's logits were changed"
    whole = tp.group.all_gather(mine.grad, 1) if tp.size > 1 else mine.grad
    return loss.detach(), whole


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocab", [10, 11, 13])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equals_torchs_cross_entropy(tp, vocab, smoothing):
    """A maximum or sum of one rank's vocabulary, a label on another rank, smoothing over padding,
    or a padded row that takes probability (9, 10).
    """
    logits = drawn(6, vocab)
    want, want_grad = dense(logits, LABELS, smoothing)
    for loss, grad in run_ranks(split_over_tp, tp, logits, LABELS, 5.0, smoothing):
        close(loss, want)
        close(grad[:, :vocab], want_grad)
        assert not grad[:, vocab:].any()  # padding: exactly zero
        assert not grad[LABELS == -100].any()  # ignored tokens: exactly zero


@pytest.mark.parametrize("tp", [1, 2])
def test_no_label_at_all_is_zero_with_zero_gradients(tp):
    """NaN from a division by the number of labels (2, 9)."""
    for loss, grad in run_ranks(split_over_tp, tp, drawn(6, 10), LABELS * 0 - 100, 0.0, 0.1):
        assert loss.item() == 0 and not grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("tp", [1, 2])
def test_large_logits_stay_finite(tp, dtype):
    """exp overflows without the maximum subtracted, of all ranks (case 9)."""
    logits = torch.full((6, 10), -1e4, dtype=dtype)
    logits[:, 3] = 1e4
    labels = torch.full((6,), 3)
    for loss, grad in run_ranks(split_over_tp, tp, logits, labels, 0.0, 0.0):
        assert loss.item() == 0 and not grad.any()
        assert loss.dtype == torch.promote_types(dtype, torch.float32) and grad.dtype == dtype


def test_bf16_logits_are_summed_in_float32():
    """The softmax of 4096 logits in bf16 is off by percents."""
    logits = drawn(8, 4096, dtype=torch.float32).to(torch.bfloat16)
    labels = torch.arange(8)
    loss = cross_entropy_sum(logits, labels, ONE)
    want = F.cross_entropy(logits.double(), labels, reduction="sum")
    assert loss.dtype == torch.float32 and abs(loss.item() / want.item() - 1) < 1e-6


def test_another_ignore_index():
    """ignore_index is not what was asked for, or counts as token 0."""
    logits, labels = drawn(4, 7), torch.tensor([0, 3, 0, 6])
    want = F.cross_entropy(logits, labels, reduction="sum", ignore_index=0)
    close(cross_entropy_sum(logits, labels, ONE, ignore_index=0), want)


def test_sums_are_divided_once_by_all_tokens():
    """The mean of micro-batch means: 5.0 where 3.2 is right (case 1)."""

    def logits_with_losses(loss: float, count: int) -> Tensor:
        """Two entries: the label's probability is exp(-loss)."""
        odds = torch.tensor(-loss, dtype=torch.float64)
        return torch.stack([odds - torch.log1p(-odds.exp()), odds * 0]).repeat(count, 1)

    parts = [logits_with_losses(2.0, 4), logits_with_losses(8.0, 1)]
    for part in parts:
        part.requires_grad_()
    labels = [torch.zeros(1, len(part), dtype=torch.int64) for part in parts]
    batches = [Batch(x, x, x) for x in labels]
    tokens = count_tokens(batches, ONE)
    losses = [cross_entropy_sum(part, x[0], ONE) for part, x in zip(parts, labels)]
    mean = sum(losses) / tokens
    assert abs(mean.item() - 3.2) < 1e-12
    mean.backward()
    want, want_grad = dense(torch.cat([part.detach() for part in parts]), torch.cat(labels, 1)[0])
    close(torch.cat([part.grad for part in parts]), want_grad / 5)
    assert abs(want.item() / 5 - 3.2) < 1e-12


def counted(dp: int, sp: int):
    mesh = init_mesh(sp, 1)
    labels = torch.full((2, 4), -100)
    labels[:, : mesh.dp_sp.rank] = 1  # the first rank has no loss token at all
    batches = [Batch(labels[row : row + 1], labels[row : row + 1], labels) for row in range(2)]
    assert mesh.dp.size == dp
    return count_tokens(batches, mesh.dp_sp).tolist()


@pytest.mark.parametrize("dp, sp", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_count_is_global(dp, sp):
    """Tokens counted on one rank, over dp alone, or on one micro-batch (1, 2, 6, 12)."""
    want = sum(2 * rank for rank in range(dp * sp))
    assert run_ranks(counted, dp * sp, dp, sp) == [[want]] * (dp * sp)


def head_on_rank(hidden, weight, labels, tile: int, smoothing: float, split: int):
    tp = init_mesh(1, split).tp
    leaf = hidden.clone().requires_grad_()
    mine = share(weight, tp, 0).requires_grad_()
    loss = head_cross_entropy_sum(
        EnterRegion(tp)(leaf),
        mine,
        labels,
        tp,
        tile_tokens=tile,
        vocab_size=weight.shape[0],
        label_smoothing=smoothing,
    )
    (loss * 0.25).backward()
    whole = tp.group.all_gather(mine.grad, 0) if tp.size > 1 else mine.grad
    return loss.detach(), leaf.grad, whole


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tile", [0, 1, 3, 4, 10, 16])
def test_tiles_change_nothing(tile, tp):
    """A tile's gradient lost, the last short tile divided as a whole one, or NaN from a tile
    without labels (case 7).
    """
    hidden, weight = drawn(2, 5, 6), drawn(11, 6, seed=2)
    labels = torch.tensor([[1, 2, -100, -100, -100], [-100, 7, 10, 0, 5]])
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    logits = (leaves[0] @ leaves[1].T).flatten(0, 1)
    want = F.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=0.1)
    (want * 0.25).backward()
    for loss, grad_hidden, grad in run_ranks(
        head_on_rank, tp, hidden, weight, labels, tile, 0.1, tp
    ):
        close(loss, want.detach())
        close(grad_hidden, leaves[0].grad)
        close(grad[:11], leaves[1].grad)
        assert not grad[11:].any()


def test_frozen_head_or_hidden_gets_no_gradient():
    """A frozen head's gradient is made, or stops hidden's (LoRA)."""
    hidden, weight, labels = drawn(10, 6), drawn(11, 6, seed=2), torch.arange(10)
    for frozen in (0, 1):
        inputs = [hidden.clone(), weight.clone()]
        inputs[1 - frozen].requires_grad_()
        head_cross_entropy_sum(*inputs, labels, ONE, tile_tokens=4).backward()
        both = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        F.cross_entropy(both[0] @ both[1].T, labels, reduction="sum").backward()
        assert inputs[frozen].grad is None
        close(inputs[1 - frozen].grad, both[1 - frozen].grad)


def test_evaluation_makes_no_gradient():
    """Under no_grad the fused head still makes gradients, and their memory."""
    hidden, weight = drawn(10, 6).requires_grad_(), drawn(11, 6, seed=2).requires_grad_()
    with torch.no_grad():
        loss = head_cross_entropy_sum(hidden, weight, torch.arange(10), ONE, tile_tokens=4)
    want = F.cross_entropy(hidden @ weight.T, torch.arange(10), reduction="sum").detach()
    assert not loss.requires_grad
    close(loss, want)


def test_bf16_head_gradient_is_summed_in_float32():
    """1,024 tiles' gradients summed in bf16 stop growing (case 30)."""
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(1024, dtype=torch.int64)
    head_cross_entropy_sum(hidden, weight, labels, ONE, tile_tokens=1).backward()
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.flatten().tolist() == [-512.0, 512.0]
