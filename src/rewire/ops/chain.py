"""Several autograd functions, one after the other, as one node of the graph.

What one hands to the next is seen by nobody else, so autograd need not know of it: that saves most of
the time between two kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rewire.ops import channels, differentiable, recording
from rewire.ops.topology import version


class Link(NamedTuple):
    """One call of ``function``: with what the link before it gives, then ``tensors``, then ``rest``.

    Attributes:
        function: an autograd function of one output. Its ``again(context, saved, first, *tensors)``
            computes the output in operations that autograd can differentiate.
        tensors: what besides the first argument may have a gradient.
        rest: what has none.
        after: called when the output is there.
    """

    function: type[torch.autograd.Function]
    tensors: tuple[Tensor | None, ...]
    rest: tuple[Any, ...]
    after: Callable[[], None] | None = None


class _Context:
    """What a link takes for autograd's context.

    Attributes:
        passed: in the backward pass, what the link after this one has handed back besides the gradient.
        hands_back: what this one does.
    """

    saved_tensors: tuple[Tensor | None, ...] = ()
    passed: Tensor | None = None
    hands_back: Tensor | None = None

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def now(self, saved: tuple[Tensor | None, ...], passed: Tensor | None) -> _Context:
        """The same in one backward pass; another one may be under way."""
        context = _Context.__new__(_Context)
        context.__dict__.update(self.__dict__, saved_tensors=saved, passed=passed)
        return context


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, links: Sequence[Link], *tensors: Tensor | None) -> Tensor:
        needs = iter(ctx.needs_input_grad[2:])
        first = ctx.needs_input_grad[0]
        ctx.steps = []
        saved: list[Tensor | None] = []
        for link in links:
            step = _Context((first, *islice(needs, len(link.tensors))))
            x = _call(link, step, x)
            first = first or any(step.needs_input_grad)
            saved += step.saved_tensors
            ctx.steps.append((step, link.function, len(step.saved_tensors)))
            step.saved_tensors = ()
        ctx.save_for_backward(*saved)
        # Not all of them are saved, since only a recorded backward pass needs the biases.
        ctx.tensors = tensors
        ctx.versions = [None if t is None else version(t) for t in tensors]
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _recorded(ctx, dy)
        saved, end = ctx.saved_tensors, len(ctx.saved_tensors)
        gradient: Tensor | None = dy
        passed: Tensor | None = None
        found: list[Tensor | None] = []
        for step, function, count in reversed(ctx.steps):
            now, end = step.now(saved[end - count : end], passed), end - count
            gradient, *others = function.backward(now, gradient)
            passed = now.hands_back
            found[:0] = others[: len(step.needs_input_grad) - 1]
        return gradient, None, *found


def _recorded(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of a chain in a backward pass that autograd records."""
    saved, tensors = iter(ctx.saved_tensors), ctx.tensors
    if ctx.versions != [None if t is None else version(t) for t in tensors]:
        raise RuntimeError(
            "a parameter of a layer was modified by an inplace operation since the forward pass; call "
            "the model again before differentiating twice"
        )
    steps = [(s, function.again, tuple(islice(saved, count))) for s, function, count in ctx.steps]

    def again(x: Tensor, *tensors: Tensor | None) -> Tensor:
        rest = iter(tensors)
        for step, function, kept in steps:
            x = function(step, kept, x, *islice(rest, len(step.needs_input_grad) - 1))
        return x

    needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[2:])
    first = steps[0][2][0]
    dx, *others = differentiable.gradients(again, (first, *tensors), needs, dy)
    return dx, None, *others


def run(x: Tensor, links: Sequence[Link]) -> Tensor:
    """The output of the last link."""
    if torch.is_grad_enabled():
        x = channels.ready(x)
        if len(links) == 1:
            (link,) = links
            result: Tensor = recording.apply(link.function, x, *link.tensors, *link.rest)
            if link.after is not None:
                link.after()
            return result
        tensors = [tensor for link in links for tensor in link.tensors]
        result = recording.apply(_Chain, x, links, *tensors)
        return result
    for link in links:
        x = _call(link, _Context((False,) * (1 + len(link.tensors))), x)
    return x


def _call(link: Link, step: Any, x: Tensor) -> Tensor:
    y: Tensor = link.function.forward(step, x, *link.tensors, *link.rest)
    if link.after is not None:
        link.after()
    return y
