"""Checks of the arguments of methods; errors say what is wrong and what to give instead."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

Fraction = float | Callable[[int], float]


def check_schedule(every: int, until: int | None, fraction: Fraction) -> None:
    """Raise unless there is a first rewiring, and a share of the connections to replace."""
    if check_integer("every", every) < 1:
        raise ValueError(f"every must be at least 1 step, got {every}")
    if until is None and not callable(fraction):
        raise ValueError(
            "until is missing: say at which step the fraction has come down to zero, or give a function "
            "of the step as fraction"
        )
    if until is not None and check_integer("until", until) < every:
        raise ValueError(
            f"until is {until}, before the first rewiring at {every}: raise until, or lower every"
        )
    if not callable(fraction) and not 0 < check_number("fraction", fraction) < 1:
        raise ValueError(f"fraction must be in (0, 1), or a function of the step, got {fraction}")


def check_integer(name: str, value: Any) -> int:
    """The value as an int; raise a TypeError unless it is a whole number by type."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an integer, got {value!r}: round it, as in {name}=int(...)"
        ) from None


def check_number(name: str, value: Any) -> float:
    """The value; raise a TypeError unless it is a number."""
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    return float(value)


def copy_of(name: str, value: Any) -> Tensor:
    """A copy of an ordinary tensor; raise a ValueError for anything else."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        kind = f"{value.layout} on {value.device}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name} must be a tensor with its numbers, got {kind}")
    return value.detach().clone()


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise a ValueError unless ``value`` is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
