"""Choosing connections by their scores, and replacing them in a layer and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from rewire import optim, sampling
from rewire.connections import Connections
from rewire.methods.history import LayerRewiring
from rewire.methods.layer_view import LayerView
from rewire.ops import sampling as ops


def topk(scores: Sequence[Tensor], k: int) -> list[Tensor]:
    """Masks of the k highest of all these scores, in linear time; of equal ones the first."""
    flat = ops.joined([score.detach().cpu().flatten() for score in scores])
    return list(ops.select(flat, k).split([score.numel() for score in scores]))


def lowest(scores: Sequence[Tensor], k: int) -> list[Tensor]:
    """Masks of the k lowest of all these scores, but never the best of a layer, in linear time."""
    sizes = [score.numel() for score in scores]
    flat = ops.joined([score.detach().cpu().flatten() for score in scores])
    for part in flat.split(sizes):
        keep_best(part)
    return list(ops.select(flat, k, largest=False).split(sizes))


def spare(counts: Iterable[int]) -> int:
    """How many connections :func:`lowest` can take from layers of so many: all but one of each."""
    return sum(max(0, count - 1) for count in counts)


def select(views: Sequence[LayerView], what: str, scores: Sequence[Tensor], k: int) -> None:
    """Mark, over these layers together, the k highest scores as ``"grown"``, or the k lowest, but never
    the best of a layer, as ``"pruned"``."""
    sizes = [len(subset_of(s)) if what == "grown" else s.layer.count for s in views]
    for view, score, size in zip(views, scores, sizes, strict=True):
        if score.numel() != size:
            rule = "growth" if what == "grown" else "survival"
            raise ValueError(
                f"{rule}() gave {score.numel()} scores for {size} connections of {view.name}"
            )
    masks = topk(scores, k) if what == "grown" else lowest(scores, k)
    for view, mask in zip(views, masks, strict=True):
        setattr(view, what, mask)


def keep_best(scores: Tensor) -> Tensor:
    """Put the best of the scores out of reach, in place."""
    if scores.numel():
        scores.nan_to_num_(-math.inf, math.inf, -math.inf)
        scores[scores.argmax()] = math.inf
    return scores


def subset_of(view: LayerView) -> Connections:
    """The subset S; raises if there is none yet."""
    assert view.subset is not None
    return view.subset


def check_budget(views: Sequence[LayerView], scope: str) -> None:
    """Raise a RuntimeError unless the model, or each layer, grows as much as it prunes."""
    for group in [views] if scope == "global" else [[view] for view in views]:
        counts = []
        for what in ("grown", "pruned"):
            masks = [getattr(view, what) for view in group]
            if any(mask is None for mask in masks):
                raise RuntimeError(f"choose() has not set {what!r} of every layer")
            counts.append(sum(ops.number(mask) for mask in masks))
        if counts[0] != counts[1]:
            names = ", ".join(view.name for view in group)
            raise RuntimeError(
                f"choose() grows {counts[0]} and prunes {counts[1]} connections of {names}: the number "
                "of connections must stay"
            )


def check_lengths(
    views: Sequence[LayerView], states: Sequence[Mapping[str, Tensor]], scope: str | None
) -> None:
    """Raise a ValueError unless saved tensors have an element for each connection of a layer; where
    connections move between layers, of the model, whose own state may be loaded later."""
    pairs = list(zip(views, states, strict=True))
    for group in [pairs] if scope == "global" else [[pair] for pair in pairs]:
        count = sum(view.layer.count for view, _ in group)
        for key in {key for _, state in group for key in state}:
            length = sum(state[key].numel() for _, state in group if key in state)
            if length != count:
                names = ", ".join(view.name for view, _ in group)
                raise ValueError(
                    f"the state does not fit: {key} is of {length} connections, and {names} has "
                    f"{count}; make the model as it was made then"
                )


# Replacing connections ----------------------------------------------------------------------------


class Replaced(NamedTuple):
    """The connections of a layer after some were pruned and others grown.

    Attributes:
        connections: A without P and with G.
        source: where each of them stood before; -1 if it is grown.
        pruned, grown: masks over the former A (P) and over S (G).
    """

    connections: Connections
    source: Tensor
    pruned: Tensor
    grown: Tensor

    def follow(self, tensor: Tensor, fresh: float = 0.0) -> Tensor:
        """Elements of the former connections, carried over to the new ones; ``fresh`` for grown ones."""
        return ops.follow(tensor, self.source, fresh)


def replace(active: Connections, pruned: Tensor, subset: Connections, grown: Tensor) -> Replaced:
    """The connections ``(A - P) + G``, with P a mask over A and G one over S."""
    pruned, grown = pruned.cpu(), grown.cpu()
    a, s = sampling.rows(active), sampling.rows(subset)
    rows, source = ops.replace(a, pruned, s, grown, active.n_in)
    return Replaced(active.domain.of(*rows), source, pruned, grown)


class Change(NamedTuple):
    """What a layer is about to become: its connections, their values, and the state that follows them."""

    connections: Connections
    values: Tensor
    optimizer: optim.Carried
    state: dict[str, Tensor]


def plan(view: LayerView, optimizer: Optimizer) -> Change | None:
    """What a layer becomes, None if it stays as it is; nothing is changed yet."""
    layer, subset = view.layer, subset_of(view)
    assert view.pruned is not None
    assert view.grown is not None
    view.check_units(subset)
    for what, mask, count in (
        ("pruned", view.pruned, layer.count),
        ("grown", view.grown, len(subset)),
    ):
        if mask.dtype != torch.bool or tuple(mask.shape) != (count,):
            raise ValueError(
                f"choose() has set {what!r} of {view.name} to {mask.dtype} of shape {tuple(mask.shape)}, "
                f"expected a boolean mask of {count} connections"
            )
    if not (ops.number(view.pruned) or ops.number(view.grown)):
        return None
    view.check_state()
    after = view.after or replace(view.active, view.pruned, subset, view.grown)

    def follow(state: Tensor, fresh: float) -> Tensor:
        values = after.follow(layer.gather(state), fresh)
        return layer.scatter(after.connections, values, fresh)

    return Change(
        after.connections,
        after.follow(view.weights).to(layer.parameter.dtype),
        optim.carry(optimizer, layer.parameter, follow),
        {key: after.follow(tensor) for key, tensor in view.state.items()},
    )


def apply(view: LayerView, change: Change | None) -> None:
    """Apply the change to the layer and its optimizer."""
    if change is not None:
        view.layer.set_connections(change.connections, change.values)
        optim.put(view.layer.parameter, change.optimizer)
        view.state = change.state
        view.count().add(sampling.rows(subset_of(view).packed()), view.grown)


def part(view: LayerView) -> LayerRewiring:
    """What the rewiring did to the layer, for the history."""

    def size(mask: Tensor | None) -> int:
        return 0 if mask is None else ops.number(mask)

    return LayerRewiring(
        active=view.layer.count,
        grown=size(view.grown),
        pruned=size(view.pruned),
        subset=_considered(view),
        ever=view.count().total(),
        possible=view.layer.domain.size,
    )


def _considered(view: LayerView) -> int:
    if view.considered is not None:
        return view.considered
    return 0 if view.subset is None else len(view.subset)
