"""Rewiring: truth tables, and what every method must keep."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rewire
from rewire import SparseConv2d, SparseLinear
from rewire.methods.sharing import share_out
from rewire.ops import dense, native
from rewired import (
    METHODS,
    backward,
    by_key,
    hand_made,
    keys,
    layers,
    mlp,
    net,
    rows,
    sgd,
    topology,
    train,
)

pytestmark = pytest.mark.usefixtures("same_random_numbers")

NOT_RANDOM = ["static", "rigl", "rigl layer", "snfs"]

# The paper's Figure 1, by hand -----------------------------------------------------------------------


def test_grow_and_prune_by_hand() -> None:
    # Active: (0, 0), (0, 1), (1, 2). The gradient at (o, i) is dy[o] * x[i].
    layer = hand_made([(0, 0, 0.5), (0, 1, -0.1), (1, 2, 2.0)])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    rewirer = rewire.GSE(layer, optimizer, every=1, until=2, fraction=lambda t: 1 / 3, subset=9.0)
    x, dy = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, -4.0]])
    layer(x).backward(dy)
    assert rewirer.subsets[""].keys().tolist() == [2, 3, 4]  # all inactive: (0, 2), (1, 0), (1, 1)
    assert rewirer.gradients[""].tolist() == [1.5, -4.0, -8.0]
    values = layer.values
    optimizer.step()
    rewiring = rewirer.step()
    assert rewiring is not None
    assert (rewiring.grown, rewiring.pruned, rewiring.subset, rewiring.active) == (1, 1, 3, 3)
    assert layer.values is values
    assert by_key(layer) == {0: 0.5, 4: 0.0, 5: 2.0}
    assert layer.values.grad is None
    assert rewiring.layers[""].turnover == 1 / 3
    assert rewiring.explored == 4 / 6


def test_set_keeps_layers_at_their_size_and_the_largest_weight() -> None:
    layer = hand_made([(0, 0, 0.5), (0, 1, -0.1), (1, 2, 2.0)])
    rewirer = rewire.SET(
        layer, sgd(layer), every=1, until=1, fraction=lambda t: 0.99, scope="layer"
    )
    rewiring = rewirer.step()
    assert rewiring is not None
    assert rewiring.grown == rewiring.pruned == 2
    assert by_key(layer)[5] == 2.0
    assert sum(layer.values != 0) == 1
    assert not {0, 1} & keys(layer.connections)


def test_dsr_by_hand() -> None:
    a = hand_made([(0, i, w) for i, w in enumerate([0.5, 0.001, 1.0, 0.002])], n_in=20)
    b = hand_made([(0, i, w) for i, w in enumerate([0.003, 0.004])], n_in=20)
    model = nn.ModuleList([a, b])
    rewirer = rewire.DSR(
        model, sgd(model), every=1, until=9, fraction=lambda t: 0.5, threshold=0.01
    )
    rewiring = rewirer.step()
    assert rewiring is not None
    # Three go (b's larger one is kept), the survivors are 2 and 1: growth is shared 2 to 1.
    assert [part.pruned for part in rewiring.layers.values()] == [2, 1]
    assert [part.grown for part in rewiring.layers.values()] == [2, 1]
    assert not {1, 3} & keys(a.connections)
    assert rewirer.threshold == 0.01  # 3 of a wanted 3
    rewirer.fraction = lambda t: 0.9
    assert rewirer.step().pruned == 3  # type: ignore[union-attr]
    assert rewirer.threshold == 0.02
    rewirer.fraction = lambda t: 0.1
    rewirer.step()
    assert rewirer.threshold == 0.01


def test_deepr_by_hand() -> None:
    layer = hand_made([(0, 0, 0.5), (0, 1, -0.1), (1, 2, 2.0), (1, 0, 0.05)], n_in=30)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    rewirer = rewire.DeepR(layer, optimizer, l1=0.2, temperature=0.0)
    rewiring = rewirer.step()
    assert rewiring is not None
    # Magnitudes shrink by lr * l1; two would change sign.
    assert rewiring.pruned == rewiring.grown == 2
    weights = by_key(layer)
    assert weights[0] == pytest.approx(0.3)
    assert weights[32] == pytest.approx(1.8)
    assert sorted(weights.values())[:2] == [0, 0]


def test_deepr_wakes_connections_with_fair_signs() -> None:
    layer = SparseLinear(100, 100, connections=2000)
    rewirer = rewire.DeepR(layer, sgd(layer, lr=1.0), l1=10.0, temperature=0.0)
    rewiring = rewirer.step()
    assert rewiring is not None
    assert rewiring.pruned == 1999  # all but the largest
    rewirer.l1 = 0.0
    for value in (1.0, -1.0):  # half of them are on the wrong side of their sign
        with torch.no_grad():
            layer.values[layer.values == 0] = value
        before = int((layer.values == value).sum())
        rewiring = rewirer.step()
        assert rewiring is not None
        assert abs(rewiring.pruned - before / 2) < 4 * before**0.5 / 2
        assert int((layer.values == value).sum()) == before - rewiring.pruned


def test_deepr_walks() -> None:
    layer = SparseLinear(200, 200, connections=20_000)
    with torch.no_grad():
        layer.values.fill_(5.0)
    rewirer = rewire.DeepR(layer, sgd(layer, lr=0.5), l1=0.2, temperature=0.04)
    rewirer.step()
    step = layer.values.detach() - 5
    assert float(step.mean()) == pytest.approx(-0.1, abs=4 * 0.2 / 20_000**0.5)
    assert float(step.std()) == pytest.approx(0.2, rel=0.02)  # sqrt(2 * 0.5 * 0.04)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8), st.data()
)
def test_sharing_out(parts: list[tuple[int, int]], data: Any) -> None:
    shares, limits = [a for a, _ in parts], [b for _, b in parts]
    total = data.draw(st.integers(0, sum(limits)))
    counts = share_out(total, shares, limits)
    assert sum(counts) == total
    assert all(0 <= count <= limit for count, limit in zip(counts, limits, strict=True))
    if sum(shares) and all(total * s <= limit * sum(shares) for s, limit in parts):
        exact = [total * share / sum(shares) for share in shares]
        assert all(abs(c - e) <= len(parts) for c, e in zip(counts, exact, strict=True))
    with pytest.raises(ValueError, match="limits"):
        share_out(sum(limits) + 1, shares, limits)


# What every method must keep -------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_budget_identity_and_schedule(name: str) -> None:
    model = net()
    optimizer = sgd(model)
    rewirer = METHODS[name](model, optimizer)
    parameters = {n: layer.values for n, layer in layers(model).items()}
    sizes = {n: p.numel() for n, p in parameters.items()}
    seen = {n: set(k) for n, k in topology(model).items()}
    rewirings = []
    for step in range(1, 13):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        before = topology(model)
        rewiring = rewirer.step()
        assert (rewiring is not None) == rewirer.due(step)
        now = {n: layer.values.numel() for n, layer in layers(model).items()}
        assert sum(now.values()) == sum(sizes.values())
        assert min(now.values()) > 0
        if rewirer.scope == "layer":
            assert now == sizes
        assert all(layers(model)[n].values is p for n, p in parameters.items())
        if rewiring is None:
            continue
        rewirings.append(rewiring)
        for n, part in rewiring.layers.items():
            after = keys(layers(model)[n].connections)
            seen[n] |= after
            assert part.active == len(after)
            assert (part.grown, part.pruned) == (len(after - before[n]), len(before[n] - after))
            assert part.turnover == part.pruned / len(before[n])
            assert part.explored == len(seen[n]) / part.possible
        assert rewiring.grown == rewiring.pruned == sum(p.grown for p in rewiring.layers.values())
        assert rewiring.subset == sum(p.subset for p in rewiring.layers.values())
    assert list(rewirer.history) == rewirings
    expected = {"static": 0, "deepr": 9, "deepr global": 12}.get(name, 3)
    assert len(rewirer.history) == expected
    assert rewirer.history[-1:] == rewirings[-1:]
    assert name == "static" or sum(r.grown for r in rewirings) > 0


@pytest.mark.parametrize("name", METHODS)
def test_same_seed_same_run(name: str, threads: Callable[[int], None]) -> None:
    def run(seed: int, count: int) -> list[Any]:
        threads(count)
        model = net()
        optimizer = sgd(model)
        rewirer = METHODS[name](model, optimizer, seed=seed)
        train(model, optimizer, rewirer, range(9))
        return [(layer.indices.clone(), layer.values.detach()) for layer in layers(model).values()]

    one, same, two, other = run(0, 1), run(0, 1), run(0, 2), run(1, 1)
    for a, b, c in zip(one, same, two, strict=True):
        for x, y, z in zip(a, b, c, strict=True):
            assert torch.equal(x, y)
            assert torch.equal(x, z)
    pairs = [(a[0], b[0]) for a, b in zip(one, other, strict=True)]
    differs = not all(torch.equal(a, b) for a, b in pairs)
    assert differs or name in NOT_RANDOM


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("at", [0, 3, 5])
@pytest.mark.parametrize("between", [False, True])
def test_resuming_continues_bit_for_bit(name: str, at: int, between: bool) -> None:
    """Saved after ``at`` steps, or in step ``at`` + 1 before its rewirer.step()."""

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, rewire.Rewirer]:
        model = net(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        return model, optimizer, METHODS[name](model, optimizer, seed=seed)

    model, optimizer, rewirer = first = build(0)
    train(*first, range(at))
    if between:
        backward(model, at)
        optimizer.step()
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    state = torch.load(file, weights_only=True)

    second = build(1)
    train(*second, range(4))  # what it was before must not matter
    for part, saved in zip(second, state, strict=True):
        part.load_state_dict(saved)
    assert second[2].seed == 0
    assert list(second[2].history) == list(rewirer.history)
    for run in (first, second):
        if between:
            run[2].step()
        train(*run, range(at + between, 10))
    for a, b in zip(layers(model).values(), layers(second[0]).values(), strict=True):
        assert torch.equal(a.indptr, b.indptr)
        assert torch.equal(a.indices, b.indices)
        assert torch.equal(a.values, b.values)
    assert list(second[2].history) == list(rewirer.history)


def test_states_of_others_are_refused() -> None:
    model = mlp()
    gse = rewire.GSE(model, sgd(model), every=3, until=9)
    with pytest.raises(ValueError, match="state of a GSE"):
        rewire.SET(model, sgd(model), every=3, until=9).load_state_dict(gse.state_dict())
    other = net()
    with pytest.raises(ValueError, match="conv1"):
        gse.load_state_dict(rewire.GSE(other, sgd(other), every=3, until=9).state_dict())


class _Sizes(TorchDispatchMode):
    """The largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.numel())
        return out


@pytest.mark.parametrize("name", [name for name in METHODS if name != "snfs"])
def test_nothing_is_ever_dense(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "BLOCK", 1 << 14)  # what RigL looks at at once
    n = 3000
    layer = SparseLinear(n, n, connections=5 * n)
    conv = SparseConv2d(64, 500, 5, connections=3000)
    model = nn.ModuleList([layer, conv])
    optimizer = sgd(model, lr=1e-3)
    rewirer = METHODS[name](model, optimizer)
    with _Sizes() as sizes:
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.randn(4, n)).square().mean().backward()
            conv(torch.randn(2, 64, 6, 6)).square().mean().backward()
            optimizer.step()
            rewirer.step()
    assert sizes.largest < n * n / 50
    assert name == "static" or rewirer.history[-1].grown > 0


@pytest.mark.parametrize("name", METHODS)
def test_without_the_extension(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_module", None)
    model = mlp()
    optimizer = sgd(model)
    rewirer = METHODS[name](model, optimizer)
    before = sum(layer.values.numel() for layer in layers(model).values())
    train(model, optimizer, rewirer, range(6))
    assert sum(layer.values.numel() for layer in layers(model).values()) == before
    assert name == "static" or sum(r.grown for r in rewirer.history) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", METHODS)
def test_other_types(name: str, dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    optimizer = sgd(model)
    rewirer = METHODS[name](model, optimizer)
    for step in range(6):
        optimizer.zero_grad()
        model(rows(step)[0].to(dtype)).square().mean().backward()
        optimizer.step()
        rewirer.step()
    assert all(layer.values.dtype == dtype for layer in layers(model).values())
    assert name == "static" or sum(r.grown for r in rewirer.history) > 0
