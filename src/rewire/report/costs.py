"""What runs cost: connections, FLOPs, and speed against dense."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rewire.report import html
from rewire.report.groups import Group
from rewire.report.plot import Plot, Series, slug
from rewire.report.views import Namer, View
from rewire.training.formatting import big, duration

_SAME = ("dataset", "model", "width", "batch_size", "image_size")


def costs(view: View, groups: Sequence[Group], namer: Namer, name: str) -> tuple[str, Plot]:
    """A table of all groups, and how many times faster than dense they are."""
    labels = list(dict.fromkeys(namer.label(g.config) for g in groups))
    lines: dict[str, list[tuple[float, float]]] = {}
    rows, ticks, shades = [], {}, {}
    for group in groups:
        config, label = group.config, namer.label(group.config)
        place, times = view.place(config), faster(group, groups)
        if place is not None:
            ticks[view.position(place)] = view.tick(place, config)
            if math.isfinite(times) and config["method"] != "dense":
                lines.setdefault(label, []).append((view.position(place), times))
                shades[label] = namer.color(config, labels)
        rows.append(
            [
                html.swatch(namer.color(config, labels), label),
                html.DASH if place is None else view.tick(place, config),
                str(len(group.runs)),
                html.value(group.mean, group.deviation),
                _known(group.last("connections"), lambda v: f"{v:,.0f}"),
                _known(group.last("training_flops"), lambda v: big(v)),
                _share(group),
                _known(group.speed, lambda v: f"{v:,.0f}"),
                _known(times, lambda v: f"{v:.2f}×"),  # noqa: RUF001
                _known(group.seconds, duration),
                _known(group.core_hours, lambda v: f"{v:.3g}"),
            ]
        )
    head = ["", view.x_name, "seeds", "accuracy", "connections", "training FLOPs"]
    head += ["of dense", "images/s", "against dense", "time of a run", "core-hours"]
    series = [Series("Dense", "dense", (), [1.0], dashed=True)] if lines else []
    for label, points in lines.items():
        x, y = zip(*sorted(points), strict=True)
        series.append(Series(label, shades[label], x, y, dots=True))
    plot = Plot(
        slug(f"{name} speed"),
        title=name or "Speed against dense",
        subtitle="images per second, compared to dense",
        x_label=view.x_label,
        y_label="times as many images per second as dense",
        series=series if len(ticks) > 1 else [],
        log_x=view.x == "sparsity",
        ticks=sorted(ticks.items()),
        unit="×",  # noqa: RUF001
    )
    table = html.table(head, rows, "numbers")
    if not name:
        return html.tag("div", table, "card"), plot
    return (
        f"<details><summary><b>All numbers of {escape(name)}</b></summary>{table}</details>",
        plot,
    )


def faster(group: Group, groups: Sequence[Group]) -> float:
    """How many times as many images per second as the dense run of the same model, in any precision the
    fastest; nan without one."""
    dense = [
        other.speed
        for other in groups
        if other.config["method"] == "dense" and _same(other.config, group.config)
    ]
    fastest = max((speed for speed in dense if speed > 0), default=math.nan)
    return group.speed / fastest


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(a.get(name) == b.get(name) for name in _SAME)


def _share(group: Group) -> str:
    flops, dense = group.last("training_flops"), group.last("dense_training_flops")
    return f"{100 * flops / dense:.3g} %" if dense > 0 and math.isfinite(flops) else html.DASH


def _known(number: float, shown: Any) -> str:
    return str(shown(number)) if math.isfinite(number) else html.DASH
