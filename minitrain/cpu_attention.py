"""Attention in bf16 on cpu: torch's forward pass, and a backward pass by matrix products over tiles
of the scores, the two 1.2 to 1.6 times as fast as torch's own (most with AMX), in memory that grows
with the sequence, not with its square.

Shapes: c rows x kv heads, R query heads of a kv head, S sequence, K head size, t queries of a tile,
Q = R x t of them, J keys up to the tile's last, E = K + 2.
"""

from __future__ import annotations

import math
from functools import lru_cache
from threading import get_ident

import torch
from torch import Tensor

from minitrain.kernels import slow_in_bf16
from minitrain.model import causal_attention, fused_attention

QUERIES = 256  # of a tile
SCORES = 2**22  # of a tile: short rows are taken several at a time
SHORTEST = 64  # tokens; below, the fused kernel is as fast


def cpu_attention(
    q_bSHK: Tensor, k_bSGK: Tensor, v_bSGK: Tensor, documents_bS: Tensor | None, scale: float
) -> Tensor:
    """model.causal_attention; in bf16 by tiled_attention, or float32_attention on a processor that
    does not multiply bf16.
    """
    attend = fused_attention
    if q_bSHK.dtype == torch.bfloat16:
        attend = float32_attention if slow_in_bf16(q_bSHK) else tiled_attention
    return causal_attention(q_bSHK, k_bSGK, v_bSGK, documents_bS, scale, attend)


@torch.compiler.disable  # a compiled block has the tiles between two graphs
def tiled_attention(q_bSHK: Tensor, k_bSGK: Tensor, v_bSGK: Tensor, scale: float) -> Tensor:
    """Causal attention of rows that are one document each; bf16. Returns o_bSHK.

    Source   as in flash attention (Dao 2023) no scores are kept for the backward pass: q, k, v, o
             and the logarithm of each query's sum of exponentials
    """
    if q_bSHK.shape[1] < SHORTEST:
        return fused_attention(q_bSHK, k_bSGK, v_bSGK, scale)
    return _TiledAttention.apply(q_bSHK, k_bSGK, v_bSGK, scale)


class _TiledAttention(torch.autograd.Function):
    """A product comes out rounded to bf16: a score of 20 is off by up to 0.06, its exponential by
    6 %. So the logarithm of the sum is subtracted inside the product, in float32: queries have two
    elements more, its high and its low bits, keys two of -1. What comes out is log p, and in the
    middle between p = 1 and p = 1 / keys it shall be near 0, and most exact: p is made `middle`
    times too large, and the gradient as much smaller, which rounds nothing, middle a power of two.
    Of the scale, k takes the power of two, which rounds nothing, and log p the rest, if any.
    """

    @staticmethod
    def forward(ctx, q_bSHK, k_bSGK, v_bSGK, scale):
        q, k, v = (x.transpose(1, 2) for x in (q_bSHK, k_bSGK, v_bSGK))
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        o_bHSK, logsum_bHS = attend(q, k, v, is_causal=True, scale=scale)
        o_bSHK = o_bHSK.transpose(1, 2)
        ctx.save_for_backward(q_bSHK, k_bSGK, v_bSGK, o_bSHK, logsum_bHS)
        ctx.scale = scale
        return o_bSHK

    @staticmethod
    def backward(ctx, grad_bSHK):
        q_bSHK, k_bSGK, v_bSGK, o_bSHK, logsum_bHS = ctx.saved_tensors
        (factor, rest), heads = _factors(ctx.scale), k_bSGK.shape[2]
        q_cRSK, grad_cRSK, o_cRSK = (_by_kv_head(x, heads) for x in (q_bSHK, grad_bSHK, o_bSHK))
        k_cSK, v_cSK = (_by_kv_head(x, heads)[:, 0] for x in (k_bSGK * factor, v_bSGK))
        logsum_cRS = logsum_bHS.unflatten(1, (heads, -1)).flatten(0, 1)
        minus_cS2 = -torch.ones_like(k_cSK[..., :2])
        k_cSE, v_cSE = (torch.cat([x, minus_cS2], -1) for x in (k_cSK, v_cSK))
        grad_q_cRSK = torch.empty_like(q_cRSK)
        grad_k_cSK, grad_v_cSK = (torch.zeros_like(k_cSK, dtype=torch.float32) for _ in "kv")
        space, more_space = _space(q_cRSK), _space(q_cRSK, 1)
        for c, at in _tiles(q_cRSK):
            keys, tile = slice(at.stop), (c, slice(None), at)
            middle = 2.0 ** round(math.log2(at.stop) / 2)
            R, t = q_cRSK[tile].shape[1:3]
            q_cQK, grad_cQK = q_cRSK[tile].flatten(1, 2), grad_cRSK[tile].flatten(1, 2) / middle
            logsum_cQ = logsum_cRS[tile].flatten(1, 2) - math.log(middle)
            dot_cQ = (grad_cQK.float() * o_cRSK[tile].flatten(1, 2)).sum(-1)
            p_cJQ = _product(k_cSE[c, keys], _augmented(q_cQK, logsum_cQ / rest), space)
            p_cJQ[:, at] += _later(R, t)
            _scaled_(p_cJQ, rest).exp_()
            grad_v_cSK[c, keys] += torch.bmm(p_cJQ, grad_cQK)
            p_cJQ *= _product(v_cSE[c, keys], _augmented(grad_cQK, dot_cQ), more_space)
            grad_k_cSK[c, keys] += torch.bmm(p_cJQ, q_cQK)  # p is now the scores' gradient
            grad_q_cQK = _scaled_(torch.bmm(p_cJQ.mT, k_cSK[c, keys]), rest)
            grad_q_cRSK[tile] = grad_q_cQK.unflatten(1, (R, t))
        grad_k_cSK *= rest * factor
        grads = (x.to(q_bSHK.dtype)[:, None] for x in (grad_k_cSK, grad_v_cSK))
        return *(_by_row(x, len(q_bSHK)) for x in (grad_q_cRSK, *grads)), None


@torch.compiler.disable
def float32_attention(q_bSHK: Tensor, k_bSGK: Tensor, v_bSGK: Tensor, scale: float) -> Tensor:
    """tiled_attention's signature; torch's own backward pass, with bf16's numbers in float32."""
    if q_bSHK.shape[1] != k_bSGK.shape[1]:  # one query sees all
        return fused_attention(q_bSHK, k_bSGK, v_bSGK, scale)
    return _Float32Attention.apply(q_bSHK, k_bSGK, v_bSGK, scale)


class _Float32Attention(_TiledAttention):
    @staticmethod
    def backward(ctx, grad_bSHK):
        *saved, logsum_bHS = ctx.saved_tensors
        tensors = [x.transpose(1, 2).float() for x in (grad_bSHK, *saved)]
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = backward(*tensors, logsum_bHS, 0.0, True, scale=ctx.scale)
        return *(x.transpose(1, 2).to(grad_bSHK.dtype) for x in grads), None


def _by_kv_head(x_bSHK: Tensor, kv_heads: int) -> Tensor:
    """x_cRSK; of k and v, R is 1."""
    return x_bSHK.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)


def _by_row(x_cRSK: Tensor, rows: int) -> Tensor:
    """x_bSHK, from _by_kv_head's form of it."""
    return x_cRSK.unflatten(0, (rows, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _tiles(q_cRSK: Tensor) -> list[tuple[slice, slice]]:
    """(rows x kv heads, positions of the queries) of each tile."""
    C, R, S, _ = q_cRSK.shape
    t = min(S, QUERIES)
    count = min(C, max(1, SCORES // (R * t * S)))
    starts = [(c, s) for c in range(0, C, count) for s in range(0, S, t)]
    return [(slice(c, c + count), slice(s, min(s + t, S))) for c, s in starts]


def _space(q_cRSK: Tensor, place: int = 0) -> Tensor:
    """Memory for the scores of a tile, kept: fresh memory would cost as much as the product."""
    _, R, S, _ = q_cRSK.shape
    return _kept_space(max(SCORES, R * min(S, QUERIES) * S), place, get_ident())


@lru_cache(2)
def _kept_space(numel: int, place: int, thread: int) -> Tensor:
    return torch.empty(numel, dtype=torch.bfloat16)


def _factors(scale: float) -> tuple[float, float]:
    """scale as a power of two, which rounds nothing, and the rest, from 1 to below 2."""
    factor = 2.0 ** math.floor(math.log2(scale))
    return factor, scale / factor


def _product(a_cMN: Tensor, b_cNL: Tensor, space: Tensor) -> Tensor:
    shape = *a_cMN.shape[:2], b_cNL.shape[2]
    return torch.bmm(a_cMN, b_cNL, out=space[: shape[0] * shape[1] * shape[2]].view(shape))


def _scaled_(x: Tensor, factor: float) -> Tensor:
    """x * factor in place."""
    return x if factor == 1 else x.mul_(factor)


@lru_cache(8)
def _later(R: int, t: int) -> Tensor:
    """-inf where the key is later than the query, else 0: [t keys, Q]."""
    return torch.full((t, t), -torch.inf, dtype=torch.bfloat16).tril_(-1).repeat(1, R)


def _augmented(x_cQK: Tensor, number_cQ: Tensor) -> Tensor:
    """[c, E, Q]: x transposed, and below it the number's high bits and its low ones."""
    high_cQ = number_cQ.to(x_cQK.dtype)
    low_cQ = (number_cQ - high_cQ).to(x_cQK.dtype)
    return torch.cat([x_cQK.mT, high_cQ[:, None], low_cQ[:, None]], 1)
