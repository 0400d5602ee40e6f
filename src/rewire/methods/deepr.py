"""Deep rewiring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rewire import optim
from rewire.connections import Connections
from rewire.methods.arguments import check_number
from rewire.methods.base import Rewirer
from rewire.methods.change import keep_best, select
from rewire.methods.layer_view import LayerView
from rewire.methods.sharing import share_out


class DeepR(Rewirer):
    r"""Deep rewiring: weights of fixed sign walk at random, and rest when they would change it.

    A weight is ``w = s * theta`` with a fixed sign s. The optimizer's update is followed by
    ``theta -= lr * l1 - sqrt(2 * lr * temperature) * nu`` with normal noise nu; connections with
    ``theta < 0`` become dormant, and as many dormant ones wake at random with ``theta = 0`` and a random
    sign. A layer's largest theta never goes; where it is negative it is set to zero.

    Args:
        model, optimizer, seed: see :class:`Rewirer`; signs are those of the model's weights now.
        every: steps from one such walk to the next; at every step in the paper.
        until: the last step that may end with one; None for no end.
        l1: the prior's pull towards zero.
        temperature: of the random walk; by default ``lr * l1**2 / 18``, the authors' choice.
        scope: keep the number of connections of each layer (``"layer"``) or of the model
            (``"global"``), where those that wake are spread over all dormant ones.

    Reference: Bellec et al., *Deep rewiring: training very sparse deep networks*, 2018.
    """

    guided = False
    settings: ClassVar[tuple[str, ...]] = (
        *("every", "until", "scope", "seed"),
        *("l1", "temperature"),
    )

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int = 1,
        until: int | None = None,
        l1: float = 1e-4,
        temperature: float | None = None,
        scope: str = "layer",
        seed: int = 0,
    ) -> None:
        for name, value in (("l1", l1), ("temperature", temperature)):
            if value is not None and not 0 <= check_number(name, value) < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, got {value}")
        self.l1, self.temperature = l1, temperature
        super().__init__(
            *(model, optimizer),
            every=every,
            until=until,
            fraction=_as_many_as_turn,
            scope=scope,
            seed=seed,
        )
        for view in self._views:
            view.state["sign"] = view.weights.sign()

    def choose(self, views: Sequence[LayerView]) -> None:
        """Let the weights walk; what turns negative goes, and as many others wake."""
        thetas = [self._walk(view) for view in views]
        groups = [range(len(views))] if self.scope == "global" else [[i] for i in range(len(views))]
        for group in groups:
            mine = [views[i] for i in group]
            free = [view.free for view in mine]
            scores = [keep_best(thetas[i].clone()) for i in group]
            turned = min(sum(int((score < 0).sum()) for score in scores), sum(free))
            select(mine, "pruned", scores, turned)
            for view, count in zip(mine, share_out(turned, free, free), strict=True):
                view.subset = view.choose(count)
                view.grown = torch.ones(count, dtype=torch.bool)
        for view, theta in zip(views, thetas, strict=True):
            view.layer.assign(view.weights.masked_fill(theta < 0, 0))  # those that cannot go

    def _walk(self, view: LayerView) -> Tensor:
        """Move the weights of a layer and return their thetas."""
        weights = view.weights
        view.check_state()
        known = view.state["sign"]
        coin = (view.random(weights.numel()) < 0.5).to(weights) * 2 - 1
        sign = view.state["sign"] = torch.where(known == 0, coin, known)
        lr = float(optim.group_of(self.optimizer, view.layer.parameter)["lr"])
        temperature = lr * self.l1**2 / 18 if self.temperature is None else self.temperature
        noise = view.normal(weights.numel()).to(weights) * math.sqrt(2 * lr * temperature)
        weights = weights + sign * (noise - lr * self.l1)
        view.layer.assign(weights)
        return sign * weights

    def explore(self, view: LayerView) -> Connections:
        """Nothing yet: how many wake depends on how many rest."""
        return view.choose(0)


def _as_many_as_turn(t: int) -> float:
    return 0.0
