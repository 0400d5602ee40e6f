"""The processes that train together, as the loop uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from rewire import distributed

T = TypeVar("T")


class Processes:
    """The processes that ``torchrun`` has started, or this one alone.

    Attributes:
        rank, world: this process, and how many there are.
    """

    def __init__(self) -> None:
        self.rank, self.world = distributed.rank(), distributed.world()
        self._parallel: distributed.Parallel | None = None

    @property
    def main(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0

    def start(self, model: nn.Module) -> None:
        """The model is made, or another took its place; its gradients are averaged from now on."""
        self._parallel = distributed.Parallel(model) if self.world > 1 else None

    @property
    def traffic(self) -> distributed.Traffic | None:
        """The bytes sent between processes."""
        return None if self._parallel is None else self._parallel.traffic

    def sync(self) -> None:
        """Before a test: let all models have the same running statistics."""
        if self._parallel is not None:
            self._parallel.sync_buffers()

    def total(self, counts: Tensor) -> Tensor:
        """The sum over all processes."""
        return torch.tensor(distributed.total(*counts.tolist()), dtype=counts.dtype)

    def any(self, wish: bool) -> bool:
        """Whether the flag is set in any process."""
        return wish if self.world == 1 else distributed.total(float(wish))[0] > 0

    def main_first(self, action: Callable[[], T]) -> T:
        """What ``action`` gives, done by the main process before the others."""
        if not self.main:
            distributed.barrier(patience=distributed.PATIENCE)
        result = action()
        if self.main:
            distributed.barrier(patience=distributed.PATIENCE)
        return result
