"""The products of a sparse layer in plain PyTorch: what the kernels must compute.

They run on any device and type, need O(units * batch + connections) memory, and are what is used
where there is no compiled kernel.

A layer is a set of connections (o, i) from input unit i to output unit o. Input unit
``(kh * KW + kw) * C_in + c`` of a convolution is tap (kh, kw) of channel c, so that a linear layer is
the convolution with one tap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_CHUNK = 1 << 22  # elements of the largest intermediate


@dataclass(frozen=True, eq=False)  # compared by identity: it is looked up at every call
class Convolution:
    """Sizes of a 2-D convolution."""

    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the output of an image, as torch computes them."""
        return (self._out(height, 0), self._out(width, 1))

    def _out(self, size: int, axis: int) -> int:
        reach = self.dilation[axis] * (self.kernel[axis] - 1)
        return (size + 2 * self.padding[axis] - reach - 1) // self.stride[axis] + 1

    def taps(self, size: tuple[int, int], out: tuple[int, int]) -> Iterator[_Tap]:
        """Each tap with the slices of input and output positions that it connects."""
        for kh in range(self.kernel[0]):
            for kw in range(self.kernel[1]):
                rows = self._reach(kh, 0, size[0], out[0])
                columns = self._reach(kw, 1, size[1], out[1])
                yield _Tap(kh * self.kernel[1] + kw, (rows[0], columns[0]), (rows[1], columns[1]))

    def _reach(self, k: int, axis: int, size: int, out: int) -> tuple[slice, slice]:
        step, shift = self.stride[axis], k * self.dilation[axis] - self.padding[axis]
        first = max(0, -(shift // step))  # ceil(-shift / step)
        last = min(out, (size - 1 - shift) // step + 1)
        if last <= first:
            return slice(0, 0), slice(0, 0)
        begin = first * step + shift
        return slice(begin, begin + (last - first - 1) * step + 1, step), slice(first, last)


@dataclass(frozen=True)
class _Tap:
    index: int
    input: tuple[slice, slice]
    output: tuple[slice, slice]

    def units(self, x: Tensor, where: tuple[slice, slice]) -> Tensor:
        """(channels, samples): the patches of a tensor as seen through this tap."""
        return x[:, :, where[0], where[1]].transpose(0, 1).flatten(1)


LINEAR = Convolution()
"""A linear layer."""


@lru_cache(maxsize=1024)
def convolution(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> Convolution:
    """The one object with these sizes."""
    return Convolution(kernel, stride, padding, dilation)


def rows_of(indptr: Tensor) -> Tensor:
    """The output unit of each connection."""
    counts = indptr.diff().long()
    return torch.repeat_interleave(torch.arange(counts.numel(), device=indptr.device), counts)


def _chunks(count: int, width: int) -> Iterator[slice]:
    size = max(1, _CHUNK // max(1, width))
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))


def _add_products(out: Tensor, to: Tensor, values: Tensor, x: Tensor, source: Tensor) -> None:
    """out[to] += values * x[source], a chunk of connections at a time."""
    for chunk in _chunks(values.numel(), x.shape[1]):
        out.index_add_(0, to[chunk], values[chunk, None] * x[source[chunk]])


def _dots(a: Tensor, rows: Tensor, b: Tensor, columns: Tensor) -> Tensor:
    """<a[rows], b[columns]>, a chunk of connections at a time."""
    parts = [(a[rows[c]] * b[columns[c]]).sum(1) for c in _chunks(rows.numel(), a.shape[1])]
    return torch.cat(parts) if parts else a.new_zeros(0)


def _tap_connections(inputs: Tensor, channels: int, tap: int) -> Tensor:
    return (inputs // channels == tap).nonzero().flatten()


def forward(
    conv: Convolution,
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    outputs: Tensor,
    inputs: Tensor,
    n_out: int,
) -> Tensor:
    """y[n, o] = bias[o] + sum over connections (o, i) of values * x[n, i], at every position."""
    batch, channels, height, width = x.shape
    size = conv.output_size(height, width)
    y = x.new_zeros((batch, n_out, *size))
    for tap in conv.taps((height, width), size):
        mine = _tap_connections(inputs, channels, tap.index)
        patches = tap.units(x, tap.input)
        part = patches.new_zeros((n_out, patches.shape[1]))
        _add_products(part, outputs[mine], values[mine], patches, inputs[mine] % channels)
        target = y[:, :, tap.output[0], tap.output[1]]
        target += part.unflatten(1, (batch, *target.shape[2:])).transpose(0, 1)
    return y if bias is None else y + bias[:, None, None]


def input_gradient(
    conv: Convolution,
    dy: Tensor,
    shape: tuple[int, ...],
    values: Tensor,
    outputs: Tensor,
    inputs: Tensor,
) -> Tensor:
    """dx[n, i] = sum over connections (o, i) of values * dy[n, o]."""
    batch, channels, height, width = shape
    dx = dy.new_zeros(shape)
    for tap in conv.taps((height, width), (dy.shape[2], dy.shape[3])):
        mine = _tap_connections(inputs, channels, tap.index)
        patches = tap.units(dy, tap.output)
        part = patches.new_zeros((channels, patches.shape[1]))
        _add_products(part, inputs[mine] % channels, values[mine], patches, outputs[mine])
        target = dx[:, :, tap.input[0], tap.input[1]]
        target += part.unflatten(1, (batch, *target.shape[2:])).transpose(0, 1)
    return dx


def weight_gradient(
    conv: Convolution, dy: Tensor, x: Tensor, outputs: Tensor, inputs: Tensor
) -> Tensor:
    """g[o, i] = sum over samples and positions of dy[n, o] * x[n, i], at the given coordinates."""
    channels = x.shape[1]
    grad = x.new_zeros(inputs.numel())
    for tap in conv.taps((x.shape[2], x.shape[3]), (dy.shape[2], dy.shape[3])):
        mine = _tap_connections(inputs, channels, tap.index)
        grad[mine] = _dots(
            tap.units(dy, tap.output),
            outputs[mine],
            tap.units(x, tap.input),
            inputs[mine] % channels,
        )
    return grad
