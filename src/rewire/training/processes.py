"""What the loop asks of the processes that train together; here there is one."""

from __future__ import annotations

from torch import Tensor, nn


class Processes:
    """One process alone: nothing to share.

    A subclass for many overrides all of this; the loop calls nothing else.

    Attributes:
        rank, world: this process, and how many there are.
    """

    rank: int = 0
    world: int = 1

    def start(self, model: nn.Module) -> None:
        """The model is made, or another took its place; its gradients will be averaged."""

    def average(self) -> None:
        """After the backward pass: average the gradients of all processes."""

    def sync(self) -> None:
        """Before a test: let all models have the same running statistics."""

    def total(self, counts: Tensor) -> Tensor:
        """The sum over all processes."""
        return counts

    def any(self, wish: bool) -> bool:
        """Whether any process wishes it."""
        return wish

    def wait(self) -> None:
        """Until all processes are here."""
