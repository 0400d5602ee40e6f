"""How each of the paper's experiments is looked at: what is on the x axis, and what is a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rewire.methods.options import OPTIONS
from rewire.report import colors, groups
from rewire.report.groups import Group
from rewire.report.paper import spelled


@dataclass(frozen=True)
class View:
    """A way to look at runs.

    Attributes:
        title: what it is about.
        source: the table or figure of the paper that it repeats.
        lead: a sentence on what to see.
        panel: settings of which each combination has plots of its own.
        x: the setting on the x axis; runs without it are compared to all.
        lines: settings of which each combination is a line.
        tied: settings that change with x or the line and need not be named.
        tables: where the paper's numbers are.
        curves: one plot of training progress for each ``"x"``, one for ``"all"``, or ``""`` for none.
        train: whether progress on training images is shown too.
    """

    title: str
    source: str = ""
    lead: str = ""
    panel: tuple[str, ...] = ("dataset", "model")
    x: str = "sparsity"
    lines: tuple[str, ...] = ("method",)
    tied: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    curves: str = "x"
    train: bool = False

    def place(self, config: Mapping[str, Any]) -> float | None:
        """Where a run is on the x axis."""
        if self.x == "sparsity" and config["method"] == "dense":
            return None
        value = config.get(self.x)
        return float(value) if isinstance(value, int | float) else None

    def tick(self, x: float, config: Mapping[str, Any]) -> str:
        """What a place on the x axis is called."""
        if self.x == "sparsity":
            return f"{100 * x:.4g}\u2009%"
        if self.x == "extend":
            return f"{x * config.get('epochs', 200):g}"
        return f"{x:g}×" if self.x == "width" else f"{x:g}"  # noqa: RUF001

    @property
    def x_label(self) -> str:
        """The name of the x axis."""
        names = {"subset": "subset samples per connection (gamma)", "extend": "epochs"}
        return names.get(self.x, self.x)

    @property
    def x_name(self) -> str:
        """The same in a word."""
        return "epochs" if self.x == "extend" else self.x

    def position(self, x: float) -> float:
        """Where to draw it: sparsities by how many weights there are for each connection."""
        return 1 / (1 - min(x, 1 - 1e-9)) if self.x == "sparsity" else x

    def namer(self, found: Sequence[Group]) -> Namer:
        """What lines of these groups are called."""
        fixed = (*self.panel, self.x, *self.lines, *self.tied)
        return Namer(self, tuple(groups.differing(found, fixed)))


@dataclass(frozen=True)
class Namer:
    """Names and colours of lines: what the view says, and settings in which runs differ besides."""

    view: View
    more: tuple[str, ...]

    def label(self, config: Mapping[str, Any]) -> str:
        """What the line of a run is called."""
        parts = [_word(name, config.get(name)) for name in self.view.lines]
        parts += [f"{name.replace('_', ' ')} {plain(config.get(name))}" for name in self.more]
        named = [part for part in parts if part]
        return " · ".join(named) or spelled(config["method"])

    def color(self, config: Mapping[str, Any], labels: Sequence[str]) -> str:
        """The colour of that line, among those of all labels."""
        mine, method = self.label(config), config["method"]
        if self.view.lines[:1] != ("method",):
            return colors.ramp(labels.index(mine) / max(1, len(labels) - 1))
        drawn = config.get("distribution")
        if "distribution" in self.view.lines and drawn is not None and not self.more:
            return colors.of(str(drawn)) if drawn != "uniform" else colors.of(method)
        same = [label for label in labels if label.split(" · ")[0] == spelled(method)]
        return colors.of(method, same.index(mine))


def _word(name: str, value: Any) -> str:
    if value is None:
        return ""
    if value == "uniform":
        return "uniform"
    return spelled(value) if isinstance(value, str) else f"{name} {plain(value)}"


def plain(value: Any) -> str:
    """A setting in words."""
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


BY_HAND = View("", tables=("table1", "imagenet", "extended", "vit-scaling"))

_WIDER = View(
    "Wider models with as many connections",
    "Table 3",
    "Each model is made wider and sparser, so that the number of connections stays.",
    x="width",
    panel=("dataset",),
    lines=("model",),
    # What changes with the width, where the narrowest model is dense, and with the model.
    tied=("sparsity", "exact", "method", *OPTIONS, "lr"),
    tables=("scaling",),
    curves="all",
)

VIEWS: dict[str, View] = {
    "table1": View(
        "Methods compared",
        "Table 1",
        "Test accuracy of every method at each sparsity.",
        tables=("table1",),
    ),
    "imagenet": View(
        "ImageNet",
        "Table 2",
        "ResNet-50 at 90 % sparsity.",
        tables=("imagenet",),
    ),
    "scaling": _WIDER,
    "extended": View(
        "Extended training",
        "Table 4",
        "Epochs, learning-rate drops and the last rewiring are all later; 98 % sparsity.",
        panel=("dataset",),
        x="extend",
        lines=("model",),
        tied=("lr",),
        tables=("extended",),
        curves="all",
    ),
    "vit-scaling": View(
        "Wider dense ViT",
        "Table 5",
        "The dense model alone, for comparison with sparse ones of the same width.",
        x="width",
        tables=("vit-scaling",),
        curves="all",
    ),
    "subset": View(
        "Size of the subset",
        "Figure 3",
        "How many inactive connections are looked at, for the three ways to draw them.",
        x="subset",
        lines=("method", "distribution"),
        tables=("table1",),
        curves="",
    ),
    "assignment": View(
        "Sharing connections among layers",
        "Figure 5",
        "The same density in every layer, or in proportion to its units (Erdos-Renyi).",
        lines=("method", "assignment"),
        tables=("table1",),
        curves="",
    ),
    "progress-methods": View(
        "Training progress",
        "Figure 6",
        "Test accuracy after every epoch.",
        tables=("table1",),
    ),
    "progress-width": replace(
        _WIDER,
        title="Training progress of wider models",
        source="Figure 7",
        lead="Accuracy on training and test images after every epoch.",
        train=True,
    ),
}


def view_of(group: Group) -> View:
    """How runs are looked at, by the experiment that they are part of."""
    sweep = group.runs[0].sweep
    if sweep is None:
        return BY_HAND
    return VIEWS.get(sweep.experiment, View(sweep.experiment or sweep.path.name))
