"""Hooks, ``autograd.grad``, repeated and concurrent backward passes, where code that torch does not show us
reads a lazy result. All gradients are those of the densified twin."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from bodies import Body, Doubled, assert_close, loss_of, marks, tensors_in
from test_engine_opaque import READERS, RELUS, SUMS, Net, error, scripted, twins

pytestmark = marks


def body_of(reader: str, relu: str = "out of place", kind: str = "residual") -> Body:
    return lambda m, x: READERS[reader](m, RELUS[relu](SUMS[kind](m, x)))


def twice(net: Net, x: Tensor) -> list[Tensor]:
    out = net(x)
    out.square().sum().backward(retain_graph=True)
    out.sin().sum().backward()
    return [out]


def parts_first(net: Net, x: Tensor) -> list[Tensor]:
    """Passes that end before they come to the first layer."""
    out = net(x)
    loss = out.square().sum()
    wanted = [net.bn.weight, net.bn0.weight, x, net.bn.weight]
    found = [torch.autograd.grad(loss, part, retain_graph=True)[0] for part in wanted * 2]
    loss.backward()
    return [out, *found]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("run", [twice, parts_first])
def test_several_backward_passes(run: Any, reader: str) -> None:
    refused = run is parts_first and reader.startswith("reentrant")  # by torch
    for relu in RELUS:
        for kind in ("residual", "in place", "of a sum", "strided slice"):
            found = error(body_of(reader, relu, kind), run=run)
            if found is None:  # torch refuses to change what a ReLU needs later
                assert refused or (reader.startswith("in-place") and relu != "none"), (relu, kind)
            else:
                assert found <= 1e-9, (relu, kind)


def hooked_sum(
    register: Callable[[Tensor, list[Tensor]], Any], when: str, reader: str, relu: str
) -> Callable[[Net, Tensor], list[Tensor]]:
    def run(net: Net, x: Tensor) -> list[Tensor]:
        seen: list[Tensor] = []

        def body(m: Any, x: Tensor) -> Any:
            z = RELUS[relu](SUMS["residual"](m, x))
            if when == "before":
                register(z, seen)
            ours = m.c2(z) if when == "between" else None
            if when == "between":
                register(z, seen)
            out = READERS[reader](m, z)
            if when == "after":
                register(z, seen)
            return out, m.c2(z) if ours is None else ours

        net.body = body
        outs = tensors_in(net(x))
        loss = loss_of(outs)
        assert loss is not None
        loss.backward()
        return [*outs, *(t.grad if t.grad is not None else t for t in seen)]

    return run


# What wants to see the gradient of a tensor.
WATCHES: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    "hook": lambda z, seen: z.register_hook(lambda g: seen.append(g.clone())),
    "changing hook": lambda z, seen: z.register_hook(lambda g: 3 * g),
    "retain_grad": lambda z, seen: (z.retain_grad(), seen.append(z)),
}
OPAQUE = ["reversal", "saving function", "function", "script", "full backward hook"]


@pytest.mark.parametrize("reader", [*OPAQUE, "scaled", "reentrant checkpoint"])
@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_who_watches_a_sum_sees_all_of_its_gradient(when: str, watch: str, reader: str) -> None:
    """Registered before the reader that we do not see and one of ours read it, or between them."""
    for relu in RELUS:
        run = hooked_sum(WATCHES[watch], when, reader, relu)
        found = error(body_of(reader), run=run)
        assert found is not None, relu
        assert found <= 1e-9, relu


@pytest.mark.parametrize("reader", OPAQUE)
@pytest.mark.parametrize("watch", ["hook", "changing hook"])
def test_a_hook_after_one_of_our_layers(watch: str, reader: str) -> None:
    """It sees the gradient of whoever reads the sum afterwards, too."""
    for relu in RELUS:
        run = hooked_sum(WATCHES[watch], "between", reader, relu)
        found = error(body_of(reader), run=run)
        assert found is not None, relu
        assert found <= 1e-9, relu


def test_a_hook_after_a_layer_and_a_function() -> None:
    """Each has read the sum, in its own way."""

    def late(m: Any, x: Tensor) -> Any:
        z = SUMS["residual"](m, x)
        out = m.c(z), Doubled.apply(z)
        z.register_hook(lambda g: 3 * g)
        return out

    found = error(late)
    assert found is not None
    assert found <= 1e-9


@pytest.mark.parametrize("reader", OPAQUE)
@pytest.mark.parametrize("relu", RELUS)
def test_a_gradient_with_respect_to_a_sum(reader: str, relu: str) -> None:
    def run(net: Net, x: Tensor) -> list[Tensor]:
        kept: list[Tensor] = []

        def body(m: Any, x: Tensor) -> Any:
            kept.append(RELUS[relu](SUMS["residual"](m, x)))
            out = READERS[reader](m, kept[0])
            return out, m.c2(kept[0])

        net.body = body
        outs = tensors_in(net(x))
        loss = loss_of(outs)
        assert loss is not None
        return [*outs, *torch.autograd.grad(loss, [kept[0], x])]

    assert error(body_of(reader), run=run) <= 1e-9  # type: ignore[operator]


@pytest.mark.parametrize("reader", ["plain", *OPAQUE])
@pytest.mark.parametrize("kind", ["residual", "of a sum", "batch norm"])
def test_backward_passes_of_one_graph_in_several_threads(kind: str, reader: str) -> None:
    sparse, dense = twins(body_of(reader, kind=kind))
    inputs = [torch.randn(8, 3, 4, 4, dtype=torch.float64) for _ in range(1)]
    x, like = (inputs[0].clone().requires_grad_() for _ in range(2))
    out, expected = sparse(x), dense(like)
    weights = [float(i + 1) for i in range(6)]
    names = ["bn0.weight", "bn.weight", "bn.bias"]
    found: dict[tuple[int, float], Any] = {}
    failed: list[BaseException] = []
    start = threading.Barrier(len(weights))

    def work(weight: float) -> None:
        try:
            start.wait()
            for i in range(5):
                loss = out.square().sum() * weight
                wanted = [x, *(sparse.get_parameter(name) for name in names)]
                found[i, weight] = torch.autograd.grad(loss, wanted, retain_graph=True)
        except BaseException as raised:
            failed.append(raised)

    threads = [threading.Thread(target=work, args=(weight,)) for weight in weights]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    wanted = [like, *(dense.get_parameter(name) for name in names)]
    right = torch.autograd.grad(expected.square().sum(), wanted)
    assert len(found) == 5 * len(weights)
    for (_, weight), grads in found.items():
        for ours, theirs in zip(grads, right, strict=True):
            assert_close(ours / weight, theirs, 1e-9)


@pytest.mark.parametrize("reader", OPAQUE)
def test_second_derivatives(reader: str) -> None:
    grads = []
    for model in twins(body_of(reader)):
        torch.manual_seed(1)
        x = torch.randn(8, 3, 4, 4, dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        grads.append(second)
    assert_close(*grads, 1e-9)


class Tokens(nn.Module):
    """A linear layer on sequences, whose output is read by a scripted function and once more."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.double()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


LINEAR: dict[str, Body] = {
    "script": lambda m, x: (y := m.first(x), scripted(y), m.second(y), y)[1:],
    "script alone": lambda m, x: scripted(m.second(F.relu(m.first(x)))),
    "function": lambda m, x: (y := m.first(x), Doubled.apply(y), y.sin())[1:],
    "residual": lambda m, x: m.second(Doubled.apply(m.first(x) + x)),
    "in-place script": lambda m, x: m.second(scripted_in_place_sum(m.first(x), x)),
}


@torch.jit.script
def scripted_in_place_sum(y: Tensor, x: Tensor) -> Tensor:
    y += x
    return y


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("shape", [(6, 6), (3, 5, 6)])
def test_linear_layers(name: str, shape: tuple[int, ...]) -> None:
    sparse = rewire.sparsify(Tokens(LINEAR[name]), sparsity=0.4)
    dense = rewire.densify(copy.deepcopy(sparse))
    x, like = (
        torch.randn(shape, generator=torch.Generator().manual_seed(1)).double() for _ in "ab"
    )
    for model, value in ((sparse, x.requires_grad_()), (dense, like.requires_grad_())):
        loss = loss_of(tensors_in(model(value)))
        assert loss is not None
        loss.backward()
    assert x.grad is not None
    assert like.grad is not None
    assert_close(x.grad, like.grad, 1e-9)
    for layer in ("first", "second"):
        connections = sparse.get_submodule(layer).connections
        right = dense.get_submodule(layer).weight.grad
        if right is not None:
            right = right[connections.outputs(), connections.inputs()]
            assert_close(sparse.get_submodule(layer).values.grad, right[:, None], 1e-9)
