"""Sharing out a number among layers."""

from __future__ import annotations

from collections.abc import Sequence


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
