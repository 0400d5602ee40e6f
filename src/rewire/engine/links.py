"""Regions as chains of autograd functions, so that gradients are there as soon as they are final.

A region that is one function gives autograd all its gradients at the end of its backward pass. Where
processes cooperate that is too late: what averages gradients (``rewire.distributed.Parallel``, torch's DDP)
sends those of the last layers while the first ones are still being computed. There a region is a chain::

    link <- link <- region            each of them a function of some inputs of the region

The region computes everything, and starts the backward pass. Each one runs a segment of the backward
steps and returns the gradients that are final then; autograd accumulates them, and calls the hooks
of parameters, before it goes to the next link. What connects two links is an empty tensor, the token. Its
gradient carries the backward pass from link to link, so each pass has its own, which is gone when autograd
drops it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rewire.engine import private
from rewire.engine.plan import Segment


class Gradients(Protocol):
    """Where the links of a chain get their gradients from, one after another."""

    def take(self, segment: Segment, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Those of the inputs of a segment that are wanted."""
        ...


class Known:
    """Gradients that have all been computed."""

    def __init__(self, grads: list[Tensor | None]) -> None:
        self._grads = grads

    def take(self, segment: Segment, wanted: Sequence[bool]) -> list[Tensor | None]:
        pairs = zip(segment.inputs, wanted, strict=True)
        return [self._grads[k] if want else None for k, want in pairs]


def wanted() -> bool:
    """Whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def chain(segments: Sequence[Segment], tensors: Sequence[Tensor]) -> Tensor | None:
    """Links for all segments but the first; returns what the region depends on to be behind them."""
    token: Tensor | None = None
    for segment in reversed(segments):
        read, mine = ([tensors[k] for k in ks] for ks in (segment.reads, segment.inputs))
        token = private.apply(_Link, segment, read, token, *mine)
    return token


def hand_on(gradients: Gradients) -> Tensor:
    """The gradient of a token."""
    token = _token()
    token.gradients = gradients  # type: ignore[attr-defined]
    return token


class _Link(torch.autograd.Function):
    """The inputs of one segment."""

    @staticmethod
    def forward(
        ctx: Any, segment: Segment, read: list[Tensor], token: Tensor | None, *mine: Tensor
    ) -> Tensor:
        ctx.segment = segment
        ctx.save_for_backward(*read)
        return _token()

    @staticmethod
    def backward(ctx: Any, token: Any) -> Any:
        _ = ctx.saved_tensors  # raises if something that the steps read was changed since
        further, *wanted = ctx.needs_input_grad[2:]
        found = token.gradients.take(ctx.segment, wanted)
        return None, None, token if further else None, *found


def _token() -> Tensor:
    return torch.empty(0, dtype=torch.float32, device="cpu")  # whatever the defaults are by then
