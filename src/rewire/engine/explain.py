"""Running a model once to see what the engine makes of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rewire.engine import _HANDLES, execute, observe, places, private
from rewire.engine.explanation import (
    ExplainedLayer,
    Explanation,
    PlannedRegion,
    PlannedStep,
    Stop,
    Value,
)
from rewire.engine.lazy import LazyTensor
from rewire.engine.observe import Why
from rewire.engine.parts import Run
from rewire.engine.places import Place
from rewire.engine.plan import Buffer, Step
from rewire.engine.region import Region
from rewire.engine.rules import PRODUCTS
from rewire.engine.scope import Scope, _local
from rewire.engine.unchanged import unchanged
from rewire.nn.sparse import SparseLayer

_lock = threading.RLock()
_NOWHERE = Place()


def explain(model: nn.Module, example: Any) -> Explanation:
    """What the engine makes of a converted model: the plan as a table, and every place where the engine
    stopped, with the reason and the line of the user's code.

    The model is called once, in the mode that it is in, with gradients if they are on. Its parameters,
    buffers, gradients and attributes, the example and the state of the random number generators of Python,
    NumPy and torch are afterwards what they were; other effects of the model's own code (a list that it
    appends to, a file that it writes) stay. If the model raises an error, so does this.

    Where nothing stops the engine there is one region. Numbers and gradients are right in any case; what is
    not recorded takes longer.

    Args:
        model: converted with ``rewire.sparsify``.
        example: a tensor, a tuple of arguments, or a dict of keyword arguments.

    Returns:
        What was found. ``print()`` it, or look at its ``stops``, ``layers`` and ``regions``.

    Example:
        >>> import rewire
        >>> net = nn.Sequential(nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10))
        >>> net = rewire.sparsify(net, sparsity=0.9)
        >>> found = rewire.explain(net, torch.randn(8, 64))
        >>> [(stop.reason, stop.place.module) for stop in found.stops]
        [('torch.sigmoid is not known to the engine', '1')]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    args, kwargs = _arguments(example)
    watcher = _Watcher(model)
    if watcher.layers and watcher.on:
        with _lock, unchanged(model), _observed(watcher):
            _call(model, args, kwargs)
    found = watcher.explanation()
    watcher.regions.clear()  # they know the watcher, and hold what the model has computed
    return found


def _call(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Calls a model. Frames outside of this one are not the model's."""
    model(*args, **kwargs)


def _arguments(example: Any) -> tuple[Any, Any]:
    """Copies, so that the model may change them."""
    if isinstance(example, Tensor):
        return (_copied(example),), {}
    if isinstance(example, tuple):
        return _copied(example), {}
    if isinstance(example, Mapping):
        return (), {key: _copied(value) for key, value in example.items()}
    raise TypeError(
        "example must be a tensor, a tuple of arguments or a dict of keyword arguments, "
        f"got {type(example).__name__}"
    )


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    return value


@contextmanager
def _observed(watcher: _Watcher) -> Iterator[None]:
    before = observe.observer
    observe.observer = watcher
    try:
        yield
    finally:
        observe.observer = before


class _Watcher:
    """Collects what happens in one call of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.grad, self.training = torch.is_grad_enabled(), model.training
        self.names = {part: name for name, part in model.named_modules()}
        self.modules = {name: part for part, name in self.names.items()}
        self.layers = [part for part in self.names if isinstance(part, SparseLayer)]
        self.on = any(_HANDLES in part.__dict__ for part in self.names)
        self.owners = {
            id(parameter): part
            for part in self.names
            for parameter in part._parameters.values()
            if parameter is not None
        }
        self.thread = threading.get_ident()
        self.recorded = dict.fromkeys(self.layers, 0)
        self.refused: dict[nn.Module, list[tuple[str, Place]]] = {p: [] for p in self.layers}
        self.regions: list[_Region] = []
        self.stops: list[Stop] = []
        self.silent: dict[Scope, str] = {}

    # What the engine tells

    def region(self, *arguments: Any) -> Region:
        own = threading.get_ident() == self.thread
        return _Region(self, *arguments) if own else Region(*arguments)

    def alone(self, layer: nn.Module, x: Any, why: str | None) -> None:
        if layer not in self.refused:
            return
        place = self.find().place
        reason = places.why_alone(layer, x, why, _local.scope, self.silent)
        self.refused[layer].append((reason, place))
        if type(x) is LazyTensor and x._region is not None:
            x._region.run(f"{self.names[layer]} is not recorded: {reason}")

    def off(self, scope: Scope, module: nn.Module) -> None:
        if module in self.names:
            self.silent[scope] = reason = places.why_off(module, self.names)
            self.stops.append(Stop(reason, self.find().place, None))

    def runs(self, region: _Region, why: Any, held: Sequence[LazyTensor]) -> None:
        """A region is about to run."""
        self.regions.append(region)
        if why is Why.RETURNED:
            name = self.find().place.module
            region.end = f"{name} returned" if name else "the model returned"
            return
        found = self.find(hooks=True)
        lazies = [ref() for ref in region.refs if ref is not None]
        linked = bool(held) or any(
            lazy is not None and private.use_count(lazy) > 1 for lazy in lazies
        )
        region.end = places.why_run(why, found, _local.scope, linked)
        self.stops.append(Stop(region.end, found.place, len(self.regions) - 1))

    def find(self, hooks: bool = False) -> places.Found:
        return places.find(self.names, _call.__code__, hooks)

    # What comes of it

    def explanation(self) -> Explanation:
        return Explanation(
            type(self.model).__name__,
            self.on,
            self.training,
            self.grad,
            tuple(map(self._layer, self.layers)),
            tuple(region.planned() for region in self.regions),
            tuple(self.stops),
        )

    def _layer(self, layer: SparseLayer) -> ExplainedLayer:
        refused, recorded = self.refused[layer], self.recorded[layer]
        reason, place = refused[0] if refused else ("", _NOWHERE)
        if not refused and not recorded:
            reason = "the engine is off for this model" if not self.on else self._uncalled(layer)
            place = Place(module=self.names[layer], kind=type(layer).__name__)
        return ExplainedLayer(self.names[layer], recorded, len(refused), reason, place)

    def _uncalled(self, layer: nn.Module) -> str:
        name = self.names[layer]
        for part, above in self.names.items():
            inside = not above or name == above or name.startswith(above + ".")
            if inside and private.is_compiled(part):
                return "it runs inside torch.compile"
        return "it was not called"


class _Region(Region):
    """A region that knows where its nodes were recorded, and tells when it runs."""

    def __init__(self, watcher: _Watcher, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.watcher, self.end = watcher, ""
        self.places: dict[int, Place] = {}
        self.forward: list[PlannedStep] = []
        self.backward: list[PlannedStep] = []
        self.arena = self.functions = 0
        self.outputs: list[Value] = []

    def append(
        self,
        op: str,
        attrs: Any,
        operands: tuple[Tensor | None, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        updated: tuple[Tensor, ...] = (),
    ) -> Any:
        lazy = super().append(op, attrs, operands, shape, dtype, updated)
        if lazy is not NotImplemented:
            self.places[lazy._index] = self._place(op, operands)
        return lazy

    def _place(self, op: str, operands: tuple[Tensor | None, ...]) -> Place:
        """Where a node is recorded: in the module that has its parameters, however that was called."""
        watcher, place = self.watcher, self.watcher.find().place
        if op not in (*PRODUCTS, "batch_norm"):
            return place
        parameter, module = operands[1], watcher.modules.get(place.module)
        if module is None or all(own is not parameter for own in module._parameters.values()):
            module = watcher.owners.get(id(parameter), module)
        if isinstance(module, SparseLayer):
            watcher.recorded[module] += 1
        if module is None or module is watcher.modules.get(place.module):
            return place
        return Place(place.file, place.line, watcher.names[module], type(module).__name__)

    def run_now(self, why: Any, held: Sequence[LazyTensor], settling: bool = False) -> None:
        if self.nodes and not self.closed:
            self.watcher.runs(self, why, held)
        super().run_now(why, held, settling)

    def computed(self, run: Run, members: list[int], key: Any) -> None:
        if key is None:
            self.forward += map(self._by_torch, members)
        else:
            plan = execute.plan_of(key).plan
            self.arena += plan.arena
            self.forward += [self._step(step, members) for step in plan.forward]
            self.backward += [self._step(step, members) for step in plan.backward]
        self.functions += 1
        self.outputs = [
            Value(self.nodes[i][0], self.places[i], self.nodes[i][3], i in run.linked)
            for i in run.live
        ]

    def _step(self, step: Step, members: list[int]) -> PlannedStep:
        place, op = _NOWHERE, "input"
        if step.node >= 0:
            index = members[step.node]
            place, op = self.places[index], self.nodes[index][0]
        written = list(_written(step.arguments))
        first = written[0]
        size = sum(buffer.bytes for buffer in written)
        return PlannedStep(
            *(step.name, op, place, step.fused, first.shape),
            *(first.layout.value, _name(first.dtype), size),
        )

    def _by_torch(self, index: int) -> PlannedStep:
        op, _, _, shape, _, dtype = self.nodes[index]
        size = math.prod(shape) * dtype.itemsize
        fused = ("a layer by itself" if op in PRODUCTS else "by torch",)
        return PlannedStep(
            *(op, op, self.places[index], fused, shape, "contiguous", _name(dtype), size)
        )

    def _dtypes(self) -> str:
        return " and ".join(sorted({_name(node[5]) for node in self.nodes}))

    def planned(self) -> PlannedRegion:
        return PlannedRegion(
            *(len(self.nodes), self.functions, tuple(self.forward), tuple(self.backward)),
            *(self.arena, self._dtypes(), tuple(self.outputs), self.end),
        )


def _written(arguments: Mapping[str, Any]) -> Iterator[Buffer]:
    """What a step writes."""
    for name, value in arguments.items():
        if name.startswith("out_"):
            yield from (b for b in _parts(value) if b is not None)


def _parts(value: Any) -> list[Buffer | None]:
    if isinstance(value, list):
        return [one["operand"] for one in value]
    return list(value.values()) if isinstance(value, dict) else [value]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
