"""``rewire report`` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rewire import files


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR", help="Runs, sweeps, or folders above them.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="HTML",
            help="The page to write: report.html, unless something else is asked for.",
            show_default=False,
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write every plot there, as SVG and PNG.", show_default=False
        ),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write tables of results into this Markdown file, between its marks.",
            show_default=False,
        ),
    ] = None,
    archive: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Copy config and metrics of finished runs there, without weights.",
            show_default=False,
        ),
    ] = None,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Copy unfinished runs, too, as far as they are.")
    ] = False,
    title: Annotated[str, typer.Option(help="At the top of the page.")] = "Rewire report",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but problems.")] = False,
) -> None:
    """Show runs as a page.

    Everything that `rewire train` and `rewire reproduce` have written in and below the folders goes to
    one HTML file that needs no network: accuracy with the paper's numbers beside it, curves, density of
    layers, turnover, pictures of connections, speed against dense, and the command that repeats each
    run. Runs that are unfinished or damaged are shown as such.

    With `--archive` the text of runs is copied to a folder that is small enough for a repository, and with
    `--markdown` tables are written into a file; both can be repeated as runs go on.

    Examples: `rewire report runs -o report.html --plots plots`, `rewire report runs --archive results`,
    `rewire report results --markdown docs/results.md`
    """
    from rewire.report.archive import Archived
    from rewire.report.archive import archive as copy
    from rewire.report.progress import Shown
    from rewire.report.write import write

    if unfinished and archive is None:
        raise typer.BadParameter("--unfinished says what --archive copies: give --archive, too")
    if out is None and markdown is None and archive is None:  # plots come with the page
        out = Path("report.html")
    copied: Archived | None = None
    try:
        with Shown(quiet) as shown:
            if archive is not None:
                copied = copy(folders, archive, unfinished=unfinished, tell=shown.tell)
            if out is not None or plots is not None or markdown is not None:
                found = write(folders, out, plots, tables=markdown, title=title, tell=shown.tell)
    except (ValueError, OSError) as error:
        typer.echo(files.problem(error), err=True)
        raise typer.Exit(1) from None
    if copied is not None and copied.left_out:
        typer.echo(f"Not copied: {', '.join(copied.left_out)}", err=True)
    if quiet:
        return
    if copied is not None:
        done = f"{len(copied.written):,} copied, {len(copied.same):,} up to date"
        typer.echo(f"{archive}: {done}, {len(copied.left_out):,} left out")
    if out is not None:
        states = [run.status for run in found.runs]
        counts = ", ".join(f"{states.count(s):,} {s}" for s in dict.fromkeys(sorted(states)))
        runs = f"{len(states):,} run{'s' * (len(states) != 1)}"
        size = out.stat().st_size / 1e3
        typer.echo(f"Wrote {out} ({size:,.0f} kB): {runs}{f' ({counts})' if counts else ''}")
    if plots is not None:
        typer.echo(f"Wrote plots to {plots}")
    if markdown is not None:
        typer.echo(f"Wrote tables to {markdown}")
