"""Ulysses sequence parallelism: slices of the sequence everywhere, of the heads in attention.

Source: DeepSpeed-Ulysses (Jacobs et al. 2023). Shapes: B rows, S sequence, H query heads, G kv
heads, K head size; lower case is this rank's share.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from minitrain.collectives import all_to_all
from minitrain.mesh import Axis


def ulysses_attention(core: Callable[..., Tensor], sp: Axis) -> Callable[..., Tensor]:
    """Wrap an attention core so that it may be called with slices of the sequence.

    core           f(q_bSHK, k_bSGK, v_bSGK, *rest) -> o_bSHK, for any number of heads

    Returns        a function of q_bsHK, k_bsGK, v_bsGK, *rest -> o_bsHK. When there are fewer kv
                   heads than ranks, each is sent to all ranks whose query heads use it; the
                   gradients of these copies are summed
    Communicates   4 all-to-alls over sp forward and 4 backward: q, k, v and o
    Raises         ValueError when sp does not divide the query heads, or neither divides the other
                   for the kv heads
    """
    if sp.size == 1:
        return core

    def attend(q_bsHK: Tensor, k_bsGK: Tensor, v_bsGK: Tensor, *rest) -> Tensor:
        heads, kv_heads = q_bsHK.shape[2], k_bsGK.shape[2]
        if heads % sp.size or (kv_heads % sp.size and sp.size % kv_heads):
            raise ValueError(
                "sp must divide the query heads, and divide or be divided by the kv heads: sp "
                f"{sp.size}, {heads} query heads, {kv_heads} kv heads on this rank. "
                "Choose another --sp."
            )
        if kv_heads < sp.size:
            copies = sp.size // kv_heads
            k_bsGK, v_bsGK = (x.repeat_interleave(copies, 2) for x in (k_bsGK, v_bsGK))
        q_bShK, k_bSgK, v_bSgK = (
            all_to_all(x, sp, split_dim=2, concat_dim=1) for x in (q_bsHK, k_bsGK, v_bsGK)
        )
        o_bShK = core(q_bShK, k_bSgK, v_bSgK, *rest)
        return all_to_all(o_bShK, sp, split_dim=1, concat_dim=2)

    return attend
