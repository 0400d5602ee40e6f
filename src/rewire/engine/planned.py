"""Running plans: the engine's one door to the native executor.

A plan is handed over once, as typed steps over numbered operands. A run passes a table of addresses and
sizes, and one arena.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rewire.engine.graph import Graph, numbers
from rewire.engine.lowering import lower
from rewire.engine.plan import SEGMENTS, Buffer, Layout, Role, Segment, Step, segments
from rewire.engine.rules import PRODUCTS
from rewire.engine.run import Run
from rewire.ops import layout, native
from rewire.ops.reference import LINEAR, convolution
from rewire.ops.topology import Topology

_ABSENT = -1
_SIZES = {"geometry": "Geometry", "pool": "Pool", "images": "Images", "slicing": "Thinning"}
_SIZES |= {"padding": "Padding", "down": "Side", "across": "Side"}
_OPERANDS = {"topology": "TopologyOperands", "norm": "NormOperands", "before": "InputNorm"}
_OPERANDS |= {"deferred": "DeferredGradient", "dnorm": "NormGradientOperands"}
_OPERANDS |= {"reads": "Access", "norms": "NormOperands", "program": "Instruction"}
_OPERANDS |= {"writes": "SlotAccess", "sums": "SlotAccess", "norm_sums": "NormSums"}
_OPERANDS |= {"gradients": "NormGradientOperands"}
_ENUMS = {"op": "Operation", "activation": "Activation"}


class _Pass:
    """The forward or the backward steps of a plan on the native side.

    Where some values are bfloat16, steps and operands that are float32 are marked as wide.
    """

    def __init__(self, steps: list[Step], dtype: torch.dtype, arena: int) -> None:
        self.mixed = dtype is torch.bfloat16
        self.ids: dict[Any, int] = {}
        self.operands: list[Any] = []
        self.external: list[tuple[Role, int]] = []
        self.types: list[torch.dtype] = []  # of these
        self.count = len(steps)
        made = [self._step(step) for step in steps]
        self.plan = native.kernels_of(dtype).Plan(made, self.operands, arena)  # type: ignore[union-attr]

    def _step(self, step: Step) -> Any:
        arguments = {
            name.removeprefix("out_"): self._argument(name.removeprefix("out_"), value)
            for name, value in step.arguments.items()
            if value is not None
        }
        wide = _wide(step) if self.mixed else {}
        return getattr(native.module(), step.name)(**arguments, **wide)

    def _argument(self, name: str, value: Any) -> Any:
        module = native.module()
        if isinstance(value, Buffer):
            return self._operand(value.root)
        if isinstance(value, Layout):
            return getattr(module.Layout, value.name.lower())
        if isinstance(value, list):
            return [self._argument(name, one) for one in value]
        if name in _ENUMS:
            return getattr(getattr(module, _ENUMS[name]), value)
        if name in _SIZES:
            return getattr(module, _SIZES[name])(*value)
        if name in _OPERANDS:
            inner = {k: self._argument(k, v) for k, v in value.items() if v is not None}
            if self.mixed and "strides" in value and value["operand"].dtype is torch.float32:
                inner["wide"] = True
            return getattr(module, _OPERANDS[name])(**inner)
        return value

    def _operand(self, buffer: Buffer) -> int:
        arena = buffer.role in (Role.SAVED, Role.SCRATCH)
        key: Any = buffer if arena else (buffer.role, buffer.number)
        if key not in self.ids:
            self.ids[key] = len(self.operands)
            if arena:
                self.operands.append(native.module().Arena(buffer.offset, buffer.bytes))
            else:
                self.operands.append(native.module().External())
                self.external.append(key)
                self.types.append(buffer.dtype)
        return self.ids[key]

    def bind(self, *tables: tuple[Role, int]) -> None:
        """Say in which order, and how many of each, :meth:`run` is given tensors."""
        starts, count = {}, 0
        for role, size in tables:
            starts[role] = count
            count += size
        self.places = [starts[role] + number for role, number in self.external]

    def run(
        self, given: list[Tensor | None], run: Run, first: int = 0, last: int | None = None
    ) -> None:
        """Run some steps on tensors in the order of :meth:`bind`."""
        tensors = [given[place] for place in self.places]
        for tensor, dtype in zip(tensors, self.types, strict=True):
            if tensor is not None and tensor.dtype is not dtype:
                raise ValueError(
                    f"a tensor of shape {tuple(tensor.shape)} that a recorded operation reads was {dtype} "
                    f"and is {tensor.dtype} now: its .data was replaced before the backward pass"
                )
        arena, scalars = run.arena, run.data.scalars
        assert arena is not None
        self.plan.run(
            first,
            self.count if last is None else last,
            [0 if t is None else t.data_ptr() for t in tensors],
            [0 if t is None else t.numel() for t in tensors],
            arena.data_ptr(),
            arena.numel() * arena.element_size(),
            [float(scalar) for scalar in scalars],
            [scalar if isinstance(scalar, int) else 0 for scalar in scalars],
            native.threads(),
        )


def _wide(step: Step) -> dict[str, bool]:
    """What tells a step of a plan with bfloat16 values that those it works on are float32."""
    if step.name in ("Pointwise", "Convert"):  # each operand for itself
        return {}
    if step.name.startswith("LayerNorm"):
        given = step.arguments
        pairs = {"wide_x": given["x"], "wide_y": given.get("dy", given.get("out_y"))}
        return {name: buffer.dtype is torch.float32 for name, buffer in pairs.items()}
    if step.name.startswith("GroupMoments"):  # these are numbers anyway
        return {"wide": step.arguments["x"].dtype is torch.float32}
    floats = [buffer for buffer in step.buffers() if buffer.dtype.is_floating_point]
    values = [buffer for buffer in floats if buffer.layout is not Layout.FLAT] or floats
    (dtype,) = {buffer.dtype for buffer in values}
    return {"wide": dtype is torch.float32}


class Planned:
    """Runs a graph by its plan.

    Attributes:
        dtype: of its kernels: bfloat16 if any value is.
        graph: what is computed.
        plan: by which steps.
        steps: those of the backward pass.
        whole, segments: them as one segment, and as several that hand out gradients early.
        statistics: the inputs that are running statistics of batch norms in evaluation mode.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.dtype = graph, graph.dtype
        self.plan = lower(graph, layout.panel_width(native.kernels_of(self.dtype)))
        self._forward = _Pass(self.plan.forward, self.dtype, self.plan.arena)
        self.steps = _Pass(self.plan.backward, self.dtype, self.plan.arena)
        self.exports = 2 * sum(map(len, self.plan.probes.values()))
        inputs, outputs = len(graph.inputs), len(graph.outputs)
        numbers = [node.attrs.topology for node in graph.nodes if node.op in PRODUCTS]  # type: ignore[attr-defined]
        self._layers = 1 + max(numbers, default=-1)
        norms = [node for node in graph.nodes if node.op == "batch_norm"]
        given_norms = [node for node in norms if not node.attrs.training]  # type: ignore[attr-defined]
        self.statistics = {
            ~ref for node in given_norms for ref in node.inputs[3:] if ref is not None
        }
        given = (Role.INPUT, inputs), (Role.INDEX, self._layers * len(Topology._fields))
        self._forward.bind(*given, (Role.OUTPUT, outputs))
        gradients = (Role.OUTPUT_GRAD, outputs), (Role.INPUT_GRAD, inputs)
        self.steps.bind(*given, *gradients, (Role.EXPORT, self.exports))
        (self.whole,) = segments(self.plan.backward, inputs, 1)
        self.segments = segments(self.plan.backward, inputs, SEGMENTS)

    def forward(self, run: Run) -> list[Tensor]:
        """The values that escape; the run keeps the arena, which the backward pass reads."""
        nodes = [self.graph.nodes[ref] for ref in self.graph.outputs]
        outputs = [_empty(node.shape, node.dtype) for node in nodes]
        run.arena = self.new_arena()
        self._forward.run([*self.given(run), *outputs], run)
        return outputs

    def prepare(self, run: Run) -> None:
        """Instead of :meth:`forward`, for the backward pass of a single layer: only move its input to
        where the backward pass reads it."""
        steps = self.plan.forward
        last = next(at for at, step in enumerate(steps) if step.node >= 0)
        run.arena = self.new_arena()
        self._forward.run([*self.given(run), *[None] * len(self.graph.outputs)], run, 0, last)

    def backward(
        self, run: Run, grads: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradients of the inputs that are wanted; an output without one contributes nothing."""
        return Backward(self, run, grads).take(self.whole, wanted)

    def given(self, run: Run) -> list[Tensor | None]:
        """What the region reads, and the index vectors of its layers."""
        inputs = [None if t is None else t.contiguous() for t in run.tensors]
        layers = run.data.topologies[: self._layers]
        return [*inputs, *(vector for topology in layers for vector in topology)]

    def new_arena(self) -> Tensor:
        dtype = numbers(self.dtype)
        return _empty((-(-self.plan.arena // dtype.itemsize),), dtype)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return native.empty(shape, layout.contiguous_strides(shape), dtype)


class Backward:
    """A backward pass under way, which runs the steps of a plan up to the end of one segment after another.

    Its segments may run between other functions of autograd, so it is all that they share, and it has the
    part of the arena that backward steps write to itself: another pass that begins meanwhile, on another
    thread or in a hook, gets a copy of the arena.
    """

    def __init__(self, planned: Planned, run: Run, grads: Sequence[Tensor | None]) -> None:
        graph, arena = planned.graph, run.arena
        assert arena is not None
        if not run.use.claim(self):
            run = copy.copy(run)
            run.arena = arena.clone()
        self._planned, self._run, self._done = planned, run, 0
        nodes = [graph.nodes[ref] for ref in graph.outputs]
        given = [
            torch.zeros(node.shape, dtype=node.dtype, device="cpu")
            if grad is None
            else grad.contiguous()
            for grad, node in zip(grads, nodes, strict=True)
        ]
        self._given = [*planned.given(run), *given]
        self._found: list[Tensor | None] = [None] * len(graph.inputs)
        for role, number in planned.steps.external:
            if role is Role.INPUT_GRAD:
                tensor = run.tensors[number]
                assert tensor is not None
                self._found[number] = _empty(tuple(tensor.shape), tensor.dtype)
        self._reached = _reached(graph, grads) if any(grad is None for grad in grads) else None

    def take(self, segment: Segment, wanted: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of a segment's inputs that are wanted. They are not kept: autograd would copy
        gradients that somebody else holds."""
        self._advance(segment.last)
        grads: list[Tensor | None] = []
        for k, want in zip(segment.inputs, wanted, strict=True):
            grad, self._found[k] = self._found[k], None
            reached = self._reached is None or ~k in self._reached
            grads.append(grad if want and reached else None)
        return grads

    def _advance(self, last: int) -> None:
        """Run the steps before ``last``, and show rewirers what they watch on the way."""
        probes = self._planned.plan.probes
        for stop in sorted({*(s for s in probes if self._done < s < last), last}):
            shown = probes.get(stop, [])
            exports: list[Any] = [None] * self._planned.exports
            for _, *buffers in shown:
                for buffer in buffers:
                    exports[buffer.number] = native.empty(
                        buffer.shape, layout.strides(buffer.shape), buffer.dtype
                    )
            tensors = [*self._given, *self._found, *exports]
            self._planned.steps.run(tensors, self._run, self._done, stop)
            self._done = stop
            for node, *buffers in shown:
                self._show(node, *(exports[b.number] for b in buffers))

    def _show(self, node: int, x: Tensor, dy: Tensor) -> None:
        """Let a rewirer see the input and the output gradient of a layer."""
        op, attrs, *_ = self._planned.graph.nodes[node]
        probe = self._run.data.probes[attrs.topology]  # type: ignore[attr-defined]
        assert probe is not None
        probe(LINEAR if op == "linear" else convolution(*attrs[:4]), x, dy)  # type: ignore[index]


def _reached(graph: Graph, grads: Sequence[Tensor | None]) -> set[int]:
    """Inputs and nodes on which an output with a gradient depends: others get none, not zero."""
    reached = {i for i, grad in zip(graph.outputs, grads, strict=True) if grad is not None}
    for index in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[index]
        if index in reached and node.requires_grad:
            reached.update(ref for ref in node.inputs if ref is not None)
    return reached
