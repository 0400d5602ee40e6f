"""``rewire bench``: the benchmarks on the command line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewire.bench import options, shapes_cli
from rewire.bench.finish import PATIENCE, finish
from rewire.bench.options import Json, Plot, Precision, Precisions, Quick, Rounds, Threads
from rewire.bench.zoo import cli as zoo

if TYPE_CHECKING:
    from rich.console import Console

    from rewire.bench.case import Case, Result
    from rewire.bench.memory import Memory
    from rewire.bench.step import Plan

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure speed, against dense PyTorch and others. All timings are medians of interleaved "
    "runs in one process; ratios are what to trust, on a machine that does nothing else.",
)

app.command()(zoo.zoo)
app.command()(shapes_cli.shapes)


class Part(str, Enum):
    """A part of the layer benchmark."""

    LINEAR = "linear"
    CONV = "conv"
    INFERENCE = "inference"


class Engine(str, Enum):
    """How the sparse models of the step benchmark run."""

    ON = "on"
    OFF = "off"
    BOTH = "both"

    @property
    def each(self) -> tuple[str, ...]:
        """One after the other."""
        return ("on", "off") if self is Engine.BOTH else (self.value,)


_MISSING = "Share of the weights that is missing"


@app.command()
def layers(
    quick: Quick = False,
    width: Annotated[
        list[str] | None, options.list_option("UNITS", "Units of linear layers", "512 to 16384")
    ] = None,
    sparsity: Annotated[
        list[str] | None, options.list_option("SHARE", _MISSING, "0.8 to 0.99")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples, but for inference.")] = 128,
    precision: Precisions = Precision.BOTH,
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
    inference of one sample. Chains run on the engine, but for the drop-in chain: SparseLinear and
    nn.ReLU in an nn.Sequential, as they are. In bfloat16 forward and backward passes run under
    autocast, and models without gradients are converted. SparseProp and sparselab take part, in
    float32, if they are installed. The full set takes tens of minutes and up to 16 GB, most of it for
    the widest layers.

    Example: `rewire bench layers --quick --json layers.json --plot layers.png`
    """
    from rewire.bench import layers as bench
    from rewire.bench import peers, plot, show, timing

    options.check_files(json_file, plot_file)
    widths, sparsities = (
        options.parts(width, options.width),
        options.parts(sparsity, options.sparsity),
    )
    if widths and only is Part.CONV:
        raise typer.BadParameter("convolutions have no width; leave it out", param_hint="--width")
    plan = bench.Plan(
        widths=widths or (bench.QUICK_WIDTHS if quick else bench.WIDTHS),
        convs=bench.QUICK_CONVS if quick else bench.conv_shapes(),
        sparsities=sparsities or (bench.QUICK_SPARSITIES if quick else bench.SPARSITIES),
        batch=batch,
        parts=bench.PARTS if only is None else (only.value,),
        max_memory=max_memory,
        drop_in_widths=widths or bench.DROP_IN_WIDTHS,
        drop_in_sparsities=sparsities
        or (bench.QUICK_DROP_IN_SPARSITIES if quick else bench.DROP_IN_SPARSITIES),
        precisions=precision.each,
    )
    screen = show.console()
    with timing.threads(threads):
        installed = peers.status()
        results, whole = _measure(screen, bench.cases(plan), rounds, quick)
        overhead = bench.overhead()
        _tables(screen, results, installed)
        screen.print(show.overhead(overhead))
        more = {"peers": installed, "overhead_us": overhead}
        finish(screen, "layers", results, whole, more, json_file, plot_file, plot.save)


@app.command()
def step(
    quick: Quick = False,
    model: Annotated[
        list[str] | None,
        options.list_option("NAME", "vgg16, resnet56, vit, mlp, gpt", "all of them"),
    ] = None,
    sparsity: Annotated[
        list[str] | None, options.list_option("SHARE", _MISSING, "0.9, 0.95, 0.98")
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Images; gpt gets an eighth as many sequences of 128.")
    ] = 128,
    engine: Annotated[
        Engine,
        typer.Option(help="Time sparse models with the engine on, off (layer by layer), or both."),
    ] = Engine.ON,
    precision: Precisions = Precision.BOTH,
    rounds: Rounds = None,
    threads: Threads = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Also show where the time of the first goes: kernels, torch operators, recording, "
            "autograd, optimizer; and the slowest kernels.",
        ),
    ] = False,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="Also measure how much memory a step takes, each in a process of its own.",
        ),
    ] = False,
    json_file: Json = None,
    plot_file: Plot = None,
) -> None:
    """Whole training steps of models, dense against sparse.

    One step is zero_grad, forward, cross entropy, backward and SGD with momentum, on random data.
    Dense models run in float32 and under bfloat16 autocast, convolutional ones in both memory formats;
    ratios are to the fastest of these, and to the fastest in float32. Sparse models are the same plain
    torch modules, converted by rewire.sparsify; the faster of their precisions counts. With the engine
    off their layers run one by one.

    Example: `rewire bench step --model vgg16 --sparsity 0.95 --profile`
    """
    from rewire.bench import plot, profiling, show, step_show, timing
    from rewire.bench import step as bench

    options.check_files(json_file, plot_file)

    def name(text: str) -> str:
        if text not in bench.WORKLOADS:
            message = f"there is no model {text!r}; choose from {', '.join(bench.WORKLOADS)}"
            raise typer.BadParameter(message, param_hint="--model")
        return text

    plan = bench.Plan(
        models=options.parts(model, name)
        or (bench.QUICK_MODELS if quick else tuple(bench.WORKLOADS)),
        sparsities=options.parts(sparsity, options.sparsity)
        or (bench.QUICK_SPARSITIES if quick else bench.SPARSITIES),
        batch=batch,
        engines=engine.each,
        precisions=precision.each,
    )
    screen = show.console()
    with timing.threads(threads):
        results, whole = _measure(screen, bench.cases(plan), rounds, quick)
        _tables(screen, results, {})
        more: dict[str, Any] = {}
        if profile and whole:
            first = (plan.models[0], plan.sparsities[0])
            steps = rounds or profiling.STEPS
            found = profiling.where_time_goes(
                *first,
                plan.batch,
                engines=plan.engines,
                precisions=plan.precisions,
                steps=steps,
            )
            for table in step_show.profile_tables(
                f"{first[0]}, {100 * first[1]:g} % sparse", found
            ):
                screen.print(table)
            more["profile"] = {
                "model": first[0],
                "sparsity": first[1],
                "batch": plan.batch,
                "engines": [asdict(one) for one in found],
            }
        if memory and whole:
            more["memory"] = [asdict(one) for one in _memory(screen, plan, results)]
        finish(screen, "step", results, whole, more, json_file, plot_file, plot.save)


@app.command()
def rewiring(
    quick: Quick = False,
    width: Annotated[
        list[str] | None,
        options.list_option("UNITS", "Units on each side of the layer", "1,000 to 1,000,000"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a training step.")] = 128,
    rounds: Rounds = None,
    threads: Threads = None,
    dense_limit: Annotated[
        int, typer.Option(min=0, help="The widest layer for RigL's dense gradient.")
    ] = 40_000,
    json_file: Json = None,
    plot_file: Plot = None,
) -> None:
    """The cost of one rewiring, by GSE and by RigL's dense gradient, and how it grows.

    A linear layer of ten connections per unit is trained, and now and then rewired; the cost is all
    that steps take longer for it. The full set takes about 15 minutes and 4 GB, most of it for the
    widest layer.

    Example: `rewire bench rewiring --quick --json rewiring.json --plot rewiring.png`
    """
    from rewire.bench import machine, rewiring_show, show, timing
    from rewire.bench import rewiring as bench

    options.check_files(json_file, plot_file)
    widths = options.parts(width, options.width) or (bench.QUICK_WIDTHS if quick else bench.WIDTHS)
    plan = bench.Plan(tuple(sorted(widths)), batch, dense_limit)
    patience = PATIENCE if rounds is None else math.inf
    rounds = rounds or (7 if quick else 15)
    screen = show.console()
    costs: list[bench.Cost] = []
    draws: dict[int, dict[str, float]] = {}
    whole = False
    with timing.threads(threads):
        if warning := machine.busy():
            screen.print(warning, style="yellow")
        with show.Progress(screen, len(plan.widths)) as progress, suppress(KeyboardInterrupt):
            for units in plan.widths:
                progress.start(f"{units:,} units")
                found = bench.measure(units, plan, rounds, patience=patience, tick=progress.tick)
                if drawn := bench.draws(units, plan, rounds):
                    draws[units] = drawn
                progress.finish(rewiring_show.line(found))
                costs += found
            whole = True
        growth = bench.growth(costs)
        left_out = [units for units in plan.widths if units > dense_limit]
        screen.print(rewiring_show.table(costs))
        screen.print(rewiring_show.lines(growth, draws, left_out))
        screen.print(show.footer(machine.facts(), {}))
        more = {"growth": [asdict(one) for one in growth], "million_draws_ms": draws}
        draw = rewiring_show.save_plot
        finish(screen, "rewiring", costs, whole, more, json_file, plot_file, draw)


def _memory(screen: Console, plan: Plan, results: Sequence[Result]) -> list[Memory]:
    """The memory of steps, dense ones in the memory format that was the faster one of their precision."""
    from rewire.bench import memory, step_show
    from rewire.precision import PRECISIONS

    faster = {}
    for result in reversed(results):
        times = result.dense_by
        faster[result.shape] = [
            min((v for v in times if v.startswith(p)), key=times.__getitem__) for p in PRECISIONS
        ]
    with screen.status("memory") as status:
        found = memory.measure(plan, faster, status.update)
    screen.print(step_show.memory_table(found))
    return found


def _measure(
    screen: Console, cases: Sequence[Case], rounds: int | None, quick: bool
) -> tuple[list[Result], bool]:
    """The results, and whether they are all there or the user had enough."""
    from rewire.bench import machine, show

    if warning := machine.busy():
        screen.print(warning, style="yellow")
    results: list[Result] = []
    patience = PATIENCE if rounds is None else math.inf
    rounds = rounds or (7 if quick else 15)
    with show.Progress(screen, len(cases)) as progress:
        try:
            for case in cases:
                progress.start(case.label)
                found = case.run(rounds, patience=patience, tick=progress.tick)
                progress.finish(show.line(found))
                results += found
        except KeyboardInterrupt:
            return results, False
    return results, True


def _tables(screen: Console, results: Sequence[Result], installed: dict[str, str]) -> None:
    from rewire.bench import machine, show

    for table in show.tables(results):
        screen.print(table)
    screen.print(show.footer(machine.facts(), installed))
