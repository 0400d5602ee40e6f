"""From masked layers to sparse ones, in the middle of training."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from rewire import optim
from rewire.conversion import carry_over, replace
from rewire.engine import use_engine
from rewire.nn.layer import ConnectedLayer
from rewire.nn.masked_layer import MaskedLayer


@torch.no_grad()
def hand_over(model: nn.Module, optimizer: Optimizer) -> dict[nn.Module, ConnectedLayer]:
    """Let sparse layers take the place of all masked ones in a model and in its optimizer.

    Their parameters are new objects, at the place of the old ones in the optimizer's groups, with its
    state of the active connections.

    Returns:
        The sparse layer of each masked one.
    """
    found = [m for m in model.modules() if isinstance(m, MaskedLayer)]
    if model in found:
        raise ValueError("a single layer cannot be replaced in itself: put it into nn.Sequential")
    new: dict[nn.Module, ConnectedLayer] = {}
    states = [optim.carry(optimizer, layer.weight, _gathering(layer)) for layer in found]
    for layer, state in zip(found, states, strict=True):
        with torch.random.fork_rng(devices=[]):  # a new layer draws weights first
            sparse = layer.to_sparse()
        carry_over(layer, sparse)
        sparse.bias = layer.bias
        optim.exchange(optimizer, layer.weight, sparse.values, state)
        new[layer] = sparse
    replace(model, new)
    if new:
        use_engine(model)
    return new


def _gathering(layer: ConnectedLayer) -> optim.Change:
    """State of a masked weight becomes that of sparse values, which are a column."""
    return lambda state, fresh: layer.gather(state).unsqueeze(1)
