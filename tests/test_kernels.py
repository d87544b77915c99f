"""Backward passes that are written out, against autograd's own."""

import pytest
import torch
from conftest import close

from minitrain import kernels
from minitrain.kernels import rms_norm, swiglu


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
