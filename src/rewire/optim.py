"""Carrying the state of any torch optimizer across a change of connections.

State of one element per connection follows it: survivors keep theirs, and grown connections get what the
optimizer gives a fresh parameter. What belongs to the parameter as a whole (step counts, None) stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rewire.ops import sampling

_REFUSED = {
    "LBFGS": "its history of whole gradients has no meaning for other connections",
    "SparseAdam": "it takes sparse gradients, and those of a sparse layer are dense over its connections",
    "Muon": "it orthogonalises matrices, and the values of a sparse layer are a vector",
}


def check(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise a ValueError unless the optimizer can follow a rewiring of these parameters.

    Args:
        optimizer: any torch optimizer.
        parameters: the values of sparse layers, by name.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    for name, reason in _REFUSED.items():
        if isinstance(optimizer, getattr(torch.optim, name, ())):
            raise ValueError(
                f"{name} cannot train sparse layers that are rewired: {reason}; use another"
            )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in held]
    if missing:
        raise ValueError(
            f"the optimizer does not hold {', '.join(missing)}: make it from the parameters of the "
            "sparsified model, or freeze these layers with requires_grad_(False)"
        )


def group_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """The param group that holds a parameter."""
    return next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))


Change = Callable[[Tensor, float], Tensor]  # state, fresh -> after the change


@torch.no_grad()
def carry(optimizer: Optimizer, parameter: nn.Parameter, source: Tensor | Change) -> dict[str, Any]:
    """The optimizer's state of a parameter whose connections are about to be replaced.

    Args:
        optimizer: holds the parameter, which still has its old values.
        parameter: one element per connection, or whatever ``source`` knows how to change.
        source: for every new connection where it stands now, -1 if it is grown; or a function that
            changes state of the parameter's shape, and is told what a fresh parameter gets.

    Raises:
        ValueError: for state that is neither of the parameter's shape nor a scalar.
    """
    old = optimizer.state.get(parameter, {})
    return {key: _carried(optimizer, parameter, key, value, source) for key, value in old.items()}


def _carried(
    optimizer: Optimizer, parameter: nn.Parameter, key: Any, value: Any, source: Tensor | Change
) -> Any:
    if not isinstance(value, Tensor):
        if value is None or isinstance(value, int | float | str):
            return value
    elif value.layout == torch.strided and value.shape == parameter.shape:
        fresh = _fresh(optimizer, parameter, key)
        if isinstance(source, Tensor):
            return sampling.follow(value.detach(), source, fresh)
        return source(value.detach(), fresh)
    elif value.dim() == 0:
        return value
    what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise ValueError(
        f"{type(optimizer).__name__} keeps {key!r} of {what} for {parameter.numel()} connections: it is "
        "not known how that follows a rewiring; use an optimizer with one element per connection"
    )


def _fresh(optimizer: Optimizer, parameter: nn.Parameter, key: Any) -> float:
    """What the optimizer gives a new parameter."""
    if isinstance(optimizer, torch.optim.Rprop) and key == "step_size":
        return float(group_of(optimizer, parameter)["lr"])
    if isinstance(optimizer, torch.optim.Adagrad) and key == "sum":
        return float(optimizer.defaults["initial_accumulator_value"])
    return 0.0


def put(optimizer: Optimizer, parameter: nn.Parameter, state: dict[str, Any]) -> None:
    """Give a parameter the state that :func:`carry` has made."""
    if state:
        optimizer.state[parameter].update(state)


def exchange(
    optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter, state: dict[str, Any]
) -> None:
    """Let the optimizer train another parameter in the place of one, with state from :func:`carry`."""
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    if optimizer.state.pop(old, None) is not None:
        optimizer.state[new] = state
