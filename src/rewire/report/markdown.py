"""Results as Markdown tables, for a page that has words of its own around them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

from rewire import files
from rewire.report import html, paper
from rewire.report.groups import Group, rank
from rewire.report.paper import spelled
from rewire.report.runs import FINISHED, Found, Run
from rewire.report.views import plain, view_of
from rewire.training.formatting import duration

BEGIN, END = "<!-- rewire report: begin -->", "<!-- rewire report: end -->"
_HEAD = (
    *("model", "data", "sparsity", "method", "seeds", "test accuracy, %", "paper, %", "difference"),
    *("time of a run", "core-hours"),
)
_LEFT = 4  # columns of words
_ALWAYS = {"width": 1.0, "extend": 1.0, "scale": 1.0, "storage": "sparse", "keep_dense": []}
_ABOUT = """\
Test accuracy after the last epoch, mean ± standard deviation (of a sample) over the seeds. The paper's
number stands beside runs of its settings; settings other than its recipe are named with the method.
Schedules of another length (`scale`) have no difference. The time of a run is the mean over the seeds, as
the runs were made, testing included; core-hours are that times threads, of all seeds together."""


def write(out: Path, found: Found, groups: Sequence[Group]) -> None:
    """Write the tables between the two marks of a file, which is made if it is not there.

    Raises:
        ValueError: if the file is there without the marks.
    """
    text = out.read_text(encoding="utf-8") if out.exists() else f"# Results\n\n{BEGIN}\n{END}\n"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(
            f"{out} has no place for tables: put the lines {BEGIN} and {END} where they belong"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(out, f"{before}{BEGIN}\n{tables(found, groups)}{END}{after}")


def tables(found: Found, groups: Sequence[Group]) -> str:
    """Of finished runs: a table of those made by hand, and one of each sweep."""
    finished = [group for group in groups if group.complete]
    parts = [_ABOUT, *_machines(found.runs)]
    by_hand = [group for group in finished if group.runs[0].sweep is None]
    if by_hand:
        parts.append(_table(by_hand))
    for sweep in found.sweeps:
        mine = [group for group in finished if group.runs[0].sweep is sweep]
        if mine:
            parts += [f"### {view_of(mine[0]).title}", f"`{sweep.command}`", _table(mine)]
    return "\n\n".join(parts) + "\n"


def _table(groups: Sequence[Group]) -> str:
    shown = map(_row, sorted(groups, key=_order))
    rows = [_HEAD, ["---"] * _LEFT + ["--:"] * (len(_HEAD) - _LEFT), *shown]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _order(group: Group) -> tuple[Any, ...]:
    """Dense first, then by sparsity; the paper's recipe before others."""
    c = group.config
    sparsity = -1.0 if c["method"] == "dense" else c["sparsity"]
    others = [(name, *_comparable(value)) for name, value in _unlike(c).items()]
    return c["dataset"], c["model"], sparsity, rank(c["method"]), c["method"], len(others), others


def _comparable(value: Any) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, int | float) else (0.0, plain(value))


def _row(group: Group) -> list[str]:
    config = group.config
    printed = paper.lookup(config, view_of(group).tables)
    alike = printed is not None and config.get("scale", 1.0) == 1
    return [
        spelled(config["model"]),
        spelled(config["dataset"].rstrip("/").rsplit("/", 1)[-1]),
        html.DASH if config["method"] == "dense" else f"{100 * config['sparsity']:.4g} %",
        ", ".join([spelled(config["method"]), *starmap(_named, _unlike(config).items())]),
        ", ".join(str(run.config["seed"]) for run in group.finished),
        _value(group.mean, group.deviation, 2),
        _value(printed.accuracy, printed.deviation, 1) if printed is not None else html.DASH,
        html.signed(group.mean - printed.accuracy) if printed is not None and alike else html.DASH,
        duration(group.seconds) if math.isfinite(group.seconds) else html.DASH,
        f"{group.core_hours:.2f}" if math.isfinite(group.core_hours) else html.DASH,
    ]


def _unlike(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in which runs differ from the paper's recipe."""
    usual = {name: config.get(name, value) for name, value in _ALWAYS.items()}
    names = [name for name, value in usual.items() if value != _ALWAYS[name]]
    names += [name for name in paper.differences(config) if name not in names]
    return {name: config[name] for name in names}


def _named(name: str, value: Any) -> str:
    return f"{name.replace('_', ' ')} {_word(value)}"


def _word(value: Any) -> str:
    return spelled(value) if isinstance(value, str) else plain(value)


def _value(mean: float, deviation: float, digits: int) -> str:
    spread = f" ± {deviation:.{digits}f}" if math.isfinite(deviation) else ""
    return f"{mean:.{digits}f}{spread}"


def _machines(runs: Sequence[Run]) -> list[str]:
    """A sentence on versions and threads, if they are known."""
    said = {
        f"rewire {m.get('rewire')}, torch {m.get('torch')}, {m.get('threads')} thread(s)"
        for m in (run.machine for run in runs if run.status == FINISHED)
        if m
    }
    return [f"Made with {'; '.join(sorted(said))}."] if said else []
