"""What :func:`rewire.explain` answers: the plan as a table, and where the engine stopped."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rewire.engine.places import Place
from rewire.summary import _bytes

_WIDTH = 120
_COLUMNS = ("module", "kernel", "also does", "output", "dtype", "layout", "written")
_MODULE, _FUSED = 30, 31  # the widest that these columns get
_OFF = (
    "The engine is off for this model: its layers run one by one.\n"
    "Turn it on with rewire.use_engine(model)."
)
_LEGEND = (
    "Track updates running statistics, Relayout copies to another layout, Convert to another dtype; "
    "moments are mean and variance of the output; what a kernel also does has no step of its own. Layouts: "
    "contiguous is torch's, panels (faster) and batch-last have samples innermost, flat are vectors. "
    "More: docs/performance.md."
)
_ONE_LAYER = (
    "The model is a single sparse layer, which runs by itself: "
    "the engine is for models that hold layers."
)
_NO_LAYERS = (
    "The model has no sparse layers: convert it with rewire.sparsify(model, sparsity) first "
    '(layers with storage="masked" are dense).'
)


@dataclass(frozen=True)
class PlannedStep:
    """One kernel call.

    Attributes:
        name: of the kernel.
        op: operation of the recorded node it works for, such as ``conv2d``; ``input`` for what the
            region reads.
        place: the module to which it belongs, and the line that recorded it.
        fused: what the kernel does besides.
        shape, layout, dtype: of its output; the first of them if it has several.
        bytes: of all its outputs.
    """

    name: str
    op: str
    place: Place
    fused: tuple[str, ...]
    shape: tuple[int, ...]
    layout: str
    dtype: str
    bytes: int

    @property
    def module(self) -> str:
        """Qualified name of the module it belongs to."""
        return self.place.module


@dataclass(frozen=True)
class Value:
    """A recorded value that was somebody's when its region ran.

    Attributes:
        op: operation that computes it.
        place: where it was recorded.
        shape: its shape.
        linked: whether C++ code holds it, so that its gradient is computed node by node.
    """

    op: str
    place: Place
    shape: tuple[int, ...]
    linked: bool


@dataclass(frozen=True)
class PlannedRegion:
    """What was recorded between two moments at which somebody wanted numbers.

    Attributes:
        nodes: operations that were recorded.
        functions: into so many functions of autograd the values that somebody holds divide it.
        forward, backward: kernel calls, in order.
        arena: bytes of the memory that both passes work in.
        dtype: of the values; several are joined with " and ".
        outputs: the values that left it. All others exist inside only, or not at all.
        end: why it ran.
    """

    nodes: int
    functions: int
    forward: tuple[PlannedStep, ...]
    backward: tuple[PlannedStep, ...]
    arena: int
    dtype: str
    outputs: tuple[Value, ...]
    end: str


@dataclass(frozen=True)
class Stop:
    """A place where the engine ran a region before the model's end, or recorded nothing.

    Attributes:
        reason: in words.
        place: in the user's code.
        region: index of the region that ran; None if nothing is recorded in a whole call.
    """

    reason: str
    place: Place
    region: int | None


@dataclass(frozen=True)
class ExplainedLayer:
    """A sparse layer.

    Attributes:
        name: qualified name.
        recorded: how many of its calls were recorded.
        alone: how many were not: it computed its output itself, at once.
        reason: of the first call that was not recorded, or why there was no call; empty if there is none.
        place: of that call.
    """

    name: str
    recorded: int
    alone: int
    reason: str
    place: Place

    @property
    def label(self) -> str:
        """The name, with how many calls were not recorded where others were."""
        some = f" ({self.alone} of {self.alone + self.recorded} calls)" if self.recorded else ""
        return f"{self.name or '(model)'}{some}"


@dataclass(frozen=True, repr=False)
class Explanation:
    """What :func:`rewire.explain` found. ``repr()`` says how much is recorded and where the engine stopped,
    ``str()`` the plan as well.

    Attributes:
        model: class of the model.
        on: whether the engine is on for any part of it.
        training, grad: mode of the model, and whether gradients were on.
        layers: all sparse layers.
        regions: in the order in which they ran.
        stops: where the engine stopped, in order.
    """

    model: str
    on: bool
    training: bool
    grad: bool
    layers: tuple[ExplainedLayer, ...]
    regions: tuple[PlannedRegion, ...]
    stops: tuple[Stop, ...]

    @property
    def recorded(self) -> int:
        """Sparse layers all of whose calls were recorded."""
        return sum(layer.recorded > 0 and not layer.alone for layer in self.layers)

    @property
    def arena(self) -> int:
        """Bytes of all arenas."""
        return sum(region.arena for region in self.regions)

    def __repr__(self) -> str:
        mode = "training" if self.training else "evaluation"
        lines = [f"{self.model} in {mode} mode, gradients {'on' if self.grad else 'off'}"]
        if not self.layers or not self.on:
            single = [layer.name for layer in self.layers] == [""]
            off = _ONE_LAYER if single else _OFF
            return "\n".join([*lines, off if self.layers else _NO_LAYERS])
        lines.append(
            f"{self.recorded} of {len(self.layers)} sparse layers recorded, "
            f"{_count(len(self.regions), 'region')}, {_count(len(self.stops), 'stop')}, "
            f"arena {_bytes(self.arena)}"
        )
        return "\n".join([*lines, *self._stopped(), *self._alone()])

    def __str__(self) -> str:
        lines = [repr(self)]
        for index, region in enumerate(self.regions):
            lines += _region(index + 1, region)
        if self.regions:
            lines += ["", *_wrapped(_LEGEND, "")]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _stopped(self) -> list[str]:
        if not self.stops:
            return []
        lines = ["", "Where the engine stopped"]
        return lines + _grouped((stop.reason, stop.place, None) for stop in self.stops)

    def _alone(self) -> list[str]:
        layers = [layer for layer in self.layers if layer.reason]
        if not layers:
            return []
        lines = ["", "Layers that were not recorded"]
        return lines + _grouped((layer.reason, layer.place, layer.label) for layer in layers)


def _grouped(found: Iterable[tuple[str, Place, str | None]]) -> list[str]:
    """Reasons, each with its places in code, each with the modules there."""
    groups: dict[str, dict[str, list[str]]] = {}
    for reason, place, layer in found:
        name = f"{place.module} ({place.kind})" if place.module else "the model itself"
        groups.setdefault(reason, {}).setdefault(place.location, []).append(layer or name)
    lines: list[str] = []
    for reason, places in groups.items():
        count = sum(map(len, places.values()))
        lines += _wrapped(f"{count}x {reason}" if count > 1 else reason, "  ", "     ")
        for location, names in places.items():
            unique = list(dict.fromkeys(names))
            named = ", ".join(unique[:4]) + (f" and {len(unique) - 4} more" if unique[4:] else "")
            lines += _wrapped(f"{location} in {named}" if location else f"in {named}", " " * 5)
    return lines


def _region(number: int, region: PlannedRegion) -> list[str]:
    lines = [
        "",
        f"Region {number}: {_count(region.nodes, 'operation')} of {region.dtype} in "
        f"{len(region.forward)} kernel calls forward and {len(region.backward)} backward, "
        f"arena {_bytes(region.arena)}",
    ]
    lines += _wrapped(f"runs because {region.end}", "  ")
    kept = [value for value in region.outputs if not value.linked]
    if len(region.outputs) > 1:
        several = f"; {region.functions} functions to autograd" if region.functions > 1 else ""
        lines += _wrapped(f"outputs, because somebody holds them{several}:", "  ")
        for value in kept:
            lines += _wrapped(_value(value), "    ")
    for value in region.outputs:
        if value.linked:
            lines += _wrapped(
                f"held by C++ code, so its gradient is computed operation by operation: {_value(value)}",
                "  ",
            )
    for title, steps in (("forward", region.forward), ("backward", region.backward)):
        if steps:
            lines += ["", *_table(title, steps)]
    return lines


def _value(value: Value) -> str:
    where = f" at {value.place.location}" if value.place.location else ""
    return f"{value.op} {_shape(value.shape)} of {value.place.module or '(model)'}{where}"


def _table(title: str, steps: Sequence[PlannedStep]) -> list[str]:
    rows: list[tuple[str, ...]] = [(title, *_COLUMNS[1:])]
    for step in steps:
        name = "(input)" if step.op == "input" else step.module or "(model)"
        name = name if len(name) <= _MODULE else "…" + name[1 - _MODULE :]
        fused = textwrap.wrap(", ".join(step.fused), _FUSED) or [""]
        output = _shape(step.shape), step.dtype, step.layout, _bytes(step.bytes)
        rows.append((name, step.name, fused[0], *output))
        rows += [("", "", more, "", "", "", "") for more in fused[1:]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  "
        + "  ".join(
            cell.rjust(width) if index == len(row) - 1 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "  " + "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]]


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _wrapped(text: str, indent: str, more: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if more is None else more,
        break_long_words=False,
        break_on_hyphens=False,
    )
