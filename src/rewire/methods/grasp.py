"""Gradient signal preservation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def grasp(
    model: M,
    batches: Iterable[Pair],
    loss: Loss,
    *,
    sparsity: float,
    temperature: float = 200.0,
    scope: str = "global",
    keep_dense: str | Iterable[str] = (),
    seed: int = 0,
) -> M:
    """Gradient signal preservation: remove the weights without which the gradient is largest.

    A weight's score is ``-w * Hg``, with the gradient g and the Hessian H of the loss, logits divided by
    ``temperature``; the largest are removed. ``Hg`` is the gradient of ``stop(g) . g``. As in the authors'
    code the model is in training mode; attention is computed without its fused kernels, which have no
    second derivative.

    Args:
        model, batches, loss, sparsity, scope, keep_dense, seed: as for :func:`rewire.snip`.
        temperature: divides the model's output.

    Returns:
        The model, ready for training.

    Reference: Wang et al., *Picking winning tickets before training by preserving gradient flow*, 2020.
    """
    check_target(sparsity, scope)
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    model, layers = layers_of(model, keep_dense)
    scores = grasp_scores(model, layers, batches, loss, temperature, seed)
    kept = {name: -score for name, score in scores.items()}
    return make_sparse(model, layers, best(kept, 1 - sparsity, scope))


def grasp_scores(
    model: nn.Module,
    layers: Layers,
    batches: Iterable[Pair],
    loss: Loss,
    temperature: float = 200.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """``-w * Hg`` of every weight of these layers, by name of the parameter."""
    weights = weights_of(layers)
    variables, batches = list(weights.values()), checked(batches)

    def softened(output: Tensor, target: object) -> Tensor:
        return loss(output / temperature, target)

    def gradient(part: Tensor, keep: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(part, variables, create_graph=keep, materialize_grads=True)

    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        stopped = [torch.zeros_like(weight) for weight in variables]
        for part in losses(model, weights, batches, softened, seed):
            for total, found in zip(stopped, gradient(part, False), strict=True):
                total += found
        products = [torch.zeros_like(weight) for weight in variables]
        for part in losses(model, weights, batches, softened, seed):
            flow = sum((g * s).sum() for g, s in zip(gradient(part, True), stopped, strict=True))
            assert isinstance(flow, Tensor)
            for total, found in zip(products, gradient(flow, False), strict=True):
                total += found
    return {
        name: -weight.detach() * product
        for (name, weight), product in zip(weights.items(), products, strict=True)
    }
