"""The command line: ``rewire``, or ``python -m rewire``."""

from __future__ import annotations

from typing import Annotated

import typer

import rewire
from rewire import flops_cli as flops
from rewire.bench.cli import app as bench
from rewire.data.cli import app as data
from rewire.report.cli import report
from rewire.reproduce import cli as reproduce
from rewire.training import cli as training

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Always-sparse neural-network training for PyTorch.",
    rich_markup_mode="markdown",
    epilog="Example: `rewire train`",
)
app.command()(training.train)
app.command("eval")(training.evaluate)
app.command()(training.predict)
app.command()(training.export)
app.command()(report)
app.command(no_args_is_help=True)(reproduce.reproduce)
app.command("flops")(flops.show)
app.add_typer(bench, name="bench")
app.add_typer(data, name="data")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rewire {rewire.__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Always-sparse neural-network training for PyTorch."""


@app.command()
def methods() -> None:
    """The methods there are: what is ever dense in them, and what they cost.

    Example: `rewire methods`
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from rewire.methods import registry

    table = Table(box=box.SIMPLE)
    table.add_column("name", no_wrap=True)
    headings = ("storage", "dense weights", "dense gradients", "training FLOPs", "reference")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for name, method in registry.METHODS.items():
        storage = " or ".join(method.storage)
        dense = (method.dense_weights, method.dense_gradients)
        table.add_row(name, storage, *dense, method.flops, method.reference or "-")
    console = Console()
    console.print(table)
    console.print(f"FLOPs are per sample. {registry.LEGEND}.")
    console.print("Masked storage holds dense weights and gradients, whatever the method needs.")
