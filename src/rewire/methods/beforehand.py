"""Rewiring before a step, by the gradients of batches of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rewire.methods.arguments import Fraction, check_integer
from rewire.methods.base import Rewirer
from rewire.methods.history import Rewiring


class Beforehand(Rewirer):
    """Base class of guided methods that can rewire before a step, or instead of it.

    Args:
        model, optimizer, every, until, fraction, scope, seed: see :class:`Rewirer`.
        growth_batches: 0 rewires after the step, as all methods do, by its own gradients. Otherwise the
            rewiring is done before the step, by the gradients of so many batches of its own: call
            :meth:`rewire` with their losses whenever ``waits`` is true.
    """

    settings: ClassVar[tuple[str, ...]] = (*Rewirer.settings, "growth_batches")
    _looking = False
    _rewired = 0  # the step that began with a rewiring last

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int = 1000,
        until: int | None = None,
        fraction: Fraction = 0.2,
        growth_batches: int = 0,
        scope: str = "global",
        seed: int = 0,
    ) -> None:
        if check_integer("growth_batches", growth_batches) < 0:
            raise ValueError(
                f"growth_batches must be 0, for the training step's own, or more, got {growth_batches}"
            )
        self.growth_batches = growth_batches
        super().__init__(
            model, optimizer, every=every, until=until, fraction=fraction, scope=scope, seed=seed
        )

    @property
    def waits(self) -> bool:
        """Whether the coming step begins with a rewiring, for which :meth:`rewire` is to be called."""
        coming = self.t + 1
        return bool(self.growth_batches) and self.due(coming) and self._rewired != coming

    def rewire(self, losses: Iterable[Tensor]) -> Rewiring:
        """Rewire before the coming step, by the gradients of these losses, and return what has changed.

        For ``growth_batches`` above 0, whenever ``waits`` is true. The losses come from a generator,
        batch after batch: models must run while this does. No ``.grad`` is touched but that of sparse
        layers, which is None afterwards; the weights to prune are those of now. The step itself follows
        as usual, or is left out, as in the paper's Algorithm 2; either way :meth:`step` counts it.
        """
        if not self.waits:
            raise RuntimeError(
                f"no rewiring is due before step {self.t + 1}: call rewire() when `waits` is true"
            )
        self._followers.check(self._views)
        trained = [s.layer.parameter for s in self._views if s.layer.parameter.requires_grad]
        self._looking, count = True, 0
        self._arm()
        try:
            for loss in losses:
                torch.autograd.grad(loss, trained, allow_unused=True)
                count += 1
            self._check(count)
            self.t += 1
            try:
                rewiring = super()._rewire()
            finally:
                self.t -= 1
        finally:
            self._looking = False
            self._arm()
            for view in self._views:
                view.clear()
        self._rewired = self.t + 1
        assert rewiring is not None
        self._tell(rewiring)
        return rewiring

    def _check(self, count: int) -> None:
        if count != self.growth_batches:
            raise ValueError(f"expected growth_batches={self.growth_batches} losses, got {count}")
        if not any(self.has_seen(view) for view in self._views):
            raise ValueError(
                "the losses were computed before rewire() was called: give a generator of them, as in "
                "rewire(loss_fn(model(x), y) for x, y in batches)"
            )

    def watches(self, t: int) -> bool:
        """Whether the step's own backward passes are observed: not if there are ``growth_batches``."""
        return self._looking if self.growth_batches else super().watches(t)

    def _rewire(self) -> Rewiring | None:
        if not self.growth_batches:
            return super()._rewire()
        if self._rewired != self.t:
            raise RuntimeError(
                f"with growth_batches={self.growth_batches} step {self.t} begins with a rewiring: call "
                "rewire(losses) before it, whenever `waits` is true"
            )
        return None  # it is done

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`Rewirer.state_dict`."""
        return {**super().state_dict(), "rewired": self._rewired}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`Rewirer.load_state_dict`."""
        rewired = check_integer("rewired", state.get("rewired", 0))
        super().load_state_dict(state)
        self._rewired = rewired
