"""Lowering of what graphs with channels second have besides: norms over channels, transposed samples."""

from __future__ import annotations

from typing import Any

from rewire.engine import rules
from rewire.engine.graph import Node
from rewire.engine.lowering.base import Lowering, attrs_of, length
from rewire.engine.plan import Buffer, Layout


def channel_norm(low: Lowering, index: int, node: Node) -> None:
    source, weight, bias = node.inputs
    assert source is not None
    x, attrs, cast = low.value(source), attrs_of(node), rules.cast_after(low.uses, index)
    end = index if cast is None else cast
    y = low.new(node.shape, low.nodes[end].dtype)
    columns = length(x) // x.shape[1]
    sizes: dict[str, Any] = {
        "panels": _panels(low, x),
        "channels": x.shape[1],
        "columns": columns // _panels(low, x),
        "eps": attrs.eps,
        "centered": attrs.centered,
    }
    scale = low.vector(columns) if node.requires_grad else None
    mean = low.vector(columns) if node.requires_grad and attrs.centered else None
    low.emit(
        "LayerNormForward",
        index,
        None if cast is None else "cast",
        **sizes,
        weight=low.parameter(weight),
        bias=low.parameter(bias),
        x=x,
        out_y=y,
        out_mean=mean,
        out_scale=scale,
    )
    low.done.add(end)
    low.stored[end] = y

    def backward() -> None:
        dy = low.gradient(end)
        if dy is None:
            return
        dx = low.like(x) if low.uses.requires_grad(source) else None
        low.emit(
            "LayerNormBackward",
            index,
            **sizes,
            weight=low.parameter(weight),
            x=x,
            dy=dy,
            mean=mean,
            scale=scale,
            out_dx=dx,
            out_dweight=low.parameter_gradient(weight),
            out_dbias=low.parameter_gradient(bias),
        )
        low.contribute(source, dx)

    if node.requires_grad:
        low.backwards.append(backward)


def _panels(low: Lowering, x: Buffer) -> int:
    """In how many pieces that have all channels of some columns a tensor lies."""
    if len(x.shape) == 3:
        return x.shape[0]
    if x.layout is not Layout.PANELS:
        return 1
    return x.shape[0] // low.panel * (x.shape[2] if len(x.shape) == 4 else 1)


def turn(low: Lowering, index: int, node: Node) -> None:
    (source,) = node.inputs
    assert source is not None
    rows, shape = attrs_of(node).rows, low.uses.shape(source)
    low.stored[index] = _turned(low, low.contiguous(source, index), node.shape, rows, index)

    def backward() -> None:
        dy = low.gradient(index)
        if dy is not None:
            dy = low.relayout(dy, Layout.CONTIGUOUS, index)
            columns = length(dy) // dy.shape[0] // rows
            low.contribute(source, _turned(low, dy, shape, columns, index))

    low.backwards.append(backward)


def _turned(low: Lowering, x: Buffer, shape: tuple[int, ...], rows: int, node: int) -> Buffer:
    """The transpose of every sample of a contiguous tensor."""
    y, columns = low.new(shape, x.dtype, Layout.CONTIGUOUS), length(x) // x.shape[0] // rows
    sizes = {"matrices": x.shape[0], "rows": rows, "columns": columns}
    low.emit("TransposeEach", node, **sizes, x=x, out_y=y)
    return low.relayout(y, low.layout(shape), node)
