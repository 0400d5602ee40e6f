"""Pooling and padding of batch-last activations, as :mod:`rewire.ops.channels` does batch norm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rewire.ops import differentiable, layout, native
from rewire.ops.chain import Link
from rewire.ops.channels import apply, kernels_for
from rewire.ops.norms import Norm, relay_of


class _MaxPool(torch.autograd.Function):
    """Of ``x``, or of its batch norm, which then has no output in memory."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: Norm | None,
        sizes: tuple[int, ...],
        out: tuple[int, int],
    ) -> Tensor:
        kernels = native.kernels(x)
        assert kernels is not None
        pool, y = _pool(kernels, x, sizes, out)
        # The tap of each maximum, a byte each, in memory of the tensor's own type.
        words = -(-y.numel() // x.element_size()) if any(ctx.needs_input_grad) else 0
        which = native.empty(kernels, (words,), (1,), x)
        kernels.max_pool(
            *(pool, None if norm is None else norm.kernel(kernels, x)),
            *(x.data_ptr(), y.data_ptr(), which.data_ptr() if which.numel() else 0),
            native.threads(),
        )
        kept = (None, None, None, None, None) if norm is None else (x, *norm[:4])
        ctx.save_for_backward(which, *kept)
        ctx.pool, ctx.shape, ctx.strides = pool, tuple(x.shape), x.stride()
        ctx.options = None if norm is None else norm[4:]
        ctx.sizes, ctx.layout = sizes, (tuple(y.shape), y.stride())
        if norm is not None:
            norm.read()
        return y

    @staticmethod
    def again(
        ctx: Any, saved: Sequence[Any], x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """The output in operations that autograd can differentiate, not in panels."""
        which, _, _, _, *moments = saved
        if ctx.options is not None:
            x = differentiable.batch_norm(x, Norm(weight, bias, *moments, *ctx.options))
        x = differentiable.images(x)
        taps = which.view(torch.uint8).as_strided(*ctx.layout)
        places = _places(differentiable.images(taps).long(), ctx.sizes, x.shape[-1])
        y: Tensor = x.flatten(2).gather(2, places.flatten(2)).view(places.shape)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if torch.is_grad_enabled():
            saved = ctx.saved_tensors
            _, x, weight, bias, *_ = saved
            x = dy.new_zeros(ctx.shape) if x is None else x
            again, needs = partial(_MaxPool.again, ctx, saved), ctx.needs_input_grad[:3]
            found = differentiable.gradients(again, (x, weight, bias), needs, dy)
            return *found, None, None, None
        which, x, *kept = ctx.saved_tensors
        dy = layout.ready(dy)
        kernels = native.kernels(dy)
        assert kernels is not None
        dx = native.empty(kernels, ctx.shape, ctx.strides, dy)
        norm, factors, dweight, dbias = None, None, None, None
        if ctx.options is not None:
            norm = Norm(*kept, *ctx.options)
            factors = norm.factors()
            norm.leave(dx, x, factors)
            dweight, dbias = torch.empty_like(norm.mean), torch.empty_like(norm.mean)
        kernels.max_pool_gradient(
            *(ctx.pool, None if norm is None else norm.kernel(kernels, x)),
            *(native.address(x), dy.data_ptr(), which.data_ptr(), dx.data_ptr()),
            *(native.address(dweight), native.address(dbias), native.address(factors)),
            native.threads(),
        )
        wanted = ctx.needs_input_grad
        return dx, dweight if wanted[1] else None, dbias if wanted[2] else None, None, None, None


def _places(taps: Tensor, sizes: tuple[int, ...], width: int) -> Tensor:
    """Where in a flattened image of this width each maximum is; of (N, C, H, W) their taps."""
    _, wide, *steps, high_pad, wide_pad = sizes
    rows, columns = (torch.arange(n, device=taps.device) for n in taps.shape[2:])
    down = rows[:, None] * steps[0] - high_pad + taps // wide
    return down * width + columns * steps[1] - wide_pad + taps % wide


def _pool(
    kernels: Any, x: Tensor, sizes: tuple[int, ...], out: tuple[int, int]
) -> tuple[Any, Tensor]:
    """The kernel's sizes, and an output in the memory of ``x``."""
    if not layout.is_panels(x):
        batch, *image = x.shape
        shape: tuple[int, ...] = (batch, image[0], *out)
        pool = native.pool(1, batch, *image, *out, *sizes)
        return pool, native.empty(kernels, shape, layout.strides(shape), x)
    panels, *image, panel = x.shape
    shape = (panels, image[0], *out, panel)
    pool = native.pool(panels, panel, *image, *out, *sizes, in_panels=True)
    return pool, native.empty(kernels, shape, layout.panel_strides(shape), x)


class _MeanPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sizes: tuple[int, ...], out: tuple[int, int], count_padding: bool
    ) -> Tensor:
        kernels = native.kernels(x)
        assert kernels is not None
        pool = native.pool(1, *x.shape, *out, *sizes, count_padding=count_padding)
        shape = (*x.shape[:2], *out)
        y = native.empty(kernels, shape, layout.strides(shape), x)
        kernels.mean_pool(pool, x.data_ptr(), y.data_ptr(), native.threads())
        ctx.pool, ctx.shape = pool, tuple(x.shape)
        ctx.sizes, ctx.count_padding = sizes, count_padding
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if torch.is_grad_enabled():
            kernel, stride, padding = ctx.sizes[:2], ctx.sizes[2:4], ctx.sizes[4:]
            options = (kernel, stride, padding, False, ctx.count_padding)
            x = dy.new_zeros(ctx.shape)  # the pooling is linear
            found = differentiable.gradients(lambda x: F.avg_pool2d(x, *options), (x,), (True,), dy)
            return *found, None, None, None
        dy = layout.to_batch_last(dy)
        kernels = native.kernels(dy)
        assert kernels is not None
        dx = native.empty(kernels, ctx.shape, layout.strides(ctx.shape), dy)
        kernels.mean_pool_gradient(ctx.pool, dy.data_ptr(), dx.data_ptr(), native.threads())
        return dx, None, None, None


def _pair(value: Any) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else value
    return int(first), int(second)


def sizes(
    shape: Sequence[int], kernel_size: Any, stride: Any, padding: Any
) -> tuple[tuple[int, ...], tuple[int, int]] | None:
    """(kernel, stride, padding) in a row and the size of the output of images of the given shape; None if
    torch should see to it."""
    kernel, pad = _pair(kernel_size), _pair(padding)
    step = kernel if stride is None or stride == [] or stride == () else _pair(stride)
    fits = min(*kernel, *step) > 0 and kernel[0] * kernel[1] <= 255
    if not fits or min(pad) < 0 or 2 * pad[0] > kernel[0] or 2 * pad[1] > kernel[1]:
        return None
    out = tuple((shape[2 + a] + 2 * pad[a] - kernel[a]) // step[a] + 1 for a in (0, 1))
    if min(out) < 1:
        return None
    return (*kernel, *step, *pad), (out[0], out[1])


def max_pool2d(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, norm: Norm | None = None
) -> Tensor | None:
    """``F.max_pool2d`` of a batch-last tensor or of panels, after ``norm``, or None where torch has to
    do it."""
    if not layout.is_panels(x) and (x.dim() != 4 or kernels_for(x) is None):
        return None
    found = sizes(x.shape, kernel_size, stride, padding)
    affine = (None, None) if norm is None else norm[:2]
    return None if found is None else apply(_MaxPool, x, *affine, norm, *found)


def link(norm: Norm, sizes: tuple[int, ...], out: tuple[int, int]) -> Link:
    """Maximum pooling of a batch norm's input as a part of a chain."""
    return Link(_MaxPool, (norm.weight, norm.bias), (norm, sizes, out))


def avg_pool2d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    count_include_pad: bool = True,
) -> Tensor | None:
    """``F.avg_pool2d`` of a batch-last tensor, or None where torch has to do it."""
    if x.dim() != 4 or kernels_for(x) is None:
        return None
    found = sizes(x.shape, kernel_size, stride, padding)
    return None if found is None else apply(_MeanPool, x, *found, count_include_pad)


def adaptive_avg_pool2d(x: Tensor, output_size: Any) -> Tensor | None:
    """``F.adaptive_avg_pool2d`` of a batch-last tensor whose sides the output divides, or None."""
    if x.dim() != 4:
        return None
    wanted = (
        (output_size, output_size)
        if output_size is None or isinstance(output_size, int)
        else output_size
    )
    out = [x.shape[2 + a] if size is None else int(size) for a, size in enumerate(wanted)]
    if min(out) < 1 or x.shape[2] % out[0] or x.shape[3] % out[1]:
        return None
    return avg_pool2d(x, (x.shape[2] // out[0], x.shape[3] // out[1]))


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, amounts: tuple[tuple[int, int], ...], value: float) -> Tensor:
        shape = tuple(size + sum(amounts[d]) for d, size in enumerate(x.shape))
        out = layout.empty(shape, x)
        for dim, (before, after) in enumerate(amounts):
            out.narrow(dim, 0, before).fill_(value)
            out.narrow(dim, shape[dim] - after, after).fill_(value)
        ctx.inner = tuple(
            slice(before, before + x.shape[d]) for d, (before, _) in enumerate(amounts)
        )
        out[ctx.inner].copy_(x)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy[ctx.inner], None, None


class _Mean(torch.autograd.Function):
    """Of images in panels, over all positions; batch-last (N, C)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        kernels = native.kernels(x)
        assert kernels is not None
        panels, channels, *_, panel = ctx.shape = tuple(x.shape)
        y = layout.empty((panels * panel, channels), x)
        kernels.mean(native.images(*ctx.shape), x.data_ptr(), y.data_ptr(), native.threads())
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if torch.is_grad_enabled():
            _, _, height, width, panel = ctx.shape
            dx = differentiable.panels(dy[:, :, None, None], panel) / (height * width)
            return dx.expand(ctx.shape)
        kernels, dy = native.kernels(dy), layout.to_batch_last(dy)
        assert kernels is not None
        dx = native.empty(kernels, ctx.shape, layout.panel_strides(ctx.shape), dy)
        images = native.images(*ctx.shape)
        kernels.mean_gradient(images, dy.data_ptr(), dx.data_ptr(), native.threads())
        return dx


def mean(x: Tensor) -> Tensor:
    """The mean over all positions of images in panels: (N, C)."""
    result: Tensor = apply(_Mean, layout.in_panels(x))
    return result


class _Thinned(torch.autograd.Function):
    """In panels: every so many rows and columns, between new channels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, steps: tuple[int, int], around: tuple[int, int], value: float
    ) -> Tensor:
        kernels = native.kernels(x)
        assert kernels is not None
        panels, channels, height, width, panel = ctx.shape = tuple(x.shape)
        out = (-(-height // steps[0]), -(-width // steps[1]))
        shape = (panels, channels + sum(around), *out, panel)
        y = native.empty(kernels, shape, layout.panel_strides(shape), x)
        ctx.thinning = native.module().Thinning(*steps, *around)
        ctx.steps, ctx.before = steps, around[0]
        kernels.thin(
            *(native.images(*ctx.shape), ctx.thinning, x.data_ptr(), value, y.data_ptr()),
            native.threads(),
        )
        ctx.below = relay_of(x)  # of the residual sum that this is
        if ctx.below is not None:
            ctx.below.sums += 1
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if torch.is_grad_enabled():
            dx = dy.new_zeros(ctx.shape)
            kept = dy.narrow(1, ctx.before, ctx.shape[1])
            dx[:, :, :: ctx.steps[0], :: ctx.steps[1]] = kept
            return dx, None, None, None
        kernels, dy = native.kernels(dy), layout.in_panels(dy)
        assert kernels is not None
        dx = native.empty(kernels, ctx.shape, layout.panel_strides(ctx.shape), dy)
        kernels.thin_gradient(
            *(native.images(*ctx.shape), ctx.thinning, dy.data_ptr(), dx.data_ptr()),
            native.threads(),
        )
        if ctx.below is not None:
            ctx.below.leave(dx)
        return dx, None, None, None


def thinned(x: Tensor, steps: tuple[int, int], around: tuple[int, int], value: float) -> Tensor:
    """``F.pad(x[:, :, ::a, ::b], (0, 0, 0, 0, before, after), value=value)`` of images in panels."""
    result: Tensor = apply(_Thinned, layout.in_panels(x), steps, around, value)
    return result


def pad(
    x: Tensor, amounts: Any, mode: str = "constant", value: float | None = None
) -> Tensor | None:
    """``F.pad`` with a constant, of a tensor whose batch is innermost, or None."""
    pairs = len(amounts) // 2
    if mode != "constant" or x.dim() != 4 or x.stride(0) != 1 or x.shape[0] < 2:
        return None
    if not pairs or len(amounts) % 2 or pairs > 3 or min(amounts) < 0 or native.kernels(x) is None:
        return None
    by_dim = [(0, 0)] * (4 - pairs)
    by_dim += [(amounts[2 * i], amounts[2 * i + 1]) for i in reversed(range(pairs))]
    return apply(_Pad, x, tuple(by_dim), 0.0 if value is None else value)
