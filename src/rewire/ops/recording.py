"""Calling autograd functions cheaply."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``, without what torch looks at first for the sake of functorch."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """What torch's decorator of this name does, at no cost where no second derivative is asked for."""
    recorded = torch.autograd.function.once_differentiable(backward)

    @wraps(backward)
    def call(ctx: Any, *gradients: Any) -> Any:
        return (recorded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return call
