"""Sparse layers, drop-in for their dense namesakes, and their masked twins."""

from rewire.nn.attention import SparseMultiheadAttention
from rewire.nn.conv import SparseConv2d
from rewire.nn.layer import ConnectedLayer
from rewire.nn.linear import SparseLinear
from rewire.nn.masked import MaskedConv2d, MaskedLayer, MaskedLinear
from rewire.nn.sparse import SparseLayer

__all__ = [
    "ConnectedLayer",
    "MaskedConv2d",
    "MaskedLayer",
    "MaskedLinear",
    "SparseConv2d",
    "SparseLayer",
    "SparseLinear",
    "SparseMultiheadAttention",
]
