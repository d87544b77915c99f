"""Name the likely mistake behind a difference that parity.py found.

All steps before the first wrong one were right, so one mistake explains it. Each known mistake is
made here on one process, and the numbers it gives are compared with those of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from parity_reference import (
    IGNORE,
    LR,
    NUM_MICRO,
    SEQ_LEN,
    STEPS,
    WARMUP,
    Step,
    adamw_update,
)
from parity_run import Seen, Variant, cut
from parity_tokens import Tokens, Weights
from torch import Tensor

MATCH = 1e-7  # relative; a coincidence is far less likely than rounding


class Finding:
    """One wrong step of one variant, and what explains it."""

    def __init__(self, layout, dims, variant: Variant, steps: list[Step], index: int, seen):
        self.layout, self.dims, self.variant, self.index = layout, dims, variant, index
        self.step, self.before = steps[index], steps[:index]
        self.seen: list[Seen] = [rank[index] for rank in seen]
        self.tokens = Tokens(layout, self.step, layout.batches()[index])

    def vector(self, grads_of: Callable[[int, int], dict[str, Tensor]]) -> Tensor:
        """What all ranks would hold, joined: shares of the whole gradient of each (dp, sp)."""
        known, parts = {}, []
        for rank in range(self.layout.world):
            d, s, _ = self.layout.coordinates(rank)
            known[d, s] = known.get((d, s)) or grads_of(d, s)
            parts += self.shares(rank, known[d, s]).values()
        return torch.cat([part.reshape(-1) for part in parts])

    def shares(self, rank: int, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """A rank's share of a whole gradient, a piece when the optimizer is sharded."""
        sharded = self.variant.shard_optimizer
        return {n: cut(g, self.dims[n], self.layout, rank, sharded) for n, g in grads.items()}

    def lr_of(self, offset: int) -> float:
        """The right rate of an update before or after this one."""
        return LR * min(1.0, max(0.0, self.step.lr / LR * WARMUP + offset) / WARMUP)

    def metric(self, name: str) -> Tensor:
        """A metric of all ranks."""
        return torch.tensor([seen.metrics[name] for seen in self.seen], dtype=torch.float64)


def near(got: Tensor, want: Tensor | float) -> bool:
    """Equal up to rounding, relative to the largest entry."""
    want = torch.as_tensor(want, dtype=torch.float64).expand_as(got)
    return bool((got - want).abs().max() <= MATCH * want.abs().max())


def explain_sum(f: Finding, got: Tensor, right: Tensor, is_loss: bool) -> str | None:
    """Name the mistake in the losses of all ranks, or in their gradients joined to a vector."""
    tokens, layout = f.tokens, f.layout
    ratio = (got @ right / (right @ right)).item() if right.any() else 0.0
    if near(got, right * ratio):
        return explain_factor(f, ratio)

    def value(loss: Tensor, weights: Weights) -> Tensor:
        if not is_loss:
            return f.vector(lambda d, s: tokens.grads(loss, weights(d, s)))
        places = [layout.coordinates(rank)[:2] for rank in range(layout.world)]
        return torch.stack([(loss.detach() * weights(d, s)).sum() for d, s in places])

    def matches(loss: Tensor, weights: Weights) -> bool:
        there = value(loss, weights)
        if not there.any() or (
            not is_loss and near(there * (there @ right), right * (there @ there))
        ):
            return False  # nothing, or no other direction than the right one
        if not is_loss:
            return near(got, there * (got @ there / (there @ there)))
        n, count = f.step.loss_tokens, int((weights(0, 0) * loss.detach() != 0).sum())
        sizes = [1, layout.dp, layout.sp, layout.dp * layout.sp]
        divisors = [
            a * b for a in sizes for b in (1, NUM_MICRO, n, max(count, 1), layout.batch_size)
        ]
        return any(near(got, there / divisor) for divisor in divisors)

    for words, weights in tokens.weightings():
        if matches(tokens.loss, weights):
            return words
    for words, loss in tokens.other_losses():
        if matches(loss, lambda d, s: torch.ones_like(tokens.t, dtype=torch.float64)):
            return words
    return None


def explain_factor(f: Finding, ratio: float) -> str:
    """Name a constant factor between what was found and what is right."""
    layout, tokens, n = f.layout, f.tokens, f.step.loss_tokens
    known: list[tuple[float, str]] = []
    sizes = {"dp x sp": layout.dp * layout.sp, "dp": layout.dp, "sp": layout.sp}
    for axis, size in {**sizes, "tp": layout.tp, "the micro-batches": NUM_MICRO}.items():
        known += [(1 / size, f"averaged over {axis} instead of summed")]
        known += [(size, f"summed over {axis} once too often")]
    rows = layout.batch_size
    for count in {rows * SEQ_LEN, rows * (SEQ_LEN - 1), rows * tokens.ids.shape[1]}:
        known += [(n / count, "masked tokens are counted in the divisor")]
    unshifted = int((tokens.unshifted != IGNORE).sum())
    known += [
        (n / unshifted, "loss tokens are counted before the labels are shifted"),
        (n / rows, "divided by the rows, not by the loss tokens"),
        (float(n), "not divided by the number of loss tokens"),
    ]
    words = [w for value, w in known if value != 1 and abs(ratio / value - 1) < MATCH]
    return " or ".join(dict.fromkeys(words)) or f"{ratio:.6g} times what is right"


def explain_count(f: Finding) -> str | None:
    """Name the mistake in the number of loss tokens."""
    got, tokens = f.metric("loss_tokens"), f.tokens
    rows = f.layout.batch_size
    if near(got, float((tokens.unshifted != IGNORE).sum())):
        return "counted before the labels are shifted"
    if any(near(got, float(n)) for n in (rows * SEQ_LEN, tokens.ids.numel())):
        return "masked tokens are counted"
    for words, weights in tokens.weightings():
        places = [f.layout.coordinates(rank)[:2] for rank in range(f.layout.world)]
        counts = [float((weights(d, s) != 0).sum()) for d, s in places]
        if "sum" in words and near(got, torch.tensor(counts)):
            return words
    return None


def explain_norm(f: Finding) -> str | None:
    """Name the mistake in the gradient norm when the gradients are right."""
    layout, step, tokens = f.layout, f.step, f.tokens
    got, ranks = f.metric("grad_norm"), range(layout.world)
    split = {n: f.dims[n] is not None for n in step.grads}
    square = lambda grads: sum(float((g * g).sum()) for g in grads)  # noqa: E731
    replicated = square(g for n, g in step.grads.items() if not split[n])
    norm, world = step.grad_norm, {"dp": layout.dp, "sp": layout.sp, "tp": layout.tp}
    world["dp x sp"] = layout.dp * layout.sp
    pieces = [{n: square([g]) for n, g in f.shares(r, step.grads).items()} for r in ranks]
    fair = [sum(v / (1 if split[n] else layout.tp) for n, v in p.items()) for p in pieces]
    over_tp = [sum(fair[r // layout.tp * layout.tp :][: layout.tp]) for r in ranks]
    shard = [sum(p.values()) for p in pieces]

    def local(rank: int) -> float:
        d, s, _ = layout.coordinates(rank)
        mine = tokens.valid & (tokens.dp == d) & (tokens.slice == s)
        return square(tokens.grads(tokens.loss, mine / step.loss_tokens).values())

    own = torch.tensor([local(r) for r in ranks])
    times = norm**2 + (layout.tp - 1) * replicated
    known = [
        ("parameters that every tp rank holds are counted tp times", torch.tensor(times)),
        ("norm of the local shards: squares are not summed over tp", torch.tensor(shard)),
        ("norm of the local shards: squares are not summed over tp", torch.tensor(fair)),
        (
            "squares of a sharded optimizer's pieces are not summed over dp x sp",
            torch.tensor(over_tp),
        ),
        ("norm of each rank's gradient before the sum over dp x sp", own),
        ("taken after clipping", torch.tensor(min(norm, f.variant.max_norm) ** 2)),
        ("the square root is missing", torch.tensor(norm**4)),
    ]
    for axis, size in world.items():
        known.append((f"equal squares are summed over {axis}", torch.tensor(norm**2 * size)))
    for words, squares in known:
        if near(got, squares.double().sqrt()) and not near(got, norm):
            return words
    return None


def explain_update(f: Finding, lr: float) -> str | None:
    """Name the mistake in the weights when gradients and rate are right."""
    step, config = f.step, f.layout.model_config()
    grads = {n: g * step.scale for n, g in step.grads.items()}
    after = lambda variant, rate=lr: adamw_update(config, step.state, grads, rate, variant)[0]  # noqa: E731
    if step.loss_tokens == 0:
        return "a step without a loss token changes the weights: pass skipped to optimizer.step"
    known = {
        "the weights did not change: gather_params or optimizer.step is missing": step.state[0],
        "weight decay is also on norms and biases": after("all"),
        "there is no weight decay": after("none"),
        "weight decay is added to the gradient (Adam with L2), not to the weights": after("L2"),
    }
    for words, weights in known.items():
        got = [seen.weights[n] for seen in f.seen for n in weights]
        want = [cut(w, f.dims[n], f.layout, r, False)
                for r in range(f.layout.world) for n, w in weights.items()]  # fmt: skip
        if all(near(a, b) for a, b in zip(got, want)):
            return words
    return None


def explain_grads(f: Finding) -> str | None:
    """Name the mistake in what the optimizer read; None when it follows from a wrong norm."""
    layout, step, tokens = f.layout, f.step, f.tokens
    max_norm, seen_norm = f.variant.max_norm, f.metric("grad_norm")
    names = list(step.grads)
    got = torch.cat([seen.grads[n].reshape(-1) for seen in f.seen for n in names])
    right = f.vector(lambda d, s: step.grads)
    if math.isfinite(max_norm):
        if near(got, right):
            return "gradients are not clipped"
        if near(got, right * (max_norm / (seen_norm[0] + 1e-6)).clamp(max=1.0)):
            return None
        before = torch.zeros_like(tokens.loss)
        for d in range(layout.dp):
            for s in range(layout.sp):
                mine = tokens.valid & (tokens.dp == d) & (tokens.slice == s)
                grads = tokens.grads(tokens.loss, mine / step.loss_tokens).values()
                norm = math.sqrt(sum(float((g * g).sum()) for g in grads))
                before += mine * min(1.0, max_norm / (norm + 1e-6)) / step.loss_tokens
        if near(got, f.vector(lambda d, s: tokens.grads(tokens.loss, before))):
            return "clipped before the sum over dp x sp: each rank by its own norm"
        right = right * step.scale
    if f.before:
        last = f.before[-1]
        left = f.vector(lambda d, s: last.grads)
        if near(got - right, left * ((got - right) @ left / (left @ left))):
            return "not zeroed: those of the step before are still in them"
    return explain_parameters(f) or explain_sum(f, got, right, is_loss=False)


def explain_parameters(f: Finding) -> str | None:
    """Say which gradients are wrong when others are right, and what these have in common."""
    grads = {n: g * f.step.scale for n, g in f.step.grads.items()}
    wanted = [f.shares(rank, grads) for rank in range(f.layout.world)]
    wrong = {
        n for want, seen in zip(wanted, f.seen) for n in grads if not near(seen.grads[n], want[n])
    }
    tp, whole = f.layout.tp, [n for n in grads if f.dims[n] is None]
    firsts = [f.seen[rank // tp * tp].grads for rank in range(f.layout.world)]
    differ = [
        n for n in whole for r, seen in enumerate(f.seen) if not near(seen.grads[n], firsts[r][n])
    ]
    if differ:
        return (
            "not complete over tp: parameters that every tp rank holds whole, as "
            f"{differ[0]}, have another gradient on each (a sum over tp is missing in the backward)"
        )
    if len(wrong) == len(grads):
        return None
    kinds = sorted({n.removesuffix(".weight").split(".")[-1] for n in wrong})
    common = " (those that every tp rank holds whole)" if tp > 1 and wrong <= set(whole) else ""
    return f"wrong only for {', '.join(kinds)}{common}"


def explain(f: Finding, wrong: set[str]) -> list[str]:
    """Sentences for the wrong rows of the table in one step, the cause first.

    wrong    of "loss", "loss tokens", "gradients", "gradient norm", "learning rate", "weights"
    """
    seen = f.seen
    finite = all(math.isfinite(v) for one in seen for v in one.metrics.values())
    if not finite or not all(w.isfinite().all() for one in seen for w in one.weights.values()):
        cause = "the number of loss tokens, which is 0: clamp it to 1 and skip the update"
        if f.step.loss_tokens:
            cause = "the loss tokens of one micro-batch, slice or rank, which may be 0"
        return [f"inf or NaN ({STEPS[f.index]}): something divides by {cause}."]
    calls = {one.calls for one in seen}
    if calls != {1} and f.step.loss_tokens:
        return [f"optimizer.step is called {max(calls)} times a step instead of once."]
    found: list[tuple[str, str | None]] = []
    if "loss tokens" in wrong:
        found.append(("loss tokens", explain_count(f)))
    if "loss" in wrong:
        right = torch.full((f.layout.world,), f.step.loss).double()
        found.append(("loss", explain_sum(f, f.metric("loss"), right, is_loss=True)))
    if "gradients" in wrong:
        found.append(("gradients", explain_grads(f)))
    elif "gradient norm" in wrong:
        found.append(("gradient norm", explain_norm(f)))
    lr = f.metric("lr")[0].item() if "lr" in seen[0].metrics else f.step.lr
    if "learning rate" in wrong:
        off = [k for k in (-1, 1) if abs(f.lr_of(k) - lr) < 1e-12]
        words = "that of the update before" if off == [-1] else "that of the next update"
        found.append(("learning rate", f"{words}: off by one" if off else None))
    if "weights" in wrong and "gradients" not in wrong:
        found.append(("weights", explain_update(f, lr)))
    return [f"{row}: {words}." for row, words in found if words]
