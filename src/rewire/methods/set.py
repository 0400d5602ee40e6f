"""Sparse evolutionary training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from rewire import sampling
from rewire.connections import Connections
from rewire.methods.arguments import Fraction, check_choice
from rewire.methods.base import Rewirer
from rewire.methods.change import select, spare
from rewire.methods.layer_view import LayerView
from rewire.methods.sharing import share_at_random, share_out

GROWTH = ("uniform", "proportional")


class SET(Rewirer):
    """Sparse evolutionary training: the smallest weights go, and as many connections grow at random.

    The weights of all layers are compared, and every inactive connection of the model is as likely to grow
    as any other; with ``scope="layer"``, as in the original, each layer keeps its number of connections.

    Args:
        model, optimizer, every, until, fraction, scope, seed: see :class:`Rewirer`.
        growth: ``"uniform"`` over all inactive connections that are compared, or ``"proportional"``: a
            layer grows in proportion to its active ones, and uniformly within it.

    Reference: Mocanu et al., *Scalable training of artificial neural networks with adaptive sparse
    connectivity inspired by network science*, 2018.
    """

    guided = False
    settings: ClassVar[tuple[str, ...]] = (*Rewirer.settings, "growth_rule")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int = 1000,
        until: int,
        fraction: Fraction = 0.2,
        growth: str = "uniform",
        scope: str = "global",
        seed: int = 0,
    ) -> None:
        check_choice("growth", growth, GROWTH)
        self.growth_rule = growth
        super().__init__(
            model, optimizer, every=every, until=until, fraction=fraction, scope=scope, seed=seed
        )

    def choose(self, views: Sequence[LayerView]) -> None:
        """Prune by magnitude, and grow as many anywhere."""
        for group in self.groups(views):
            active, free = [view.layer.count for view in group], [view.free for view in group]
            k = min(sampling.ceil(self.alpha(self.t) * sum(active)), sum(free), spare(active))
            select(group, "pruned", [self.survival(view) for view in group], k)
            if self.growth_rule == "uniform":
                counts = share_at_random(k, free, group[0].stream)
            else:
                counts = share_out(k, active, free)
            for view, count in zip(group, counts, strict=True):
                view.subset = view.choose(count)
                view.grown = torch.ones(count, dtype=torch.bool)

    def explore(self, view: LayerView) -> Connections:
        """Nothing yet: how much a layer grows depends on the others."""
        return view.choose(0)
