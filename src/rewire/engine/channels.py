"""Graphs for the kernels: with channels second in every tensor.

Kernels know images (N, C, H, W) and rows (R, C). A recorded graph has values of other shapes, too: tokens
(N, T, C), or images with their channels last. :func:`channels_second` gives an equivalent graph. There,

* a layer norm is a ``channel_norm``, over the second dimension;
* (..., C) that a linear layer or a layer norm reads or writes is ``rows``, (R, C): the same memory;
* what a permutation has made of an image (N, C, H, W), or of (N, C, T), is ``last``: still (N, C, places),
  and linear layers and norms work on its second dimension.

A group norm is what measures its ``group_moments``, and operations element by element that others fuse
with. Channels that a view has put in groups, (N, groups, C, H, W), stay (N, channels, H, W), and a
permutation of both is a ``shuffle``.

Between them, and where a value leaves the region, are views and transpositions of every sample (``turn``).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from rewire.engine import graph as ir
from rewire.engine.graph import Graph, Node, Ref, numbers
from rewire.engine.rules import POINTWISE

PLACES = 32
"""So many places of a sample are worth working on one sample after another."""


class Turn(NamedTuple):
    """Of ``turn`` (x): the transpose of every sample, as a matrix of so many rows."""

    rows: int


class Rewritten(NamedTuple):
    """A graph, and for each of its nodes the node of the original one that it works for."""

    graph: Graph
    origin: list[int]


def channels_second(graph: Graph) -> Rewritten:
    """The graph that kernels run."""
    if all(_is_known(graph, node) for node in graph.nodes):
        return Rewritten(graph, list(range(len(graph.nodes))))
    return _Rewriting(graph).result()


def _is_known(graph: Graph, node: Node) -> bool:
    """Whether kernels take a node as it is."""
    dims = len(node.shape)
    if dims == 4 and node.op in POINTWISE:
        metas = [
            graph.nodes[r] if r >= 0 else graph.inputs[~r] for r in node.inputs if r is not None
        ]
        if any(_sums_rows(meta.shape, node.shape) and meta.requires_grad for meta in metas):
            return False
    return node.op not in ("layer_norm", "group_norm", "permute", "clone") and (
        dims == 2 or (dims == 4 and node.op != "linear")
    )


class _Rewriting:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.origin: list[int] = []
        self.node = -1  # of the original graph, that is being rewritten
        # By value of the original graph, what it is in the new one.
        self.plain: dict[int, int] = {~k: ~k for k in range(len(graph.inputs))}  # as it is
        self.rows: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.joined: dict[int, int] = {}  # what has its channels in groups

    def result(self) -> Rewritten:
        handlers = dict.fromkeys(POINTWISE, self._pointwise) | {
            "cast": self._cast,
            "dropout": self._dropout,
            "linear": self._linear,
            "layer_norm": self._layer_norm,
            "group_norm": self._group_norm,
            "clone": self._clone,
            "view": self._view,
            "permute": self._permute,
        }
        for index, node in enumerate(self.graph.nodes):
            self.node = index
            handlers.get(node.op, self._plain)(node)
        outputs = []
        for ref in self.graph.outputs:
            self.node = ref
            found = self.as_plain(ref)
            if found in outputs:  # memory of its own
                found = self.add("affine", ir.Affine(1.0, 0.0), (found,), self.shape(ref))
            outputs.append(found)
        return Rewritten(Graph(tuple(self.nodes), self.graph.inputs, tuple(outputs)), self.origin)

    def add(
        self,
        op: str,
        attrs: Any,
        inputs: tuple[Ref, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
    ) -> int:
        grad = any(ref is not None and self._requires_grad(ref) for ref in inputs)
        if dtype is None:
            dtype = attrs.dtype if op == "cast" else self._dtype(inputs[0])
        self.nodes.append(Node(op, attrs, inputs, shape, grad, dtype))
        self.origin.append(self.node)
        return len(self.nodes) - 1

    def _requires_grad(self, ref: int) -> bool:
        return self.nodes[ref].requires_grad if ref >= 0 else self.graph.inputs[~ref].requires_grad

    def shape(self, ref: int) -> tuple[int, ...]:
        return self.graph.nodes[ref].shape if ref >= 0 else self.graph.inputs[~ref].shape

    def _dtype(self, ref: Ref) -> torch.dtype:
        assert ref is not None
        return self.nodes[ref].dtype if ref >= 0 else self.graph.inputs[~ref].dtype

    # What a value is

    def as_plain(self, ref: int) -> int:
        if ref not in self.plain:
            shape = self.shape(ref)
            if ref in self.rows:
                found = self.view(self.rows[ref], shape)
            elif ref in self.joined:
                found = self.view(self.joined[ref], shape)
            else:
                found = self.add("turn", Turn(shape[-1]), (self.last[ref],), shape)
            self.plain[ref] = found
        return self.plain[ref]

    def as_rows(self, ref: int) -> int:
        if ref not in self.rows:
            shape = self.shape(ref)
            self.rows[ref] = self.view(self.as_plain(ref), (math.prod(shape[:-1]), shape[-1]))
        return self.rows[ref]

    def as_last(self, ref: int) -> int:
        if ref not in self.last:
            shape = _second(self.shape(ref))
            self.last[ref] = self.add("turn", Turn(shape[2]), (self.as_plain(ref),), shape)
        return self.last[ref]

    def view(self, ref: int, shape: tuple[int, ...]) -> int:
        given = self.nodes[ref].shape if ref >= 0 else self.graph.inputs[~ref].shape
        return ref if given == shape else self.add("view", ir.View(shape), (ref,), shape)

    def cast(self, ref: int, dtype: torch.dtype) -> int:
        if self._dtype(ref) is dtype:
            return ref
        shape = self.nodes[ref].shape if ref >= 0 else self.graph.inputs[~ref].shape
        return self.add("cast", ir.Cast(dtype), (ref,), shape, dtype)

    # Operations

    def _plain(self, node: Node) -> None:
        """One that knows images, and their channels second."""
        inputs = tuple(None if r is None else self.as_plain(r) for r in node.inputs)
        self.plain[self.node] = self.add(node.op, node.attrs, inputs, node.shape)

    def _pointwise(self, node: Node) -> None:
        read = [ref for ref in node.inputs if ref is not None]
        shape, dims = node.shape, len(node.shape)
        known = any(ref in self.rows for ref in read)
        last = any(ref in self.last for ref in read)
        small = [ref for ref in read if self.shape(ref) != shape]
        by_row = [ref for ref in small if self._by_row(ref, shape)]
        if not all(ref in by_row or self._along_last(ref, shape) for ref in read):
            self._broadcast(node, read)
        elif not known and not by_row and all(ref in self.last or ref in small for ref in read):
            inputs = tuple(
                self.view(self.as_plain(ref), (shape[-1], 1)) if ref in small else self.last[ref]
                for ref in read
            )
            self.last[self.node] = self.add(node.op, node.attrs, inputs, _second(shape))
        elif dims not in (2, 4) or known or last or (dims == 4 and self._sums_rows(small, shape)):
            inputs = tuple(self._operand(ref, shape) for ref in read)
            rows = (math.prod(shape[:-1]), shape[-1])
            self.rows[self.node] = self.add(node.op, node.attrs, inputs, rows)
        else:
            self._plain(node)

    def _sums_rows(self, small: list[int], shape: tuple[int, ...]) -> bool:
        return any(_sums_rows(self.shape(ref), shape) and self._wanted(ref) for ref in small)

    def _wanted(self, ref: int) -> bool:
        """Whether a gradient is, of a value of the original graph."""
        known = self.graph.nodes[ref] if ref >= 0 else self.graph.inputs[~ref]
        return known.requires_grad

    def _along_last(self, ref: int, shape: tuple[int, ...]) -> bool:
        """Whether an operand has the shape of the result, or differs along its last dimension alone."""
        given = self.shape(ref)
        return given == shape or (math.prod(given[:-1]) == 1 and given[-1:] == shape[-1:])

    def _by_row(self, ref: int, shape: tuple[int, ...]) -> bool:
        """Whether an operand has one number for each sample or each row of tokens, and no gradient."""
        given, places = self.shape(ref), math.prod(shape[1:-1])
        if len(shape) < 3 or len(given) != len(shape) or self._wanted(ref):
            return False
        tokens = len(shape) != 4 or any(r in self.rows for r in self.graph.nodes[self.node].inputs)
        one = given[0] == shape[0] > 1 and given[-1] == 1 < shape[-1] and places > 1
        return tokens and one and given[1:-1] in ((1,) * (len(shape) - 2), shape[1:-1])

    def _operand(self, ref: int, shape: tuple[int, ...]) -> int:
        """What a value of some shape reads, as rows."""
        given, rows = self.shape(ref), math.prod(shape[:-1])
        if given == shape:
            return self.as_rows(ref)
        if self._by_row(ref, shape):
            batch, places = shape[0], rows // shape[0]
            image = self.view(self.as_plain(ref), (batch, 1, math.prod(given) // batch, 1))
            if given[:-1] != shape[:-1]:  # one number for each sample
                repeat = ir.Resample("size", places, 1, "nearest")
                image = self.add("resample", repeat, (image,), (batch, 1, places, 1))
            return self.view(image, (rows, 1))
        return self.view(self.as_plain(ref), shape[-1:])

    def _broadcast(self, node: Node, read: list[int]) -> None:
        """Some operand has a size of 1 where others have not: tokens are images of one column."""
        if len(node.shape) != 3:
            self._plain(node)
            return
        lifted = [(1,) * (3 - len(shape)) + shape for shape in map(self.shape, read)]
        inputs = tuple(
            self.view(self.as_plain(ref), (*shape, 1))
            for ref, shape in zip(read, lifted, strict=True)
        )
        image = self.add(node.op, node.attrs, inputs, (*node.shape, 1))
        self.plain[self.node] = self.view(image, node.shape)

    def _cast(self, node: Node) -> None:
        """Of what the region reads, before it is moved."""
        (source,) = node.inputs
        assert source is not None
        (self._plain if source < 0 else self._pointwise)(node)

    def _dropout(self, node: Node) -> None:
        """Its noise depends on where an element lies in the value itself."""
        if len(node.shape) in (2, 4):
            self._plain(node)
            return
        inputs = (self.as_rows(node.inputs[0]),)  # type: ignore[arg-type]
        rows = (math.prod(node.shape[:-1]), node.shape[-1])
        self.rows[self.node] = self.add(node.op, node.attrs, inputs, rows)

    def _linear(self, node: Node) -> None:
        source, *parameters = node.inputs
        assert source is not None
        attrs: Any = node.attrs
        if source in self.last and not attrs.probe:  # rewirers look at rows
            inputs = (self.last[source], *parameters)
            self.last[self.node] = self.add("linear", attrs, inputs, _second(node.shape))
        else:
            inputs = (self.as_rows(source), *parameters)
            shape = (math.prod(node.shape[:-1]), node.shape[-1])
            self._keep_rows(self.add("linear", attrs, inputs, shape))

    def _layer_norm(self, node: Node) -> None:
        source, *parameters = node.inputs
        assert source is not None
        if source in self.last:
            inputs = (self.last[source], *parameters)
            shape = _second(node.shape)
            self.last[self.node] = self.add("channel_norm", node.attrs, inputs, shape)
        else:
            inputs = (self.as_rows(source), *parameters)
            shape = (math.prod(node.shape[:-1]), node.shape[-1])
            self._keep_rows(self.add("channel_norm", node.attrs, inputs, shape))

    def _group_norm(self, node: Node) -> None:
        source, weight, bias = node.inputs
        assert source is not None
        x, kind, shape = self.as_plain(source), numbers(node.dtype), node.shape
        batch, channels, *image = shape
        ones = (1,) * len(image)
        moments = self.add(
            "group_moments", node.attrs, (x, weight), (batch, 2 * channels, *ones), kind
        )
        mean, factor = (
            self.add(
                "narrow", ir.Narrow(first, first + channels), (moments,), (batch, channels, *ones)
            )
            for first in (0, channels)
        )
        y = self.add("sub", ir.NOTHING, (self.cast(x, kind), mean), shape)
        y = self.add("mul", ir.NOTHING, (y, factor), shape)
        if bias is not None:
            shift = self.cast(self.view(bias, (channels, *ones)), kind)
            y = self.add("add", ir.NOTHING, (y, shift), shape)
        self.plain[self.node] = self.cast(y, node.dtype)

    def _clone(self, node: Node) -> None:
        """Nothing changes a value of a plan, so it is the same one."""
        (source,) = node.inputs
        assert source is not None
        for kind in (self.plain, self.rows, self.last, self.joined):
            if source in kind:
                kind[self.node] = kind[source]

    def _keep_rows(self, ref: int) -> None:
        (self.plain if len(self.graph.nodes[self.node].shape) == 2 else self.rows)[self.node] = ref

    def _view(self, node: Node) -> None:
        (source,) = node.inputs
        assert source is not None
        rows = self.rows.get(source)
        if rows is not None and node.shape[-1] == self.shape(source)[-1]:
            kept = self.plain if len(node.shape) == 2 else self.rows
            kept[self.node] = rows
        elif source in self.joined and node.shape == self._together(source):
            self.plain[self.node] = self.joined[source]
        elif len(node.shape) == 5 and self._together(self.node) == self.shape(source):
            self.joined[self.node] = self.as_plain(source)
        else:
            self.plain[self.node] = self.view(self.as_plain(source), node.shape)

    def _permute(self, node: Node) -> None:
        (source,) = node.inputs
        assert source is not None
        attrs: Any = node.attrs
        if len(node.shape) == 5:
            if source not in self.joined:
                self.joined[source] = self.view(self.as_plain(source), self._together(source))
            shuffle = ir.Shuffle(self.shape(source)[1])
            inputs = (self.joined[source],)
            self.joined[self.node] = self.add("shuffle", shuffle, inputs, self._together(source))
        elif (
            source in self.last and attrs.dims[1] == len(node.shape) - 1
        ):  # what was last is second
            self.plain[self.node] = self.view(self.last[source], node.shape)
        elif (
            attrs.dims[-1] == 1 and math.prod(node.shape[1:-1]) >= PLACES
        ):  # what was second is last
            self.last[self.node] = self.view(self.as_plain(source), _second(node.shape))
        else:
            turn = Turn(math.prod(self.shape(source)[1 : attrs.dims[1]]))
            self.plain[self.node] = self.add("turn", turn, (self.as_plain(source),), node.shape)

    def _together(self, ref: int) -> tuple[int, ...]:
        """The shape of images whose channels are in groups without these."""
        batch, groups, channels, *image = self.shape(ref)
        return (batch, groups * channels, *image)


def _sums_rows(small: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether the gradient of a broadcast operand is a sum over rows of images."""
    return small[-1:] == full[-1:] and math.prod(small) == full[-1] > 1 and small != full


def _second(shape: tuple[int, ...]) -> tuple[int, ...]:
    """(N, C, places) of a shape whose channels are last."""
    batch, *places, channels = shape
    return (batch, channels, math.prod(places))
