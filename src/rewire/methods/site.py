"""One layer as a method sees it, and the probe that sits in it while a rewiring is due."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rewire import sampling
from rewire.communication import Alone
from rewire.connections import Connections
from rewire.nn.layer import ConnectedLayer
from rewire.ops import sampling as ops
from rewire.ops.counting import Counter
from rewire.ops.reference import Convolution
from rewire.ops.sampling import Stream
from rewire.sampling import Batch


class Site:
    """One layer as a method's rules see it, whatever its storage.

    Attributes:
        name: of the layer in the model.
        layer: the layer.
        quota: how many of its connections the schedule wants replaced.
        batch: input and output gradient, while :meth:`Rewirer.explore` runs in a backward pass; of this
            process, see ``batch.group``.
        subset: S, once it is explored.
        gradient: the gradient of the loss at S, summed over the backward passes of this step as that of
            the active connections is in ``.grad``, and averaged over processes once they are.
        pruned: mask over the active connections: which go.
        grown: mask over S: which come.
        considered: how many inactive connections S was chosen from, if these are more than S.
        state: tensors of one element per active connection that a method wants to keep; they follow the
            connections, with zeros for grown ones, and are saved with the rewirer.
        memory: other tensors that a method wants to keep; they are saved with the rewirer.
    """

    quota: int
    stream: Stream
    batch: Batch | None
    subset: Connections | None
    gradient: Tensor | None
    pruned: Tensor | None
    grown: Tensor | None
    considered: int | None

    def __init__(self, name: str, layer: ConnectedLayer, index: int) -> None:
        self.name, self.layer, self.index = name, layer, index
        self.state: dict[str, Tensor] = {}
        self.memory: dict[str, Tensor] = {}
        self.counter: Counter | None = None
        self.clear()

    def clear(self) -> None:
        """Forget what belongs to one rewiring."""
        self._active: Connections | None = None
        self.explored_beside: Connections | None = None  # A as it was then
        self.batch = self.subset = self.gradient = self.pruned = self.grown = None
        self.considered = None

    @property
    def active(self) -> Connections:
        """A, the active connections."""
        if self._active is None or not self.layer.has(self._active):
            self._active = self.layer.connections
        return self._active

    @property
    def weights(self) -> Tensor:
        """The weights of A, to look at."""
        return self.layer.gather(self.layer.parameter.detach())

    @property
    def slopes(self) -> Tensor:
        """The gradient of the loss at A, from ``.grad``."""
        grad = self.layer.parameter.grad
        if grad is None:
            raise RuntimeError(f"{self.name} has no gradient: call step() before zero_grad()")
        return self.layer.gather(grad.detach())

    @property
    def free(self) -> int:
        """How many connections are inactive."""
        return self.layer.n_in * self.layer.n_out - self.layer.count

    def draw(self, factor: float, weights: sampling.Weights = (None, None)) -> Connections:
        """The inactive ones among ``ceil(factor * |A|)`` draws; see :func:`rewire.sampling.draw`."""
        return sampling.draw(self.active, factor, self.stream, weights)

    def choose(self, count: int) -> Connections:
        """So many inactive connections (or all there are), uniformly at random."""
        return sampling.choose(self.active, count, self.stream)

    def random(self, count: int) -> Tensor:
        """Uniform random numbers in [0, 1)."""
        return sampling.uniforms(self.stream, count)

    def normal(self, count: int) -> Tensor:
        """Standard normal random numbers."""
        return sampling.normals(self.stream, count)

    def add_gradient(self, batch: Batch) -> None:
        """Evaluate the gradient at S: one sampled product."""
        assert self.subset is not None
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
                "load the rewirer's state after the model's"
            )

    def take_subset(self, group: Alone, source: int) -> None:
        """S of process ``source``, for those who have not explored one, with a gradient of zero."""
        n_in, n_out = self.layer.n_in, self.layer.n_out
        mine = self.subset or Connections.from_keys(torch.empty(0, dtype=torch.int64), n_in, n_out)
        count = group.gather([len(mine)])[source][0]
        here = group.rank == source
        indptr = group.broadcast(mine.indptr, source)
        indices = group.broadcast(mine.indices if here else mine.indices.new_empty(count), source)
        if self.gradient is None:
            self.subset = Connections(n_in, n_out, indptr, indices)
            self.gradient = self.weights.new_zeros(count)

    def count(self) -> Counter:
        """The connections that were ever active; counted from the first time it is asked for."""
        if self.counter is None:
            n_in, n_out = self.layer.n_in, self.layer.n_out
            self.counter = Counter(n_in, n_out, len(self.active))
            self.counter.add(sampling.rows(self.active))
        return self.counter

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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take :meth:`state_dict` back."""
        self.clear()
        self.state = {key: value.clone() for key, value in state["state"].items()}
        self.memory = {key: value.clone() for key, value in state.get("memory", {}).items()}
        self.counter = None
        if "ever" in state:
            self.counter = Counter(self.layer.n_in, self.layer.n_out, 0)
            self.counter.memory = state["ever"]["memory"].clone()
            self.counter.exact = state["ever"]["exact"]
        if "subset" in state:
            s = state["subset"]
            units = (self.layer.n_in, self.layer.n_out)
            self.subset = Connections(*units, s["indptr"].clone(), s["indices"].clone())
            self.gradient = None if s["gradient"] is None else s["gradient"].clone()
            self.considered = s.get("considered")


class Probe:
    """Shows a rewirer what its layers see in their backward passes, as long as it lives."""

    def __init__(self, observe: Callable[[Site, Batch], None], site: Site) -> None:
        self._observe, self._site = weakref.WeakMethod(observe), site

    @property
    def alive(self) -> bool:
        """Whether there is still a rewirer to show things to."""
        return self._observe() is not None

    def __call__(self, conv: Convolution, x: Tensor, dy: Tensor) -> None:
        """Called by the layer in its backward pass."""
        observe, layer = self._observe(), self._site.layer
        if observe is None:
            layer.probe = None
        elif layer.parameter.requires_grad:
            observe(self._site, Batch(conv, x.detach(), dy.detach()))


def find(model: nn.Module) -> list[Site]:
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
    return [Site(name, layer, index) for index, (name, layer) in enumerate(found)]


def parameters(sites: Sequence[Site]) -> dict[str, nn.Parameter]:
    """Their weights, by name."""
    return {f"{site.name}.{site.layer.holds}".lstrip("."): site.layer.parameter for site in sites}
