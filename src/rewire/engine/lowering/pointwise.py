"""Lowering of operations element by element: those that only each other read become one kernel call.

Such a group ends in a value that is stored. The kernel runs a small program on one tile of elements after
another. Its backward pass is another program: it computes again what it needs from what the group reads,
applies the chain rule, and sums gradients where an operand is broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rewire.engine import rules
from rewire.engine.graph import Node
from rewire.engine.lowering.base import Lowering, Norm, attrs_of
from rewire.engine.lowering.loops import Loops, loops_of
from rewire.engine.lowering.norms import norm_gradients, pass_norm
from rewire.engine.plan import Buffer, Role

_MOST_PARTS = 8  # operands of a sum: a program has no more than 48 slots


def pointwise(low: Lowering, index: int, node: Node) -> None:
    """A node of a group; its last one computes all of it."""
    low.unstored[index] = lambda: _store(low, index)
    if rules.pointwise_reader(low.uses, index) is None:
        low.value(index)


class Program:
    """Instructions on numbered slots: what is read, three factors of each batch norm, what is computed."""

    def __init__(self, low: Lowering, loops: Loops) -> None:
        self.low, self.loops = low, loops
        self.reads: list[Buffer] = []
        self.norms: list[Norm] = []
        self.norm_of: dict[int, int] = {}
        self.code: list[dict[str, Any]] = []
        self._given: dict[Any, int] = {}

    def read(self, buffer: Buffer) -> Any:
        """The slot of an operand."""
        key = (buffer.root, buffer.shape, buffer.window)
        if key not in self._given:
            self._given[key] = len(self.reads)
            self.reads.append(buffer)
        return ("read", self._given[key])

    def norm(self, norm: Norm) -> tuple[Any, Any, Any]:
        """The slots of a batch norm's scale, shift and mean."""
        if norm.node not in self.norm_of:
            self.norm_of[norm.node] = len(self.norms)
            self.norms.append(norm._replace(relu=False))
        k = self.norm_of[norm.node]
        return ("norm", 3 * k), ("norm", 3 * k + 1), ("norm", 3 * k + 2)

    def do(self, op: str, a: Any, b: Any = None, c: Any = None, **more: Any) -> Any:
        """Add an instruction; returns the slot it writes."""
        out = ("made", len(self.code))
        self.code.append({"op": op, "out": out, "a": a, "b": b, "c": c, **more})
        return out

    def number(self, slot: Any) -> int:
        kind, number = slot
        base = {"read": 0, "norm": len(self.reads), "made": len(self.reads) + 3 * len(self.norms)}
        return int(base[kind] + number)

    def emit(
        self,
        node: int,
        labels: list[str],
        writes: list[tuple[Any, Buffer]],
        sums: list[tuple[Any, Buffer]] = (),  # type: ignore[assignment]
        norm_sums: list[dict[str, Any]] = (),  # type: ignore[assignment]
    ) -> None:
        """Add the step that runs the program, with the slots that go to memory."""
        loops = self.loops
        written: list[tuple[Any, Buffer]] = []
        for slot, buffer in writes:  # a slot has one place
            if slot[0] != "made" or any(slot == other for other, _ in written):
                slot = self.do("affine", slot, p=1.0)
            written.append((slot, buffer))
        slots = {"out", "a", "b", "c"}
        code = [
            {k: self.number(v) if k in slots else v for k, v in one.items() if v is not None}
            for one in self.code
        ]
        self.low.emit(
            "Pointwise",
            node,
            *labels,
            loops=loops.sizes,
            channel=loops.channel,
            panel_rows=loops.panel_rows,
            reads=[loops.access(b) for b in self.reads],
            norms=[norm.operands() for norm in self.norms],
            program=code,
            out_writes=[{"slot": self.number(slot), **loops.access(b)} for slot, b in written],
            out_sums=[{"slot": self.number(slot), **loops.access(b)} for slot, b in sums],
            norm_sums=[
                {k: self.number(v) if k in ("g", "gx") else v for k, v in one.items()}
                for one in norm_sums
            ],
        )


class _Group:
    """The nodes that one stored value is computed from, element by element, and what they read."""

    def __init__(self, low: Lowering, end: int) -> None:
        self.low, self.end, self.shape = low, end, low.nodes[end].shape
        self.members: list[int] = []
        self.norms: dict[int, Norm] = {}
        self.leaves: dict[int, Buffer] = {}
        self._gather(end)
        self.loops = self.loops_with([])

    def loops_with(self, parts: list[Buffer]) -> Loops:
        """The loops where some gradients are read as well."""
        leaves = list(self.leaves.values())
        by_channel = bool(self.norms) or _windows(*leaves, *parts)
        return loops_of(self.low, self.shape, [leaf.shape for leaf in leaves], None, by_channel)

    def _gather(self, index: int) -> None:
        for ref in self.low.nodes[index].inputs:
            assert ref is not None
            if ref in self.low.norms and ref in self.low.unstored:
                norm = self.low.take_norm(ref)
                assert norm is not None
                self.norms[ref] = norm
            elif ref in self.low.unstored and self.low.nodes[ref].op in rules.POINTWISE:
                del self.low.unstored[ref]
                self._gather(ref)
            elif ref not in self.leaves:
                self.leaves[ref] = _operand(self.low, ref, self.shape)
        self.members.append(index)

    def labels(self) -> list[str]:
        names = [
            getattr(attrs_of(self.low.nodes[i]), "kind", self.low.nodes[i].op) for i in self.members
        ]
        return [norm.label for norm in self.norms.values()] + names


def _windows(*buffers: Buffer) -> bool:
    """Whether some are parts of larger tensors: their channels do not follow each other."""
    return any(buffer.window is not None for buffer in buffers)


class _Values:
    """The slots of a group's values in a program: computed when they are asked for."""

    def __init__(self, group: _Group, program: Program) -> None:
        self.group, self.program = group, program
        self.found: dict[int, Any] = {}

    def normed(self, ref: int) -> Any:
        """A batch norm's output before its ReLU."""
        norm = self.group.norms[ref]
        scale, shift, _ = self.program.norm(norm)
        return self.program.do("fma", self.program.read(norm.source), scale, shift)

    def of(self, ref: int) -> Any:
        if ref not in self.found:
            self.found[ref] = self._compute(ref)
        return self.found[ref]

    def _compute(self, ref: int) -> Any:
        group, program = self.group, self.program
        if ref in group.norms:
            y = self.normed(ref)
            return program.do("activate", y, activation="relu") if group.norms[ref].relu else y
        if ref in group.leaves:
            return program.read(group.leaves[ref])
        node = group.low.nodes[ref]
        given = [self.of(r) for r in node.inputs if r is not None]
        attrs = attrs_of(node)
        if node.op in ("relu", "activation"):
            return program.do("activate", given[0], **_activation(node))
        if node.op == "affine":
            return program.do("affine", given[0], p=attrs.scale, q=attrs.shift)
        return given[0] if node.op == "cast" else program.do(node.op, *given)


def _activation(node: Node) -> dict[str, Any]:
    if node.op == "relu":
        return {"activation": "relu"}
    attrs = attrs_of(node)
    return {"activation": attrs.kind, "p": attrs.p, "q": attrs.q}


def _operand(low: Lowering, ref: int, shape: tuple[int, ...]) -> Buffer:
    """What a group reads, in memory; a small operand that the region reads stays as torch has it."""
    given = low.uses.shape(ref)
    rest = math.prod(given[1:] if len(given) == len(shape) else given)
    if ref < 0 and given != shape and math.prod(given) in (rest, *given[:1]):
        return low.outside(Role.INPUT, ~ref, ref)
    return low.view(ref)


def _store(low: Lowering, end: int) -> None:
    group = _Group(low, end)
    program = Program(low, group.loops)
    z = low.stored[end] = low.new(group.shape, low.nodes[end].dtype)
    program.emit(end, group.labels(), [(_Values(group, program).of(end), z)])
    if low.uses.requires_grad(end):
        low.backwards.append(lambda: _backward(group, z))


def _backward(group: _Group, z: Buffer) -> None:
    low = group.low
    parts = low.gradients.pop(group.end, [])
    if not parts:
        return
    if len(parts) > _MOST_PARTS:
        parts = [add_up(low, parts, group.end)]
    program = Program(low, group.loops_with(parts))
    values = _Values(group, program)
    slots = [program.read(part) for part in parts]
    grads: dict[int, Any] = {group.end: _sum(program, slots)}
    if low.nodes[group.end].op == "relu":  # its output says as well where it is positive
        values.found[group.end] = program.read(z)
    for index in reversed(group.members):
        g = grads.pop(index, None)
        if g is not None:
            for ref, part in _chain_rule(group, values, index, g):
                grads[ref] = part if ref not in grads else program.do("add", grads[ref], part)
    writes: list[tuple[Any, Buffer]] = []
    sums: list[tuple[Any, Buffer]] = []
    norm_sums: list[dict[str, Any]] = []
    passed = []
    rounded: list[tuple[Buffer, Buffer]] = []  # sums, and where they go in another type
    for ref, g in grads.items():
        if ref in group.norms:
            norm = group.norms[ref]
            if norm.relu:
                g = program.do("gradient", g, values.normed(ref), activation="relu")
            if g[0] != "made" or list(grads.values()).count(g) > 1:
                g = program.do("affine", g, p=1.0)  # it is changed in place afterwards
            *_, mean = program.norm(norm)
            gx = program.do("centered", g, program.read(norm.source), mean)
            dnorm, dx = norm_gradients(low, norm), low.like(norm.source)
            writes.append((g, dx))
            direct = dnorm["factors"] is None
            norm_sums.append(
                {
                    "index": program.norm_of[norm.node],
                    "g": g,
                    "gx": gx,
                    "gradients": dnorm,
                    "x": norm.source if direct else None,
                    "dx": dx if direct else None,
                }
            )
            passed.append((norm, dx, dnorm))
        elif group.leaves[ref].shape == group.shape:
            written = [*writes, *zip(slots, parts, strict=True)]
            dtype = group.leaves[ref].dtype
            same = [b for slot, b in written if slot == g and b.dtype is dtype]
            if not same:  # else a gradient that is passed on as it is
                same = [low.new(group.shape, dtype)]
                writes.append((g, same[0]))
            low.contribute(ref, same[0])
        else:
            target = total = _broadcast_gradient(low, ref, group.leaves[ref])
            if target.dtype is not low.numbers:
                total = low.new(target.shape, low.numbers, target.layout)
                rounded.append((total, target))
            sums.append((g, total))
    if writes or sums:
        program.emit(group.end, group.labels(), writes, sums, norm_sums)
    for total, target in rounded:
        low.copy(total, target, group.end)
    for norm, dx, dnorm in passed:
        pass_norm(low, norm, dx, dnorm)


def _broadcast_gradient(low: Lowering, ref: int, operand: Buffer) -> Buffer:
    """Where the gradient of a broadcast operand is summed."""
    if ref < 0 and operand.role is Role.INPUT and len(low.uses.readers(ref)) == 1:
        return low.outside(Role.INPUT_GRAD, ~ref, ref)
    out = low.like(operand, operand.layout)
    low.contribute(ref, out)
    return out


def _chain_rule(group: _Group, values: _Values, index: int, g: Any) -> Iterator[tuple[int, Any]]:
    """The gradients of a node's operands that are wanted, given that of its output."""
    node, program, uses = group.low.nodes[index], values.program, group.low.uses
    a, b = (*node.inputs, None)[:2]
    assert a is not None
    op = node.op
    if op in ("relu", "activation"):
        at = values.of(index) if op == "relu" and index in values.found else values.of(a)
        yield a, program.do("gradient", g, at, **_activation(node))
        return
    if op == "cast":
        yield a, g
        return
    if op == "affine":
        scale = attrs_of(node).scale
        yield a, g if scale == 1 else program.do("affine", g, p=scale)
        return
    assert b is not None
    if uses.requires_grad(a):
        if op in ("add", "sub"):
            yield a, g
        else:
            yield a, program.do(op, g, values.of(b))
    if uses.requires_grad(b):
        if op == "add":
            yield b, g
        elif op == "sub":
            yield b, program.do("affine", g, p=-1.0)
        elif op == "mul":
            yield b, program.do("mul", g, values.of(a))
        else:  # -g * (a / b) / b
            ratio = program.do("div", program.do("mul", g, values.of(index)), values.of(b))
            yield b, program.do("affine", ratio, p=-1.0)


def _sum(program: Program, slots: list[Any]) -> Any:
    total, *rest = slots
    for slot in rest:
        total = program.do("add", total, slot)
    return total


def add_up(low: Lowering, parts: list[Buffer], node: int) -> Buffer:
    """The sum of some gradients of the same shape and layout, in memory of its own."""
    while len(parts) > 1 or parts[0].window is not None:
        some, parts = parts[:_MOST_PARTS], parts[_MOST_PARTS:]
        total = low.like(some[0], some[0].layout)
        loops = loops_of(low, total.shape, [], total.layout, _windows(*some))
        program = Program(low, loops)
        program.emit(node, [], [(_sum(program, [program.read(part) for part in some]), total)])
        parts.append(total)
    return parts[0]


def copy(low: Lowering, source: Buffer, target: Buffer, node: int) -> None:
    """Copy a tensor, or some channels of one, to another one of the same shape and layout."""
    loops = loops_of(low, source.shape, [], source.layout, _windows(source, target))
    program = Program(low, loops)
    program.emit(node, [], [(program.read(source), target)])


def relu_gradient(low: Lowering, dz: Buffer, z: Buffer, node: int) -> Buffer:
    """The gradient past a ReLU with output z."""
    dy = low.like(dz)
    program = Program(low, loops_of(low, dz.shape, []))
    g = program.do("gradient", program.read(dz), program.read(z), activation="relu")
    program.emit(node, ["ReLU mask"], [(g, dy)])
    return dy
