"""Rewiring alike in several processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rewire.communication import Alone, fingerprint
from rewire.connections import Connections
from rewire.methods.change import subset_of
from rewire.methods.site import Site


def average(sites: Sequence[Site], group: Alone, t: int) -> None:
    """Give all processes the same subsets, and the gradients there of the whole batch."""
    if group.world == 1:
        return
    everywhere = group.gather([site.dense is not None for site in sites])
    for site, ranks in zip(sites, zip(*everywhere, strict=True), strict=True):
        if any(ranks):
            site.look_at_all()
    explored = group.gather([site.gradient is not None for site in sites])
    shared = []
    for site, ranks in zip(sites, zip(*explored, strict=True), strict=True):
        if any(ranks):
            shared.append(site)
        if any(ranks) and not all(ranks):
            site.take_subset(group, ranks.index(1))
    if not shared:
        return
    check_alike({s.name: (s.active, subset_of(s)) for s in shared}, group, "before", t)
    sums = group.sum(*(site.gradient for site in shared if site.gradient is not None))
    for site, gradient in zip(shared, sums, strict=True):
        site.gradient = gradient / group.world


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
