"""The global gradient norm, every gradient counted once, and clipping by it."""

from __future__ import annotations

import torch
from torch import Tensor

from minitrain.collectives import all_reduce
from minitrain.mesh import Mesh


@torch.no_grad()
def clip_grad_norm_(
    grads: dict[str, Tensor],
    shard_spec: dict[str, int | None],
    mesh: Mesh,
    max_norm: float,
    *,
    pieces: bool = False,
) -> Tensor:
    """Scale the gradients in place by min(1, max_norm / norm), norm being that of the whole model's
    gradient.

    grads          name -> reduced gradient (summed over dp_sp) of this rank's share
    shard_spec     name -> dim split over tp, or None: the gradient is the same on every rank of tp
                   and counts once
    max_norm       float, in units of the gradient's L2 norm; inf turns clipping off, never the norm
    pieces         the optimizer is sharded and grads are this rank's pieces: also sum over dp_sp

    Returns        one-element tensor: the norm before clipping, equal on every rank; not finite
                   when any gradient on any rank is not, and the gradients are then not finite
                   either: skip the update
    Communicates   all-reduce of one number over tp, and for pieces over dp_sp
    """
    dtype = torch.promote_types(next(iter(grads.values())).dtype, torch.float32)
    norms = torch._foreach_norm(list(grads.values()), dtype=dtype)
    # What every rank of tp has alike is divided among them, so that the sum below counts it once.
    shares = [1.0 if shard_spec[name] is not None else 1.0 / mesh.tp.size for name in grads]
    total = sum(norm**2 * share for norm, share in zip(norms, shares))
    total = all_reduce(total.view(1), mesh.tp)
    norm = (all_reduce(total, mesh.dp_sp) if pieces else total).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if mesh.device.kind != "cpu" or scale != 1:  # on cpu reading it waits for nothing
        torch._foreach_mul_(list(grads.values()), scale.squeeze())
    return norm
