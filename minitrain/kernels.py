"""Functions whose backward pass is written out, so that it keeps their inputs and nothing else.

Autograd would keep every step between: for the norm four times as much, for SwiGLU a third more.
Shapes: any, the last dimension D model or F feed-forward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for norms, softmax and angles: float32, or float64 when checking in float64."""
    return torch.promote_types(dtype, torch.float32)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_D, eps):
        exact = x.to(exact_dtype(x.dtype))
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight_D, scale)
        return (exact * scale).to(x.dtype) * weight_D

    @staticmethod
    def backward(ctx, grad):
        x, weight_D, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        grad_x = grad_weight_D = None
        if ctx.needs_input_grad[1]:
            terms = grad.to(scale.dtype) * normed.to(x.dtype)
            grad_weight_D = terms.flatten(0, -2).sum(0).to(weight_D.dtype)
        if ctx.needs_input_grad[0]:
            grad_normed = (grad * weight_D).to(scale.dtype)
            along = (grad_normed * normed).mean(-1, keepdim=True)
            grad_x = (grad_normed.sub_(normed.mul_(along)).mul_(scale)).to(x.dtype)
        return grad_x, grad_weight_D, None


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
