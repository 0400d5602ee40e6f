"""Initial weights of dense layers, as those of sparse ones are drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from rewire.conversion import M, layer_seed, plan, size_of


@torch.no_grad()
def reinitialize(model: M, *, keep_dense: str | Iterable[str] = (), seed: int = 0) -> M:
    """Reinitialise, in place, the weights and biases of all layers that can be sparse; returns the model.

    They are uniform in +-sqrt(3 / fan-in), as :func:`rewire.sparsify` draws those of sparse layers, so that
    pre-activations have unit variance. For fair comparisons with methods that begin with a dense model
    (:func:`rewire.snip`, :class:`rewire.Gradual`, ...), which otherwise keep the weights they are given.

    Args:
        model: the model.
        keep_dense: names or globs of layers, or names of modules that hold them, to leave alone.
        seed: what is drawn for a layer depends on this and its name.

    Example:
        >>> from torch import nn
        >>> layer = reinitialize(nn.Sequential(nn.Linear(300, 100)))[0]
        >>> 0.09 < float(layer.weight.max()) <= 0.1, 0.05 < float(layer.bias.max()) <= 0.1
        (True, True)
    """
    names, layers, *_ = plan(model, None, keep_dense)
    for layer in layers:
        name = names[layer][0]
        size = size_of(layer, name)
        bound = math.sqrt(3 * size.n_out / size.weights)
        generator = torch.Generator().manual_seed(layer_seed(seed, name))
        for parameter in (layer.weight, layer.bias):
            if parameter is not None:
                drawn = torch.empty(parameter.shape, dtype=parameter.dtype)
                parameter.copy_(drawn.uniform_(-bound, bound, generator=generator))
    return model
