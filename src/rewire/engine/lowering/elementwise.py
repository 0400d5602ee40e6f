"""Lowering of operations element by element."""

from __future__ import annotations

from rewire.engine import rules
from rewire.engine.graph import Node
from rewire.engine.lowering.base import Lowering, attrs_of, length
from rewire.engine.lowering.norms import store_norm
from rewire.engine.lowering.pointwise import pointwise
from rewire.engine.plan import Buffer, Layout


def add(low: Lowering, index: int, node: Node) -> None:
    total = rules.residual_sum(low.uses, index)
    if total is None or total.norm not in low.norms:
        pointwise(low, index, node)
        return
    if total.tail != index:
        low.done.add(total.tail)
    norm = low.norms.pop(total.norm)._replace(relu=total.tail != index)
    store_norm(low, norm, total.tail, total.residual)


def dropout(low: Lowering, index: int, node: Node) -> None:
    x, attrs = low.source(node), attrs_of(node)
    sizes = {"length": length(x), "probability": attrs.p, "seed": attrs.seed}

    def drop(given: Buffer) -> Buffer:
        """The noise of an element depends on its place in batch-last memory."""
        y = low.new(node.shape, Layout.BATCH_LAST)
        given = low.relayout(given, Layout.BATCH_LAST, index)
        low.emit("Dropout", index, **sizes, x=given, out_y=y)
        return low.relayout(y, low.layout(node.shape), index)

    def backward() -> None:
        dy = low.gradient(index)
        if dy is not None:
            low.contribute(node.inputs[0], drop(dy))

    low.stored[index] = drop(x)
    low.backwards.append(backward)
