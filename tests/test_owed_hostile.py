"""Ways to a convolution's output that are not seen when its batch norm leaves a part of the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fused import Doubled
from test_owed_gradients import Forward, Net, chain, inputs, pair, residual, same_gradients


def same_as_dense(
    way: Forward,
    prepare: Callable[[Net], Any] = lambda net: None,
    input_gradient: bool = True,
    retain_graph: bool = False,
) -> None:
    sparse, dense = pair(way)
    x, like = (t.requires_grad_(input_gradient) for t in map(Tensor.detach, inputs()))
    for model, value in ((sparse, x), (dense, like)):
        prepare(model)
        (model(value).square().mean() * 100).backward(retain_graph=retain_graph)
    same_gradients(sparse, dense, x, like, 1e-11)


def through_a_function(net: Net, x: Tensor) -> Tensor:
    first = net.unit(0, x)
    return first * Doubled.apply(first)


def convolution_through_a_function(net: Net, x: Tensor) -> Tensor:
    second = net.convs[1](net.unit(0, x))
    return F.relu(net.norms[1](second)) + Doubled.apply(second)


def through_a_checkpoint(net: Net, x: Tensor) -> Tensor:
    first = net.unit(0, x)
    return first + checkpoint(lambda t: net.unit(1, t), first, use_reentrant=True)


def watch(net: Net) -> None:
    """The hook's own function takes the input, which is also added further on."""
    net.convs[1].register_full_backward_hook(lambda *_: None)


@pytest.mark.parametrize("retain_graph", [True, False])
@pytest.mark.parametrize(
    ("way", "prepare"),
    [
        (through_a_function, lambda net: None),
        (convolution_through_a_function, lambda net: None),
        (through_a_checkpoint, lambda net: None),
        (residual, watch),
    ],
    ids=["function", "convolution", "checkpoint", "hook"],
)
def test_what_goes_two_ways_of_which_one_is_hidden(
    way: Forward, prepare: Callable[[Net], Any], retain_graph: bool
) -> None:
    same_as_dense(way, prepare, retain_graph=retain_graph)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_inside_a_model() -> None:
    def way(net: Net, x: Tensor) -> Tensor:
        first = net.convs[0](x)
        with Passing():
            normed = net.norms[0](first)
        return net.unit(1, F.relu(normed))

    same_as_dense(way)


def test_what_was_left_in_a_partial_pass_is_not_taken_later() -> None:
    """The batch norm's whole gradient comes to lie where the part of an earlier pass was."""
    kept: dict[int, Tensor] = {}

    def way(net: Net, x: Tensor) -> Tensor:
        kept[id(net)] = net.convs[0](x)
        return F.max_pool2d(F.relu(net.norms[0](kept[id(net)])), 2)

    sparse, dense = pair(way)
    x, like = inputs()
    for model, value in ((sparse, x), (dense, like)):
        loss = model(value).square().mean() * 100
        torch.autograd.grad(loss, model.norms[0].weight, retain_graph=True)
        kept[id(model)].register_hook(lambda g: None)  # now it has two readers
        loss.backward()
    same_gradients(sparse, dense, x, like, 1e-11)


@pytest.mark.parametrize("grad", [False, True])
def test_an_output_changed_in_place_after_its_statistics_were_taken(grad: bool) -> None:
    def way(net: Net, x: Tensor) -> Tensor:
        first = net.convs[0](x)
        with torch.set_grad_enabled(grad):
            net.norms[0](first)
        return net.unit(1, F.relu_(first))

    same_as_dense(way)


def test_a_gradient_changed_in_the_graph_is_whole_or_refused() -> None:
    sparse, dense = pair(chain)
    x, like = inputs()
    out = sparse(x)
    nodes, found = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in found:
            found.add(node)
            nodes += [n for n, _ in node.next_functions]
    for node in found:
        if "_Product" in node.name():
            node.register_prehook(lambda grads: tuple(g.clone() for g in grads))
    try:
        out.sum().backward()
    except RuntimeError:
        return
    dense(like).sum().backward()
    same_gradients(sparse, dense, x, like, 1e-11)


# The last here: it ends the process where it fails.
def test_a_trainable_batch_norm_and_a_pool_after_a_frozen_convolution() -> None:
    same_as_dense(
        lambda net, x: net.unit(1, F.max_pool2d(net.unit(0, x), 2)),
        lambda net: net.convs[0].requires_grad_(False),
        input_gradient=False,
    )
