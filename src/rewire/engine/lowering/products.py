"""Lowering of sparse products: linear layers and convolutions."""

from __future__ import annotations

from typing import Any

from rewire.engine import rules
from rewire.engine.graph import Node
from rewire.engine.lowering.base import Lowering, Norm, attrs_of, length
from rewire.engine.lowering.norms import norm_gradients, pass_norm
from rewire.engine.lowering.pointwise import relu_gradient
from rewire.engine.plan import Buffer, Layout, Role

# Products


def linear(low: Lowering, index: int, node: Node) -> None:
    if node.shape[0] == 1 or not rules.rows_product(low.uses, index):
        conv2d(low, index, node)
        return
    source, values, bias = node.inputs
    assert source is not None
    x = low.outside(Role.INPUT, ~source, source)
    y = low.outside(Role.OUTPUT, low.graph.outputs.index(index), index)
    layer, weights = _layer(low, node, x, y), low.parameter(values)
    offset = low.parameter(bias)
    low.emit("LinearRows", index, **layer, values=weights, bias=offset, x=x, out_y=y)
    low.stored[index] = y
    low.direct.add(index)
    if node.requires_grad:
        low.backwards.append(lambda: _linear_rows_backward(low, index, layer, x))


def _linear_rows_backward(low: Lowering, index: int, layer: dict[str, Any], x: Buffer) -> None:
    node, (source, values, bias) = low.nodes[index], low.nodes[index].inputs
    assert source is not None
    dy = low.outside(Role.OUTPUT_GRAD, low.graph.outputs.index(index), index)
    dx, alone = None, len(low.uses.readers(source)) == 1
    if low.uses.requires_grad(source):
        dx = low.like(x, Layout.CONTIGUOUS)
        if alone:
            dx = low.outside(Role.INPUT_GRAD, ~source, source)
    if attrs_of(node).probe:
        _show(low, index, x, dy)
    weights, dbias = low.parameter(values), low.parameter_gradient(bias)
    if low.uses.requires_grad(values):
        low.emit(
            "LinearRowsBackward",
            index,
            **layer,
            values=weights,
            x=x,
            dy=dy,
            out_dx=dx,
            out_dvalues=low.parameter_gradient(values),
            out_dbias=dbias,
        )
    else:
        if dx is not None:
            low.emit("LinearRowsInputGradient", index, **layer, values=weights, dy=dy, out_dx=dx)
        if dbias is not None:
            turned = low.relayout(dy, Layout.BATCH_LAST, index)
            low.emit("RowSums", index, **low.channels(turned), x=turned, out_sums=dbias)
    if dx is not None and not alone:
        low.contribute(source, low.relayout(dx, low.layout(dx.shape), index))


def conv2d(low: Lowering, index: int, node: Node) -> None:
    source, values, bias = node.inputs
    assert source is not None
    norm = low.take_norm(source)  # done on the way in
    x = low.value(source) if norm is None else norm.source
    relu = rules.relu_after(low.uses, index)
    y = low.result(index if relu is None else relu)
    mean = variance = None
    if rules.moments_in_product(low.uses, index):
        mean, variance = low.moments[index] = low.vector(y.shape[1]), low.vector(y.shape[1])
    low.emit(
        "ConvForward",
        index,
        norm and norm.label,
        "ReLU" if relu is not None else None,
        "moments" if mean else None,
        **_layer(low, node, x, y),
        values=low.parameter(values),
        bias=low.parameter(bias),
        x=x,
        norm=norm and norm.operands(),
        relu=relu is not None,
        out_y=y,
        out_mean=mean,
        out_variance=variance,
    )
    low.store(index, relu, y)
    if node.requires_grad:
        low.backwards.append(lambda: _conv2d_backward(low, index, x, y, norm, relu))


def _conv2d_backward(
    low: Lowering, index: int, x: Buffer, y: Buffer, norm: Norm | None, relu: int | None
) -> None:
    node, (source, values, bias) = low.nodes[index], low.nodes[index].inputs
    assert source is not None
    needs_x, needs_values = map(low.uses.requires_grad, (source, values))
    probe = attrs_of(node).probe
    gate: Buffer | None = None
    rest: dict[str, Buffer] | None = None
    masked = low.masked.pop(index, None)  # the next product has applied the ReLU's mask
    if index in low.deferred:
        dy, factors = low.deferred.pop(index)
        rest = {"y": y, "factors": factors}
    elif masked is not None:
        dy = masked
    elif (found := low.gradient(index if relu is None else relu)) is not None:
        dy, gate = found, None if relu is None else y
    else:
        return
    if probe or not needs_values:
        dy, gate, rest = _complete(low, dy, gate, rest, index), None, None
    if probe:
        _show(low, index, x, dy)
    dbias = None if masked is not None else low.parameter_gradient(bias)
    layer, weights = _layer(low, node, x, y), low.parameter(values)
    if not needs_values:
        _without_weights(low, index, layer, weights, x, dy, dbias)
        return
    read: dict[str, Any] = {"x": x, "dy": dy, "gate": gate, "deferred": rest}
    written: dict[str, Any] = {
        "out_dvalues": low.parameter_gradient(values),
        "out_dbias": dbias,
    }
    labels: list[str | None] = [
        "batch norm gradient" if rest else None,
        "ReLU mask" if gate else None,
    ]
    if not needs_x:
        low.emit("WeightGradient", index, *labels, **layer, **read, **written)
        return
    dx = low.like(x)
    before: dict[str, Any] | None = None
    dnorm: dict[str, Buffer | None] | None = None
    sums: Buffer | None = None
    stored = low.stored_norms.get(source)
    previous = _masked_product(low, source, index)
    if norm is not None:
        dnorm = norm_gradients(low, norm)
        before = {"norm": norm.operands(), "input": None, "more": None}
        pass_norm(low, norm, dx, dnorm)
        labels.append("gradient of the batch norm before")
    elif stored is not None and stored.reader == index:
        del low.stored_norms[source]
        more, dnorm = low.gradient(source), norm_gradients(low, stored.norm)
        before = {"norm": stored.norm.operands(), "input": stored.norm.source, "more": more}
        low.contribute(stored.residual, dx)
        pass_norm(low, stored.norm, dx, dnorm)
        labels.append("gradient of the residual sum before")
    elif previous is not None:
        sums = low.parameter_gradient(low.nodes[previous].inputs[2]) or low.vector(x.shape[1])
        low.masked[previous] = dx
        labels.append("ReLU mask and bias gradient of the product before")
    else:
        low.contribute(source, dx)
    low.emit(
        "ConvBackward",
        index,
        *labels,
        **layer,
        values=weights,
        **read,
        before=before,
        out_dx=dx,
        **written,
        out_dnorm=dnorm,
        out_relu_sums=sums,
    )


def _without_weights(
    low: Lowering, index: int, layer: Any, weights: Any, x: Buffer, dy: Buffer, dbias: Buffer | None
) -> None:
    """The backward pass of a product whose weights are frozen."""
    if dbias is not None:
        low.emit("RowSums", index, **low.channels(dy), x=dy, out_sums=dbias)
    source = low.nodes[index].inputs[0]
    if low.uses.requires_grad(source):
        dx = low.like(x)
        low.emit("InputGradient", index, **layer, values=weights, dy=dy, out_dx=dx)
        low.contribute(source, dx)


def _masked_product(low: Lowering, source: int, reader: int) -> int | None:
    """The product before whose ReLU's mask ``reader`` applies in its backward pass."""
    previous = low.nodes[source].inputs[0] if low.uses.is_op(source, "relu") else None
    if previous is None or not low.uses.is_op(previous, *rules.PRODUCTS):
        return None
    return previous if rules.relu_gradient_in_reader(low.uses, previous) == reader else None


def _complete(
    low: Lowering, dy: Buffer, gate: Buffer | None, rest: dict[str, Buffer] | None, node: int
) -> Buffer:
    """The gradient of a product's output, with nothing left to do to it."""
    if gate is not None:
        return relu_gradient(low, dy, gate, node)
    if rest is None:
        return dy
    dx = low.like(dy)
    sizes = low.channels(dy)
    low.emit(
        "ResolveDeferred", node, **sizes, g=dy, x=rest["y"], factors=rest["factors"], out_dx=dx
    )
    return dx


def _show(low: Lowering, index: int, *buffers: Buffer) -> None:
    """Show a rewirer the input and the output gradient of a layer, batch-last."""
    first = 2 * sum(map(len, low.probes.values()))
    exports = []
    for k, buffer in enumerate(buffers):
        y = Buffer(buffer.shape, Layout.BATCH_LAST, Role.EXPORT, first + k, buffer.dtype)
        if buffer.layout is y.layout:
            low.emit("Copy", index, length=length(y), x=buffer, out_y=y)
        else:
            low.relayout(buffer, y.layout, index, y)
        exports.append(y)
    low.probes.setdefault(len(low.steps[low.role]), []).append((index, *exports))  # type: ignore[arg-type]


def _layer(low: Lowering, node: Node, x: Buffer, y: Buffer) -> dict[str, Any]:
    """The sizes and connections of a product."""
    if len(x.shape) == 3:  # (N, C, places): each sample is a panel
        batch, n_in, places = x.shape
        sizes = (batch * places, n_in, 1, 1, y.shape[1], 1, 1, 1, 1, 1, 1, 0, 0, 1, 1)
        return {"geometry": (*sizes, places, True, True), "topology": low.connections(node)}
    batch, n_in, *size = x.shape
    _, n_out, *out = y.shape
    attrs = attrs_of(node)
    kernel = (1, 1, 1, 1, 0, 0, 1, 1)
    if node.op == "conv2d":
        kernel = (*attrs.kernel, *attrs.stride, *attrs.padding, *attrs.dilation)
    panels = (x.layout is Layout.PANELS, y.layout is Layout.PANELS)
    sizes = (batch, n_in, *(size or (1, 1)), n_out, *(out or (1, 1)), *kernel)
    geometry = (*sizes, low.panel if any(panels) else 0, *panels)
    return {"geometry": geometry, "topology": low.connections(node)}
