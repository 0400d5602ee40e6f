"""What tests of half precision share: an error that dense torch makes as well is none."""

from __future__ import annotations

import math

from torch import Tensor

VALUES = 2.0**-7
"""Share of a tensor that is a few roundings."""
GRADIENTS = 2.0**-4
"""The same where one rounding may decide on which side of a kink an element is, as of a ReLU."""


def no_worse(
    ours: Tensor, dense: Tensor, truth: Tensor, room: float = VALUES, size: float = 0.0
) -> None:
    """As near to the truth as dense torch in the same types, or within the rounding of numbers of a size.

    Args:
        ours, dense: what both compute, of the same type.
        truth: the same in float64.
        room: share of the truth that an error may be in any case.
        size: norm of what it is a small difference of.
    """
    assert ours.dtype == dense.dtype, f"{ours.dtype}, dense {dense.dtype}"
    assert ours.shape == truth.shape
    mine, theirs = (float((t.detach().double() - truth.detach()).norm()) for t in (ours, dense))
    norm, theirs = float(truth.norm()), 0.0 if math.isnan(theirs) else theirs
    times = 1.5 if norm > theirs else 8.0  # else all of it is rounding
    bound = times * theirs + room * (norm + 0.25 * size)
    assert mine <= bound, f"error {mine:.3g}, dense {theirs:.3g} of {norm:.3g}, bound {bound:.3g}"
