"""Running a region: what it computes, in how many functions of autograd, and whose the values become."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rewire.engine import aliases, execute, private
from rewire.engine.graph import VIEWS, Alias, InputMeta, root
from rewire.engine.lazy import LazyTensor, data_of
from rewire.engine.ops import EAGER, interpret
from rewire.engine.rules import PRODUCTS

if TYPE_CHECKING:
    from rewire.engine.region import Region


class Run:
    """One run of a region: which values are outputs, in how many parts they are computed, and whose they
    become.

    A part is one function to autograd. It has the nodes that lead to the same values which somebody holds,
    so the graph that autograd sees is as exact as that of the program: what reads a value that is held
    reads it through its place in the graph, where hooks are, and nothing gets a gradient, not even an
    undefined one, that it would not get otherwise. There is one part if only one value is held.
    """

    def __init__(self, region: Region, held: Sequence[LazyTensor]) -> None:
        self.region, self.nodes = region, region.nodes
        self.live: dict[int, LazyTensor] = {}
        for i, ref in enumerate(region.refs):
            lazy = None if ref is None else ref()
            if lazy is not None:
                self.live[i] = lazy
        self.linked = self._linked(held)
        self.found: dict[int, Tensor] = {}
        self.views: dict[Any, Sequence[Tensor]] = {}

    def go(self) -> None:
        for members, leaving in _divided(tuple(self.nodes), tuple(self.live), self.region.grad):
            self._compute(members, leaving)
        for i in self.live:
            self._value(i)

    def _linked(self, held: Sequence[LazyTensor]) -> set[int]:
        """The live ones that keep their place in the shadow graph: those that C++ code holds or has
        changed, and all before them, whose gradients come from them."""
        live, nodes = self.live, self.nodes
        linked = {
            i
            for i, lazy in live.items()
            if lazy._use_count() > 1 or not self.region.untouched(lazy, i)  # type: ignore[attr-defined]
        }
        linked |= {lazy._index for lazy in held if lazy._region is self.region}
        before = -1
        while linked and len(linked) != before:
            before = len(linked)
            behind = set(linked)
            for i in range(len(nodes) - 1, -1, -1):
                if i in behind:
                    behind.update(r for r in nodes[i][2] if r is not None and r >= 0)
            linked |= {i for i in behind if i in live and nodes[i][4]}
            # Views that are linked share memory in a way that autograd does not know of.
            shared = {root(nodes, i) for i in linked if nodes[i][0] in VIEWS}
            linked |= {i for i in live if root(nodes, i) in shared}
            for i in linked:
                live[i]._shared = root(nodes, i) in shared
        return linked

    def _compute(self, members: list[int], leaving: list[int]) -> None:
        """Compute a part."""
        region, nodes = self.region, self.nodes
        if len(members) == len(nodes):
            inside, metas, tensors = nodes, region.metas, region.tensors
            written = [k in region.written for k in range(len(tensors))]
            key = tuple(inside), tuple(metas), tuple(leaving)
        else:
            inside, metas, tensors, written = self._part(members)
            key = tuple(inside), tuple(metas), tuple(map(members.index, leaving))
        if _better_by_torch([node[0] for node in inside]):
            found = interpret(inside, tensors, region.data(True))
            values: Sequence[Tensor] = [found[members.index(i)] for i in leaving]
            region.computed(self, members, None)
        else:
            values = execute.run(key, tensors, written, region.data(True), region.grad)
            region.computed(self, members, key)
        for i, value in zip(leaving, values, strict=True):
            self._take(i, value)

    def _part(
        self, members: list[int]
    ) -> tuple[list[tuple[Any, ...]], list[InputMeta], list[Tensor], list[bool]]:
        """The nodes of a part as a graph of their own, and its inputs; which of them are updated."""
        region = self.region
        local = {i: at for at, i in enumerate(members)}
        places: dict[int, int] = {}  # of operands that are inputs, by reference
        metas: list[InputMeta] = []
        tensors: list[Tensor] = []
        written: list[bool] = []

        def place(ref: int | None) -> int | None:
            if ref is None or ref in local:
                return None if ref is None else local[ref]
            at = places.get(ref)
            if at is None:
                at = places[ref] = len(tensors)
                if ref < 0:
                    tensor, meta = region.tensors[~ref], region.metas[~ref]
                else:
                    tensor = self._value(ref)
                    data = data_of(tensor)
                    grad = region.requires_grad(ref)
                    meta = InputMeta(tuple(data.shape), data.dtype, grad)
                tensors.append(tensor)
                metas.append(meta)
                written.append(ref < 0 and ~ref in region.written)
            return ~at

        inside = [
            (op, attrs, tuple(map(place, inputs)), *rest)
            for op, attrs, inputs, *rest in (self.nodes[i] for i in members)
        ]
        return inside, metas, tensors, written

    def _value(self, index: int) -> Tensor:
        """The value of a node with its place in the graph: a view is made now, of what is there."""
        value = self.found.get(index)
        if value is None:
            op, attrs, inputs, *_ = self.nodes[index]
            assert op in VIEWS
            source = self._value(inputs[0])
            if index in self.linked:
                source = data_of(source)
            if op == "alias":
                value = self._alias(index, attrs, source)
            else:
                value = EAGER[op](attrs, self.region.data(False), source)
            value = self._take(index, value)
        return value

    def _alias(self, index: int, attrs: Alias, source: Tensor) -> Tensor:
        """One of the views that a call makes. They are made together, so their gradient is one, too."""
        key = id(source), index - attrs.part  # the nodes of a call follow each other
        if key not in self.views:
            self.views[key] = aliases.make(attrs.kind, attrs.arguments, source)
        return self.views[key][attrs.part]

    def _take(self, index: int, value: Tensor) -> Tensor:
        """Give a value to who holds the lazy tensor."""
        lazy = self.live.get(index)
        if lazy is None:
            self.found[index] = value
            return value
        if index in self.linked:
            lazy._data = value.detach()
            lazy._region = None
        else:
            private.swap(lazy, value)
            del lazy._region, lazy._index
        self.found[index] = lazy
        return lazy


@lru_cache(maxsize=1024)
def _divided(
    nodes: tuple[tuple[Any, ...], ...], live: tuple[int, ...], grad: bool
) -> list[tuple[list[int], list[int]]]:
    """The nodes of each part, and those whose values leave it, where some values are live. What leads to
    more of them comes first: it may be read by what leads to less, never the other way round."""
    parts = [0] * len(nodes)  # the values, as bits, that a node leads to
    for i in range(len(parts) - 1, -1, -1) if grad else ():
        _, _, inputs, _, requires_grad, _ = nodes[i]
        if requires_grad and i in live:
            parts[i] |= 1 << i
        for r in inputs:
            if r is not None and r >= 0:
                parts[r] |= parts[i]
    # Views do not leave: they are made of what they view.
    outputs = {root(nodes, i) for i in live}
    members: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        if node[0] != "alias":
            members.setdefault(parts[i], []).append(i)
        for r in node[2]:
            if r is not None and r >= 0 and parts[r] != parts[i]:
                outputs.add(root(nodes, r))
    found = []
    for part in sorted(members, key=int.bit_count, reverse=True):
        inside = members[part]
        leaving = [i for i in inside if i in outputs and nodes[i][0] not in VIEWS]
        if leaving or any(nodes[i][0] == "batch_norm" and nodes[i][1].track for i in inside):
            found.append((inside, leaving))
    return found


def _better_by_torch(ops: Sequence[str]) -> bool:
    """Whether there is nothing to gain from a plan: a layer by itself, or operations around layers, which
    would have to move their tensors to another layout and back."""
    computed = [op for op in ops if op not in VIEWS and op != "cast"]
    return computed in _ALONE or not any(op in _PLANNED for op in computed)


_ALONE = [[op] for op in EAGER if op != "dropout"]
_PLANNED = (*PRODUCTS, "dropout")  # torch's dropout has other noise
