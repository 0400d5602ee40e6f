"""Plans with values of bfloat16 and float32: their steps compute what dense torch does in these types."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_graphs import Builder, Case, case, meaning, random_program
from rewire.engine import graph as ir
from rewire.engine.graph import Graph, Node, Ref
from rewire.engine.planned import Planned
from rewire.engine.run import Data, Run
from rewire.ops import native
from rounding import GRADIENTS, no_worse

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")
BF16, F32 = torch.bfloat16, torch.float32
WITH_PARAMETERS = ("conv2d", "linear", "batch_norm")


def mixed(of: Case, rng: random.Random, share: float = 0.7, parameters: torch.dtype = F32) -> Case:
    """The same graph with some values in bfloat16, some in float32, and casts between them."""
    nodes: list[Node] = []
    places: list[int] = []
    kinds: dict[int, torch.dtype] = {}

    def kind(ref: int) -> torch.dtype:
        return nodes[ref].dtype if ref >= 0 else kinds.setdefault(~ref, chosen())

    def chosen() -> torch.dtype:
        return BF16 if rng.random() < share else F32

    def read(ref: int, dtype: torch.dtype) -> int:
        ref = places[ref] if ref >= 0 else ref
        if kind(ref) is dtype:
            return ref
        shape = nodes[ref].shape if ref >= 0 else of.graph.inputs[~ref].shape
        grad = nodes[ref].requires_grad if ref >= 0 else of.graph.inputs[~ref].requires_grad
        nodes.append(Node("cast", ir.Cast(dtype), (ref,), shape, grad, dtype))
        return len(nodes) - 1

    for node in of.graph.nodes:
        has_parameters = node.op in WITH_PARAMETERS
        dtype = BF16 if has_parameters and parameters is BF16 else chosen()
        inputs: list[Ref] = []
        for position, ref in enumerate(node.inputs):
            if ref is not None and has_parameters and position:
                kinds[~ref] = parameters
            elif ref is not None:
                ref = read(ref, dtype)
            inputs.append(ref)
        nodes.append(node._replace(inputs=tuple(inputs), dtype=dtype))
        places.append(len(nodes) - 1)
    metas = tuple(meta._replace(dtype=kinds.get(k, F32)) for k, meta in enumerate(of.graph.inputs))
    graph = Graph(tuple(nodes), metas, tuple(places[i] for i in of.graph.outputs))
    tensors = [t.to(meta.dtype) for t, meta in zip(of.tensors, metas, strict=True)]
    return of._replace(graph=graph, tensors=tensors)


def exact(of: Case) -> Case:
    """The same graph on the same numbers without rounding."""
    double = torch.float64
    nodes = tuple(
        node._replace(attrs=ir.Cast(double) if node.op == "cast" else node.attrs, dtype=double)
        for node in of.graph.nodes
    )
    metas = tuple(meta._replace(dtype=double) for meta in of.graph.inputs)
    graph = of.graph._replace(nodes=nodes, inputs=metas)
    return of._replace(graph=graph, tensors=[t.double() for t in of.tensors])


def _masks(of: Case, node: int, shape: tuple[int, ...]) -> Tensor:
    """What dropout multiplies with: its own output for ones."""
    b = Builder()
    y = b.dropout(b.input(*shape), of.graph.nodes[node].attrs.p)  # type: ignore[attr-defined]
    seed = of.scalars[of.graph.nodes[node].attrs.seed]  # type: ignore[attr-defined]
    ones = torch.ones(shape, dtype=torch.float64)
    (noise,) = Planned(b.graph(y)).forward(Run([ones], Data([], [seed], [], True)))
    return noise


def _by_torch(
    of: Case, grads: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
    """Outputs, inputs afterwards and gradients by dense torch."""
    tensors = [
        tensor.clone().requires_grad_(meta.requires_grad)
        for tensor, meta in zip(of.tensors, of.graph.inputs, strict=True)
    ]
    outputs = meaning(of, tensors, lambda node, shape: _masks(of, node, shape))
    inputs = [t for t in tensors if t.requires_grad]
    leaving = [(y, dy.to(y.dtype)) for y, dy in zip(outputs, grads, strict=True) if y.requires_grad]
    found: list[Tensor | None] = [None] * len(inputs)
    if leaving:
        ys, dys = zip(*leaving, strict=True)
        found = list(torch.autograd.grad(ys, inputs, dys, allow_unused=True))
    return [y.detach() for y in outputs], [t.detach() for t in tensors], found


def compare(of: Case, seed: int = 0) -> Planned:
    """Outputs, running statistics and gradients against dense torch in the same types and in float64."""
    generator = torch.Generator().manual_seed(seed)
    nodes = [of.graph.nodes[i] for i in of.graph.outputs]
    grads = [torch.randn(node.shape, generator=generator).to(node.dtype) for node in nodes]
    dense, truth = _by_torch(of, grads), _by_torch(exact(of), grads)
    tensors = [tensor.clone() for tensor in of.tensors]
    planned = Planned(of.graph)
    run = Run(tensors, Data(of.topologies, of.scalars, [None] * len(of.topologies), True))
    outputs = planned.forward(run)
    for mine, theirs, right in zip(
        outputs + tensors, dense[0] + dense[1], truth[0] + truth[1], strict=True
    ):
        no_worse(mine, theirs, right)
    wanted = [meta.requires_grad for meta in of.graph.inputs]
    if not any(node.requires_grad for node in nodes):
        return planned
    found = [g for g, w in zip(planned.backward(run, grads, wanted), wanted, strict=True) if w]
    # A bias before a batch norm has a gradient of zero: what is left is the rounding of larger ones.
    size = max((float(g.norm()) for g in truth[2] if g is not None), default=0.0)
    for got, by_torch, is_right in zip(found, dense[2], truth[2], strict=True):
        if by_torch is None or is_right is None:
            assert got is None or not got.any()
        else:
            assert got is not None
            no_worse(got, by_torch, is_right, GRADIENTS, size)
    return planned


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_random_graphs(seed: int) -> None:
    rng = random.Random(seed)
    b, outputs = random_program(rng)
    parameters = rng.choice((F32, F32, BF16))
    of = mixed(case(b, *outputs, seed=seed % 1000), rng, rng.choice((0.5, 0.9, 1.0)), parameters)
    compare(of, seed % 1000)
