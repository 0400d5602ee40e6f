"""Norms over the last dimension, and permutations, as nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rewire.engine import graph as ir
from rewire.engine.graph import numbers
from rewire.engine.lazy import LazyTensor
from rewire.engine.parse.base import No, alias, are_parameters, dtype_of, is_alias, shape_of, unary
from rewire.engine.scope import recording

CHANNELS_LAST = (0, 2, 3, 1)
"""Permutations that are recorded: of (N, C, H, W) to (N, H, W, C), back, and of the last two of three."""
CHANNELS_SECOND = (0, 3, 1, 2)
SWAPPED = (0, 2, 1)
SHUFFLED = (0, 2, 1, 3, 4)
"""Of channels in groups, (N, groups, C, H, W)."""


def _layer_norm(
    input: Any,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    return _norm(input, normalized_shape, weight, bias, ir.LayerNorm(float(eps), True))


def _rms_norm(
    input: Any, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if eps is None:
        eps = torch.finfo(numbers(dtype_of(input))).eps
    return _norm(input, normalized_shape, weight, None, ir.LayerNorm(float(eps), False))


def _norm(
    x: Any, normalized: Any, weight: Tensor | None, bias: Tensor | None, attrs: ir.LayerNorm
) -> Any:
    if not isinstance(x, Tensor) or type(normalized) not in (tuple, list, torch.Size):
        return No
    shape = shape_of(x)
    if len(shape) < 2 or 0 in shape or tuple(normalized) != shape[-1:]:
        return No
    for tensor in (weight, bias):
        if tensor is not None and (tensor.shape != shape[-1:] or not tensor.is_contiguous()):
            return No
    dtype = dtype_of(x)
    region = recording(dtype)
    if region is None or not are_parameters(dtype, weight, bias):
        return No
    return region.append("layer_norm", attrs, (x, weight, bias), shape, dtype)


def _permute(input: Any, *dims: Any) -> Any:
    wanted = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    shape = shape_of(input)
    if len(wanted) != len(shape) or not all(type(dim) is int for dim in wanted):
        return No
    order = tuple(dim + len(shape) if dim < 0 else dim for dim in wanted)
    if order not in (CHANNELS_LAST, CHANNELS_SECOND, SWAPPED, SHUFFLED) or is_alias(input):
        return alias(input, "permute", *order)
    if order == SHUFFLED and not _are_groups(input):
        return alias(input, "permute", *order)
    if _viewed(input):
        return No
    return unary("permute", ir.Permute(order), input, tuple(shape[dim] for dim in order))


def _viewed(x: Any) -> bool:
    """Whether ``x`` is a view of a view: what permutes a permuted value back is recorded nevertheless."""
    region = x._region if type(x) is LazyTensor else None
    return region is None or region.nodes[x._index][0] == "slice"


def _are_groups(x: Any) -> bool:
    """Whether ``x`` is images (N, C, H, W) with their channels in groups."""
    if type(x) is not LazyTensor or x._region is None:
        return False
    nodes = x._region.nodes
    op, _, (source, *_), shape, *_ = nodes[x._index]
    if op != "view" or source < 0:
        return False
    given = nodes[source][3]
    return len(given) == 4 and given[0] == shape[0] and given[2:] == shape[3:]


def _transpose(input: Any, dim0: Any, dim1: Any) -> Any:
    dims = len(shape_of(input))
    if any(type(dim) is not int or not -dims <= dim < dims for dim in (dim0, dim1)):
        return No
    order = list(range(dims))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(input, order)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.layer_norm, torch.layer_norm), _layer_norm),
    **dict.fromkeys((F.rms_norm, torch.rms_norm), _rms_norm),
    **dict.fromkeys((torch.permute, Tensor.permute), _permute),
    **dict.fromkeys((torch.transpose, Tensor.transpose), _transpose),
    **dict.fromkeys((torch.swapaxes, Tensor.swapaxes, Tensor.swapdims), _transpose),
}
