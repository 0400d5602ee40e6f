"""Methods that train sparse models: dynamic ones, pruning before and during training, and rounds of it."""

from rewire.methods.base import Rewirer
from rewire.methods.deepr import DeepR
from rewire.methods.dense import Dense
from rewire.methods.dsr import DSR
from rewire.methods.gradual import Gradual
from rewire.methods.grasp import grasp
from rewire.methods.gse import GSE
from rewire.methods.history import History, LayerRewiring, Rewiring
from rewire.methods.layer_view import LayerView, Site
from rewire.methods.lottery import Lottery, Ticket
from rewire.methods.registry import METHODS, Method
from rewire.methods.rigl import RigL
from rewire.methods.set import SET
from rewire.methods.snfs import SNFS
from rewire.methods.snip import snip
from rewire.methods.static import Static
from rewire.methods.synflow import synflow
from rewire.methods.topkast import TopKAST

__all__ = [
    "DSR",
    "GSE",
    "METHODS",
    "SET",
    "SNFS",
    "DeepR",
    "Dense",
    "Gradual",
    "History",
    "LayerRewiring",
    "LayerView",
    "Lottery",
    "Method",
    "Rewirer",
    "Rewiring",
    "RigL",
    "Site",
    "Static",
    "Ticket",
    "TopKAST",
    "grasp",
    "snip",
    "synflow",
]
