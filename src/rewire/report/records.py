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


def of_records(sweep: Sweep) -> tuple[str, str, str, list[Plot], list[str]]:
    """Title, source, a sentence, plots, and other things to show."""
    usual = (sweep.experiment or sweep.path.name, "", "")
    title, source, lead = _TITLES.get(sweep.experiment, usual)
    plots: list[Plot] = []
    if sweep.experiment == "flops":
        plots = [_savings(sweep.records)]
    elif sweep.experiment == "matmul":
        plots = _times(sweep.records)
    problems = [*sweep.problems] or ([] if sweep.records else ["There are no results yet."])
    others = [html.tag("p", escape(problem), "problem") for problem in problems]
    if sweep.records:
        others.append(html.tag("div", _table(sweep.records), "card"))
    return title, source, lead, [plot for plot in plots if sweep.records], others


def _savings(records: Sequence[Mapping[str, Any]]) -> Plot:
    """What GSE saves, of its own cost and of RigL's, with a dense and with a sparse head."""
    series: list[Series] = []
    for head in dict.fromkeys(str(record.get("head")) for record in records):
        mine = [record for record in records if str(record.get("head")) == head]
        for name, of in (("saving_of_gse", "GSE's"), ("saving_of_rigl", "RigL's")):
            points = _points(mine, "sparsity", name)
            x, y = [_position(x) for x, _ in points], [100 * y for _, y in points]
            color = colors.of("gse" if "gse" in name else "rigl", 0 if head == "dense" else 1)
            series.append(Series(f"{head} head, of {of} cost", color, x, y, dots=True))
    at = sorted({number(record, "sparsity") for record in records})
    printed = paper.about("flops")
    for share, saved in zip(printed["sparsity"], printed["saving"], strict=True):
        point = ([_position(share)], [saved])
        series.append(Series("paper", "ink", *point, dashed=True, dots=True, paper=True))
    ticks = [(_position(s), f"{100 * s:g}") for s in at if s in _TICKS]
    return Plot(
        "flops",
        "FLOPs saved",
        "sparsity, %",
        "share of training FLOPs",
        series,
        log_x=True,
        ticks=ticks,
        unit="%",
    )


_TICKS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
_FORMATS = {"ours": "gse", "dense": "dense", "csr": "rigl", "coo": "set"}


def _times(records: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Time against size, a line for each format, a plot for each sparsity."""
    plots = []
    for sparsity in sorted({number(record, "sparsity") for record in records}):
        mine = [record for record in records if number(record, "sparsity") == sparsity]
        formats = dict.fromkeys(key for record in mine for key in record if key.endswith("_ms"))
        series = []
        for key in formats:
            name, points = key.removesuffix("_ms"), _points(mine, "units", key)
            label = name.upper() if name in ("csr", "coo") else name.capitalize()
            x, y = [x for x, _ in points], [y for _, y in points]
            series.append(Series(label, _FORMATS.get(name, "muted"), x, y, dots=True))
        sizes = sorted({number(record, "units") for record in mine})
        title = f"Sparsity {100 * sparsity:g}\u2009%"
        ticks = [(size, short(size)) for size in sizes if size > 0]
        name = slug(f"matmul {sparsity:g}")
        plots.append(Plot(name, title, "units", "milliseconds", series, True, True, ticks))
    return plots


def _points(records: Sequence[Mapping[str, Any]], x: str, y: str) -> list[tuple[float, float]]:
    found = [(number(record, x), number(record, y)) for record in records]
    return sorted(pair for pair in found if all(map(math.isfinite, pair)))


def _position(sparsity: float) -> float:
    """Sparsities by how many weights there are for each connection."""
    return 1 / (1 - min(sparsity, 1 - 1e-9))


def _table(records: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(key for record in records for key in record))
    rows = [[_cell(record.get(name)) for name in names] for record in records[:_MOST]]
    return html.table([escape(name.replace("_", " ")) for name in names], rows, "numbers")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return (
        html.DASH if value is None else escape(f"{value:,}" if type(value) is int else str(value))
    )
