"""Dense grouped convolutions, poolings, means and padding of images as nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from rewire.engine import graph as ir
from rewire.engine.lazy import LazyTensor
from rewire.engine.parse.base import No, cast, dtype_of, may_read, shape_of, unary
from rewire.engine.parse.resampling import pad_with_pixels, resampled
from rewire.engine.scope import recording
from rewire.ops.precision import input_dtype
from rewire.ops.reference import convolution
from rewire.ops.topology import Topology, build


def _max_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    if return_indices or dilation not in (1, (1, 1), [1, 1]):
        return No
    found = _pool(input, kernel_size, stride, padding, bool(ceil_mode))
    if found is None:
        return No
    kernel, step, pad, out, ceil = found
    return unary("max_pool2d", ir.Pool(kernel, step, pad, ceil), input, out)


def _avg_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    if divisor_override is not None:
        return No
    found = _pool(input, kernel_size, stride, padding, bool(ceil_mode))
    if found is None:
        return No
    kernel, step, pad, out, ceil = found
    if ceil and pad != (0, 0):  # windows over the end count some of the padding
        return No
    attrs = ir.AvgPool(kernel, step, pad, bool(count_include_pad) and not ceil, ceil)
    return unary("avg_pool2d", attrs, input, out)


def _pool(x: Any, kernel_size: Any, stride: Any, padding: Any, ceil: bool = False) -> Any:
    """Kernel, stride, padding, the shape that comes out, and whether rounding up made it larger; None if
    torch should see to it."""
    shape = shape_of(x)
    if len(shape) != 4 or 0 in shape:
        return None
    kernel, pad = _pair(kernel_size), _pair(padding)
    step = kernel if stride is None or stride == [] or stride == () else _pair(stride)
    if kernel is None or step is None or pad is None or min(*kernel, *step) < 1 or min(pad) < 0:
        return None
    if kernel[0] * kernel[1] > 255 or 2 * pad[0] > kernel[0] or 2 * pad[1] > kernel[1]:
        return None
    out = tuple((shape[2 + a] + 2 * pad[a] - kernel[a]) // step[a] + 1 for a in (0, 1))
    floor = out
    if ceil:  # one window more where it begins inside
        out = tuple(
            n + (n * step[a] < shape[2 + a] + pad[a] and _left(shape[2 + a], kernel, pad, step, a))
            for a, n in enumerate(out)
        )
    return None if min(out) < 1 else (kernel, step, pad, (*shape[:2], *out), out != floor)


def _left(size: int, kernel: Any, pad: Any, step: Any, a: int) -> bool:
    """Whether windows do not reach the end of an image."""
    return bool((size + 2 * pad[a] - kernel[a]) % step[a])


def _pair(value: Any) -> tuple[int, int] | None:
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) == 1:
        pair *= 2
    return pair if len(pair) == 2 and all(type(n) is int for n in pair) else None


def _adaptive_avg_pool2d(input: Any, output_size: Any) -> Any:
    shape = shape_of(input)
    if len(shape) != 4 or 0 in shape:
        return No
    wanted = output_size if isinstance(output_size, (tuple, list)) else (output_size, output_size)
    if len(wanted) != 2 or not all(n is None or type(n) is int for n in wanted):
        return No
    out = [shape[2 + a] if n is None else n for a, n in enumerate(wanted)]
    if out == [1, 1]:
        return _mean(input, (2, 3), True)
    if min(out) < 1:
        return No
    if shape[2] % out[0] or shape[3] % out[1]:
        return resampled(input, "mean", out)
    return _avg_pool2d(input, (shape[2] // out[0], shape[3] // out[1]))


def _adaptive_max_pool2d(input: Any, output_size: Any, return_indices: bool = False) -> Any:
    """Where the windows are all of one size."""
    shape, out = shape_of(input), _pair(output_size)
    if return_indices or len(shape) != 4 or out is None or min(out) < 1:
        return No
    if shape[2] % out[0] or shape[3] % out[1]:
        return No
    return _max_pool2d(input, (shape[2] // out[0], shape[3] // out[1]))


def _mean(
    input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kw: Any
) -> Any:
    shape = shape_of(input)
    if kw or dtype is not None or len(shape) != 4 or not isinstance(dim, (tuple, list)):
        return No
    if len(dim) != 2 or {d + 4 if d < 0 else d for d in dim} != {2, 3}:
        return No
    out = (*shape[:2], 1, 1) if keepdim else shape[:2]
    return unary("mean", ir.Mean(bool(keepdim)), input, out) if 0 not in shape else No


def _pad(input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    shape = shape_of(input)
    if len(shape) != 4 or not isinstance(pad, (tuple, list)):
        return No
    if mode != "constant" or (not value and any(n < 0 for n in pad)):
        return pad_with_pixels(input, pad, mode)
    if not 0 < len(pad) <= 8 or len(pad) % 2:
        return No
    if not all(type(n) is int and n >= 0 for n in pad):
        return No
    around = [(pad[2 * i], pad[2 * i + 1]) for i in reversed(range(len(pad) // 2))]
    around = [(0, 0)] * (4 - len(around)) + around
    if any(around[0]):
        return No
    out = tuple(size + a + b for size, (a, b) in zip(shape, around, strict=True))
    amounts = tuple(n for pair in around for n in pair)
    return unary("pad", ir.Pad(amounts, 0.0 if value is None else float(value)), input, out)


def _conv2d(
    input: Any,
    weight: Any,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """A dense convolution in small groups: a sparse one that has all connections inside of them."""
    shape = shape_of(input)
    if type(input) is not LazyTensor or type(weight) not in (Parameter, Tensor) or len(shape) != 4:
        return No
    if weight.dim() != 4:
        return No
    out_channels, channels, *kernel = weight.shape
    sizes = [_pair(size) for size in (stride, padding, dilation)]
    if None in sizes or groups < 2 or math.prod(weight.shape[1:]) > _MOST_TAPS:
        return No
    if shape[1] != channels * groups or out_channels % groups or 0 in shape:
        return No
    if bias is not None and (bias.shape != (out_channels,) or bias.dtype is not weight.dtype):
        return No
    dtype = input_dtype(dtype_of(input), "cpu")
    if not may_read(dtype, weight.dtype):
        return No
    conv = convolution((kernel[0], kernel[1]), *sizes)
    out = (shape[0], out_channels, *conv.output_size(shape[2], shape[3]))
    region = recording(dtype)
    if (
        region is None
        or min(out) < 1
        or min(*conv.stride, *conv.dilation) < 1
        or min(conv.padding) < 0
    ):
        return No
    # By tap, then channel, which is how the weight lies if one of them is 1.
    values = (
        weight if channels == 1 or kernel == [1, 1] else weight.permute(0, 2, 3, 1).contiguous()
    )
    x = cast(region, input, dtype)
    if x is No:
        return No
    attrs = ir.Conv(
        conv.kernel, conv.stride, conv.padding, conv.dilation, len(region.topologies), False
    )
    region.topologies.append(inside_groups(shape[1], out_channels, groups, *kernel))
    region.probes.append(None)
    return region.append("conv2d", attrs, (x, values, bias), out, dtype)


_MOST_TAPS = 256  # of an output channel


@lru_cache(maxsize=256)
def inside_groups(channels: int, out_channels: int, groups: int, kh: int, kw: int) -> Topology:
    """All connections of a convolution in groups."""
    inside, taps = channels // groups, kh * kw
    first = torch.arange(groups).repeat_interleave(out_channels // groups) * inside
    tap = torch.arange(taps) * channels
    units = first[:, None, None] + tap[None, :, None] + torch.arange(inside)
    indptr = torch.arange(out_channels + 1) * (taps * inside)
    return build(indptr.int(), units.flatten().int(), channels * taps, taps)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.conv2d: _conv2d,
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), _max_pool2d),
    F.avg_pool2d: _avg_pool2d,
    F.adaptive_avg_pool2d: _adaptive_avg_pool2d,
    F.adaptive_max_pool2d: _adaptive_max_pool2d,
    **dict.fromkeys((torch.mean, Tensor.mean), _mean),
    F.pad: _pad,
}
