"""Lowering of the moments of group norms."""

from __future__ import annotations

from typing import Any

from rewire.engine.graph import Node
from rewire.engine.lowering.base import Lowering, attrs_of
from rewire.engine.plan import Buffer


def group_moments(low: Lowering, index: int, node: Node) -> None:
    source, weight = node.inputs
    assert source is not None
    x, attrs = low.value(source), attrs_of(node)
    moments = low.stored[index] = low.new(node.shape, node.dtype)
    inverse = low.vector(x.shape[0], attrs.groups) if node.requires_grad else None
    sizes: dict[str, Any] = {"images": low.images(x), "groups": attrs.groups}
    given = {"weight": low.parameter(weight), "x": x}
    low.emit(
        "GroupMoments",
        index,
        **sizes,
        eps=attrs.eps,
        **given,
        out_moments=moments,
        out_inverse=inverse,
    )

    def backward() -> None:
        dmoments = low.gradient(index)
        if dmoments is None:
            return
        wanted = low.uses.requires_grad(source)
        more = _beside(low, source, x) if wanted else None
        dx = low.like(x) if wanted else None
        low.emit(
            "GroupMomentsBackward",
            index,
            **sizes,
            **given,
            moments=moments,
            inverse=inverse,
            dmoments=dmoments,
            more=more,
            out_dx=dx,
            out_dweight=low.parameter_gradient(weight),
        )
        low.contribute(source, dx)

    if node.requires_grad:
        low.backwards.append(backward)


def _beside(low: Lowering, ref: int, x: Buffer) -> Buffer | None:
    """A part of the gradient of a value that is there already: the next one is added to it."""
    parts = low.gradients.get(ref, [])
    fits = parts and parts[-1].window is None and parts[-1].layout is x.layout
    return parts.pop() if fits else None
