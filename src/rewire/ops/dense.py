"""The gradient of all possible weights of a layer, a block of output units at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rewire.connections import Domain
from rewire.ops import products
from rewire.ops.reference import Convolution

BLOCK = 1 << 20  # elements that a block holds, if a row is not longer


def blocks(n_out: int, width: int) -> Iterator[tuple[int, int]]:
    """The first output unit of each block, and the one after its last; rows have ``width`` columns."""
    rows = max(1, BLOCK // max(1, width))
    for first in range(0, n_out, rows):
        yield first, min(n_out, first + rows)


@torch.no_grad()
def gradient_rows(
    conv: Convolution, dy: Tensor, x: Tensor, first: int, last: int, domain: Domain
) -> Tensor:
    """The weight gradient of output units ``first`` to ``last`` at all columns: (last - first, width)."""
    products.check_gradient(conv, dy, x, dy.shape[1])
    x, dy = products.image(x), products.image(dy)
    rows = x.new_empty((last - first, domain.width))
    with torch.autocast(x.device.type, enabled=False):
        _groups(conv, dy, x, first, last, domain, rows)
    return rows


def _groups(
    conv: Convolution, dy: Tensor, x: Tensor, first: int, last: int, domain: Domain, rows: Tensor
) -> None:
    each = domain.n_out // domain.groups
    for group in range(first // each, -(-last // each)):
        begin, end = max(first, group * each), min(last, (group + 1) * each)
        inputs = x if domain.groups == 1 else _channels_of(group, x, domain, conv)
        _rows(conv, dy[:, begin:end], inputs, rows[begin - first : end - first])


def _rows(conv: Convolution, dy: Tensor, x: Tensor, rows: Tensor) -> None:
    """That of the output units of ``dy`` at all channels of ``x``."""
    channels = x.shape[1]
    for tap in conv.taps((x.shape[2], x.shape[3]), (dy.shape[2], dy.shape[3])):
        columns = slice(tap.index * channels, (tap.index + 1) * channels)
        rows[:, columns] = tap.units(dy, tap.output) @ tap.units(x, tap.input).T


def _channels_of(group: int, x: Tensor, domain: Domain, conv: Convolution) -> Tensor:
    """The channels of a group, of an image that may have the taps of another dimension in its channels."""
    inner = domain.taps // (conv.kernel[0] * conv.kernel[1])
    by_group: Tensor = x.unflatten(1, (inner, domain.groups, -1))[:, :, group]
    return by_group.flatten(1, 2)
