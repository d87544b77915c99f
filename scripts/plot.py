"""Draw runs' metrics.jsonl: a PNG, or text where matplotlib is missing.

python scripts/plot.py runs/default                    one run, into runs/default/curves.png
python scripts/plot.py runs/a runs/b --out ab.png      two runs, overlaid
python scripts/plot.py runs/default --text --watch 5   in the terminal, every 5 seconds
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from minitrain.log import read_metrics
from minitrain.text_plot import text_plot

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's
# field of metrics.jsonl -> title of its plot
FIELDS = {
    "loss": "loss (nats per token)",
    "grad_norm": "gradient norm before clipping",
    "lr": "learning rate",
    "tokens_per_second": "tokens per second",
}
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class PlotConfig:
    """Draw the curves of one or more runs, overlaid."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories (train.py's --out), or metrics.jsonl files."""
    out: Path | None = None
    """PNG to write. None: curves.png, in the run's directory if it is one run, else here."""
    text: bool = False
    """Print text instead of writing a picture; always so when matplotlib is missing."""
    x: Literal["steps", "tokens"] = "steps"
    """What goes to the right: updates, or tokens seen (to compare runs of different batches)."""
    smooth: int = 21
    """Steps whose mean is the thick line of loss, gradient norm and speed, as many before a step as
    after it, fewer at the ends; odd, 1 is no smoothing. Text plots show the mean of what falls
    into a column instead.
    """
    tensorboard: Path | None = None
    """Directory to write TensorBoard events to, instead; needs the package tensorboard."""
    watch: float = 0.0
    """Seconds between looks at the files, to draw again when they have grown; 0: draw once."""


@dataclass(frozen=True)
class Run:
    """One run's curves, by field of metrics.jsonl; x is in steps or tokens."""

    name: str
    curves: dict[str, Points]
    skipped: list[float]


def read_run(path: Path, name: str, x: str) -> Run:
    """Read a run; evaluations, which have no token count, get that of their step."""
    records = read_metrics(path)
    place = {0: 0} | {r["step"]: r["step"] for r in records}
    if x == "tokens":
        place = {0: 0} | {r["step"]: r["tokens_seen"] for r in records if "tokens_seen" in r}
    records = [record for record in records if record["step"] in place]
    curves = {
        field: [(place[r["step"]], r[field]) for r in records if r.get(field) is not None]
        for field in (*FIELDS, "eval_loss")
    }
    return Run(name, curves, [place[r["step"]] for r in records if r.get("skipped")])


def moving_mean(points: Points, count: int) -> Points:
    """The mean of count points around each; at the beginning of fewer, still as many before as
    after, so that a falling curve is not drawn too high; at the end of those before and what is
    left after.
    """
    sums = [0.0, *itertools.accumulate(y for _, y in points)]
    means = []
    for n, (x, _) in enumerate(points):
        before = min(count // 2, n)
        after = min(before, len(points) - 1 - n)
        means.append((x, (sums[n + after + 1] - sums[n - before]) / (before + after + 1)))
    return means


def as_text(runs: list[Run], x: str) -> str:
    """All curves as text plots, one below the other."""
    parts = []
    for field, title in FIELDS.items():
        curves = {}
        for run in runs:
            before = f"{run.name}: " if len(runs) > 1 else ""
            curves[before + field.replace("_", " ")] = run.curves[field]
            if field == "loss":
                curves[before + "held-out loss"] = run.curves["eval_loss"]
        parts.append(f"{title}, over {x}; mean of each column")
        parts.append(text_plot(curves, height=16 if field == "loss" else 8) + "\n")
    skipped = {run.name: len(run.skipped) for run in runs if run.skipped}
    parts += [f"{name}: {count} updates skipped" for name, count in skipped.items()]
    return "\n".join(parts)


def draw_field(axes, runs: list[Run], field: str, smooth: int) -> None:
    """One field of all runs: thin each step, thick the mean; a held-out loss as points."""
    smoothed = field != "lr" and smooth > 1
    for n, (run, color) in enumerate(zip(runs, COLORS * len(runs))):
        before = f"{run.name}: " if len(runs) > 1 else ""
        points = run.curves[field] or [(0, math.nan)]
        label, width = f"{before}{field}", max(1.2, 2.4 - 0.8 * n)  # equal curves stay visible
        if smoothed:
            axes.plot(*zip(*points), color=color, lw=0.7, alpha=0.3)
            label += f", mean of {smooth} steps (thin: each step)"
            points = moving_mean(points, smooth)
        axes.plot(*zip(*points), color=color, lw=width, label=label)
        if field == "loss" and run.curves["eval_loss"]:
            style = {"color": color, "lw": 1, "ls": "--", "marker": "o", "ms": 6, "mfc": "white"}
            points = run.curves["eval_loss"]
            axes.plot(*zip(*points), **style, zorder=5, label=f"{before}held-out loss")
        if field == "loss" and run.skipped:
            style = {"color": color, "ls": "", "marker": "x", "clip_on": False, "zorder": 6}
            style["label"] = f"{before}update skipped ({len(run.skipped)} times)"
            axes.plot(
                run.skipped, [0] * len(run.skipped), **style, transform=axes.get_xaxis_transform()
            )
    lines = f"{FIELDS[field]}\n" + (f"thick: mean of {smooth} steps" if smoothed else "")
    axes.set_title(FIELDS[field] if field == "loss" else lines, loc="left", fontsize=10)


def draw_picture(runs: list[Run], x: str, smooth: int, out: Path) -> None:
    """Write the PNG, whole or not at all: an image viewer may be looking at it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(12, 8), dpi=110, layout="constrained")
    panels = figure.subplot_mosaic(
        [["loss"] * 3, list(FIELDS)[1:]], gridspec_kw={"height_ratios": [1.7, 1]}
    )
    for field, axes in panels.items():
        draw_field(axes, runs, field, smooth)
        axes.grid(color="#dddddd", lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.margins(x=0.01)
        axes.set_xlabel("tokens seen" if x == "tokens" else "step")
        if x == "tokens":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if any(y > 0 for run in runs for _, y in run.curves["grad_norm"]):
        panels["grad_norm"].set_yscale("log")
        panels["grad_norm"].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panels["grad_norm"].yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panels["grad_norm"].yaxis.set_minor_formatter(NullFormatter())
    panels["tokens_per_second"].set_ylim(bottom=0)
    panels["tokens_per_second"].yaxis.set_major_formatter(EngFormatter(sep=""))
    panels["loss"].legend(frameon=False)
    figure.suptitle(", ".join(run.name for run in runs), x=0.01, ha="left", fontweight="bold")
    part = out.with_name(f"{out.name}.part")
    FigureCanvasAgg(figure).print_png(part)
    os.replace(part, out)


def write_events(runs: list[Run], directory: Path) -> None:
    """Every curve of every run as TensorBoard scalars, in place of those written before."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("--tensorboard needs its package: pip install tensorboard.") from None
    for run in runs:
        place = directory / run.name.strip("/").replace("/", "-")
        for old in place.glob("events.out.tfevents.*"):
            old.unlink()
        with SummaryWriter(place) as writer:
            for field, points in run.curves.items():
                for x, y in points:
                    writer.add_scalar(field, y, x)
    print(f"wrote {directory}: tensorboard --logdir {directory}", flush=True)


def metrics_files(runs: tuple[Path, ...]) -> dict[Path, str]:
    """Each run's metrics file and a name to tell it by."""
    if not runs:
        raise ValueError("give at least one run directory: python scripts/plot.py runs/default")
    files = [run if run.is_file() else run / "metrics.jsonl" for run in runs]
    names = [file.resolve().parent.name for file in files]
    distinct = len(set(names)) == len(names)
    return dict(zip(files, names if distinct else map(str, runs)))


def draw(config: PlotConfig) -> None:
    """Read all runs and draw them once."""
    runs = [read_run(*item, config.x) for item in metrics_files(config.runs).items()]
    if config.tensorboard:
        write_events(runs, config.tensorboard)
        return
    as_picture = not config.text
    if as_picture:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            as_picture = False
            print("no matplotlib, so here are the curves as text; pip install matplotlib\n")
    if not as_picture:
        clear = "\x1b[2J\x1b[H" if config.watch and sys.stdout.isatty() else ""
        print(clear + as_text(runs, config.x), flush=True)
        return
    one = next(iter(metrics_files(config.runs))).parent if len(runs) == 1 else Path()
    out = config.out or one / "curves.png"
    draw_picture(runs, config.x, config.smooth, out)
    print(f"wrote {out}", flush=True)


def watch(config: PlotConfig, pause: Callable[[float], None]) -> None:
    """Draw whenever a file has changed, until Ctrl-C; wait for files that are not there yet."""
    drawn = None
    while True:
        files = list(metrics_files(config.runs))
        if missing := [str(file) for file in files if not file.is_file()]:
            state = missing
            if state != drawn:
                print(f"waiting for {', '.join(missing)}", flush=True)
        else:
            state = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files]
            if state != drawn:
                draw(config)
        drawn = state
        pause(config.watch)


def main(config: PlotConfig, pause: Callable[[float], None] = time.sleep) -> None:
    """Check the settings, then draw once or again and again."""
    if config.smooth < 1 or config.smooth % 2 == 0:
        raise ValueError(f"--smooth must be odd and at least 1 step, not {config.smooth}.")
    if config.watch < 0:
        raise ValueError(f"--watch must be 0 or a number of seconds, not {config.watch:g}.")
    if config.out and config.out.suffix != ".png":
        raise ValueError(f"--out must end in .png, but is {config.out}.")
    if config.watch:
        watch(config, pause)
    for file in metrics_files(config.runs):
        if not file.is_file():
            raise ValueError(f"a run must have metrics.jsonl, but there is no {file}.")
    draw(config)


if __name__ == "__main__":
    try:
        main(tyro.cli(PlotConfig))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(0)
