"""A layer with a dense weight of which the active connections count."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rewire.connections import Connections
from rewire.nn.layer import ConnectedLayer
from rewire.nn.weight_errors import SPARSE_STATE


class MaskedLayer(ConnectedLayer):
    """A layer that stores a dense weight, of which the active connections count.

    Attributes:
        weight: dense parameter, as torch shapes it.
        mask: bool buffer of the same shape: the active connections.
        reach: bool tensor of the same shape, the connections that get gradients, if these are more than
            the active ones; else None. It is not saved.
    """

    holds: ClassVar[str] = "weight"
    weight: nn.Parameter
    mask: Tensor
    reach: Tensor | None

    def __init__(self, weight: Tensor, mask: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        if bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(bias.detach().clone())
        # Laid out as the weight is, or results would depend on where the mask came from.
        self.register_buffer("mask", torch.empty_like(self.weight, dtype=torch.bool).copy_(mask))
        self.register_buffer("reach", None, persistent=False)
        self._known: tuple[Tensor, int, Connections] | None = None

    @abstractmethod
    def flat(self, tensor: Tensor) -> Tensor:
        """(out units, columns), of a tensor that is shaped like the weight; see ``Domain``."""

    @abstractmethod
    def shaped(self, flat: Tensor) -> Tensor:
        """Shaped like the weight, of a tensor of (out units, columns)."""

    @property
    def effective(self) -> Tensor:
        """The weight with zeros for inactive connections; gradients flow to the active ones."""
        zero = self.weight.new_zeros(())
        if self.reach is None:
            return torch.where(self.mask, self.weight, zero)
        hidden = torch.where(self.reach & ~self.mask, self.weight.detach(), zero)
        return torch.where(self.reach, self.weight, zero) - hidden

    @property
    def connections(self) -> Connections:
        """The active connections."""
        mask = self.mask
        version = -1 if mask.is_inference() else mask._version
        known = self._known
        if known is None or known[0] is not mask or known[1] != version:
            known = self._known = (mask, version, self.domain.from_mask(self.flat(mask)))
        return known[2]

    @property
    def count(self) -> int:
        """How many connections are active."""
        return len(self.connections)

    def has(self, connections: Connections) -> bool:
        """Whether these very connections are still the layer's."""
        return connections is self.connections

    def gather(self, tensor: Tensor) -> Tensor:
        """One element per active connection (1-D), of a tensor that is shaped like the weight."""
        return self.flat(tensor)[self.flat(self.mask)]

    def scatter(self, connections: Connections, values: Tensor, rest: float = 0.0) -> Tensor:
        """A tensor shaped like the weight with these elements, and ``rest`` elsewhere."""
        connections = self.domain.taken(connections)
        flat = values.new_full((self.n_out, self.domain.width), rest)
        flat[connections.outputs().to(flat.device), connections.columns().to(flat.device)] = values
        return self.shaped(flat)

    def assign(self, values: Tensor) -> None:
        """Give the active connections these weights; the others become zero."""
        self.weight.data.copy_(self.scatter(self.connections, values.to(self.weight)))

    def set_connections(self, connections: Connections, values: Tensor) -> None:
        """Replace the connections and their weights; the others become zero."""
        values = self._vector(connections, values)
        with torch.no_grad():
            self.mask.copy_(self.scatter(connections, torch.ones_like(values, dtype=torch.bool)))
        self.assign(values.detach())
        self.weight.grad = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_known": None}

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, a: Any, b: Any, c: Any, d: Any, error_msgs: list[str]
    ) -> None:
        if prefix + "values" in state_dict:
            error_msgs.append(SPARSE_STATE.format(prefix.rstrip(".") or type(self).__name__))
        super()._load_from_state_dict(state_dict, prefix, a, b, c, d, error_msgs)

    @abstractmethod
    def to_dense(self) -> Any:
        """The equivalent layer of torch; inactive connections become zeros."""

    @abstractmethod
    def to_sparse(self) -> Any:
        """The sparse layer with the same connections."""

    @classmethod
    @abstractmethod
    def from_sparse(cls, layer: Any) -> Any:
        """With the connections and weights of a sparse layer."""
