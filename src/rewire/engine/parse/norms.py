"""Batch norms, group norms and instance norms as nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rewire.engine import graph as ir
from rewire.engine.lazy import LazyTensor
from rewire.engine.observe import Why
from rewire.engine.parse.base import No, are_parameters, dtype_of, shape_of
from rewire.engine.scope import recording
from rewire.engine.statistics import LazyBuffer, settled


def _batch_norm(
    input: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if type(input) is not LazyTensor:
        return No
    for tensor in (weight, bias, running_mean, running_var):
        if type(tensor) is LazyBuffer:  # of a batch norm that shares it, or of an earlier call
            settled(tensor)
    shape = shape_of(input)
    if len(shape) not in (2, 4) or 0 in shape:
        return No
    channels, size = shape[1], math.prod(shape) // shape[1]
    track = running_mean is not None
    if (
        track is (running_var is None)
        or (not track and not training)
        or (training and (size == 1 or eps <= 0))
    ):
        return No
    for tensor in (weight, bias, running_mean, running_var):
        if tensor is not None and (tensor.shape != (channels,) or not tensor.is_contiguous()):
            return No
    statistics = () if running_mean is None or running_var is None else (running_mean, running_var)
    updated = statistics if training else ()
    for buffer in updated:
        if not _may_be_lazy(buffer):
            return No
    if updated and running_mean is running_var:
        return No
    dtype = dtype_of(input)
    if not are_parameters(dtype, weight, bias, running_mean, running_var):
        return No
    region = recording(dtype)
    if region is not None and region.reads_any(*statistics):
        # Statistics are read or written once in a region: its parts may run in another order.
        region.run(Why.AGAIN)
        region = recording(dtype)
    if region is None:
        return No
    index = None
    if updated:
        index = len(region.scalars)
        region.scalars.append(momentum)
    attrs = ir.BatchNorm(bool(training), index, eps, bool(updated))
    operands = (input, weight, bias, running_mean, running_var)
    return region.append("batch_norm", attrs, operands, shape, dtype, updated)


def _may_be_lazy(buffer: Tensor) -> bool:
    """Whether nobody could read running statistics past their Python object: no C++ code holds them, as
    the graph of an earlier call does, and no other tensor is a view of them or has them as its view."""
    if type(buffer) is not Tensor or buffer.requires_grad:
        return False
    return not buffer._is_view() and buffer._use_count() == 1  # type: ignore[attr-defined]


def _group_norm(
    input: Any,
    num_groups: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    if type(input) is not LazyTensor or type(num_groups) is not int or num_groups < 1:
        return No
    shape = shape_of(input)
    if len(shape) not in (2, 4) or 0 in shape or shape[1] % num_groups:
        return No
    if math.prod(shape) == num_groups:  # nothing to normalise: torch says so
        return No
    for tensor in (weight, bias):
        if tensor is not None and not _is_vector(tensor, shape[1]):
            return No
    dtype = dtype_of(input)
    region = recording(dtype)
    if region is None or not are_parameters(dtype, weight, bias):
        return No
    attrs = ir.GroupNorm(num_groups, float(eps))
    return region.append("group_norm", attrs, (input, weight, bias), shape, dtype)


def _is_vector(tensor: Any, size: int) -> bool:
    lazy = type(tensor) is LazyTensor
    return not lazy and tensor.shape == (size,) and tensor.is_contiguous()


def _instance_norm(
    input: Any,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """A group norm of single channels, or what a batch norm does in evaluation mode."""
    shape = shape_of(input)
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is not None or running_var is not None:
        return No
    if len(shape) != 4 or math.prod(shape[2:]) == 1:
        return No
    return _group_norm(input, shape[1], weight, bias, eps)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.batch_norm: _batch_norm,
    **dict.fromkeys((F.group_norm, torch.group_norm), _group_norm),
    F.instance_norm: _instance_norm,
}
