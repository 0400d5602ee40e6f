"""What rewirings cost, as a table, in a few lines, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from rewire.bench.rewiring import EVERY, RIGL, STEP, Cost, Growth, curves
from rewire.bench.show import ms, times

_COLORS = {"uniform": "C0", "grabo": "C1", "graest": "C2", RIGL: "C3", STEP: "0.35"}


def line(costs: Sequence[Cost]) -> str:
    """The costs at one width in a few words."""
    rewirings = ", ".join(f"{cost.method} {ms(cost.rewiring_ms)}" for cost in costs)
    return f"{STEP} {ms(costs[0].step_ms)}, rewiring {rewirings}"


def table(costs: Sequence[Cost]) -> Table:
    """One row for each width and method."""
    batch = f", batch {costs[0].batch}" if costs else ""
    title = f"One rewiring of a linear layer{batch}"
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    names = ("width", "connections", STEP, "method", "rewiring", "in steps", f"share at {EVERY}")
    for name in names:
        made.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    last = 0
    for cost in costs:
        if last and cost.width != last:
            made.add_section()
        size = (f"{cost.width:,}", f"{cost.connections:,}", ms(cost.step_ms))
        made.add_row(
            *(("", "", "") if cost.width == last else size),
            cost.method if cost.method == RIGL else f"GSE {cost.method}",
            *(ms(cost.rewiring_ms), times(cost.steps), f"{100 * cost.share:.2f} %"),
        )
        last = cost.width
    made.caption = f"share at {EVERY}: of the training time, with a rewiring every {EVERY} steps"
    made.caption_justify = "left"
    return made


def lines(
    growth: Sequence[Growth], draws: Mapping[int, Mapping[str, float]], left_out: Sequence[int]
) -> str:
    """How the time grows, what a million draws take, and what was not measured."""
    found = []
    by_range: dict[tuple[int, int], list[str]] = {}
    for one in growth:
        by_range.setdefault((one.first, one.last), []).append(f"{one.what} {one.exponent:.2f}")
    for (first, last), exponents in by_range.items():
        found.append(f"Growth exponent, {first:,} to {last:,} units: {', '.join(exponents)}")
    for width, by_name in draws.items():
        costs = ", ".join(f"{name} {ms(cost)}" for name, cost in by_name.items())
        found.append(f"A million draws at {width:,} units: {costs}")
    if left_out:
        widths = ", ".join(f"{width:,}" for width in left_out)
        found.append(f"{RIGL} was left out at {widths} units: its dense gradient takes minutes.")
    return "\n".join(found)


def save_plot(path: Path, costs: Sequence[Cost], caption: str) -> None:
    """Draw time against width, both logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.8, 4.8), dpi=120, layout="constrained")
    panel = figure.subplots()
    found = curves(costs)
    for what, points in found.items():
        panel.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker="o",
            markersize=4.5,
            linewidth=1.6,
            linestyle="--" if what == STEP else "-",
            color=_COLORS[what],
            label=what if what in (STEP, RIGL) else f"GSE {what}",
        )
    if found:
        (first, time), (last, _) = found[STEP][0], found[STEP][-1]
        straight = [time, time * last / first]
        panel.plot([first, last], straight, color="0.7", linewidth=1, linestyle=":", label="linear")
        panel.legend(frameon=False, fontsize=8)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("units on each side, ten connections per unit")
    panel.set_ylabel("milliseconds")
    panel.grid(True, color="0.9")
    panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(caption, fontsize=8, color="0.4")
    figure.savefig(path)
