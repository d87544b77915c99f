"""Attention cores that take the place of model.causal_attention on accelerators, and what
checkpoints keep of attention.

Devices that compile want every shape fixed, whatever documents a row holds; cuda wants one kernel
for all of them.
Shapes: B rows, S sequence, H query heads, G kv heads, K head size.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import checkpoint

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None

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


def variable_length_attention(
    core: Callable[..., Tensor], kernel: Callable | None = varlen_attn
) -> Callable[..., Tensor]:
    """An attention core for packed rows on cuda: one kernel call for all documents of all rows.

    core      for rows of one document, and for dtypes that the kernel does not take
    kernel    torch.nn.attention.varlen.varlen_attn: flash attention, bf16 and fp16; before torch
              2.10 None, and core is called. Written, never run on cuda
    """

    def attend(
        q_bSHK: Tensor, k_bSGK: Tensor, v_bSGK: Tensor, documents_bS: Tensor | None, scale: float
    ) -> Tensor:
        takes = kernel is not None and q_bSHK.dtype in (torch.bfloat16, torch.float16)
        if documents_bS is None or not takes:
            return core(q_bSHK, k_bSGK, v_bSGK, documents_bS, scale)
        pairs = [torch.unique_consecutive(row, return_counts=True) for row in documents_bS]
        lengths = torch.cat([counts for _, counts in pairs])
        ends = F.pad(lengths.cumsum(0), (1, 0)).int().to(q_bSHK.device, non_blocking=True)
        longest, grouped = int(lengths.max()), q_bSHK.shape[2] != k_bSGK.shape[2]
        flat = (x.flatten(0, 1) for x in (q_bSHK, k_bSGK, v_bSGK))
        rest = {"scale": scale, "window_size": (-1, 0), "enable_gqa": grouped}
        o = kernel(*flat, ends, ends, longest, longest, **rest)
        return o.unflatten(0, q_bSHK.shape[:2])

    return attend


def keep_attention() -> dict:
    """Arguments that make torch.utils.checkpoint keep what attention returned: as much memory as
    its input, while to compute it again takes time that grows with the square of the sequence.

    Source   DistFlashAttn (Li et al. 2023)
    """

    def choose(context, operator, *args, **kwargs) -> checkpoint.CheckpointPolicy:
        name = str(operator)  # every forward pass of attention on cpu and cuda is called so
        kept = "attention" in name or "attn" in name
        policies = checkpoint.CheckpointPolicy
        return policies.MUST_SAVE if kept else policies.PREFER_RECOMPUTE

    # In torch 2.9 this mode turns compilation off (pytorch issue 161889).
    if not checkpoint._CachingTorchDispatchMode.ignore_compile_internals():
        return {}
    return {"context_fn": partial(checkpoint.create_selective_checkpoint_contexts, choose)}
