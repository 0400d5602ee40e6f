"""Rewiring under autocast to bfloat16, and in bfloat16: semantics of the paper, with sums in float32."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rewire
import rewired
from rewire import SparseLinear
from rewire.methods.layer_view import LayerView
from rewired import METHODS
from rewirings import (
    Batch,
    Outcome,
    assert_grows,
    assert_prunes,
    batch_of,
    cnn,
    constant,
    default_loss,
    distributions,
    inactive_of,
    mlp,
    normal,
    once,
    sample,
    scopes,
    seeded,
    total,
)
from test_gse_paper import Residual

BF16, F32 = torch.bfloat16, torch.float32


def autocast_loss(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", BF16):
        return default_loss(model, batch)


ways = pytest.mark.parametrize("way", ["autocast", "bfloat16"])


def assert_rewires(
    make: Callable[..., nn.Module],
    way: str,
    batches: Sequence[Batch] | None = None,
    scope: str = "global",
    **options: Any,
) -> tuple[list[set[int]], Outcome]:
    """S, G and P of one rewiring at a fraction of 0.2, by the gradient of the dense twin."""
    dtype, loss = (F32, autocast_loss) if way == "autocast" else (BF16, default_loss)

    def made() -> nn.Module:
        return make(dtype=dtype)

    if batches is not None:
        batches = [(x.to(dtype), y) for x, y in batches]
    options = {"scope": scope, "subset": 1.0, "loss": loss} | options
    everything = options["subset"] == math.inf
    subset = inactive_of(made()) if everything else sample(made, batches, **options)
    outcome = once(made, batches, **options, fraction=constant(0.2))
    largest = max(float(g.abs().max()) for g in outcome.gradient)
    assert_grows(outcome, subset, 0.2, scope, 0.03 * largest)
    assert_prunes(outcome, scope)
    assert all(s.isdisjoint(a) for s, a in zip(subset, outcome.before, strict=True))
    assert total(outcome.result, "grown") == total(outcome.result, "pruned") > 0
    assert sum(map(len, outcome.after)) == sum(map(len, outcome.before))
    return subset, outcome


@scopes
@distributions
@pytest.mark.parametrize("make", [mlp, cnn])
@ways
def test_a_rewiring(
    make: Callable[..., nn.Module], way: str, distribution: str, scope: str
) -> None:
    assert_rewires(make, way, scope=scope, distribution=distribution)


@distributions
@pytest.mark.parametrize("make", [mlp, cnn])
@ways
def test_a_huge_subset_grows_what_rigl_grows(
    make: Callable[..., nn.Module], way: str, distribution: str
) -> None:
    assert_rewires(make, way, subset=math.inf, distribution=distribution)


@distributions
@pytest.mark.parametrize("make", [mlp, cnn])
@ways
def test_micro_batches(make: Callable[..., nn.Module], way: str, distribution: str) -> None:
    """The gradient is averaged over all of them, the subset is drawn from the first. Dividing the loss by
    four rounds nothing."""
    batches = [batch_of(make(dtype=F32), seed) for seed in range(4)]
    subset, outcome = assert_rewires(make, way, batches, distribution=distribution)
    first, alone = assert_rewires(make, way, batches[:1], distribution=distribution)
    assert subset == first
    assert outcome.grown != alone.grown


@pytest.mark.parametrize("make", [mlp, cnn])
@ways
def test_uniform_draws_are_those_of_float32(make: Callable[..., nn.Module], way: str) -> None:
    assert assert_rewires(make, way)[0] == sample(lambda: make(dtype=F32), subset=1.0)


@distributions
@ways
def test_a_rewiring_of_residual_blocks_on_the_engine(way: str, distribution: str) -> None:
    def make(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(Residual(16), Residual(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
        )
        return rewire.sparsify(model, sparsity=0.8, seed=1).to(dtype)

    x, y = normal(32, 3, 10, 10, dtype=F32), torch.randint(5, (32,), generator=seeded(1))
    assert_rewires(make, way, [(x, y)], distribution=distribution)


class Watching(rewire.GSE):
    """Remembers what its rules were given."""

    def explore(self, view: LayerView) -> Any:
        self.batch = view.batch
        return super().explore(view)

    def choose(self, views: Sequence[LayerView]) -> None:
        self.seen = [view.gradient for view in views]
        super().choose(views)


@pytest.mark.parametrize("recorded", [True, False])
@ways
def test_scores_are_sums_in_float32(way: str, recorded: bool) -> None:
    """In bfloat16 a sum of ones stops at 256."""
    layer = SparseLinear(8, 6, sparsity=0.5)
    model = nn.Sequential(layer, nn.Identity())
    if recorded:
        rewire.use_engine(model)
    x = torch.ones(1000, 8)
    if way == "bfloat16":
        model, x = model.to(BF16), x.to(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rewirer = Watching(model, optimizer, every=1, until=10, subset=2.0)
    with torch.autocast("cpu", BF16, enabled=way == "autocast"):
        y = model(x)
    assert y.dtype is BF16
    y.backward(torch.ones_like(y))
    optimizer.step()
    rewirer.step()
    (gradient,) = rewirer.seen
    assert gradient is not None
    assert gradient.dtype is F32
    assert (gradient == 1000).all()
    assert rewirer.batch is not None
    assert rewirer.batch.x.dtype is rewirer.batch.dy.dtype is F32


def test_rigl_looks_at_the_gradient_of_the_dense_twin_in_float32() -> None:
    model = rewired.net()
    twin = rewire.densify(copy.deepcopy(model))
    rewirer = rewire.RigL(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1, until=9)
    x, _ = rewired.images(0)
    with torch.autocast("cpu", BF16):
        model(x).float().square().sum().backward()
        twin(x).float().square().sum().backward()
        for view in rewirer._views:
            dense = twin.get_submodule(view.name).weight.grad
            assert isinstance(dense, Tensor)
            if dense.dim() == 4:
                dense = dense.permute(0, 2, 3, 1).flatten(1)
            assert view.dense is not None
            found = view.dense.rows(0, view.layer.n_out)
            assert found.dtype is F32
            assert float((found - dense).norm()) <= 0.03 * float(dense.norm())


@pytest.mark.parametrize("name", METHODS)
@ways
def test_training_and_resuming(name: str, way: str) -> None:
    """The budget stays, states are of the right types, and a run that was stopped goes on as it was."""

    def begin() -> tuple[nn.Module, Any, Any]:
        model = rewired.net()
        if way == "bfloat16":
            model = model.to(BF16)
        optimizer = rewired.sgd(model)
        return model, optimizer, METHODS[name](model, optimizer)

    def train(parts: tuple[nn.Module, Any, Any], steps: range) -> None:
        model, optimizer, rewirer = parts
        for step in steps:
            x, y = rewired.images(step)
            optimizer.zero_grad()
            with torch.autocast("cpu", BF16, enabled=way == "autocast"):
                scores = model(x if way == "autocast" else x.to(BF16))
                assert scores.dtype is BF16
                nn.functional.cross_entropy(scores.float(), y).backward()
            optimizer.step()
            rewirer.step()

    through, stopped, resumed = begin(), begin(), begin()
    count = sum(layer.count for layer in rewired.layers(through[0]).values())
    train(through, range(8))
    train(stopped, range(4))
    for k in range(3):
        resumed[k].load_state_dict(copy.deepcopy(stopped[k].state_dict()))
    train(resumed, range(4, 8))
    assert rewired.topology(resumed[0]) == rewired.topology(through[0])
    if name not in ("deepr", "dsr"):
        assert sum(layer.count for layer in rewired.layers(through[0]).values()) == count
    for parameter, other in zip(through[0].parameters(), resumed[0].parameters(), strict=True):
        assert parameter.dtype is (F32 if way == "autocast" else BF16)
        assert torch.equal(parameter, other)
        assert math.isfinite(float(parameter.detach().sum()))
