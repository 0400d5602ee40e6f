"""Choosing connections by their scores, and replacing them in a layer and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from rewire import optim, sampling
from rewire.connections import Connections
from rewire.methods.history import LayerRewiring
from rewire.methods.site import Site
from rewire.ops import sampling as ops


def select(sites: Sequence[Site], what: str, scores: Sequence[Tensor], k: int) -> None:
    """Mark, over these layers together, the k highest scores as ``"grown"``, or the k lowest, but never
    the best of a layer, as ``"pruned"``."""
    sizes = [len(subset_of(s)) if what == "grown" else s.layer.count for s in sites]
    for site, score, size in zip(sites, scores, sizes, strict=True):
        if score.numel() != size:
            rule = "growth" if what == "grown" else "survival"
            raise ValueError(
                f"{rule}() gave {score.numel()} scores for {size} connections of {site.name}"
            )
    flat = ops.joined([score.detach().cpu().flatten() for score in scores])
    if what == "pruned":
        for part in flat.split(sizes):
            keep_best(part)
    chosen = ops.select(flat, k, largest=what == "grown")
    for site, mask in zip(sites, chosen.split(sizes), strict=True):
        setattr(site, what, mask)


def keep_best(scores: Tensor) -> Tensor:
    """Put the best of the scores out of reach, in place."""
    if scores.numel():
        scores.nan_to_num_(-math.inf, math.inf, -math.inf)
        scores[scores.argmax()] = math.inf
    return scores


def subset_of(site: Site) -> Connections:
    """S, which is explored by now."""
    assert site.subset is not None
    return site.subset


def check_budget(sites: Sequence[Site], scope: str) -> None:
    """Raise a RuntimeError unless the model, or each layer, grows as much as it prunes."""
    for group in [sites] if scope == "global" else [[site] for site in sites]:
        counts = []
        for what in ("grown", "pruned"):
            masks = [getattr(site, what) for site in group]
            if any(mask is None for mask in masks):
                raise RuntimeError(f"choose() has not set {what!r} of every layer")
            counts.append(sum(ops.number(mask) for mask in masks))
        if counts[0] != counts[1]:
            names = ", ".join(site.name for site in group)
            raise RuntimeError(
                f"choose() grows {counts[0]} and prunes {counts[1]} connections of {names}: the number "
                "of connections must stay"
            )


# Replacing connections ----------------------------------------------------------------------------


class Change(NamedTuple):
    """What a layer is about to become: its connections, their values, and the state that follows them."""

    connections: Connections
    values: Tensor
    optimizer: optim.Carried
    state: dict[str, Tensor]


def plan(site: Site, optimizer: Optimizer) -> Change | None:
    """What a layer becomes, None if it stays as it is; nothing is changed yet."""
    layer, subset = site.layer, subset_of(site)
    assert site.pruned is not None
    assert site.grown is not None
    if not (ops.number(site.pruned) or ops.number(site.grown)):
        return None
    pruned, grown = site.pruned.cpu(), site.grown.cpu()
    rows, source = ops.replace(
        sampling.rows(site.active), pruned, sampling.rows(subset), grown, layer.n_in
    )
    connections = Connections(layer.n_in, layer.n_out, *rows)

    def follow(state: Tensor, fresh: float) -> Tensor:
        values = ops.follow(layer.gather(state), source, fresh)
        return layer.scatter(connections, values, fresh)

    return Change(
        connections,
        ops.follow(site.weights, source),
        optim.carry(optimizer, layer.parameter, follow),
        {key: ops.follow(tensor, source) for key, tensor in site.state.items()},
    )


def apply(site: Site, change: Change | None) -> None:
    """Make the change."""
    if change is not None:
        site.layer.set_connections(change.connections, change.values)
        optim.put(site.layer.parameter, change.optimizer)
        site.state = change.state
        site.count().add(sampling.rows(subset_of(site)), site.grown)


def part(site: Site) -> LayerRewiring:
    """What has happened to a layer."""

    def size(mask: Tensor | None) -> int:
        return 0 if mask is None else ops.number(mask)

    return LayerRewiring(
        active=site.layer.count,
        grown=size(site.grown),
        pruned=size(site.pruned),
        subset=_considered(site),
        ever=site.count().total(),
        possible=site.layer.n_in * site.layer.n_out,
    )


def _considered(site: Site) -> int:
    if site.considered is not None:
        return site.considered
    return 0 if site.subset is None else len(site.subset)
