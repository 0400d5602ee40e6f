"""Calling autograd functions cheaply."""

from __future__ import annotations

from typing import Any

import torch


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``, without what torch looks at first for the sake of functorch."""
    if torch.is_inference_mode_enabled() and torch.is_grad_enabled():
        with torch.no_grad():  # nothing is recorded there, but functions would be told to save
            return apply(function, *args)
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
