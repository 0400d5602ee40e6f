"""What training has taken so far: FLOPs, summed over the steps as they were."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from rewire import flops
from rewire.flops import Flops
from rewire.methods import Rewiring

if TYPE_CHECKING:
    from rewire.training.job import Job


class Spent:
    """Training FLOPs per sample of a batch, summed over steps, each with the connections it had.

    They are counted as Evci et al. count them (:mod:`rewire.flops`). A rewiring adds the gradient at S;
    with batches of its own also their forward passes and input gradients; instead of a step it
    saves that step's weight gradient.

    Attributes:
        forward: the forward pass with the connections of now.
        total: the sum so far.
    """

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._method, self._config = job.method, job.config
        self._until = job.schedule.until
        self.forward = flops.count(model, job.dataset.shape)
        self.total = 0.0

    def step(self, step: int, rewiring: Rewiring | None) -> None:
        """Add the cost of a step, counted from 1, with the rewiring that it began or ended with."""
        before, after = self.forward, self.forward
        if rewiring is not None:
            after = self.forward = _rewired(before, rewiring)
        instead = bool(self._config.instead_of_step)
        batches = self._config.growth_batches or 0
        if rewiring is not None and self._method.explored is not None:
            explored = self._method.explored(before, rewiring)
            if instead:
                self.total += 2 * before.sparse + explored
                return
            self.total += batches * (2 * before.sparse + explored) if batches else explored
        active = self._until is None or step <= self._until
        self.total += self._method.step(after if batches else before, active)

    def mean(self, steps: int) -> float:
        """The sum as a mean over the steps."""
        return self.total / max(1, steps)


def _rewired(found: Flops, rewiring: Rewiring) -> Flops:
    layers = {
        name: replace(layer, connections=rewiring.layers[name].active)
        if name in rewiring.layers
        else layer
        for name, layer in found.layers.items()
    }
    return Flops(layers)
