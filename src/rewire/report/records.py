"""Experiments without training: the records of ``results.json`` as plots and a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rewire.report import colors, html, paper
from rewire.report.plot import Plot, Series, short, slug
from rewire.report.runs import Sweep, number

_TITLES = {
    "flops": (
        "Training FLOPs of GSE and RigL",
        "Figure 4",
        "What GSE saves compared to RigL, for ResNet-50 on ImageNet.",
    ),
    "matmul": (
        "Sparse times dense matrices",
        "Figure 8",
        "The time of a product of an n×n sparse matrix with an n×128 dense one.",  # noqa: RUF001
    ),
}
_MOST = 200  # rows of the table


def of_records(sweep: Sweep) -> tuple[str, str, str, list[Plot | str]]:
    """Title, source, a sentence, and what to show."""
    title, source, lead = _TITLES.get(
        sweep.experiment, (sweep.experiment or sweep.path.name, "", "")
    )
    items: list[Plot | str] = []
    if sweep.experiment == "flops":
        items += [_savings(sweep.records)]
    elif sweep.experiment == "matmul":
        items += _times(sweep.records)
    items = [item for item in items if isinstance(item, str) or not item.empty]
    if sweep.records:
        items.append(html.tag("div", _table(sweep.records), "card"))
    problems = [*sweep.problems] or ([] if sweep.records else ["there are no results yet"])
    items += [html.tag("p", escape(problem), "problem") for problem in problems]
    return title, source, lead, items


def _savings(records: Sequence[Mapping[str, Any]]) -> Plot:
    """All numbers that are called a saving, in percent, against sparsity."""
    names = sorted({k for record in records for k in record if "saving" in k})
    series = []
    for index, name in enumerate(names):
        rows = [(number(r, "sparsity"), number(r, name)) for r in records]
        points = sorted((x, y) for x, y in rows if math.isfinite(x) and math.isfinite(y))
        if points:
            x, y = zip(*points, strict=True)
            label = name.replace("_", " ")
            series.append(Series(label, colors.other(index), [100 * v for v in x], y, dots=True))
    if series:
        printed = paper.about("flops")
        at = [100 * v for v in printed["sparsity"]]
        series.append(
            Series("paper", "ink", at, printed["saving"], dashed=True, dots=True, paper=True)
        )
    return Plot("flops", "FLOPs saved", "sparsity (%)", "saving over RigL", series, unit="%")


_SIZES, _TIMES = ("units", "n", "size"), ("milliseconds", "ms", "seconds", "time")
_FORMATS = ("format", "kind", "backend", "method", "name")


def _times(records: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Time against size, a line for each format, a plot for each sparsity."""
    held = {key for record in records for key in record}
    size, time, kind = (
        next((name for name in names if name in held), "") for names in (_SIZES, _TIMES, _FORMATS)
    )
    plots = []
    for sparsity in sorted({number(r, "sparsity") for r in records}):
        mine = [r for r in records if number(r, "sparsity") == sparsity]
        series = []
        for index, name in enumerate(sorted({str(r.get(kind)) for r in mine})):
            rows = [(number(r, size), number(r, time)) for r in mine if str(r.get(kind)) == name]
            points = sorted((x, y) for x, y in rows if x > 0 and y > 0)
            if points:
                x, y = zip(*points, strict=True)
                series.append(Series(name, colors.other(index), x, y, dots=True))
        sizes = sorted({x for one in series for x in one.x})
        plots.append(
            Plot(
                slug(f"matmul {sparsity:g}"),
                f"Sparsity {100 * sparsity:g}\u2009%",
                "units",
                time,
                series,
                log_x=True,
                log_y=True,
                ticks=[(x, short(x)) for x in sizes],
            )
        )
    return plots


def _table(records: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(key for record in records for key in record))
    rows = [[_cell(record.get(name)) for name in names] for record in records[:_MOST]]
    return html.table([escape(name.replace("_", " ")) for name in names], rows, "numbers")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return (
        html.DASH if value is None else escape(f"{value:,}" if type(value) is int else str(value))
    )
