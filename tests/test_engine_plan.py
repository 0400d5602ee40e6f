"""Plans: their steps compute what plain torch does, forward and backward, whatever was fused."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_graphs import Builder, Case, case, meaning, random_program
from rewire.engine.graph import Graph
from rewire.engine.planned import Planned
from rewire.engine.run import Data, Run
from rewire.ops import native

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")


def _data(of: Case) -> Data:
    return Data(of.topologies, of.scalars, [None] * len(of.topologies), True)


def _mask(of: Case, node: int, shape: tuple[int, ...]) -> Tensor:
    """What dropout multiplies with: its own output for ones."""
    b = Builder()
    y = b.dropout(b.input(*shape), of.graph.nodes[node].attrs.p)  # type: ignore[attr-defined]
    seed = of.scalars[of.graph.nodes[node].attrs.seed]  # type: ignore[attr-defined]
    ones = torch.ones(shape, dtype=torch.float64)
    (noise,) = Planned(b.graph(y)).forward(Run([ones], Data([], [seed], [], True)))
    return noise


def compare(of: Case, seed: int = 0) -> None:
    """Outputs, running statistics and all gradients against dense torch."""
    ours = [tensor.clone() for tensor in of.tensors]
    theirs = [
        tensor.clone().requires_grad_(meta.requires_grad)
        for tensor, meta in zip(of.tensors, of.graph.inputs, strict=True)
    ]
    expected = meaning(of, theirs, lambda node, shape: _mask(of, node, shape))
    planned, run = Planned(of.graph), Run(ours, _data(of))
    outputs = planned.forward(run)
    for y, z in zip(outputs, expected, strict=True):
        assert y.is_contiguous()
        torch.testing.assert_close(y, z.detach(), rtol=1e-9, atol=1e-9)
    for mine, torchs in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, torchs.detach(), rtol=1e-9, atol=1e-9)
    wanted = [meta.requires_grad for meta in of.graph.inputs]
    leaving = [y for y in expected if y.requires_grad]
    if not leaving:
        return
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(y.shape, dtype=y.dtype, generator=generator) for y in expected]
    found = planned.backward(run, grads, wanted)
    inputs = [t for t in theirs if t.requires_grad]
    given = [dy for dy, y in zip(grads, expected, strict=True) if y.requires_grad]
    found_by_torch = torch.autograd.grad(leaving, inputs, given, allow_unused=True)
    # A bias before a batch norm has a gradient of zero: what is left is the rounding of larger ones.
    largest = max((float(g.abs().max()) for g in found_by_torch if g is not None), default=0.0)
    right = iter(found_by_torch)
    for mine, want in zip(found, wanted, strict=True):
        gradient = next(right) if want else None
        if gradient is None:
            assert mine is None or not mine.any()
        else:
            assert mine is not None
            torch.testing.assert_close(mine, gradient, rtol=1e-8, atol=1e-8 * (1 + largest))


@pytest.mark.parametrize("batch", [3, 64, 128])
@pytest.mark.parametrize("training", [False, True])
def test_a_residual_network(batch: int, training: bool) -> None:
    b = Builder()
    x = b.relu(b.norm(b.conv(b.input(batch, 4, 6, 6, grad=False), 6, bias=False), training))
    for _ in range(2):
        y = b.relu(b.norm(b.conv(x, 6, bias=False), training))
        x = b.relu(b.add(b.norm(b.conv(y, 6, bias=False), training), x))
    shortcut = b.pad(b.slice(x), 1, 2)
    y = b.relu(b.norm(b.conv(x, 9, stride=2), training))
    x = b.relu(b.add(b.norm(b.conv(y, 9), training), shortcut))
    compare(case(b, b.linear(b.mean(x), 7)))


@pytest.mark.parametrize("batch", [3, 128])
def test_a_residual_network_whose_shortcuts_are_convolutions(batch: int) -> None:
    b = Builder()
    x = b.relu(b.norm(b.conv(b.input(batch, 4, 6, 6), 6)))
    y = b.norm(b.conv(b.relu(b.norm(b.conv(x, 8, stride=2))), 8))
    x = b.relu(b.add(y, b.norm(b.conv(x, 8, 1, 2, 0))))
    compare(case(b, b.linear(b.mean(x), 7), x))


@pytest.mark.parametrize("batch", [3, 128])
def test_a_chain_with_pooling_and_dropout(batch: int) -> None:
    b = Builder()
    x = b.input(batch, 3, 8, 8, grad=False)
    for channels in (4, 6):
        x = b.max_pool(b.relu(b.norm(b.conv(b.relu(b.norm(b.conv(x, channels))), channels))))
    x = b.dropout(b.relu(b.linear(b.view(x, batch, 24), 9)))
    compare(case(b, b.linear(x, 5)))


@pytest.mark.parametrize("batch", [3, 192])
@pytest.mark.parametrize("residual", [False, True])
def test_a_batch_norm_whose_gradients_are_parts_of_larger_ones(batch: int, residual: bool) -> None:
    b = Builder()
    x = b.input(batch, 5, 3, 2)
    y = b.norm(b.conv(x, 5))
    y = b.relu(b.add(y, x) if residual else y)
    z = b.cat(x, y, b.narrow(b.cat(y, x), 3, 8))
    compare(case(b, b.conv(z, 6)))
    compare(case(b, b.conv(b.cat(y, y, b.relu(y)), 6)))


def test_every_value_escapes() -> None:
    b = Builder()
    x = b.relu(b.norm(b.conv(b.input(128, 4, 6, 6), 6)))
    b.relu(b.add(b.norm(b.conv(x, 6)), x))
    compare(case(b, *range(len(b.nodes))))


def test_parameters_that_are_used_twice() -> None:
    b = Builder()
    first = b.conv(b.input(128, 4, 6, 6), 4)
    node = b.nodes[first]
    second = b.node("conv2d", node.attrs, (first, *node.inputs[1:]), node.shape)
    norm = b.norm(second)
    again = b.node(
        "batch_norm", b.nodes[norm].attrs, (first, *b.nodes[norm].inputs[1:]), node.shape
    )
    compare(case(b, b.add(norm, again)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_output_without_gradient_counts_as_zero(dtype: torch.dtype) -> None:
    b = Builder()
    x = b.conv(b.input(64, 3, 5, 5), 4)
    y = b.relu(x)
    of = case(b, x, y, dtype=dtype)
    planned, run = Planned(of.graph), Run(of.tensors, _data(of))
    planned.forward(run)
    wanted = [True] * len(of.tensors)
    ones = torch.ones(of.graph.nodes[x].shape, dtype=dtype)
    alone = planned.backward(run, [None, ones], wanted)
    both = planned.backward(run, [torch.zeros_like(ones), ones], wanted)
    for a, c in zip(alone, both, strict=True):
        assert a is not None
        assert c is not None
        assert torch.equal(a, c)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_random_graphs(seed: int) -> None:
    b, outputs = random_program(random.Random(seed))
    compare(case(b, *outputs, seed=seed % 1000), seed % 1000)


def test_buffers_that_are_used_at_different_times_share_memory() -> None:
    b = Builder()
    x = b.input(128, 8, 8, 8, grad=False)
    for _ in range(10):
        x = b.conv(x, 8, frozen=True, bias=False)
    graph: Graph = b.graph(x)
    planned = Planned(graph)
    assert planned.plan.arena == 2 * 128 * 8 * 8 * 8 * 8  # the input and the output of a layer
