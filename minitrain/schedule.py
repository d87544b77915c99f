"""The learning rate as a function of the updates made, on the device: it never waits."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def learning_rate(updates: Tensor, config) -> Tensor:
    """Rate of the next update.

    updates   integer tensor of one element: updates made so far; skipped steps do not count
    config    TrainConfig: lr, warmup_steps, schedule, steps, dtype

    Returns   one-element tensor, float32 (float64 with --dtype fp64). Update n of w in warm-up has
              lr * n / w. Then: constant; cosine, to a tenth of lr at the last step; wsd (Hu et al.
              2024), constant and then linear to zero over the last fifth of all steps
    """
    dtype = torch.float64 if config.dtype == "fp64" else torch.float32
    n = updates.to(dtype) + 1
    rate = torch.full_like(n, config.lr)
    if config.schedule == "cosine":
        past = (n - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        rate = rate * (0.55 + 0.45 * torch.cos(math.pi * past.clamp(0, 1)))
    elif config.schedule == "wsd":
        rate = rate * ((config.steps - n + 1) / max(1, config.steps // 5)).clamp(0, 1)
    return rate * (n / max(1, config.warmup_steps)).clamp(max=1)
