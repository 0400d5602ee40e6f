"""What parsing needs: shapes and types of operands, and how a node is recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rewire.engine import private
from rewire.engine.graph import STRIDED
from rewire.engine.lazy import LazyTensor
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
            return region.dtype  # type: ignore[no-any-return]
        with private.without_functions():
            return x.dtype
    return x.dtype


def is_view(x: Any) -> bool:
    """Whether ``x`` may not lie in memory as its shape says."""
    region = x._region
    return region is None or region.nodes[x._index][0] in STRIDED


def unary(op: str, attrs: Any, x: Any, shape: tuple[int, ...], in_place: bool = False) -> Any:
    """A node that reads a lazy tensor."""
    if type(x) is not LazyTensor or 0 in shape:
        return No
    region = recording(dtype_of(x))
    if region is None:
        return No
    if not in_place:
        return region.append(op, attrs, (x,), shape)
    return changed_in_place(region, op, attrs, x, (x,), shape)


def changed_in_place(
    region: Region, op: str, attrs: Any, x: LazyTensor, operands: Any, shape: tuple[int, ...]
) -> Any:
    if x._region is not region or not region.may_rename(x):
        return No
    new = region.append(op, attrs, operands, shape)
    return No if new is No else region.rename(x, new)
