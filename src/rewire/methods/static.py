"""Static sparse training."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from rewire.methods.arguments import Fraction
from rewire.methods.base import Rewirer


class Static(Rewirer):
    """The random connections that a model starts with stay: the baseline of all methods.

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
        until = every if until is None else until
        super().__init__(
            model, optimizer, every=every, until=until, fraction=fraction, scope=scope, seed=seed
        )

    def due(self, t: int) -> bool:
        """Never."""
        return False
