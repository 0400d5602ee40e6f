"""Times over batches and sizes of images: tables, jumps, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from rewire.bench.shapes import KINDS, LIMIT, SPREAD, Point
from rewire.bench.show import highlighted, times


def groups(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points of each sweep, by what it is."""
    found: dict[str, list[Point]] = {}
    for point in points:
        if point.varied == "size":
            name = f"{point.model}, batch {point.batch}: nanoseconds per sample and pixel"
        else:
            images = f" of {point.size} x {point.size} images" if point.size else ""
            name = f"{point.model}: microseconds per sample over batches{images}"
        found.setdefault(name, []).append(point)
    return found


def line(points: Sequence[Point]) -> str:
    """A sweep in a few words."""
    lowest = min(points, key=lambda point: point.ratio)
    return (
        f"{len(points)} shapes, {_count(jumps(points))}, "
        f"speed-up {times(lowest.ratio)} or more ({_shape(lowest)})"
    )


def jumps(points: Sequence[Point]) -> list[Point]:
    """Where ours jumps, and not because of the fixed time of a call."""
    return [point for point in points if point.kind not in ("", SPREAD)]


def tables(points: Sequence[Point]) -> list[Table]:
    """One for each sweep."""
    return [_table(title, group) for title, group in groups(points).items()]


def _table(title: str, points: Sequence[Point]) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    made.min_width = len(title)
    for name in (points[0].varied, "ours", "dense", "speed-up", "jump", "dense jump"):
        made.add_column(name, justify="right", no_wrap=True)
    for index, point in enumerate(points):
        made.add_row(
            *(str(point.size if point.varied == "size" else point.batch), f"{point.ours:,.1f}"),
            *(f"{point.dense:,.1f}", highlighted(point.ratio)),
            Text(times(point.jump) if index else "", style=_style(point)),
            times(point.dense_jump) if index else "",
        )
    return made


def _style(point: Point) -> str:
    return "" if not point.kind else "yellow" if point.kind == SPREAD else "bold red"


def flagged(points: Sequence[Point]) -> str:
    """All jumps, one in a line."""
    lines = [f"{_count(jumps(points))} of more than {LIMIT:g}x in ours between neighbours"]
    for kind in KINDS:
        some = [point for point in points if point.kind == kind]
        lines += [f"{len(some)} {kind}"] if some else []
        lines += [
            f"  {point.model}, {_shape(point)}: {times(point.jump)} of the time at the {point.varied} "
            f"before (dense {times(point.dense_jump)})"
            for point in some
        ]
    return "\n".join(lines)


def _shape(point: Point) -> str:
    return f"batch {point.batch}" + (f", {point.size} x {point.size}" if point.size else "")


def _count(points: Sequence[Point]) -> str:
    return f"{len(points)} jump{'' if len(points) == 1 else 's'}"


def save_plot(path: Path, points: Sequence[Point], caption: str) -> None:
    """Draw time per sample against batch, or per pixel against size, with rings around jumps."""
    from matplotlib.figure import Figure

    found = groups(points)
    figure = Figure(figsize=(5.6, 3 * len(found)), dpi=120, layout="constrained")
    panels = figure.subplots(len(found), squeeze=False)[:, 0]
    for panel, (title, group) in zip(panels, found.items(), strict=True):
        x = [point.size if point.varied == "size" else point.batch for point in group]
        panel.plot(x, [p.ours for p in group], marker="o", markersize=3, label="ours")
        panel.plot(
            x, [p.dense for p in group], marker="o", markersize=3, color="0.6", label="dense"
        )
        rings = [(at, p.ours) for at, p in zip(x, group, strict=True) if p in jumps(group)]
        if rings:
            panel.scatter(*zip(*rings, strict=True), s=60, facecolors="none", edgecolors="C3")
        panel.set(xscale="log", yscale="log", xlabel=group[0].varied)
        panel.set_title(title, fontsize=9)
        panel.grid(True, color="0.9")
        panel.legend(frameon=False, fontsize=8)
    figure.supxlabel(caption, fontsize=8, color="0.4")
    figure.savefig(path)
