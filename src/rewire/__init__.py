"""Always-sparse neural-network training for PyTorch."""

from rewire.connections import Connections
from rewire.methods import (
    DSR,
    GSE,
    SET,
    SNFS,
    DeepR,
    Dense,
    Gradual,
    History,
    LayerRewiring,
    Lottery,
    Rewirer,
    Rewiring,
    RigL,
    Site,
    Static,
    Ticket,
    TopKAST,
    grasp,
    snip,
    synflow,
)
from rewire.nn import (
    ConnectedLayer,
    MaskedConv2d,
    MaskedLayer,
    MaskedLinear,
    SparseConv2d,
    SparseLayer,
    SparseLinear,
)
from rewire.sparsify import densify, sparsify
from rewire.summary import LayerSummary, Summary, summary

__version__ = "0.1.0"

__all__ = [
    "DSR",
    "GSE",
    "SET",
    "SNFS",
    "ConnectedLayer",
    "Connections",
    "DeepR",
    "Dense",
    "Gradual",
    "History",
    "LayerRewiring",
    "LayerSummary",
    "Lottery",
    "MaskedConv2d",
    "MaskedLayer",
    "MaskedLinear",
    "Rewirer",
    "Rewiring",
    "RigL",
    "Site",
    "SparseConv2d",
    "SparseLayer",
    "SparseLinear",
    "Static",
    "Summary",
    "Ticket",
    "TopKAST",
    "densify",
    "grasp",
    "snip",
    "sparsify",
    "summary",
    "synflow",
]
