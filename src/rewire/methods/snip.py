"""Single-shot network pruning."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rewire.conversion import M
from rewire.methods.pruning import (
    Layers,
    Loss,
    Pair,
    best,
    check_target,
    checked,
    layers_of,
    losses,
    make_sparse,
    weights_of,
)


def snip(
    model: M,
    batches: Iterable[Pair],
    loss: Loss,
    *,
    sparsity: float,
    scope: str = "global",
    keep_dense: str | Iterable[str] = (),
    seed: int = 0,
) -> M:
    """Single-shot network pruning: keep the weights that the loss feels most, before training.

    A weight's score is ``|g * w|``, g being the gradient of the loss: how much the loss changes when the
    weight goes. As in the authors' code the model is in training mode, so that batch norms use the
    batch's statistics, and only weights are pruned.

    Args:
        model: a dense model; its layers are converted in place into sparse ones that keep their weights.
        batches: pairs of inputs and targets, on the model's device; ten samples per class are usual.
        loss: of the model's output and targets, their mean.
        sparsity: share of the weights that goes.
        scope: compare scores over the whole model (``"global"``) or layer by layer (``"layer"``). Over the
            whole model a layer can lose all its connections.
        keep_dense: names or globs of layers, or names of modules that hold them, to leave alone.
        seed: of dropout while scores are computed.

    Returns:
        The model, ready for training.

    Reference: Lee et al., *SNIP: single-shot network pruning based on connection sensitivity*, 2018.
    """
    check_target(sparsity, scope)
    model, layers = layers_of(model, keep_dense)
    scores = snip_scores(model, layers, batches, loss, seed)
    return make_sparse(model, layers, best(scores, 1 - sparsity, scope))


def snip_scores(
    model: nn.Module, layers: Layers, batches: Iterable[Pair], loss: Loss, seed: int = 0
) -> dict[str, Tensor]:
    """``|g * w|`` of every weight of these layers, by name of the parameter."""
    weights = weights_of(layers)
    with torch.enable_grad():
        gradients = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for part in losses(model, weights, checked(batches), loss, seed):
            found = torch.autograd.grad(part, list(weights.values()), materialize_grads=True)
            for total, gradient in zip(gradients.values(), found, strict=True):
                total += gradient
    return {name: (gradients[name] * weight.detach()).abs() for name, weight in weights.items()}
