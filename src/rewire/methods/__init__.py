"""Methods that rewire sparse layers while they train."""

from rewire.methods.base import Rewirer
from rewire.methods.deepr import DeepR
from rewire.methods.dsr import DSR
from rewire.methods.gse import GSE
from rewire.methods.history import History, LayerRewiring, Rewiring
from rewire.methods.set import SET
from rewire.methods.site import Site
from rewire.methods.static import Static

__all__ = [
    "DSR",
    "GSE",
    "SET",
    "DeepR",
    "History",
    "LayerRewiring",
    "Rewirer",
    "Rewiring",
    "Site",
    "Static",
]
