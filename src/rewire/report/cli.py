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
        Path, typer.Option("--out", "-o", metavar="HTML", help="The page to write.")
    ] = Path("report.html"),
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write every plot there, as SVG and PNG.", show_default=False
        ),
    ] = None,
    title: Annotated[str, typer.Option(help="At the top of the page.")] = "Rewire report",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but problems.")] = False,
) -> None:
    """Show runs as a page.

    Everything that `rewire train` and `rewire reproduce` have written in and below the folders goes to
    one HTML file that needs no network: accuracy with the paper's numbers beside it, curves, density of
    layers, turnover, pictures of connections, speed against dense, and the command that repeats each
    run. Runs that are unfinished or damaged are shown as such.

    Example: `rewire report runs -o report.html --plots plots`
    """
    from rewire.report.progress import Shown
    from rewire.report.write import write

    try:
        with Shown(quiet) as shown:
            found = write(folders, out, plots, title=title, tell=shown.tell)
    except (ValueError, OSError) as error:
        typer.echo(files.problem(error), err=True)
        raise typer.Exit(1) from None
    if not quiet:
        states = [run.status for run in found.runs]
        counts = ", ".join(f"{states.count(s):,} {s}" for s in dict.fromkeys(sorted(states)))
        runs = f"{len(states):,} run{'s' * (len(states) != 1)}"
        size = out.stat().st_size / 1e3
        typer.echo(f"Wrote {out} ({size:,.0f} kB): {runs}{f' ({counts})' if counts else ''}")
        if plots is not None:
            typer.echo(f"Wrote plots to {plots}")
