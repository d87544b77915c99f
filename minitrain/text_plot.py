"""Curves as text, for terminals and logs. Needs nothing but Python."""

from __future__ import annotations

import math

MARKS = "*o+x#@"  # one a curve


def text_plot(curves: dict[str, list[tuple]], width: int = 72, height: int = 16) -> str:
    """Draw curves as ASCII text, with numbers on both axes.

    curves   name -> points (x, y); points that are None or not finite are left out. Of points that
             share a column their mean is drawn; where curves meet, the later one is
    width    columns of the whole picture
    height   rows inside the axes
    """

    def finite(points: list[tuple]) -> list[tuple]:
        return [(x, y) for x, y in points if y is not None and math.isfinite(y)]

    curves = {name: finite(points) for name, points in curves.items() if finite(points)}
    if not curves:
        return "nothing to draw yet"
    xs, ys = zip(*(point for points in curves.values() for point in points))
    (x_low, x_high), (y_low, y_high) = _span(xs), _span(ys)
    y_labels = _labels(y_low, y_high, max(3, height // 3))
    margin = max(len(label) for _, label in y_labels)
    inside = max(16, width - margin - 2)

    def column(x: float) -> int:
        return round((x - x_low) / (x_high - x_low) * (inside - 1))

    def row(y: float) -> int:  # 0 is the top
        return round((y_high - y) / (y_high - y_low) * (height - 1))

    grid, legend = [[" "] * inside for _ in range(height)], []
    for n, (name, points) in enumerate(curves.items()):
        legend.append(f"{MARKS[n % len(MARKS)]} {name}")
        columns: dict[int, list[float]] = {}
        for x, y in points:
            columns.setdefault(column(x), []).append(y)
        for place, ys in columns.items():
            grid[row(sum(ys) / len(ys))][place] = MARKS[n % len(MARKS)]
    axis, numbers = ["-"] * inside, [" "] * inside
    for x, label in _labels(x_low, x_high, max(3, inside // 10)):
        axis[column(x)] = "+"
        begin = max(0, min(column(x) - len(label) // 2, inside - len(label)))
        numbers[begin : begin + len(label)] = label
    edges = {row(y): f"{label:>{margin}} +" for y, label in y_labels}
    left = " " * (margin + 1)
    lines = [edges.get(n, f"{left}|") + "".join(cells).rstrip() for n, cells in enumerate(grid)]
    lines += [f"{left}+{''.join(axis)}", f"{left} {''.join(numbers).rstrip()}"]
    return "\n".join([*lines, f"{left} {'   '.join(legend)}"])


def _span(values: tuple[float, ...]) -> tuple[float, float]:
    """Smallest and largest value, moved apart when they are the same."""
    low, high = min(values), max(values)
    same = high - low <= 1e-9 * max(abs(low), abs(high))
    return (low - (abs(low) * 0.1 or 1), high + (abs(high) * 0.1 or 1)) if same else (low, high)


def _labels(low: float, high: float, count: int) -> list[tuple[float, str]]:
    """About count round values from low to high, 1, 2 or 5 times a power of ten apart, as text."""
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    step = next(power * m for m in (1, 2, 5, 10) if (high - low) / (power * m) <= count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    plain = step > 1e-5 and max(abs(low), abs(high)) < 1e7
    form = f",.{max(0, -math.floor(math.log10(step) + 1e-9))}f" if plain else ".3g"
    return [(n * step, format(n * step, form)) for n in range(first, last + 1)]
