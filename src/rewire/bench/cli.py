"""``rewire bench``: the benchmarks on the command line."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from rewire.bench.case import Case, Result

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure speed, against dense PyTorch and others. All timings are medians of interleaved "
    "runs in one process; ratios are what to trust, on a machine that does nothing else.",
)

T = TypeVar("T", int, float, str)


def _parts(values: Sequence[str] | None, convert: Callable[[str], T]) -> tuple[T, ...]:
    """The values of an option that may be repeated and may hold commas, each of them once."""
    parts = [part.strip() for value in values or () for part in value.split(",")]
    return tuple(dict.fromkeys(convert(part) for part in parts))


def _sparsity(text: str) -> float:
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


def _width(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(
            f"{text!r} is no width; give a number of units of at least 1, such as 1024",
            param_hint="--width",
        )
    return int(text)


def _check_files(json_file: Path | None, plot_file: Path | None) -> None:
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


class Part(str, Enum):
    """A part of the layer benchmark."""

    LINEAR = "linear"
    CONV = "conv"
    INFERENCE = "inference"


def _list_option(metavar: str, help: str, default: str) -> Any:
    """An option for :func:`_parts`."""
    return typer.Option(
        metavar=metavar, help=f"{help}; may be repeated, or a,b,c.", show_default=default
    )


_PATIENCE = 10.0  # seconds of one timing after which a few samples have to do
_MISSING = "Share of the weights that is missing"
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
    typer.Option("--plot", help="Draw speed-up against sparsity into this file (png, svg or pdf)."),
]


@app.command()
def layers(
    quick: Quick = False,
    width: Annotated[
        list[str] | None, _list_option("UNITS", "Units of linear layers", "512 to 16384")
    ] = None,
    sparsity: Annotated[list[str] | None, _list_option("SHARE", _MISSING, "0.8 to 0.99")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples, but for inference.")] = 128,
    only: Annotated[Part | None, typer.Option(help="Only this part.")] = None,
    rounds: Rounds = None,
    threads: Threads = None,
    max_memory: Annotated[
        float, typer.Option(min=0, help="GB for a dense linear model; a larger one is left out.")
    ] = 8,
    json_file: Json = None,
    plot_file: Plot = None,
) -> None:
    """Sparse layers against dense PyTorch, torch.sparse, SparseProp and sparselab.

    Linear layers in a chain of four and alone, the convolutions of VGG-16 and ResNet-56, and
    inference of one sample. SparseProp and sparselab take part if they are installed. The full
    set takes tens of minutes and up to 16 GB, most of it for the widest layers.

    Example: `rewire bench layers --quick --json layers.json --plot layers.png`
    """
    from rewire.bench import layers as bench
    from rewire.bench import peers, show, timing

    _check_files(json_file, plot_file)
    widths, sparsities = _parts(width, _width), _parts(sparsity, _sparsity)
    if widths and only is Part.CONV:
        raise typer.BadParameter("convolutions have no width; leave it out", param_hint="--width")
    plan = bench.Plan(
        widths=widths or (bench.QUICK_WIDTHS if quick else bench.WIDTHS),
        convs=bench.QUICK_CONVS if quick else bench.conv_shapes(),
        sparsities=sparsities or (bench.QUICK_SPARSITIES if quick else bench.SPARSITIES),
        batch=batch,
        parts=bench.PARTS if only is None else (only.value,),
        max_memory=max_memory,
    )
    screen = show.console()
    with timing.threads(threads):
        installed = peers.status()
        results, whole = _measure(screen, bench.cases(plan), rounds, quick)
        overhead = bench.overhead()
        _tables(screen, results, installed)
        screen.print(show.overhead(overhead))
        more = {"peers": installed, "overhead_us": overhead}
        _finish(screen, "layers", results, whole, more, json_file, plot_file)


@app.command()
def step(
    quick: Quick = False,
    model: Annotated[
        list[str] | None, _list_option("NAME", "vgg16, resnet56, vit, mlp, gpt", "all of them")
    ] = None,
    sparsity: Annotated[
        list[str] | None, _list_option("SHARE", _MISSING, "0.9, 0.95, 0.98")
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Images; gpt gets an eighth as many sequences of 128.")
    ] = 128,
    rounds: Rounds = None,
    threads: Threads = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also show where the time of the first goes.")
    ] = False,
    json_file: Json = None,
    plot_file: Plot = None,
) -> None:
    """Whole training steps of models, dense against sparse.

    One step is zero_grad, forward, cross entropy, backward and SGD with momentum, on random data.
    Dense convolutional models run in their faster memory format; sparse models are the same plain
    torch modules, converted by rewire.sparsify.

    Example: `rewire bench step --model vgg16 --sparsity 0.95 --profile`
    """
    from rewire.bench import show, timing
    from rewire.bench import step as bench

    _check_files(json_file, plot_file)

    def name(text: str) -> str:
        if text not in bench.WORKLOADS:
            message = f"there is no model {text!r}; choose from {', '.join(bench.WORKLOADS)}"
            raise typer.BadParameter(message, param_hint="--model")
        return text

    plan = bench.Plan(
        models=_parts(model, name) or (bench.QUICK_MODELS if quick else tuple(bench.WORKLOADS)),
        sparsities=_parts(sparsity, _sparsity)
        or (bench.QUICK_SPARSITIES if quick else bench.SPARSITIES),
        batch=batch,
    )
    screen = show.console()
    with timing.threads(threads):
        results, whole = _measure(screen, bench.cases(plan), rounds, quick)
        _tables(screen, results, {})
        more: dict[str, Any] = {}
        if profile and whole:
            first = (plan.models[0], plan.sparsities[0])
            found = bench.where_time_goes(*first, plan.batch)
            title = f"Where the time of our step goes: {first[0]}, {100 * first[1]:g} % sparse"
            screen.print(show.shares(title, found))
            more["profile"] = {
                "model": first[0],
                "sparsity": first[1],
                "operators": [asdict(share) for share in found],
            }
        _finish(screen, "step", results, whole, more, json_file, plot_file)


def _measure(
    screen: Console, cases: Sequence[Case], rounds: int | None, quick: bool
) -> tuple[list[Result], bool]:
    """The results, and whether they are all there or the user had enough."""
    from rewire.bench import machine, show

    if warning := machine.busy():
        screen.print(warning, style="yellow")
    results: list[Result] = []
    patience = _PATIENCE if rounds is None else math.inf
    rounds = rounds or (7 if quick else 15)
    with show.Progress(screen, len(cases)) as progress:
        try:
            for case in cases:
                progress.start(case.label)
                found = case.run(rounds, patience=patience, tick=progress.tick)
                progress.finish(found)
                results += found
        except KeyboardInterrupt:
            return results, False
    return results, True


def _tables(screen: Console, results: Sequence[Result], installed: dict[str, str]) -> None:
    from rewire.bench import machine, show

    for table in show.tables(results):
        screen.print(table)
    screen.print(show.footer(machine.facts(), installed))


def _finish(
    screen: Console,
    benchmark: str,
    results: Sequence[Result],
    whole: bool,
    more: dict[str, Any],
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Write the files that were asked for."""
    from rewire.bench import machine, plot, show

    if not whole:
        screen.print("Interrupted: these are the results so far, and no file is written.")
        raise typer.Exit(130)
    facts = machine.facts()
    if json_file is not None:
        rows = [asdict(result) for result in results]
        machine.save(json_file, {"benchmark": benchmark, "machine": facts, **more, "results": rows})
        screen.print(f"Wrote {json_file}")
    if plot_file is not None:
        plot.save(plot_file, results, caption=show.footer(facts, {}))
        screen.print(f"Wrote {plot_file}")
