"""The table of operations: what each one computes, with ordinary tensors that autograd knows.

How torch functions become nodes is in :mod:`rewire.engine.parse`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rewire import ops
from rewire.engine import graph as ir
from rewire.ops import channels, layout
from rewire.ops.eager import Probe
from rewire.ops.reference import Convolution
from rewire.ops.topology import Topology


class Data(NamedTuple):
    """What nodes refer to by an index, beside the tensors that are inputs of the graph."""

    topologies: Sequence[Topology]
    scalars: Sequence[float | int]
    probes: Sequence[Probe | None]  # one for each topology
    effects: bool  # whether running statistics are updated


class Run:
    """The data of one run of a graph.

    Attributes:
        tensors: the graph's inputs; in the backward pass None for running statistics that the forward
            pass has updated.
        data: topologies, scalars and probes.
        arena: what the forward pass has left for the backward pass.
        lock: held by a backward pass, which uses a part of the arena.
    """

    def __init__(self, tensors: Sequence[Tensor | None], data: Data) -> None:
        self.tensors, self.data = tensors, data
        self.arena: Tensor | None = None
        self.lock = threading.Lock()


@lru_cache(maxsize=1024)
def convolution(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> Convolution:
    """The one object with these sizes: they are compared by identity elsewhere."""
    return Convolution(kernel, stride, padding, dilation)


def _conv2d(a: ir.Conv, data: Data, x: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    return ops.conv2d(
        *(x, values, bias, data.topologies[a.topology], convolution(*a[:4])),
        probe=data.probes[a.topology],
    )


def _linear(a: ir.Linear, data: Data, x: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    return ops.linear(x, values, bias, data.topologies[a.topology], probe=data.probes[a.topology])


def _batch_norm(
    a: ir.BatchNorm,
    data: Data,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
) -> Tensor:
    if not a.training:
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, a.eps)
    if not a.track or not data.effects:
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, a.eps)
    assert a.momentum is not None
    momentum = float(data.scalars[a.momentum])
    return F.batch_norm(x, mean, variance, weight, bias, True, momentum, a.eps)


def _pad(a: ir.Pad, data: Data, x: Tensor) -> Tensor:
    amounts = [n for dim in (3, 2, 1, 0) for n in a.amounts[2 * dim : 2 * dim + 2]]
    return F.pad(x, amounts, value=a.value)


def _dropout(a: ir.Dropout, data: Data, x: Tensor) -> Tensor:
    return dropout(x, a.p, int(data.scalars[a.seed]))


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """``F.dropout`` with the noise of a seed."""
    if not layout.is_batch_last(x):
        x = torch.empty_strided(x.shape, layout.strides(tuple(x.shape)), dtype=x.dtype).copy_(x)
    return channels.apply(channels._Dropout, x, p, seed)


Eager = Callable[..., Tensor]
EAGER: dict[str, Eager] = {
    "conv2d": _conv2d,
    "linear": _linear,
    "batch_norm": _batch_norm,
    "relu": lambda a, data, x: F.relu(x),
    "add": lambda a, data, x, y: x + y,
    "max_pool2d": lambda a, data, x: F.max_pool2d(x, a.kernel, a.stride, a.padding),
    "avg_pool2d": lambda a, data, x: F.avg_pool2d(
        x, a.kernel, a.stride, a.padding, False, a.count_include_pad
    ),
    "mean": lambda a, data, x: x.mean((2, 3), keepdim=a.keepdim),
    "slice": lambda a, data, x: x[:, :, :: a.down, :: a.across],
    "pad": _pad,
    "view": lambda a, data, x: x.reshape(a.shape),
    "dropout": _dropout,
}


def interpret(
    nodes: Sequence[tuple[Any, ...]], tensors: Sequence[Tensor | None], data: Data
) -> list[Tensor]:
    """The outputs of all nodes, computed one by one by operations that autograd knows.

    This is what a region means: the oracle of the tests, the fallback where there is no plan, and what
    gradients of gradients are taken of.

    Args:
        nodes: of a graph, as :class:`rewire.engine.graph.Node` or plain tuples.
        tensors: the inputs of the graph; None for running statistics if there are to be no effects.
        data: what else nodes refer to.
    """
    found: list[Tensor] = []
    for op, attrs, inputs, _, _ in nodes:
        found.append(EAGER[op](attrs, data, *reads(inputs, found, tensors)))
    return found


def reads(
    inputs: Sequence[ir.Ref], found: Sequence[Tensor], tensors: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """What a node reads."""
    return [None if r is None else found[r] if r >= 0 else tensors[~r] for r in inputs]
