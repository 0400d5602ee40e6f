"""Pieces of HTML: tables, plots, pictures, commands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from rewire.report import colors, svg
from rewire.report.plot import Plot

_ENTRIES = 15  # of a legend; of more, the first and the last are shown
DASH = "–"  # noqa: RUF001


def tag(name: str, content: str, css: str = "") -> str:
    """An element; its content is HTML."""
    return f'<{name} class="{css}">{content}</{name}>' if css else f"<{name}>{content}</{name}>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], css: str = "") -> str:
    """A table that scrolls inside its box; cells are HTML, and may be whole ``<td>`` elements."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        f"<tr>{''.join(c if c.startswith('<td') else f'<td>{c}</td>' for c in row)}</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll {css}" tabindex="0"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def figure(plot: Plot) -> str:
    """A plot with its title above and its legend below."""
    shown = plot.legend if len(plot.legend) <= _ENTRIES else [plot.legend[0], plot.legend[-1]]
    between = " to " if len(shown) < len(plot.legend) else ""
    entries = between.join(
        f'<button type="button" data-label="{escape(one.entry)}"><i class="{"dash" if one.dashed else ""}" '
        f'style="--c:{colors.css(one.color)}"></i>{escape(one.entry)}</button>'
        for one in shown
    )
    named = plot.title.lower().startswith(plot.y_label.lower())
    below = plot.subtitle or ("" if named else plot.y_label)
    subtitle = tag("span", escape(below)) if below else ""
    return (
        f'<figure class="card"><figcaption><b>{escape(plot.title)}</b>{subtitle}</figcaption>'
        f'{svg.inline(plot)}<div class="legend">{entries}</div></figure>'
    )


def command(text: str) -> str:
    """A line to type, with a button that copies it."""
    return (
        f'<div class="command"><code>{escape(text)}</code>'
        '<button type="button" class="copy">Copy</button></div>'
    )


def swatch(color: str, label: str) -> str:
    """A label with its colour before it."""
    return f'<span class="key"><i style="--c:{colors.css(color)}"></i>{escape(label)}</span>'


def chip(text: str, css: str) -> str:
    """A word in a small box."""
    return f'<span class="chip {css}">{escape(text)}</span>'


def value(mean: float, deviation: float, digits: int = 1) -> str:
    """A mean, and how far seeds are from it.

    >>> value(85.123, 0.2), value(85.1, math.nan), value(math.nan, 0)
    ('85.1<small>±0.2</small>', '85.1', '–')
    """
    if not math.isfinite(mean):
        return DASH
    spread = f"<small>±{deviation:.{digits}f}</small>" if math.isfinite(deviation) else ""
    return f"{mean:.{digits}f}{spread}"


def signed(number: float) -> str:
    """A difference, with its sign.

    >>> signed(0.24), signed(-1.5), signed(0.01)
    ('+0.2', '−1.5', '±0.0')
    """
    if abs(number) < 0.05:
        return "±0.0"
    return f"{'+' if number > 0 else '−'}{abs(number):.1f}"  # noqa: RUF001
