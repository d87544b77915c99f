"""Functions whose backward pass is written out, so that it keeps their inputs and nothing else.

Autograd would keep every step between: for the norm four times as much, for SwiGLU a third more.
Shapes: any, the last dimension D model or F feed-forward; N vectors, n of them in a part; a layer's
weight [O out, I in].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PART = 1024  # vectors
# False on a processor with AVX2 alone, and where torch is built without oneDNN.
CPU_MULTIPLIES_BF16 = (
    torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
)


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for norms, softmax and angles: float32, or float64 when checking in float64."""
    return torch.promote_types(dtype, torch.float32)


def _in_parts(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> list[Tensor]:
    """function(vectors of each tensor), on cpu PART at a time: what is between them stays small.
    Returns its results, joined along dim 0.
    """
    flat = [x.flatten(0, -2) for x in tensors]
    if flat[0].device.type != "cpu" or len(flat[0]) <= PART or torch.compiler.is_compiling():
        return list(function(*flat))
    parts = [function(*part) for part in zip(*(x.split(PART) for x in flat))]
    return [torch.cat(results) for results in zip(*parts)]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_D, eps):
        def norm(x_nD):
            exact_nD = x_nD.to(exact_dtype(x.dtype), copy=True)
            scale_n1 = torch.rsqrt(exact_nD.square().mean(-1, keepdim=True) + eps)
            return exact_nD.mul_(scale_n1).to(x.dtype).mul_(weight_D), scale_n1

        y_ND, scale_N1 = _in_parts(norm, x)
        ctx.save_for_backward(x, weight_D, scale_N1)
        return y_ND.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight_D, scale_N1 = ctx.saved_tensors
        exact, wants_weight = scale_N1.dtype, ctx.needs_input_grad[1]
        exact_weight_D = weight_D.to(exact)

        def grads(x_nD, scale_n1, grad_nD):
            normed_nD = x_nD.to(exact, copy=True).mul_(scale_n1)
            grad_nD = grad_nD.to(exact, copy=True)
            terms_nD = grad_nD * normed_nD
            along_n1 = torch.mv(terms_nD, exact_weight_D / len(weight_D))[:, None]
            grad_nD.mul_(exact_weight_D).addcmul_(normed_nD, along_n1, value=-1)
            grad_x_nD = grad_nD.mul_(scale_n1).to(x.dtype)
            # a frozen weight needs none
            terms = [terms_nD.sum(0, keepdim=True)] if wants_weight else []
            return grad_x_nD, *terms

        grad_x_ND, *terms_sD = _in_parts(grads, x, scale_N1, grad)
        grad_weight_D = terms_sD[0].sum(0).to(weight_D.dtype) if wants_weight else None
        return grad_x_ND.view_as(x), grad_weight_D, None


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Divide each vector by its root mean square, in at least float32, and scale by the weight.

    Kept for the backward pass: x, and a number for each vector.
    """
    return _RMSNorm.apply(x, weight_D, eps)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020). Kept for the backward pass: both inputs."""
    return _SwiGLU.apply(gate, up)


def slow_in_bf16(x: Tensor) -> bool:
    """Whether products of x had better be made in float32: torch has no kernel for bf16 on this
    processor, and its loops take 7 to 90 times as long (AVX2).
    """
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not CPU_MULTIPLIES_BF16


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b of two matrices, summed in at least float32, rounded once to their dtype."""
    if not slow_in_bf16(a):
        return torch.mm(a, b, out=out)
    y = torch.mm(a.float(), b.float())
    return y.to(a.dtype) if out is None else out.copy_(y)


class _Linear(torch.autograd.Function):
    """By product: float32 copies are made anew for each."""

    @staticmethod
    def forward(ctx, x_NI, weight_OI):
        ctx.save_for_backward(x_NI, weight_OI)
        return product(x_NI, weight_OI.T)

    @staticmethod
    def backward(ctx, grad_NO):
        x_NI, weight_OI = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        grad_x_NI = product(grad_NO, weight_OI) if wants_x else None
        return grad_x_NI, product(grad_NO.T, x_NI) if wants_weight else None


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. Kept for the backward pass: x."""
    if not slow_in_bf16(x):
        return F.linear(x, weight_OI, bias_O)
    y = _Linear.apply(x.flatten(0, -2), weight_OI).unflatten(0, x.shape[:-1])
    return y if bias_O is None else y + bias_O


class Linear(nn.Linear):
    """torch's, by linear."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
