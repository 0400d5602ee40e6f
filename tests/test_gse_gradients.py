"""When GSE rewires, and by which gradient."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rewire
from rewire import SparseLayer
from rewirings import (
    LONG,
    Batch,
    Make,
    assert_grows,
    assert_rewires,
    batch_of,
    cnn,
    constant,
    default_loss,
    distributions,
    inactive_of,
    keys_of,
    layers_of,
    mlp,
    once,
    one_step,
    sample,
    scopes,
    seeded,
    total,
    values_of,
)

# Schedule -----------------------------------------------------------------------------------------


def changes(steps: int, make: Make = mlp, **options: Any) -> list[int]:
    """Connections grown in each step."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rewirer = rewire.GSE(model, optimizer, **options)
    counts = []
    for step in range(steps):
        outcome = one_step(model, optimizer, rewirer, [batch_of(model, step)])
        grown, pruned = (sum(map(len, sets)) for sets in (outcome.grown, outcome.pruned))
        assert grown == pruned
        if outcome.result is not None:
            assert (total(outcome.result, "grown"), total(outcome.result, "pruned")) == (grown,) * 2
        else:
            assert grown == 0
        counts.append(grown)
    return counts


def test_rewirings_happen_every_so_often_and_the_fraction_follows_the_cosine() -> None:
    active = sum(map(len, keys_of(mlp())))
    counts = changes(20, every=3, until=16, fraction=0.37, subset=math.inf)
    for t, count in enumerate(counts, start=1):
        alpha = 0.37 / 2 * (1 + math.cos(math.pi * t / 16)) if t % 3 == 0 and t < 16 else 0
        assert count == math.ceil(alpha * active)


def test_the_cosine_ends_at_zero() -> None:
    assert changes(8, every=2, until=4, fraction=0.5, subset=1.0)[2:] == [0] * 6


def test_a_callable_fraction_is_taken_as_it_is_up_to_until() -> None:
    seen = []

    def fraction(t: int) -> float:
        seen.append(t)
        return 0.01 * t

    active = sum(map(len, keys_of(mlp())))
    counts = changes(14, every=5, until=10, fraction=fraction, subset=math.inf)
    expected = {5: math.ceil(0.05 * active), 10: math.ceil(0.1 * active)}
    assert counts == [expected.get(t, 0) for t in range(1, 15)]
    assert set(seen) <= {5, 10}


def test_nothing_is_returned_between_rewirings() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rewirer = rewire.GSE(model, optimizer, every=3, until=6)
    results = [
        one_step(model, optimizer, rewirer, [batch_of(model, step)]).result for step in range(9)
    ]
    assert [i for i, result in enumerate(results, start=1) if result is not None] in ([3], [3, 6])


@scopes
def test_the_budget_never_changes(scope: str) -> None:
    model = cnn(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    rewirer = rewire.GSE(model, optimizer, every=1, until=25, fraction=0.5, scope=scope)
    start = [len(keys) for keys in keys_of(model)]
    moved = False
    for step in range(30):
        one_step(model, optimizer, rewirer, [batch_of(model, step)])
        now = [len(keys) for keys in keys_of(model)]
        assert sum(now) == sum(start)
        assert all(now)
        moved = moved or now != start
        assert [layer.values.numel() for layer in layers_of(model)] == now
    assert moved == (scope == "global")


# Which gradient -----------------------------------------------------------------------------------


def micro_batches(make: Make) -> list[Batch]:
    return [batch_of(make(), seed, size) for seed, size in ((0, 8), (1, 8), (2, 8))]


@distributions
@pytest.mark.parametrize("make", [mlp, cnn])
def test_accumulation_averages_the_gradient_over_micro_batches(
    make: Make, distribution: str
) -> None:
    batches = micro_batches(make)
    assert_rewires(make, batches, distribution=distribution, subset=0.5)
    first, last = (
        once(make, part, distribution=distribution, subset=0.5, fraction=constant(0.2))
        for part in (batches, batches[:1])
    )
    assert first.grown != last.grown  # all micro-batches count


@distributions
@pytest.mark.parametrize("make", [mlp, cnn])
def test_the_subset_is_drawn_from_the_first_micro_batch(make: Make, distribution: str) -> None:
    batches = micro_batches(make)
    options: dict[str, Any] = {"distribution": distribution, "subset": 0.5}
    subset = sample(make, batches, **options)
    assert subset == sample(make, batches[:1], **options)
    if distribution == "uniform":
        assert subset == sample(make, batches[1:], **options)
    else:
        assert subset != sample(make, batches[1:], **options)


@distributions
def test_micro_batches_of_a_step_before_do_not_count(distribution: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options: dict[str, Any] = {"subset": math.inf, "distribution": distribution, "until": LONG}
    rewirer = rewire.GSE(model, optimizer, every=2, fraction=0.2, **options)
    for step in range(6):
        outcome = one_step(
            model, optimizer, rewirer, [batch_of(model, 2 * step + i) for i in (0, 1)]
        )
        if step % 2:
            inactive = [
                set(range(layer.n_in * layer.n_out)) - before
                for layer, before in zip(layers_of(model), outcome.before, strict=True)
            ]
            assert_grows(outcome, inactive, 0.2, "global")
        else:
            assert outcome.after == outcome.before


def spoil(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.normal_(generator=seeded(3))


@distributions
@pytest.mark.parametrize(
    "between",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-4),
        spoil,
        lambda model: model.zero_grad(),
    ],
    ids=["norm", "value", "spoiled", "zeroed"],
)
def test_what_happens_to_grad_after_backward_does_not_matter(
    between: Callable[[nn.Module], object], distribution: str
) -> None:
    options: dict[str, Any] = {"distribution": distribution, "lr": 0.0, "subset": 0.5}
    options |= {"fraction": constant(0.2)}
    plain, treated = once(mlp, **options), once(mlp, between=between, **options)
    assert plain.grown == treated.grown
    assert plain.pruned == treated.pruned


@distributions
def test_passes_without_backward_do_not_matter(distribution: str) -> None:
    options: dict[str, Any] = {"distribution": distribution, "subset": 0.5, "fraction": 0.2}

    def noisy(model: nn.Module, batch: Batch) -> Tensor:
        x = batch_of(model, 77)[0] if isinstance(model[0], SparseLayer) else batch[0]
        with torch.no_grad():
            model.eval()(3 * x)
        model.train()(5 * x)  # a graph that nobody uses
        loss = default_loss(model, batch)
        model(7 * x)
        return loss

    quiet, loud = once(mlp, **options), once(mlp, loss=noisy, **options)
    assert quiet.after == loud.after


def test_the_gradient_is_that_of_the_weights_before_the_update() -> None:
    outcome = once(mlp, lr=5.0, subset=math.inf, fraction=constant(0.2))
    assert_grows(outcome, inactive_of(mlp()), 0.2, "global")


@distributions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_scaling_changes_nothing(dtype: torch.dtype, distribution: str) -> None:
    """With torch's GradScaler, whose scale is a power of two."""

    def train(scaled: bool) -> tuple[list[dict[int, float]], list[Tensor]]:
        model = mlp(dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        options: dict[str, Any] = {"every": 2, "until": LONG, "distribution": distribution}
        rewirer = rewire.GSE(model, optimizer, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=scaled)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(default_loss(model, batch_of(model, step))).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
            rewirer.step()
        return values_of(model), [layer.values.detach() for layer in layers_of(model)]

    plain, scaled = train(False), train(True)
    assert [set(v) for v in plain[0]] == [set(v) for v in scaled[0]]
    for a, b in zip(plain[1], scaled[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@distributions
def test_an_overflow_does_no_harm(distribution: str) -> None:
    """A step that GradScaler skips: gradients are infinite or NaN."""
    model = mlp(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rewirer = rewire.GSE(model, optimizer, every=2, until=LONG, distribution=distribution)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    budget = sum(map(len, keys_of(model)))
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(1e3 * default_loss(model, batch_of(model, step))).backward()
        scaler.step(optimizer)
        scaler.update()
        rewirer.step()
        assert sum(map(len, keys_of(model))) == budget
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@distributions
def test_recomputed_activations(distribution: str) -> None:
    def again(model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(model, nn.Sequential)
        x = checkpoint(model[:3], batch[0].clone().requires_grad_(), use_reentrant=False)
        return F.cross_entropy(model[3:](x), batch[1])

    options: dict[str, Any] = {"distribution": distribution, "subset": 0.5, "fraction": 0.2}
    assert once(mlp, **options).after == once(mlp, loss=again, **options).after
