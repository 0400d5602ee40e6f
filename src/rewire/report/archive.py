"""Copies of runs as text: config and metrics without weights, small enough for a repository."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rewire import files
from rewire.report import runs
from rewire.report.progress import Tell, silent
from rewire.report.runs import DAMAGED, FINISHED, RESULTS, SWEEP, Found, Run
from rewire.training import toml
from rewire.training.folder import ABOUT, CONFIG, METRICS, MODEL

_FACTS = ("rewire", "torch", "threads", "processes", "device")
_PLACES = re.compile(r""" --(?:root|out) (?:'[^']*'|[^\s"']+)""")  # in the command of a sweep
_NOT_COMPARED = ("seconds",)  # what differs when a run is repeated to the bit


@dataclass
class Archived:
    """What was done, by the names of runs.

    Attributes:
        written: copied, or copied anew because they had gone on.
        same: those whose copies were up to date.
        left_out: those that are not finished, or damaged, and which of it.
    """

    written: list[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def archive(
    folders: Sequence[Path], out: Path, *, unfinished: bool = False, tell: Tell = silent
) -> Archived:
    """Copy the text of all runs and sweeps in and below folders; only what has changed is written.

    A copy has ``config.toml``, ``metrics.jsonl`` and ``about.toml``: versions, threads, and the checksum of
    the model that was not copied. A run or sweep that is given itself goes to a folder of its name, others
    where they are below the given folder. Commands of sweeps lose ``--root`` and ``--out``. The same runs
    give the same files, byte for byte.

    Args:
        folders: runs, sweeps, or folders above them.
        out: the folder to copy to.
        unfinished: copy runs that are not finished, too, as far as they are.
        tell: is called with what is being done, how much of it is done, and how much there is.

    Raises:
        ValueError: if there is no run, two would go to the same place, or there is a copy of a run with
            other settings, or of this one with other results.
    """
    done = Archived()
    planned: dict[Path, tuple[str, dict[str, str]]] = {}
    for top in folders:
        for name, path, texts in _all(runs.find([top], tell), top, unfinished, done):
            if path.resolve().is_relative_to(out.resolve()):  # a copy itself
                continue
            place = out / name
            if place in planned and planned[place][1] != texts:
                raise ValueError(
                    f"{path} and another run would both be copied to {place}: copy them one by one, to "
                    "folders of their own"
                )
            _check(place, texts)
            planned[place] = name, texts
    for index, (place, (name, texts)) in enumerate(planned.items()):
        tell("copying", index, len(planned))
        changed = [file for file, text in texts.items() if _read(place / file) != text]
        if changed:
            place.mkdir(parents=True, exist_ok=True)
        for file in changed:
            files.write_text(place / file, texts[file])
        (done.written if changed else done.same).append(name)
    return done


def _all(
    found: Found, top: Path, unfinished: bool, done: Archived
) -> Iterator[tuple[str, Path, dict[str, str]]]:
    """Name, folder and files of all that is to be copied."""
    for sweep in found.sweeps:
        texts = {file: _read(sweep.path / file) for file in (SWEEP, RESULTS)}
        there = {file: _PLACES.sub("", text) for file, text in texts.items() if text is not None}
        yield _name(sweep.path, top), sweep.path, there
    wholes = {run.whole.path: run.whole for run in found.runs if run.whole is not None}
    for run in [*wholes.values(), *found.runs]:
        state = (run.whole or run).status
        if DAMAGED in (state, run.status) or not (unfinished or state == FINISHED):
            done.left_out.append(f"{_name(run.path, top)} ({run.status})")
        else:
            yield _name(run.path, top), run.path, _texts(run)


def _name(path: Path, top: Path) -> str:
    """Where it goes, below the folder of copies."""
    rest = path.relative_to(top)
    own = any((top / file).is_file() for file in (CONFIG, SWEEP))
    return (Path(top.resolve().name) / rest if own else rest).as_posix()


def _texts(run: Run) -> dict[str, str]:
    """The files of a copy; a line that is being written is left out."""
    metrics = (run.path / METRICS).read_text(encoding="utf-8") if run.epochs or run.end else ""
    return {
        CONFIG: (run.path / CONFIG).read_text(encoding="utf-8"),
        METRICS: metrics[: metrics.rfind("\n") + 1],
        ABOUT: _read(run.path / ABOUT) or toml.dumps(_about(run)),
    }


def _about(run: Run) -> dict[str, Any]:
    facts: dict[str, Any] = {name: run.machine[name] for name in _FACTS if name in run.machine}
    if (run.path / MODEL).is_file():
        facts["model_sha256"] = files.sha256(run.path / MODEL)
    return facts


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _check(place: Path, texts: dict[str, str]) -> None:
    """Raise a ValueError if a copy is there of another run, or of the same one with another result."""
    config, metrics = _read(place / CONFIG), _read(place / METRICS)
    if config is not None and config != texts.get(CONFIG):
        raise ValueError(
            f"{place} holds a copy of a run with other settings: choose another folder, or remove it"
        )
    old = _compared(metrics or "")
    finished = bool(old) and old[-1].get("event") == "end"
    if finished and old != _compared(texts[METRICS]):
        raise ValueError(
            f"{place} holds a copy of this run, finished, with other results: keep both, in folders of "
            "their own, or remove the copy"
        )


def _compared(metrics: str) -> list[dict[str, Any]]:
    """The lines that can be read, without what differs between repetitions to the bit."""
    rows = filter(None, map(runs.line, metrics.splitlines()))
    return [{k: v for k, v in row.items() if k not in _NOT_COMPARED} for row in rows]
