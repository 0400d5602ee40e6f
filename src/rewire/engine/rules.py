"""The fusion rules: facts about a recorded graph that let one kernel do the work of several.

Each rule is one small function of a graph and a node. None of them looks at tensors or counts anything at
run time: who reads a value is known, because all readers are recorded. :mod:`rewire.engine.lowering` asks
them while it turns nodes into steps. To add a rule, see the worked example in ``docs/design.md``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rewire.engine.graph import Graph, Node, Ref

PRODUCTS = ("conv2d", "linear")
POINTWISE = ("relu", "activation", "affine", "add", "sub", "mul", "div", "cast")
_LARGEST_GROUP = 6  # operations of one pointwise kernel: its values stay in the first-level cache


class Uses:
    """Who reads what in a graph."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = graph.nodes
        self.inputs = graph.inputs
        self.escapes = frozenset(graph.outputs)
        self._readers: dict[int, list[int]] = {}
        for index, node in enumerate(graph.nodes):
            for ref in node.inputs:
                if ref is not None:
                    self._readers.setdefault(ref, []).append(index)

    def readers(self, ref: int) -> list[int]:
        """The nodes that read a value, ascending; twice in it, if one reads it twice."""
        return self._readers.get(ref, [])

    def sole_reader(self, ref: Ref) -> int | None:
        """The one node that reads the value of a node, where nobody else will ever see it."""
        if ref is None or ref < 0 or ref in self.escapes:
            return None
        readers = self.readers(ref)
        return readers[0] if len(readers) == 1 else None

    def requires_grad(self, ref: Ref) -> bool:
        """Whether a gradient of the value is wanted."""
        if ref is None:
            return False
        return self.nodes[ref].requires_grad if ref >= 0 else self.inputs[~ref].requires_grad

    def shape(self, ref: int) -> tuple[int, ...]:
        return self.nodes[ref].shape if ref >= 0 else self.inputs[~ref].shape

    def dtype(self, ref: int) -> torch.dtype:
        return self.nodes[ref].dtype if ref >= 0 else self.inputs[~ref].dtype

    def is_op(self, ref: Ref, *ops: str) -> bool:
        """Whether a value is computed in the region, by one of these operations."""
        return ref is not None and ref >= 0 and self.nodes[ref].op in ops


def relu_after(uses: Uses, node: int) -> int | None:
    """The ReLU that is the only reader of a node, so that the node's own kernel can do it."""
    reader = uses.sole_reader(node)
    return reader if uses.is_op(reader, "relu") else None


def cast_after(uses: Uses, node: int) -> int | None:
    """The cast to half the precision that is the only reader of a layer norm, which writes what it does."""
    reader = uses.sole_reader(node)
    narrows = uses.dtype(node) is not torch.bfloat16
    return reader if narrows and uses.is_op(reader, "cast") else None


def tail(uses: Uses, node: int) -> int:
    """A node, or the ReLU that its kernel does as well."""
    relu = relu_after(uses, node)
    return node if relu is None else relu


def pointwise_reader(uses: Uses, node: int) -> int | None:
    """The operation element by element that alone reads a value of its own shape: one kernel computes both,
    and the value is never in memory."""
    reader = uses.sole_reader(node)
    if not uses.is_op(reader, *POINTWISE) or uses.shape(reader) != uses.shape(node):  # type: ignore[arg-type]
        return None
    assert reader is not None
    return reader if _group_size(uses, reader) <= _LARGEST_GROUP else None


def _group_size(uses: Uses, node: int) -> int:
    """How many operations a pointwise kernel would compute for a value, if nothing limited it; a cast is
    what it does when it reads or writes."""
    size = 0 if uses.is_op(node, "cast") else 1
    for ref in uses.nodes[node].inputs:
        if uses.is_op(ref, *POINTWISE, "batch_norm") and uses.sole_reader(ref) == node:
            assert ref is not None
            size += _group_size(uses, ref) if uses.is_op(ref, *POINTWISE) else 1
    return size


def rows_product(uses: Uses, linear: int) -> bool:
    """A linear layer between contiguous tensors reads and writes them as they are: its kernel transposes a
    few rows at a time."""
    source, *_ = uses.nodes[linear].inputs
    assert source is not None
    return source < 0 and linear in uses.escapes and not uses.readers(linear)


def moments_in_product(uses: Uses, product: int) -> bool:
    """A product measures mean and variance of its output by channel while it writes it, for a batch norm
    in training mode that reads it."""
    return relu_after(uses, product) is None and any(
        uses.is_op(reader, "batch_norm") and _attrs(uses.nodes[reader]).training
        for reader in uses.readers(product)
    )


class ResidualSum(NamedTuple):
    """``relu(batch_norm(x) + residual)``, or without the ReLU or the residual."""

    norm: int
    residual: Ref
    tail: int


def residual_sum(uses: Uses, add: int) -> ResidualSum | None:
    """A batch norm whose only reader is a sum is computed in the same pass as the sum, and its ReLU."""
    left, right = (uses.shape(ref) for ref in uses.nodes[add].inputs if ref is not None)
    if left != right or (tail(uses, add) == add and pointwise_reader(uses, add) is not None):
        return None
    for norm, residual in (uses.nodes[add].inputs, uses.nodes[add].inputs[::-1]):
        if uses.is_op(norm, "batch_norm") and uses.sole_reader(norm) == add:
            assert norm is not None
            assert residual is not None
            return ResidualSum(norm, residual, tail(uses, add))
    return None


def norm_in_reader(uses: Uses, norm: int) -> bool:
    """A batch norm, and its ReLU, are computed while their only reader, a convolution or a max pooling,
    packs its input: their output never exists in memory."""
    end = tail(uses, norm)
    reader = uses.sole_reader(end)
    if reader is None or len(uses.nodes[norm].shape) != 4:
        return False
    if uses.is_op(reader, "max_pool2d"):
        return uses.requires_grad(end) or not uses.requires_grad(reader)
    return uses.is_op(reader, "conv2d") and _one_pass(uses, reader)


def defer_norm_gradient(uses: Uses, norm: int) -> bool:
    """The gradient of a batch norm's input is ``g * a + x * b + c`` with one a, b and c for each channel.
    Where a product made x for this batch norm alone, its backward pass reads g and x anyway, and does the
    rest on the way: the gradient itself is never written."""
    product = uses.nodes[norm].inputs[0]
    return (
        uses.is_op(product, *PRODUCTS)
        and uses.sole_reader(product) == norm
        and uses.requires_grad(product)
        and _values_require_grad(uses, product)  # type: ignore[arg-type]
    )


def residual_gradient_in_reader(uses: Uses, total: ResidualSum) -> int | None:
    """The convolution that computes the gradient of a residual sum with a ReLU: it is the first to read
    the sum, so that it is the last in the backward pass, when all other gradients of the sum are there.
    It has the sum at hand, adds them, applies the ReLU's mask, and writes the result once."""
    readers = uses.readers(total.tail)
    if not uses.is_op(total.tail, "relu") or total.tail in uses.escapes or not readers:
        return None
    first = readers[0]
    if readers.count(first) > 1 or not uses.is_op(first, "conv2d"):
        return None
    fits = _one_pass(uses, first) and defer_norm_gradient(uses, total.norm)
    return first if fits and uses.nodes[first].inputs[0] == total.tail else None


def relu_gradient_in_reader(uses: Uses, product: int) -> int | None:
    """The product that is the only reader of another product's ReLU: it has the ReLU's output at hand when
    it writes its gradient, applies the mask, and sums up the bias gradient of the other product."""
    relu = relu_after(uses, product)
    reader = None if relu is None else uses.sole_reader(relu)
    if not uses.is_op(reader, *PRODUCTS) or uses.nodes[product].op != uses.nodes[reader].op:  # type: ignore[index]
        return None
    assert reader is not None
    fits = uses.requires_grad(relu) and _one_pass(uses, reader)
    return reader if fits and not _attrs(uses.nodes[product]).probe else None


def pad_after_slice(uses: Uses, node: int) -> int | None:
    """The padding with constant channels that is the only reader of a strided slice (the shortcut of a
    ResNet): both are one copy."""
    reader = uses.sole_reader(node)
    if not uses.is_op(reader, "pad"):
        return None
    assert reader is not None
    batch, channels, *image = _pairs(_attrs(uses.nodes[reader]).amounts)
    return reader if not any((*batch, *image[0], *image[1])) and min(channels) >= 0 else None


def _one_pass(uses: Uses, product: int) -> bool:
    """Whether a product that reads what its kernel has to change on the way in computes all of its
    gradients in one pass, or none."""
    node = uses.nodes[product]
    if _attrs(node).probe:
        return False
    wanted = uses.requires_grad(node.inputs[0]) and _values_require_grad(uses, product)
    return wanted or not node.requires_grad


def _values_require_grad(uses: Uses, product: int) -> bool:
    node = uses.nodes[product]
    return uses.requires_grad(node.inputs[1]) and not _attrs(node).probe


def _pairs(amounts: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(amounts[::2], amounts[1::2], strict=True))


def _attrs(node: Node) -> Any:
    return node.attrs
