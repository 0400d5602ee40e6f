"""Carrying the state of any torch optimizer across a change of connections.

State of one element per connection follows it: survivors keep theirs, and grown connections get what the
optimizer gives a fresh parameter. What belongs to the parameter as a whole (step counts, None) stays. The
same holds for optimizers inside the given one, and for tensors that they keep outside of their state.

The values of a sparse layer are a column, (connections, 1). Optimizers that factor the second moment of a
matrix (Adafactor) keep its means over rows and over columns. A row of such a column is one connection, so
the first are state of one element per connection, and the second is one number: the mean of the first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rewire import wrappers

_REFUSED = {
    "LBFGS": "its history of whole gradients has no meaning for other connections",
    "SparseAdam": "it takes sparse gradients, and those of a sparse layer are dense over its connections",
    "Muon": "it orthogonalises matrices, and the values of a sparse layer are a single column",
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
            bad = tensor.dim() > 0 and not wrappers.fits(tensor, of)
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
    """Optimizer state of a parameter, after a change of its connections.

    Attributes:
        states: a ``state`` and its entry for the parameter.
        tensors: a tensor outside of ``state`` and its data.
    """

    states: list[tuple[Any, dict[str, Any]]]
    tensors: list[tuple[Tensor, Tensor]]


@torch.no_grad()
def carry(optimizer: Optimizer, parameter: nn.Parameter, change: Change) -> Carried:
    """Compute the optimizer's state of a parameter for its new connections.

    Args:
        optimizer: holds the parameter, which still has its old values.
        parameter: the weights of a layer.
        change: changes state of the parameter's shape, and receives what a fresh parameter gets.

    Raises:
        ValueError: for state that is neither of the parameter's shape nor a scalar, nor a factor of it.
    """
    states = []
    for one, state in _states(optimizer, parameter):
        old = state[parameter]
        states.append((state, {key: _carried(one, parameter, old, key, change) for key in old}))
    tensors = [
        (tensor, _changed(tensor, parameter, change, 0.0))
        for _, tensor, of in wrappers.kept(optimizer)
        if of is parameter and wrappers.fits(tensor, parameter)
    ]
    return Carried(states, tensors)


def _states(optimizer: Optimizer, parameter: Tensor) -> list[tuple[Optimizer, Any]]:
    """Every ``state`` with an entry for the parameter, and the optimizer that it belongs to."""
    found = wrappers.mappings(optimizer, parameter)
    return [(one, mapping) for one, name, mapping in found if name == "state"]


def _carried(
    optimizer: Optimizer, parameter: nn.Parameter, old: Mapping[Any, Any], key: Any, change: Change
) -> Any:
    value = old[key]
    if not isinstance(value, Tensor):
        if value is None or isinstance(value, int | float | str):
            return value
    elif value.dim() == 0:
        return value
    elif value.layout == torch.strided:
        rows = _rows(old, key) if _is_column(parameter) else None
        if rows is not None and value.numel() == 1 and wrappers.fits(rows, parameter):
            return _changed(rows, parameter, change, 0.0).mean().view(value.shape)
        if wrappers.fits(value, parameter):
            return _changed(value, parameter, change, _fresh(optimizer, parameter, key))
    what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise ValueError(
        f"{type(optimizer).__name__} keeps {key!r} of {what} for {parameter.numel()} connections: it is "
        "not known how that follows a rewiring; use an optimizer with one element per connection"
    )


def _changed(tensor: Tensor, parameter: Tensor, change: Change, fresh: float) -> Tensor:
    """A tensor that fits the parameter, after the change; a vector stays one."""
    after = change(tensor.detach().view(parameter.shape), fresh)
    return after if tensor.shape == parameter.shape else after.flatten()


def _is_column(parameter: Tensor) -> bool:
    return parameter.dim() == 2 and parameter.shape[1] == 1


def _rows(state: Mapping[Any, Any], key: Any) -> Tensor | None:
    """Of a matrix whose second moment is factored, the means over rows that belong to those over columns:
    ``row_var`` to ``col_var``, ``exp_avg_sq_row`` to ``exp_avg_sq_col``; None for other state."""
    rows = state.get(key.replace("col", "row")) if isinstance(key, str) and "col" in key else None
    return rows if isinstance(rows, Tensor) else None


def _fresh(optimizer: Optimizer, parameter: nn.Parameter, key: Any) -> float:
    """What the optimizer gives a new parameter."""
    if isinstance(optimizer, torch.optim.Rprop) and key == "step_size":
        return float(group_of(optimizer, parameter)["lr"])
    if isinstance(optimizer, torch.optim.Adagrad) and key == "sum":
        return float(optimizer.defaults["initial_accumulator_value"])
    return 0.0


def put(parameter: nn.Parameter, carried: Carried) -> None:
    """Set the state that :func:`carry` computed."""
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


def reshape_old_state(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Give state that was saved when the values of sparse layers were 1-D their shape of today.

    Rewirers do this to what their optimizer loads. Without one, call it after
    ``optimizer.load_state_dict``; an optimizer with such state raises at its next step, unless it is fused
    and does not look at shapes.

    Args:
        optimizer: has loaded its state; so have the optimizers inside it.
        parameters: of the model; those with other state are left alone. What is kept outside of ``state``
            has one element for each of their elements: load the model first.
    """
    columns = {id(parameter): parameter for parameter in parameters if _is_column(parameter)}
    for parameter in columns.values():
        for _, state in _states(optimizer, parameter):
            _reshape_entry(state[parameter])
    for _, tensor, of in wrappers.kept(optimizer):
        if of is not None and id(of) in columns and tensor.shape == of.shape[:1]:
            tensor.data = tensor.data.unsqueeze(1)


def _reshape_entry(entry: dict[Any, Any]) -> None:
    tensors = {k: v for k, v in entry.items() if isinstance(v, Tensor) and v.dim() > 0}
    factored = any(_rows(entry, key) is not None for key in tensors)
    shapes = {v.shape for v in tensors.values()}
    # Of any length: the model, with other connections, may be about to be loaded.
    if not factored and len(shapes) == 1 and len(shapes.pop()) == 1:
        entry.update({key: value.unsqueeze(1) for key, value in tensors.items()})


def weak_hook(method: Callable[[], None]) -> Callable[..., None]:
    """A hook for an optimizer that calls a bound method, and does nothing once its object is gone."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            alive()

    return hook
