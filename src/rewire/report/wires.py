"""Plots and pictures of where a run's connections are."""

from __future__ import annotations

from html import escape

from rewire.report import colors, html, wiring
from rewire.report.groups import Group
from rewire.report.plot import Plot, Series, slug, thin
from rewire.report.wiring import Layer

_SHOWN = 3  # layers of a run


def over_time(group: Group, tag: str) -> Plot | None:
    """The density of each layer of the first seed, if connections move between layers."""
    for run in group.runs:
        found = wiring.densities(run, wiring.layers(run))
        if not found:
            continue
        series = []
        for index, (name, (steps, density)) in enumerate(found.items()):
            x, y = thin(steps, density)
            color = colors.ramp(index / max(1, len(found) - 1))
            series.append(Series(f"layer {name}", color, x, y))
        return Plot(
            slug(f"density {tag}"), tag, "training step", "density", series, log_y=True, unit="%"
        )
    return None


def pictures(group: Group, tag: str) -> list[str | Plot]:
    """Connections of some layers before and after, of the first seed that has them."""
    for run in group.runs:
        layers = wiring.layers(run)
        if layers:
            chosen = _chosen(layers)
            cards = "".join(_card(layer) for layer in chosen)
            seed = f" · seed {run.config['seed']}"
            head = f"<h4>{escape(tag)}<span>{escape(seed)}</span></h4>"
            return [f'<div class="wiring">{head}<div class="layers">{cards}</div></div>']
    return []


def _chosen(layers: list[Layer]) -> list[Layer]:
    """The first, the largest and the last."""
    largest = max(layers, key=lambda layer: layer.n_in * layer.n_out)
    return list(
        {
            layer.name: layer for layer in layers if layer in (layers[0], largest, layers[-1])
        }.values()
    )[:_SHOWN]


def _card(layer: Layer) -> str:
    before, after = layer.matrices()
    size = f"{layer.n_in:,} × {layer.n_out:,}"  # noqa: RUF001
    held = f"{len(layer.before):,} → {len(layer.after):,} connections"
    facts = f"{size}, {held}, {100 * layer.kept:.0f} % of the first still there"
    both = _pair(before, after, f"connections of layer {layer.name}")
    seen = layer.pixels()
    more = ""
    if seen is not None:
        more = html.tag("p", "Connections of each pixel", "note") + _pair(
            *seen, "connections of each pixel", "pixels"
        )
    return (
        f'<div class="card"><b>Layer {escape(layer.name)}</b>{html.tag("p", facts, "note")}{both}{more}'
        f"{_degrees(layer)}</div>"
    )


def _pair(before: str, after: str, what: str, css: str = "") -> str:
    shown = "".join(
        f'<figure><img src="{source}" alt="{escape(what)}, {when}"><figcaption>{when}</figcaption></figure>'
        for when, source in (("before", before), ("after", after))
    )
    return html.tag("div", shown, f"pair {css}".strip())


def _degrees(layer: Layer) -> str:
    """How connections are spread over the inputs, in words."""
    first, then = (layer.fan_out(keys) for keys in (layer.before, layer.after))
    words = (
        f"Connections of an input: {first.mean():,.1f} → {then.mean():,.1f} on average, "
        f"{first.max():,.0f} → {then.max():,.0f} at most; inputs without any: "
        f"{int((first == 0).sum()):,} → {int((then == 0).sum()):,}."
    )
    return html.tag("p", words, "note")
