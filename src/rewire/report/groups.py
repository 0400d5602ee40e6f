"""Runs that differ by their seed alone, and what they come to together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from rewire.report.runs import FINISHED, Run, number

METHODS = (
    *("dense", "lottery", "gradual", "static", "snip", "grasp", "synflow"),
    *("deepr", "dsr", "snfs", "rigl", "topkast", "set", "gse"),
)
"""In the order of the paper's table."""

INTERVAL = (2.5, 97.5)  # the percentiles that hold 95 % of the seeds, as in the paper's plots


@dataclass(frozen=True)
class Curve:
    """A metric over time: its mean over the seeds, and the band that holds 95 % of them."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Group:
    """Runs of the same settings.

    Attributes:
        config: the settings, without the seed.
        runs: one for each seed.
    """

    config: Mapping[str, Any]
    runs: Sequence[Run]

    @property
    def finished(self) -> list[Run]:
        """Those whose end is known."""
        return [run for run in self.runs if run.status == FINISHED]

    @property
    def complete(self) -> bool:
        """Whether any of them is finished; if not, results are those so far."""
        return bool(self.finished)

    @property
    def accuracies(self) -> list[float]:
        """In percent, of the finished runs, or of all if none is."""
        found = [100 * run.accuracy for run in self.finished or self.runs]
        return [value for value in found if math.isfinite(value)]

    @property
    def mean(self) -> float:
        """Of the accuracies; nan if there are none."""
        return fmean(self.accuracies) if self.accuracies else math.nan

    @property
    def deviation(self) -> float:
        """The standard deviation of the accuracies; nan for one alone."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else math.nan

    @property
    def band(self) -> tuple[float, float]:
        """The interval that holds 95 % of the accuracies."""
        low, high = np.percentile(self.accuracies, INTERVAL) if self.accuracies else (math.nan,) * 2
        return float(low), float(high)

    @property
    def speed(self) -> float:
        """Training images per second, the median of the seeds."""
        found = [run.speed for run in self.runs if math.isfinite(run.speed)]
        return median(found) if found else math.nan

    @property
    def seconds(self) -> float:
        """The mean time of a finished run."""
        found = [run.seconds for run in self.finished if math.isfinite(run.seconds)]
        return fmean(found) if found else math.nan

    @property
    def core_hours(self) -> float:
        """Of all finished runs together; nan if one does not say."""
        return sum(run.core_hours for run in self.finished) if self.finished else math.nan

    def last(self, name: str) -> float:
        """A number of the line at the end, of the first run that has it."""
        found = (number(run.end, name) for run in self.finished if run.end)
        return next((value for value in found if math.isfinite(value)), math.nan)

    def curve(self, lines: str, x: str, y: str, scale: float = 1.0) -> Curve:
        """A metric of all runs; at each point those that came so far."""
        values: dict[float, list[float]] = {}
        for run in self.runs:
            for entry in getattr(run, lines):
                value = number(entry, y)
                if math.isfinite(value):
                    values.setdefault(number(entry, x), []).append(scale * value)
        points = sorted(values)
        low, high = (
            zip(*(np.percentile(values[p], INTERVAL) for p in points), strict=True)
            if points
            else ((), ())
        )
        return Curve(
            points,
            [fmean(values[p]) for p in points],
            [float(v) for v in low],
            [float(v) for v in high],
        )


def rank(method: str) -> int:
    """Where a method stands in the paper's table."""
    return METHODS.index(method) if method in METHODS else len(METHODS)


def group(runs: Iterable[Run]) -> list[Group]:
    """Put the seeds of each setting together, in the order of the paper; damaged configs are left out.

    Sweeps are kept apart.
    """
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.config:
            sweep = "" if run.sweep is None else str(run.sweep.path)
            found.setdefault((sweep, repr(sorted(settings(run).items()))), []).append(run)
    groups = [
        Group(settings(seeds[0]), sorted(seeds, key=lambda run: (run.config["seed"], run.name)))
        for seeds in found.values()
    ]
    return sorted(groups, key=_order)


def settings(run: Run) -> dict[str, Any]:
    """The config without the seed."""
    return {name: value for name, value in run.config.items() if name != "seed"}


def _order(one: Group) -> tuple[Any, ...]:
    c = one.config
    rest = repr(sorted(c.items()))
    return c["dataset"], c["model"], rank(c["method"]), c["method"], c["sparsity"], rest


def differing(groups: Sequence[Group], but: Iterable[str]) -> list[str]:
    """Settings in which groups of the same method differ, apart from some."""
    left_out, names = set(but), []
    for method in {g.config["method"] for g in groups}:
        mine = [g.config for g in groups if g.config["method"] == method]
        for name in mine[0]:
            if name not in left_out and len({repr(c.get(name)) for c in mine}) > 1:
                names.append(name)
    return sorted(set(names))
