"""Which layers are better dense: a rule of thumb, measured once.

A sparse product does less work and does it less evenly than a dense one, so there is a density from which
the dense one is faster. It depends on the kind of layer more than on its size. The figures are those of a
forward and backward pass in float32 on one thread; docs/performance.md has the table.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from rewire.nn.kinds import kind_of

# A layer is likely to be slower than its dense form from this density on.
SLOW_FROM: dict[type[nn.Module], float] = {
    nn.Linear: 0.4,
    nn.Conv1d: 0.5,
    nn.Conv2d: 0.4,
    nn.Conv3d: 0.35,
    nn.ConvTranspose1d: 0.25,
    nn.ConvTranspose2d: 0.2,
}
SKIPS = ("depthwise", "slow", "none")


def is_depthwise(layer: Any) -> bool:
    """Whether every output channel of a convolution sees one input channel of several."""
    return bool(1 < getattr(layer, "groups", 1) == layer.in_channels)


def is_slow(layer: Any, density: float) -> bool:
    """Whether a layer, dense or sparse, is likely to be slower than its dense form at a density."""
    kind = kind_of(layer)
    return kind is not None and density >= SLOW_FROM[kind]
