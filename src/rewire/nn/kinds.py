"""Which layers of torch have sparse and masked forms."""

from __future__ import annotations

from typing import Any

from torch import nn

from rewire.nn.conv import SparseConv, SparseConv1d, SparseConv2d, SparseConv3d
from rewire.nn.linear import SparseLinear
from rewire.nn.masked import (
    MaskedConv,
    MaskedConv1d,
    MaskedConv2d,
    MaskedConv3d,
    MaskedConvTranspose1d,
    MaskedConvTranspose2d,
    MaskedLinear,
)
from rewire.nn.transposed import SparseConvTranspose1d, SparseConvTranspose2d

Sparse = type[SparseLinear] | type[SparseConv]
Masked = type[MaskedLinear] | type[MaskedConv]
KINDS: dict[type[nn.Module], tuple[Sparse, Masked]] = {
    nn.Linear: (SparseLinear, MaskedLinear),
    nn.Conv1d: (SparseConv1d, MaskedConv1d),
    nn.Conv2d: (SparseConv2d, MaskedConv2d),
    nn.Conv3d: (SparseConv3d, MaskedConv3d),
    nn.ConvTranspose1d: (SparseConvTranspose1d, MaskedConvTranspose1d),
    nn.ConvTranspose2d: (SparseConvTranspose2d, MaskedConvTranspose2d),
}


def kind_of(layer: Any) -> type[nn.Module] | None:
    """The layer of torch that a dense, sparse or masked one is; None if it has no sparse form."""
    for dense, ours in KINDS.items():
        if isinstance(layer, (dense, *ours)):
            return dense
    return None


def sparse_kind(layer: Any) -> Sparse:
    """The sparse form of a layer that has one."""
    return KINDS[_known(layer)][0]


def masked_kind(layer: Any) -> Masked:
    """The masked form of a layer that has one."""
    return KINDS[_known(layer)][1]


def _known(layer: Any) -> type[nn.Module]:
    kind = kind_of(layer)
    assert kind is not None, f"a {type(layer).__name__} has no sparse form"
    return kind
