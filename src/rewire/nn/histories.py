"""What autograd knows of a promise, for readers that we do not see: autograd functions, scripted code, full
backward hooks, activation checkpointing. What our own layers read has a history of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rewire.nn.state import TOO_LATE, State


class Link(torch.autograd.Function):
    """The history of a promise: computes the result again to differentiate it."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], state: State, *reads: Tensor) -> Tensor:
        ctx.state = state
        ctx.set_materialize_grads(False)
        state.announce(weakref.ref(ctx))
        return make()

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        wanted = ctx.needs_input_grad[2:]
        if dy is None:
            return (None,) * (2 + len(wanted))
        if ctx.state.watched:
            raise RuntimeError(TOO_LATE)
        # Computed again from copies, so that nothing flows past the tensors that it reads: one of them
        # may have been computed from another. In a pass that is recorded, they lead to these.
        recorded = torch.is_grad_enabled()
        copies = [
            tensor.view_as(tensor) if recorded else tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(ctx.state.reads, wanted, strict=True)
        ]
        result = ctx.state.again(copies)
        inputs = [copy for copy, needed in zip(copies, wanted, strict=True) if needed]
        grads = iter(
            torch.autograd.grad(result, inputs, dy, create_graph=recorded, allow_unused=True)
        )
        return None, None, *(next(grads) if needed else None for needed in wanted)


class Changed(torch.autograd.Function):
    """Gives a promise the history of what it has become by a change in place."""

    @staticmethod
    def forward(ctx: Any, pending: Tensor, new: Tensor) -> Tensor:
        ctx.mark_dirty(pending)
        ctx.set_materialize_grads(False)
        return pending

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        return None, dy


class Read(torch.autograd.Function):
    """The value of a promise as an ordinary tensor, with the history of the promise itself."""

    @staticmethod
    def forward(ctx: Any, pending: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None
