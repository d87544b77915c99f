"""Name the likely mistake behind a difference that parity.py found.

All steps before the first wrong one were right, so one mistake explains it. Each known mistake is
made here on one process, and the numbers it gives are compared with those of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from parity_reference import (
    IGNORE,
    NUM_MICRO,
    SEQ_LEN,
    STEPS,
    adamw_update,
)
from parity_run import cut
from parity_tokens import MATCH, Finding, near, parallel
from torch import Tensor


def wrong_losses(f: Finding) -> Iterator[tuple[str, Tensor, int]]:
    """Every known mistake, the summed loss of all ranks with it, and its number of tokens."""
    tokens, places = f.tokens, f.places()
    loss = tokens.loss.detach()
    for words, weights in tokens.weightings():
        total, count = (loss * weights).sum(), int((weights != 0).sum())
        yield words, total.expand(f.layout.world), count
    for words, rows, sliced in tokens.partial_sums():
        masks = [rows(d) & (tokens.slice == s) if sliced else rows(d) for d, s in places]
        yield words, torch.stack([(loss * mask).sum() for mask in masks]), f.step.loss_tokens
    counts = [(tokens.valid & (tokens.dp == d) & (tokens.slice == s)).sum() for d, s in places]
    words = "divided by the rank's own number of loss tokens after the sum"
    yield words, loss.sum() / torch.stack(counts), 1
    for words, other in tokens.other_losses():
        total, count = other.detach().sum(), int((other != 0).sum())
        yield words, total.expand(f.layout.world), count


def wrong_grads(f: Finding) -> Iterator[tuple[str, Tensor]]:
    """Every known mistake, and the gradients of all ranks with it, up to a factor."""
    tokens = f.tokens
    for words, weights in tokens.weightings():
        grads = tokens.grads(tokens.loss, weights)
        yield words, f.vector(lambda d, s, g=grads: g)
    for words, rows, sliced in tokens.partial_sums():
        if sliced:
            yield words, f.vector(lambda d, s, r=rows: tokens.rank_grads(r(d).double(), s))
        else:
            yield words, f.vector(lambda d, s, r=rows: tokens.grads(tokens.loss, r(d).double()))
    for words, other in tokens.other_losses():
        grads = tokens.grads(other, torch.ones_like(other))
        yield words, f.vector(lambda d, s, g=grads: g)


def explain_loss(f: Finding) -> str | None:
    """Name the mistake in the loss."""
    got, layout, n = f.metric("loss"), f.layout, f.step.loss_tokens
    right = torch.full_like(got, f.step.loss)
    if near(got, right * (got[0] / f.step.loss)):
        words = explain_factor(f, (got[0] / f.step.loss).item())
        if "times what is right" not in words:
            return words
    for words, sums, count in wrong_losses(f):
        for ranks in (1, layout.dp, layout.sp, layout.dp * layout.sp):
            for divisor in (1, NUM_MICRO, n, max(count, 1), layout.batch_size):
                if near(got, sums / (ranks * divisor)):
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
    for words, rows, sliced in tokens.partial_sums():
        masks = [rows(d) & (tokens.slice == s) if sliced else rows(d) for d, s in f.places()]
        if near(got, torch.stack([mask.sum() for mask in masks])):
            return words
    return None


def explain_norm(f: Finding) -> str | None:
    """Name the mistake in the gradient norm when the gradients are right."""
    layout, step = f.layout, f.step
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

    own = {place: square(f.rank_grads(*place).values()) for place in set(f.places())}
    times = norm**2 + (layout.tp - 1) * replicated
    known = [
        ("squares of a sharded optimizer's pieces are not summed over dp x sp", over_tp),
        ("parameters that every tp rank holds are counted tp times", times),
        ("norm of the local shards: squares are not summed over tp", shard),
        ("norm of the local shards: squares are not summed over tp", fair),
        ("norm of each rank's gradient before the sum over dp x sp", [own[p] for p in f.places()]),
        ("taken after clipping", min(norm, f.variant.max_norm) ** 2),
        ("the square root is missing", norm**4),
    ]
    for axis, size in world.items():
        known.append((f"equal squares are summed over {axis}", norm**2 * size))
    for words, squares in known:
        if near(got, torch.tensor(squares, dtype=torch.float64).sqrt()) and not near(got, norm):
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
    step = f.step
    max_norm, seen_norm = f.variant.max_norm, f.metric("grad_norm")
    names = list(step.grads)
    got = torch.cat([seen.grads[n].reshape(-1) for seen in f.seen for n in names])
    right = f.vector(lambda d, s: step.grads)
    if not got.any():
        return "all zero"
    if math.isfinite(max_norm):
        if near(got, right):
            return "gradients are not clipped"
        scales = (max_norm / (seen_norm + 1e-6)).clamp(max=1.0)
        by_seen_norm = torch.cat([
            g.reshape(-1) * scale
            for rank, scale in enumerate(scales) for g in f.shares(rank, step.grads).values()
        ])  # fmt: skip
        if near(got, by_seen_norm) or near(got / step.scale, right, 1e-4):
            return None  # clipping hides a factor up to its epsilon
        clipped_first = {n: torch.zeros_like(g) for n, g in step.grads.items()}
        for place in set(f.places()):
            grads = f.rank_grads(*place)
            norm = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
            for n, g in grads.items():
                clipped_first[n] += g * min(1.0, max_norm / (norm + 1e-6))
        before = f.vector(lambda d, s: clipped_first)
        if parallel(got, before) and not parallel(right, before):
            return "clipped before the sum over dp x sp: each rank by its own norm"
        right = right * step.scale
    if f.before:
        last = f.before[-1]
        left = f.vector(lambda d, s: last.grads)
        if parallel(got - right, left):
            return "not zeroed: those of the step before are still in them"
    words = explain_parameters(f)
    if words or parallel(got, right):
        return words or explain_factor(f, (got @ right / (right @ right)).item())
    for words, vector in wrong_grads(f):
        if not parallel(right, vector) and parallel(got, vector):
            return words
    return None


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
        found.append(("loss", explain_loss(f)))
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
