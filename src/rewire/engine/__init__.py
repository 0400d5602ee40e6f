"""Record, plan, execute: what runs between the layers of a converted model.

Inside the call of a model for which the engine is on, sparse layers return lazy tensors, and torch
functions on these that the engine knows record nodes of a region instead of computing. A region runs as a
whole when somebody wants numbers, or when the model returns.
"""

from __future__ import annotations

from torch import nn

_HANDLES = "_rewire_engine"

__all__ = ["use_engine"]


def use_engine(model: nn.Module, on: bool = True) -> None:
    """Turn the engine on or off: run the layers of a converted model together, or one by one.

    :func:`rewire.sparsify` turns it on. Numbers and gradients are those of the layers one by one. Where
    something watches them (``torch.compile``, dispatch and function modes, activation checkpointing,
    backward hooks on modules, forward-mode derivatives), they run one by one anyway. :func:`rewire.explain`
    shows what it does with a model.

    Args:
        model: has sparse layers somewhere inside.
        on: False runs all layers one by one.
    """
    from rewire.engine import parse  # noqa: F401 (fills the table of functions)
    from rewire.engine.scope import enter, leave, stop
    from rewire.nn.sparse import SparseLayer  # layers know the engine

    stop()
    for module in model.modules():
        for handle in module.__dict__.pop(_HANDLES, ()):
            handle.remove()
    if not on:
        return
    for module in model.modules():
        if isinstance(module, SparseLayer):
            continue
        if any(isinstance(part, SparseLayer) for part in module.modules()):
            module.__dict__[_HANDLES] = (
                module.register_forward_pre_hook(enter, prepend=True),
                module.register_forward_hook(leave, always_call=True),
            )
