"""Sparse layers as nodes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rewire.engine import graph as ir
from rewire.engine.parse import No, dtype_of, shape_of
from rewire.engine.region import Region
from rewire.engine.scope import active, recording
from rewire.ops import products
from rewire.ops.reference import LINEAR, Convolution


def conv2d(layer: Any, x: Any) -> Any:
    """The output of a sparse convolution, if it is recorded; else NotImplemented."""
    if not active():
        return No
    values, bias, topology = layer.parts
    region = recording(values.dtype)
    if region is None or layer._pad_first is not None or not isinstance(x, Tensor):
        return No
    conv: Convolution = layer.sizes
    shape = shape_of(x)
    if len(shape) != 4 or shape[1] != layer.in_channels or dtype_of(x) is not values.dtype:
        return No  # the layer says what is wrong, or converts it
    out = products.output_shape(conv, shape, layer.out_channels)
    if min(out) < 1 or shape[0] < 1:
        return No
    products.check_layer(conv, shape[1], values.dtype, values, bias, topology)
    probe = layer.probe
    at = len(region.topologies)
    attrs = ir.Conv(conv.kernel, conv.stride, conv.padding, conv.dilation, at, probe is not None)
    return _layer(region, "conv2d", attrs, layer, (x, values, bias), out, topology)


def linear(layer: Any, x: Any) -> Any:
    """The same for a linear layer."""
    if not active():
        return No
    values, bias, topology = layer.parts
    region = recording(values.dtype)
    if region is None or not isinstance(x, Tensor):
        return No
    shape = shape_of(x)
    if len(shape) != 2 or shape[1] != layer.in_features or dtype_of(x) is not values.dtype:
        return No
    if 0 in shape or layer.out_features < 1:
        return No
    products.check_layer(LINEAR, shape[1], values.dtype, values, bias, topology)
    attrs = ir.Linear(len(region.topologies), layer.probe is not None)
    out = (shape[0], layer.out_features)
    return _layer(region, "linear", attrs, layer, (x, values, bias), out, topology)


def _layer(
    region: Region, op: str, attrs: Any, layer: Any, operands: Any, out: Any, topology: Any
) -> Any:
    # Before the node: another thread may run the region as soon as it has that.
    region.topologies.append(topology)
    region.probes.append(layer.probe)
    return region.append(op, attrs, operands, out)
