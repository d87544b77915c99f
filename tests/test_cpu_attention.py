"""bf16 attention by tiles on cpu, against float64, beside torch's fused kernel."""

import pytest
import torch

from minitrain import cpu_attention as module
from minitrain.cpu_attention import cpu_attention, float32_attention, tiled_attention
from minitrain.model import causal_attention, fused_attention


def tensors(rows, length, heads, kv_heads, size, spread=2.0):
    """q, k, v and a gradient of the output, in bf16."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(rows, length, n, size) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    return [x.bfloat16() for x in (spread * q, k, v, grad)]


def results(attend, q, k, v, grad, scale=None):
    """Output and the gradients of q, k and v."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attend(*inputs, scale or q.shape[-1] ** -0.5)
    return [o.detach(), *torch.autograd.grad(o, inputs, grad)]


def errors(found, exact):
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact)]


@pytest.mark.parametrize(
    ("rows", "length", "heads", "kv_heads", "size"),
    [
        (1, 64, 1, 1, 16),
        (2, 65, 4, 4, 32),
        (3, 255, 6, 2, 64),
        (2, 256, 4, 1, 96),
        (1, 257, 9, 3, 64),
        (2, 700, 2, 1, 128),
    ],
)
@pytest.mark.parametrize(("spread", "offset"), [(0.5, 0), (2, 0), (12, 0), (2, 10)])
@pytest.mark.parametrize("attend", [tiled_attention, float32_attention])
def test_as_exact_as_the_fused_kernel(rows, length, heads, kv_heads, size, spread, offset, attend):
    """A score rounded before its largest is taken off (red at spread 12), a lost dot product
    (red with an offset), a wrong tile border, kv pairing, scale or mask.
    """
    x = tensors(rows, length, heads, kv_heads, size, spread)
    x[2] += offset
    exact = results(fused_attention, *(t.double() for t in x))
    fused = errors(results(fused_attention, *x), exact)
    found = errors(results(attend, *x), exact)
    assert all(ours < 2.6 * theirs + 5e-4 for ours, theirs in zip(found, fused)), (found, fused)


def test_several_tiles_of_heads(monkeypatch):
    """A slip in the slices of heads: tiles of one head at a time must give the same numbers."""
    x = tensors(3, 300, 4, 2, 32)
    want = results(tiled_attention, *x)
    monkeypatch.setattr(module, "SCORES", 1)
    for a, b in zip(results(tiled_attention, *x), want):
        assert torch.equal(a, b)


def test_later_tokens_change_nothing():
    """A mask that lets one later key through."""
    q, k, v, _ = tensors(1, 400, 3, 3, 32)
    o = tiled_attention(q, k, v, 0.2)
    k[:, 300:], v[:, 300:] = 50.0, -7.0
    assert torch.equal(tiled_attention(q, k, v, 0.2)[:, :300], o[:, :300])


def test_packed_rows():
    """Attention over a document's border, or documents too short for a tile taken wrongly."""
    q, k, v, _ = tensors(2, 330, 4, 2, 32)
    lengths = [[5, 70, 200, 55], [64, 266]]
    documents = torch.stack(
        [torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths]
    )
    packed = cpu_attention(q, k, v, documents, 0.2)
    for row, sizes in enumerate(lengths):
        parts = zip(*(x[row : row + 1].split(sizes, 1) for x in (q, k, v)))
        alone = torch.cat([cpu_attention(*part, None, 0.2) for part in parts], 1)
        assert torch.equal(packed[row : row + 1], alone)


def test_rows_of_one_document_are_one_call():
    """Each row by itself, and its output copied twice, though no row holds a second document."""
    q, k, v, _ = tensors(2, 64, 2, 2, 16)
    calls = []

    def attend(*inputs):
        calls.append(len(inputs[0]))
        return fused_attention(*inputs)

    documents = torch.tensor([[3], [5]]).expand(2, 64)
    assert torch.equal(
        causal_attention(q, k, v, documents, 0.3, attend), fused_attention(q, k, v, 0.3)
    )
    assert calls == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_precisions_are_left_to_the_fused_kernel(dtype):
    """Scores in bf16 for a model in float32."""
    q, k, v, _ = (x.to(dtype) for x in tensors(1, 80, 2, 2, 16))
    want = causal_attention(q, k, v, None, 0.25)
    assert torch.equal(cpu_attention(q, k, v, None, 0.25), want)


def test_memory_does_not_grow_with_the_square():
    """Scores of all queries at once; or fresh memory for each call."""
    space = [module._space(torch.empty(8, 3, n, 64, device="meta")).numel() for n in (2**15, 2**17)]
    assert space[1] <= 4 * space[0] and space[0] <= 3 * 256 * 2**15
