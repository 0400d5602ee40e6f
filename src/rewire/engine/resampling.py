"""Resizing and padding of images as sums: which pixels along a side each pixel of the output is made of.

The weights are read off what torch makes of a side whose pixels are the unit vectors, so they are right
where torch rounds coordinates, too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rewire.engine import graph as ir


class Side(NamedTuple):
    """Pixels along one side of the output: pixel i has the entries ``ptr[i]`` to ``ptr[i + 1]``."""

    ptr: tuple[int, ...]
    pixels: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def size(self) -> int:
        return len(self.ptr) - 1


_ALONE = {"size": 1, "scale": 1.0, "pad": (0, 0), "mean": 1}
"""What leaves a side of one pixel as it is."""


def resample(a: ir.Resample, x: Tensor) -> Tensor:
    """What ``resample`` means."""
    if a.kind == "mean":
        return F.adaptive_avg_pool2d(x, (a.down, a.across))
    if a.kind == "pad":
        return F.pad(x, (*a.across, *a.down), a.mode)
    size, scale = ((a.down, a.across), None) if a.kind == "size" else (None, (a.down, a.across))
    return F.interpolate(x, size, scale, a.mode, a.align_corners)


@lru_cache(maxsize=512)
def side(a: ir.Resample, rows: bool, size: int, dtype: torch.dtype) -> Side:
    """What the pixels along a side of so many are made of, in numbers of this type.

    Raises whatever torch does where it refuses the arguments.
    """
    alone = _ALONE[a.kind]
    one = a._replace(across=alone) if rows else a._replace(down=alone)
    units = torch.eye(size, dtype=dtype, device="cpu").view(
        size, 1, *((size, 1) if rows else (1, size))
    )
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        matrix = resample(one, units).flatten(1).t()  # (output, input)
    places = matrix.nonzero()
    counts = torch.bincount(places[:, 0], minlength=matrix.shape[0])
    ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    weights = matrix[places[:, 0], places[:, 1]]
    return Side(tuple(ptr.tolist()), tuple(places[:, 1].tolist()), tuple(weights.tolist()))


@lru_cache(maxsize=512)
def transposed(given: Side, size: int) -> Side:
    """What the gradient of each of so many pixels is made of."""
    found: list[list[tuple[int, float]]] = [[] for _ in range(size)]
    for output in range(given.size):
        for entry in range(given.ptr[output], given.ptr[output + 1]):
            found[given.pixels[entry]].append((output, given.weights[entry]))
    ptr = [0]
    for entries in found:
        ptr.append(ptr[-1] + len(entries))
    every = [entry for entries in found for entry in entries]
    return Side(tuple(ptr), tuple(p for p, _ in every), tuple(w for _, w in every))
