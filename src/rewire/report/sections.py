"""From groups of runs to the sections of the page: what is shown, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rewire.report import paper, wires
from rewire.report.costs import costs
from rewire.report.groups import Group
from rewire.report.panel import Panel
from rewire.report.paper import spelled
from rewire.report.plot import Plot, slug
from rewire.report.progress import Tell, silent
from rewire.report.records import of_records
from rewire.report.runs import Found, Sweep
from rewire.report.views import BY_HAND, VIEWS, View, view_of

Item = Plot | str
BAND = "Lines are means over seeds, bands hold 95 % of them."


@dataclass(frozen=True)
class Part:
    """Plots and other things under one heading.

    Attributes:
        title, note: the heading, and a sentence below it.
        items: plots, and HTML.
        wide: whether items go below, not beside each other.
    """

    title: str
    items: Sequence[Item]
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the page with an entry in its list of contents."""

    title: str
    parts: Sequence[Part]
    lead: str = ""
    source: str = ""
    command: str = ""
    name: str = field(default="")


def sections(found: Found, groups: Sequence[Group], tell: Tell = silent) -> list[Section]:
    """One for each sweep, and one for each model and data set of other runs."""
    made, sweeps = [], sorted(found.sweeps, key=lambda sweep: _rank(sweep.experiment))
    others: dict[str, list[Group]] = {}
    for group in groups:
        if group.runs[0].sweep is None:
            config = group.config
            title = f"{spelled(config['model'])} on {spelled(last(config['dataset']))}"
            others.setdefault(title, []).append(group)
    total = len(sweeps) + len(others)
    for index, sweep in enumerate(sweeps):
        tell("looking at", index, total)
        mine = [group for group in groups if group.runs[0].sweep is sweep]
        if sweep.records or not mine:
            made.append(_of_records(sweep))
        if mine:
            view = view_of(mine[0])
            made.append(_of_view(view, mine, view.title, sweep.command or ""))
    for index, (title, mine) in enumerate(others.items(), len(sweeps)):
        tell("looking at", index, total)
        made.append(_of_view(BY_HAND, mine, title))
    return _named(made)


def _named(found: Sequence[Section]) -> list[Section]:
    """With a name each that no other has."""
    made: list[Section] = []
    for one in found:
        name = base = slug(one.title)
        while name in {other.name for other in made}:
            name = f"{base}-{len(made)}"
        made.append(Section(one.title, one.parts, one.lead, one.source, one.command, name))
    return made


def _of_records(sweep: Sweep) -> Section:
    title, source, lead, plots, tables = of_records(sweep)
    parts = [Part("Results", plots), Part("" if plots else "Results", tables, wide=True)]
    shown = [part for part in parts if part.items]
    return Section(title, shown, lead, source, sweep.command or "")


def _of_view(view: View, found: Sequence[Group], title: str, command: str = "") -> Section:
    panels: dict[tuple[str, ...], list[Group]] = {}
    for group in _comparable(view, found):
        panels.setdefault(tuple(group.config[name] for name in view.panel), []).append(group)
    results: list[Item] = []
    over_x: list[Item] = []
    curves: list[Item] = []
    changes: list[Item] = []
    densities: list[Item] = []
    pictures: list[Item] = []
    speeds: list[Item] = []
    tables: list[Item] = []
    for settings, mine in panels.items():
        name = ", ".join(spelled(last(part)) for part in reversed(settings))
        name = name if len(panels) > 1 else ""
        look = Panel(view, mine, name)
        results.append(look.table())
        over_x += _shown(look.over_x())
        curves += [plot for plot in look.progress() if not plot.empty]
        changes += [plot for plot in look.exploration() if not plot.empty]
        shown = look.representatives()
        densities += _shown(*(wires.over_time(group, look.tag(group)) for group in shown))
        pictures += [item for group in shown for item in wires.pictures(group, look.tag(group))]
        table, plot = costs(view, mine, look.namer, name)
        tables.append(table)
        speeds += _shown(plot)
    parts = [
        Part(
            "Results", results if len(panels) > 1 else [*results, *over_x], _explained(view, found)
        ),
        Part("", over_x if len(panels) > 1 else []),
        Part("Accuracy while training", curves, BAND),
        Part(
            "Turnover and exploration",
            changes,
            "Turnover is the share of connections that a rewiring replaces; explored are all that have "
            "ever been active, as a share of those that could be.",
        ),
        Part(
            "Density of each layer over time",
            densities,
            "Where connections compete over the whole model, they move between layers. Early layers are "
            "indigo, late ones amber.",
        ),
        Part(
            "Connections before and after",
            pictures,
            "Output units go down, input units across. Blue connections were there from the start, orange "
            "ones have grown since.",
            wide=True,
        ),
        Part(
            "Cost and speed",
            speeds,
            "Training images per second, testing included, as the runs were made: compare runs of one "
            "machine with the same number of threads.",
        ),
        Part("" if speeds else "Cost", tables, wide=True),
    ]
    lead = view.lead
    return Section(title, [part for part in parts if part.items], lead, view.source, command)


def _comparable(view: View, found: Sequence[Group]) -> list[Group]:
    """Without those rounds of lotteries that no other method can be compared with."""
    others = [group for group in found if group.config["method"] != "lottery"]
    places = {view.place(group.config) for group in others or found}
    return [group for group in found if view.place(group.config) in places]


def _explained(view: View, found: Sequence[Group]) -> str:
    words = [
        "Test accuracy in percent at the end of training, mean and standard deviation over seeds."
    ]
    if any(paper.nearest(group.config, view.tables) for group in found):
        words.append(
            "Below it in grey: the paper's, and how far it is from that; or, where settings differ from "
            "those of the paper, in which."
        )
    words += dict.fromkeys(note for group in found for note in paper.contradictions(group.config))
    if view.source and all(group.config["dataset"] == "digits" for group in found):
        words.append("This is a try on the packaged digits, not on what the paper trained.")
    if any(not group.complete for group in found):
        words.append("Numbers in italics are of runs that are not finished.")
    scales = {group.config.get("scale", 1.0) for group in found} - {1.0}
    if scales:
        held = ", ".join(f"{scale:g}" for scale in sorted(scales))
        words.append(
            f"Schedules are {held} of the paper's length: its numbers are shown, but no distance to them."
        )
    return " ".join(words)


def _shown(*plots: Plot | None) -> list[Item]:
    return [plot for plot in plots if plot is not None and not plot.empty]


def last(name: str) -> str:
    """The last part of a path, which a data set may be."""
    return name.rstrip("/").rsplit("/", 1)[-1]


def _rank(experiment: str) -> int:
    """Where an experiment stands in the paper."""
    return list(VIEWS).index(experiment) if experiment in VIEWS else len(VIEWS)
