"""``rewire data``: the data sets on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="See which data sets there are, and get them.",
)

RootOption = Annotated[
    Path | None,
    typer.Option(
        "--root",
        metavar="DIR",
        help="The folder to look in, and to download to.",
        show_default="the folder in REWIRE_DATA, then the user's cache",
    ),
]


@app.command("list")
def list_(root: RootOption = None) -> None:
    """The data sets, and where they are.

    Any folder that holds one folder of images for each class can be used like them, by its path.

    Example: `rewire data list`
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from rewire.data import sources

    table = Table(box=box.SIMPLE)
    table.add_column("name", no_wrap=True)
    table.add_column("images", no_wrap=True)
    table.add_column("where", overflow="fold")
    table.add_row(sources.PACKAGED, "1,797 in 10 classes, 8x8 grey", "in the package")
    for name, source in sources.SOURCES.items():
        path = sources.find(name, root)
        how = "to be downloaded" if source.download else "to be asked for"
        table.add_row(name, source.about, how if path is None else str(path))
    Console().print(table)


@app.command("get")
def get_(
    name: Annotated[str, typer.Argument(help="One of those that `rewire data list` shows.")],
    root: RootOption = None,
) -> None:
    """Download a data set, unless it is there and whole.

    What was downloaded is checked against its official checksum.

    Example: `rewire data get cifar10`
    """
    from rewire.data import sources
    from rewire.data.places import DataError

    if name not in sources.NAMES:
        raise typer.BadParameter(
            f"there is no data set {name!r}; choose one of {', '.join(sources.NAMES)}",
            param_hint="NAME",
        )
    if name == sources.PACKAGED:
        typer.echo(f"{name} comes with the package; there is nothing to get.")
        return
    try:
        path = sources.get(name, root)
    except DataError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{name} is in {path}")
