"""Batch-last memory: a tensor (N, C, H, W) that lies in memory as [C][H][W][N].

Logical shapes stay as torch has them; only the strides differ, and pointwise torch operators keep
them. The kernels run their vectors over the batch, so every connection is one broadcast weight times
a contiguous run.

Between our own layers images may also lie in *panels*: the batch is cut into pieces of as many columns
as the kernels work on at once, and each piece lies in memory by itself, [N / panel][H][C][W][panel]. A task
goes down the rows of images, so what it reads and writes is one run. No strides of (N, C, H, W) describe
this, so such an image is a five-dimensional tensor (N / panel, C, H, W, panel), which only our layers get
to see.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rewire.ops import native


@lru_cache(maxsize=4096)
def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a batch-last tensor of the given shape.

    >>> strides((128, 16, 32, 32))
    (1, 131072, 4096, 128)
    """
    batch = max(shape[0], 1)
    step, result = batch, [0] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        result[dim] = step
        step *= max(shape[dim], 1)
    result[0] = 1
    return tuple(result)


def is_batch_last(x: Tensor) -> bool:
    """Whether ``x`` can be read as batch-last as it is."""
    if x.stride() == strides(tuple(x.shape)) or x.numel() == 0:
        return True
    step = x.shape[0]
    if step > 1 and x.stride(0) != 1:
        return False
    for dim in range(x.dim() - 1, 0, -1):
        size = x.shape[dim]
        if size > 1 and x.stride(dim) != step:
            return False
        step *= size
    return True


def prefers_batch_last(x: Tensor) -> bool:
    """Whether ``x`` came from a sparse layer: batch-last, and not just as good row-major."""
    return is_batch_last(x) and not x.is_contiguous()


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An uninitialised batch-last tensor."""
    kernels = native.kernels(like)
    if kernels is None:
        return torch.empty_strided(shape, strides(shape), dtype=like.dtype, device=like.device)
    return native.empty(kernels, shape, strides(shape), like)


def to_batch_last(x: Tensor) -> Tensor:
    """``x`` itself if it is batch-last, else a batch-last copy."""
    if is_batch_last(x):
        return x
    kernels = native.kernels(x)
    if kernels is None or not x.is_contiguous():
        return torch.empty_strided(
            x.shape, strides(tuple(x.shape)), dtype=x.dtype, device=x.device
        ).copy_(x)
    out = native.empty(kernels, tuple(x.shape), strides(tuple(x.shape)), x)
    rows = x.shape[0]
    kernels.transpose(x.data_ptr(), rows, x.numel() // rows, out.data_ptr(), native.threads())
    return out


def to_row_major(x: Tensor) -> Tensor:
    """``x`` itself if it is contiguous, else a contiguous copy."""
    kernels = native.kernels(x)
    if kernels is None or x.is_contiguous() or not is_batch_last(x):
        return x.contiguous()
    out = native.empty(kernels, tuple(x.shape), contiguous_strides(tuple(x.shape)), x)
    batch = x.shape[0]
    kernels.transpose(x.data_ptr(), x.numel() // batch, batch, out.data_ptr(), native.threads())
    return out


def panel_width(kernels: Any) -> int:
    """Columns that the kernels work on at once."""
    return int(kernels.panel())


def panel_shape(shape: tuple[int, ...], like: Tensor) -> tuple[int, ...] | None:
    """The shape of images (N, C, H, W) in panels; None if the batch does not fill two or more."""
    kernels = native.kernels(like)
    if kernels is None or len(shape) != 4:
        return None
    batch, *image = shape
    panel = panel_width(kernels)
    return None if batch % panel or batch <= panel else (batch // panel, *image, panel)


@lru_cache(maxsize=4096)
def panel_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor (N / panel, C, H, W, panel) in panels.

    >>> panel_strides((4, 16, 8, 8, 32))
    (32768, 256, 4096, 32, 1)
    """
    _, channels, height, width, panel = (max(size, 1) for size in shape)
    row = width * panel
    return (channels * height * row, row, channels * row, panel, 1)


def is_panels(x: Tensor) -> bool:
    """Whether what one of our layers has made is in panels."""
    if x.dim() != 5:
        return False
    return x.stride() == panel_strides(x.shape) or x.transpose(1, 2).is_contiguous()


def in_panels(x: Tensor) -> Tensor:
    """A tensor (N / panel, C, H, W, panel) in panels: itself, or a copy."""
    return x if is_panels(x) else x.transpose(1, 2).contiguous().transpose(1, 2)


def image_shape(x: Tensor) -> tuple[int, ...]:
    """(N, C, H, W) of images, in panels or not."""
    if not is_panels(x):
        return tuple(x.shape)
    panels, *image, panel = x.shape
    return (panels * panel, *image)


def panel_rows(x: Tensor) -> int:
    """How many rows of images there are in all panels, in each of which a channel is one run; 1 where there
    are no panels."""
    return x.shape[0] * x.shape[2] if is_panels(x) else 1


def empty_like(kernels: Any, x: Tensor) -> Tensor:
    """An uninitialised tensor in the same memory as ``x``: panels, or batch-last."""
    shape = tuple(x.shape)
    return native.empty(kernels, shape, panel_strides(shape) if is_panels(x) else strides(shape), x)


def is_ready(x: Tensor) -> bool:
    """Whether :func:`ready` gives ``x`` itself."""
    shape = x.shape
    if x.stride() == (panel_strides(shape) if len(shape) == 5 else strides(shape)):
        return True
    return is_panels(x) if len(shape) == 5 else is_batch_last(x)


def ready(x: Tensor) -> Tensor:
    """``x`` as the products read it: what is in panels as it is, all else batch-last."""
    shape = x.shape
    if x.stride() == (panel_strides(shape) if len(shape) == 5 else strides(shape)):
        return x
    return in_panels(x) if len(shape) == 5 else to_batch_last(x)


def lies_as(x: Tensor, other: Tensor) -> bool:
    """Whether images lie in memory as ``other`` does: in panels, or batch-last."""
    if x.dim() != other.dim():
        return False
    return is_panels(x) if is_panels(other) else is_batch_last(x)


def just_as(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one type have the same shape and lie in memory in the same way."""
    return x.dtype == other.dtype and x.shape == other.shape and x.stride() == other.stride()


def as_in(x: Tensor, other: Tensor) -> Tensor:
    """The same images in the memory of ``other``: panels, or batch-last."""
    if lies_as(x, other):
        return x
    if not is_panels(other):
        return from_panels(x) if is_panels(x) and other.dim() == 4 else to_batch_last(x)
    return in_panels(x) if x.dim() == 5 else to_panels(x, other.shape[-1])


def to_panels(x: Tensor, panel: int) -> Tensor:
    """A copy in panels of so many columns each, of images whose batch is a multiple of them."""
    kernels, x = native.kernels(x), to_batch_last(x)
    assert kernels is not None
    batch, *image = x.shape
    shape = (batch // panel, *image, panel)
    out = native.empty(kernels, shape, panel_strides(shape), x)
    kernels.panels(native.images(*shape), True, x.data_ptr(), out.data_ptr(), native.threads())
    return out


def from_panels(x: Tensor) -> Tensor:
    """A batch-last copy of images in panels."""
    kernels, x = native.kernels(x), in_panels(x)
    shape = image_shape(x)
    assert kernels is not None
    out = native.empty(kernels, shape, strides(shape), x)
    kernels.panels(native.images(*x.shape), False, x.data_ptr(), out.data_ptr(), native.threads())
    return out


@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    result, step = [], 1
    for size in reversed(shape):
        result.append(step)
        step *= max(size, 1)
    return tuple(reversed(result))
