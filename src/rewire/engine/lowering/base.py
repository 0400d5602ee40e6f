"""What lowering works with: buffers, steps, and gradients that readers contribute to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from rewire.engine.graph import Graph, Node, Ref, numbers
from rewire.engine.plan import Buffer, Layout, Plan, Role, Step, place
from rewire.engine.rules import Uses

ROWS = 1024
"""From how many rows (R, C) is worth lying in panels."""
_INDEX_VECTORS = ("indptr", "indices", "slots", "outputs", "order")


class Norm(NamedTuple):
    """A batch norm as kernels take it, and the value it reads."""

    node: int
    source: Buffer
    weight: Buffer | None
    bias: Buffer | None
    mean: Buffer
    variance: Buffer
    training: bool
    eps: float
    relu: bool = False

    def operands(self) -> dict[str, Any]:
        return {
            name: value for name, value in self._asdict().items() if name not in ("node", "source")
        }

    @property
    def label(self) -> str:
        return "batch norm + ReLU" if self.relu else "batch norm"


class StoredNorm(NamedTuple):
    """A batch norm, plus a residual or not, whose output is in memory."""

    norm: Norm
    output: Buffer
    residual: Ref
    tail: int
    reader: int | None  # the convolution that computes its gradient


class Lowering:
    """A graph on its way to a plan.

    Attributes:
        dtype, numbers: of the kernels; the type of sums, statistics and parameters.
        steps: those of the forward pass by ``Role.SAVED``, of the backward pass by ``Role.SCRATCH``.
        role: of new buffers: which pass is being lowered.
        done: nodes that another one's kernel computes.
        stored: values in memory, in the region's layout.
        unstored: of values that are not in memory yet, what brings them there.
        norms: batch norms (and their ReLU) that are not in memory, for readers that compute them.
        backwards: what emits the backward steps, in the order of the forward steps.
        gradients: what readers have contributed to the gradient of a value so far.
        direct: outputs that are written, and whose gradients are read, as torch has them.
    """

    def __init__(
        self, graph: Graph, panel: int, table: Mapping[str, LowerNode], sum_of: SumOf
    ) -> None:
        self.graph, self.nodes, self.uses, self.panel = graph, graph.nodes, Uses(graph), panel
        self.table, self.sum_of = table, sum_of
        self.dtype, self.numbers = graph.dtype, numbers(graph.dtype)
        self.steps: dict[Role, list[Step]] = {Role.SAVED: [], Role.SCRATCH: []}
        self.role = Role.SAVED
        self.done: set[int] = set()
        self.direct: set[int] = set()
        self.stored: dict[int, Buffer] = {}
        self.unstored: dict[int, Callable[[], None]] = {}
        self.norms: dict[int, Norm] = {}
        self.parameters: dict[int, Buffer] = {}  # that are of another type than numbers
        self.moments: dict[int, tuple[Buffer, Buffer]] = {}
        self.backwards: list[Callable[[], None]] = []
        self.gradients: dict[int, list[Buffer]] = {}
        self.deferred: dict[int, tuple[Buffer, Buffer]] = {}  # of a product's output, with factors
        self.masked: dict[int, Buffer] = {}  # of a product's output, past its ReLU
        self.stored_norms: dict[int, StoredNorm] = {}  # whose gradient is yet to be computed
        self.probes: dict[int, list[tuple[int, Buffer, Buffer]]] = {}

    def plan(self) -> Plan:
        for index, node in enumerate(self.nodes):
            if index not in self.done:
                self.table[node.op](self, index, node)
        for j, ref in enumerate(self.graph.outputs):
            if (y := self.value(ref)).role is not Role.OUTPUT:
                self.relayout(y, Layout.CONTIGUOUS, ref, self.outside(Role.OUTPUT, j, ref))
        if any(self.nodes[ref].requires_grad for ref in self.graph.outputs):
            self._differentiate()
        forward, backward = self.steps[Role.SAVED], self.steps[Role.SCRATCH]
        kept = {b for step in backward for b in step.buffers() if b.role is Role.SAVED}
        saved = place(forward, Role.SAVED, kept)
        total = saved + place(backward, Role.SCRATCH, set(), start=saved)
        return Plan(forward, backward, saved, total, self.probes)

    def _differentiate(self) -> None:
        self.role = Role.SCRATCH
        for j, ref in enumerate(self.graph.outputs):
            if ref not in self.direct:
                dy = self.outside(Role.OUTPUT_GRAD, j, ref)
                self.contribute(ref, self.relayout(dy, self.layout(dy.shape), ref))
        for backward in reversed(self.backwards):
            backward()
        for ref in [ref for ref in self.gradients if ref < 0]:
            self._input_gradient(ref, self.gradients.pop(ref))

    # Buffers and steps

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Where a value of this shape lies between the steps of a region."""
        if len(shape) not in (2, 4):
            return Layout.CONTIGUOUS
        least = 2 * self.panel if len(shape) == 4 else ROWS
        fills = shape[0] % self.panel == 0 and shape[0] >= least
        return Layout.PANELS if fills else Layout.BATCH_LAST

    def new(
        self, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout | None = None
    ) -> Buffer:
        return Buffer(shape, layout or self.layout(shape), self.role, dtype=dtype)

    def like(self, x: Buffer, layout: Layout | None = None) -> Buffer:
        """New memory for a value such as ``x``, or its gradient."""
        return self.new(x.shape, x.dtype, layout)

    def vector(self, *shape: int) -> Buffer:
        return self.new(shape, self.numbers, Layout.FLAT)

    def outside(
        self, role: Role, number: int, ref: int, layout: Layout = Layout.CONTIGUOUS
    ) -> Buffer:
        """Memory of a tensor that torch holds, of the shape of a value."""
        return Buffer(self.uses.shape(ref), layout, role, number, self.uses.dtype(ref))

    def emit(self, name: str, node: int, *fused: str | None, **arguments: Any) -> None:
        """Add a step; the names of what it writes start with ``out_``."""
        labels = tuple(label for label in fused if label)
        self.steps[self.role].append(Step(name, node, labels, arguments))

    def relayout(self, x: Buffer, layout: Layout, node: int, to: Buffer | None = None) -> Buffer:
        """The same numbers in another layout."""
        if x.layout is layout and to is None:
            return x
        if x.layout is layout:
            self.copy(x, to, node)  # type: ignore[arg-type]
            return to  # type: ignore[return-value]
        if to is None and x.shape[0] == 1:  # of one sample, the same memory
            return x.seen_as(x.shape, layout)
        y = self.like(x, layout) if to is None else to
        images = self.images(x if y.layout is not Layout.PANELS else y)
        self.emit("Relayout", node, images=images, source=x.layout, target=layout, x=x, out_y=y)
        return y

    def copy(self, x: Buffer, y: Buffer, node: int) -> None:
        """The same numbers in the same layout, of another type perhaps."""
        if x.dtype is y.dtype:
            self.emit("Copy", node, length=length(x), x=x, out_y=y)
        else:
            widen = y.dtype is self.numbers
            self.emit("Convert", node, length=length(x), x=x, out_y=y, widen=widen)

    def result(self, index: int) -> Buffer:
        """Where a step writes the value of a node: of one sample, in the memory of an output, unless there
        is a backward pass, which may read the value."""
        shape, outputs = self.nodes[index].shape, self.graph.outputs
        backward = any(node.requires_grad for node in self.nodes)
        if shape[0] == 1 and index in outputs and not backward:
            return self.outside(Role.OUTPUT, outputs.index(index), index, Layout.BATCH_LAST)
        return self.new(shape, self.nodes[index].dtype)

    def value(self, ref: int) -> Buffer:
        """A value in memory of its own, in the region's layout: computed or moved now if need be."""
        found = self.view(ref)
        if found.window is not None:
            found = self.stored[ref] = self.sum_of(self, [found], ref)
        return found

    def view(self, ref: int) -> Buffer:
        """A value in memory; it may be a part of another one."""
        if ref not in self.stored:
            if ref >= 0:
                self.unstored.pop(ref)()
            else:
                x = self.outside(Role.INPUT, ~ref, ref)
                self.stored[ref] = self.relayout(x, self.layout(x.shape), ref)
        return self.stored[ref]

    def contiguous(self, ref: int, node: int) -> Buffer:
        """A value as torch has it."""
        if ref < 0 and ref not in self.stored:
            return self.outside(Role.INPUT, ~ref, ref)
        return self.relayout(self.value(ref), Layout.CONTIGUOUS, node)

    def parameter(self, ref: Ref) -> Buffer | None:
        """A parameter, or a running statistic, as kernels read it: converted once if it is of half the
        precision."""
        if ref is None:
            return None
        given = self.outside(Role.INPUT, ~ref, ref, Layout.FLAT)
        if given.dtype is self.numbers:
            return given
        if ref not in self.parameters:
            self.parameters[ref] = self.vector(*given.shape)
            self.copy(given, self.parameters[ref], ref)
        return self.parameters[ref]

    def updated(self, ref: Ref) -> None:
        """A running statistic has been written: the tensor that it is gets that, too."""
        if ref in self.parameters:
            assert ref is not None
            self.copy(self.parameters[ref], self.outside(Role.INPUT, ~ref, ref, Layout.FLAT), ref)

    def connections(self, node: Node) -> dict[str, Buffer]:
        """The index vectors of a layer."""
        first = len(_INDEX_VECTORS) * attrs_of(node).topology
        return {
            name: Buffer((), Layout.FLAT, Role.INDEX, first + part, torch.int32)
            for part, name in enumerate(_INDEX_VECTORS)
        }

    # Gradients

    def contribute(self, ref: Ref, gradient: Buffer | None) -> None:
        """One reader's part of the gradient of a value."""
        if ref is not None and gradient is not None and self.uses.requires_grad(ref):
            self.gradients.setdefault(ref, []).append(gradient)

    def gradient(self, ref: int) -> Buffer | None:
        """The gradient of a value, all of whose readers have contributed; None if nothing depends on it."""
        parts = self.gradients.pop(ref, [])
        return self.add_up(parts, ref) if parts else None

    def add_up(self, parts: list[Buffer], node: int) -> Buffer:
        """The sum of gradients of the same value."""
        alone = len(parts) == 1 and parts[0].window is None
        return parts[0] if alone else self.sum_of(self, parts, node)

    def parameter_gradient(self, ref: Ref) -> Buffer | None:
        """Where a step writes the gradient of a parameter: in its own memory if it is the only reader."""
        if ref is None or not self.uses.requires_grad(ref):
            return None
        if len(self.uses.readers(ref)) == 1 and self.uses.dtype(ref) is self.numbers:
            return self.outside(Role.INPUT_GRAD, ~ref, ref, Layout.FLAT)
        part = self.vector(*self.uses.shape(ref))
        self.contribute(ref, part)
        return part

    def _input_gradient(self, ref: int, parts: list[Buffer]) -> None:
        """The gradient of a tensor that several steps, or a step in another layout, have contributed to."""
        if all(part.layout is Layout.FLAT for part in parts):
            out = self.outside(Role.INPUT_GRAD, ~ref, ref, Layout.FLAT)
            self.copy(self.add_up(parts, ref), out, ref)
            return
        out = self.outside(Role.INPUT_GRAD, ~ref, ref)
        if len({part.layout for part in parts}) > 1:  # of a parameter and of a tensor
            shape = self.uses.shape(ref)
            parts = [self.add_up([part], ref) for part in parts]
            parts = [
                part.seen_as(shape, Layout.CONTIGUOUS)
                if part.layout is Layout.FLAT
                else self.relayout(part, Layout.CONTIGUOUS, ref)
                for part in parts
            ]
        total = self.add_up(parts, ref)
        if total.layout is Layout.CONTIGUOUS:
            self.copy(total, out, ref)
        else:
            self.relayout(total, Layout.CONTIGUOUS, ref, out)

    def store(self, index: int, relu: int | None, y: Buffer) -> None:
        """The output of a node is in memory, that of its ReLU if its kernel does that, too."""
        self.stored[index if relu is None else relu] = y
        if relu is not None:
            self.done.add(relu)

    def take_norm(self, ref: int) -> Norm | None:
        """The batch norm of a value that is not in memory: its reader computes it."""
        self.unstored.pop(ref, None)
        return self.norms.pop(ref, None)

    def source(self, node: Node) -> Buffer:
        """What a node with one operand reads, in memory."""
        (ref,) = node.inputs
        assert ref is not None
        return self.value(ref)

    # Sizes

    def channels(self, x: Buffer) -> dict[str, Any]:
        """How channels lie in memory: in so many runs each."""
        if len(x.shape) == 3:
            return {
                "channels": x.shape[1],
                "length": length(x) // x.shape[1],
                "panel_rows": x.shape[0],
            }
        height = x.shape[2] if len(x.shape) == 4 else 1
        rows = x.shape[0] // self.panel * height if x.layout is Layout.PANELS else 1
        return {"channels": x.shape[1], "length": length(x) // x.shape[1], "panel_rows": rows}

    def images(self, x: Buffer) -> tuple[int, ...]:
        """The sizes of images; batch-last, they are one panel."""
        batch, channels, *size = (
            x.shape if len(x.shape) == 4 else (x.shape[0], length(x) // x.shape[0])
        )
        panels = x.layout is Layout.PANELS
        split = (batch // self.panel, self.panel) if panels else (1, batch)
        return (split[0], channels, *(size or (1, 1)), split[1], panels)


LowerNode = Callable[["Lowering", int, Node], None]
"""Emits the steps of one node."""

SumOf = Callable[["Lowering", list[Buffer], int], Buffer]
"""Emits the step that adds up some values of one shape and layout."""


def attrs_of(node: Node) -> Any:
    return node.attrs


def length(buffer: Buffer) -> int:
    return math.prod(buffer.shape)
