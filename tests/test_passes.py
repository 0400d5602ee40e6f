"""Backward passes of one graph that run at the same time, in threads or one inside the other: what a layer
leaves to its neighbour in one of them is not taken in another."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from bodies import assert_close, marks

pytestmark = marks


class Net(nn.Module):
    """Two residual blocks and a unit without a residual."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(
            nn.Conv2d(n_in, 4, 3, padding=1, bias=False) for n_in in (3, 4, 4, 4)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))
        for norm in self.norms:
            nn.init.normal_(norm.weight)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.convs[0](x)))
        for i in (1, 2):
            x = F.relu(self.norms[i](self.convs[i](x)) + x)
        y: Tensor = F.relu(self.norms[3](self.convs[3](x)))
        return y


def twins() -> list[tuple[Net, Tensor]]:
    sparse = rewire.sparsify(Net(), sparsity=0.3, weights="fresh")
    dense = rewire.densify(copy.deepcopy(sparse))
    x = torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(1)).double()
    return [(net, x.clone().requires_grad_()) for net in (sparse, dense)]


def wanted(net: Net, x: Tensor) -> list[Tensor]:
    return [x, *(parameter for norm in net.norms for parameter in norm.parameters())]


@pytest.mark.parametrize("at", range(4))
def test_a_pass_inside_a_pass(at: int) -> None:
    """Run by a hook of a parameter: after its batch norm's backward pass, before the convolution's."""
    found: list[list[Tensor]] = []
    for net, x in twins():
        out, inside = net(x), []
        loss, other = out.square().sum(), out.sin().sum()

        def run(_: Tensor, net: Any = net, x: Any = x, other: Any = other, i: Any = inside) -> None:
            if not i:
                i.append(torch.zeros(()))  # not inside itself
                i.extend(torch.autograd.grad(other, wanted(net, x), retain_graph=True))

        net.norms[at].weight.register_hook(run)
        grads = torch.autograd.grad(loss, wanted(net, x), retain_graph=True)
        assert len(inside) > 1
        found.append([*grads, *inside])
    for ours, right in zip(*found, strict=True):
        assert_close(ours, right, 1e-9)


def test_passes_in_several_threads() -> None:
    (sparse, x), (dense, like) = twins()
    out = sparse(x)
    weights = [float(i + 1) for i in range(6)]
    found: dict[tuple[float, int], Any] = {}
    failed: list[BaseException] = []
    start = threading.Barrier(len(weights))

    def work(weight: float) -> None:
        try:
            start.wait()
            for i in range(10):
                loss = out.square().sum() * weight
                grads = torch.autograd.grad(loss, wanted(sparse, x), retain_graph=True)
                found[weight, i] = grads
        except BaseException as raised:
            failed.append(raised)

    threads = [threading.Thread(target=work, args=(weight,)) for weight in weights]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert len(found) == 10 * len(weights)
    right = torch.autograd.grad(dense(like).square().sum(), wanted(dense, like))
    for (weight, _), grads in found.items():
        for ours, theirs in zip(grads, right, strict=True):
            assert_close(ours / weight, theirs, 1e-9)


def test_many_passes_that_end_early() -> None:
    """They leave something that nobody takes; later passes are right all the same."""
    found: list[list[Tensor]] = []
    for net, x in twins():
        loss = net(x).square().sum()
        for _ in range(10):
            for i in (3, 2, 1):
                torch.autograd.grad(loss, net.norms[i].weight, retain_graph=True)
        found.append(list(torch.autograd.grad(loss, wanted(net, x), retain_graph=True)))
    for ours, right in zip(*found, strict=True):
        assert_close(ours, right, 1e-9)
