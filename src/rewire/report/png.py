"""Plots as PNG files, drawn by matplotlib from the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rewire.report import colors
from rewire.report.plot import Plot


def save(plot: Plot, path: Path) -> None:
    """Draw a plot, in light colours."""
    # Not pyplot: it would look for a display, and keep the figure.
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(6.0, 4.0), dpi=160, layout="constrained")
    axes = figure.subplots()
    across, up = plot.scales()
    if plot.log_x:
        axes.set_xscale("log")
    if plot.log_y:
        axes.set_yscale("log")
    for one in plot.series:
        color = colors.light(one.color)
        if band := one.band:
            x, low, high = zip(*band, strict=True)
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        style: dict[str, Any] = {
            "color": color,
            "label": one.entry,
            "linestyle": "--" if one.dashed else "-",
        }
        width = 1.2 if one.dashed else 1.8
        if one.x:
            x, y = zip(*one.points, strict=True) if one.points else ((), ())
            marker = "o" if one.dots or len(x) == 1 else None
            face = colors.light("paper") if one.dashed else color
            axes.plot(
                x, y, marker=marker, markersize=4.5, markerfacecolor=face, linewidth=width, **style
            )
        elif one.y:
            axes.axhline(one.y[0], linewidth=width, **style)
    axes.set_xlim(across.low, across.high)
    axes.set_ylim(up.low, up.high)
    for axis, ticks in ((axes.xaxis, plot.x_ticks()), (axes.yaxis, plot.y_ticks())):
        axis.set_ticks([v for v, _ in ticks], [label for _, label in ticks])
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel(plot.x_label, color=colors.light("muted"))
    axes.set_ylabel(plot.y_label, color=colors.light("muted"))
    title = f"{plot.title}\n{plot.subtitle}" if plot.subtitle else plot.title
    axes.set_title(title, loc="left", fontsize=11, color=colors.light("ink"))
    axes.tick_params(length=0, labelcolor=colors.light("muted"), labelsize=9)
    axes.grid(axis="y", color=colors.light("grid"))
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    legend = dict(zip(labels, handles, strict=True))
    if len(legend) <= 12:
        axes.legend(list(legend.values()), list(legend), frameon=False, fontsize=8.5)
    figure.savefig(path, metadata={"Software": None})
