"""Other libraries of sparse layers, if they are installed.

Each is timed at the same work as a layer of ours, with the same connections and weights if it can
take them. `SparseProp <https://github.com/IST-DASLab/sparseprop>`_ has linear layers and convolutions,
`sparselab <https://github.com/DarshanFofadiya/sparselab>`_ linear layers, with connections that it
draws itself.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from typing import Any

import torch
from torch import nn

from rewire.nn import SparseConv2d, SparseLinear

SPARSEPROP, SPARSELAB = "SparseProp", "sparselab"
_MODULES = {SPARSEPROP: "sparseprop.modules", SPARSELAB: "sparselab"}

Variant = tuple[str, bool, nn.Module]  # its name, whether it wants batch-last memory, the module


@cache
def _load(peer: str) -> Any | str:
    """The module of a library, or why there is none."""
    try:
        with _openmp_threads(torch.get_num_threads()):
            return importlib.import_module(_MODULES[peer])
    except ModuleNotFoundError as error:
        name = _MODULES[peer].partition(".")[0]
        return "not installed" if error.name == name else f"cannot be imported: {error}"
    except Exception as error:  # a broken build raises anything
        return f"cannot be imported: {error}"


@contextmanager
def _openmp_threads(count: int) -> Iterator[None]:
    """An OpenMP runtime that is loaded in here, other than torch's, will use so many threads."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def status() -> dict[str, str]:
    """The version of each library, or why it cannot be timed."""
    return {peer: _version(peer) for peer in _MODULES}


def _version(peer: str) -> str:
    loaded = _load(peer)
    if isinstance(loaded, str):
        return loaded
    try:
        return metadata.version(peer.lower())
    except metadata.PackageNotFoundError:
        return "installed"


def linear(layer: SparseLinear) -> dict[str, list[Variant]]:
    """Linear layers of the same size and sparsity, of each library that is there."""
    found: dict[str, list[Variant]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Sparse CSR tensor support is in beta", and the like
        if not isinstance(prop := _load(SPARSEPROP), str):
            found[SPARSEPROP] = [("", False, prop.SparseLinear.from_dense(layer.to_dense()))]
        if not isinstance(lab := _load(SPARSELAB), str):
            made = lab.SparseLinear(
                *(layer.in_features, layer.out_features, layer.bias is not None),
                sparsity=1 - layer.density,
            )
            found[SPARSELAB] = [("", False, made)]
    return found


def convs(layers: Sequence[SparseConv2d], rectify: bool) -> dict[str, list[Variant]]:
    """The same convolutions in a row, each with ReLU if asked; SparseProp's both ways to run them."""
    if isinstance(prop := _load(SPARSEPROP), str):
        return {}
    variants: list[Variant] = []
    for name, over_width in (("over batch", False), ("over width", True)):
        if over_width and any(layer.stride != (1, 1) for layer in layers):
            continue  # it has no such forward, and its backward is wrong after the other one
        modules: list[nn.Module] = []
        for layer in layers:
            dense = layer.to_dense()
            modules.append(prop.SparseConv2d.from_dense(dense, vectorizing_over_on=over_width))
            if rectify:
                modules.append(nn.ReLU())
        # Over the batch it turns activations batch-last itself: given so, it need not.
        variants.append((name, not over_width, nn.Sequential(*modules)))
    return {SPARSEPROP: variants}
