"""Making the page and the files of its plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rewire import files
from rewire.report import png, runs, svg
from rewire.report.groups import group
from rewire.report.page import page
from rewire.report.plot import Plot
from rewire.report.runs import Found
from rewire.report.sections import sections


def write(
    folders: Sequence[Path],
    out: Path,
    plots: Path | None = None,
    *,
    title: str = "Rewire report",
    tell: Callable[[str], None] = lambda what: None,
) -> Found:
    """Write the page of all runs in and below folders; the same runs give the same page.

    Args:
        folders: runs, sweeps, or folders above them.
        out: the HTML file.
        plots: a folder for all plots as SVG and PNG.
        title: at the top.
        tell: is called with what is being done.

    Raises:
        ValueError: if there is no run.
    """
    found = runs.find(folders, lambda name: tell(f"reading {name}"))
    groups = group(found.runs)
    made = sections(found, groups, lambda name: tell(f"drawing {name}"))
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(out, page(found, groups, made, title))
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        drawn = [i for one in made for part in one.parts for i in part.items if isinstance(i, Plot)]
        for index, plot in enumerate(drawn, 1):
            tell(f"plot {index} of {len(drawn)}: {plot.name}")
            files.write_text(plots / f"{plot.name}.svg", svg.file(plot))
            png.save(plot, plots / f"{plot.name}.png")
    return found


class Shown:
    """Tells in a terminal what is being done; elsewhere nothing, as the page is there soon."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console

        screen = Console(stderr=True)
        self._status: Any = None
        if screen.is_terminal and not quiet:
            self._status = screen.status("looking for runs")

    def __enter__(self) -> Shown:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def tell(self, what: str) -> None:
        """Say what is being done."""
        if self._status is not None:
            self._status.update(what)
