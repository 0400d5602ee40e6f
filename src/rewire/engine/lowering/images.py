"""Lowering of poolings, means, slices and padding of images."""

from __future__ import annotations

from typing import Any

import torch

from rewire.engine import rules
from rewire.engine.graph import Node, numbers
from rewire.engine.lowering.base import Lowering, attrs_of
from rewire.engine.lowering.norms import norm_gradients, pass_norm
from rewire.engine.lowering.shapes import reshaped
from rewire.engine.plan import Buffer, Layout
from rewire.engine.resampling import side, transposed


def unary(
    low: Lowering,
    name: str,
    index: int,
    end: int,
    x: Buffer,
    y: Buffer,
    *labels: str | None,
    **sizes: Any,
) -> None:
    """``y`` from ``x`` by a kernel of this name; its gradient needs nothing else."""
    value = {"value": sizes.pop("value")} if "value" in sizes else {}
    low.emit(name, index, *labels, **sizes, **value, x=x, out_y=y)
    low.stored[end] = y

    def backward() -> None:
        dy = low.gradient(end)
        if dy is not None:
            dx = low.like(x)
            low.emit(name + "Backward", index, *labels, **sizes, dy=dy, out_dx=dx)
            low.contribute(low.nodes[index].inputs[0], dx)

    low.backwards.append(backward)


def max_pool2d(low: Lowering, index: int, node: Node) -> None:
    source = node.inputs[0]
    assert source is not None
    norm = low.take_norm(source)  # done on the way in
    x = low.value(source) if norm is None else norm.source
    y, pool, operands = (
        low.new(node.shape, node.dtype),
        _pool_sizes(low, node, x),
        norm and norm.operands(),
    )
    which = low.new(node.shape, torch.uint8, Layout.FLAT) if node.requires_grad else None
    low.emit(
        "MaxPool",
        index,
        norm and norm.label,
        pool=pool,
        norm=operands,
        x=x,
        out_y=y,
        out_which=which,
    )
    low.stored[index] = y

    def backward() -> None:
        dy = low.gradient(index)
        if dy is None:
            return
        dx, dnorm = low.like(x), norm and norm_gradients(low, norm)
        low.emit(
            "MaxPoolBackward",
            index,
            norm and "gradient of the batch norm before",
            pool=pool,
            norm=operands,
            x=norm and x,
            dy=dy,
            which=which,
            out_dx=dx,
            out_dnorm=dnorm,
        )
        if norm is None or dnorm is None:
            low.contribute(source, dx)
        else:
            pass_norm(low, norm, dx, dnorm)

    low.backwards.append(backward)


def avg_pool2d(low: Lowering, index: int, node: Node) -> None:
    x = low.source(node)
    pool = _pool_sizes(low, node, x, attrs_of(node).count_include_pad)
    unary(low, "AvgPool", index, index, x, low.new(node.shape, node.dtype), pool=pool)


def mean(low: Lowering, index: int, node: Node) -> None:
    x = low.source(node)
    means = low.new(x.shape[:2], x.dtype, Layout.BATCH_LAST)
    low.emit("GlobalMean", index, images=low.images(x), x=x, out_y=means)
    low.stored[index] = reshaped(low, means, node.shape, index)

    def backward() -> None:
        dy = low.gradient(index)
        if dy is not None:
            dy = low.relayout(reshaped(low, dy, means.shape, index), Layout.BATCH_LAST, index)
            dx = low.like(x)
            low.emit("GlobalMeanBackward", index, images=low.images(x), dy=dy, out_dx=dx)
            low.contribute(node.inputs[0], dx)

    low.backwards.append(backward)


def resample(low: Lowering, index: int, node: Node) -> None:
    x, attrs, kind = low.source(node), attrs_of(node), numbers(node.dtype)
    _, _, *size = x.shape
    down, across = (side(attrs, rows, n, kind) for rows, n in zip((True, False), size, strict=True))
    y = low.stored[index] = low.new(node.shape, node.dtype)
    low.emit("Resample", index, images=low.images(x), down=down, across=across, x=x, out_y=y)

    def backward() -> None:
        dy = low.gradient(index)
        if dy is not None:
            dx, back = low.like(x), (transposed(down, size[0]), transposed(across, size[1]))
            sizes = {"images": low.images(dy), "down": back[0], "across": back[1]}
            low.emit("Resample", index, "gradient", **sizes, x=dy, out_y=dx)
            low.contribute(node.inputs[0], dx)

    low.backwards.append(backward)


def slice_(low: Lowering, index: int, node: Node) -> None:
    x, attrs, pad = low.source(node), attrs_of(node), rules.pad_after_slice(low.uses, index)
    around, value, end = (0, 0), 0.0, index
    if pad is not None:
        around, value, end = (
            attrs_of(low.nodes[pad]).amounts[2:4],
            attrs_of(low.nodes[pad]).value,
            pad,
        )
        low.done.add(pad)
    y, label = low.new(low.nodes[end].shape, node.dtype), None if pad is None else "pad"
    sizes = {
        "images": low.images(x),
        "slicing": (attrs.down, attrs.across, *around),
        "value": value,
    }
    unary(low, "Slice", index, end, x, y, label, **sizes)


def pad(low: Lowering, index: int, node: Node) -> None:
    x, y, attrs = low.source(node), low.new(node.shape, node.dtype), attrs_of(node)
    sizes = {"images": low.images(x), "padding": attrs.amounts[2:], "value": attrs.value}
    unary(low, "Pad", index, index, x, y, **sizes)


def _pool_sizes(
    low: Lowering, node: Node, x: Buffer, count_padding: bool = True
) -> tuple[int, ...]:
    attrs, (batch, *image) = attrs_of(node), x.shape
    panels = x.layout is Layout.PANELS
    split = (batch // low.panel, low.panel) if panels else (1, batch)
    sizes = (*attrs.kernel, *attrs.stride, *attrs.padding)
    return (*split, *image, *node.shape[2:], *sizes, count_padding, panels)
