"""What parsing needs: shapes and types of operands, and how a node is recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rewire.engine import graph as ir
from rewire.engine import private
from rewire.engine.aliases import SEVERAL, layouts
from rewire.engine.graph import is_strided, numbers
from rewire.engine.lazy import LazyTensor, strides_of
from rewire.engine.region import Region
from rewire.engine.scope import recording

No = NotImplemented


def shape_of(x: Tensor) -> tuple[int, ...]:
    if type(x) is LazyTensor:
        region = x._region
        if region is not None:
            return region.nodes[x._index][3]  # type: ignore[no-any-return]
        with private.without_functions():
            return tuple(x.shape)
    return tuple(x.shape)


def dtype_of(x: Tensor) -> torch.dtype:
    if type(x) is LazyTensor:
        region = x._region
        if region is not None:
            return region.nodes[x._index][5]  # type: ignore[no-any-return]
        with private.without_functions():
            return x.dtype
    return x.dtype


def is_view(x: Any) -> bool:
    """Whether ``x`` may not lie in memory as its shape says."""
    region = x._region
    return region is None or is_strided(region.nodes, x._index)


def are_parameters(dtype: torch.dtype, *tensors: Tensor | None) -> bool:
    """Whether torch takes parameters and statistics for a norm of values of a type: they are of the same
    type, or all of that of its sums."""
    kinds = {tensor.dtype for tensor in tensors if tensor is not None}
    return len(kinds) < 2 and kinds <= {dtype, numbers(dtype)}


def may_read(dtype: torch.dtype, values: torch.dtype) -> bool:
    """Whether a product of values of a type is recorded with parameters of another: without autocast they
    are of the same type."""
    autocast = torch.is_autocast_enabled("cpu")
    return values is dtype or (autocast and values is numbers(dtype))


def cast(region: Region, x: Any, dtype: torch.dtype) -> Any:
    """``x`` as a value of another type; itself if it is one."""
    if dtype_of(x) is dtype:
        return x
    return region.append("cast", ir.Cast(dtype), (x,), shape_of(x), dtype)


def unary(op: str, attrs: Any, x: Any, shape: tuple[int, ...], in_place: bool = False) -> Any:
    """A node that reads a lazy tensor."""
    if type(x) is not LazyTensor or 0 in shape:
        return No
    dtype = dtype_of(x)
    region = recording(dtype)
    if region is None or (in_place and not may_rename(region, x)):
        return No
    new = region.append(op, attrs, (x,), shape, dtype)
    return region.rename(x, new) if in_place and new is not No else new


def alias(x: Any, kind: str, *arguments: Any) -> Any:
    """The views of a lazy tensor that a function makes, which no kernel reads."""
    if type(x) is not LazyTensor or x._region is None or 0 in shape_of(x):
        return No
    dtype, region = dtype_of(x), recording(dtype_of(x))
    if region is None or x._region is not region:
        return No
    made = layouts(kind, arguments, shape_of(x), strides_of(region, x._index))
    views = tuple(
        region.append("alias", ir.Alias(kind, arguments, part), (x,), view.shape, dtype)
        for part, view in enumerate(made)
    )
    if not views or any(view is No for view in views):
        return No
    return views if kind in SEVERAL else views[0]


def is_alias(x: Any) -> bool:
    """Whether ``x`` is a view that no kernel reads."""
    region = x._region if type(x) is LazyTensor else None
    return region is not None and region.nodes[x._index][0] == "alias"


def may_rename(region: Region, x: LazyTensor) -> bool:
    """Whether the object of ``x`` may become another node, which is what a change in place makes of it."""
    return x._region is region and region.may_rename(x)
