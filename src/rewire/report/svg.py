"""Plots as SVG: part of the page, in its colours, or files of their own."""

from __future__ import annotations

import json
import math
from html import escape

from rewire.report import colors
from rewire.report.plot import Plot, Scale, Series

WIDTH, HEIGHT = 440, 272
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 12, 44
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
STYLE = f"""\
.plot text{{font:12px {_FONT};fill:var(--muted)}}
.plot .grid{{stroke:var(--grid);stroke-width:1}}
.plot .line{{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}}
.plot .dashed{{stroke-width:1.4;stroke-dasharray:5 4;opacity:.85}}
.plot .band{{opacity:.15;stroke:none}}
.plot .dot{{stroke:var(--paper);stroke-width:1.5}}
.plot .hollow{{fill:var(--paper);stroke-width:1.5}}
"""


def inline(plot: Plot) -> str:
    """For the page, with what its script needs to show values under the pointer."""
    label = escape(f"{_title(plot)}: {plot.y_label} against {plot.x_label}")
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        f"data-values='{escape(_values(plot), quote=True)}'>{_body(plot)}"
        f'<line class="cursor" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" visibility="hidden"/></svg>'
    )


def file(plot: Plot) -> str:
    """A file with title and legend, in light and dark colours by what shows it."""
    rows, x, y = [], 16.0, 60.0
    for one in plot.legend:
        wide = 30 + 6.9 * len(one.label)
        if x + wide > WIDTH and x > 16:
            x, y = 16.0, y + 18
        dash = ' stroke-dasharray="4 3"' if one.dashed else ""
        rows.append(
            f'<line x1="{x:g}" x2="{x + 16:g}" y1="{y - 4:g}" y2="{y - 4:g}" stroke-width="2.5"'
            f' style="stroke:{colors.css(one.color)}"{dash}/>'
            f'<text x="{x + 21:g}" y="{y:g}">{escape(one.label)}</text>'
        )
        x += wide
    head = round(y + 10)
    title = f'<text x="16" y="24" class="title">{escape(_title(plot))}</text>'
    title += f'<text x="16" y="41">{escape(plot.y_label)}</text>'
    style = (
        f"{colors.variables()}{STYLE}.plot .title{{font-size:14px;font-weight:600;fill:var(--ink)}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {WIDTH} {HEIGHT + head}" '
        f'width="{2 * WIDTH}" height="{2 * (HEIGHT + head)}"><style>{style}</style>'
        f'<rect width="100%" height="100%" style="fill:var(--paper)"/>{title}{"".join(rows)}'
        f'<g transform="translate(0 {head})">{_body(plot)}</g></svg>\n'
    )


def _title(plot: Plot) -> str:
    return f"{plot.title}: {plot.subtitle}" if plot.subtitle else plot.title


def _x(scale: Scale, value: float) -> float:
    return _LEFT + scale.share(value) * (WIDTH - _LEFT - _RIGHT)


def _y(scale: Scale, value: float) -> float:
    return _TOP + (1 - scale.share(value)) * (HEIGHT - _TOP - _BOTTOM)


def _body(plot: Plot) -> str:
    across, up = plot.scales()
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = []
    for value, label in plot.y_ticks():
        y = _y(up, value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text x="{_LEFT - 7}" y="{y + 4.3:.1f}" text-anchor="end">{escape(label)}</text>'
        )
    for value, label in plot.x_ticks():
        x = _x(across, value)
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(label)}</text>'
        )
    middle = (_LEFT + right) / 2
    parts.append(
        f'<text x="{middle:g}" y="{HEIGHT - 6}" text-anchor="middle">{escape(plot.x_label)}</text>'
    )
    drawn = (_series(one, index, across, up) for index, one in enumerate(plot.series))
    return "".join([*parts, *drawn])


def _series(one: Series, index: int, across: Scale, up: Scale) -> str:
    color, parts = colors.css(one.color), []
    if band := one.band:
        edge = [f"{_x(across, x):.1f},{_y(up, high):.1f}" for x, _, high in band]
        edge += [f"{_x(across, x):.1f},{_y(up, low):.1f}" for x, low, _ in reversed(band)]
        parts.append(f'<polygon class="band" style="fill:{color}" points="{" ".join(edge)}"/>')
    points = [(_x(across, x), _y(up, y)) for x, y in one.points]
    if not one.x and one.y:
        points = [(_LEFT, _y(up, one.y[0])), (WIDTH - _RIGHT, _y(up, one.y[0]))]
    if len(points) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = " dashed" if one.dashed else ""
        parts.append(f'<polyline class="line{dashed}" style="stroke:{color}" points="{path}"/>')
    if (one.dots and one.x) or len(points) == 1:
        kind, paint = ("hollow", "stroke") if one.dashed else ("dot", "fill")
        parts += [
            f'<circle class="{kind}" style="{paint}:{color}" cx="{x:.1f}" cy="{y:.1f}" r="3.6"/>'
            for x, y in points
        ]
    return f'<g data-series="{index}" data-label="{escape(one.entry)}">{"".join(parts)}</g>'


def _values(plot: Plot) -> str:
    """Where values of x are, what they are called, and those of each line there."""
    across, _ = plot.scales()
    named = dict(plot.ticks)
    places = sorted({x for one in plot.series for x, _ in one.points})
    lines = []
    for one in plot.series:
        held = dict(one.points) if one.x else dict.fromkeys(places, one.y[0] if one.y else math.nan)
        values = [_rounded(held[x]) if x in held else None for x in places]
        lines.append([one.label, colors.css(one.color), values, one.entry])
    return json.dumps(
        {
            "at": [round(_x(across, x), 1) for x in places],
            "x": [named.get(x, f"{x:.5g}") for x in places],
            "name": plot.x_label,
            "unit": plot.unit,
            "lines": lines,
        },
        separators=(",", ":"),
        ensure_ascii=False,
    )


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
