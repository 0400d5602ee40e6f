"""Batch-last memory: a tensor (N, C, H, W) that lies in memory as [C][H][W][N].

The kernels run their vectors over the batch, so every connection is one broadcast weight times a
contiguous run. Logical shapes stay as torch has them; only the strides differ. Layers take and give
contiguous tensors; what a rewirer sees of them is batch-last.
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


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An uninitialised batch-last tensor."""
    kernels = native.kernels(like)
    if kernels is None:
        return torch.empty_strided(shape, strides(shape), dtype=like.dtype, device=like.device)
    return native.empty(shape, strides(shape), like.dtype)


def to_batch_last(x: Tensor) -> Tensor:
    """``x`` itself if it is batch-last, else a batch-last copy."""
    if is_batch_last(x):
        return x
    kernels, out = native.kernels(x), empty(tuple(x.shape), x)
    if kernels is None or not x.is_contiguous():
        return out.copy_(x)
    module, batch = native.module(), x.shape[0]
    images = module.Images(1, x.numel() // batch, 1, 1, batch)
    layouts = {"source": module.Layout.contiguous, "target": module.Layout.batch_last}
    native.run_step(kernels, module.Relayout(images=images, **layouts, x=0, y=1), (x, out))
    return out


def panel_width(kernels: Any) -> int:
    """Columns that the kernels work on at once."""
    return int(kernels.panel())


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
