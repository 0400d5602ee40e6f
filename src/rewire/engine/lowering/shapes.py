"""Lowering of views, slices of channels and concatenation."""

from __future__ import annotations

from typing import Any

from rewire.engine.graph import Node
from rewire.engine.lowering.base import Lowering, attrs_of, length
from rewire.engine.lowering.pointwise import copy
from rewire.engine.plan import Buffer, Layout, Role


def view(low: Lowering, index: int, node: Node) -> None:
    (source,) = node.inputs
    assert source is not None
    shape, outputs = low.uses.shape(source), low.graph.outputs
    if source < 0 and source not in low.stored:
        x = low.outside(Role.INPUT, ~source, source)  # it is contiguous, and may stay so
    else:
        x = low.value(source)
    if index in outputs and not low.uses.readers(index):
        y = low.outside(Role.OUTPUT, outputs.index(index), index)
        low.relayout(x, Layout.CONTIGUOUS, index, y.seen_as(x.shape))
        low.stored[index] = y
    else:
        low.stored[index] = reshaped(low, x, node.shape, index)

    def backward() -> None:
        dy = low.gradient(index)
        if dy is None:
            return
        if source < 0 and low.uses.requires_grad(source) and len(low.uses.readers(source)) == 1:
            dx = low.outside(Role.INPUT_GRAD, ~source, source)
            low.relayout(dy, Layout.CONTIGUOUS, index, dx.seen_as(dy.shape))
        else:
            low.contribute(source, reshaped(low, dy, shape, index))

    low.backwards.append(backward)


def reshaped(low: Lowering, x: Buffer, shape: tuple[int, ...], node: int) -> Buffer:
    """A value as another shape: of the same batch, that is the same batch-last memory."""
    images = len(shape) in (2, 4) and len(x.shape) in (2, 4)
    same = images and shape[0] == x.shape[0] and x.layout is not Layout.CONTIGUOUS
    memory = Layout.BATCH_LAST if same else Layout.CONTIGUOUS
    return low.relayout(low.relayout(x, memory, node).seen_as(shape), low.layout(shape), node)


def cat(low: Lowering, index: int, node: Node) -> None:
    y = low.stored[index] = low.new(node.shape, node.dtype)
    ranges, first = [], 0
    for ref in node.inputs:
        assert ref is not None
        last = first + low.uses.shape(ref)[1]
        ranges.append((ref, first, last))
        copy(low, low.view(ref), y.channels(first, last), index)
        first = last

    def backward() -> None:
        dy = low.gradient(index)
        if dy is not None:
            for ref, first, last in ranges:
                low.contribute(ref, dy.channels(first, last))

    low.backwards.append(backward)


def narrow(low: Lowering, index: int, node: Node) -> None:
    (source,) = node.inputs
    assert source is not None
    attrs = attrs_of(node)
    low.stored[index] = low.value(source).channels(attrs.first, attrs.last)

    def backward() -> None:
        dy = low.gradient(index)
        if dy is not None:
            dx = low.new(low.uses.shape(source), node.dtype)
            low.emit("Fill", index, length=length(dx), value=0.0, out_y=dx)
            copy(low, dy, dx.channels(attrs.first, attrs.last), index)
            low.contribute(source, dx)

    low.backwards.append(backward)


def shuffle(low: Lowering, index: int, node: Node) -> None:
    groups, channels = attrs_of(node).groups, node.shape[1]
    low.stored[index] = _shuffled(low, low.source(node), groups, index)

    def backward() -> None:
        dy = low.gradient(index)
        if dy is not None:
            low.contribute(node.inputs[0], _shuffled(low, dy, channels // groups, index))

    low.backwards.append(backward)


def _shuffled(low: Lowering, x: Buffer, groups: int, node: int) -> Buffer:
    """The first channels of all groups, then the second ones: a copy of runs in another order."""
    y, (panels, channels, height, width, panel, in_panels) = low.like(x), low.images(x)
    rows, run = (panels * height, width * panel) if in_panels else (1, height * width * panel)
    each = channels // groups
    low.emit(
        "Pointwise",
        node,
        loops=(rows, groups, each, 1, run),
        channel=0,
        panel_rows=1,
        reads=[_runs(x, channels * run, each * run, run)],
        norms=[],
        program=[{"op": "affine", "out": 1, "a": 0, "p": 1.0}],
        out_writes=[{"slot": 1, **_runs(y, channels * run, run, groups * run)}],
        out_sums=[],
        norm_sums=[],
    )
    return y


def _runs(x: Buffer, *strides: int) -> dict[str, Any]:
    return {"operand": x, "strides": (*strides, 0, 1), "offset": 0}
