"""Sparse layers, drop-in for their dense namesakes."""

from rewire.nn.attention import SparseMultiheadAttention
from rewire.nn.conv import SparseConv2d
from rewire.nn.linear import SparseLinear
from rewire.nn.sparse import SparseLayer

__all__ = ["SparseConv2d", "SparseLayer", "SparseLinear", "SparseMultiheadAttention"]
