"""Sharing out a number among layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from rewire.connections import Connections
from rewire.ops.sampling import Stream
from rewire.sampling import PLACES, SHARES, choose


def share_out(total: int, shares: Sequence[int], limits: Sequence[int]) -> list[int]:
    """``total`` in integers in proportion to ``shares``, none above its limit.

    Remainders go to the largest fractions, the first of equal ones; what is above a limit is shared out
    among the others, whatever their shares if no other has one.

    >>> share_out(10, [1, 1, 3], [10, 10, 10])
    [2, 2, 6]
    >>> share_out(10, [1, 1, 3], [10, 10, 4])
    [3, 3, 4]
    """
    if total > sum(limits):
        raise ValueError(f"{total} is more than the limits {sum(limits)} allow")
    counts = [0] * len(limits)
    while (left := total - sum(counts)) > 0:
        room = [limit - count for limit, count in zip(limits, counts, strict=True)]
        weights = [share if r else 0 for share, r in zip(shares, room, strict=True)]
        if not any(weights):
            weights = [int(r > 0) for r in room]
        whole = sum(weights)
        parts = [left * weight // whole for weight in weights]
        order = sorted(range(len(parts)), key=lambda i: -(left * weights[i] % whole))
        for i in order[: left - sum(parts)]:
            parts[i] += 1
        counts = [c + min(p, r) for c, p, r in zip(counts, parts, room, strict=True)]
    return counts


def share_at_random(total: int, limits: Sequence[int], stream: Stream) -> list[int]:
    """How many of ``total`` distinct places, drawn uniformly from all, fall into each of the layers that
    have so many; in time and memory linear in ``total``, the layers and the units that such layers have.

    >>> share_at_random(800, [1_045_630, 15_330], Stream(0, 0, step=0, layer=0))
    [785, 15]
    """
    if len(limits) == 1:
        return [total]
    # All places in a square of units, and what is beyond the last one taken.
    size = sum(limits)
    width = math.isqrt(max(0, size - 1)) + 1
    height = -(-size // width)
    beyond = Connections.from_keys(torch.arange(size, width * height), width, height)
    places = choose(beyond, total, stream._replace(purpose=SHARES), PLACES).keys()
    layers = np.searchsorted(np.cumsum(limits), places.numpy(), side="right")
    counts: list[int] = np.bincount(layers, minlength=len(limits)).tolist()
    return counts
