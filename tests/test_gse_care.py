"""What GSE refuses, layers that are shared or frozen, no dense tensors, and the history."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rewire
from rewire import SparseLayer, SparseLinear
from rewirings import (
    LONG,
    NothingDense,
    assert_grows,
    assert_prunes,
    batch_of,
    constant,
    default_loss,
    distributions,
    inactive_of,
    keys_of,
    layers_of,
    mlp,
    normal,
    once,
    one_step,
    other,
    sample,
    scopes,
    seeded,
    stored,
    total,
    trio,
    values_of,
)

# Arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"fraction": 0.0}, "fraction"),
        ({"fraction": 1.0}, "fraction"),
        ({"fraction": -0.2}, "fraction"),
        ({"fraction": 1.5}, "fraction"),
        ({"fraction": float("nan")}, "fraction"),
        ({"subset": 0.0}, "subset"),
        ({"subset": -1.0}, "subset"),
        ({"subset": float("nan")}, "subset"),
        ({"every": 0}, "every"),
        ({"every": -3}, "every"),
        ({"until": 9}, "until"),
        ({"until": 0}, "until"),
        ({"distribution": "gauss"}, "distribution.*gauss|gauss.*distribution"),
        ({"scope": "block"}, "scope.*block|block.*scope"),
    ],
)
def test_bad_arguments(options: dict[str, Any], named: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=f"(?i){named}"):
        rewire.GSE(model, optimizer, **({"every": 10, "until": 100} | options))


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_bad_fractions_of_a_callable(value: float) -> None:
    with pytest.raises(ValueError, match="fraction"):
        once(mlp, fraction=constant(value))


def test_a_fraction_of_zero_changes_nothing() -> None:
    outcome = once(mlp, fraction=constant(0.0))
    assert outcome.after == outcome.before


def test_models_without_sparse_layers() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"(?i)sparse"):
        rewire.GSE(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1, until=2)


def test_optimizers_of_something_else() -> None:
    model = mlp()
    for parameters in (mlp().parameters(), [layer.bias for layer in layers_of(model)]):
        with pytest.raises(ValueError, match=r"(?i)optimizer"):
            rewire.GSE(model, torch.optim.SGD(parameters, lr=0.1), every=1, until=2)  # type: ignore[arg-type]
    some = torch.optim.SGD(model[:3].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="4"):  # names the layer
        rewire.GSE(model, some, every=1, until=2)


def test_optimizers_that_need_not_hold_biases() -> None:
    model = mlp()
    optimizer = torch.optim.SGD([layer.values for layer in layers_of(model)], lr=0.1)
    rewirer = rewire.GSE(model, optimizer, every=1, until=LONG)
    outcome = one_step(model, optimizer, rewirer, [batch_of(model)])
    assert sum(map(len, outcome.grown)) > 0


def test_optimizers_that_cannot_be_carried_are_refused_at_once() -> None:
    model = nn.Sequential(mlp(), nn.Linear(5, 5, bias=False, dtype=torch.float64))
    refused = (
        torch.optim.LBFGS(model.parameters()),
        torch.optim.SparseAdam(model.parameters()),
        torch.optim.Muon(model[1].parameters()),
    )
    for optimizer in refused:
        with pytest.raises((ValueError, TypeError), match=type(optimizer).__name__):
            rewire.GSE(model, optimizer, every=1, until=2)


# Shared and frozen layers -------------------------------------------------------------------------


class Twice(nn.Module):
    """One layer used twice in a pass, and one used once; by one name or by two."""

    def __init__(self, names: int) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": torch.float64, "generator": seeded(0)}
        self.shared = SparseLinear(12, 12, connections=50, **options)
        self.also = self.shared if names == 2 else None
        self.last = SparseLinear(12, 5, connections=20, **options)

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(x).tanh()
        return self.last((self.also or self.shared)(y).tanh())


@distributions
@pytest.mark.parametrize("names", [1, 2])
def test_shared_layers_are_rewired_by_their_whole_gradient_or_refused(
    names: int, distribution: str
) -> None:
    batches = [(normal(8, 12), torch.randint(5, (8,), generator=seeded(0)))]
    for parts in (batches, [*batches, (normal(8, 12, seed=5), batches[0][1])]):
        try:
            subset = sample(lambda: Twice(names), parts, distribution=distribution, subset=0.5)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            if "shared" not in str(error):
                raise
            return
        options: dict[str, Any] = {"distribution": distribution, "subset": 0.5}
        outcome = once(lambda: Twice(names), parts, fraction=constant(0.2), **options)
        assert_grows(outcome, subset, 0.2, "global")
        assert_prunes(outcome, "global")


@scopes
@pytest.mark.parametrize("held", [True, False])
def test_frozen_layers_are_left_alone_or_refused(scope: str, held: bool) -> None:
    model = mlp()
    model[2].values.requires_grad_(False)
    parameters = [p for p in model.parameters() if held or p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    try:
        rewirer = rewire.GSE(model, optimizer, every=1, until=LONG, subset=0.5, scope=scope)
    except ValueError as error:
        if "2" not in str(error):  # the layer's name
            raise
        return
    frozen = values_of(model)[1]
    for step in range(4):
        before = keys_of(model)
        optimizer.zero_grad()
        default_loss(model, batch_of(model, step)).backward()
        optimizer.step()
        rewirer.step()
        assert values_of(model)[1] == frozen
        assert sum(map(len, keys_of(model))) == sum(map(len, before))
        assert keys_of(model)[0] != before[0]


def test_a_model_whose_sparse_layers_are_all_frozen() -> None:
    model = nn.Sequential(mlp(), nn.Linear(5, 5, dtype=torch.float64))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"(?i)frozen|requires_grad|train|sparse"):
        rewire.GSE(model, optimizer, every=1, until=2)


def test_unused_layers_do_no_harm() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = mlp(), mlp(seed=3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Partly()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rewirer = rewire.GSE(model, optimizer, every=1, until=LONG)
    budget, unused = sum(map(len, keys_of(model))), inactive_of(model.unused)
    for step in range(3):
        optimizer.zero_grad()
        default_loss(model, batch_of(model, step)).backward()
        optimizer.step()
        assert rewirer.step() is not None
        assert sum(map(len, keys_of(model))) == budget
    assert all(a <= b for a, b in zip(unused, inactive_of(model.unused), strict=True))


# Always sparse ------------------------------------------------------------------------------------


@scopes
@distributions
def test_no_dense_tensor_exists_during_a_rewiring(distribution: str, scope: str) -> None:
    n_in, n_out, count, batch = 1500, 1000, 900, 4
    model = nn.Sequential(
        SparseLinear(n_in, n_out, connections=count, generator=seeded(0)),
        nn.ReLU(),
        SparseLinear(n_out, n_in, connections=count, generator=seeded(1)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options: dict[str, Any] = {"distribution": distribution, "scope": scope, "fraction": 0.3}
    with NothingDense(20 * (n_in + n_out)) as watch:  # 50,000 of 1.5 million
        rewirer = rewire.GSE(model, optimizer, every=1, until=LONG, **options)
        for step in range(3):
            optimizer.zero_grad()
            x = normal(batch, n_in, seed=step, dtype=torch.float32)
            model(x).square().mean().backward()
            optimizer.step()
            assert total(rewirer.step(), "grown") > 0
        rewirer.state_dict()
    assert watch.largest >= count


@distributions
def test_a_layer_whose_dense_form_could_not_exist(distribution: str) -> None:
    width = 300_000  # 9e10 weights
    model = SparseLinear(width, width, bias=False, connections=40_000, generator=seeded(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"distribution": distribution, "subset": 1.0}
    rewirer = rewire.GSE(model, optimizer, every=1, until=LONG, fraction=0.3, **options)
    x = torch.randn(2, width, generator=seeded(1))
    before = keys_of(model)
    model(x).square().sum().backward()
    optimizer.step()
    result = rewirer.step()
    assert total(result, "subset") <= 40_000
    (after,) = keys_of(model)
    assert len(after) == 40_000
    grown = after - before[0]
    assert len(grown) == math.ceil(0.3 * 40_000)
    assert max(grown) > 2**32  # nothing is cut to 32 bits
    assert max(key % width for key in grown) > 0.9 * width


# History ------------------------------------------------------------------------------------------


@scopes
def test_the_history_says_what_happened(scope: str) -> None:
    model, optimizer, rewirer = trio(mlp, scope=scope)
    names = [name for name, module in model.named_modules() if isinstance(module, SparseLayer)]
    ever, results = keys_of(model), []
    for step in range(12):
        outcome = one_step(model, optimizer, rewirer, [batch_of(model, step)])
        ever = [a | b for a, b in zip(ever, outcome.after, strict=True)]
        if (result := outcome.result) is None:
            continue
        results.append(result)
        assert result.step == step + 1
        assert result.fraction == pytest.approx(0.2 * (1 + math.cos(math.pi * (step + 1) / 20)))
        assert list(result.layers) == names
        for i, part in enumerate(result.layers.values()):
            assert part.active == len(outcome.after[i])
            assert (part.grown, part.pruned) == (len(outcome.grown[i]), len(outcome.pruned[i]))
            assert part.turnover == pytest.approx(part.pruned / len(outcome.before[i]))
            layer = layers_of(model)[i]
            assert part.explored == pytest.approx(len(ever[i]) / (layer.n_in * layer.n_out))
        for name in ("active", "grown", "pruned", "subset"):
            parts = result.layers.values()
            assert getattr(result, name) == sum(getattr(part, name) for part in parts)
    assert list(rewirer.history) == results
    assert len(results) == 4
    again = trio(lambda: other(mlp), scope=scope)
    for part, state in zip(again, stored(model, optimizer, rewirer), strict=True):
        part.load_state_dict(state)
    assert list(again[2].history) == results
