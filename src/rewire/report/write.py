"""Making the page and the files of its plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rewire import files
from rewire.report import markdown, png, runs, svg
from rewire.report.groups import group
from rewire.report.page import page
from rewire.report.plot import Plot
from rewire.report.progress import Tell, silent
from rewire.report.runs import Found
from rewire.report.sections import sections


def write(
    folders: Sequence[Path],
    out: Path | None,
    plots: Path | None = None,
    *,
    tables: Path | None = None,
    title: str = "Rewire report",
    tell: Tell = silent,
) -> Found:
    """Write the page of all runs in and below folders; the same runs give the same page.

    Args:
        folders: runs, sweeps, or folders above them.
        out: the HTML file; None for none.
        plots: a folder for all plots as SVG and PNG.
        tables: a Markdown file, see :mod:`rewire.report.markdown`.
        title: at the top.
        tell: is called with what is being done, how much of it is done, and how much there is.

    Raises:
        ValueError: if there is no run, or no place for tables in the Markdown file.
    """
    found = runs.find(folders, tell)
    groups = group(found.runs)
    if tables is not None:
        markdown.write(tables, found, groups)
    if out is None and plots is None:
        return found
    made = sections(found, groups, tell)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(out, page(found, groups, made, title))
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        drawn = {
            f"{section.name}-{item.name}": item
            for section in made
            for part in section.parts
            for item in part.items
            if isinstance(item, Plot)
        }
        for index, (name, plot) in enumerate(drawn.items()):
            tell("drawing", index, len(drawn))
            files.write_text(plots / f"{name}.svg", svg.file(plot))
            png.save(plot, plots / f"{name}.png")
    return found
