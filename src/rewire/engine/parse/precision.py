"""Changes of precision as nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rewire.engine.graph import numbers
from rewire.engine.lazy import LazyTensor
from rewire.engine.parse.base import No, cast, dtype_of, shape_of
from rewire.engine.scope import recording


def _to(input: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``input.to(dtype)``, of a dtype or that of another tensor."""
    if args or kwargs:
        return No
    if isinstance(dtype, Tensor):
        if not dtype.is_cpu:
            return No
        dtype = dtype_of(dtype)
    if type(input) is not LazyTensor or not isinstance(dtype, torch.dtype) or 0 in shape_of(input):
        return No
    given = dtype_of(input)
    if given is dtype:
        return input
    if numbers(given) is not numbers(dtype):
        return No
    region = recording(given)
    return No if region is None else cast(region, input, dtype)


def _fixed(dtype: torch.dtype, input: Any, **kwargs: Any) -> Any:
    return _to(input, dtype, **kwargs)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((Tensor.to, Tensor.type), _to),
    Tensor.type_as: _to,
    Tensor.float: partial(_fixed, torch.float32),
    Tensor.bfloat16: partial(_fixed, torch.bfloat16),
}
