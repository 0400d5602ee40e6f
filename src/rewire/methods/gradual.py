"""Gradual magnitude pruning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from rewire.budgets import held
from rewire.connections import Connections
from rewire.methods.arguments import check_choice
from rewire.methods.base import Rewirer
from rewire.methods.change import select
from rewire.methods.handover import hand_over
from rewire.methods.history import Rewiring
from rewire.methods.layer_view import LayerView

CURVES = ("cubic", "cosine")


class Gradual(Rewirer):
    r"""Gradual magnitude pruning: from a dense model to a sparse one while it trains.

    Every ``every`` steps, and at ``until``, the smallest weights go, so that the sparsity is
    :math:`s_t = s_f + (s_i - s_f)(1 - (t - t_0) / (t_1 - t_0))^3`, from what the model begins with to
    ``sparsity``; or that with a cosine in place of the cube. Until then the layers are masked. At ``until``
    sparse layers take their place in the model, and the optimizer continues with their values and its own
    state of them.

    Args:
        model: has masked layers, usually all connections of the user's dense model:
            ``rewire.sparsify(model, density=1, weights="keep", storage="masked")``.
        optimizer: trains them.
        sparsity: the final one, of all these layers together.
        every: steps from one pruning to the next.
        until: the step at which the target is reached (:math:`t_1`).
        begin: the step at which pruning begins (:math:`t_0`).
        curve: ``"cubic"``, or ``"cosine"``: what is left of the way falls as
            :math:`(1 + \cos(\pi (t - t_0) / (t_1 - t_0))) / 2`.
        scope: compare weights over the whole model (``"global"``) or layer by layer.
        storage: what to continue with at the target: ``"sparse"`` or, without a handover, ``"masked"``.
        seed: for the others' sake; nothing is random.

    A state that was saved after the handover is loaded either into a rewirer of a model with sparse
    layers already, or, in the usual order, before the model's and the optimizer's: the layers are handed
    over then.

    Reference: Zhu and Gupta, *To prune, or not to prune: exploring the efficacy of pruning for model
    compression*, 2017.
    """

    guided = False
    settings: ClassVar[tuple[str, ...]] = (
        *("every", "until", "scope", "seed"),
        *("sparsity", "begin", "initial", "storage", "curve"),
    )

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sparsity: float,
        every: int = 1000,
        until: int,
        begin: int = 0,
        curve: str = "cubic",
        scope: str = "global",
        storage: str = "sparse",
        seed: int = 0,
    ) -> None:
        if not 0 <= sparsity < 1:
            raise ValueError(f"sparsity must be at least 0 and below 1, got {sparsity}")
        if not 0 <= begin < until:
            raise ValueError(f"begin must be at least 0 and before until={until}, got {begin}")
        check_choice("storage", storage, ("sparse", "masked"))
        check_choice("curve", curve, CURVES)
        self.sparsity, self.begin, self.storage, self.curve = sparsity, begin, storage, curve
        self.initial = 0.0
        super().__init__(
            *(model, optimizer),
            every=every,
            until=until,
            fraction=lambda t: 0.0,
            scope=scope,
            seed=seed,
        )
        active = sum(view.layer.count for view in self._views)
        self.initial = 1 - active / sum(map(_size, self._views))
        self.handed_over = False

    def target(self, t: int) -> float:
        """The sparsity of step t."""
        assert self.until is not None
        way = min(1.0, max(0.0, (t - self.begin) / (self.until - self.begin)))
        left = (1 - way) ** 3 if self.curve == "cubic" else (1 + math.cos(math.pi * way)) / 2
        return float(self.sparsity + (self.initial - self.sparsity) * left)

    def alpha(self, t: int) -> float:
        """The share of the connections that step t prunes."""
        before = (t - 1) // self.every * self.every  # the last pruning, or none yet
        return max(0.0, 1 - (1 - self.target(t)) / (1 - self.target(before)))

    def due(self, t: int) -> bool:
        """Whether a step prunes: every ``every`` steps after ``begin``, and at ``until``."""
        assert self.until is not None
        return self.begin < t <= self.until and (t % self.every == 0 or t == self.until)

    @property
    def conserves(self) -> None:
        """None: the number of connections falls."""
        return None

    def choose(self, views: Sequence[LayerView]) -> None:
        """Keep the largest weights."""
        for group in self.groups(views):
            kept = held(sum(map(_size, group)), 1 - self.target(self.t))
            active = sum(view.layer.count for view in group)
            spare = sum(max(0, view.layer.count - 1) for view in group)
            count = min(max(0, active - kept), spare)
            select(group, "pruned", [self.survival(view) for view in group], count)
            for view in group:
                view.grown = torch.zeros(0, dtype=torch.bool)

    def explore(self, view: LayerView) -> Connections:
        """No connections: nothing grows."""
        return view.choose(0)

    def step(self) -> Rewiring | None:
        """Count a training step; prune if it is due, and hand over once the target is reached."""
        if self.storage == "sparse" and self._group.world > 1:
            raise RuntimeError(
                "layers cannot be handed over while several processes train them: give Gradual "
                'storage="masked"'
            )
        rewiring = super().step()
        assert self.until is not None
        if self.t >= self.until and self.storage == "sparse":
            self.hand_over()
        return rewiring

    def hand_over(self) -> None:
        """Let sparse layers take the place of the masked ones in the model and the optimizer."""
        if self.handed_over:
            return
        model = self._model()
        assert model is not None, "the model is gone"
        new = hand_over(model, self.optimizer)
        for view in self._views:
            view.layer = new.get(view.layer, view.layer)
            view.clear()
        self.handed_over = True
        self._followers.bring()

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`Rewirer.state_dict`."""
        return {**super().state_dict(), "handed_over": self.handed_over}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`Rewirer.load_state_dict`; hands over if the saved one had."""
        if self.handed_over and not state["handed_over"]:
            raise ValueError(
                "the state is from before the layers became sparse, and they are already: load it into "
                "a rewirer of a model with masked layers"
            )
        super().load_state_dict(state)
        if state["handed_over"]:
            self.hand_over()


def _size(view: LayerView) -> int:
    return view.layer.domain.size
