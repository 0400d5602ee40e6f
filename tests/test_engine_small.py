"""Dropout and running statistics of converted models."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rewire
from rewire.ops import native

needs_kernels = pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")


class Dropped(nn.Module):
    """A layer and its dropout, as modules and as calls."""

    def __init__(self, p: float, inplace: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 256)
        self.dropout = nn.Dropout(p, inplace)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.layer(x)) + 1  # nothing is zero before
        return y, self.dropout(y)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share_and_scales_it(p: float) -> None:
    model = rewire.sparsify(Dropped(p), sparsity=0.9)
    before, after = model(torch.randn(512, 64))
    kept = after != 0
    share = kept.double().mean().item()
    assert abs(share - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5
    torch.testing.assert_close(after[kept], before[kept] / (1 - p))


def test_dropout_passes_gradients_where_it_keeps() -> None:
    model = rewire.sparsify(Dropped(0.3), sparsity=0.9)
    x = torch.randn(512, 64)
    before, after = model(x)
    (gradient,) = torch.autograd.grad(after.sum(), before)
    torch.testing.assert_close(gradient, (after != 0) / 0.7)


def test_dropout_follows_torchs_generator() -> None:
    model, x = rewire.sparsify(Dropped(0.5), sparsity=0.9), torch.randn(128, 64)
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(model(x)[1])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_dropout_is_the_same_for_any_number_of_threads(threads: Callable[[int], None]) -> None:
    model, x = rewire.sparsify(Dropped(0.25), sparsity=0.9), torch.randn(1024, 64)
    outputs = []
    for count in (1, 2):
        threads(count)
        torch.manual_seed(0)
        outputs.append(model(x)[1])
    assert torch.equal(*outputs)


def test_dropout_takes_units_one_by_one() -> None:
    """What is dropped says nothing about its neighbours, nor about the next call."""
    model, x = rewire.sparsify(Dropped(0.25), sparsity=0.9), torch.randn(1024, 64)
    dropped = (model(x)[1] == 0).T.flatten().double()  # in the order of memory
    again = (model(x)[1] == 0).T.flatten().double()
    assert abs(float(dropped.mean()) - 0.25) < 0.01
    for other in (dropped.roll(1), dropped.roll(2), dropped.roll(1024), again):
        assert abs(float((dropped * other).mean()) - 0.0625) < 0.005


@pytest.mark.parametrize(
    ("p", "train", "share"), [(0.5, False, 1.0), (0.0, True, 1.0), (1.0, True, 0.0)]
)
def test_dropout_of_nothing_and_of_all(p: float, train: bool, share: float) -> None:
    model = rewire.sparsify(Dropped(p), sparsity=0.9).train(train)
    before, after = model(torch.randn(128, 64))
    torch.testing.assert_close(after, before * share)


def test_dropout_in_place_changes_its_input() -> None:
    model = rewire.sparsify(Dropped(0.5, inplace=True), sparsity=0.9)
    with torch.no_grad():
        before, after = model(torch.randn(128, 64))
    assert before is after or torch.equal(before, after)
    assert (after == 0).any()


class Overwritten(nn.Module):
    """A batch norm of something that is then dropped in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x) + 0
        normed = self.norm(y)
        return F.dropout(y, 0.9, training=True, inplace=True), normed


def test_dropout_in_place_is_not_seen_by_what_came_before() -> None:
    torch.manual_seed(0)
    plain = Overwritten()
    model = rewire.sparsify(copy.deepcopy(plain), density=1.0, weights="keep")
    x = torch.randn(64, 3, 8, 8)
    with torch.no_grad():
        dropped, normed = model(x)
        torch.testing.assert_close(normed, plain(x)[1], rtol=1e-4, atol=1e-4)
    assert (dropped == 0).any()


@needs_kernels
@pytest.mark.parametrize("momentum", [0.1, 0.7, 1.0, None])
def test_running_statistics_are_torchs(momentum: float | None) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=momentum))
    sparse = rewire.sparsify(copy.deepcopy(dense), density=1.0, weights="keep")
    for _ in range(3):
        x = torch.randn(64, 3, 8, 8)
        torch.testing.assert_close(sparse(x), dense(x), rtol=1e-4, atol=1e-5)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        theirs, ours = getattr(dense[1], name), getattr(sparse[1], name)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_of_a_first_layer(bias: bool, stride: int) -> None:
    """Its input wants no gradient: weights and bias have theirs in one pass all the same."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3, stride, padding=1, bias=bias)
    dense = nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU()).double()
    sparse = rewire.sparsify(copy.deepcopy(dense), density=1.0, weights="keep")
    x, target = torch.randn(2, 64, 3, 9, 9, dtype=torch.float64)
    F.mse_loss(dense(x).mean((2, 3)), target[:, 0, :8, 0]).backward()
    F.mse_loss(sparse(x).mean((2, 3)), target[:, 0, :8, 0]).backward()
    back = rewire.densify(_with_gradients(sparse))
    torch.testing.assert_close(back[0].weight, dense[0].weight.grad)
    if bias:
        torch.testing.assert_close(sparse[0].bias.grad, dense[0].bias.grad)
    torch.testing.assert_close(sparse[1].weight.grad, dense[1].weight.grad)


def _with_gradients(model: nn.Module) -> nn.Module:
    """The model with the gradients of its first layer in place of the weights."""
    clone = copy.deepcopy(model)
    with torch.no_grad():
        clone[0].values.copy_(model[0].values.grad)
    return clone


def test_dropout_that_is_computed_again_drops_the_same() -> None:
    """The output is linear in the values: their gradient times them is the output."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 512, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            drop = lambda t: F.dropout(self.second(t), 0.5)  # noqa: E731
            result: torch.Tensor = checkpoint(drop, self.first(x), use_reentrant=True)
            return result

    model = rewire.sparsify(Again().double(), sparsity=0.5)
    y = model(torch.randn(128, 32, dtype=torch.float64))
    y.sum().backward()
    values = model.second.values
    torch.testing.assert_close((values * values.grad).sum(), y.sum().detach())
