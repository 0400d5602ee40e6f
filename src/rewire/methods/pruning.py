"""What the methods that prune before training share: scoring a dense model, and making it sparse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rewire.budgets import held
from rewire.conversion import (
    Dense,
    M,
    block_fused_paths,
    carry_over,
    open_attentions,
    plan,
    replace,
)
from rewire.engine import use_engine
from rewire.methods.arguments import check_choice
from rewire.ops.sampling import select
from rewire.sparsify import pruned

Pair = tuple[Any, Any]  # a batch of inputs and targets
Loss = Callable[[Any, Any], Tensor]  # of a model's output and targets, their mean
Layers = dict[str, Dense]  # by name


def layers_of(model: M, keep_dense: str | Iterable[str] = ()) -> tuple[M, Layers]:
    """The layers of a dense model that will be sparse; a warning mentions those that cannot.

    Attentions that hold such layers are taken apart first, in place.

    Returns:
        The model, which is another one if it is itself an attention, and its layers by name.
    """
    found = plan(model, None, keep_dense)
    names, layers, _, apart = found
    found.warn(stacklevel=3)
    for layer in layers:
        if layer.weight.is_meta:
            raise ValueError(f"{names[layer][0]} is on the meta device and has no weights to score")
    model = open_attentions(model, apart)
    block_fused_paths(model)
    return model, {names[layer][0]: layer for layer in layers}


def weights_of(layers: Layers) -> dict[str, Tensor]:
    """Copies of the layers' weights that require gradients, by name of the parameter."""
    return {
        _parameter(name): layer.weight.detach().clone().requires_grad_()
        for name, layer in layers.items()
    }


def _parameter(name: str) -> str:
    return f"{name}.weight".lstrip(".")


def losses(
    model: nn.Module, weights: Mapping[str, Tensor], batches: Sequence[Pair], loss: Loss, seed: int
) -> Iterator[Tensor]:
    """The loss of each batch, as part of the mean over all samples, with these weights in the model's
    place. Neither its buffers (batch statistics) nor torch's random state are changed."""
    total = sum(len(y) for _, y in batches)
    devices = {weight.device for weight in weights.values() if weight.is_cuda}
    with torch.random.fork_rng(list(devices)), _mode(model, training=True):
        torch.manual_seed(seed)
        for x, y in batches:
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            output = functional_call(model, {**weights, **buffers}, (x,))
            yield loss(output, y) * (len(y) / total)


def checked(batches: Iterable[Pair]) -> list[Pair]:
    """The batches as a list of pairs, after checking them."""
    found = list(batches)
    if not found or not all(isinstance(b, tuple | list) and len(b) == 2 for b in found):
        raise ValueError("batches must be one or more pairs of inputs and targets")
    return [(x, y) for x, y in found]


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, was in before.items():
            module.training = was


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """With the model in evaluation mode."""
    with _mode(model, training=False):
        yield


def check_target(sparsity: float, scope: str) -> None:
    """Raise a ValueError unless the target can be met."""
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be at least 0 and below 1, got {sparsity}")
    check_choice("scope", scope, ("global", "layer"))


def best(scores: Mapping[str, Tensor], density: float, scope: str = "global") -> dict[str, Tensor]:
    """Masks of the highest scores, over all layers together or in each."""
    if scope == "layer":
        return {k: v for name in scores for k, v in best({name: scores[name]}, density).items()}
    flat = torch.cat([score.detach().flatten().cpu() for score in scores.values()])
    chosen = select(flat, held(flat.numel(), density))
    parts = chosen.split([score.numel() for score in scores.values()])
    return {
        name: mask.view(score.shape).to(score.device)
        for (name, score), mask in zip(scores.items(), parts, strict=True)
    }


def make_sparse(model: M, layers: Layers, masks: Mapping[str, Tensor]) -> M:
    """Convert these layers, in place, into sparse ones with the weights of their masks.

    Args:
        model: the model.
        layers: from :func:`layers_of`.
        masks: by name of the parameter.
    """
    with torch.random.fork_rng(devices=[]):  # a new layer draws weights first
        new: dict[nn.Module, nn.Module] = {
            layer: carry_over(layer, pruned(layer, masks[_parameter(name)]))
            for name, layer in layers.items()
        }
    model = replace(model, new)
    block_fused_paths(model)
    if model not in new.values():
        use_engine(model)
    return model
