"""Runs of one model and data set, or of one data set: their table and plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

from rewire.report import colors, html, paper
from rewire.report.groups import Group
from rewire.report.plot import Plot, Series, slug, thin
from rewire.report.views import Namer, View, plain


@dataclass(frozen=True)
class Panel:
    """Runs of one model and data set, seen by a view; the name is empty if there is one panel alone."""

    view: View
    groups: Sequence[Group]
    name: str

    @cached_property
    def namer(self) -> Namer:
        return self.view.namer(self.groups)

    @cached_property
    def labels(self) -> list[str]:
        """Of all lines."""
        return list(dict.fromkeys(self.namer.label(g.config) for g in self.groups))

    @cached_property
    def places(self) -> list[tuple[float, str]]:
        """Where groups are on the x axis, and what that is called."""
        found = {self.view.place(g.config): g.config for g in self.groups}
        return [(x, self.view.tick(x, found[x])) for x in sorted(x for x in found if x is not None)]

    def tag(self, group: Group) -> str:
        """What a group is called where it stands alone."""
        x = self.view.place(group.config)
        at = "" if x is None else f"{self.view.x_name} {self.view.tick(x, group.config)}"
        return ", ".join(part for part in (self.namer.label(group.config), at, self.name) if part)

    def color(self, group: Group) -> str:
        return self.namer.color(group.config, self.labels)

    def _plot(
        self, name: str, words: str, x: str, y: str, series: Sequence[Series], **more: Any
    ) -> Plot:
        """In percent, with words for its title; with several panels the panel is the title."""
        title, subtitle = (self.name, words) if self.name else (words, "")
        name = slug(f"{self.name}-{name}")
        return Plot(name, title, x, y, series, subtitle=subtitle, unit="%", **more)

    # Tables ---------------------------------------------------------------------------------------

    def table(self) -> str:
        """Lines down, places on the x axis across, the paper's numbers in small."""
        places, rows = self.places, []
        best = {x: max((g.mean for g in self._at(x)), default=math.nan) for x, _ in places}
        for label in self.labels:
            mine = [g for g in self.groups if self.namer.label(g.config) == label]
            row = [html.swatch(self.color(mine[0]), label)]
            whole = next((g for g in mine if self.view.place(g.config) is None), None)
            if whole is not None:
                row.append(f'<td colspan="{max(1, len(places))}">{self._cell(whole, False)}</td>')
            else:
                held = {self.view.place(g.config): g for g in mine}
                row += [
                    self._cell(held[x], held[x].mean == best[x]) if x in held else html.DASH
                    for x, _ in places
                ]
            rows.append(row)
        head = [self.view.x_name, *(tick for _, tick in places)] if places else ["", "accuracy"]
        title = html.tag("h4", escape(self.name)) if self.name else ""
        return html.tag("div", title + html.table(head, rows, "pivot"), "card")

    def _at(self, x: float) -> list[Group]:
        return [g for g in self.groups if self.view.place(g.config) == x and g.accuracies]

    def _cell(self, group: Group, best: bool) -> str:
        number = html.value(group.mean, group.deviation)
        if not group.complete:
            number = html.tag("i", number)
        elif best and len(self.labels) > 1 and "method" in self.view.lines:
            number = html.tag("b", number)
        printed = self._paper(group)
        if printed is None:
            return number + self._unlike(group)
        gap = group.mean - printed.accuracy
        alike = math.isfinite(gap) and group.config.get("scale", 1.0) == 1
        away = f" ({html.signed(gap)})" if alike else ""
        spread = f"±{printed.deviation}" if math.isfinite(printed.deviation) else ""
        return f'{number}<span class="printed">{printed.accuracy:.1f}{spread}{away}</span>'

    # Plots ----------------------------------------------------------------------------------------

    def over_x(self) -> Plot:
        """Accuracy against what the view has on its x axis."""
        series: list[Series] = []
        for label in self.labels:
            mine = [g for g in self.groups if self.namer.label(g.config) == label and g.accuracies]
            if not mine:
                continue
            color = self.color(mine[0])
            placed = [
                (self.view.position(x), group)
                for group in mine
                if (x := self.view.place(group.config)) is not None
            ]
            if len(placed) < len(mine):
                if (theirs := self._paper(mine[0])) is not None:
                    series.append(_printed(label, color, (), [theirs.accuracy]))
                series.append(Series(label, color, (), [mine[0].mean]))
                continue
            placed.sort(key=lambda pair: pair[0])
            bands = [g.band for _, g in placed]
            ours = Series(
                label,
                color,
                [x for x, _ in placed],
                [g.mean for _, g in placed],
                [low for low, _ in bands],
                [high for _, high in bands],
                dots=True,
            )
            printed = [(x, p.accuracy) for x, g in placed if (p := self._paper(g)) is not None]
            if printed:
                at, values = zip(*printed, strict=True)
                series.append(_printed(label, color, at, values))
            series.append(ours)
        ticks = [(self.view.position(x), tick) for x, tick in self.places]
        words = f"Accuracy against {self.view.x_name}"
        logs = self.view.x == "sparsity" or (self.view.x == "subset" and ticks and ticks[-1][0] > 4)
        more = {"log_x": bool(logs), "ticks": ticks}
        shown = series if len(ticks) > 1 else []
        return self._plot("accuracy", words, self.view.x_label, "test accuracy", shown, **more)

    def _paper(self, group: Group) -> paper.Printed | None:
        return paper.lookup(group.config, self.view.tables)

    def _unlike(self, group: Group) -> str:
        """What keeps a group from being compared with the paper's number for such a run, in words."""
        if paper.nearest(group.config, self.view.tables) is None:
            return ""
        shown = (*self.view.panel, self.view.x, *self.view.lines)
        unlike = {k: v for k, v in paper.differences(group.config).items() if k not in shown}
        words = [f"{name.replace('_', ' ')} {plain(value)}" for name, value in unlike.items()]
        said = f"the paper has {', '.join(words)}"
        return f'<span class="printed">{escape(said)}</span>' if words else ""

    def progress(self) -> list[Plot]:
        """Accuracy after every epoch."""
        if not self.view.curves:
            return []
        kinds = [("test_accuracy", "test accuracy")]
        if self.view.train:
            kinds.insert(0, ("train_accuracy", "training accuracy"))
        everywhere = [g for g in self.groups if self.view.place(g.config) is None]
        plots = []
        for key, y_label in kinds:
            if self.view.curves == "all":
                for label in self.labels if self.places else ():
                    mine = [g for g in self.groups if self.namer.label(g.config) == label]
                    mine.sort(key=lambda group: self.view.place(group.config) or 0.0)
                    plots.append(self._curves(key, y_label, mine, label))
                continue
            if not self.places:
                plots.append(self._curves(key, y_label, self.groups, ""))
            for x, tick in self.places:
                mine = [g for g in self.groups if self.view.place(g.config) == x]
                plots.append(self._curves(key, y_label, [*everywhere, *mine], tick))
        return plots

    def _curves(self, key: str, y_label: str, groups: Sequence[Group], at: str) -> Plot:
        """Of some groups; ``at`` says which. Lines along the x axis of the view have colours in order."""
        series, along = [], self.view.curves == "all"
        for index, group in enumerate(groups):
            curve = group.curve("epochs", "epoch", key, 100.0)
            x, mean, low, high = thin(curve.x, curve.mean, curve.low, curve.high)
            label, color = self.namer.label(group.config), self.color(group)
            if along and (place := self.view.place(group.config)) is not None:
                label = f"{self.view.x_name} {self.view.tick(place, group.config)}"
                color = colors.ramp(index / max(1, len(groups) - 1))
            series.append(Series(label, color, x, mean, low, high))
        at = f"{self.view.x_name} {at}" if at and not along else at
        words = f"{y_label.capitalize()}, {at}" if at else y_label.capitalize()
        return self._plot(f"{key}-{at}", words, "epoch", y_label, series)

    def exploration(self) -> list[Plot]:
        """Turnover and explored connections, of one group for each line."""
        plots = []
        for key, y_label in (("turnover", "turnover"), ("explored", "explored connections")):
            series = []
            for group in self.representatives():
                curve = group.curve("rewirings", "step", key, 100.0)
                x, mean, low, high = thin(curve.x, curve.mean, curve.low, curve.high)
                label = self.namer.label(group.config)
                series.append(Series(label, self.color(group), x, mean, low, high))
            places = {self.view.place(g.config) for g in self.representatives()}
            tick = dict(self.places).get(places.pop() or 0.0, "") if len(places) == 1 else ""
            at = f", {self.view.x_name} {tick}" if tick else ""
            words = f"{y_label.capitalize()}{at}"
            plots.append(self._plot(key, words, "training step", y_label, series))
        return plots

    def representatives(self) -> list[Group]:
        """Of each line that rewires, the group farthest along the x axis."""
        found: dict[str, Group] = {}
        for group in sorted(self.groups, key=lambda g: self.view.place(g.config) or 0.0):
            if any(run.rewirings for run in group.runs):
                found[self.namer.label(group.config)] = group
        return [found[label] for label in self.labels if label in found]


def _printed(label: str, color: str, x: Sequence[float], y: Sequence[float]) -> Series:
    """A line of the paper's numbers."""
    return Series(f"{label}, paper", color, x, y, dashed=True, dots=True, paper=True)
