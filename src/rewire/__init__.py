"""Always-sparse neural-network training for PyTorch."""

from rewire import distributed
from rewire.averaging import EMA
from rewire.compiling import compile
from rewire.connections import Connections
from rewire.engine import use_engine
from rewire.engine.explain import explain
from rewire.engine.explanation import Explanation
from rewire.equivalents import register_layer
from rewire.exporting import export
from rewire.initial import reinitialize
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
    LayerView,
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
    MaskedConv1d,
    MaskedConv2d,
    MaskedConv3d,
    MaskedConvTranspose1d,
    MaskedConvTranspose2d,
    MaskedLayer,
    MaskedLinear,
    SparseConv1d,
    SparseConv2d,
    SparseConv3d,
    SparseConvTranspose1d,
    SparseConvTranspose2d,
    SparseLayer,
    SparseLinear,
    SparseMultiheadAttention,
)
from rewire.ops import PerformanceWarning
from rewire.saving import dense_state_dict, load, save
from rewire.sparsify import densify, sparsify
from rewire.summary import LayerSummary, Summary, summary

__version__ = "0.1.0"

__all__ = [
    "DSR",
    "EMA",
    "GSE",
    "SET",
    "SNFS",
    "ConnectedLayer",
    "Connections",
    "DeepR",
    "Dense",
    "Explanation",
    "Gradual",
    "History",
    "LayerRewiring",
    "LayerSummary",
    "LayerView",
    "Lottery",
    "MaskedConv1d",
    "MaskedConv2d",
    "MaskedConv3d",
    "MaskedConvTranspose1d",
    "MaskedConvTranspose2d",
    "MaskedLayer",
    "MaskedLinear",
    "PerformanceWarning",
    "Rewirer",
    "Rewiring",
    "RigL",
    "Site",
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseLayer",
    "SparseLinear",
    "SparseMultiheadAttention",
    "Static",
    "Summary",
    "Ticket",
    "TopKAST",
    "compile",
    "dense_state_dict",
    "densify",
    "distributed",
    "explain",
    "export",
    "grasp",
    "load",
    "register_layer",
    "reinitialize",
    "save",
    "snip",
    "sparsify",
    "summary",
    "synflow",
    "use_engine",
]
