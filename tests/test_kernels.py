"""Backward passes that are written out, against autograd's own."""

from functools import partial

import pytest
import torch
from conftest import close, lively_weights, tiny_config, tiny_model, uneven_rows
from torch.utils._python_dispatch import TorchDispatchMode

from minitrain import kernels
from minitrain.data_sharder import shard_batch
from minitrain.kernels import linear, rms_norm, swiglu
from minitrain.lora import LoRAConfig, add_lora
from minitrain.loss_reducer import head_cross_entropy_sum
from minitrain.memory import save_memory
from minitrain.mesh import Axis, Mesh
from minitrain.tensor_parallel import (
    ColumnParallelLinear,
    ReplicatedHeadsLinear,
    RowParallelLinear,
)


def draw(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    return x.requires_grad_()


def plain_norm(x, weight, eps):
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return exact.to(x.dtype) * weight


@pytest.mark.parametrize("shape", [(2, 3, 8), (1, 5, 2, 4)])
def test_norm_by_finite_differences(shape):
    """Red when a term of the norm's gradient is wrong or missing."""
    assert torch.autograd.gradcheck(
        lambda x, w: rms_norm(x, w, 1e-2), (draw(*shape), draw(shape[-1]))
    )


def test_norm_in_parts(monkeypatch):
    """Red when a part of the vectors is lost, or the weight's gradient is that of one part."""
    monkeypatch.setattr(kernels, "PART", 2)
    test_norm_by_finite_differences((1, 5, 2, 4))


def test_swiglu_by_finite_differences():
    """Red when a term of SwiGLU's gradient is wrong."""
    assert torch.autograd.gradcheck(swiglu, (draw(2, 3, 8), draw(2, 3, 8, seed=1)))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_low_precision_is_as_good_as_autograds(dtype, tolerance):
    """Red when a sum is taken in bf16: over 4,096 tokens it would be off by far more."""
    x, w, up = (
        draw(4096, 64, dtype=dtype),
        draw(64, dtype=dtype),
        draw(4096, 64, dtype=dtype, seed=2),
    )

    def run(norm, act, *inputs):
        out = act(norm(inputs[0], inputs[1], 1e-5), inputs[2])
        return out, *torch.autograd.grad(out.float().square().sum(), inputs)

    mine = run(rms_norm, swiglu, x, w, up)
    exact = [t.detach().double().requires_grad_() for t in (x, w, up)]
    want = run(plain_norm, lambda g, u: torch.nn.functional.silu(g) * u, *exact)
    for got, wanted in zip(mine, want):
        assert got.dtype == dtype
        close(got.double(), wanted, tolerance)


def test_frozen_weight_gets_no_gradient():
    """Red when the norm makes a gradient that nobody asked for."""
    x, weight = draw(2, 8), draw(8).detach()
    rms_norm(x, weight, 1e-5).sum().backward()
    assert x.grad is not None and weight.grad is None


@pytest.mark.parametrize("bias", [False, True])
def test_linear_on_a_processor_without_bf16(bias, monkeypatch):
    """Red when a gradient is another's, or a number is rounded between the product's sums."""
    monkeypatch.setattr(kernels, "CPU_MULTIPLIES_BF16", False)
    inputs = [draw(2, 300, 48, dtype=torch.bfloat16), draw(24, 48, dtype=torch.bfloat16, seed=1)]
    inputs += [draw(24, dtype=torch.bfloat16, seed=2)] * bias
    grad = draw(2, 300, 24, dtype=torch.bfloat16, seed=3).detach()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.dtype) or x, lambda x: x):
        y = linear(*inputs)
    assert kept == [torch.bfloat16] * 2  # no copies in float32
    exact = [x.detach().float().requires_grad_() for x in inputs]
    exact_y = torch.nn.functional.linear(*exact)
    want = torch.autograd.grad(exact_y, exact, grad.float())
    for got, wanted in zip([y, *torch.autograd.grad(y, inputs, grad)], [exact_y, *want]):
        assert got.dtype == torch.bfloat16
        close(got.float(), wanted, 2**-7)


class BF16Products(TorchDispatchMode):
    """Notes what multiplies matrices of bf16."""

    NAMES = ("mm", "bmm", "addmm", "baddbmm", "mv", "flash_attention_for_cpu_backward")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        low = any(isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 for x in args)
        if low and func.overloadpacket.__name__.endswith(self.NAMES):
            self.found.append(func)
        return func(*args, **kwargs or {})


def forward_and_backward(lora: bool, checkpointing: str, tile_tokens: int):
    config = tiny_config(qkv_bias=True, tie_embeddings=False)
    model, spec = tiny_model(config, lively_weights(config), dtype=torch.bfloat16)
    if lora:
        add_lora(model, LoRAConfig(rank=2), Mesh(), spec)
    save_memory(model, Mesh().device, checkpointing, tile_tokens)
    batch = shard_batch(uneven_rows(packed=True), Mesh())
    hidden = model.hidden(batch.input_ids, batch.position_ids, batch.documents)
    settings = {"tile_tokens": 16, "vocab_size": config.vocab_size}
    loss = head_cross_entropy_sum(
        hidden, model.lm_head.weight, batch.labels, Axis("tp"), **settings
    )
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("memory", [("none", 0), ("full", 4)])
def test_no_product_is_left_in_bf16_where_that_is_slow(lora, memory, monkeypatch):
    """Red when a layer, the head, an adapter or attention is left to torch's loops: 80 times as
    long, on a processor with AVX2 alone.
    """
    monkeypatch.setattr(kernels, "CPU_MULTIPLIES_BF16", True)
    want, want_grads = forward_and_backward(lora, *memory)
    monkeypatch.setattr(kernels, "CPU_MULTIPLIES_BF16", False)
    with BF16Products() as products:
        loss, grads = forward_and_backward(lora, *memory)
    assert not products.found
    assert abs(loss / want - 1) < 1e-2
    assert len(grads) == len(want_grads)
    for got, wanted in zip(grads, want_grads):
        close(got.float(), wanted.float(), 0.1)


@pytest.mark.parametrize(
    "layer",
    [ColumnParallelLinear, RowParallelLinear, partial(ReplicatedHeadsLinear, num_heads=1)],
)
def test_nor_in_a_layer_split_over_tp(layer, monkeypatch):
    """Red when such a layer multiplies in bf16 where that is slow."""
    monkeypatch.setattr(kernels, "CPU_MULTIPLIES_BF16", False)
    split = layer(torch.nn.Linear(16, 8, dtype=torch.bfloat16), Axis("tp"))
    with BF16Products() as products:
        split(draw(2, 3, 16, dtype=torch.bfloat16)).sum().backward()
    assert not products.found
