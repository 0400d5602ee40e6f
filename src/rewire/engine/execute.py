"""Running a graph as one function of autograd, or a chain of them, by its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.engine import links, private
from rewire.engine.graph import Graph
from rewire.engine.lazy import data_of
from rewire.engine.links import Gradients, Known
from rewire.engine.ops import interpret
from rewire.engine.plan import Segment
from rewire.engine.planned import Backward, Planned
from rewire.engine.run import Data, Run
from rewire.ops import native


def derivatives(
    graph: Graph,
    tensors: Sequence[Tensor | None],
    data: Data,
    grads: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of the inputs that are wanted; differentiable themselves if gradient mode is on."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        values = interpret(graph.nodes, tensors, data._replace(effects=False))
    given = [
        (values[i], grad)
        for i, grad in zip(graph.outputs, grads, strict=True)
        if grad is not None and values[i].requires_grad
    ]
    inputs = [t for t, want in zip(tensors, wanted, strict=True) if want and t is not None]
    if not given or not inputs:
        return [None] * len(tensors)
    found = iter(
        torch.autograd.grad(
            [value for value, _ in given],
            inputs,
            [grad for _, grad in given],
            create_graph=again,
            allow_unused=True,
        )
    )
    return [
        next(found) if want and t is not None else None
        for t, want in zip(tensors, wanted, strict=True)
    ]


_plans: dict[Any, Planned] = {}
_MOST = 256  # graphs whose plans are kept


class _Region(torch.autograd.Function):
    """A graph to autograd: a function of all its inputs, parameters included.

    In a chain (:mod:`rewire.engine.links`) it is the last link, a function of the inputs of the first
    segment and of the link before it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        planned: Planned,
        data: Data,
        written: list[bool],
        segment: Segment,
        tensors: list[Tensor],
        token: Tensor | None,
        *mine: Tensor,
    ) -> Any:
        run = Run([data_of(t) for t in tensors], data)
        outputs = planned.forward(run)
        ctx.planned, ctx.data, ctx.use, ctx.segment = planned, data, run.use, segment
        # Autograd keeps inputs and arena: it notices changes in place, and lets them go when it is done.
        kept = [None if w else t for t, w in zip(tensors, written, strict=True)]
        for (
            k
        ) in planned.statistics:  # which a batch norm in training mode would change without notice
            kept[k] = tensors[k].clone()
        ctx.save_for_backward(run.arena, *kept)
        ctx.set_materialize_grads(False)
        nodes, _, leaving = planned.graph
        ctx.mark_non_differentiable(
            *(y for y, i in zip(outputs, leaving, strict=True) if not nodes[i].requires_grad)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        arena, *saved = ctx.saved_tensors
        token, *wanted = ctx.needs_input_grad[5:]
        gradients: Gradients
        if torch.is_grad_enabled():
            with private.without_functions():
                # Each input gets a place of its own: one of them may be a function of another.
                tensors = [None if t is None else t.view_as(t) for t in saved]
            all_wanted = [token and t is not None and t.requires_grad for t in tensors]
            for k, want in zip(ctx.segment.inputs, wanted, strict=True):
                all_wanted[k] = want
            gradients = Known(derivatives(ctx.planned.graph, tensors, ctx.data, grads, all_wanted))
        else:
            run = Run([None if t is None else data_of(t) for t in saved], ctx.data)
            run.arena, run.use = arena, ctx.use
            gradients = Backward(ctx.planned, run, grads)
        found = gradients.take(ctx.segment, wanted)
        return *(None,) * 5, links.hand_on(gradients) if token else None, *found


def plan_of(key: Any) -> Planned:
    """The plan of a graph, which is made once."""
    kind = native.instruction_set()
    planned = _plans.get((kind, key))
    if planned is None:
        if len(_plans) >= _MOST:
            _plans.clear()
        planned = _plans[kind, key] = Planned(Graph.of(*key))
    return planned


def run(
    key: Any, tensors: list[Tensor], written: list[bool], data: Data, grad: bool
) -> Sequence[Tensor]:
    """The outputs of a graph, given as a plain tuple of its nodes, inputs and outputs.

    Args:
        key: what :meth:`rewire.engine.graph.Graph.of` takes.
        tensors: its inputs.
        written: which of them are running statistics that are updated.
        data: what else its nodes refer to.
        grad: whether autograd records.
    """
    planned = plan_of(key)
    if grad and any(node[4] for node in key[0]):
        segment, *earlier = planned.segments if links.wanted() else [planned.whole]
        token = links.chain(earlier, tensors)
        mine = [tensors[k] for k in segment.inputs]
        outputs: Sequence[Tensor] = private.apply(
            _Region, planned, data, written, segment, tensors, token, *mine
        )
        return outputs
    return planned.forward(Run([data_of(t) for t in tensors], data))
