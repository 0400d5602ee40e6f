"""What GSE must keep, SET, DSR and DeepR must keep too."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rewire
from rewire import SparseLinear
from rewirings import (
    LONG,
    Make,
    NothingDense,
    assert_frequencies,
    assert_prunes,
    assert_same,
    batch_of,
    cnn,
    constant,
    default_loss,
    keys_of,
    layers_of,
    linear_pair,
    mlp,
    normal,
    one_step,
    other,
    pools,
    scopes,
    seeded,
    state_by_key,
    stored,
    train,
    values_of,
)

METHODS: dict[str, Callable[..., Any]] = {
    "GSE": lambda *a, **k: rewire.GSE(*a, until=40, **({"every": 2} | k)),
    "SET": lambda *a, **k: rewire.SET(*a, until=40, **({"every": 2} | k)),
    "SET layer": lambda *a, **k: rewire.SET(*a, until=40, scope="layer", **({"every": 2} | k)),
    "Static": lambda *a, **k: rewire.Static(*a, **k),
    "DSR": lambda *a, **k: rewire.DSR(*a, until=40, threshold=0.05, **({"every": 2} | k)),
    "DeepR": lambda *a, **k: rewire.DeepR(*a, l1=0.3, temperature=0.01, **k),
    "DeepR global": lambda *a, **k: rewire.DeepR(*a, l1=0.3, scope="global", **k),
}
methods = pytest.mark.parametrize("method", METHODS)


def with_method(method: str, make: Make, **options: Any) -> tuple[nn.Module, Any, Any]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, METHODS[method](model, optimizer, **options)


@methods
@pytest.mark.parametrize("make", [mlp, cnn])
def test_methods_keep_the_budget_and_what_survives(make: Make, method: str) -> None:
    model, optimizer, rewirer = with_method(method, make)
    parameters = list(model.parameters())
    budget, changed = [len(keys) for keys in keys_of(model)], 0
    for step in range(12):
        optimizer.zero_grad()
        default_loss(model, batch_of(model, step)).backward()
        optimizer.step()
        values = values_of(model)
        states = [state_by_key(optimizer, layer) for layer in layers_of(model)]
        result = rewirer.step()
        now = values_of(model)
        assert sum(map(len, now)) == sum(budget)
        assert all(now)
        grown = [b.keys() - a.keys() for a, b in zip(values, now, strict=True)]
        changed += sum(map(len, grown))
        assert sum(map(len, grown)) == (0 if result is None else result.grown)
        for i, layer in enumerate(layers_of(model)):
            assert all(now[i][key] == 0 for key in grown[i])
            kept = now[i].keys() & values[i].keys()
            if not method.startswith("DeepR"):
                assert all(now[i][key] == values[i][key] for key in kept)
            momentum = state_by_key(optimizer, layer)["momentum_buffer"]
            assert all(momentum[key] == states[i]["momentum_buffer"][key] for key in kept)
            assert all(momentum[key] == 0 for key in grown[i])
        if method in ("SET layer", "Static", "DeepR"):
            assert [len(keys) for keys in now] == budget
    assert (changed > 0) == (method != "Static")
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]


@methods
def test_methods_give_the_same_run_again(method: str) -> None:
    def run(seed: int, noise: int) -> nn.Module:
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        parts = with_method(method, mlp, seed=seed)
        assert torch.equal(before, torch.get_rng_state())
        model = train(parts, range(8))
        assert torch.equal(before, torch.get_rng_state())
        return model

    first = run(0, 1)
    assert_same(first, run(0, 2))
    assert (keys_of(first) == keys_of(run(1, 1))) == (method == "Static")


@methods
def test_methods_continue_bit_for_bit(method: str) -> None:
    through = train(with_method(method, mlp), range(9))
    for stop in (0, 1, 4, 5):
        parts = with_method(method, mlp)
        train(parts, range(stop))
        again = with_method(method, lambda: other(mlp))
        for part, state in zip(again, stored(*parts), strict=True):
            part.load_state_dict(state)
        assert_same(through, train(again, range(stop, 9)))


@methods
def test_methods_continue_before_their_rewiring(method: str) -> None:
    through = train(with_method(method, mlp), range(9))
    parts = with_method(method, mlp)
    train(parts, range(5))
    model, optimizer, _ = parts
    optimizer.zero_grad()
    for micro in (0, 1):
        (default_loss(model, batch_of(model, 10 + micro)) / 2).backward()
    optimizer.step()
    again = with_method(method, lambda: other(mlp))
    for part, state in zip(again, stored(*parts), strict=True):
        part.load_state_dict(state)
    again[2].step()
    assert_same(through, train(again, range(6, 9)))


@methods
def test_methods_refuse_what_gse_refuses(method: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="every"):
        METHODS[method](model, optimizer, every=0)
    with pytest.raises(ValueError, match=r"(?i)optimizer"):
        METHODS[method](model, torch.optim.SGD(mlp().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="LBFGS"):
        METHODS[method](model, torch.optim.LBFGS(model.parameters()))


@methods
def test_methods_are_never_dense(method: str) -> None:
    n_in, n_out, count = 1500, 1000, 900
    model = SparseLinear(n_in, n_out, connections=count, generator=seeded(0))
    with NothingDense(20 * (n_in + n_out)):
        _, optimizer, rewirer = with_method(method, lambda: model)
        for step in range(4):
            optimizer.zero_grad()
            model(normal(4, n_in, seed=step, dtype=torch.float32)).square().mean().backward()
            optimizer.step()
            rewirer.step()


@scopes
def test_set_prunes_the_smallest_and_grows_as_many(scope: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"every": 1, "until": LONG, "fraction": 0.3, "scope": scope}
    rewirer = rewire.SET(model, optimizer, **options)
    for step in range(4):
        outcome = one_step(model, optimizer, rewirer, [batch_of(model, step)])
        assert_prunes(outcome, scope)
        for pool in pools(scope, 3):
            k = math.ceil(0.3 * sum(len(outcome.before[i]) for i in pool))
            assert sum(len(outcome.grown[i]) for i in pool) == k


def test_set_grows_uniformly() -> None:
    drawn: Counter[int] = Counter()
    for seed in range(400):
        model = linear_pair()
        (before,) = keys_of(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        rewirer = rewire.SET(model, optimizer, every=1, until=LONG, fraction=0.5, seed=seed)
        rewirer.step()
        (key,) = keys_of(model)[0] - before
        drawn[key] += 1
    assert_frequencies(drawn, {key: 40.0 for key in range(12) if key not in before})


def test_dsr_prunes_below_one_threshold_and_adapts_it() -> None:
    """Regrowth is shared out in proportion to the survivors, and never where it was just pruned."""
    for threshold, factor in ((0.3, 0.5), (1e-4, 2.0)):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        options: dict[str, Any] = {"every": 1, "until": LONG, "fraction": constant(0.1)}
        rewirer = rewire.DSR(model, optimizer, threshold=threshold, **options)
        outcome = one_step(model, optimizer, rewirer, [batch_of(model)])
        below = [{k for k, v in values.items() if abs(v) < threshold} for values in outcome.values]
        assert outcome.pruned == below  # no layer loses all
        gone, target = sum(map(len, below)), 0.1 * sum(map(len, outcome.before))
        assert gone > 1.1 * target if factor < 1 else gone < 0.9 * target
        assert rewirer.threshold == pytest.approx(threshold * factor)
        survivors = [len(a) - len(b) for a, b in zip(outcome.before, below, strict=True)]
        for i, grown in enumerate(outcome.grown):
            assert abs(len(grown) - gone * survivors[i] / sum(survivors)) <= 1
            assert not grown & outcome.before[i]


def test_dsr_keeps_one_connection_of_every_layer() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options: dict[str, Any] = {"every": 1, "until": LONG, "fraction": constant(0.5)}
    rewirer = rewire.DSR(model, optimizer, threshold=100.0, **options)
    outcome = one_step(model, optimizer, rewirer, [batch_of(model)])
    for values, before, pruned in zip(outcome.values, outcome.before, outcome.pruned, strict=True):
        largest = max(values, key=lambda key: abs(values[key]))
        assert largest in before - pruned
    assert sum(map(len, outcome.after)) == sum(map(len, outcome.before))


def test_deepr_lets_go_what_would_change_its_sign() -> None:
    model = mlp()
    start = values_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    rewirer = rewire.DeepR(model, optimizer, l1=0.4, temperature=0.0)
    outcome = one_step(model, optimizer, rewirer, [batch_of(model)])
    now = values_of(model)
    for i, values in enumerate(outcome.values):
        theta = {k: math.copysign(1, start[i][k]) * v - 0.2 * 0.4 for k, v in values.items()}
        assert outcome.pruned[i] == {key for key, value in theta.items() if value < 0}
        assert outcome.pruned[i]
        for key in outcome.before[i] - outcome.pruned[i]:
            assert now[i][key] == pytest.approx(math.copysign(theta[key], start[i][key]))


def test_deepr_never_changes_the_sign_of_a_connection() -> None:
    model, optimizer, rewirer = with_method("DeepR", mlp)
    sign: list[dict[int, float]] = [{} for _ in layers_of(model)]
    for step in range(15):
        outcome = one_step(model, optimizer, rewirer, [batch_of(model, step)])
        for i, values in enumerate(values_of(model)):
            kept = outcome.before[i] - outcome.pruned[i]
            for key in kept:
                if key in sign[i] and values[key]:
                    assert math.copysign(1, values[key]) == sign[i][key]
            sign[i] = {k: math.copysign(1, v) for k, v in values.items() if v} | {
                k: s for k, s in sign[i].items() if k in kept
            }
