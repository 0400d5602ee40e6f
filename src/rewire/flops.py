"""Floating-point operations of a model's layers, and what training takes by method.

A multiply-add counts 2. Only layers with weights count (linear layers and convolutions): norms,
activations and attention's products are the same for dense and sparse models, and small.
Positions at the border of an image count in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rewire.budgets import assign
from rewire.conversion import size_of
from rewire.nn.kinds import kind_of
from rewire.nn.layer import ConnectedLayer
from rewire.slow import is_depthwise


@dataclass(frozen=True)
class LayerFlops:
    """One layer, for one sample.

    Attributes:
        positions: how often each weight is used, such as the pixels of a convolution's output.
        connections: weights that exist.
        weights: weights of the dense layer.
    """

    positions: int
    connections: int
    weights: int

    def of(self, connections: int) -> int:
        """Operations of one product with so many connections."""
        return 2 * self.positions * connections


@dataclass(frozen=True)
class Flops:
    """The forward pass of one sample.

    Attributes:
        layers: by name.
    """

    layers: dict[str, LayerFlops]

    @property
    def sparse(self) -> int:
        """With the connections that there are (f_S)."""
        return sum(layer.of(layer.connections) for layer in self.layers.values())

    @property
    def dense(self) -> int:
        """If all layers were dense (f_D)."""
        return sum(layer.of(layer.weights) for layer in self.layers.values())

    def subset(self, factor: float) -> int:
        """A product with ``factor * |A|`` connections of each layer, at most with all."""
        return sum(
            layer.of(math.ceil(min(factor * layer.connections, layer.weights)))
            for layer in self.layers.values()
        )


def count(model: nn.Module, shape: tuple[int, ...]) -> Flops:
    """Count the FLOPs of a forward pass of one sample; the model runs once, in evaluation mode.

    Example:
        >>> found = count(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), (1, 8, 8))
        >>> found.dense, found.sparse
        (1280, 1280)
    """
    positions: dict[str, int] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            used = _positions(module, inputs[0], output)
            positions[name] = positions.get(name, 0) + used

        return hook

    layers = {name: m for name, m in model.named_modules() if _counts(m)}
    handles = [m.register_forward_hook(watch(name)) for name, m in layers.items()]
    like = next(model.parameters())
    try:
        with _evaluating(model), torch.no_grad():
            model(torch.zeros(1, *shape, device=like.device, dtype=like.dtype))
    finally:
        for handle in handles:
            handle.remove()
    return Flops({n: LayerFlops(p, *_sizes(layers[n])) for n, p in positions.items()})


def assigned(
    model: nn.Module,
    shape: tuple[int, ...],
    sparsity: float,
    *,
    assignment: str = "erdos-renyi",
    exact: bool = False,
    dense_head: bool = False,
) -> Flops:
    """Count the FLOPs of one sample if a dense model were made sparse; the model may be on the meta device.

    Args:
        model: a model with dense layers.
        shape: of a sample.
        sparsity: fraction of the weights that would be missing.
        assignment, exact: as for :func:`rewire.budgets.assign`.
        dense_head: whether the layer that runs last would stay dense.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.Linear(50, 10))
        >>> assigned(model, (1, 8, 8), 0.9).sparse
        742
        >>> assigned(model, (1, 8, 8), 0.9, dense_head=True).sparse
        1640
    """
    layers = count(model, shape).layers
    names = list(layers)[: -1 if dense_head else None]
    names = [name for name in names if not is_depthwise(model.get_submodule(name))]
    sizes = [size_of(model.get_submodule(name), name) for name in names]  # type: ignore[arg-type]
    counts = assign(sizes, sparsity=sparsity, assignment=assignment, exact=exact)
    held = dict(zip(names, counts, strict=True))
    return Flops(
        {
            name: replace(one, connections=held.get(name, one.weights))
            for name, one in layers.items()
        }
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _counts(module: nn.Module) -> bool:
    return kind_of(module) is not None


def _positions(module: nn.Module, x: Tensor, y: Tensor) -> int:
    """How often each weight is used; in a transposed convolution at every position of the input."""
    kind = kind_of(module)
    if kind is nn.Linear:
        return y.numel() // y.shape[-1]
    if kind in (nn.ConvTranspose1d, nn.ConvTranspose2d):
        return x.numel() // int(module.in_channels)  # type: ignore[arg-type]
    return y.numel() // int(module.out_channels)  # type: ignore[arg-type]


def _sizes(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, ConnectedLayer):
        return module.count, module.domain.size
    weights = module.weight.numel()  # type: ignore[operator]
    return weights, weights


# Training, per sample (Evci et al., 2020): forward, input gradient and weight gradient --------------


def dense(flops: Flops) -> float:
    """``3 f_D``."""
    return 3 * flops.dense


def static(flops: Flops) -> float:
    """``3 f_S``: also for SET, DSR and DeepR, which look at nothing but active weights."""
    return 3 * flops.sparse


def snfs(flops: Flops) -> float:
    """``2 f_S + f_D``: a dense gradient in every step."""
    return 2 * flops.sparse + flops.dense


def topkast(flops: Flops, backward: float = 2.0) -> float:
    """``2 f_A + f_B``: weight gradients at ``backward`` times as many weights as are active."""
    return 2 * flops.sparse + flops.subset(backward)


def guided(flops: Flops, every: int, extra: float) -> float:
    """``(3 f_S T + 2 f_S + extra) / (T + 1)``: every T steps one step for the gradient of others.

    ``extra`` is ``f_D`` for RigL and ``flops.subset(gamma)`` for GSE, as in the paper.
    """
    return (3 * flops.sparse * every + 2 * flops.sparse + extra) / (every + 1)
