"""Always-sparse neural-network training for PyTorch."""

from rewire import distributed
from rewire.connections import Connections
from rewire.methods import (
    DSR,
    GSE,
    SET,
    DeepR,
    History,
    LayerRewiring,
    Rewirer,
    Rewiring,
    Site,
    Static,
)
from rewire.nn import SparseConv2d, SparseLayer, SparseLinear, SparseMultiheadAttention
from rewire.saving import dense_state_dict, export, load, save
from rewire.sparsify import densify, sparsify
from rewire.summary import LayerSummary, Summary, summary

__version__ = "0.1.0"

__all__ = [
    "DSR",
    "GSE",
    "SET",
    "Connections",
    "DeepR",
    "History",
    "LayerRewiring",
    "LayerSummary",
    "Rewirer",
    "Rewiring",
    "Site",
    "SparseConv2d",
    "SparseLayer",
    "SparseLinear",
    "SparseMultiheadAttention",
    "Static",
    "Summary",
    "dense_state_dict",
    "densify",
    "distributed",
    "export",
    "load",
    "save",
    "sparsify",
    "summary",
]
