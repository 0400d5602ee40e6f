"""Resizing of images, padding with what is in them, and adaptive means as nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from rewire.engine import graph as ir
from rewire.engine.graph import numbers
from rewire.engine.lazy import LazyTensor
from rewire.engine.parse.base import No, cast, dtype_of, shape_of, unary
from rewire.engine.resampling import side
from rewire.engine.scope import recording

_IN_FLOAT32 = ("reflect", "replicate")  # paddings that autocast does so


def resampled(
    x: Any, kind: str, sides: Sequence[Any], mode: str = "", align_corners: bool | None = None
) -> Any:
    """The node of images of another size."""
    attrs, shape = ir.Resample(kind, sides[0], sides[1], mode, align_corners), shape_of(x)
    if type(x) is not LazyTensor or len(shape) != 4 or 0 in shape:
        return No
    dtype = dtype_of(x)
    if dtype is torch.bfloat16 and attrs.mode in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
        region = recording(dtype)
        x = No if region is None else cast(region, x, torch.float32)
        if x is No:
            return No
    try:
        down = side(attrs, True, shape[2], numbers(dtype)).size
        across = side(attrs, False, shape[3], numbers(dtype)).size
    except (RuntimeError, TypeError, ValueError):
        return No  # torch says so at the user's line
    return unary("resample", attrs, x, (*shape[:2], down, across))


def _interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    shape = shape_of(input)
    if (
        antialias
        or len(shape) != 4
        or (size is None) is (scale_factor is None)
        or not isinstance(mode, str)
    ):
        return No
    given = size if scale_factor is None else scale_factor
    pair = tuple(given) if isinstance(given, (tuple, list)) else (given, given)
    kinds = (int,) if scale_factor is None else (int, float)
    if len(pair) != 2 or any(type(n) not in kinds or not 0 < n < math.inf for n in pair):
        return No
    if recompute_scale_factor and scale_factor is not None:
        pair = tuple(math.floor(float(n) * by) for n, by in zip(shape[2:], pair, strict=True))
    by_size = scale_factor is None or bool(recompute_scale_factor)
    if mode == "area":
        if not by_size:
            pair = tuple(math.floor(n * by) for n, by in zip(shape[2:], pair, strict=True))
        return resampled(input, "mean", pair) if align_corners is None else No
    kind = "size" if by_size else "scale"
    return resampled(input, kind, pair, mode, align_corners)


def _upsample(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: Any = None,
) -> Any:
    return _interpolate(input, size, scale_factor, mode, align_corners)


def pad_with_pixels(input: Any, pad: Any, mode: str) -> Any:
    """Padding of images with what is in them, and with zeros where it may be negative."""
    if len(pad) not in (2, 4) or not all(type(n) is int for n in pad):
        return No
    around = (*pad, 0, 0)
    return resampled(input, "pad", (around[2:4], around[:2]), mode)


FUNCTIONS: dict[Any, Callable[..., Any]] = {F.interpolate: _interpolate, F.upsample: _upsample}
