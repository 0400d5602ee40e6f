"""Sparse layers as nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rewire.engine import graph as ir
from rewire.engine import observe
from rewire.engine.parse.base import No, cast, dtype_of, may_read, shape_of
from rewire.engine.region import Region
from rewire.engine.scope import active, recording
from rewire.ops import products
from rewire.ops.precision import input_dtype
from rewire.ops.reference import LINEAR, Convolution
from rewire.ops.topology import Topology


def conv2d(layer: Any, x: Any) -> Any:
    """The output of a sparse convolution, if it is recorded; else NotImplemented."""
    begun = _begun(layer, x)
    if begun is None:
        return No
    region, x, values, bias, topology = begun
    if layer._pad_first is not None:
        return _alone(layer, x, "its padding is not the same zeros on both sides")
    conv: Convolution = layer.sizes
    shape = shape_of(x)
    if len(shape) != 4 or shape[1] != layer.in_channels:
        return _alone(layer, x, "its input is not of shape (N, C, H, W)")  # it says what is wrong
    out = products.output_shape(conv, shape, layer.out_channels)
    if min(out) < 1 or shape[0] < 1:
        return _alone(layer, x, "its output is empty")
    topology = products.check_layer(conv, shape[1], dtype_of(x), values, bias, topology)
    sizes = (conv.kernel, conv.stride, conv.padding, conv.dilation)
    attrs = ir.Conv(*sizes, len(region.topologies), layer.probe is not None)
    return _layer(region, "conv2d", attrs, layer, (x, values, bias), out, topology)


def linear(layer: Any, x: Any) -> Any:
    """The same for a linear layer."""
    begun = _begun(layer, x)
    if begun is None:
        return No
    region, x, values, bias, topology = begun
    shape = shape_of(x)
    if len(shape) < 2 or shape[-1] != layer.in_features:
        return _alone(layer, x, "its input is not of shape (..., features)")
    if 0 in shape or layer.out_features < 1:
        return _alone(layer, x, "its output is empty")
    topology = products.check_layer(LINEAR, shape[-1], dtype_of(x), values, bias, topology)
    attrs = ir.Linear(len(region.topologies), layer.probe is not None)
    out = (*shape[:-1], layer.out_features)
    return _layer(region, "linear", attrs, layer, (x, values, bias), out, topology)


def by_itself(layer: Any, x: Any) -> None:
    """Tell who wants to know that a layer of a kind that is not recorded computes its output."""
    _alone(layer, x, f"a {type(layer).__name__} is not recorded")


def _begun(layer: Any, x: Any) -> tuple[Region, Any, Tensor, Tensor | None, Topology] | None:
    """The region to record a layer into, its input as autocast makes it, its values, bias and connections;
    None if the layer computes its output itself."""
    if torch.compiler.is_compiling():
        return None
    if active() and isinstance(x, Tensor):
        if _single(x):
            _alone(layer, x, "one sample takes less time than recording it")
            return None
        values, bias, topology = layer.parts
        dtype = input_dtype(dtype_of(x), "cpu")
        region = recording(dtype) if may_read(dtype, values.dtype) else None
        if region is not None and (read := cast(region, x, dtype)) is not No:
            return region, read, values, bias, topology
    _alone(layer, x)
    return None


def _single(x: Tensor) -> bool:
    """Whether an input is one sample of which no gradient is recorded."""
    return type(x) is Tensor and x.dim() > 0 and x.shape[0] == 1 and not torch.is_grad_enabled()


def _layer(
    region: Region, op: str, attrs: Any, layer: Any, operands: Any, out: Any, topology: Any
) -> Any:
    # Before the node: another thread may run the region as soon as it has that.
    region.topologies.append(topology)
    region.probes.append(layer.probe)
    lazy = region.append(op, attrs, operands, out, dtype_of(operands[0]))
    return _alone(layer, operands[0]) if lazy is No else lazy


def _alone(layer: Any, x: Any, why: str | None = None) -> Any:
    """NotImplemented: the layer computes its output itself, now."""
    if observe.observer is not None:
        observe.observer.alone(layer, x, why)
    return No
