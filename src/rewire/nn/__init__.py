"""Sparse layers, drop-in for their dense namesakes, and their masked twins."""

from rewire.nn import weight_functions  # noqa: F401 (fills the table of functions)
from rewire.nn.attention import SparseMultiheadAttention
from rewire.nn.conv import SparseConv1d, SparseConv2d, SparseConv3d
from rewire.nn.layer import ConnectedLayer
from rewire.nn.linear import SparseLinear
from rewire.nn.masked import (
    MaskedConv1d,
    MaskedConv2d,
    MaskedConv3d,
    MaskedConvTranspose1d,
    MaskedConvTranspose2d,
    MaskedLinear,
)
from rewire.nn.masked_layer import MaskedLayer
from rewire.nn.sparse import SparseLayer
from rewire.nn.transposed import SparseConvTranspose1d, SparseConvTranspose2d
from rewire.nn.weight import SparseWeight

__all__ = [
    "ConnectedLayer",
    "MaskedConv1d",
    "MaskedConv2d",
    "MaskedConv3d",
    "MaskedConvTranspose1d",
    "MaskedConvTranspose2d",
    "MaskedLayer",
    "MaskedLinear",
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseLayer",
    "SparseLinear",
    "SparseMultiheadAttention",
    "SparseWeight",
]
