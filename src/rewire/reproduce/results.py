"""The results of a sweep: accuracies of finished runs, as mean and deviation over seeds."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rewire.reproduce.recipes import Experiment
from rewire.reproduce.run import Run

if TYPE_CHECKING:
    from rich.table import Table

    from rewire.reproduce.sweep import Sweep
    from rewire.training.folder import Folder


@dataclass(frozen=True)
class Accuracy:
    """Test accuracies of runs that differ in their seed alone."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The standard deviation, of a sample; None for a single value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def __str__(self) -> str:
        mean = f"{100 * self.mean:.2f}"
        return mean if self.deviation is None else f"{mean} ± {100 * self.deviation:.2f}"


def accuracies(run: Run, folder: Folder) -> dict[str, float]:
    """The accuracies of a finished run, by sparsity in words ("" for a dense model).

    A lottery writes a line ``{"event": "round", "sparsity": ..., "accuracy": ...}`` for each round.
    """
    words, found = run.facets["sparsity"], {}
    for entry in folder.read():
        if entry["event"] == "round" and f"{entry['sparsity']:.2g}" in words:
            found[f"{entry['sparsity']:.2g}"] = float(entry["accuracy"])
        elif entry["event"] == "end":
            found[words[-1] if words else ""] = float(entry["accuracy"])
    return found


Cell = tuple[tuple[str, ...], tuple[str, ...], str]  # of which table, row and column


def collect(experiment: Experiment, sweep: Sweep, runs: Sequence[Run]) -> dict[Cell, Accuracy]:
    """What finished runs give, laid out as the experiment wants it."""
    cells: dict[Cell, list[float]] = {}
    for run in runs:
        if not sweep.folder(run).finished:
            continue
        for sparsity, accuracy in accuracies(run, sweep.folder(run)).items():
            words = {name: " ".join(found) for name, found in run.facets.items()}
            words["sparsity"] = sparsity
            table = tuple(words[name] for name in experiment.tables)
            row = tuple(words[name] for name in experiment.rows)
            cells.setdefault((table, row, words[experiment.columns]), []).append(accuracy)
    return {cell: Accuracy(tuple(values)) for cell, values in cells.items()}


def tables(experiment: Experiment, found: dict[Cell, Accuracy]) -> list[Table]:
    """For the screen, in percent."""
    from rich import box
    from rich.table import Table

    made = []
    for title in dict.fromkeys(cell[0] for cell in found):
        here = {cell[1:]: value for cell, value in found.items() if cell[0] == title}
        table = Table(box=box.SIMPLE)
        columns = sorted({column for _, column in here}, key=_order)
        table.add_column(" ".join(title), no_wrap=True)
        for column in columns:
            none = "0" if experiment.columns == "sparsity" else "-"
            table.add_column(column or none, justify="right", no_wrap=True)
        for row in dict.fromkeys(row for row, _ in here):
            cells = [str(here.get((row, column), "")) for column in columns]
            table.add_row(" ".join(filter(None, row)), *cells)
        made.append(table)
    return made


def _order(word: str) -> tuple[float, str]:
    """Numbers by size, whatever stands around them."""
    number = re.search(r"\d+(\.\d+)?", word)
    return (-1.0 if number is None else float(number[0])), word
