"""``rewire bench shapes`` on the command line."""

from __future__ import annotations

import math
from contextlib import suppress
from enum import Enum
from typing import Annotated

import typer

from rewire.bench import options
from rewire.bench.finish import PATIENCE, finish
from rewire.bench.options import Json, Plot, Quick, Rounds, Threads


class Mode(str, Enum):
    """What is timed."""

    TRAINING = "training"
    FORWARD = "forward"


def shapes(
    quick: Quick = False,
    model: Annotated[
        list[str] | None,
        options.list_option("NAME", "linear, conv, convnet", "all of them"),
    ] = None,
    batches: Annotated[
        list[str] | None,
        options.list_option("COUNT", "Batches to go through", "1 to 512"),
    ] = None,
    sizes: Annotated[
        list[str] | None,
        options.list_option(
            "PIXELS",
            "Sizes of images to go through, at several batches",
            "4 to 224, large batches to 64",
        ),
    ] = None,
    at: Annotated[
        list[str] | None,
        options.list_option("COUNT", "Batches at which sizes are gone through", "4, 64"),
    ] = None,
    size: Annotated[
        int, typer.Option(min=1, help="Size of images where batches are gone through.")
    ] = 16,
    sparsity: Annotated[
        float, typer.Option(min=0, max=0.9999, help="Share of the weights that is missing.")
    ] = 0.95,
    mode: Annotated[
        Mode, typer.Option(help="Time forward and backward, or forward without gradients.")
    ] = Mode.TRAINING,
    rounds: Rounds = None,
    threads: Threads = None,
    json_file: Json = None,
    plot_file: Plot = None,
) -> None:
    """Time per sample over batches and image sizes, and every jump between neighbours.

    One linear layer, one convolution and a small convolutional network, sparse and dense, all shapes in
    turns. A jump is a time per sample (for sizes: per pixel) that is more than 1.3 times that of the shape
    before, or less than 1/1.3 of it. Between the smallest batches there are always some, since a call takes
    time however little it computes: falls that this explains are listed apart.

    Example: `rewire bench shapes --model conv --batches 31,32,33,63,64,65 --sizes 8,16`
    """
    from rewire.bench import machine, shapes_show, show, timing
    from rewire.bench import shapes as bench

    options.check_files(json_file, plot_file)

    def name(text: str) -> str:
        if text not in bench.MODELS:
            message = f"there is no model {text!r}; choose from {', '.join(bench.MODELS)}"
            raise typer.BadParameter(message, param_hint="--model")
        return text

    plan = bench.Plan(
        models=options.parts(model, name) or tuple(bench.MODELS),
        batches=options.counts(batches, "--batches")
        or (bench.QUICK_BATCHES if quick else bench.BATCHES),
        sizes=options.counts(sizes, "--sizes") or (bench.QUICK_SIZES if quick else bench.SIZES),
        at=options.counts(at, "--at") or (4, 64),
        most=math.inf if sizes or at else bench.MOST,
        size=size,
        sparsity=sparsity,
        mode=bench.FORWARD if mode is Mode.FORWARD else bench.TRAINING,
    )
    patience = PATIENCE if rounds is None else math.inf
    rounds = rounds or (7 if quick else 15)
    screen = show.console()
    points: list[bench.Point] = []
    whole = False
    sweeps = bench.sweeps(plan)
    with timing.threads(threads):
        if warning := machine.busy():
            screen.print(warning, style="yellow")
        with show.Progress(screen, len(sweeps)) as progress, suppress(KeyboardInterrupt):
            for sweep in sweeps:
                progress.start(sweep.label)
                found = bench.measure(sweep, plan, rounds, patience=patience, tick=progress.tick)
                progress.finish(shapes_show.line(found))
                points += found
            whole = True
        for table in shapes_show.tables(points):
            screen.print(table)
        screen.print(shapes_show.flagged(points))
        screen.print(show.footer(machine.facts(), {}))
        more = {"mode": plan.mode, "sparsity": sparsity}
        finish(screen, "shapes", points, whole, more, json_file, plot_file, shapes_show.save_plot)
