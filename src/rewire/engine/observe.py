"""Who receives where the engine stops: :func:`rewire.explain` while it runs, else nobody.

It is asked for where a region begins and where something is not recorded, never for a node.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rewire.engine.region import Region
    from rewire.engine.scope import Scope


class Why(Enum):
    """Why a region runs. Where a torch function wants numbers it is that function and its arguments."""

    RETURNED = "the model returned"
    MODE = "gradient mode changed"
    DTYPE = "a layer of another dtype"
    AGAIN = "a batch norm is called again"
    STATISTICS = "running statistics are used"
    OTHER = "another region reads a value"
    OFF = "the engine is turned off"


class Observer(Protocol):
    def region(
        self, dtype: torch.dtype, grad: bool, inference: bool, interrupted: Callable[[], bool]
    ) -> Region:
        """The region to record into, which tells what becomes of it."""

    def alone(self, layer: nn.Module, x: Any, why: str | None) -> None:
        """A layer runs by itself; why, if it is not because nothing is recorded now."""

    def off(self, scope: Scope, module: nn.Module) -> None:
        """Nothing is recorded in this call of a module."""


observer: Observer | None = None
