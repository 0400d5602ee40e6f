"""Gradients through convolutions, batch norms, ReLUs and poolings, which the engine computes together where
it can: whoever looks at a gradient sees all of it. Each model here is compared with its dense twin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rewire
from bodies import Doubled
from rewire import use_engine

Forward = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Three convolutions with batch norms; ``way`` says how they are put together."""

    def __init__(self, way: Forward) -> None:
        super().__init__()
        self.way = way
        self.convs = nn.ModuleList(
            nn.Conv2d(n_in, 8, 3, padding=1, bias=False) for n_in in (3, 8, 8)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)

    def unit(self, i: int, x: Tensor) -> Tensor:
        return F.relu(self.norms[i](self.convs[i](x)))


def chain(net: Net, x: Tensor) -> Tensor:
    return net.unit(2, net.unit(1, net.unit(0, x)))


def pooled(net: Net, x: Tensor) -> Tensor:
    return net.unit(2, F.max_pool2d(net.unit(1, F.max_pool2d(net.unit(0, x), 2)), 3, 2, 1))


def pooled_without_rectifier(net: Net, x: Tensor) -> Tensor:
    return net.unit(1, F.max_pool2d(net.norms[0](net.convs[0](x)), 2))


def residual(net: Net, x: Tensor) -> Tensor:
    first = net.unit(0, x)
    inner = net.norms[2](net.convs[2](net.unit(1, first)))
    return F.relu(inner + first)


def forked(net: Net, x: Tensor) -> Tensor:
    """What a batch norm gives goes two ways."""
    first = net.unit(0, x)
    return net.unit(1, first) + net.unit(2, first) + F.max_pool2d(first, 3, 1, 1)


def looked_at(net: Net, x: Tensor) -> Tensor:
    """What a convolution gives is used past its batch norm, before and after."""
    first = net.convs[0](x)
    normed = F.relu(net.norms[0](first))
    out = net.unit(1, normed) + first.sin()
    second = net.convs[2](out)
    early = second.mean()
    return F.relu(net.norms[2](second)) * early


def normed_twice(net: Net, x: Tensor) -> Tensor:
    first = net.convs[0](x)
    return net.convs[1](F.relu(net.norms[0](first))) + net.convs[2](net.norms[1](first))


WAYS = [chain, pooled, pooled_without_rectifier, residual, forked, looked_at, normed_twice]


def pair(way: Forward, dtype: torch.dtype = torch.float64) -> tuple[Net, Net]:
    """A sparse model and its dense twin with the same weights."""
    torch.manual_seed(0)
    sparse = rewire.sparsify(Net(way).to(dtype), sparsity=0.7)
    with torch.no_grad():
        for norm in sparse.norms:
            norm.weight.uniform_(-1, 1.5)
            norm.bias.uniform_(-0.5, 0.5)
    return sparse, rewire.densify(copy.deepcopy(sparse))


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(128, 3, 16, 16, dtype=dtype)
    return x.clone().requires_grad_(), x.clone().requires_grad_()


def same_gradients(sparse: Net, dense: Net, x: Tensor, like: Tensor, tolerance: float) -> None:
    def close(actual: Tensor | None, expected: Tensor | None) -> None:
        if actual is None or expected is None:
            assert actual is expected
            return
        scale = float(expected.abs().max()) + 1
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)

    close(x.grad, like.grad)
    for ours, theirs in zip(sparse.norms, dense.norms, strict=True):
        close(ours.weight.grad, theirs.weight.grad)
        close(ours.bias.grad, theirs.bias.grad)
    for ours, theirs in zip(sparse.convs, dense.convs, strict=True):
        if theirs.weight.grad is None:
            assert ours.values.grad is None
        else:
            active = spread(ours, torch.ones_like(ours.values))
            close(spread(ours, ours.values.grad), theirs.weight.grad * active)


def spread(layer: nn.Module, values: Tensor) -> Tensor:
    """One value per connection as a dense weight."""
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.values.copy_(values)
    weight: Tensor = twin.to_dense().weight.detach()
    return weight


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_are_those_of_the_dense_twin(way: Forward, dtype: torch.dtype) -> None:
    sparse, dense = pair(way, dtype)
    x, like = inputs(dtype)
    ours, theirs = sparse(x), dense(like)
    up = torch.randn_like(theirs)
    ours.backward(up)
    theirs.backward(up)
    same_gradients(sparse, dense, x, like, 1e-11 if dtype == torch.float64 else 3e-4)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_backward_again(way: Forward) -> None:
    """A graph that is kept gives the same gradients a second time, in whole or in part."""
    sparse, _ = pair(way)
    x, _ = inputs()
    out = sparse(x).square().mean()
    last = sparse.convs[1].values
    (alone,) = torch.autograd.grad(out, last, retain_graph=True)
    out.backward(retain_graph=True)
    first = [p.grad.clone() for p in sparse.parameters() if p.grad is not None]
    assert torch.equal(alone, last.grad)
    sparse.zero_grad()
    out.backward()
    again = [p.grad for p in sparse.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_hooks_see_the_whole_gradient() -> None:
    seen: list[Tensor] = []

    def watched(net: Net, x: Tensor) -> Tensor:
        first = net.convs[0](x)
        second = net.convs[1](F.relu(net.norms[0](first)))
        first.register_hook(seen.append)  # after the batch norm has read it
        return F.relu(net.norms[1](second))

    sparse, dense = pair(watched)
    x, like = inputs()
    sparse(x).sum().backward()
    dense(like).sum().backward()
    torch.testing.assert_close(*seen)
    same_gradients(sparse, dense, x, like, 1e-11)


@pytest.mark.parametrize("hook", ["register_hook", "retain_grad", "autograd.grad"])
def test_hooks_that_come_after_the_next_layer(hook: str) -> None:
    found: list[Tensor] = []

    def late(net: Net, x: Tensor) -> Tensor:
        normed = net.unit(0, x)
        out = net.convs[1](normed)
        if hook == "register_hook":
            normed.register_hook(found.append)
        elif hook == "retain_grad":
            normed.retain_grad()
            found.append(normed)
        else:
            found.extend(torch.autograd.grad(out.square().sum(), normed, retain_graph=True))
        return out

    for model in pair(late):
        model(inputs()[0]).square().sum().backward()
    if hook == "retain_grad":
        found = [t.grad for t in found if t.grad is not None]
    torch.testing.assert_close(*found)


def test_probes_see_the_whole_gradient() -> None:
    sparse, dense = pair(chain)
    x, like = inputs()
    seen: list[Tensor] = []
    sparse.convs[0].probe = lambda conv, x, dy: seen.append(dy)
    expected: list[Tensor] = []
    dense.convs[0].register_full_backward_hook(lambda m, gi, go: expected.append(go[0]))
    sparse(x).sum().backward()
    dense(like).sum().backward()
    torch.testing.assert_close(seen[0], expected[0])


@pytest.mark.parametrize("frozen", ["input", "values", "norm"])
def test_frozen_parts(frozen: str) -> None:
    sparse, dense = pair(residual)
    x, like = inputs()
    if frozen == "input":
        x, like = x.detach(), like.detach()
    elif frozen == "values":
        sparse.convs[0].values.requires_grad_(False)
        dense.convs[0].weight.requires_grad_(False)
    else:
        for model in (sparse, dense):
            model.norms[0].requires_grad_(False)
    sparse(x).square().sum().backward()
    dense(like).square().sum().backward()
    same_gradients(sparse, dense, x, like, 1e-11)


def test_training_follows_the_dense_twin() -> None:
    sparse, dense = pair(residual)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (sparse, dense))
    kept = [conv.to_dense().weight != 0 for conv in sparse.convs]
    x, _ = inputs()
    for _ in range(5):
        for model, optimizer in ((sparse, ours), (dense, theirs)):
            optimizer.zero_grad()
            model(x.detach()).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            for conv, mask in zip(dense.convs, kept, strict=True):
                conv.weight.mul_(mask)
    for conv, twin in zip(sparse.convs, dense.convs, strict=True):
        torch.testing.assert_close(conv.to_dense().weight, twin.weight, rtol=0, atol=1e-11)


def compare(way: Forward, prepare: Callable[[Net], object] = lambda net: None) -> None:
    sparse, dense = pair(way)
    x, like = inputs()
    for model, value in ((sparse, x), (dense, like)):
        prepare(model)
        (model(value).square().mean() * 100).backward()
    same_gradients(sparse, dense, x, like, 1e-11)


@pytest.mark.parametrize("way", [chain, pooled], ids=lambda way: way.__name__)
@pytest.mark.parametrize("where", ["convs", "norms"])
def test_module_hooks(way: Forward, where: str) -> None:
    def prepare(net: Net) -> None:
        for module in getattr(net, where):
            module.register_full_backward_hook(lambda *_: None)

    compare(way, prepare)


PARTS: dict[str, Callable[[Net, Tensor, Callable[..., Tensor]], Tensor]] = {
    "convolution": lambda net, x, again: net.norms[1](again(net.convs[1], net.unit(0, x))),
    "norm": lambda net, x, again: net.unit(1, F.relu(again(net.norms[0], net.convs[0](x)))),
    "rectifier": lambda net, x, again: net.unit(1, again(F.relu, net.norms[0](net.convs[0](x)))),
    "pool": lambda net, x, again: net.unit(1, again(lambda t: F.max_pool2d(t, 2), net.unit(0, x))),
    "unit": lambda net, x, again: net.unit(2, again(lambda t: net.unit(1, t), net.unit(0, x))),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts(part: str, reentrant: bool) -> None:
    compare(lambda net, x: PARTS[part](net, x, partial(checkpoint, use_reentrant=reentrant)))


@pytest.mark.parametrize("way", [chain, pooled, residual], ids=lambda way: way.__name__)
def test_each_gradient_alone(way: Forward) -> None:
    sparse, _ = pair(way)
    x, _ = inputs()
    loss = sparse(x).square().mean()
    wanted = [x, *sparse.parameters()]
    together = torch.autograd.grad(loss, wanted, retain_graph=True)
    for tensor, expected in zip(wanted, together, strict=True):
        (alone,) = torch.autograd.grad(loss, tensor, retain_graph=True)
        assert torch.equal(alone, expected)


@pytest.mark.parametrize("way", [chain, pooled, residual], ids=lambda way: way.__name__)
def test_two_calls_before_one_backward(way: Forward) -> None:
    sparse, dense = pair(way)
    x, like = inputs()
    for model, value in ((sparse, x), (dense, like)):
        ((model(value) - model(value.flip(0) * 2)).square().mean() * 100).backward()
    same_gradients(sparse, dense, x, like, 1e-11)


def test_an_error_in_the_middle_of_a_backward_pass() -> None:
    sparse, dense = pair(residual)
    x, like = inputs()
    fail = [True]

    def probe(*_: object) -> None:
        if fail[0]:
            raise ValueError("on purpose")

    sparse.convs[0].probe = probe
    loss = sparse(x).sum()
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward(retain_graph=True)
    fail[0] = False
    sparse.zero_grad()
    loss.backward()
    dense(like).sum().backward()
    same_gradients(sparse, dense, x, like, 1e-11)


@pytest.mark.parametrize("rectified", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [(2, 2, 0), (3, 1, 1), (2, 3, 0), ((2, 3), (1, 2), (1, 1)), (5, 1, 2), (16, 1, 0), (17, 1, 8)],
    ids=str,
)
def test_pools_of_a_batch_norm(sizes: tuple[int, int, int], rectified: bool) -> None:
    """Overlapping or apart, and the last with too many taps for the kernels."""

    def way(net: Net, x: Tensor) -> Tensor:
        first = net.norms[0](net.convs[0](x))
        return net.unit(1, F.max_pool2d(F.relu(first) if rectified else first, *sizes))

    compare(way)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_ties_in_a_pool(value: float) -> None:
    def prepare(net: Net) -> None:
        with torch.no_grad():
            net.norms[0].weight[::2] = 0
            net.norms[0].bias[::2] = value

    compare(pooled, prepare)


def test_optimizer_steps_inside_a_backward_pass() -> None:
    """A layer's weights change as soon as their gradient is there."""
    sparse, dense = pair(residual)
    x, like = inputs()

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(0.1 * parameter.grad)

    for model, value in ((sparse, x), (dense, like)):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        model(value).square().mean().backward()
    same_gradients(sparse, dense, x, like, 1e-11)


@pytest.mark.parametrize("distribution", ["uniform", "grabo", "graest"])
def test_rewiring_is_that_of_layers_one_by_one(distribution: str) -> None:
    models = [pair(residual)[0] for _ in range(2)]
    use_engine(models[1], False)
    x = inputs()[0].detach()
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        rewirer = rewire.GSE(model, optimizer, every=2, until=20, distribution=distribution)
        for _ in range(6):
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
            rewirer.step()
    for ours, theirs in zip(models[0].convs, models[1].convs, strict=True):
        assert torch.equal(ours.indices, theirs.indices)
        torch.testing.assert_close(ours.values, theirs.values, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ratio", [0, 1000])
def test_rounding_with_means_far_from_zero(ratio: float) -> None:
    """In float32 the error is that of torch's own kernels, about the same or less."""

    def plain(net: Net, x: Tensor) -> Tensor:
        first = net.norms[0](net.convs[0](x))
        return net.norms[1](net.convs[1](first))

    sparse = pair(plain, torch.float32)[0]
    for conv in sparse.convs:
        shift = torch.full((conv.out_channels,), 0.5 * ratio)
        conv.bias = nn.Parameter(shift)
    dense = rewire.densify(copy.deepcopy(sparse))
    exact = copy.deepcopy(dense).double()
    x = inputs(torch.float32)[0].detach()
    grads = []
    for model in (sparse, dense, exact):
        value = x.clone().to(model.norms[0].weight.dtype).requires_grad_()
        out = model(value)
        out.backward(torch.randn(x.shape[0], 8, 16, 16, generator=torch.manual_seed(2)).to(out))
        weight = model.norms[0].weight.grad
        grads.append([t.double() for t in (value.grad, weight)])
    for ours, theirs, truth in zip(*grads, strict=True):
        assert (ours - truth).norm() <= 4 * (theirs - truth).norm() + 1e-6 * truth.norm()


def through_a_function(net: Net, x: Tensor) -> Tensor:
    first = net.unit(0, x)
    return first * Doubled.apply(first)


def convolution_through_a_function(net: Net, x: Tensor) -> Tensor:
    second = net.convs[1](net.unit(0, x))
    return F.relu(net.norms[1](second)) + Doubled.apply(second)


def through_a_checkpoint(net: Net, x: Tensor) -> Tensor:
    first = net.unit(0, x)
    return first + checkpoint(lambda t: net.unit(1, t), first, use_reentrant=True)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def dispatch_mode_inside(net: Net, x: Tensor) -> Tensor:
    first = net.convs[0](x)
    with Passing():
        normed = net.norms[0](first)
    return net.unit(1, F.relu(normed))


def changed_after_a_batch_norm(net: Net, x: Tensor) -> Tensor:
    first = net.convs[0](x)
    net.norms[0](first)
    return net.unit(1, F.relu_(first))


def changed_after_a_batch_norm_without_gradients(net: Net, x: Tensor) -> Tensor:
    first = net.convs[0](x)
    with torch.no_grad():
        net.norms[0](first)
    return net.unit(1, F.relu_(first))


UNSEEN = [
    through_a_function,
    convolution_through_a_function,
    through_a_checkpoint,
    dispatch_mode_inside,
    changed_after_a_batch_norm,
    changed_after_a_batch_norm_without_gradients,
]


@pytest.mark.parametrize("way", UNSEEN, ids=lambda way: way.__name__)
def test_ways_that_are_not_seen(way: Forward) -> None:
    compare(way)


def test_a_hook_of_a_module_whose_input_is_read_elsewhere() -> None:
    compare(residual, lambda net: net.convs[1].register_full_backward_hook(lambda *_: None))


def test_a_pass_after_a_partial_one() -> None:
    """And a hook between them, of an output that has been kept."""
    kept: dict[int, Tensor] = {}

    def way(net: Net, x: Tensor) -> Tensor:
        kept[id(net)] = net.convs[0](x)
        return F.max_pool2d(F.relu(net.norms[0](kept[id(net)])), 2)

    sparse, dense = pair(way)
    x, like = inputs()
    for model, value in ((sparse, x), (dense, like)):
        loss = model(value).square().mean() * 100
        torch.autograd.grad(loss, model.norms[0].weight, retain_graph=True)
        kept[id(model)].register_hook(lambda g: None)
        loss.backward()
    same_gradients(sparse, dense, x, like, 1e-11)


def test_a_trainable_batch_norm_and_a_pool_after_a_frozen_convolution() -> None:
    sparse, dense = pair(lambda net, x: net.unit(1, F.max_pool2d(net.unit(0, x), 2)))
    x, like = (t.detach() for t in inputs())
    for model, value in ((sparse, x), (dense, like)):
        model.convs[0].requires_grad_(False)
        model(value).square().mean().backward()
    same_gradients(sparse, dense, x, like, 1e-11)
