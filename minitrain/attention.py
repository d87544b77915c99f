"""Attention cores for devices that compile: every shape is fixed, whatever documents a row holds.

They take the place of model.causal_attention, which reads the documents' lengths on the host.
Shapes: B rows, S sequence, H query heads, G kv heads, K head size.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 512  # query positions that are masked at a time: b x TILE x S bools


def fixed_shape_attention(core: Callable[..., Tensor], nxd=None) -> Callable[..., Tensor]:
    """An attention core for device tensors: masks for packed rows, else NKI's kernel or core.

    core      for rows of one document: model.causal_attention
    nxd       neuronx-distributed, for its nki_flash_attn_func: one document a row, rows of a
              multiple of 2,048 tokens, heads of at most 128 elements. It takes q, k, v as
              [b, H, K, S], with as many k and v as q heads, and returns o_bHSK. Written, never run
    """
    cores = int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", 1))  # physical ones in a logical one

    def attend(
        q_bSHK: Tensor, k_bSGK: Tensor, v_bSGK: Tensor, documents_bS: Tensor | None, scale: float
    ) -> Tensor:
        length, heads, size = q_bSHK.shape[1:]
        if documents_bS is not None:
            return masked_attention(q_bSHK, k_bSGK, v_bSGK, documents_bS, scale)
        if nxd is None or length % 2048 or size > 128:
            return core(q_bSHK, k_bSGK, v_bSGK, None, scale)
        copies = heads // k_bSGK.shape[2]
        k_bSHK, v_bSHK = (x.repeat_interleave(copies, 2) for x in (k_bSGK, v_bSGK))
        q, k, v = (x.permute(0, 2, 3, 1) for x in (q_bSHK, k_bSHK, v_bSHK))
        kernel = nxd.kernels.flash_attn.nki_flash_attn_func
        return kernel(q, k, v, lnc=cores, softmax_scale=scale, causal=True).transpose(1, 2)

    return attend


def masked_attention(
    q_bSHK: Tensor, k_bSGK: Tensor, v_bSGK: Tensor, documents_bS: Tensor, scale: float
) -> Tensor:
    """Causal attention within each document by an explicit mask, TILE query positions at a time.

    documents_bS   on the device of q; positions of one document have the same number

    Returns        o_bSHK, as model.causal_attention
    """
    q, k, v = (x.transpose(1, 2) for x in (q_bSHK, k_bSGK, v_bSGK))
    place_S, tiles = torch.arange(q.shape[2], device=q.device), []
    for start in range(0, q.shape[2], TILE):
        end = start + TILE
        same = documents_bS[:, start:end, None] == documents_bS[:, None, :end]
        earlier = place_S[start:end, None] >= place_S[:end]
        tiles.append(
            F.scaled_dot_product_attention(
                q[:, :, start:end],
                k[:, :, :end],
                v[:, :, :end],
                attn_mask=(same & earlier)[:, None],
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return torch.cat(tiles, 2).transpose(1, 2)
