"""Carrying the state of any torch optimizer across a change of connections.

State of one element per connection follows it: survivors keep theirs, and grown connections get what the
optimizer gives a fresh parameter. What belongs to the parameter as a whole (step counts, None) stays. The
same holds for optimizers inside the given one, and for tensors that they keep outside of their state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rewire import wrappers
from rewire.ops import sampling

_REFUSED = {
    "LBFGS": "its history of whole gradients has no meaning for other connections",
    "SparseAdam": "it takes sparse gradients, and those of a sparse layer are dense over its connections",
    "Muon": "it orthogonalises matrices, and the values of a sparse layer are a vector",
    "ZeroRedundancyOptimizer": "each process holds the state of its own share of the parameters alone",
}


def check(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise a ValueError unless the optimizer can follow a rewiring of these parameters.

    Args:
        optimizer: any torch optimizer.
        parameters: the values of sparse layers, by name.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    for one in wrappers.optimizers(optimizer):
        kinds = {kind.__name__ for kind in type(one).__mro__}
        for name in kinds & set(_REFUSED):
            raise ValueError(
                f"{name} cannot train sparse layers that are rewired: {_REFUSED[name]}; use another"
            )
    _check_held(optimizer, parameters)
    _check_kept(optimizer, parameters)


def _check_held(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise a ValueError unless the optimizer, and those inside it together, hold the parameters."""
    outer, *inner = wrappers.optimizers(optimizer)
    own = set(map(id, wrappers.held(outer)))
    missing = [name for name, parameter in parameters.items() if id(parameter) not in own]
    if missing:
        raise ValueError(
            f"the optimizer does not hold {', '.join(missing)}: make it from the parameters of the "
            "sparsified model, or freeze these layers with requires_grad_(False)"
        )
    theirs = {id(p) for one in inner for p in wrappers.held(one)}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in theirs]
    if inner and missing:
        kinds = ", ".join(type(one).__name__ for one in inner)
        raise ValueError(
            f"{type(outer).__name__} holds {', '.join(missing)}, but the optimizer inside it ({kinds}) "
            "does not: state of shards or of master copies cannot follow a rewiring; use an optimizer "
            "whose state is that of the model's own parameters"
        )


def _check_kept(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise a ValueError for tensors outside of ``state`` that seem to belong to these parameters, if it
    is not known how they follow."""
    ours = set(map(id, parameters.values()))
    sizes = {parameter.numel(): name for name, parameter in parameters.items()}
    for one in wrappers.optimizers(optimizer):
        groups = [group["params"] for group in one.param_groups]
        for joined in [*groups, wrappers.held(one)]:  # they may lie in one flat buffer
            if ours & set(map(id, joined)):
                sizes.setdefault(
                    sum(p.numel() for p in joined), "the parameters of a group together"
                )
    for where, tensor, of in wrappers.kept(optimizer):
        if id(of) in ours and of is not None:
            bad = tensor.dim() > 0 and tensor.shape != of.shape
        else:
            bad = of is None and tensor.numel() > 1 and tensor.numel() in sizes
        if bad:
            raise ValueError(
                f"{where} holds a tensor of shape {tuple(tensor.shape)}, which may belong to "
                f"{sizes.get(tensor.numel(), 'a sparse layer')}: it is not known how that follows a "
                "rewiring; keep it in the optimizer's state, by parameter and of its shape, or use another "
                "optimizer"
            )


def group_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """The param group that holds a parameter."""
    return next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))


Change = Callable[[Tensor, float], Tensor]  # state, fresh -> after the change


class Carried(NamedTuple):
    """What all optimizers keep about a parameter, after a change of its connections.

    Attributes:
        states: a ``state`` and its entry for the parameter.
        tensors: a tensor outside of ``state`` and its data.
    """

    states: list[tuple[Any, dict[str, Any]]]
    tensors: list[tuple[Tensor, Tensor]]


@torch.no_grad()
def carry(optimizer: Optimizer, parameter: nn.Parameter, source: Tensor | Change) -> Carried:
    """What the optimizer keeps about a parameter whose connections are about to be replaced.

    Args:
        optimizer: holds the parameter, which still has its old values.
        parameter: one element per connection, or whatever ``source`` knows how to change.
        source: for every new connection where it stands now, -1 if it is grown; or a function that
            changes state of the parameter's shape, and is told what a fresh parameter gets.

    Raises:
        ValueError: for state that is neither of the parameter's shape nor a scalar.
    """
    states = [
        (state, {k: _carried(one, parameter, k, v, source) for k, v in state[parameter].items()})
        for one, name, state in wrappers.mappings(optimizer, parameter)
        if name == "state"
    ]
    tensors = [
        (tensor, _changed(tensor, source, 0.0))
        for _, tensor, of in wrappers.kept(optimizer)
        if of is parameter and tensor.shape == parameter.shape
    ]
    return Carried(states, tensors)


def _changed(tensor: Tensor, source: Tensor | Change, fresh: float) -> Tensor:
    if isinstance(source, Tensor):
        return sampling.follow(tensor.detach(), source, fresh)
    return source(tensor.detach(), fresh)


def _carried(
    optimizer: Optimizer, parameter: nn.Parameter, key: Any, value: Any, source: Tensor | Change
) -> Any:
    if not isinstance(value, Tensor):
        if value is None or isinstance(value, int | float | str):
            return value
    elif value.layout == torch.strided and value.shape == parameter.shape:
        return _changed(value, source, _fresh(optimizer, parameter, key))
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


def put(parameter: nn.Parameter, carried: Carried) -> None:
    """Give a parameter what :func:`carry` has made."""
    for state, entry in carried.states:
        state[parameter].update(entry)
    for tensor, data in carried.tensors:
        tensor.data = data


def exchange(optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter, carried: Carried) -> None:
    """Let the optimizer train another parameter in the place of one, with what :func:`carry` has made."""
    put(old, carried)
    for one in wrappers.optimizers(optimizer):
        for group in one.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
    for _, _, mapping in wrappers.mappings(optimizer, old):
        mapping[new] = mapping.pop(old)
