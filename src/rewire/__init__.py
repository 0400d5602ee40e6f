"""Always-sparse neural-network training for PyTorch."""

from rewire.connections import Connections
from rewire.nn import SparseConv2d, SparseLayer, SparseLinear
from rewire.sparsify import densify, sparsify
from rewire.summary import LayerSummary, Summary, summary

__version__ = "0.1.0"

__all__ = [
    "Connections",
    "LayerSummary",
    "SparseConv2d",
    "SparseLayer",
    "SparseLinear",
    "Summary",
    "densify",
    "sparsify",
    "summary",
]
