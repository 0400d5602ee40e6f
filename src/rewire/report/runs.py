"""Reading the folders of runs and sweeps, whatever state they are in."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rewire import files
from rewire.report.progress import Tell, silent
from rewire.training import checkpoint, toml
from rewire.training import config as configs
from rewire.training.config import Config
from rewire.training.folder import ABOUT, CHECKPOINTS, CONFIG, METRICS, MODEL, Folder

SWEEP, RESULTS = "sweep.toml", "results.json"
FINISHED, UNFINISHED, DAMAGED = "finished", "unfinished", "damaged"
_NEEDED = ("dataset", "model", "method", "sparsity", "seed", "batch_size")
_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "tuple": (list,),
}
_SPENT = ("steps", "seconds", "training_flops")
_MOST = 400  # rewirings that are kept of a run


@dataclass(frozen=True)
class Sweep:
    """What ``sweep.toml`` says, and the records of an experiment without training."""

    path: Path
    about: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]] = ()
    problems: Sequence[str] = ()

    @property
    def experiment(self) -> str:
        """Which of the paper's experiments it is."""
        return str(self.about.get("experiment", ""))

    @property
    def command(self) -> str | None:
        """What to type to run it again."""
        command = self.about.get("command")
        return command if isinstance(command, str) else None


@dataclass(frozen=True)
class Run:
    """A run as it is on disk.

    Attributes:
        path: its folder.
        name: the folder, as seen from the one that was asked for.
        config: the settings; empty if they cannot be read.
        epochs, rewirings: lines of metrics.
        end: the last line, if there is one.
        status: finished, unfinished or damaged.
        problems: what is wrong with it, in words.
        sweep: the sweep that it is part of.
        whole: the sequence that it is a round of; its costs are then those of all rounds so far.
        machine: what it ran on, as far as it says: threads, processes, versions.
        copied: whether it is a copy without weights, with which nothing can go on.
    """

    path: Path
    name: str
    config: Mapping[str, Any]
    epochs: Sequence[Mapping[str, Any]]
    rewirings: Sequence[Mapping[str, Any]]
    end: Mapping[str, Any] | None
    status: str
    problems: Sequence[str] = ()
    sweep: Sweep | None = None
    whole: Run | None = None
    machine: Mapping[str, Any] = field(default_factory=dict)
    copied: bool = False

    @property
    def accuracy(self) -> float:
        """On the test images, at the end or so far; nan before the first epoch ends."""
        if self.end is not None:
            return number(self.end, "accuracy")
        return number(self.epochs[-1], "test_accuracy") if self.epochs else math.nan

    @property
    def seconds(self) -> float:
        """The time it took, or has taken."""
        last = self.end or (self.epochs[-1] if self.epochs else {})
        return number(last, "seconds")

    @property
    def core_hours(self) -> float:
        """The time it took times the threads of all its processes; nan if it does not say how many."""
        threads, processes = (number(self.machine, name) for name in ("threads", "processes"))
        return self.seconds * threads * processes / 3600

    @property
    def speed(self) -> float:
        """Training images per second, testing included."""
        steps = number(self.end, "steps") if self.end else number(self._last, "step")
        return (
            steps * number(self.config, "batch_size") / self.seconds if self.seconds else math.nan
        )

    @property
    def _last(self) -> Mapping[str, Any]:
        return self.epochs[-1] if self.epochs else {}


def number(entry: Mapping[str, Any], name: str) -> float:
    """A number of a line; nan if it is not there or something else."""
    value = entry.get(name)
    return float(value) if isinstance(value, int | float) else math.nan


@dataclass
class Found:
    """All that was found."""

    runs: list[Run] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)


def total(runs: Iterable[Run], what: str) -> float:
    """The sum of ``"seconds"`` or ``"core_hours"`` as far as they are known, rounds of a sequence once."""
    most: dict[Path, float] = {}
    for run in runs:
        path, value = (run.whole or run).path.resolve(), getattr(run, what)
        most[path] = max(most.get(path, 0.0), value if math.isfinite(value) else 0.0)
    return sum(most.values())


def find(folders: Sequence[Path], tell: Tell = silent) -> Found:
    """Read all runs and sweeps in and below folders.

    Raises:
        ValueError: if a folder is not there, or there is nothing in any of them.
    """
    for top in folders:
        if not top.is_dir():
            raise ValueError(f"there is no folder {top}")
    places = [(top, path) for top in folders for path in _folders(top)]
    found, seen = Found(), set()
    sweeps: dict[Path, Sweep] = {}
    for index, (top, path) in enumerate(places):
        tell("reading", index, len(places))
        if (key := path.absolute()) in seen:
            continue
        seen.add(key)
        if (path / SWEEP).is_file():
            sweeps[key] = _read_sweep(path)
            found.sweeps.append(sweeps[key])
        elif _is_run(path):
            above = next((sweeps[p] for p in key.parents if p in sweeps), None)
            name = path.name if path == top else path.relative_to(top).as_posix()
            found.runs += _rounds(_read_run(path, name, above))
    if not found.runs and not found.sweeps:
        raise ValueError(
            f"there is no run in {', '.join(map(str, folders))}: a run is a folder with {CONFIG}, as "
            "`rewire train` and `rewire reproduce` write it"
        )
    return found


def _folders(top: Path) -> Iterator[Path]:
    """All folders, those above first; not those inside runs. Links to runs count, others do not."""
    for folder, names, there in os.walk(top):
        path = Path(folder)
        yield path
        names[:] = [] if CONFIG in there else sorted(name for name in names if name[0] != ".")
        for name in names:
            if (path / name).is_symlink() and (path / name / CONFIG).is_file():
                yield path / name


def _is_run(path: Path) -> bool:
    return (path / CONFIG).is_file() and (
        (path / METRICS).exists() or not _read_config(path)[1] or (path / MODEL).exists()
    )


def _read_config(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        config = configs.read_run(path / CONFIG)
    except (ValueError, OSError) as error:
        return {}, [str(error)]
    wrong = [name for name in _NEEDED if name not in config]
    for field_ in fields(Config):
        kind = _KINDS[re.split(r"\W", str(field_.type))[0]]
        if field_.name in config and not isinstance(config[field_.name], kind):
            wrong.append(field_.name)
    if wrong:
        return {}, [f"{CONFIG} does not say, or not well, what {', '.join(wrong)} is"]
    return config, []


def _read_run(path: Path, name: str, sweep: Sweep | None) -> Run:
    config, problems = _read_config(path)
    lines: dict[str, list[dict[str, Any]]] = {"epoch": [], "rewiring": [], "end": []}
    odd = 0
    try:
        text = (path / METRICS).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        text = ""
    except OSError as error:
        text, problems = "", [*problems, f"{METRICS} cannot be read: {error}"]
    whole = text.endswith("\n")  # or its last line is being written
    rows = text.splitlines()
    for row in rows if whole else rows[:-1]:
        entry = line(row)
        if entry is None:
            odd += 1
        elif (event := str(entry.get("event"))) in lines:
            lines[event].append(entry)
    if odd:
        problems = [*problems, f"{odd} line{'s' * (odd > 1)} of {METRICS} cannot be read"]
    end = lines["end"][-1] if lines["end"] else None
    model, copied = (path / MODEL).exists(), (path / ABOUT).is_file()
    # The model is written last; where there are neither weights nor checkpoints it is a copy of the text.
    finished = model or (end is not None and not (path / CHECKPOINTS).exists())
    if model and end is None:
        problems = [*problems, f"the model is there, but not the end of {METRICS}"]
    status = DAMAGED if problems else FINISHED if finished else UNFINISHED
    thin = -(-len(lines["rewiring"]) // _MOST) or 1
    rewirings = lines["rewiring"][::thin]
    machine = _machine(path, copied)
    shown = (lines["epoch"], rewirings, end, status, problems, sweep)
    return Run(path, name, config, *shown, machine=machine, copied=copied)


def _machine(path: Path, copied: bool) -> Mapping[str, Any]:
    """What a run was made on, as its copy or its newest checkpoint says."""
    if not copied:
        said = checkpoint.peek(path / CHECKPOINTS, "machine")
        return said if isinstance(said, Mapping) else {}
    try:
        return toml.read(path / ABOUT)
    except (ValueError, OSError):
        return {}


def _rounds(whole: Run) -> list[Run]:
    """The rounds of a sequence that trains one model after the other; of any other run, itself."""
    if not whole.config.get("rounds"):
        return [whole]
    found: list[Run] = []
    spent = dict.fromkeys(_SPENT, 0.0)
    for index in range(len(whole.config["rounds"])):
        path = Folder(whole.path).round(index).path
        if not (path / CONFIG).is_file():
            break
        one = _read_run(path, f"{whole.name}/{path.name}", whole.sweep)
        if one.end is not None:
            spent = {name: spent[name] + number(one.end, name) for name in _SPENT}
            one = replace(one, end={**one.end, **spent})
        found.append(replace(one, whole=whole))
    return found or [whole]


def line(text: str) -> dict[str, Any] | None:
    """A line of metrics; None if it is none."""
    try:
        entry = files.parse_json(text)
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    where = {"epoch": "epoch", "rewiring": "step"}.get(str(entry.get("event")))
    return None if where and math.isnan(number(entry, where)) else entry


def _read_sweep(path: Path) -> Sweep:
    problems, about, records = [], {}, []
    try:
        about = toml.read(path / SWEEP)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    if (path / RESULTS).exists():
        try:
            data = files.parse_json((path / RESULTS).read_text(encoding="utf-8"))
            rows = data if isinstance(data, list) else data.get("records", [])
            records = [row for row in rows if isinstance(row, dict)]
            if isinstance(data, dict) and isinstance(data.get("command"), str):
                about = {"command": data["command"], **about}
        except (ValueError, OSError, AttributeError, TypeError) as error:
            problems.append(f"{RESULTS} cannot be read: {error}")
    return Sweep(path, about, records, problems)
