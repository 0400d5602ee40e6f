"""``rewire bench zoo`` on the command line."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Annotated

import typer

from rewire.bench import options
from rewire.bench.finish import PATIENCE, finish
from rewire.bench.options import Json, Precision, Precisions, Threads


def zoo(
    models: Annotated[
        list[str] | None,
        options.list_option(
            "NAMES", "Models, or sets of them: first, second; --list shows all names", "first"
        ),
    ] = None,
    sparsity: Annotated[
        list[str] | None,
        options.list_option("SHARE", "Share of the weights that is missing", "0.95"),
    ] = None,
    batch: Annotated[
        int,
        typer.Option(
            min=1, help="Images; models for sequences get a quarter as many of 128 tokens."
        ),
    ] = 64,
    size: Annotated[int, typer.Option(min=1, help="Height and width of the images.")] = 64,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Samples of each timing.", show_default="7")
    ] = None,
    threads: Threads = None,
    precision: Precisions = Precision.BOTH,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Time dense steps under torch.compile, too.")
    ] = False,
    fused: Annotated[
        bool, typer.Option("--fused", help="Use AdamW's fused kernel, dense and sparse.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(help="Compare outputs and gradients with the model's densified twin."),
    ] = True,
    own: Annotated[
        bool,
        typer.Option("--own", help="Use Rewire's own definitions even if the libraries are there."),
    ] = False,
    list_names: Annotated[
        bool, typer.Option("--list", help="Show all names, and what is installed; measure nothing.")
    ] = False,
    json_file: Json = None,
) -> None:
    """Public models, dense against sparse: time of a training step, correctness, what the engine missed.

    Models of torchvision, timm and transformers with random weights, on random data; common ones are
    built without these libraries, too. Dense steps run in float32 and under bfloat16 autocast, for images
    in both memory formats; ratios are to the fastest of these. Sparse steps are the same model, converted
    by rewire.sparsify; the faster of their precisions counts. The first set takes about ten minutes. The
    exit status is 1 if a model fails, or if its numbers are not those of its densified twin.

    Example: `rewire bench zoo --models resnet18,timm/resnet10t --sparsity 0.9,0.95`
    """
    from rewire.bench import machine, timing
    from rewire.bench import show as screens
    from rewire.bench.zoo import catalogue, libraries, measure, show

    screen = screens.console()
    if list_names:
        screen.print(show.names(catalogue.PUBLIC.values(), catalogue.SETS))
        return
    options.check_files(json_file, None)
    try:
        found = [
            one for name in options.parts(models, str) or ("first",) for one in catalogue.find(name)
        ]
        chosen = tuple({one.name: one for one in found}.values())
        for one in chosen:
            measure.source(one, own)
    except (ValueError, libraries.MissingLibrary) as error:
        raise typer.BadParameter(str(error), param_hint="--models") from None
    sparsities = options.parts(sparsity, options.sparsity) or (0.95,)
    plan = measure.Plan(
        *(chosen, sparsities, batch, size, own, compiled, fused, check, precision.each)
    )
    patience = PATIENCE if rounds is None else math.inf
    results: list[measure.Measured] = []
    whole = False
    with timing.threads(threads):
        if warning := machine.busy():
            screen.print(warning, style="yellow")
        cases = [(model, share) for model in chosen for share in sparsities]
        with screens.Progress(screen, len(cases)) as progress, suppress(KeyboardInterrupt):
            for model, share in cases:
                progress.start(f"{model.name}, {screens.percent(share)} sparse")
                measured = measure.measure(
                    *(model, share, plan, rounds or 7), patience=patience, tick=progress.tick
                )
                progress.finish(show.line(measured))
                results.append(measured)
            whole = True
        for table in show.tables(results, plan):
            screen.print(table)
        screen.print(show.remarks(results), soft_wrap=True)
        screen.print(screens.footer(machine.facts(), {}))
        finish(screen, "zoo", results, whole, {"size": size, "fused": fused}, json_file)
    if any(one.failed for one in results):
        raise typer.Exit(1)
