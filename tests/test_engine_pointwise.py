"""Operations element by element: activations, sums and products with broadcasting, in groups."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_graphs import ACTIVATIONS, TORCH, Builder, case, random_program
from rewire.engine.planned import Planned
from rewire.engine.run import Data, Run
from rewire.ops import native
from test_engine_plan import compare

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="needs the compiled kernels"),
    pytest.mark.usefixtures("isa"),
]

POINTS = [
    -1e30,
    -200.0,
    -88.5,
    -30.0,
    -3.0,
    -0.5,
    -1e-3,
    -1e-30,
    0.0,
    1e-30,
    1e-3,
    0.5,
    1.25,
    1.5,
    3.0,
]
POINTS += [9.5, 30.0, 88.5, 200.0, 1e30]


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_activations(kind: str, dtype: torch.dtype) -> None:
    """Value and gradient, at the ends of the number line too, in vectors and behind the last one."""
    p, q = ACTIVATIONS[kind]
    x = torch.cat([torch.linspace(-12, 12, 1001), torch.tensor(POINTS)]).to(dtype)[:, None]
    b = Builder()
    b.activation(b.input(*x.shape), kind, p, q)
    of = case(b, 0, dtype=dtype)
    planned, run = Planned(of.graph), Run([x], Data([], [], [], True))
    (y,) = planned.forward(run)
    dy = torch.rand(x.shape, dtype=dtype) + 0.5
    (dx,) = planned.backward(run, [dy], [True])
    exact = x.double().requires_grad_()
    z = TORCH[kind](exact, p, q)
    (dz,) = torch.autograd.grad(z, exact, dy.double())
    accuracy = 3e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(y.double(), z.detach(), rtol=accuracy, atol=accuracy / 10)
    torch.testing.assert_close(dx.double(), dz, rtol=accuracy, atol=accuracy)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_stays_nan(kind: str, dtype: torch.dtype) -> None:
    b = Builder()
    b.activation(b.input(40, 1), kind, *ACTIVATIONS[kind])
    of = case(b, 0, dtype=dtype)
    x = torch.zeros(40, 1, dtype=dtype)
    x[3], x[39] = torch.nan, torch.nan
    (y,) = Planned(of.graph).forward(Run([x], Data([], [], [], True)))
    assert y.isnan().flatten().nonzero().flatten().tolist() == [3, 39]


@pytest.mark.parametrize("batch", [3, 64, 128])
def test_squeeze_and_excitation(batch: int) -> None:
    b = Builder()
    x = b.activation(b.norm(b.conv(b.input(batch, 3, 5, 6), 8)), "silu")
    gate = b.conv(b.activation(b.conv(b.mean(x, True), 2, 1, 1, 0), "silu"), 8, 1, 1, 0)
    y = b.norm(b.conv(b.binary("mul", b.activation(gate, "sigmoid"), x), 3))
    noise = b.input(batch, 1, 1, 1, grad=False)
    y = b.add(b.binary("mul", y, noise), b.conv(x, 3))
    steps = [step.name for step in Planned(b.graph(y)).plan.forward]
    assert (
        steps.count("Pointwise") == 5
    )  # two norms, SiLU, sigmoid, the noise and the sum are inside
    compare(case(b, y))


@pytest.mark.parametrize("batch", [3, 128])
@pytest.mark.parametrize(
    "shape", [(1, 4, 1, 1), (4, 1, 1), (4, 5, 1), (1, 4, 1, 6), (1, 1, 5, 6), (6,), (1,), ()]
)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
def test_what_is_broadcast(batch: int, shape: tuple[int, ...], op: str) -> None:
    b = Builder()
    x, summed = b.input(batch, 4, 5, 6), shape[-2:] == (1, 1)
    y = b.binary(op, b.relu(x), b.input(*shape, grad=summed))
    y = b.binary("sub", y, b.input(batch, 1, 5, 1, grad=False))
    y = b.binary("mul", b.input(batch, 4, 1, 1), y)
    compare(case(b, y))


def test_a_parameter_in_two_roles() -> None:
    """Broadcast, and as a tensor of its own: its gradients have two layouts."""
    b = Builder()
    p = b.input(1, 4, 1, 1)
    x = b.binary("mul", b.input(3, 4, 5, 6), p)
    compare(case(b, b.binary("add", x, p), b.relu(p)))


def test_large_groups_are_cut() -> None:
    b = Builder()
    x = first = b.input(64, 3, 4, 4)
    for k in range(40):
        x = b.binary(("add", "mul", "sub")[k % 3], x, b.input(64, 3, 4, 4))
        x = b.activation(x, "tanh")
    y = first
    for _ in range(60):  # a value with many readers
        y = b.add(y, b.affine(x, 0.01, 0.0))
    compare(case(b, y))


@pytest.mark.parametrize("seed", range(30))
def test_random_graphs(seed: int, small_panels: None) -> None:
    rng = random.Random(seed)
    b, outputs = random_program(rng)
    compare(case(b, *outputs, seed=seed), seed)


def test_results_do_not_depend_on_threads(threads: Any) -> None:
    b = Builder()
    x = b.activation(b.norm(b.input(128, 6, 32, 32)), "silu")
    y = b.binary("mul", x, b.input(128, 6, 1, 1))
    of = case(b, y, dtype=torch.float32)

    def results() -> list[Tensor]:
        planned, run = (
            Planned(of.graph),
            Run([t.clone() for t in of.tensors], Data([], of.scalars, [], True)),
        )
        out = planned.forward(run)
        grads = planned.backward(run, [torch.ones_like(out[0])], [True] * 3 + [False] * 2 + [True])
        return [*out, *(g for g in grads if g is not None)]

    threads(1)
    alone = results()
    threads(2)
    assert all(torch.equal(a, c) for a, c in zip(alone, results(), strict=True))


def test_a_view_of_a_parameter_is_broadcast() -> None:
    b = Builder()
    p = b.view(b.input(4), 4, 1, 1)
    compare(case(b, b.binary("mul", b.input(3, 4, 5, 6), p)))
