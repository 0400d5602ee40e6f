"""The options that the benchmarks on the command line share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from rewire.precision import BFLOAT16, FLOAT32

T = TypeVar("T", int, float, str)


def parts(values: Sequence[str] | None, convert: Callable[[str], T]) -> tuple[T, ...]:
    """The values of an option that may be repeated and may hold commas, each of them once."""
    parts = [part.strip() for value in values or () for part in value.split(",")]
    return tuple(dict.fromkeys(convert(part) for part in parts))


def sparsity(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise typer.BadParameter(
            f"{text!r} is no sparsity; give the share of the weights that is missing, at least 0 "
            "and below 1, such as 0.95",
            param_hint="--sparsity",
        )
    return value


def width(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(
            f"{text!r} is no width; give a number of units of at least 1, such as 1024",
            param_hint="--width",
        )
    return int(text)


def counts(values: Sequence[str] | None, option: str) -> tuple[int, ...]:
    """The numbers of an option, in ascending order, each of them once."""

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise typer.BadParameter(
                f"{text!r} is no number of at least 1, such as 64", param_hint=option
            )
        return int(text)

    return tuple(sorted(parts(values, count)))


def check_files(json_file: Path | None, plot_file: Path | None) -> None:
    """Complain now about a file that could not be written after minutes of measuring."""
    for option, path in (("--json", json_file), ("--plot", plot_file)):
        if path is None:
            continue
        folder = path.absolute().parent
        problem = None
        if path.is_dir():
            problem = f"{path} is a directory; give a file"
        elif not folder.is_dir():
            problem = f"there is no directory {folder}; create it first"
        elif option == "--plot" and path.suffix.lower() not in (".png", ".svg", ".pdf"):
            problem = f"{path} is no picture; give a name that ends in .png, .svg or .pdf"
        if problem is not None:
            raise typer.BadParameter(problem, param_hint=option)


def list_option(metavar: str, help: str, default: str) -> Any:
    """An option for :func:`parts`."""
    return typer.Option(
        metavar=metavar, help=f"{help}; may be repeated, or a,b,c.", show_default=default
    )


class Precision(str, Enum):
    """In which precision ours runs; dense always runs in both."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    BOTH = "both"

    @property
    def each(self) -> tuple[str, ...]:
        """One after the other."""
        return (FLOAT32, BFLOAT16) if self is Precision.BOTH else (self.value,)


Precisions = Annotated[
    Precision,
    typer.Option(
        "--precision",
        help="Precision of ours: float32, bfloat16 (under autocast), or both; the faster one counts. "
        "Dense always runs in both.",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="A small subset, in about 20 seconds.")]
Rounds = Annotated[
    int | None,
    typer.Option(
        min=1, help="Samples of each timing.", show_default="15, quick 7; 5 of what takes long"
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads to compute with.", show_default="torch's own")
]
Json = Annotated[
    Path | None, typer.Option("--json", help="Write machine and results to this file.")
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw the results into this file (png, svg or pdf)."),
]
