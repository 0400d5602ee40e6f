"""Lowering of operations element by element."""

from __future__ import annotations

from rewire.engine import rules
from rewire.engine.graph import Node
from rewire.engine.lowering.base import Lowering, attrs_of, length
from rewire.engine.lowering.norms import store_norm
from rewire.engine.lowering.pointwise import pointwise
from rewire.engine.plan import Buffer, Layout, Role


def add(low: Lowering, index: int, node: Node) -> None:
    total = rules.residual_sum(low.uses, index)
    if total is None or total.norm not in low.norms:
        pointwise(low, index, node)
        return
    if total.tail != index:
        low.done.add(total.tail)
    norm = low.norms.pop(total.norm)._replace(relu=total.tail != index)
    store_norm(low, norm, total.tail, total.residual)


def cast(low: Lowering, index: int, node: Node) -> None:
    """Of what is in memory for the first time, before it is moved to the region's layout; else an operation
    element by element, which others fuse with."""
    (source,) = node.inputs
    assert source is not None
    if source >= 0 or source in low.stored:
        pointwise(low, index, node)
        return
    y = low.new(node.shape, node.dtype, Layout.CONTIGUOUS)
    low.copy(low.outside(Role.INPUT, ~source, source), y, index)
    low.stored[index] = low.relayout(y, low.layout(y.shape), index)

    def backward() -> None:
        dy = low.gradient(index)
        if dy is None or not low.uses.requires_grad(source):
            return
        dy = low.relayout(dy, Layout.CONTIGUOUS, index)
        if len(low.uses.readers(source)) == 1:
            low.copy(dy, low.outside(Role.INPUT_GRAD, ~source, source), index)
        else:
            dx = low.new(dy.shape, low.uses.dtype(source), Layout.CONTIGUOUS)
            low.copy(dy, dx, index)
            low.contribute(source, low.relayout(dx, low.layout(dx.shape), index))

    low.backwards.append(backward)


def dropout(low: Lowering, index: int, node: Node) -> None:
    x, attrs = low.source(node), attrs_of(node)
    sizes = {"length": length(x), "probability": attrs.p, "seed": attrs.seed}

    def drop(given: Buffer) -> Buffer:
        """The noise of an element depends on its place in batch-last memory."""
        y = low.new(node.shape, node.dtype, Layout.BATCH_LAST)
        given = low.relayout(given, Layout.BATCH_LAST, index)
        low.emit("Dropout", index, **sizes, x=given, out_y=y)
        return low.relayout(y, low.layout(node.shape), index)

    def backward() -> None:
        dy = low.gradient(index)
        if dy is not None:
            low.contribute(node.inputs[0], drop(dy))

    low.stored[index] = drop(x)
    low.backwards.append(backward)
