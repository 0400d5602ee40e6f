"""Shared by the plug-ins: making a rewirer, and finding the optimizer for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from rewire.integrations.logging import Log
from rewire.methods.base import Rewirer
from rewire.methods.gradual import Gradual
from rewire.nn.layer import ConnectedLayer

Method = Callable[..., Rewirer]


def make_rewirer(
    method: Method,
    model: nn.Module,
    optimizer: Optimizer,
    settings: dict[str, Any],
    logs: Iterable[Log],
) -> Rewirer:
    """The rewirer of a model, with loggers."""
    rewirer = refuse_handover(method(model, optimizer, **settings))
    rewirer.callbacks.extend(logs)
    return rewirer


def refuse_handover(rewirer: Rewirer) -> Rewirer:
    """The rewirer; raises for one that replaces layers, which no trainer would do before it loads."""
    if isinstance(rewirer, Gradual) and rewirer.storage == "sparse":
        raise ValueError(
            'Gradual(storage="sparse") replaces the layers of the model at its end, and a '
            "trainer that resumes "
            "from a later checkpoint would load sparse weights into masked layers: give "
            'storage="masked" here and call rewire.sparsify on the trained model, or write your own loop'
        )
    return rewirer


def optimizer_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> Optimizer:
    """The optimizer, among several, that trains the sparse layers of a model."""
    layers = [module for module in model.modules() if isinstance(module, ConnectedLayer)]
    wanted = {id(m.parameter) for m in layers if m.parameter.requires_grad}
    if not wanted:
        raise ValueError(
            f"{type(model).__name__} has no sparse layers that are trained: call "
            "rewire.sparsify(model, ...) "
            "before the optimizer is made, in the constructor of your module say"
        )
    found = [one for one in optimizers if wanted & _held(one)]
    if len(found) == 1 and wanted <= _held(found[0]):
        return found[0]
    problem = "none holds all of them" if len(found) < 2 else f"{len(found)} hold some of them each"
    raise ValueError(
        f"one optimizer must train all {len(wanted)} sparse layers of {type(model).__name__}, but of its "
        f"{len(optimizers)} optimizers {problem}: make the optimizer after rewire.sparsify, or give each "
        "part of the model a callback of its own with part="
    )


def _held(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
