"""How GSE draws connections: uniformly, by GraBo and by GraEst."""

import copy
import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rewire
from rewire import Connections, SparseConv2d, SparseLinear, sampling
from rewire.ops.reference import Convolution
from rewire.ops.sampling import Stream
from rewirings import (
    DISTRIBUTIONS,
    LONG,
    Batch,
    Make,
    assert_frequencies,
    assert_prunes,
    distributions,
    keys_of,
    linear_pair,
    normal,
    once,
    sample,
    seeded,
    true_gradients,
    weighted_sum,
)

# Sampling -----------------------------------------------------------------------------------------


def single_draws(make: Make, batch: Batch, count: int, distribution: str) -> Counter[int | None]:
    """Of layers with two connections: the one draw, or None where it hit an active connection."""
    drawn: Counter[int | None] = Counter()
    options: dict[str, Any] = {"subset": 0.5, "fraction": 0.5, "distribution": distribution}
    for seed in range(count):
        model = make()
        (before,) = keys_of(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        rewirer = rewire.GSE(model, optimizer, every=1, until=LONG, seed=seed, **options)
        weighted_sum(model, batch).backward()
        optimizer.step()
        rewirer.step()
        grown = keys_of(model)[0] - before
        assert len(grown) <= 1
        drawn[next(iter(grown), None)] += 1
    return drawn


def conv_pair() -> nn.Module:
    """2 channels and 1 x 2 taps: 4 input units; 2 outputs; two connections."""
    layer = SparseConv2d(2, 2, (1, 2), padding=(0, 1), stride=(1, 2), bias=False, connections=2)
    given = Connections.from_keys(torch.tensor([1, 6]), 4, 2)
    layer.set_connections(given, torch.tensor([0.5, -0.3]))
    return layer.double()


def pointwise_pair() -> nn.Module:
    """4 channels, 3 outputs, two connections, one tap."""
    layer = SparseConv2d(4, 3, 1, bias=False, connections=2, dtype=torch.float64)
    layer.set_connections(linear_pair().connections, torch.tensor([0.5, -0.3]))
    return layer


def columns(layer: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """h (inputs, positions) and delta (outputs, positions); a patch is one position."""
    x, delta = batch
    if isinstance(layer, SparseLinear):
        return x.T, delta.T
    assert isinstance(layer, SparseConv2d)
    dense = layer.to_dense()
    sizes: dict[str, Any] = {"padding": dense.padding, "stride": dense.stride}
    patches = F.unfold(x, dense.kernel_size, **sizes)
    channels, taps = layer.in_channels, layer.taps
    patches = patches.view(len(x), channels, taps, -1).transpose(1, 2).flatten(1, 2)
    return patches.transpose(0, 1).flatten(1), delta.flatten(2).transpose(0, 1).flatten(1)


def joint(f: Tensor, g: Tensor) -> Tensor:
    """f x g by key, of weights that need not be normalised."""
    return torch.outer(g / g.sum(), f / f.sum()).flatten()


def grabo(h: Tensor, delta: Tensor) -> Tensor:
    return joint(h.abs().sum(1), delta.abs().sum(1))


def graest(h: Tensor, delta: Tensor) -> Tensor:
    """Mean over all vectors of signs."""
    every = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=h.shape[1]))).to(h.dtype)
    return torch.stack([joint((h @ s).abs(), (delta @ s).abs()) for s in every]).mean(0)


def uniform(h: Tensor, delta: Tensor) -> Tensor:
    return joint(torch.ones(len(h)), torch.ones(len(delta)))


JOINT = {"uniform": uniform, "grabo": grabo, "graest": graest}
# Each activation and output gradient is (1, 1) or (1, -1) over two positions, times something.
ALIGNED = (
    torch.tensor([[1.0, 1.0, 2.0, 3.0], [1.0, -1.0, 2.0, -3.0]], dtype=torch.float64),
    torch.tensor([[1.0, 1.0, 2.0], [1.0, -1.0, 2.0]], dtype=torch.float64),
)
PAIRS: dict[str, tuple[Make, Batch]] = {
    "linear": (linear_pair, (normal(3, 4, seed=5), normal(3, 3, seed=6))),
    "batch of one": (linear_pair, (normal(1, 4, seed=7), normal(1, 3, seed=8))),
    "conv": (conv_pair, (normal(2, 2, 1, 2, seed=9), normal(2, 2, 1, 2, seed=10))),
    "aligned": (linear_pair, ALIGNED),
    "aligned images": (
        pointwise_pair,
        (ALIGNED[0][:, :, None, None], ALIGNED[1][:, :, None, None]),
    ),
    "aligned positions": (
        pointwise_pair,
        (ALIGNED[0].T[None, :, None], ALIGNED[1].T[None, :, None]),
    ),
}


def expectation(probabilities: Tensor, active: set[int], count: int) -> dict[int | None, float]:
    expected: dict[int | None, float] = {
        key: count * p for key, p in enumerate(probabilities.tolist()) if key not in active
    }
    expected[None] = count - sum(expected.values())
    return expected


@pytest.mark.parametrize(
    ("kind", "distribution"),
    [(k, d) for k in PAIRS for d in DISTRIBUTIONS if d == "graest" or not k.startswith("aligned")],
)
def test_draws_follow_the_product_of_the_two_distributions(kind: str, distribution: str) -> None:
    make, batch = PAIRS[kind]
    count = 80 if kind.startswith("aligned") else 400
    drawn = single_draws(make, batch, count, distribution)
    layer = make()
    (active,) = keys_of(layer)
    probabilities = JOINT[distribution](*columns(layer, batch))
    assert_frequencies(drawn, expectation(probabilities, active, count))
    if (
        kind == "batch of one" and distribution != "uniform"
    ):  # tight: it is the gradient's magnitude
        (gradient,) = true_gradients(layer, [batch], weighted_sum)
        magnitude = gradient.abs() / gradient.abs().sum()
        torch.testing.assert_close(probabilities, magnitude)
        assert_frequencies(drawn, expectation(magnitude, active, count))


def test_draws_of_one_rewirer_are_new_in_every_step() -> None:
    model = linear_pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rewirer = rewire.GSE(model, optimizer, every=1, until=LONG, fraction=0.5, subset=0.5)
    drawn: Counter[int | None] = Counter()
    expected: Counter[int | None] = Counter()
    for _ in range(600):
        (before,) = keys_of(model)
        model(PAIRS["linear"][1][0]).sum().backward()
        optimizer.step()
        rewirer.step()
        (after,) = keys_of(model)
        drawn[next(iter(after - before), None)] += 1
        expected.update({key: 1 for key in range(12) if key not in before} | {None: len(before)})
    assert_frequencies(drawn, {cell: n / 12 for cell, n in expected.items()})


@distributions
def test_many_draws_are_independent_without_repetition(distribution: str) -> None:
    """How often each connection of a larger layer is in S: 1 - (1 - f g)^draws."""

    def make() -> nn.Module:
        return SparseLinear(24, 16, connections=60, dtype=torch.float64, generator=seeded(4))

    batch = (normal(1, 24, seed=1), normal(1, 16, seed=2))
    layer = make()
    (active,) = keys_of(layer)
    p = JOINT[distribution](*columns(layer, batch))
    inside = 1 - (1 - p) ** 30
    inside[sorted(active)] = 0
    rounds, seen, sizes = 150, torch.zeros(24 * 16), []
    for seed in range(rounds):
        options: dict[str, Any] = {"distribution": distribution, "seed": seed, "subset": 0.5}
        (subset,) = sample(make, [batch], loss=weighted_sum, **options)
        assert len(subset) <= 30
        assert not subset & active
        seen[sorted(subset)] += 1
        sizes.append(len(subset))
    mean, deviation = rounds * inside, (rounds * inside * (1 - inside)).sqrt()
    assert bool(((seen - mean).abs() <= 5 * deviation + 1).all())
    spread = math.sqrt(float((inside * (1 - inside)).sum()) / rounds)
    assert abs(sum(sizes) / rounds - float(inside.sum())) < 5 * spread


def test_layers_steps_and_seeds_draw_independently() -> None:
    def make() -> nn.Module:
        given = Connections.random(20, 20, 80, seeded(0))
        one = SparseLinear(20, 20, connections=given, dtype=torch.float64, generator=seeded(1))
        return nn.Sequential(one, copy.deepcopy(one), copy.deepcopy(one))

    batches = [(normal(4, 20), normal(4, 20, seed=1))]
    options: dict[str, Any] = {"loss": weighted_sum, "subset": 0.5, "scope": "layer"}
    subsets = [s for seed in (0, 1, 2**40) for s in sample(make, batches, seed=seed, **options)]
    for a, b in itertools.combinations(subsets, 2):
        assert len(a & b) < 12  # 40 of 320: about 4 in common


def test_dead_units_are_never_drawn_and_dead_layers_do_no_harm() -> None:
    def make() -> nn.Module:
        return SparseLinear(10, 9, connections=20, dtype=torch.float64, generator=seeded(2))

    x, delta = normal(3, 10), normal(3, 9, seed=1)
    x[:, :5], delta[:, 3:6] = 0, 0
    for distribution in ("grabo", "graest"):
        options: dict[str, Any] = {"distribution": distribution, "loss": weighted_sum}
        (subset,) = sample(make, [(x, delta)], subset=0.8, **options)
        assert subset
        assert all(key % 10 >= 5 and key // 10 not in (3, 4, 5) for key in subset)
        for batch in ((0 * x, delta), (x, 0 * delta), (0 * x, 0 * delta)):
            outcome = once(make, [batch], subset=0.8, fraction=0.3, **options)
            assert_prunes(outcome, "global")


# GraBo and GraEst: the mathematics ----------------------------------------------------------------


reals = st.floats(-100, 100, allow_subnormal=False).map(lambda v: round(v, 3))


def batches_of(layer: nn.Module, batch: Batch) -> Any:
    """What rewire.sampling takes."""
    sizes = Convolution()
    if isinstance(layer, SparseConv2d):
        dense = layer.to_dense()
        sizes = Convolution(dense.kernel_size, dense.stride, dense.padding, dense.dilation)  # type: ignore[arg-type]
    return sampling.Batch(sizes, *batch)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_the_bound_of_the_lemma(data: Any, n_in: int, n_out: int, batch: int) -> None:
    rows = st.lists(reals, min_size=batch, max_size=batch)
    h = torch.tensor(data.draw(st.lists(rows, min_size=n_in, max_size=n_in))).double()
    delta = torch.tensor(data.draw(st.lists(rows, min_size=n_out, max_size=n_out))).double()
    layer = SparseLinear(n_in, n_out, bias=False, sparsity=0.5, dtype=torch.float64)
    (gradient,) = true_gradients(layer, [(h.T, delta.T)], weighted_sum)
    f, g = sampling.grabo(batches_of(layer, (h.T, delta.T)), Stream(0, 0, 0, 0))
    torch.testing.assert_close(f, h.abs().sum(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(g, delta.abs().sum(1), rtol=1e-12, atol=1e-12)
    bound = torch.outer(g, f).flatten()
    slack = 1e-12 * (1 + bound)
    assert bool((gradient.abs() <= bound + slack).all())
    if batch == 1:
        torch.testing.assert_close(gradient.abs(), bound, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["linear", "conv", "strided"])
def test_the_bound_and_the_estimate_of_a_layer(kind: str) -> None:
    """GraBo's bound; GraEst without bias, and with the variance of 4-wise independent signs."""
    if kind == "strided":
        layer: nn.Module = SparseConv2d(
            *(2, 3, (3, 2), (2, 1), (1, 1)), bias=False, sparsity=0.5, dtype=torch.float64
        )
        x = normal(2, 2, 5, 4)
        batch = (x, normal(*layer(x).shape, seed=1))
    else:
        make, batch = PAIRS[kind]
        layer = make()
    (gradient,) = true_gradients(layer, [batch], weighted_sum)
    h, delta = columns(layer, batch)
    torch.testing.assert_close((delta @ h.T).flatten(), gradient)  # of the test itself
    f, g = sampling.grabo(batches_of(layer, batch), Stream(0, 0, 0, 0))
    torch.testing.assert_close(f, h.abs().sum(1))
    torch.testing.assert_close(g, delta.abs().sum(1))
    assert bool((gradient.abs() <= torch.outer(g, f).flatten() + 1e-12).all())

    count, estimates, given = 1500, [], batches_of(layer, batch)
    for seed in range(count):
        stream = Stream(seed, 0, seed % 7, seed % 3)
        a, b = sampling.signed_sums(given, stream)
        estimates.append(torch.outer(b, a).flatten())
        if seed < 20:
            f, g = sampling.graest(given, stream)
            assert torch.equal(f, a.abs())
            assert torch.equal(g, b.abs())
    found = torch.stack(estimates)
    squares = torch.outer((delta**2).sum(1), (h**2).sum(1)).flatten()
    variance = squares + gradient**2 - 2 * ((delta**2) @ (h**2).T).flatten()
    sigma = (variance / count).sqrt()
    assert bool(((found.mean(0) - gradient).abs() <= 5 * sigma + 1e-12).all())
    torch.testing.assert_close(found.var(0), variance, rtol=0.35, atol=1e-9)
