"""Curves as text, for terminals and logs. Needs nothing but Python."""

from __future__ import annotations

import math

MARKS = "*o+x#@"  # one a curve


def text_plot(
    curves: dict[str, list[tuple[float, float]]], width: int = 72, height: int = 16
) -> str:
    """Draw curves as ASCII text, with numbers on both axes.

    curves   name -> points (x, y); points that are not finite are left out. Of points that share a
             column their mean is drawn; where curves meet, the later one is
    width    columns of the whole picture
    height   rows inside the axes
    """
    finite = {name: [p for p in points if _finite(p)] for name, points in curves.items()}
    finite = {name: points for name, points in finite.items() if points}
    if not finite:
        return "nothing to draw yet"
    x_low, x_high = _span([x for points in finite.values() for x, _ in points])
    y_low, y_high = _span([y for points in finite.values() for _, y in points])
    y_labels = _labels(y_low, y_high, max(3, height // 3))
    margin = max(len(label) for _, label in y_labels)
    inside = max(16, width - margin - 2)

    def column(x: float) -> int:
        return round((x - x_low) / (x_high - x_low) * (inside - 1))

    def row(y: float) -> int:  # 0 is the top
        return round((y_high - y) / (y_high - y_low) * (height - 1))

    grid = [[" "] * inside for _ in range(height)]
    for mark, points in zip(_marks(finite), finite.values()):
        columns: dict[int, list[float]] = {}
        for x, y in points:
            columns.setdefault(column(x), []).append(y)
        for place, ys in columns.items():
            grid[row(sum(ys) / len(ys))][place] = mark

    label_of_row = {row(y): label for y, label in y_labels}
    lines = []
    for number, cells in enumerate(grid):
        label = label_of_row.get(number)
        edge = f"{label or '':>{margin}} {'+' if label else '|'}"
        lines.append((edge + "".join(cells)).rstrip())

    axis, numbers = ["-"] * inside, [" "] * inside
    for x, label in _labels(x_low, x_high, max(3, inside // 10)):
        axis[column(x)] = "+"
        begin = max(0, min(column(x) - len(label) // 2, inside - len(label)))
        numbers[begin : begin + len(label)] = label
    legend = "   ".join(f"{mark} {name}" for mark, name in zip(_marks(finite), finite))
    left = " " * (margin + 1)
    lines += [f"{left}+{''.join(axis)}", f"{left} {''.join(numbers).rstrip()}", f"{left} {legend}"]
    return "\n".join(lines)


def _marks(curves: dict) -> list[str]:
    return [MARKS[n % len(MARKS)] for n in range(len(curves))]


def _finite(point: tuple[float | None, float | None]) -> bool:
    return all(value is not None and math.isfinite(value) for value in point)


def _span(values: list[float]) -> tuple[float, float]:
    """Smallest and largest value, moved apart when they are the same."""
    low, high = min(values), max(values)
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    return low - (abs(low) * 0.1 or 1), high + (abs(high) * 0.1 or 1)


def _labels(low: float, high: float, count: int) -> list[tuple[float, str]]:
    """About count round values from low to high, 1, 2 or 5 times a power of ten apart, as text."""
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    step = next(power * m for m in (1, 2, 5, 10) if (high - low) / (power * m) <= count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [n * step for n in range(first, last + 1)]
    if step > 1e-5 and max(abs(low), abs(high)) < 1e7:
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return [(value, f"{value:,.{decimals}f}") for value in values]
    return [(value, f"{value:.3g}") for value in values]
