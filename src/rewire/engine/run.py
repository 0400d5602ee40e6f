"""What one run of a graph works on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from rewire.ops.reference import Convolution
from rewire.ops.topology import Topology

# Called in the backward pass of a layer with its sizes, input and output gradient.
Probe = Callable[[Convolution, Tensor, Tensor], None]


class Data(NamedTuple):
    """What nodes refer to by an index, beside the tensors that are inputs of the graph."""

    topologies: Sequence[Topology]
    scalars: Sequence[float | int]
    probes: Sequence[Probe | None]  # one for each topology
    effects: bool  # whether running statistics are updated


class Use:
    """Which backward pass uses the part of an arena that backward steps write to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by: weakref.ref[Any] | None = None

    def claim(self, user: Any) -> bool:
        """Let ``user`` have it for as long as it lives; False if somebody else has it."""
        with self._lock:
            if self._by is not None and self._by() is not None:
                return False
            self._by = weakref.ref(user)
            return True


class Run:
    """The data of one run of a graph.

    Attributes:
        tensors: the graph's inputs; in the backward pass None for running statistics that the forward
            pass has updated.
        data: topologies, scalars and probes.
        arena: what the forward pass has left for the backward pass.
        use: who runs backward in the arena.
    """

    def __init__(self, tensors: Sequence[Tensor | None], data: Data) -> None:
        self.tensors, self.data = tensors, data
        self.arena: Tensor | None = None
        self.use = Use()
