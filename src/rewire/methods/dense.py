"""Dense training."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from rewire.communication import Alone
from rewire.methods.arguments import Fraction
from rewire.methods.base import Rewirer
from rewire.methods.following import Followers
from rewire.methods.history import History


class Dense(Rewirer):
    """All connections, in the model's own dense layers: what all methods are measured against.

    It takes the arguments of the others, so that it can stand in their place, and never rewires.
    """

    guided = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int = 1000,
        until: int | None = None,
        fraction: Fraction = 0.2,
        scope: str = "global",
        seed: int = 0,
    ) -> None:
        self.optimizer, self.t = optimizer, 0
        self._followers = Followers(model)
        self.every, self.until, self.fraction = every, until, fraction
        self.scope, self.seed = scope, seed
        self._views, self._probes, self._armed, self._known = [], [], False, Alone()
        self.history = History([])

    def due(self, t: int) -> bool:
        """False: dense models are never rewired."""
        return False
