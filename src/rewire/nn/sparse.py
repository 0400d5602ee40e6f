"""What sparse linear layers and convolutions share: values, connections, loading, initialisation."""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rewire.connections import Connections, Domain
from rewire.equivalents import ORIGIN
from rewire.nn import copies
from rewire.nn.layer import ConnectedLayer, lossy
from rewire.nn.weight import weight_of
from rewire.nn.weight_errors import DENSE_STATE, NO_ASSIGNMENT
from rewire.ops import topology
from rewire.ops.reference import LINEAR, Convolution
from rewire.ops.topology import Topology, TopologyError

_DERIVED = ("slots", "outputs", "order")
MARK = torch.ones(1)
"""A ``weight`` in files for dense models: it fits none of their layers, so loading it into one is an
error."""


class SparseLayer(ConnectedLayer):
    """A layer that stores one value per active connection and nothing for the others.

    Attributes:
        values: parameter of shape (connections, 1), by output unit and then input unit. It has two
            dimensions so that optimizers set up to decay weights and not biases, by their number of
            dimensions, decay it.
        bias: dense parameter, or None.
        indptr, indices: the connections (int32 buffers, saved with the state dict).
        sizes: of the convolution that the layer is; a linear layer is one, too.
    """

    holds: ClassVar[str] = "values"
    values: nn.Parameter
    indptr: Tensor
    indices: Tensor
    sizes: Convolution = LINEAR

    def __init__(
        self,
        n_in: int,
        n_out: int,
        taps: int,
        bias: bool,
        sparsity: float | None,
        connections: int | Connections | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.n_in, self.n_out, self.taps = n_in, n_out, taps
        drawn = _draw(self.domain, sparsity, connections, generator)
        for name in ("indptr", "indices"):
            self.register_buffer(name, torch.empty(0, dtype=torch.int32))
        for name in _DERIVED:
            self.register_buffer(name, torch.empty(0, dtype=torch.int32), persistent=False)
        self.values = nn.Parameter(torch.empty((0, 1), dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(self._biases, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.set_connections(drawn, torch.empty(len(drawn), dtype=dtype))
        self.reset_parameters(generator)
        if device is not None:
            self.to(device)

    @property
    def connections(self) -> Connections:
        """The active connections."""
        return self.domain.of(self.indptr, self.indices)

    @property
    def image_taps(self) -> int:
        """Positions of the kernel as the operators see it: without its depth, if it has one."""
        return self.sizes.kernel[0] * self.sizes.kernel[1]

    @property
    def topology(self) -> Topology:
        """The active connections in both traversal orders, as the operators take them."""
        b = self._buffers
        return Topology(b["indptr"], b["indices"], b["slots"], b["outputs"], b["order"])  # type: ignore[arg-type]

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Topology]:
        """Values, bias and connections, as the operators take them."""
        own = self._parameters  # past nn.Module.__getattr__, which is slow
        try:
            return own["values"], own["bias"], self.topology  # type: ignore[return-value]
        except KeyError:  # one of them is no parameter any more
            return self.values, self.bias, self.topology

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the dense layer's weight."""
        return self.n_out, self.n_in

    @property
    def weight(self) -> Any:
        """The weight for code that expects a dense layer's: a read-only view without numbers, with its
        shape, dtype and device, that ``F.linear`` and ``F.conv2d`` take; see
        :class:`rewire.nn.weight.Weight`."""
        origin = self.__dict__.get(ORIGIN)
        return weight_of(self, turned=origin is not None and origin.transposed)

    @weight.setter
    def weight(self, weight: Any) -> None:
        raise AttributeError(NO_ASSIGNMENT.format(type(self).__name__))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As every module does; ``weight`` is no parameter of a sparse layer."""
        if name == "weight":
            raise AttributeError(NO_ASSIGNMENT.format(type(self).__name__))
        super().register_parameter(name, param)

    @property
    def count(self) -> int:
        """How many connections are active."""
        return self.values.numel()

    def has(self, connections: Connections) -> bool:
        """Whether these very connections are still the layer's."""
        return connections.indptr is self.indptr and connections.indices is self.indices

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensor as a 1-D view: there is nothing but active connections."""
        return tensor.flatten()

    def scatter(self, connections: Connections, values: Tensor, rest: float = 0.0) -> Tensor:
        """A view of the values with the parameter's second dimension."""
        return values.unsqueeze(1)

    def assign(self, values: Tensor) -> None:
        """Give the active connections these weights."""
        self.values.detach().copy_(values.unsqueeze(1))

    def set_connections(self, connections: Connections, values: Tensor) -> None:
        """Replace the connections and their values; ``values`` stays the same Parameter object."""
        values = self._vector(connections, values)
        device = self.values.device
        built = topology.build(
            connections.indptr.to(device),
            connections.indices.to(device),
            self.n_in,
            self.image_taps,
        )
        self._buffers.update(self._held(built)._asdict())
        column = values.detach().to(device=device, dtype=self.values.dtype).unsqueeze(1)
        _put(self.values, column)

    def _held(self, new: Topology) -> Topology:
        """The tensors to hold for connections: the present ones, if these are the same, because traced
        programs hold them too; else the new ones, and the present ones are retired."""
        old = self.topology
        if topology.same(old, new):
            return old
        topology.retire(old)
        return new

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw values and biases uniformly in +-sqrt(3 / fan-in), fan-in being the number of active
        inputs of the output unit (at least 1): pre-activations then start with unit variance."""
        with torch.no_grad():
            fan_in, each_of = self._fan_in()
            bound = (3 / fan_in.clamp(min=1)).sqrt()
            self.assign(_uniform(bound[each_of].to(self.values.dtype), generator))
            if self.bias is not None:
                self.bias.copy_(_uniform(bound.to(self.bias.dtype), generator))

    @property
    def _biases(self) -> int:
        """How many outputs have a bias."""
        return self.n_out

    def _fan_in(self) -> tuple[Tensor, Tensor]:
        """The fan-in of each output that has a bias, and which of these each connection leads to."""
        connections = self.connections
        return connections.fan_in(), connections.outputs()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        values = self.values
        if values.dim() == 1:  # an old pickle, from when values were 1-D
            values.data = values.data.unsqueeze(1)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = [prefix + name for name in ("indptr", "indices", "values")]
        weight = state_dict.get(prefix + "weight")
        if isinstance(weight, Tensor) and weight.shape == MARK.shape:
            state_dict = {key: t for key, t in state_dict.items() if key != prefix + "weight"}
        elif isinstance(weight, Tensor) and not any(name in state_dict for name in names):
            error_msgs.append(DENSE_STATE.format(prefix.rstrip(".") or type(self).__name__))
            return
        for name in names:
            if not isinstance(given := state_dict.get(name, self.values), Tensor):
                error_msgs.append(f"{name} must be a torch.Tensor, got {type(given).__name__}")
                return
        if not all(name in state_dict for name in names):
            # One without the others means nothing: leave the layer as it is and name what is missing.
            rest = {key: tensor for key, tensor in state_dict.items() if key not in names}
            missing: list[str] = []
            super()._load_from_state_dict(
                rest, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
            )
            missing_keys += [key for key in missing if key not in state_dict]
            return
        indptr, indices, values = (state_dict[name] for name in names)
        device = self.values.device
        try:
            topology.check_rows(indptr, indices, self.n_in, self.n_out)
            self.domain.check(indptr, indices)
            built = topology.build(
                indptr.to(device).clone(), indices.to(device).clone(), self.n_in, self.image_taps
            )
            count = indices.numel()
            if tuple(values.shape) == (count,):  # an old file, from when values were 1-D
                values = values.detach().unsqueeze(1)
                state_dict = {**state_dict, names[2]: values}
            if tuple(values.shape) != (count, 1):
                raise TopologyError(
                    f"values has shape {tuple(values.shape)}, expected ({count}, 1)"
                )
            for name, own in self._parameters.items():
                given = state_dict.get(prefix + name)
                if not isinstance(given, Tensor) or own is None:
                    continue
                if problem := lossy(name, given, own):
                    raise TopologyError(problem)
        except TopologyError as error:
            error_msgs.append(f"{prefix or type(self).__name__}: {error}")
            return
        # A topology of another size is loaded too: make room for it.
        if values.numel() != self.values.numel():
            _put(self.values, self.values.data.new_empty(values.shape))
        built = self._held(built)
        for name in ("indptr", "indices"):
            self._buffers[name] = getattr(built, name).clone()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._buffers.update(built._asdict())

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseLayer:
        new = memo[id(self)] = self.__new__(type(self))
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        copies.note(self, new)
        return new


def _put(parameter: nn.Parameter, data: Tensor) -> None:
    """Other data, maybe of another length, in the same parameter, without its gradient."""
    parameter.grad = None
    if data.shape != parameter.shape:
        # The node that accumulates gradients remembers the length, and lives on in graphs that the user
        # still holds (a loss, say). Data of another type makes the parameter forget it.
        other = torch.float32 if parameter.dtype == torch.float64 else torch.float64
        parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = data
    if not parameter.is_inference():
        # Such graphs hold the old connections, which other values do not fit: torch refuses them now.
        torch.autograd.graph.increment_version(parameter)


def _draw(
    domain: Domain,
    sparsity: float | None,
    connections: int | Connections | None,
    generator: torch.Generator | None,
) -> Connections:
    if (sparsity is None) == (connections is None):
        raise ValueError("give either sparsity= or connections=, and not both")
    if isinstance(connections, Connections):
        return domain.taken(connections)
    if sparsity is not None:
        if not 0 <= sparsity <= 1:
            raise ValueError(f"sparsity must be in [0, 1], got {sparsity}")
        connections = _kept(sparsity, domain.size)
    assert connections is not None
    if not 0 <= connections <= domain.size:
        raise ValueError(
            f"connections must be between 0 and {domain.n_out} * {domain.width} = {domain.size}, "
            f"got {connections}"
        )
    return domain.random(connections, generator)


def _kept(sparsity: float, total: int) -> int:
    """ceil((1 - sparsity) * total), not one more for a rounding error."""
    exact = (1 - sparsity) * total
    return min(total, math.ceil(exact - 1e-9 * max(1.0, exact)))


def _uniform(bound: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform in +-bound, drawn on the CPU so that it does not depend on the device."""
    unit = torch.rand(bound.shape, dtype=bound.dtype, generator=generator)
    return (2 * unit.to(bound.device) - 1) * bound


def largest(weight: Tensor, count: int) -> Tensor:
    """A mask of the ``count`` largest magnitudes; equal ones in the order of their place."""
    if not 0 <= count <= weight.numel():
        raise ValueError(f"cannot keep {count} of {weight.numel()} weights")
    order = torch.sort(weight.detach().abs().flatten(), descending=True, stable=True).indices
    mask = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
    mask[order[:count]] = True
    return mask.view(weight.shape)


def keep_mask(
    weight: Tensor, mask: Tensor | None, sparsity: float | None, connections: int | None
) -> Tensor:
    """Which weights of a dense layer to keep: those of ``mask``, or the largest."""
    if sum(argument is not None for argument in (mask, sparsity, connections)) != 1:
        raise ValueError("give one of mask=, sparsity= or connections=")
    if mask is not None:
        if mask.shape != weight.shape:
            raise ValueError(
                f"mask has shape {tuple(mask.shape)}, the weight has {tuple(weight.shape)}"
            )
        return mask.bool()
    if sparsity is not None:
        if not 0 <= sparsity <= 1:
            raise ValueError(f"sparsity must be in [0, 1], got {sparsity}")
        connections = _kept(sparsity, weight.numel())
    assert connections is not None
    return largest(weight, connections)
