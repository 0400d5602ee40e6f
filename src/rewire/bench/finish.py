"""The end of every benchmark: its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.console import Console

R = TypeVar("R", bound="DataclassInstance")

PATIENCE = 10.0  # seconds of one timing after which a few samples have to do


def finish(
    screen: Console,
    benchmark: str,
    results: Sequence[R],
    whole: bool,
    more: dict[str, Any],
    json_file: Path | None,
    plot_file: Path | None = None,
    draw: Callable[[Path, Sequence[R], str], None] | None = None,
) -> None:
    """Write the files that were asked for; none if the user had enough before the end."""
    from rewire.bench import machine, show

    if not whole:
        screen.print("Interrupted: these are the results so far, and no file is written.")
        raise typer.Exit(130)
    facts = machine.facts()
    if json_file is not None:
        rows = [asdict(result) for result in results]
        machine.save(json_file, {"benchmark": benchmark, "machine": facts, **more, "results": rows})
        screen.print(f"Wrote {json_file}")
    if plot_file is not None and draw is not None:
        draw(plot_file, results, show.footer(facts, {}))
        screen.print(f"Wrote {plot_file}")
