"""What a rewirer sees of a layer, whatever its storage."""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from rewire.connections import Connections, Domain
from rewire.engine.run import Probe


class ConnectedLayer(nn.Module, ABC):
    """A layer with a set of active connections that can be changed: sparse, or dense under a mask.

    Numbers of the connections (weights, gradients, scores) are 1-D tensors in the order of
    ``connections``. The parameter, its gradient and the optimizer's state of it have a shape of their own,
    ``(connections, 1)`` in a sparse layer; :meth:`gather` and :meth:`scatter` translate.

    Attributes:
        bias: dense parameter, or None.
        n_in, n_out: units on each side.
        taps: positions of a kernel, 1 in a linear layer.
        groups: of channels that see each other, 1 where all do.
        probe: called in every backward pass with (sizes, input, output gradient) while a rewirer wants
            to see them, else None. Copies of the layer do not have it.
        holds: the name of the parameter with the weights.
    """

    bias: nn.Parameter | None
    n_in: int
    n_out: int
    taps: int
    groups: int = 1
    probe: Probe | None = None
    holds: ClassVar[str]

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter with the weights, which the optimizer trains."""
        parameter = getattr(self, self.holds)
        assert isinstance(parameter, nn.Parameter)
        return parameter

    @property
    def domain(self) -> Domain:
        """Which connections are possible."""
        if self.groups == 1:
            return Domain(self.n_in, self.n_out)
        return Domain(self.n_in, self.n_out, self.groups, self.taps)

    @property
    @abstractmethod
    def connections(self) -> Connections:
        """The active connections."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many connections are active."""

    @property
    def density(self) -> float:
        """Share of all possible connections that are active."""
        return self.count / max(1, self.domain.size)

    @abstractmethod
    def has(self, connections: Connections) -> bool:
        """Whether these very connections are still the layer's."""

    @abstractmethod
    def gather(self, tensor: Tensor) -> Tensor:
        """One element per active connection (1-D), of a tensor that is shaped like the parameter."""

    @abstractmethod
    def scatter(self, connections: Connections, values: Tensor, rest: float = 0.0) -> Tensor:
        """A tensor shaped like the parameter would be with these connections, with one element for
        each of them from the 1-D ``values``, and ``rest`` elsewhere."""

    @abstractmethod
    def assign(self, values: Tensor) -> None:
        """Give the active connections these weights."""

    @abstractmethod
    def set_connections(self, connections: Connections, values: Tensor) -> None:
        """Replace the connections and their weights; the parameter stays the same object.

        Args:
            connections: the new ones.
            values: one for each of them, 1-D or with a second dimension of size one.
        """

    @abstractmethod
    def to_dense(self) -> Any:
        """The equivalent layer of torch; inactive connections become zeros."""

    def _vector(self, connections: Connections, values: Tensor) -> Tensor:
        """The values of connections as a 1-D tensor; raises unless both fit the layer."""
        self.domain.taken(connections)
        count = len(connections)
        if tuple(values.shape) not in ((count,), (count, 1)):
            raise ValueError(
                f"values has shape {tuple(values.shape)}, expected ({count},) or ({count}, 1)"
            )
        if problem := lossy("values", values, self.parameter):
            raise ValueError(problem)
        return values.flatten()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._warn_of_save_pretrained()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _warn_of_save_pretrained(self) -> None:
        """Warn if a ``save_pretrained`` method (Hugging Face) asks for the state dict.

        The matching ``from_pretrained`` builds a dense model and keeps its fresh weights where the file
        has none for them, without an error. It is no error here either: one after training would lose
        the model, and what is written does load into a sparse model.
        """
        frame, level = sys._getframe(), 1
        while frame.f_code.co_name != "save_pretrained":
            if frame.f_back is None:
                return
            frame, level = frame.f_back, level + 1
        model = frame.f_locals.get("self")
        ours = model.modules() if isinstance(model, nn.Module) else ()
        if next((m for m in ours if isinstance(m, ConnectedLayer)), None) is not self:
            return  # one of the layers warns for all
        if getattr(model, "saves_connections", False):
            return  # by rewire.integrations.transformers or rewire.integrations.hub
        kind = type(model).__name__
        warnings.warn(
            f"this {kind} has sparse layers, and from_pretrained would give it fresh dense "
            "weights instead: for "
            "models of transformers call rewire.integrations.transformers.attach(model) before, and import "
            'that module where you load it. Or use rewire.save(model, "model.safetensors") and '
            'rewire.load("model.safetensors", '
            f"{kind}(config)), or save a dense copy, which from_pretrained reads: "
            "rewire.densify(copy.deepcopy(model)).save_pretrained(...)",
            stacklevel=level + 1,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "probe"}

    def extra_repr(self) -> str:
        """Connections and density, after what the layer itself says."""
        total = self.domain.size
        density = f"{100 * self.density:.3g} %"
        return f"connections={self.count:,} of {total:,} ({density})"


def lossy(name: str, given: Tensor, own: Tensor) -> str:
    """What is wrong with a tensor whose numbers would be cut off if they became ``own``, or ""."""
    if given.is_floating_point() or (given.is_complex() and own.is_complex()):
        return ""
    return (
        f"{name} is {given.dtype}, expected {own.dtype} or another type of floats: convert it first"
    )
