"""Rewiring alike in several processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rewire.communication import Alone, fingerprint
from rewire.connections import Connections
from rewire.methods.change import subset_of
from rewire.methods.layer_view import LayerView


def average(views: Sequence[LayerView], group: Alone, t: int) -> None:
    """Give all processes the same subsets, and the gradients there of the whole batch."""
    if group.world == 1:
        return
    everywhere = group.gather([view.dense is not None for view in views])
    for view, ranks in zip(views, zip(*everywhere, strict=True), strict=True):
        if any(ranks):
            view.look_at_all()
    explored = group.gather([view.gradient is not None for view in views])
    shared = []
    for view, ranks in zip(views, zip(*explored, strict=True), strict=True):
        if any(ranks):
            shared.append(view)
        if any(ranks) and not all(ranks):
            view.take_subset(group, ranks.index(1))
    if not shared:
        return
    check_alike({s.name: (s.active, subset_of(s)) for s in shared}, group, "before", t)
    sums = group.sum(*(view.gradient for view in shared if view.gradient is not None))
    for view, gradient in zip(shared, sums, strict=True):
        view.gradient = gradient / group.world


def check_alike(sets: Mapping[str, Sequence[Connections]], group: Alone, when: str, t: int) -> None:
    """Raise, before anything is changed, if other processes have other connections."""
    if group.world > 1:
        hashes = {
            name: fingerprint(*(tensor for c in some for tensor in (c.indptr, c.indices)))
            for name, some in sets.items()
        }
        group.agree(
            hashes, f"the processes have different connections {when} the rewiring of step {t}"
        )
