"""The page: one HTML file with its style, script and pictures in it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from shlex import quote

from rewire.report import colors, html, svg
from rewire.report.groups import Group, differing
from rewire.report.paper import spelled
from rewire.report.plot import Plot
from rewire.report.rerun import command
from rewire.report.runs import DAMAGED, FINISHED, UNFINISHED, Found, Run, total
from rewire.report.sections import Part, Section
from rewire.training import toml
from rewire.training.formatting import duration

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(found: Found, groups: Sequence[Group], sections: Sequence[Section], title: str) -> str:
    """The whole file."""
    links = [(section.name, section.title) for section in sections]
    problems = _problems(found.runs)
    links += [("problems", "Not finished")] if problems else []
    links += [("settings", "Settings")] if groups else []
    nav = "".join(f'<a href="#{name}">{escape(text)}</a>' for name, text in links)
    body = "".join(map(_section, sections)) + problems + _settings(groups)
    style = colors.variables() + svg.STYLE + _asset("page.css")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<header><div class="inside"><h1>{escape(title)}</h1>{_tiles(found.runs, groups)}</div></header>
<nav aria-label="Contents"><div class="inside">{nav}</div></nav>
<main class="inside">
{body}
</main>
<footer class="inside">Made by <code>rewire report</code>. The paper: Heddes et al., <i>Always-Sparse
Training by Growing Connections with Guided Stochastic Exploration</i>.</footer>
<div id="tip" role="status"></div>
<script>
{_asset("page.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _tiles(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    """The numbers at the top."""
    runs = list({run.path.resolve(): run for run in runs}.values())  # sweeps may share them
    count = {
        state: sum(r.status == state for r in runs) for state in (FINISHED, UNFINISHED, DAMAGED)
    }
    states = ", ".join(f"{n:,} {state}" for state, n in count.items() if n)
    methods = list(dict.fromkeys(spelled(g.config["method"]) for g in groups))
    models = sorted({spelled(g.config["model"]) for g in groups})
    data = sorted({spelled(g.config["dataset"].rsplit("/", 1)[-1]) for g in groups})
    shown = [
        (f"{len(runs):,}", f"run{'s' * (len(runs) != 1)}: {states or 'none'}"),
        (duration(total(runs, "seconds")), f"of training{_cores(runs)}"),
        (str(len(methods)), _plural("method", methods)),
        (str(len(models)), _plural("model", models)),
        (str(len(data)), _plural("data set", data)),
    ]
    tiles = "".join(f"<li><b>{escape(n)}</b><span>{escape(what)}</span></li>" for n, what in shown)
    return html.tag("ul", tiles, "tiles")


def _cores(runs: Sequence[Run]) -> str:
    hours = total(runs, "core_hours")
    return f", {hours:,.1f} core-hours" if hours else ""


def _plural(word: str, names: Sequence[str]) -> str:
    return f"{word}{'s' * (len(names) != 1)}: {', '.join(names) or 'none'}"


def _section(section: Section) -> str:
    source = html.chip(section.source, "source") if section.source else ""
    lead = html.tag("p", escape(section.lead), "lead") if section.lead else ""
    again = html.command(section.command) if section.command else ""
    parts = "".join(map(_part, section.parts))
    head = f"<h2>{escape(section.title)}{source}</h2>"
    return f'<section id="{section.name}">{head}{lead}{again}{parts}</section>\n'


def _part(part: Part) -> str:
    note = html.tag("p", escape(part.note), "note") if part.note else ""
    items = "\n".join(html.figure(i) if isinstance(i, Plot) else i for i in part.items)
    css = "stack" if part.wide else "grid"
    head = html.tag("h3", escape(part.title)) if part.title else ""
    return f'{head}{note}<div class="{css}">{items}</div>\n'


def _problems(runs: Sequence[Run]) -> str:
    """Runs that did not come to their end, and what to do."""
    rows = []
    for run in runs:
        if run.status == FINISHED:
            continue
        done = f"after epoch {run.epochs[-1]['epoch']:g}" if run.epochs else "no epoch done"
        words = "; ".join(run.problems) or done
        resume = f"rewire train --resume {quote(str((run.whole or run).path))}"
        if run.sweep is not None and run.sweep.command:
            resume = run.sweep.command
        again = html.command(resume) if run.status == UNFINISHED and not run.copied else ""
        rows.append([escape(run.name), html.chip(run.status, run.status), escape(words), again])
    if not rows:
        return ""
    table = html.table(["run", "state", "what is known", "resume it"], rows)
    return (
        f'<section id="problems"><h2>Not finished</h2><div class="card">{table}</div></section>\n'
    )


def _settings(groups: Sequence[Group]) -> str:
    """All settings, and the command for each run."""
    items: list[str] = []
    seen: set[Path] = set()
    titles = [_group_title(group) for group in groups]
    for group, title in zip(groups, titles, strict=True):
        paths = {run.path.resolve() for run in group.runs}
        if paths <= seen:  # sweeps may share runs
            continue
        seen |= paths
        alike = [other for other, name in zip(groups, titles, strict=True) if name == title]
        more = [f", {name} {group.config.get(name)}" for name in differing(alike, ())]
        seeds = ", ".join(str(run.config["seed"]) for run in group.runs)
        count = f"seed{'s' * (len(group.runs) > 1)} {seeds}"
        runs = "".join(
            html.command(text)
            for text in dict.fromkeys(command((run.whole or run).config) for run in group.runs)
        )
        folders = escape(", ".join(run.name for run in group.runs))
        items.append(
            f"<details><summary><b>{escape(title + ''.join(more))}</b><span>{escape(count)}</span>"
            f'</summary>{runs}<p class="note">{folders}</p><pre>{escape(_toml(group))}</pre></details>'
        )
    if not items:
        return ""
    note = (
        "Each line repeats one run; what is not in it is the recipe of <code>rewire train</code>."
    )
    return (
        f'<section id="settings"><h2>Settings and how to rerun</h2><p class="lead">{note}</p>'
        f"{''.join(items)}</section>\n"
    )


def _group_title(group: Group) -> str:
    config = group.config
    sparsity = "" if config["method"] == "dense" else f", sparsity {100 * config['sparsity']:.4g} %"
    data = spelled(config["dataset"].rsplit("/", 1)[-1])
    return f"{spelled(config['model'])} on {data}, {spelled(config['method'])}{sparsity}"


def _toml(group: Group) -> str:
    flat = (bool, int, float, str, list)
    return toml.dumps({k: v for k, v in group.config.items() if isinstance(v, flat)}).rstrip()
