"""Does a training step give the same numbers on every layout? Check a train file, as you edited it.

python scripts/parity.py                                           the shipped step, 8 layouts
python scripts/parity.py --sp 2 --tp 2 --train-file my_train.py    yours, on one layout

Starts the ranks itself, runs the file's own train_step in float64 on masked, uneven rows, and
compares with one plain process. For known mistakes it says what is likely wrong. Exit status 1 when
anything differs.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from parity_mistakes import Finding, explain
from parity_reference import Layout, Step, reference_steps
from parity_run import Seen, Variant, cut, describe, load_train_file, run_rank

from minitrain.launch import run_ranks
from minitrain.mesh import check_layout

SHIPPED = Path(__file__).parent / "train.py"
# (dp, sp, tp)
LAYOUTS = [Layout(*sizes) for sizes in (
    (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2),
)]  # fmt: skip
CLIP = 0.05  # far below every norm that occurs, also below those of one rank's own gradient
YES_OR_NO = ("all ranks agree", "replicas bitwise equal", "ran")
UNKNOWN = (
    "no known mistake gives these numbers; see which lines are wrong. If you changed the loss or "
    "the update on purpose, --own compares with your own step on one process."
)
ROUNDING = 1e-5  # wrong formulas are further off than float32 is
VARIANTS = [Variant(sharded, norm) for norm in (math.inf, CLIP) for sharded in (False, True)]


@dataclass(frozen=True)
class ParityConfig:
    """Check that a train file's own train_step gives the same numbers on a layout as on one
    process."""

    sp: int | None = None
    """Ranks that share each row. Without sp, tp and world: 8 layouts up to dp 2 x sp 2 x tp 2."""
    tp: int | None = None
    """Ranks that share each matrix."""
    world: int | None = None
    """Processes: a multiple of sp * tp; default 2 * sp * tp, so that dp is 2."""
    train_file: Path = SHIPPED
    """The file whose train_step, adamw, shard_batch and TrainConfig are checked."""
    own: bool = False
    """Compare with the file's own step on one process in one micro-batch, not with plain
    cross-entropy and AdamW: for steps that you changed on purpose."""
    tp_split_activations: bool = False
    """As in train.py."""
    tolerance: float = 1e-9
    """Largest relative difference; 1e-4 when the step computes something in float32."""
    timeout_s: float = 60.0
    """Seconds until all ranks of a layout must have ended."""


def difference(got, want, scale: float | None = None) -> float:
    """Largest difference relative to want's largest entry (to 1 when that is 0); inf for NaN."""
    if isinstance(got, (int, float)):
        off, scale = abs(got - want), abs(want)
    else:
        if got.shape != want.shape:
            return math.inf
        off = (got - want).abs().max().item() if got.numel() else 0.0
        scale = want.abs().max().item() if scale is None else scale
    return off / (scale or 1.0) if math.isfinite(off) else math.inf


def kind(name: str) -> str:
    """A parameter's line in the table: its layer's name, all layers and all norms in one."""
    last = name.removesuffix(".weight").split(".")[-1]
    return "gradient of " + ("norms" if "norm" in last else last)


def compare_step(layout, dims, variant: Variant, step: Step, ranks: list[Seen]) -> dict[str, float]:
    """Lines of the table for one step: largest difference over ranks; 0 or inf for yes or no."""
    lines: dict[str, float] = {}

    def note(line: str, value: float) -> None:
        lines[line] = max(lines.get(line, 0.0), value)

    for rank, seen in enumerate(ranks):
        for line, key in (("loss", "loss"), ("loss tokens", "loss_tokens"),
                          ("gradient norm", "grad_norm"), ("learning rate", "lr")):  # fmt: skip
            if key in seen.metrics:
                note(line, difference(seen.metrics[key], getattr(step, key)))
        for name, grad in step.grads.items():
            if seen.calls:
                want = cut(grad * step.scale, dims[name], layout, rank, variant.shard_optimizer)
                scale = grad.abs().max().item() * step.scale
                note(kind(name), difference(seen.grads[name], want, scale))
        for name, weight in step.weights.items():
            want = cut(weight, dims[name], layout, rank, False)
            note("weights", difference(seen.weights[name], want))
        first = ranks[rank % layout.tp]
        agree = seen.metrics == ranks[0].metrics or seen.metrics != seen.metrics
        note("all ranks agree", 0.0 if agree else math.inf)
        for name, weight in seen.weights.items():
            same = weight.equal((ranks[0] if dims[name] is None else first).weights[name])
            note("replicas bitwise equal", 0.0 if same else math.inf)
    return lines


def check_variant(layout, dims, variant, steps, seen, tolerance: float, plain: bool) -> tuple:
    """Lines of the table over all steps, and sentences about the first step that is wrong."""
    worst: dict[str, float] = {}
    sentences: list[str] = []
    for index, step in enumerate(steps):
        lines = compare_step(layout, dims, variant, step, [rank[index] for rank in seen])
        worst = {line: max(value, worst.get(line, 0.0)) for line, value in lines.items()}
        wrong = {line for line, value in lines.items() if value > tolerance}
        numbers = [v for line, v in lines.items() if line in wrong - {"weights"} and v < math.inf]
        if wrong and plain and numbers and max(numbers) < ROUNDING:
            sentences = [f"rounding: differences of {max(numbers):.0e} mean that something is "
                         "computed in float32. Pass --tolerance 1e-4 to find more."]  # fmt: skip
        elif wrong and plain:
            rows = {"gradients" if line.startswith("gradient of") else line for line in wrong}
            sentences = explain(Finding(layout, dims, variant, steps, index, seen), rows)
        if wrong:
            break  # what comes after has other weights
    return worst, sentences


def own_steps(config: ParityConfig, layout: Layout, variants: list[Variant]) -> list[list[Step]]:
    """The file's own step on one process, all rows in one micro-batch, for each variant."""
    args = config.train_file, layout, variants, False, True
    ((found, _),) = run_ranks(run_rank, 1, *args, timeout_s=config.timeout_s)
    return [[
        Step(None, seen.metrics["loss"], int(seen.metrics.get("loss_tokens", 0)),
             seen.metrics["grad_norm"], seen.metrics.get("lr", 0.0), seen.grads, 1.0, seen.weights)
        for seen in steps
    ] for steps in found]  # fmt: skip


def run_variants(
    config: ParityConfig, layout: Layout, variants: list[Variant]
) -> tuple[list, dict, list[str]]:
    """Run the ranks; when that fails, again one variant at a time, to learn what works.

    Returns   for each variant what each rank saw (None: it failed), the ShardSpec, error texts
    """

    def run(some: list[Variant]) -> tuple[list, dict]:
        args = config.train_file, layout, some, config.tp_split_activations
        ranks = run_ranks(run_rank, layout.world, *args, timeout_s=config.timeout_s)
        return [[found[v] for found, _ in ranks] for v in range(len(some))], ranks[0][1]

    seen, dims, errors = [], {}, []
    for some in [variants] if len(variants) == 1 else [variants, *([one] for one in variants)]:
        try:
            found, dims = run(some)
            seen += found
        except TimeoutError as error:
            words = "Some ranks wait for a collective that others never enter: all must, also with "
            errors.append(f"{error} {words}a micro-batch that has no loss token.")
            return [None] * len(variants), {}, errors
        except RuntimeError as error:
            if len(some) == 1:
                seen.append(None)
                errors.append(f"{some[0].name}: {first_error(str(error))}")
        if len(seen) == len(variants):
            break
    return seen, dims, errors


def first_error(text: str) -> str:
    """The traceback of the first rank that failed by itself, not because another one left."""
    ranks = re.split(r"\n(?=rank \d+: )", text)
    return next((rank for rank in ranks if "gloo" not in rank), ranks[0]).rstrip()


def check_layout_numbers(
    config: ParityConfig, layout: Layout, variants: list[Variant] = VARIANTS
) -> tuple[list[dict], list[str]]:
    """Check one layout.

    Returns   lines of the table for each variant, and sentences; none when all is right
    """
    references = [reference_steps(layout, variant.max_norm) for variant in variants]
    if config.own:
        references = own_steps(config, layout, variants)
    seen, dims, errors = run_variants(config, layout, variants)
    columns, sentences = [], []
    for variant, steps, ranks in zip(variants, references, seen):
        args = layout, dims, variant, steps, ranks, config.tolerance, not config.own
        lines, words = check_variant(*args) if ranks else ({"ran": math.inf}, [])
        columns.append(lines)
        sentences += [word for word in words if word not in sentences]
    wrong = any(value > config.tolerance for lines in columns for value in lines.values())
    if wrong and not sentences and not errors:
        sentences = [UNKNOWN]
    return columns, sentences + errors[:1]


def table(columns: list[dict[str, float]], tolerance: float) -> str:
    """All lines of a layout, a column for each variant."""
    heads = [variant.name for variant in VARIANTS]
    lines = [" " * 24 + "".join(f"{head.split(', ')[0]:>14}" for head in heads)]
    lines += [" " * 24 + "".join(f"{head.split()[-1]:>14}" for head in heads)]
    for name in dict.fromkeys(line for column in columns for line in column):
        cells = []
        for column in columns:
            value = column.get(name, math.nan)
            yes_or_no = {0.0: "yes", math.inf: "NO"} if name in YES_OR_NO else {}
            text = yes_or_no.get(value, f"{value:.1e}")
            cells.append(f"{text + ('' if not value > tolerance else ' <'):>14}")
        lines.append(f"{name:24}" + "".join(cells))
    return "\n".join(lines)


def main(config: ParityConfig) -> int:
    """Check the layouts asked for; returns the exit status."""
    load_train_file(config.train_file)
    layouts = LAYOUTS
    if (config.sp, config.tp, config.world) != (None, None, None):
        sp, tp = config.sp or 1, config.tp or 1
        world = config.world or 2 * sp * tp
        layouts = [Layout(check_layout(world, sp, tp), sp, tp)]
    failed = 0
    for layout in layouts:
        columns, sentences = check_layout_numbers(config, layout)
        failed += bool(sentences)
        print(f"{describe(layout)}", flush=True)
        if any("loss" in column for column in columns) and (len(layouts) == 1 or sentences):
            print("largest relative difference from one process:\n")
            print(table(columns, config.tolerance) + "\n")
        worst = max(value for column in columns for value in column.values())
        print(
            "NOT the same numbers. Likely:" if sentences else f"same numbers (within {worst:.0e})"
        )
        for sentence in sentences:
            print(f"  - {sentence}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(ParityConfig)))
    except ValueError as error:
        sys.exit(f"error: {error}")
