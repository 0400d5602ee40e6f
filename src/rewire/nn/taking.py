"""Giving a module another ``forward``, and taking it back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


class _Ours(partial[Any]):
    """The ``forward`` of a module that was taken, with the module."""


def take(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let a module run ``forward(module, ...)``, unless it has a ``forward`` of its own."""
    module.__dict__.setdefault("forward", _Ours(forward, module))


def taken(module: nn.Module) -> bool:
    """Whether :func:`take` has done so."""
    return isinstance(module.__dict__.get("forward"), _Ours)


def leave(module: nn.Module) -> None:
    """Take :func:`take` back."""
    if taken(module):
        del module.__dict__["forward"]
