"""The same answer again: with the same seed, other threads, and after a resume."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import rewire
from rewire import SparseConv2d, SparseLinear
from rewirings import (
    LONG,
    assert_same,
    batch_of,
    cnn,
    constant,
    default_loss,
    distributions,
    keys_of,
    mlp,
    normal,
    other,
    scopes,
    seeded,
    stored,
    train,
    trio,
    values_of,
)


@distributions
def test_the_same_seed_gives_the_same_run(distribution: str) -> None:
    def run(seed: int, noise: int) -> nn.Module:
        torch.manual_seed(noise)
        return train(trio(cnn, distribution=distribution, seed=seed), range(8))

    assert_same(run(0, 1), run(0, 2))
    assert keys_of(run(0, 1)) != keys_of(run(1, 1))


@distributions
def test_torchs_generator_is_left_alone(distribution: str) -> None:
    torch.manual_seed(5)
    model, optimizer, rewirer = trio(mlp, distribution=distribution, every=1)
    before = torch.get_rng_state()
    train((model, optimizer, rewirer), range(3))
    assert torch.equal(before, torch.get_rng_state())


@distributions
def test_threads_make_no_difference(distribution: str) -> None:
    def make() -> nn.Module:
        options: dict[str, Any] = {"sparsity": 0.9, "generator": seeded(0)}
        return nn.Sequential(
            SparseConv2d(8, 32, 3, padding=1, **options),
            nn.Flatten(),
            SparseLinear(32 * 64, 300, **options),
        )

    def run(threads: int) -> tuple[list[dict[int, float]], Any]:
        torch.set_num_threads(threads)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        options: dict[str, Any] = {"every": 1, "until": LONG, "distribution": distribution}
        rewirer = rewire.GSE(model, optimizer, **options)
        for step in range(2):
            x = normal(48, 8, 8, 8, seed=step, dtype=torch.float32)
            (model(x) * normal(48, 300, seed=step + 9, dtype=torch.float32)).sum().backward()
            optimizer.step()
            rewirer.step()
        return values_of(model), rewirer.state_dict()

    threads = torch.get_num_threads()
    try:
        results = [run(count) for count in (1, 2, 3)]
    finally:
        torch.set_num_threads(threads)
    assert results[0][0] == results[1][0] == results[2][0]


@scopes
@distributions
@pytest.mark.parametrize("make", [mlp, cnn])
def test_a_run_continues_bit_for_bit(make: Any, distribution: str, scope: str) -> None:
    """From between any two steps, into objects made from another seed."""
    options: dict[str, Any] = {"distribution": distribution, "scope": scope, "seed": 4}
    complete = trio(make, **options)
    through = train(complete, range(11))
    for stop in (0, 1, 2, 3, 5, 6):
        parts = trio(make, **options)
        train(parts, range(stop))
        again = trio(lambda: other(make), **options)
        for part, state in zip(again, stored(*parts), strict=True):
            part.load_state_dict(state)
        assert_same(through, train(again, range(stop, 11)))
        assert list(again[2].history) == list(complete[2].history)


@distributions
def test_the_order_of_loading_does_not_matter(distribution: str) -> None:
    through = train(trio(mlp, distribution=distribution), range(8))
    parts = trio(mlp, distribution=distribution)
    train(parts, range(5))
    for order in itertools.permutations(range(3)):
        again = trio(lambda: other(mlp), distribution=distribution)
        states = stored(*parts)
        for i in order:
            again[i].load_state_dict(states[i])
        assert_same(through, train(again, range(5, 8)))


@distributions
@pytest.mark.parametrize("make", [mlp, cnn])
def test_a_run_continues_between_the_armed_backward_and_the_rewiring(
    make: Any, distribution: str
) -> None:
    options: dict[str, Any] = {"distribution": distribution}
    through = train(trio(make, **options), range(10))
    parts = trio(make, **options)
    train(parts, range(5))
    model, optimizer, _ = parts
    optimizer.zero_grad()
    for micro in (0, 1):
        (default_loss(model, batch_of(model, 10 + micro)) / 2).backward()
    optimizer.step()
    for order in ((0, 1, 2), (2, 1, 0)):
        again = trio(lambda: other(make), **options)
        states = stored(*parts)  # anew: torch's optimizers take the tensors as they are
        for i in order:
            again[i].load_state_dict(states[i])
        again[2].step()
        assert_same(through, train(again, range(6, 10)))
    parts[2].step()  # saving did not disturb the one that was saved
    assert_same(through, train(parts, range(6, 10)))


@distributions
def test_a_run_continues_between_two_micro_batches(distribution: str) -> None:
    options: dict[str, Any] = {"distribution": distribution}
    through = train(trio(mlp, **options), range(10))
    parts = trio(mlp, **options)
    train(parts, range(5))
    model, optimizer, _ = parts
    optimizer.zero_grad()
    (default_loss(model, batch_of(model, 10)) / 2).backward()
    again = trio(lambda: other(mlp), **options)
    for part, state in zip(again, stored(*parts), strict=True):
        part.load_state_dict(state)
    for mine, theirs in zip(again[0].parameters(), model.parameters(), strict=True):
        assert theirs.grad is not None
        mine.grad = theirs.grad.clone()
    (default_loss(again[0], batch_of(again[0], 11)) / 2).backward()
    again[1].step()
    again[2].step()
    assert_same(through, train(again, range(6, 10)))


@distributions
def test_a_rewiring_without_a_backward_pass_is_an_error(distribution: str) -> None:
    model, _, rewirer = trio(mlp, every=1, distribution=distribution)
    before = values_of(model)
    with pytest.raises(RuntimeError, match="backward"):
        rewirer.step()
    assert values_of(model) == before


def test_functions_of_the_step_are_not_saved() -> None:
    through = train(trio(mlp, fraction=constant(0.3)), range(8))
    parts = trio(mlp, fraction=constant(0.3))
    train(parts, range(4))
    again = trio(lambda: other(mlp), fraction=constant(0.3))
    for part, state in zip(again, stored(*parts), strict=True):
        part.load_state_dict(state)
    assert_same(through, train(again, range(4, 8)))


def test_going_back_to_an_earlier_state_of_the_same_objects() -> None:
    parts = trio(mlp, distribution="grabo")
    train(parts, range(4))
    states = stored(*parts)
    first = copy.deepcopy(train(parts, range(4, 8)).state_dict())
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    second = train(parts, range(4, 8)).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
