"""Layers under ``torch.fx.symbolic_trace``: one node each, as torch's own layers are."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Proxy


def is_symbolic(x: Any) -> bool:
    """Whether a layer is being traced, not run."""
    return isinstance(x, Proxy)


def node(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The call of a layer as a node of the graph that is being traced."""
    tracer: Any = args[0].tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), args, kwargs)
