"""Rewiring: truth tables, what each method promises, and what every method must keep."""

import copy
import gc
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import rewire
from rewire import Connections, SparseConv2d, SparseLayer, SparseLinear, sampling
from rewire.methods.sharing import share_out
from rewire.nn import promises
from rewire.ops import dense, native

DISTRIBUTIONS = ["uniform", "grabo", "graest"]
SCOPES = ["global", "layer"]
Make = Callable[..., rewire.Rewirer]


def half(t: int) -> float:
    return 0.5


METHODS: dict[str, Make] = {
    "gse": lambda m, o, **k: rewire.GSE(m, o, **{"every": 3, "until": 9, **k}),
    "grabo": lambda m, o, **k: rewire.GSE(
        m, o, **{"every": 3, "until": 9, "distribution": "grabo", "scope": "layer", **k}
    ),
    "graest": lambda m, o, **k: rewire.GSE(
        m, o, **{"every": 3, "until": 9, "distribution": "graest", "subset": 0.5, **k}
    ),
    "set": lambda m, o, **k: rewire.SET(m, o, **{"every": 3, "until": 9, **k}),
    "set layer": lambda m, o, **k: rewire.SET(
        m, o, **{"every": 3, "until": 9, "scope": "layer", **k}
    ),
    "rigl": lambda m, o, **k: rewire.RigL(m, o, **{"every": 3, "until": 9, **k}),
    "rigl layer": lambda m, o, **k: rewire.RigL(
        m, o, **{"every": 3, "until": 9, "scope": "layer", **k}
    ),
    "snfs": lambda m, o, **k: rewire.SNFS(m, o, **{"every": 3, "until": 9, **k}),
    "dsr": lambda m, o, **k: rewire.DSR(m, o, **{"every": 3, "until": 9, "threshold": 0.05, **k}),
    "deepr": lambda m, o, **k: rewire.DeepR(
        m, o, **{"until": 9, "l1": 0.05, "temperature": 0.1, **k}
    ),
    "deepr global": lambda m, o, **k: rewire.DeepR(m, o, **{"l1": 0.05, "scope": "global", **k}),
    "static": lambda m, o, **k: rewire.Static(m, o, **k),
}
NOT_RANDOM = ["static", "rigl", "rigl layer", "snfs"]
GUIDED = ["gse", "grabo", "graest"]


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


class Net(nn.Module):
    """Two convolutions and two linear layers, with what fuses around them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2)
        self.fc1 = nn.Linear(8 * 9, 20)
        self.fc2 = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        x = F.relu(self.conv2(x)).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))  # type: ignore[no-any-return]


def net(seed: int = 0, sparsity: float = 0.7) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return rewire.sparsify(Net(), sparsity=sparsity, seed=seed)


def mlp(seed: int = 0) -> nn.Module:
    dense = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    return rewire.sparsify(dense, sparsity=0.6, seed=seed)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def images(step: int, n: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(n, 2, 8, 8, generator=generator), torch.arange(n) % 4


def rows(step: int, n: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(n, 12, generator=generator), torch.arange(n) % 4


def batch(model: nn.Module, step: int) -> tuple[Tensor, Tensor]:
    return rows(step) if isinstance(model, nn.Sequential) else images(step)


def backward(model: nn.Module, step: int) -> None:
    x, y = batch(model, step)
    F.cross_entropy(model(x), y).backward()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rewirer: rewire.Rewirer, steps: range
) -> list[rewire.Rewiring]:
    found = []
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        found.append(rewirer.step())
    return [rewiring for rewiring in found if rewiring is not None]


def layers(model: nn.Module) -> dict[str, SparseLayer]:
    return {n: m for n, m in model.named_modules() if isinstance(m, SparseLayer)}


def keys(connections: Connections) -> set[int]:
    return set(connections.keys().tolist())


def topology(model: nn.Module) -> dict[str, set[int]]:
    return {name: keys(layer.connections) for name, layer in layers(model).items()}


def by_key(layer: SparseLayer, tensor: Tensor | None = None) -> dict[int, float]:
    tensor = layer.values if tensor is None else tensor
    return dict(zip(layer.connections.keys().tolist(), tensor.tolist(), strict=True))


def dense_gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    """The gradient at every possible connection, (out, in) in our numbering of inputs, by torch."""
    full = rewire.densify(copy.deepcopy(model))
    backward(full, step)
    found = {}
    for name in layers(model):
        weight = full.get_submodule(name).weight.grad
        assert isinstance(weight, Tensor)
        found[name] = weight.permute(0, 2, 3, 1).flatten(1) if weight.dim() == 4 else weight
    return found


# The paper's Figure 1, by hand -----------------------------------------------------------------------


def hand_made(active: list[tuple[int, int, float]], n_in: int = 3, n_out: int = 2) -> SparseLinear:
    """A layer with the given (output, input, weight)."""
    order = sorted(active)
    chosen = Connections.from_keys(torch.tensor([o * n_in + i for o, i, _ in order]), n_in, n_out)
    layer = SparseLinear(n_in, n_out, bias=False, connections=chosen)
    with torch.no_grad():
        layer.values.copy_(torch.tensor([w for _, _, w in order]))
    return layer


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


# GSE against a dense computation ---------------------------------------------------------------------


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("subset", [0.3, 1.0, 1e9])
def test_gse_against_dense(distribution: str, scope: str, subset: float) -> None:
    model = net()
    optimizer = sgd(model)
    rewirer = rewire.GSE(
        *(model, optimizer),
        **{"every": 2, "until": 10, "fraction": 0.3, "subset": subset},
        **{"distribution": distribution, "scope": scope},
    )
    for step in range(8):
        optimizer.zero_grad()
        truth = dense_gradients(model, step)
        before = topology(model)
        backward(model, step)
        subsets = {name: s.keys() for name, s in rewirer.subsets.items()}
        gradients = rewirer.gradients
        optimizer.step()
        weights = {name: by_key(layer) for name, layer in layers(model).items()}
        rewiring = rewirer.step()
        after = topology(model)
        if (step + 1) % 2:
            assert rewiring is None
            assert not subsets
            assert after == before
            continue
        assert rewiring is not None
        alpha = 0.3 / 2 * (1 + math.cos(math.pi * (step + 1) / 10))
        assert rewiring.fraction == pytest.approx(alpha)
        for name, s in subsets.items():
            layer = layers(model)[name]
            total = layer.n_in * layer.n_out
            assert not set(s.tolist()) & before[name]
            free, drawn = total - len(before[name]), math.ceil(subset * len(before[name]))
            assert len(s) == free if drawn >= free else 0 < len(s) <= drawn
            expected = truth[name].flatten()[s]
            torch.testing.assert_close(gradients[name], expected, rtol=1e-3, atol=1e-6)
        groups = [list(before)] if scope == "global" else [[name] for name in before]
        for group in groups:
            count = sum(len(before[name]) for name in group)
            size = sum(len(subsets[name]) for name in group)
            k = min(sampling.ceil(alpha * count), size)
            grown = [(name, key) for name in group for key in after[name] - before[name]]
            pruned = [(name, key) for name in group for key in before[name] - after[name]]
            assert len(grown) == len(pruned) == k
            # The grown are the largest of S by the gradient, the pruned the smallest but one per layer.
            score = {
                (n, key): abs(g)
                for n in group
                for key, g in zip(subsets[n].tolist(), gradients[n].tolist(), strict=True)
            }
            others = [v for key, v in score.items() if key not in set(grown)]
            if grown and others:
                assert min(score[key] for key in grown) >= max(others)
            best = {(n, max(weights[n], key=lambda key, n=n: abs(weights[n][key]))) for n in group}
            kept = [
                abs(weights[n][k])
                for n in group
                for k in before[n] & after[n]
                if (n, k) not in best
            ]
            if pruned and kept:
                assert max(abs(weights[n][key]) for n, key in pruned) <= min(kept)
            assert not best & set(pruned)
        for name, layer in layers(model).items():
            values = by_key(layer)
            assert all(values[key] == 0 for key in after[name] - before[name])
            assert all(values[key] == weights[name][key] for key in after[name] & before[name])
            part = rewiring.layers[name]
            assert part.active == len(after[name])
            assert part.grown == len(after[name] - before[name])
            assert part.pruned == len(before[name] - after[name])
            assert part.subset == len(subsets[name])


def test_a_subset_as_small_as_the_fraction_grows_the_sample_itself() -> None:
    model = net(sparsity=0.9)
    optimizer = sgd(model)
    rewirer = rewire.GSE(model, optimizer, every=1, until=1, fraction=lambda t: 0.2, subset=0.2)
    backward(model, 0)
    sample = {name: keys(s) for name, s in rewirer.subsets.items()}
    before = topology(model)
    optimizer.step()
    rewirer.step()
    assert {name: topology(model)[name] - before[name] for name in before} == sample


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_micro_batches_count_as_one_batch(distribution: str) -> None:
    """S is drawn in the first and the gradient is the whole batch's, as in ``.grad``."""

    def grown(parts: int) -> tuple[dict[str, Tensor], dict[str, set[int]]]:
        model = mlp()
        rewirer = rewire.GSE(model, sgd(model), every=1, until=4, distribution=distribution)
        x, y = rows(0, 6)
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (F.cross_entropy(model(a), b, reduction="sum") / 6).backward()
        return rewirer.gradients, {name: keys(s) for name, s in rewirer.subsets.items()}

    whole, s = grown(1)
    parts, s3 = grown(3)
    if distribution == "uniform":
        assert s == s3
        for name in whole:
            torch.testing.assert_close(whole[name], parts[name])
    # With GraBo and GraEst S comes from the first part; the gradient at it is the whole one's.
    dense = rewire.densify(mlp())
    x, y = rows(0, 6)
    F.cross_entropy(dense(x), y).backward()
    for name, gradient in parts.items():
        full = dense.get_submodule(name).weight.grad
        assert isinstance(full, Tensor)
        torch.testing.assert_close(gradient, full.flatten()[sorted(s3[name])], rtol=1e-3, atol=1e-6)


def test_a_layer_used_twice_is_one_layer() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(10, 10)
            self.again = self.fc

        def forward(self, x: Tensor) -> Tensor:
            return self.again(torch.tanh(self.fc(x)))  # type: ignore[no-any-return]

    model = rewire.sparsify(Twice(), sparsity=0.7)
    rewirer = rewire.GSE(model, sgd(model), every=1, until=9, subset=1e6)
    x = torch.randn(4, 10)
    dense = rewire.densify(copy.deepcopy(model))
    dense(x).square().sum().backward()
    model(x).square().sum().backward()
    (s,), (gradient,) = rewirer.subsets.values(), rewirer.gradients.values()
    torch.testing.assert_close(
        gradient, dense.fc.weight.grad.flatten()[s.keys()], rtol=1e-3, atol=1e-5
    )
    rewiring = rewirer.step()
    assert rewiring is not None
    assert list(rewiring.layers) == ["fc"]


@pytest.mark.parametrize("promised", [True, False])
def test_rectifiers_that_are_fused_are_seen(
    promised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "_WORTHWHILE", 0 if promised else 1 << 40)
    model = net()
    rewirer = rewire.GSE(model, sgd(model), every=1, until=9, subset=1e6)
    truth = dense_gradients(model, 0)
    backward(model, 0)
    for name, gradient in rewirer.gradients.items():
        expected = truth[name].flatten()[rewirer.subsets[name].keys()]
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)


def test_sequences_and_single_samples_are_seen() -> None:
    layer = SparseLinear(8, 6, sparsity=0.5)
    conv = SparseConv2d(2, 3, 3, padding_mode="circular", padding=1, sparsity=0.5)
    for module, x in (
        (layer, torch.randn(2, 5, 8)),
        (layer, torch.randn(8)),
        (conv, torch.randn(2, 6, 6)),
        (conv, torch.randn(4, 2, 6, 6)),
    ):
        rewirer = rewire.GSE(module, sgd(module), every=1, until=9, subset=1e6)
        dense = module.to_dense()
        dense(x).square().sum().backward()
        module(x).square().sum().backward()
        weight = dense.weight.grad
        assert isinstance(weight, Tensor)
        flat = weight.permute(0, 2, 3, 1).flatten(1) if weight.dim() == 4 else weight
        expected = flat.flatten()[rewirer.subsets[""].keys()]
        torch.testing.assert_close(rewirer.gradients[""], expected, rtol=1e-3, atol=1e-4)
        del rewirer
        gc.collect()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_activations(reentrant: bool) -> None:
    def gradients(checkpointed: bool) -> dict[str, Tensor]:
        model = mlp()
        rewirer = rewire.GSE(model, sgd(model), every=1, until=9)
        x = rows(0)[0].requires_grad_()
        y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
        y.square().sum().backward()
        return rewirer.gradients

    for a, b in zip(gradients(True).values(), gradients(False).values(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at it where a graph breaks
def test_compiled_models_are_rewired_alike() -> None:
    def trained(compiled: bool) -> tuple[dict[str, set[int]], int]:
        model = mlp()
        optimizer = sgd(model)
        rewirer = rewire.GSE(model, optimizer, every=2, until=8)
        call = torch.compile(model, backend="aot_eager") if compiled else model
        for step in range(6):
            optimizer.zero_grad()
            x, y = rows(step)
            F.cross_entropy(call(x), y).backward()
            optimizer.step()
            rewirer.step()
        return topology(model), len(rewirer.history)

    torch._dynamo.reset()
    assert trained(True) == trained(False)


def test_tracing_an_armed_model_is_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = mlp()
    rewirer = rewire.GSE(model, sgd(model), every=1, until=9)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(3, 12))
        with pytest.raises(RuntimeError, match="rewiring is due"):
            model(x)
    del rewirer


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


# Frozen, unused, copied, contested -------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in METHODS if name != "static"])
def test_frozen_layers_are_left_alone(name: str) -> None:
    model = net()
    model.fc1.values.requires_grad_(False)  # type: ignore[union-attr]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    rewirer = METHODS[name](model, optimizer)
    before = model.fc1.values.clone(), topology(model)["fc1"]  # type: ignore[union-attr]
    rewirings = train(model, optimizer, rewirer, range(6))
    assert rewirings
    assert all(r.layers["fc1"].grown == r.layers["fc1"].pruned == 0 for r in rewirings)
    assert torch.equal(model.fc1.values, before[0])  # type: ignore[union-attr]
    assert topology(model)["fc1"] == before[1]
    model.fc1.values.requires_grad_()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"fc1\.values"):
        train(model, optimizer, rewirer, range(6, 9))


def test_layers_without_a_gradient_sit_out() -> None:
    model = nn.ModuleList([SparseLinear(10, 10, connections=30) for _ in range(2)])
    optimizer = sgd(model, lr=0.0)
    rewirer = rewire.GSE(model, optimizer, every=1, until=9, fraction=half, subset=9.0)
    model[0](torch.randn(3, 10)).sum().backward()
    rewiring = rewirer.step()
    assert rewiring is not None
    assert (rewiring.layers["0"].grown, rewiring.layers["1"].pruned) == (15, 0)
    with pytest.raises(RuntimeError, match="backward"):
        rewirer.step()
    assert rewirer.t == 1
    model[1](torch.randn(3, 10)).sum().backward()  # and it can go on
    assert rewirer.step().layers["1"].grown == 15  # type: ignore[union-attr]


def test_copies_and_pickles_of_an_armed_model_are_not_armed() -> None:
    model = mlp()
    rewirer = rewire.GSE(model, sgd(model), every=1, until=9)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        backward(other, 0)
        assert all(layer.probe is None for layer in layers(other).values())
    assert not rewirer.subsets
    backward(model, 0)
    assert len(rewirer.subsets) == 2


def test_armed_only_when_due_and_while_the_rewirer_lives() -> None:
    model = mlp()
    optimizer = sgd(model)
    rewirer = rewire.GSE(model, optimizer, every=3, until=3)
    armed = []
    for step in range(5):
        armed.append([layer.probe is not None for layer in layers(model).values()])
        train(model, optimizer, rewirer, range(step, step + 1))
    assert armed == [[False] * 2, [False] * 2, [True] * 2, [False] * 2, [False] * 2]
    second = rewire.GSE(model, optimizer, every=1, until=3)
    with pytest.raises(RuntimeError, match="another rewirer"):
        rewire.GSE(model, optimizer, every=1, until=3)
    del second
    gc.collect()
    backward(model, 0)
    assert all(layer.probe is None for layer in layers(model).values())


def test_connections_that_change_under_a_rewirer_are_noticed() -> None:
    layer = hand_made([(0, 0, 0.5), (0, 1, -0.1), (1, 2, 2.0)])
    rewirer = rewire.GSE(layer, sgd(layer), every=1, until=9, fraction=half, subset=9.0)
    layer(torch.ones(1, 3)).sum().backward()
    before, values = layer.connections, layer.values.detach().clone()
    layer.set_connections(Connections.from_keys(torch.tensor([2, 3, 4]), 3, 2), torch.ones(3))
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"connections of SparseLinear were replaced between"
        ):
            rewirer.step()
    layer.set_connections(before, values)  # those that S was drawn for
    assert rewirer.step() is not None


# Your own method -------------------------------------------------------------------------------------


def test_the_example_of_the_docs() -> None:
    text = (Path(__file__).parent.parent / "docs" / "methods.md").read_text()
    (code,) = re.findall(r"```python\n(# own-method.*?)```", text, re.DOTALL)
    assert code.count("\n") < 30
    space: dict[str, Any] = {}
    exec(code, space)
    model = net()
    optimizer = sgd(model)
    rewirer = space["Saliency"](model, optimizer, every=2, until=8)
    before = topology(model)
    rewirings = train(model, optimizer, rewirer, range(6))
    assert [r.step for r in rewirings] == [2, 4, 6]
    assert all(r.grown == r.pruned > 0 for r in rewirings)
    assert topology(model) != before


def test_rules_that_break_the_contract_are_told() -> None:
    class Bad(rewire.Rewirer):
        guided = False

    model = mlp()
    with pytest.raises(NotImplementedError, match="growth"):
        Bad(model, sgd(model), every=1, until=9).step()

    class Short(rewire.SET):
        def survival(self, site: rewire.Site) -> Tensor:
            return torch.ones(3)

    with pytest.raises(ValueError, match="3 scores for"):
        Short(model, sgd(model), every=1, until=9).step()

    class Greedy(rewire.SET):
        def choose(self, sites: Any) -> None:
            super().choose(sites)
            sites[0].pruned[:] = False

    with pytest.raises(RuntimeError, match="must stay"):
        Greedy(model, sgd(model), every=1, until=9).step()


def test_nan_is_never_preferred() -> None:
    layer = hand_made([(0, 0, 0.5), (0, 1, float("nan")), (1, 2, 2.0)])
    rewirer = rewire.GSE(
        layer, sgd(layer, lr=0.0), every=1, until=9, fraction=lambda t: 0.3, subset=9.0
    )
    layer.values.grad = None
    site = rewirer._sites[0]
    layer(torch.ones(1, 3)).sum().backward()
    site.gradient = torch.tensor([float("nan"), 1.0, 2.0])
    rewirer.step()
    assert keys(layer.connections) == {0, 4, 5}


# Arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (rewire.GSE, {"fraction": 0.0}, "fraction must be in"),
        (rewire.GSE, {"fraction": 1.0}, "fraction must be in"),
        (rewire.GSE, {"fraction": -0.1}, "fraction must be in"),
        (rewire.GSE, {"fraction": float("nan")}, "fraction must be in"),
        (rewire.GSE, {"subset": 0.0}, "subset must be positive"),
        (rewire.GSE, {"subset": -1.0}, "subset must be positive"),
        (rewire.GSE, {"subset": float("nan")}, "subset must be positive"),
        (rewire.GSE, {"every": 0}, "every must be at least 1"),
        (rewire.GSE, {"every": 11}, "before the first rewiring"),
        (rewire.GSE, {"until": None}, "until is missing"),
        (rewire.GSE, {"distribution": "normal"}, "distribution must be one of"),
        (rewire.GSE, {"scope": "model"}, "scope must be one of"),
        (rewire.SET, {"fraction": 2.0}, "fraction must be in"),
        (rewire.DSR, {"scope": "layer"}, "leave scope"),
        (rewire.DSR, {"threshold": 0.0}, "threshold must be positive"),
        (rewire.DeepR, {"l1": -1.0}, "l1 must be"),
        (rewire.DeepR, {"temperature": float("inf")}, "temperature must be"),
        (rewire.DSR, {"threshold": float("inf")}, "threshold must be positive and finite"),
        (rewire.RigL, {"scope": "model"}, "scope must be one of"),
        (rewire.SNFS, {"momentum": 1.0}, "momentum must be"),
        (rewire.Static, {"every": -3}, "every must be at least 1"),
    ],
)
def test_bad_arguments(method: Any, options: dict[str, Any], message: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=message):
        method(model, sgd(model), **{"every": 2, "until": 10, **options})


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (rewire.GSE, {"every": 1.5}, r"every must be an integer, got 1\.5: round it"),
        (rewire.GSE, {"every": None}, "every must be an integer"),
        (rewire.GSE, {"until": 1e4}, "until must be an integer"),
        (rewire.GSE, {"seed": 0.5}, "seed must be an integer"),
        (rewire.GSE, {"fraction": "0.2"}, r"fraction must be a number, got '0\.2' \(str\)"),
        (rewire.GSE, {"fraction": None}, "fraction must be a number"),
        (rewire.GSE, {"subset": "all"}, "subset must be a number"),
        (rewire.SET, {"every": "2"}, "every must be an integer"),
        (rewire.DSR, {"threshold": None}, "threshold must be a number"),
        (rewire.DeepR, {"l1": "small"}, "l1 must be a number"),
        (rewire.DeepR, {"temperature": [1]}, "temperature must be a number"),
        (rewire.Static, {"every": 2.0}, "every must be an integer"),
    ],
)
def test_arguments_of_a_wrong_type(method: Any, options: dict[str, Any], message: str) -> None:
    model = mlp()
    with pytest.raises(TypeError, match=message):
        method(model, sgd(model), **{"every": 2, "until": 10, **options})


def test_bad_models_and_optimizers() -> None:
    model, other = mlp(), mlp(1)
    with pytest.raises(ValueError, match="sparsify"):
        rewire.GSE(nn.Linear(3, 3), sgd(model), until=9000)
    with pytest.raises(ValueError, match=r"does not hold 0\.values, 2\.values"):
        rewire.GSE(model, sgd(other), until=9000)
    with pytest.raises(ValueError, match="frozen"):
        rewire.GSE(mlp().requires_grad_(False), sgd(other), until=9000)
    with pytest.raises(TypeError, match="Optimizer"):
        rewire.GSE(model, model, until=9000)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Module"):
        rewire.GSE([model], sgd(model), until=9000)  # type: ignore[arg-type]
    tied = mlp()
    tied.append(copy.deepcopy(tied[2]))
    tied[3].values = tied[2].values
    with pytest.raises(ValueError, match="2 and 3 share"):
        rewire.GSE(tied, sgd(tied), until=9000)


@pytest.mark.parametrize("given", [1.5, -0.1, float("nan"), None, "half"])
def test_a_fraction_that_leaves_its_range_is_told(given: Any) -> None:
    model = mlp()
    rewirer = rewire.SET(model, sgd(model), every=1, until=9, fraction=lambda t: given)
    with pytest.raises(ValueError, match=rf"fraction\(1\) gave {given!r}, expected a number"):
        rewirer.step()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 200), st.floats(0.01, 0.99))
def test_alpha_is_the_cosine(every: int, more: int, fraction: float) -> None:
    model = mlp()
    until = every + more
    rewirer = rewire.SET(model, sgd(model), every=every, until=until, fraction=fraction)
    for t in (0, every, until // 2, until):
        assert rewirer.alpha(t) == pytest.approx(fraction / 2 * (1 + math.cos(math.pi * t / until)))
        assert rewirer.due(t) == (t > 0 and t % every == 0)
    assert rewirer.alpha(until) == rewirer.alpha(until + 1) == 0
    assert not rewirer.due(until + every - until % every)


def test_a_loss_that_is_still_held_does_not_stop_training_after_a_rewiring() -> None:
    """Its graph remembers how long the values were."""
    torch.manual_seed(0)
    model = rewire.sparsify(nn.Sequential(nn.Linear(20, 50), nn.Linear(50, 5)), sparsity=0.8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rewirer = rewire.GSE(model, optimizer, every=2, until=100)
    lengths, hooked = set(), []
    model[0].values.register_post_accumulate_grad_hook(lambda p: hooked.append(p.numel()))
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 20)).square().mean()
        loss.backward()
        optimizer.step()
        rewirer.step()
        lengths.add(model[0].values.numel())
    assert len(lengths) > 1
    assert len(hooked) == 6
    other = rewire.sparsify(nn.Sequential(nn.Linear(20, 50), nn.Linear(50, 5)), sparsity=0.5)
    other.load_state_dict(model.state_dict())  # of other lengths, too
    held = other(torch.randn(8, 20)).sum()
    other.load_state_dict(
        rewire.sparsify(nn.Sequential(nn.Linear(20, 50), nn.Linear(50, 5)), 0.9).state_dict()
    )
    other(torch.randn(8, 20)).sum().backward()
    assert held.requires_grad
