"""The view of a layer that a method works on, and the probe in the layer while a rewiring is due."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rewire import sampling
from rewire.communication import Alone
from rewire.connections import Connections
from rewire.engine.graph import numbers
from rewire.methods.arguments import check_integer, copy_of
from rewire.methods.streaming import DenseGradient
from rewire.nn.layer import ConnectedLayer
from rewire.ops import sampling as ops
from rewire.ops.counting import Counter
from rewire.ops.reference import Convolution
from rewire.ops.sampling import Stream
from rewire.sampling import Batch

if TYPE_CHECKING:
    from rewire.methods.change import Replaced


class LayerView:
    """A view of one layer for a method's rules, independent of its storage.

    Attributes:
        name: of the layer in the model.
        layer: the layer.
        quota: how many of its connections the schedule wants replaced.
        batch: input and output gradient, while :meth:`Rewirer.explore` runs in a backward pass; of this
            process, see ``batch.group``.
        subset: S, once it is explored.
        dense: the gradient at all connections, where S is all inactive ones; those with the largest become
            ``subset`` when a rewiring is due.
        gradient: the gradient of the loss at S, summed over the backward passes of this step as that of
            the active connections is in ``.grad``, and averaged over processes once they are.
        pruned: mask over the active connections: which go.
        grown: mask over S: which come.
        after: the connections with both done, if a method has made them already.
        considered: how many inactive connections S was chosen from, if these are more than S.
        state: tensors of one element per active connection that a method wants to keep; they follow the
            connections, with zeros for grown ones, and are saved with the rewirer.
        memory: other tensors that a method wants to keep; they are saved with the rewirer.
    """

    quota: int
    stream: Stream
    batch: Batch | None
    subset: Connections | None
    dense: DenseGradient | None
    gradient: Tensor | None
    pruned: Tensor | None
    grown: Tensor | None
    after: Replaced | None
    considered: int | None

    def __init__(self, name: str, layer: ConnectedLayer, index: int) -> None:
        self.name, self.layer, self.index = name, layer, index
        self.state: dict[str, Tensor] = {}
        self.memory: dict[str, Tensor] = {}
        self.counter: Counter | None = None
        self.clear()

    def clear(self) -> None:
        """Clear the state of one rewiring."""
        self._active: Connections | None = None
        self.explored_beside: Connections | None = None  # A as it was then
        self.batch = self.subset = self.dense = self.gradient = None
        self.pruned = self.grown = self.after = self.considered = None

    @property
    def active(self) -> Connections:
        """A, the active connections."""
        if self._active is None or not self.layer.has(self._active):
            self._active = self.layer.connections
        return self._active

    @property
    def weights(self) -> Tensor:
        """The weights of A, to look at; in float32 if they are bfloat16, as all that is computed here."""
        return _wide(self.layer.gather(self.layer.parameter.detach()))

    @property
    def slopes(self) -> Tensor:
        """The gradient of the loss at A, from ``.grad``."""
        grad = self.layer.parameter.grad
        if grad is None:
            raise RuntimeError(f"{self.name} has no gradient: call step() before zero_grad()")
        return _wide(self.layer.gather(grad.detach()))

    @property
    def free(self) -> int:
        """How many connections are inactive."""
        return self.layer.domain.size - self.layer.count

    def look_at_all(self) -> None:
        """Let S be all inactive connections, without listing them."""
        self.dense = self.dense or DenseGradient(self.layer.domain, self.weights)

    def draw(self, factor: float, weights: sampling.Weights = (None, None)) -> Connections:
        """The inactive ones among ``ceil(factor * |A|)`` draws; see :func:`rewire.sampling.draw`."""
        return sampling.draw(self.active, factor, self.stream, weights)

    def choose(self, count: int) -> Connections:
        """``count`` inactive connections (or all there are), uniformly at random."""
        return sampling.choose(self.active, count, self.stream)

    def random(self, count: int) -> Tensor:
        """Uniform random numbers in [0, 1)."""
        return sampling.uniforms(self.stream, count)

    def normal(self, count: int) -> Tensor:
        """Standard normal random numbers."""
        return sampling.normals(self.stream, count)

    def take(self, subset: Connections | None) -> None:
        """Let S be what was explored just now; None is all inactive connections, not listed."""
        if subset is None:
            self.look_at_all()
        else:
            self.check_units(subset)
        self.subset, self.explored_beside = subset, self.active

    def check_units(self, subset: Connections) -> None:
        """Raise a ValueError unless these are connections of units that the layer has."""
        if (subset.n_in, subset.n_out) != (self.layer.n_in, self.layer.n_out):
            raise ValueError(
                f"S of {self.name} has connections of {subset.n_out} x {subset.n_in} units, expected "
                f"{self.layer.n_out} x {self.layer.n_in}: give explore() or choose() those of the layer"
            )

    def add_gradient(self, batch: Batch) -> None:
        """Evaluate the gradient at S: one sampled product; where S is everything, take note of it."""
        if self.subset is None:
            assert self.dense is not None
            self.dense.add(batch)
            return
        gradient = ops.gradient_over(batch.conv, batch.dy, batch.x, sampling.rows(self.subset))
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def check_subset(self) -> None:
        """Raise if S, explored in a backward pass, holds connections that are active by now."""
        if self.subset is None or self.active is self.explored_beside:
            return
        if bool(torch.isin(self.subset.keys(), self.active.keys()).any()):
            name = self.name or type(self.layer).__name__
            raise RuntimeError(
                f"the connections of {name} were replaced between the backward pass that explored "
                "others to grow and step(): replace them before the backward pass or after step(), or "
                "load the states of the rewirer, the model and the optimizer, all three"
            )

    def check_state(self) -> None:
        """Raise a RuntimeError unless what follows the connections has an element for each of them."""
        for key, tensor in self.state.items():
            if tensor.numel() != self.layer.count:
                raise RuntimeError(
                    f"{self.name} has {self.layer.count} connections, and {key} is of {tensor.numel()} "
                    "others: load the states of the rewirer, the model and the optimizer, all three"
                )

    def take_subset(self, group: Alone, source: int) -> None:
        """S of process ``source``, for those who have not explored one, with a gradient of zero."""
        domain = self.layer.domain
        mine = self.subset or domain.from_keys(torch.empty(0, dtype=torch.int64))
        count = group.gather([len(mine)])[source][0]
        here = group.rank == source
        indptr = group.broadcast(mine.indptr, source)
        indices = group.broadcast(mine.indices if here else mine.indices.new_empty(count), source)
        if self.gradient is None:
            self.subset = domain.of(indptr, indices)
            self.gradient = self.weights.new_zeros(count)

    def count(self) -> Counter:
        """The connections that were ever active; counted from the first time it is asked for."""
        if self.counter is None:
            self.counter = self._counter(len(self.active))
            self.counter.add(sampling.rows(self.active.packed()))
        return self.counter

    def _counter(self, active: int) -> Counter:
        """That counts by column."""
        return Counter(self.layer.domain.width, self.layer.n_out, active)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: the method's own tensors, S with its gradient, and the count."""
        state: dict[str, Any] = {"state": {k: v.clone() for k, v in self.state.items()}}
        state["memory"] = {k: v.clone() for k, v in self.memory.items()}
        if self.counter is not None:
            state["ever"] = {"memory": self.counter.memory.clone(), "exact": self.counter.exact}
        if self.subset is not None:
            rows = {"indptr": self.subset.indptr, "indices": self.subset.indices}
            state["subset"] = {**rows, "gradient": self.gradient, "considered": self.considered}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.put(self.checked(state, {}))

    def checked(self, state: Mapping[str, Any], memory: Mapping[str, Like]) -> dict[str, Any]:
        """Attributes for :meth:`put` from a :meth:`state_dict`; nothing is changed yet.

        Args:
            state: of a layer with the same units.
            memory: what tensors in ``memory`` must be like, by name.

        Raises:
            ValueError: if it belongs to another layer, or is damaged.
        """
        try:
            return self._checked(state, memory)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"the state of {self.name} does not fit this layer: {problem}"
            ) from error

    def _checked(self, state: Mapping[str, Any], memory: Mapping[str, Like]) -> dict[str, Any]:
        layer, weights = self.layer, self.layer.parameter
        found: dict[str, Any] = {
            name: {key: copy_of(key, tensor) for key, tensor in state.get(name, {}).items()}
            for name in ("state", "memory")
        }
        for key, tensor in found["state"].items():
            kind = self.state[key].dtype if key in self.state else tensor.dtype
            # As long as A, which is the model's: it may be loaded later, so see change.check_lengths.
            _expect(key, tensor, Like((min(tensor.numel(), layer.domain.size),), kind))
        for key in self.state.keys() - found["state"].keys():
            raise KeyError(key)
        for key, like in memory.items():
            if key in found["memory"]:
                _expect(key, found["memory"][key], like)
            elif found["memory"] or like.always:
                raise KeyError(key)
        found["counter"] = None
        if "ever" in state:
            found["counter"] = self._counter(0)
            bits = copy_of("memory", state["ever"]["memory"])
            found["counter"].load(bits, state["ever"]["exact"])
        if "subset" in state:
            s = state["subset"]
            found["subset"] = layer.domain.of(*(copy_of(n, s[n]) for n in ("indptr", "indices")))
            if s["gradient"] is not None:
                found["gradient"] = copy_of("gradient", s["gradient"])
                like = Like((len(found["subset"]),), numbers(weights.dtype))
                _expect("gradient", found["gradient"], like)
            if s.get("considered") is not None:
                found["considered"] = check_integer("considered", s["considered"])
        return found

    def put(self, checked: Mapping[str, Any]) -> None:
        """Store what :meth:`checked` returned."""
        self.clear()
        for name, value in checked.items():
            setattr(self, name, value)


Site = LayerView
"""Its earlier name."""


def _wide(x: Tensor) -> Tensor:
    """In the type of sums and scores."""
    return x.to(numbers(x.dtype))


class Like(NamedTuple):
    """Shape and dtype that a tensor must have."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    always: bool = False  # or only once the method has begun to keep it


def _expect(name: str, tensor: Tensor, like: Like) -> None:
    if tuple(tensor.shape) != like.shape or tensor.dtype != like.dtype:
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected {like.dtype} of shape "
            f"{like.shape}"
        )


class Probe:
    """Shows a rewirer what its layers see in their backward passes, as long as it lives."""

    def __init__(self, observe: Callable[[LayerView, Batch], None], view: LayerView) -> None:
        self._observe, self._view = weakref.WeakMethod(observe), view

    @property
    def alive(self) -> bool:
        """Whether there is still a rewirer to show things to."""
        return self._observe() is not None

    def __call__(self, conv: Convolution, x: Tensor, dy: Tensor) -> None:
        """Called by the layer in its backward pass."""
        observe, layer = self._observe(), self._view.layer
        if observe is None:
            layer.probe = None
        elif layer.parameter.requires_grad:
            observe(self._view, Batch(conv, _wide(x.detach()), _wide(dy.detach())))


def find(model: nn.Module) -> list[LayerView]:
    """The layers of a model that can be rewired."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, ConnectedLayer)]
    if not found:
        raise ValueError("the model has no sparse layers: call rewire.sparsify(model, ...) first")
    owners: dict[int, str] = {}
    for name, layer in found:
        other = owners.setdefault(id(layer.parameter), name)
        if other != name:
            raise ValueError(
                f"{other} and {name} share one parameter, but not their connections; use the same layer "
                "in both places instead"
            )
    return [LayerView(name, layer, index) for index, (name, layer) in enumerate(found)]


def parameters(views: Sequence[LayerView]) -> dict[str, nn.Parameter]:
    """The parameters of the layers, by name."""
    return {f"{view.name}.{view.layer.holds}".lstrip("."): view.layer.parameter for view in views}
