"""``rewire reproduce`` on the command line."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from rewire import files

if TYPE_CHECKING:
    from rewire.reproduce.engines import Engine
    from rewire.reproduce.recipes import Experiment
    from rewire.reproduce.run import Run
    from rewire.reproduce.sweep import Plan, Sweep

_WHAT, _WHERE = "What to run", "Where to run it"


class EngineName(str, Enum):
    """Where runs are done."""

    LOCAL = "local"
    RAY = "ray"


class Precision(str, Enum):
    """In which precision runs compute."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def reproduce(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="One of the experiments below.")],
    scale: Annotated[
        float,
        typer.Option(
            help="Multiplies the schedule: 0.1 is a tenth of the epochs, with as many rewirings. For "
            "matmul it multiplies the sizes.",
            rich_help_panel=_WHAT,
        ),
    ] = 1.0,
    seeds: Annotated[
        int, typer.Option(min=1, help="How often each run is repeated.", rich_help_panel=_WHAT)
    ] = 3,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,...",
            help="Only runs with these words: data sets, models, methods, sparsities, widths such as "
            "2x, gamma0.5, seed0 and so on; --dry-run shows them.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    digits: Annotated[
        bool,
        typer.Option(
            "--digits",
            help="Try it on the packaged digits, with an MLP for each model.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    precision: Annotated[
        Precision,
        typer.Option(
            help="In which runs compute, as for rewire train: float32, or bfloat16 under autocast.",
            rich_help_panel=_WHAT,
        ),
    ] = Precision.FLOAT32,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would run.", rich_help_panel=_WHAT)
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the sweep.",
            show_default="sweeps/ and WHAT, with the scale",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(
            help="The folder to look for data in.",
            show_default="REWIRE_DATA, then the user's cache",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs at a time.",
            show_default="as many as there are CPUs for",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads of each run.", rich_help_panel=_WHERE)
    ] = 1,
    engine: Annotated[
        EngineName,
        typer.Option(
            help="local: processes on this machine; ray: a Ray cluster, whose machines all see the "
            "folder and the data.",
            rich_help_panel=_WHERE,
        ),
    ] = EngineName.LOCAL,
) -> None:
    """Run an experiment of the paper.

    All runs of it go to one folder. Ctrl-C lets them save where they are; the same command resumes
    from there, and ends with the same numbers as if nothing had happened. What is finished is never done
    again. Without --out that also holds for runs that are part of another experiment. A run that fails is
    reported, and the others continue.

    - `table1`: all methods on CIFAR-10 and CIFAR-100
    - `imagenet`: ResNet-50 on ImageNet
    - `scaling`: wider models with the same number of connections
    - `extended`: 200, 300 and 400 epochs
    - `vit-scaling`: wider dense ViTs
    - `subset`: how many connections GSE draws, and how, against RigL
    - `assignment`: sparsity shared out uniformly or by Erdos-Renyi
    - `progress-methods`: accuracy by epoch of all methods
    - `progress-width`: accuracy by epoch of wider models
    - `flops`: training FLOPs of GSE and RigL
    - `matmul`: the time of sparse products

    Example: `rewire reproduce table1 --scale 0.1 --seeds 1 --only cifar10,vgg16,0.98`
    """
    from rewire.data import DataError
    from rewire.reproduce import measured
    from rewire.reproduce.recipes import EXPERIMENTS
    from rewire.reproduce.run import choose
    from rewire.reproduce.sweep import About, Sweep
    from rewire.training.folder import RunError

    names = [*EXPERIMENTS, *measured.MEASURED]
    if what not in names:
        raise typer.BadParameter(
            f"there is no experiment {what!r}; choose one of {', '.join(names)}", param_hint="WHAT"
        )
    if not 0 < scale < float("inf"):
        raise typer.BadParameter(f"must be a number above 0, got {scale}", param_hint="--scale")
    if what in measured.MEASURED and precision is not Precision.FLOAT32:
        raise typer.BadParameter(f"{what} trains nothing; leave it out", param_hint="--precision")
    words = tuple(w.strip() for part in only or () for w in part.split(",") if w.strip())
    parts = [what, *(["digits"] if digits else []), *([f"scale{scale:g}"] if scale != 1 else [])]
    parts += [precision.value] if precision is not Precision.FLOAT32 else []
    path = Path("sweeps", "-".join(parts)) if out is None else out
    given = {
        "--scale": None if scale == 1 else f"{scale:g}",
        "--seeds": None if seeds == 3 else str(seeds),
        "--only": ",".join(words) or None,
        "--digits": "" if digits else None,
        "--precision": None if precision is Precision.FLOAT32 else precision.value,
        "--out": None if out is None else str(out),
        "--root": None if root is None else str(root),
        "--workers": None if workers is None else str(workers),
        "--threads": None if threads == 1 else str(threads),
        "--engine": None if engine is EngineName.LOCAL else engine.value,
    }
    command = _command(what, given)
    about = About(what, command, scale, seeds, digits, words, precision.value)
    sweep = Sweep(path, about, shares=out is None)
    try:
        if what in measured.MEASURED:
            measured.measure(sweep, threads, dry_run=dry_run)
            return
        experiment = EXPERIMENTS[what]
        every = experiment.runs(scale=scale, seeds=seeds, digits=digits, precision=precision.value)
        runs = choose(every, words)
        if dry_run:
            _list(sweep, runs, every)
            return
        made = _engine(engine, workers, threads)
        _run(sweep, experiment, runs, made, root, threads)
    except (ValueError, RunError, DataError, OSError) as error:
        _fail(files.problem(error))
    except KeyboardInterrupt:
        _fail(f"Stopped at once. Resume with the same command:\n  {about.command}", 130)


def _command(what: str, given: dict[str, str | None]) -> str:
    """The command again, without what goes without saying."""
    options = [part for name, value in given.items() if value is not None for part in (name, value)]
    return shlex.join(["rewire", "reproduce", what, *filter(None, options)])


def _engine(name: EngineName, workers: int | None, threads: int) -> Engine:
    from rewire.reproduce.engines import Local, Ray

    if name is EngineName.RAY:
        return Ray(workers, threads)
    allowed = getattr(os, "sched_getaffinity", None)  # there is none on some systems
    cpus = len(allowed(0)) if allowed else os.cpu_count() or 1
    return Local(workers or max(1, cpus // threads))


def _list(sweep: Sweep, runs: list[Run], every: list[Run]) -> None:
    from rewire.reproduce.sweep import plan

    found = plan(sweep, runs)
    state = {run.name: "finished" for run in found.done}
    state |= {name: f"finished in {path.parents[1]}" for name, path in found.shared.items()}
    state |= dict.fromkeys(found.begun, "to resume")
    state |= {name: f"cannot run: {why}" for name, why in found.failed.items()}
    for run in runs:
        typer.echo(f"{run.name}{': ' + state[run.name] if run.name in state else ''}")
    typer.echo(f"{_counts(found)}, in {sweep.path}")
    facets: dict[str, dict[str, None]] = {}
    for run in every:
        for name, words in run.facets.items():
            facets.setdefault(name, {}).update(dict.fromkeys(words))
    for name, there in facets.items():
        if len(there) > 1:
            typer.echo(f"{name} to choose with --only: {', '.join(there)}")


def _counts(found: Plan) -> str:
    parts = {
        "to do": len(found.todo) - len(found.begun),
        "to resume": len(found.begun),
        "finished": len(found.done),
        "that cannot run": len(found.failed),
    }
    total = len(found.todo) + len(found.done) + len(found.failed)
    words = ", ".join(f"{count:,} {what}" for what, count in parts.items() if count)
    return f"{total:,} run{'s' * (total != 1)}: {words}" if total else "no runs"


def _run(
    sweep: Sweep,
    experiment: Experiment,
    runs: list[Run],
    engine: Engine,
    root: Path | None,
    threads: int,
) -> None:
    from rewire import data
    from rewire.bench.show import console
    from rewire.reproduce import results, show
    from rewire.reproduce.sweep import LOGS, conduct, link, plan

    screen = console()
    work = plan(sweep, runs)
    for name in dict.fromkeys(config.dataset for _, config in work.todo):
        if name != "digits" and data.find(name, root) is None:
            data.load(name, root)  # says where it was looked for, and how to get it
    sweep.claim()
    link(sweep, work.shared)
    screen.print(f"{_counts(work)}, in {sweep.path}", soft_wrap=True)
    for name, why in work.failed.items():
        screen.print(f"{name}: cannot run: {why}", soft_wrap=True)
    tasks = [sweep.task(run, config, root, threads) for run, config in work.todo]
    outcome = conduct(tasks, engine, show.choose(screen, len(work.done), len(tasks)))
    with suppress(OSError):  # unless there is something in it
        (sweep.path / LOGS).rmdir()
    if found := results.collect(experiment, sweep, runs):
        screen.print(f"Test accuracy in %, mean and deviation over seeds, by {experiment.columns}")
    for table in results.tables(experiment, found):
        screen.print(table)
    if outcome.signal is not None:
        _fail(
            f"Stopped. Resume with the same command:\n  {sweep.about.command}", 128 + outcome.signal
        )
    failed = work.failed | outcome.failed
    if failed:
        _fail(
            f"{len(failed)} of {len(runs)} runs failed:\n"
            + "\n".join(f"  {name}: {why}" for name, why in failed.items())
            + f"\nTo try them again:\n  {sweep.about.command}"
        )


def _fail(message: str, code: int = 1) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)
