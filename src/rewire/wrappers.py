"""Optimizers inside optimizers, and what they keep about parameters outside of ``state``.

Wrappers such as SAM, Lookahead, or those of Lightning and accelerate hold the optimizer that does the
update in an attribute. Some optimizers keep copies of the weights in attributes of their own, by parameter
or in the order of their param groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

_DEPTH = 4  # of containers in an attribute


def optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer and all that it holds in attributes, directly or in containers; outer ones first."""
    found: dict[int, Optimizer] = {}
    waiting = [optimizer]
    while waiting:
        one = waiting.pop(0)
        if id(one) not in found:
            found[id(one)] = one
            waiting += [leaf for _, leaf in _attributes(one) if isinstance(leaf, Optimizer)]
    return list(found.values())


def held(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of its groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def mappings(optimizer: Optimizer, key: Tensor) -> list[tuple[Optimizer, str, Any]]:
    """All attributes that are mappings with this parameter as a key: owner, name and mapping.

    A mapping that several optimizers share belongs to the innermost of them.
    """
    found = {
        id(value): (one, name, value)
        for one in optimizers(optimizer)
        for name, value in vars(one).items()
        if isinstance(value, MutableMapping) and any(other is key for other in value)
    }
    return list(found.values())


def fits(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor has one element for each of a parameter: it is of its shape, or a vector if the
    parameter is a single column, as the values of a sparse layer are."""
    column = parameter.shape[1:] == (1,)
    return tensor.shape == parameter.shape or (column and tensor.shape == parameter.shape[:1])


class Kept(NamedTuple):
    """A tensor that an optimizer keeps outside of ``state``.

    Attributes:
        where: for messages.
        tensor: the tensor.
        of: the parameter that it belongs to, by its key or its place; None if that is not known.
    """

    where: str
    tensor: Tensor
    of: Tensor | None


def kept(optimizer: Optimizer) -> list[Kept]:
    """All tensors in attributes and param groups, but parameters and gradients; each of them once."""
    found: dict[int, Kept] = {}
    for one in optimizers(optimizer):
        parameters = held(one)
        known = {id(t) for p in parameters for t in (p, p.grad)}
        places = [(name, value, parameters) for name, value in _own(one)]
        for number, group in enumerate(one.param_groups):
            places += [
                (f"param_groups[{number}][{key!r}]", value, group["params"])
                for key, value in group.items()
                if key != "params"
            ]
        for name, value, order in places:
            for of, tensor in _tensors(value, order):
                if id(tensor) not in known:
                    found[id(tensor)] = Kept(f"{type(one).__name__}.{name}", tensor, of)
    return list(found.values())


def _own(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """The attributes that may hold tensors of parameters."""
    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups", "defaults"):
            yield name, value


def _attributes(optimizer: Optimizer) -> Iterator[tuple[Any, Any]]:
    for _, value in _own(optimizer):
        yield from _leaves(value)


def _tensors(value: Any, parameters: Sequence[Tensor]) -> Iterator[tuple[Tensor | None, Tensor]]:
    """Tensors in an attribute, with the parameter that each belongs to."""
    leaves = list(_leaves(value))
    if (
        isinstance(value, list | tuple)
        and len(leaves) == len(parameters)
        and all(
            isinstance(leaf, Tensor) and fits(leaf, parameter)
            for (_, leaf), parameter in zip(leaves, parameters, strict=True)
        )
    ):
        yield from zip(parameters, [leaf for _, leaf in leaves], strict=True)
        return
    for key, leaf in leaves:
        if isinstance(leaf, Tensor):
            yield key, leaf


def _leaves(value: Any, key: Tensor | None = None, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """What is in nested containers, each with the innermost tensor that is a key on the way to it."""
    if depth > _DEPTH:
        return
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _leaves(one, name if isinstance(name, Tensor) else key, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from _leaves(one, key, depth + 1)
    else:
        yield key, value
