"""Sparse networks from scratch: sparse momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rewire import sampling
from rewire.methods.arguments import Fraction, check_number
from rewire.methods.base import Rewirer
from rewire.methods.change import select
from rewire.methods.layer_view import LayerView, Like
from rewire.methods.sharing import share_out
from rewire.methods.streaming import Best
from rewire.ops import dense
from rewire.sampling import Batch


class SNFS(Rewirer):
    """Sparse networks from scratch: the momentum of all weights says where to grow, and how much.

    The smallest weights go. What grows is shared out among layers in proportion to the mean magnitude of
    the momentum of their active weights, and in each layer it is the largest momenta that grow. For that
    a dense momentum, ``m = momentum * m + (1 - momentum) * gradient``, is kept of every layer, and the
    dense gradient is evaluated at every step until ``until``.

    Args:
        model, optimizer, every, until, fraction, seed: see :class:`Rewirer`; nothing is random.
        momentum: how much of the average stays at a step.
        scope: compare weights to prune over the whole model (``"global"``), or prune the same share of
            each layer (``"layer"``), as in the original. Growth moves connections between layers.

    Reference: Dettmers and Zettlemoyer, *Sparse networks from scratch: faster training without losing
    performance*, 2019.
    """

    settings: ClassVar[tuple[str, ...]] = (*Rewirer.settings, "momentum")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int = 1000,
        until: int,
        fraction: Fraction = 0.2,
        momentum: float = 0.9,
        scope: str = "global",
        seed: int = 0,
    ) -> None:
        if not 0 <= check_number("momentum", momentum) < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {momentum}")
        self.momentum = momentum
        super().__init__(
            model, optimizer, every=every, until=until, fraction=fraction, scope=scope, seed=seed
        )

    @property
    def conserves(self) -> str:
        """The model's number of connections."""
        return "global"

    def watches(self, t: int) -> bool:
        """Every step up to the last rewiring."""
        return self.until is None or t <= self.until - self.until % self.every

    def has_seen(self, view: LayerView) -> bool:
        """Whether a layer has a momentum."""
        return "momentum" in view.memory

    def observe(self, view: LayerView, batch: Batch) -> None:
        """Add the gradient to the momentum; the first of a step lets the old one fade."""
        self._begin(view)
        fading = self.momentum if int(view.memory["step"]) != self.t + 1 else 1.0
        view.memory["step"].fill_(self.t + 1)
        for first, last in dense.blocks(view.layer.n_out, view.layer.domain.width):
            rows = dense.gradient_rows(
                batch.conv, batch.dy, batch.x, first, last, view.layer.domain
            )
            part = view.memory["momentum"][first:last]
            part.mul_(fading).add_(rows, alpha=1 - self.momentum)

    def _begin(self, view: LayerView) -> None:
        if "momentum" not in view.memory:
            shape = view.layer.n_out, view.layer.domain.width
            view.memory["momentum"] = view.weights.new_zeros(shape)
            view.memory["step"] = torch.tensor(0)

    def memory_of(self, view: LayerView) -> dict[str, Like]:
        """The dense momentum, and the step of its last gradient."""
        units = view.layer.n_out, view.layer.domain.width
        return {"momentum": Like(units, view.weights.dtype), "step": Like((), torch.int64)}

    def average(self, views: Sequence[LayerView]) -> None:
        """Average the momentum over processes, block by block."""
        group = self._group
        if group.world == 1:
            return
        seen = group.gather([self.has_seen(view) for view in views])
        for view, ranks in zip(views, zip(*seen, strict=True), strict=True):
            if any(ranks):
                self._begin(view)
                for first, last in dense.blocks(view.layer.n_out, view.layer.domain.width):
                    part = view.memory["momentum"][first:last]
                    (rows,) = group.sum(part)
                    part.copy_(rows / group.world)

    def choose(self, views: Sequence[LayerView]) -> None:
        """Prune by magnitude; share out by mean momentum; grow the largest momenta."""
        shares = _integers([_mean_momentum(view) for view in views])  # before pruning
        free = [view.free for view in views]
        count = self._prune(views, sum(free))
        for view, grown in zip(views, share_out(count, shares, free), strict=True):
            best = Best(grown)
            for first, last in dense.blocks(view.layer.n_out, view.layer.domain.width):
                best.add(view, first, last, view.memory["momentum"][first:last])
            ((_, view.subset, view.gradient),) = best.of([view])
            view.grown = torch.ones(grown, dtype=torch.bool)
            view.considered = view.free

    def _prune(self, views: Sequence[LayerView], free: int) -> int:
        alpha = self.alpha(self.t)
        groups = self.groups(views)
        active = [sum(view.layer.count for view in group) for group in groups]
        spare = [sum(max(0, view.layer.count - 1) for view in group) for group in groups]
        counts = [min(sampling.ceil(alpha * a), s) for a, s in zip(active, spare, strict=True)]
        counts = share_out(min(sum(counts), free), counts, counts)
        for group, count in zip(groups, counts, strict=True):
            select(group, "pruned", [self.survival(view) for view in group], count)
        return sum(counts)


def _mean_momentum(view: LayerView) -> float:
    momentum, active = view.memory["momentum"], view.active
    device = momentum.device
    mine: Tensor = momentum[active.outputs().to(device), active.columns().to(device)]
    mean = float(mine.abs().double().mean()) if mine.numel() else 0.0
    return mean if mean < float("inf") else 0.0


def _integers(shares: list[float]) -> list[int]:
    """In the same proportions, as near as makes no difference."""
    most = max(shares, default=0.0)
    return [round(share / most * 2**40) if most else 0 for share in shares]
