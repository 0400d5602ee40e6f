"""Dynamic sparse reparameterization."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from rewire.connections import Connections
from rewire.methods.arguments import Fraction, check_number
from rewire.methods.base import Rewirer
from rewire.methods.change import keep_best, select
from rewire.methods.layer_view import LayerView
from rewire.methods.sharing import share_out


class DSR(Rewirer):
    """Dynamic sparse reparameterization: one threshold for all layers, regrowth where weights survive.

    Weights below the threshold are pruned. It halves when more than 1.1 times the wanted number was
    pruned and doubles when it was less than 0.9 times. As many connections grow at random, shared out
    among layers in proportion to their survivors.

    Args:
        model, optimizer, every, until, fraction, seed: see :class:`Rewirer`; ``fraction`` is the share
            of the connections that is wanted pruned.
        threshold: the first one.
        scope: one threshold for all layers is the method, so ``"global"`` is all there is.

    Reference: Mostafa and Wang, *Parameter efficient training of deep convolutional neural networks by
    dynamic sparse reparameterization*, 2019.
    """

    guided = False
    settings: ClassVar[tuple[str, ...]] = (*Rewirer.settings, "threshold")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int = 1000,
        until: int,
        fraction: Fraction = 0.2,
        threshold: float = 1e-3,
        scope: str = "global",
        seed: int = 0,
    ) -> None:
        if scope != "global":
            raise ValueError(
                'DSR compares the weights of all layers: leave scope at "global", or use SET'
            )
        if not 0 < check_number("threshold", threshold) < math.inf:
            raise ValueError(f"threshold must be positive and finite, got {threshold}")
        self.threshold = threshold
        super().__init__(
            model, optimizer, every=every, until=until, fraction=fraction, scope=scope, seed=seed
        )

    def choose(self, views: Sequence[LayerView]) -> None:
        """Prune below the threshold, grow in proportion to what survives, adapt the threshold."""
        scores = [keep_best(self.survival(view)) for view in views]
        below = sum(int((score < self.threshold).sum()) for score in scores)
        pruned = min(below, sum(view.free for view in views))
        select(views, "pruned", scores, pruned)
        survivors = [int((~view.pruned).sum()) for view in views if view.pruned is not None]
        counts = share_out(pruned, survivors, [view.free for view in views])
        for view, count in zip(views, counts, strict=True):
            view.subset = view.choose(count)
            view.grown = torch.ones(count, dtype=torch.bool)
        wanted = self.alpha(self.t) * sum(view.layer.count for view in views)
        if below > 1.1 * wanted:
            self.threshold /= 2
        elif below < 0.9 * wanted:
            self.threshold *= 2

    def explore(self, view: LayerView) -> Connections:
        """Nothing yet: how much a layer grows depends on what is pruned."""
        return view.choose(0)
