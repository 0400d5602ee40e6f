"""A sweep: the folder of an experiment, and doing its runs.

The folder holds ``sweep.toml``, which says what it is and how to resume it, and under ``runs/`` the
folder of each run, as ``rewire train --out`` makes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rewire import files
from rewire.precision import FLOAT32
from rewire.reproduce.engines import Engine
from rewire.reproduce.run import Run
from rewire.reproduce.show import Show
from rewire.reproduce.worker import Task
from rewire.training import config as configs
from rewire.training import toml
from rewire.training.config import Config
from rewire.training.folder import Folder, RunError
from rewire.training.interrupts import Interrupts

FILE, RUNS, LOGS = "sweep.toml", "runs", "logs"
NEW, BEGUN, FINISHED, OTHER = "new", "begun", "finished", "with other settings"


@dataclass(frozen=True)
class About:
    """What ``sweep.toml`` holds.

    Attributes:
        experiment: its name.
        command: how to resume it, or to do it again elsewhere.
        scale: of the schedule.
        seeds: how many.
        digits: whether it ran on the packaged digits instead of the paper's data.
        only: what was chosen of it.
        precision: of all runs.
    """

    experiment: str
    command: str
    scale: float
    seeds: int
    digits: bool = False
    only: tuple[str, ...] = ()
    precision: str = FLOAT32


@dataclass(frozen=True)
class Sweep:
    """The folder of an experiment.

    Attributes:
        path: the folder.
        about: what it holds.
        shares: whether finished runs of sweeps beside it may be part of it.
    """

    path: Path
    about: About
    shares: bool = False

    def claim(self) -> None:
        """Make this the folder of the experiment, or resume it.

        Raises:
            RunError: if it holds another one, or something else.
        """
        with Folder(self.path):
            self._claim()

    def _claim(self) -> None:
        files.sweep(self.path)
        file = self.path / FILE
        if file.exists():
            found = configs.BEFORE | toml.read(file)
            for name in ("experiment", "scale", "digits", "precision"):
                here, there = getattr(self.about, name), found.get(name)
                if here != there:
                    raise RunError(
                        f"{self.path} holds a sweep with {name} {there}, and this one has {here}: choose "
                        "another folder with --out"
                    )
        elif not files.is_empty(self.path):
            raise RunError(
                f"{self.path} is not empty and holds no sweep: choose another folder with --out"
            )
        files.write_text(file, toml.dumps(asdict(self.about)))

    def folder(self, run: Run) -> Folder:
        """Of a run."""
        return Folder(self.path / RUNS / run.name)

    def state(self, run: Run, config: Config) -> str:
        """NEW, BEGUN, FINISHED, or OTHER if its folder holds a run of other settings."""
        folder = self.folder(run)
        if not folder.exists:
            return NEW
        if configs.differences(config, folder.config()):
            return OTHER
        return FINISHED if folder.finished else BEGUN

    def elsewhere(self, run: Run, config: Config) -> Path | None:
        """The same run, finished, in a sweep beside this one: experiments of the paper share runs."""
        if not self.shares:
            return None
        for other in sorted(self.path.absolute().parent.glob(f"*/{FILE}")):
            folder = Folder(other.parent / RUNS / run.name)
            ours = other.parent.samefile(self.path) if self.path.exists() else False
            if ours or not (folder.exists and folder.finished):
                continue
            if not configs.differences(config, folder.config()):
                return folder.path
        return None

    def task(self, run: Run, config: Config, root: Path | None, threads: int) -> Task:
        """What a worker is to do."""
        path = self.path.absolute()
        return Task(
            name=run.name,
            config=asdict(config),
            folder=str(path / RUNS / run.name),
            log=str(path / LOGS / f"{run.name}.txt"),
            root=None if root is None else str(root.absolute()),
            threads=threads,
        )


@dataclass
class Plan:
    """What is to be done for a sweep.

    Attributes:
        todo: runs to begin or to resume, and their configs.
        begun: the names of those to resume.
        done: finished ones.
        shared: finished ones that lie in another sweep, and where.
        failed: those that cannot be done, by name, and why.
    """

    todo: list[tuple[Run, Config]] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)
    done: list[Run] = field(default_factory=list)
    shared: dict[str, Path] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def plan(sweep: Sweep, runs: Sequence[Run]) -> Plan:
    """What is done and what is left of some runs; nothing is changed."""
    found = Plan()
    for run in runs:
        try:
            config = run.config()
            state = sweep.state(run, config)
        except (ValueError, RunError, OSError) as error:
            found.failed[run.name] = str(error)
            continue
        if state == OTHER:
            different = configs.differences(config, sweep.folder(run).config())
            found.failed[run.name] = (
                f"its folder holds a run with other settings ({different}): remove it, or choose another "
                "folder with --out"
            )
        elif state == FINISHED:
            found.done.append(run)
        elif state == NEW and (path := sweep.elsewhere(run, config)):
            found.shared[run.name] = path
            found.done.append(run)
        else:
            found.todo.append((run, config))
            if state == BEGUN:
                found.begun.add(run.name)
    return found


def link(sweep: Sweep, shared: dict[str, Path]) -> None:
    """Let finished runs of other sweeps appear in this one."""
    folder = sweep.path.absolute() / RUNS
    folder.mkdir(exist_ok=True)
    for name, path in shared.items():
        (folder / name).symlink_to(os.path.relpath(path.resolve(), folder.resolve()))


@dataclass(frozen=True)
class Outcome:
    """How the runs ended.

    Attributes:
        failed: those that did not finish because something is wrong, and why.
        signal: what stopped the sweep; None if nothing did.
    """

    failed: dict[str, str]
    signal: int | None


def conduct(tasks: Sequence[Task], engine: Engine, show: Show) -> Outcome:
    """Do all tasks. A failed one does not stop the others.

    A signal lets runs save where they are; a second one ends them at once.
    """
    failed: dict[str, str] = {}
    with Interrupts() as interrupts, show:
        stopping = False
        try:
            if tasks:
                engine.start(tasks)
            while engine.busy:
                for name, event in engine.poll(0.2):
                    show.tell(name, event)
                    if event["event"] == "failed":
                        failed[name] = event["message"]
                if interrupts.received is not None and not stopping:
                    stopping = True
                    show.note("Stopping. Runs save where they are; Ctrl-C again ends them at once.")
                    engine.stop()
        except BaseException:
            engine.kill()
            raise
    return Outcome(failed, interrupts.received)
