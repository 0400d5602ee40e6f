"""The gradient of all possible weights of a layer, a block of output units at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rewire.ops import products
from rewire.ops.reference import Convolution

BLOCK = 1 << 20  # elements that a block holds, if a row is not longer


def blocks(n_out: int, n_in: int) -> Iterator[tuple[int, int]]:
    """The first output unit of each block, and the one after its last."""
    rows = max(1, BLOCK // max(1, n_in))
    for first in range(0, n_out, rows):
        yield first, min(n_out, first + rows)


@torch.no_grad()
def gradient_rows(conv: Convolution, dy: Tensor, x: Tensor, first: int, last: int) -> Tensor:
    """The weight gradient of output units ``first`` to ``last``, all inputs: (last - first, n_in)."""
    products.check_gradient(conv, dy, x, dy.shape[1])
    x, dy = products.image(x), products.image(dy[:, first:last])
    channels, taps = x.shape[1], conv.kernel[0] * conv.kernel[1]
    rows = x.new_empty((last - first, taps * channels))
    for tap in conv.taps((x.shape[2], x.shape[3]), (dy.shape[2], dy.shape[3])):
        columns = slice(tap.index * channels, (tap.index + 1) * channels)
        rows[:, columns] = tap.units(dy, tap.output) @ tap.units(x, tap.input).T
    return rows
