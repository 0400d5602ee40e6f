"""A picture of the results: how many times faster than the best dense, and than float32 dense, against the
sparsity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rewire.bench.case import OFF, Result
from rewire.bench.show import groups

_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
_MARKERS = "osD^vP"


def save(path: Path, results: Sequence[Result], caption: str) -> None:
    """Draw one panel for each table that has a dense time, one line for each shape, two if the engine
    was on and off."""
    # Not pyplot: it would look for a display, and keep the figure.
    from matplotlib.figure import Figure

    known = [result for result in results if result.ratio is not None]
    rows: dict[str, list[tuple[str, str, list[Result]]]] = {}  # a row of panels for each mode
    for (title, what), found in groups(known).items():
        rows.setdefault(found[0].mode, []).append((title, what, found))
    height, width = max(1, len(rows)), max([1, *map(len, rows.values())])
    figure = Figure(figsize=(6.4 * width, 4.3 * height + 0.4), dpi=120, layout="constrained")
    axes = figure.subplots(height, width, squeeze=False)
    for panel in axes.flatten():
        panel.set_axis_off()
    for line, row in zip(axes, rows.values(), strict=False):
        for panel, (title, what, found) in zip(line, row, strict=False):
            panel.set_axis_on()
            _draw(panel, title, what, found)
    figure.supxlabel(caption, fontsize=8, color="0.4")
    figure.savefig(path)


def _draw(panel: Any, title: str, what: str, results: Sequence[Result]) -> None:
    """Both axes are logarithmic, sparsity as the number of weights for each that is left."""
    from matplotlib import colormaps

    sparsities = sorted({result.sparsity for result in results})
    ends = [_inverse_density(sparsities[0]), _inverse_density(sparsities[-1])]
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlim(ends[0] / 1.15, ends[1] * 1.15)

    shapes = list(dict.fromkeys(result.shape for result in results))
    colors = colormaps["viridis"]
    for index, shape in enumerate(shapes):
        mine = sorted((r for r in results if r.shape == shape), key=lambda r: r.sparsity)
        off = f"{shape}, {OFF}"
        lines = {off if mine[0].engine == "off" else shape: [r.ratio for r in mine]}
        if any(r.off_ratio is not None for r in mine):
            lines[off] = [r.off_ratio for r in mine]
        for label, heights in lines.items():
            panel.plot(
                [_inverse_density(r.sparsity) for r in mine],
                heights,
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=4.5,
                linewidth=1.6,
                linestyle="--" if mine[0].kind == "conv layer" or label == off else "-",
                color=colors(0.9 * index / max(1, len(shapes) - 1)),
                label=label,
            )
        # Fainter where the best dense is not in float32.
        panel.plot(
            [_inverse_density(r.sparsity) for r in mine],
            [r.ratio_float32 for r in mine],
            linewidth=1,
            linestyle="-.",
            alpha=0.6,
            color=colors(0.9 * index / max(1, len(shapes) - 1)),
            label="vs. float32 dense" if index == len(shapes) - 1 else None,
        )
    panel.axhline(1, color="0.35", linewidth=1)
    panel.annotate("dense", (ends[0], 1), xytext=(0, 2), textcoords="offset points", fontsize=8)
    panel.plot(ends, ends, color="0.6", linewidth=1, linestyle=":", label="weights /\nconnections")

    panel.set_xticks(
        [_inverse_density(s) for s in sparsities], [f"{100 * s:g} %" for s in sparsities]
    )
    every = ((r.ratio, r.off_ratio, r.ratio_float32) for r in results)
    all_ratios = [ratio for of_one in every for ratio in of_one if ratio is not None]
    low, high = 0.8 * min(1, *all_ratios), 1.25 * max(*all_ratios, ends[1], 2)
    panel.set_ylim(low, high)
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    panel.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    panel.minorticks_off()
    panel.grid(True, color="0.9")
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_xlabel("sparsity")
    panel.set_ylabel("times faster than the best dense PyTorch")
    panel.set_title(title.replace(": ", "\n", 1), fontsize=10)
    panel.legend(
        title=what,
        fontsize=8,
        title_fontsize=8.5,
        frameon=False,
        handlelength=3,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.02),
    )


def _inverse_density(sparsity: float) -> float:
    return 1 / (1 - sparsity)
