"""Guided stochastic exploration against the paper: written from the specification, not from the code.

The subset S is seen from outside: the same model, data and seed with a fraction so large that all
of S is grown. Gradients are those of the dense model of ``layer.to_dense()``, by autograd.
"""

import copy
import io
import itertools
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rewire
from rewire import Connections, SparseConv2d, SparseLayer, SparseLinear, sampling
from rewire.ops.reference import Convolution
from rewire.ops.sampling import Stream

DISTRIBUTIONS = ["uniform", "grabo", "graest"]
SCOPES = ["global", "layer"]
distributions = pytest.mark.parametrize("distribution", DISTRIBUTIONS)
scopes = pytest.mark.parametrize("scope", SCOPES)
LONG = 10**9  # an `until` so late that the cosine is still 1

Batch = tuple[Tensor, Tensor]
Make = Callable[[], nn.Module]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def mlp(seed: int = 0, dtype: torch.dtype = torch.float64, bias: bool = True) -> nn.Sequential:
    def layer(n_in: int, n_out: int, count: int, number: int) -> SparseLinear:
        generator = seeded(10 * seed + number)
        options: dict[str, Any] = {"connections": count, "generator": generator, "dtype": dtype}
        return SparseLinear(n_in, n_out, bias, **options)

    return nn.Sequential(
        *(layer(12, 20, 61, 0), nn.Tanh(), layer(20, 15, 47, 1), nn.Tanh(), layer(15, 5, 23, 2))
    )


def cnn(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    options: dict[str, Any] = {"sparsity": 0.8, "dtype": dtype, "generator": seeded(seed)}
    return nn.Sequential(
        SparseConv2d(3, 8, 3, padding=1, **options),
        nn.Tanh(),
        SparseConv2d(8, 6, (3, 2), stride=2, padding=(1, 0), **options),
        nn.Tanh(),
        nn.Flatten(),
        SparseLinear(6 * 3 * 3, 5, **options),
    )


def batch_of(model: nn.Module, seed: int = 0, size: int = 8) -> Batch:
    first = layers_of(model)[0]
    shape = (size, 12) if isinstance(first, SparseLinear) else (size, 3, 6, 6)
    y = torch.randint(5, (size,), generator=seeded(seed + 1000))
    return normal(*shape, seed=seed, dtype=first.values.dtype), y


def layers_of(model: nn.Module) -> list[SparseLayer]:
    return [module for module in model.modules() if isinstance(module, SparseLayer)]


def keys_of(model: nn.Module) -> list[set[int]]:
    return [set(layer.connections.keys().tolist()) for layer in layers_of(model)]


def values_of(model: nn.Module) -> list[dict[int, float]]:
    return [
        dict(zip(layer.connections.keys().tolist(), layer.values.tolist(), strict=True))
        for layer in layers_of(model)
    ]


def inactive_of(model: nn.Module) -> list[set[int]]:
    return [set(range(layer.n_in * layer.n_out)) - keys for layer, keys in _zip(model)]


def _zip(model: nn.Module) -> Iterator[tuple[SparseLayer, set[int]]]:
    return zip(layers_of(model), keys_of(model), strict=True)


def flat(weight: Tensor) -> Tensor:
    """A dense weight by key: output * n_in + input, a convolution's taps before its channels."""
    return (weight if weight.dim() == 2 else weight.permute(0, 2, 3, 1)).flatten()


def default_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def weighted_sum(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) * batch[1]).sum()


Loss = Callable[[nn.Module, Batch], Tensor]


def true_gradients(
    model: nn.Module, batches: Sequence[Batch], loss: Loss = default_loss
) -> list[Tensor]:
    """Of the dense model of the same weights, by key, averaged over the micro-batches."""
    sparse = layers_of(model)
    dense = [layer.to_dense() for layer in sparse]
    memo: dict[int, Any] = {id(a): b for a, b in zip(sparse, dense, strict=True)}
    twin = rewire.densify(copy.deepcopy(model, memo))
    twin.zero_grad()
    for batch in batches:
        loss(twin, batch).backward()
    grads = [layer.weight.grad for layer in dense]
    return [flat(grad if grad is not None else torch.zeros(1)) / len(batches) for grad in grads]


@dataclass
class Outcome:
    """One rewiring, seen from outside."""

    before: list[set[int]]
    after: list[set[int]]
    values: list[dict[int, float]]  # after the optimizer's update, before the rewiring
    gradient: list[Tensor]
    result: Any

    @property
    def grown(self) -> list[set[int]]:
        return [a - b for a, b in zip(self.after, self.before, strict=True)]

    @property
    def pruned(self) -> list[set[int]]:
        return [b - a for a, b in zip(self.after, self.before, strict=True)]


def one_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rewirer: Any,
    batches: Sequence[Batch],
    loss: Loss = default_loss,
    between: Callable[[nn.Module], object] = lambda model: None,
) -> Outcome:
    optimizer.zero_grad()
    before, gradient = keys_of(model), true_gradients(model, batches, loss)
    for batch in batches:
        (loss(model, batch) / len(batches)).backward()
    between(model)
    optimizer.step()
    assert keys_of(model) == before
    values = values_of(model)
    result = rewirer.step()
    return Outcome(before, keys_of(model), values, gradient, result)


def once(
    make: Make,
    batches: Sequence[Batch] | None = None,
    *,
    lr: float = 0.1,
    loss: Loss = default_loss,
    between: Callable[[nn.Module], object] = lambda model: None,
    **options: Any,
) -> Outcome:
    """A model's first training step, with a rewiring."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    rewirer = rewire.GSE(model, optimizer, **({"every": 1, "until": LONG} | options))
    return one_step(model, optimizer, rewirer, batches or [batch_of(model)], loss, between)


def sample(make: Make, batches: Sequence[Batch] | None = None, **options: Any) -> list[set[int]]:
    """S of that step: the fraction is so large that all of it is grown."""
    outcome = once(make, batches, **(options | {"fraction": constant(0.9)}))
    assert sum(map(len, outcome.grown)) < math.ceil(0.9 * sum(map(len, outcome.before)))
    return outcome.grown


def constant(value: float) -> Callable[[int], float]:
    return lambda t: value


def pools(scope: str, count: int) -> list[list[int]]:
    """Which layers share a k."""
    return [list(range(count))] if scope == "global" else [[i] for i in range(count)]


def assert_grows(
    outcome: Outcome, subset: list[set[int]], alpha: float, scope: str, tolerance: float = 1e-12
) -> None:
    """k of the largest true gradients in the subset, and nothing else."""
    assert all(g <= s for g, s in zip(outcome.grown, subset, strict=True))
    for pool in pools(scope, len(subset)):
        active = sum(len(outcome.before[i]) for i in pool)
        k = min(math.ceil(alpha * active), sum(len(subset[i]) for i in pool))
        score = {(i, key): abs(float(outcome.gradient[i][key])) for i in pool for key in subset[i]}
        grown = [(i, key) for i in pool for key in outcome.grown[i]]
        assert len(grown) == k
        least = min((score[c] for c in grown), default=math.inf)
        best_left = max((score[c] for c in score if c not in set(grown)), default=0.0)
        assert least >= best_left - tolerance


def assert_prunes(outcome: Outcome, scope: str) -> None:
    """As many as were grown, of the smallest weights; every layer keeps its largest."""
    for pool in pools(scope, len(outcome.before)):
        weight = {(i, key): abs(v) for i in pool for key, v in outcome.values[i].items()}
        pruned = {(i, key) for i in pool for key in outcome.pruned[i]}
        assert len(pruned) == sum(len(outcome.grown[i]) for i in pool)
        kept = set(weight) - pruned
        for i in pool:
            mine = [c for c in weight if c[0] == i]
            if mine:
                largest = max(weight[c] for c in mine)
                exempt = [c for c in mine if c in kept and weight[c] == largest]
                assert exempt
                kept.discard(exempt[0])
        most = max((weight[c] for c in pruned), default=0.0)
        assert most <= min((weight[c] for c in kept), default=math.inf)


def total(result: Any, name: str) -> int:
    """What step() says about grown, pruned or subset, over all layers."""
    value = getattr(result, name)
    return value if isinstance(value, int) else len(value)


# Figure 1 -----------------------------------------------------------------------------------------

#        (input, output): weight before, weight after; None is inactive
FIGURE_1 = {
    (1, 1): (None, None),
    (1, 2): (-0.48, -0.48),
    (1, 3): (None, None),
    (2, 1): (None, None),
    (2, 2): (-0.14, None),
    (2, 3): (-0.46, -0.46),
    (3, 1): (0.73, 0.73),
    (3, 2): (None, 0.00),
    (3, 3): (None, None),
}


def key_3x3(connection: tuple[int, int]) -> int:
    return 3 * (connection[1] - 1) + connection[0] - 1


@scopes
@distributions
def test_figure_1(distribution: str, scope: str) -> None:
    before = {key_3x3(c): w for c, (w, _) in FIGURE_1.items() if w is not None}
    after = {key_3x3(c): w for c, (_, w) in FIGURE_1.items() if w is not None}
    layer = SparseLinear(3, 3, bias=False, dtype=torch.float64, connections=4)
    keys = torch.tensor(sorted(before))
    weights = torch.tensor([before[key] for key in sorted(before)], dtype=torch.float64)
    layer.set_connections(Connections.from_keys(keys, 3, 3), weights)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    rewirer = rewire.GSE(
        *(layer, optimizer),
        **{"every": 1, "until": LONG, "fraction": 0.25, "subset": 100.0},
        **{"distribution": distribution, "scope": scope},
    )
    x = torch.tensor([[0.1, 0.3, 1.0]], dtype=torch.float64)
    towards = torch.tensor([[0.2, 1.0, -0.5]], dtype=torch.float64)  # largest at (3, 2), inactive
    (layer(x) * towards).sum().backward()
    optimizer.step()
    result = rewirer.step()
    assert values_of(layer) == [after]
    assert (total(result, "grown"), total(result, "pruned")) == (1, 1)
    assert total(result, "subset") == 5


# One rewiring, against the dense gradient ---------------------------------------------------------

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3},
    "padded": {"kernel_size": 3, "padding": 1},
    "strided": {"kernel_size": (3, 2), "stride": 2, "padding": (1, 0)},
    "uneven stride": {"kernel_size": 3, "stride": (1, 2), "padding": (2, 1)},
    "dilated": {"kernel_size": (2, 3), "dilation": (2, 1), "padding": 1},
    "same": {"kernel_size": 4, "padding": "same"},
    "reflected": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "circular": {"kernel_size": 3, "padding": (0, 2), "padding_mode": "circular"},
    "pointwise": {"kernel_size": 1},
}


def assert_rewires(make: Make, batches: Sequence[Batch] | None = None, **options: Any) -> None:
    """S, G and P of one rewiring, at a fraction of 0.2."""
    scope, loss = options.setdefault("scope", "global"), options.get("loss", default_loss)
    subset = sample(make, batches, **options)
    outcome = once(make, batches, **(options | {"fraction": constant(0.2)}))
    tolerance = 1e-12 if layers_of(make())[0].values.dtype == torch.float64 else 1e-5
    assert_grows(outcome, subset, 0.2, scope, tolerance)
    assert_prunes(outcome, scope)
    assert sum(map(len, outcome.grown)) > 0
    assert all(s.isdisjoint(a) for s, a in zip(subset, outcome.before, strict=True))
    bound = [math.ceil(options["subset"] * len(keys)) for keys in outcome.before]
    assert all(len(s) <= b for s, b in zip(subset, bound, strict=True))
    assert total(outcome.result, "subset") == sum(map(len, subset))
    assert total(outcome.result, "grown") == sum(map(len, outcome.grown))
    assert total(outcome.result, "pruned") == sum(map(len, outcome.pruned))
    assert loss is options.get("loss", default_loss)


@scopes
@distributions
@pytest.mark.parametrize("make", [mlp, cnn])
def test_a_rewiring_of_a_model(make: Make, distribution: str, scope: str) -> None:
    for seed in range(3):
        assert_rewires(make, distribution=distribution, scope=scope, subset=0.5, seed=seed)


@distributions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_a_rewiring_of_a_convolution(kind: str, dtype: torch.dtype, distribution: str) -> None:
    def make() -> nn.Module:
        options = CONVOLUTIONS[kind] | {"sparsity": 0.75, "generator": seeded(3)}
        return SparseConv2d(5, 7, dtype=dtype, **options)

    x = normal(4, 5, 8, 7, dtype=dtype)
    batch = (x, normal(*make()(x).shape, seed=1, dtype=dtype))
    assert_rewires(make, [batch], loss=weighted_sum, distribution=distribution, subset=0.6)


@distributions
@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 3, 2), ()])
def test_a_rewiring_of_a_linear_layer_with_any_leading_dimensions(
    shape: tuple[int, ...], distribution: str
) -> None:
    def make() -> nn.Module:
        return SparseLinear(11, 13, sparsity=0.7, dtype=torch.float64, generator=seeded(3))

    batch = (normal(*shape, 11), normal(*shape, 13, seed=1))
    assert_rewires(make, [batch], loss=weighted_sum, distribution=distribution, subset=0.6)


@distributions
def test_a_rewiring_of_a_converted_model_with_fused_layers(distribution: str) -> None:
    """Outputs so large that the layers work together with batch norm, ReLU and pooling."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(24, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(16 * 16, 600), nn.ReLU(), nn.Linear(600, 5)),
        )
        return rewire.sparsify(model.double(), sparsity=0.9, seed=1)

    batch = (normal(64, 3, 16, 16), torch.randint(5, (64,), generator=seeded(1)))
    assert_rewires(make, [batch], distribution=distribution, subset=0.5)


def test_the_largest_weights_exempt_and_the_update_comes_first() -> None:
    """With a large learning rate the smallest weights after the update are not those before it."""
    outcome = once(mlp, lr=3.0, subset=0.5, fraction=0.3)
    assert_prunes(outcome, "global")
    model = mlp()
    old = Outcome(outcome.before, outcome.after, values_of(model), outcome.gradient, None)
    with pytest.raises(AssertionError):
        assert_prunes(old, "global")


@scopes
def test_no_layer_is_left_without_connections(scope: str) -> None:
    def make() -> nn.Module:
        model = mlp()
        with torch.no_grad():
            model[2].values.mul_(1e-9)  # all its weights are smaller than all others
        return model

    outcome = once(make, lr=0.0, subset=0.95, fraction=constant(0.9), scope=scope)
    assert_prunes(outcome, scope)
    smallest = outcome.before[1] - outcome.pruned[1]
    if scope == "global":
        values = {key: abs(value) for key, value in outcome.values[1].items()}
        assert smallest == {max(values, key=values.__getitem__)}
    assert sum(map(len, outcome.after)) == sum(map(len, outcome.before))


@distributions
def test_a_layer_with_every_connection_has_an_empty_subset(distribution: str) -> None:
    def make() -> nn.Module:
        model = mlp()
        model[4] = SparseLinear(15, 5, sparsity=0, dtype=torch.float64, generator=seeded(0))
        return model

    options: dict[str, Any] = {"distribution": distribution, "subset": 0.5}
    assert sample(make, **options)[2] == set()
    assert_rewires(make, **options)
    full = once(lambda: make()[4], [(normal(8, 15), batch_of(mlp())[1])], fraction=0.5, **options)
    assert full.after == full.before  # nowhere to grow


def test_single_connections_stay() -> None:
    model = SparseLinear(5, 4, connections=1, generator=seeded(0))
    optimizer = torch.optim.Adam(model.parameters())
    rewirer = rewire.GSE(model, optimizer, every=1, until=LONG, fraction=0.9, subset=3.0)
    before = keys_of(model)
    for seed in range(3):
        model(normal(3, 5, seed=seed, dtype=torch.float32)).square().sum().backward()
        optimizer.step()
        rewirer.step()
    assert keys_of(model) == before


@scopes
def test_tiny_layers_and_a_large_fraction(scope: str) -> None:
    """ceil(alpha * |A|) is more than can be pruned: one of each layer must stay."""

    def make() -> nn.Module:
        options: dict[str, Any] = {"dtype": torch.float64, "generator": seeded(0)}
        sizes = ((12, 6, 2), (6, 5, 3), (5, 4, 1), (4, 5, 2))
        return nn.Sequential(*(SparseLinear(a, b, connections=n, **options) for a, b, n in sizes))

    outcome = once(make, subset=50.0, fraction=constant(0.99), scope=scope)
    assert_prunes(outcome, scope)
    assert sum(map(len, outcome.after)) == 8
    assert all(outcome.after)
    if scope == "layer":
        assert [len(grown) for grown in outcome.grown] == [1, 2, 0, 1]
    else:
        assert sum(map(len, outcome.grown)) == 4


# The two limits -----------------------------------------------------------------------------------


@scopes
@distributions
@pytest.mark.parametrize("make", [mlp, cnn])
def test_a_huge_subset_grows_what_rigl_grows(make: Make, distribution: str, scope: str) -> None:
    outcome = once(make, subset=1e6, fraction=constant(0.3), distribution=distribution, scope=scope)
    assert_grows(outcome, inactive_of(make()), 0.3, scope)
    assert_prunes(outcome, scope)


@distributions
def test_a_subset_just_as_large_as_what_is_inactive_is_all_of_it(distribution: str) -> None:
    """ceil(subset * |A|) >= |W - A|, against one connection fewer."""

    def make() -> nn.Module:
        return SparseLinear(9, 8, connections=40, dtype=torch.float64, generator=seeded(2))

    batches = [(normal(4, 9), normal(4, 8, seed=1))]  # 32 are inactive
    options: dict[str, Any] = {"distribution": distribution, "loss": weighted_sum}
    assert sample(make, batches, subset=31.5 / 40, **options) == inactive_of(make())
    assert sample(make, batches, subset=30.5 / 40, **options) != inactive_of(make())


@distributions
@pytest.mark.parametrize("make", [mlp, cnn])
def test_a_subset_equal_to_the_fraction_is_grown_itself(make: Make, distribution: str) -> None:
    options: dict[str, Any] = {"distribution": distribution, "scope": "layer", "subset": 0.3}
    subset = sample(make, **options)
    outcome = once(make, fraction=constant(0.3), **options)
    assert outcome.grown == subset
    assert sum(map(len, subset)) > 10


# What else may happen to a model ------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.conv(x)))


@distributions
def test_a_rewiring_of_residual_blocks(distribution: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(Residual(16), Residual(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
        )
        return rewire.sparsify(model.double(), sparsity=0.8, seed=1)

    batch = (normal(32, 3, 10, 10), torch.randint(5, (32,), generator=seeded(1)))
    assert_rewires(make, [batch], distribution=distribution, subset=0.5)


@distributions
def test_a_rewiring_of_a_converted_model_on_sequences(distribution: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = (nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 48))
        return rewire.sparsify(nn.Sequential(*layers).double(), sparsity=0.9, seed=1)

    batch = (normal(8, 70, 48), normal(8, 70, 48, seed=1))
    options: dict[str, Any] = {"loss": weighted_sum, "distribution": distribution}
    assert_rewires(make, [batch], subset=0.5, **options)


def test_gradients_by_autograd_grad() -> None:
    def by_grad(model: nn.Module, batch: Batch) -> Tensor:
        """Fills .grad as backward() does."""
        loss = default_loss(model, batch)
        parameters = list(model.parameters())
        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = grad
        return loss.detach().requires_grad_()  # backward() does nothing more

    options: dict[str, Any] = {"subset": 0.5, "fraction": constant(0.2)}
    plain, other = once(mlp, **options), once(mlp, loss=by_grad, **options)
    assert plain.after == other.after


@distributions
def test_copies_of_an_armed_model_take_no_part(distribution: str) -> None:
    def with_copies(model: nn.Module, batch: Batch) -> Tensor:
        other = batch_of(mlp(), 99)
        clones = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        clones.append(AveragedModel(model).module)
        for clone in clones:
            clone.load_state_dict(model.state_dict())
            (100 * default_loss(clone, other)).backward()
        return default_loss(model, batch)

    options: dict[str, Any] = {"distribution": distribution, "subset": 0.5, "fraction": 0.2}
    plain, copied = once(mlp, **options), once(mlp, loss=with_copies, **options)
    assert plain.after == copied.after
    model = mlp()
    names = set(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rewirer = rewire.GSE(model, optimizer, every=1, until=LONG, distribution=distribution)
    default_loss(model, batch_of(model)).backward()
    assert set(model.state_dict()) == names
    assert rewirer.step() is not None


def test_gradients_that_are_zeroed_instead_of_removed() -> None:
    def train(set_to_none: bool) -> list[dict[int, float]]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        rewirer = rewire.GSE(model, optimizer, every=2, until=LONG)
        for step in range(7):
            optimizer.zero_grad(set_to_none=set_to_none)
            default_loss(model, batch_of(model, step)).backward()
            optimizer.step()
            rewirer.step()
        return values_of(model)

    assert train(True) == train(False)


@distributions
def test_empty_batches_and_empty_layers_do_no_harm(distribution: str) -> None:
    def make() -> nn.Module:
        model = mlp()
        model[2] = SparseLinear(20, 15, connections=0, dtype=torch.float64)
        return model

    outcome = once(make, distribution=distribution, subset=0.5, fraction=0.2)
    assert_prunes(outcome, "global")
    empty = (torch.empty(0, 12, dtype=torch.float64), torch.empty(0, 5, dtype=torch.float64))
    options: dict[str, Any] = {"distribution": distribution, "loss": weighted_sum}
    assert_prunes(once(mlp, [empty], subset=0.5, fraction=0.2, **options), "global")


def test_any_integer_is_a_seed() -> None:
    subsets = [sample(mlp, subset=0.5, seed=seed) for seed in (0, 1, -1, 2**63, 12345678901234)]
    assert len({str([sorted(s) for s in subset]) for subset in subsets}) == 5


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
    counts = changes(20, every=3, until=16, fraction=0.37, subset=100.0)
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
    counts = changes(14, every=5, until=10, fraction=fraction, subset=100.0)
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


# Sampling -----------------------------------------------------------------------------------------


def assert_frequencies(observed: Counter[Any], expected: dict[Any, float]) -> None:
    """Chi-square test at about one in a hundred thousand; cells with little are put together."""
    assert set(observed) <= set(expected)
    count = sum(observed.values())
    assert math.isclose(sum(expected.values()), count, rel_tol=1e-9)
    large = [cell for cell, mean in expected.items() if mean >= 5]
    rest = [cell for cell in expected if cell not in large]
    pairs = [(observed[cell], expected[cell]) for cell in large]
    pairs.append((sum(observed[c] for c in rest), sum(expected[c] for c in rest)))
    pairs = [(o, e) for o, e in pairs if e > 1e-9]
    freedom = len(pairs) - 1
    statistic = sum((o - e) ** 2 / e for o, e in pairs)
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4.3 * math.sqrt(2 / 9 / freedom)) ** 3


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


def linear_pair() -> nn.Module:
    """4 inputs, 3 outputs, two connections."""
    layer = SparseLinear(4, 3, bias=False, connections=2, dtype=torch.float64)
    given = Connections.from_keys(torch.tensor([1, 10]), 4, 3)
    layer.set_connections(given, torch.tensor([0.5, -0.3], dtype=torch.float64))
    return layer


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
    options: dict[str, Any] = {"subset": 100.0, "distribution": distribution, "until": LONG}
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
    outcome = once(mlp, lr=5.0, subset=1e6, fraction=constant(0.2))
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


# What survives ------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}),
    "SGD dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "SGD Nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 1e-2}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "RMSprop centered": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "Adagrad start": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.7}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01, "t0": 1.0}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.013}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
VARIANTS = [
    pytest.param(kind, options | variant, id=f"{name} {' '.join(variant)}".strip())
    for name, (kind, options) in OPTIMIZERS.items()
    for variant in ({}, {"foreach": False}, {"foreach": True}, {"fused": True})
    if variant != {"fused": True} or name.split()[0] in FUSED
]


def state_by_key(optimizer: torch.optim.Optimizer, layer: SparseLayer) -> dict[str, Any]:
    """Per-connection state by key, the rest as it is."""
    keys, state = layer.connections.keys().tolist(), optimizer.state[layer.values]
    return {
        name: dict(zip(keys, value.tolist(), strict=True))
        if isinstance(value, Tensor) and value.shape == layer.values.shape
        else copy.deepcopy(value)
        for name, value in state.items()
    }


def fresh_state(name: str, options: dict[str, Any]) -> float:
    """What an optimizer starts a parameter's state with."""
    start = {"step_size": options["lr"]} if "lr" in options else {}  # of Rprop
    start["sum"] = options.get("initial_accumulator_value", 0.0)  # of Adagrad
    return start.get(name, 0.0)


@scopes
@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_survivors_keep_values_and_optimizer_state(
    kind: Any, options: dict[str, Any], scope: str
) -> None:
    model = mlp(dtype=torch.float32)
    optimizer = kind(model.parameters(), **options)
    rewirer = rewire.GSE(model, optimizer, every=3, until=LONG, fraction=0.3, scope=scope)
    parameters = list(model.parameters())
    for step in range(7):
        optimizer.zero_grad()
        default_loss(model, batch_of(model, step)).backward()
        optimizer.step()
        values = values_of(model)
        states = [state_by_key(optimizer, layer) for layer in layers_of(model)]
        biases = [layer.bias.detach().clone() for layer in layers_of(model)]  # type: ignore[union-attr]
        bias_states = [copy.deepcopy(optimizer.state[layer.bias]) for layer in layers_of(model)]  # type: ignore[index]
        result = rewirer.step()
        assert (result is not None) == (step % 3 == 2)
        changed = 0
        for i, (layer, now) in enumerate(zip(layers_of(model), values_of(model), strict=True)):
            grown, kept = now.keys() - values[i].keys(), now.keys() & values[i].keys()
            changed += len(grown)
            assert all(now[key] == values[i][key] for key in kept)
            assert all(now[key] == 0.0 for key in grown)
            state = state_by_key(optimizer, layer)
            assert state.keys() == states[i].keys()
            for name, value in state.items():
                old = states[i][name]
                if isinstance(value, dict):
                    assert value.keys() == now.keys()
                    assert all(value[key] == old[key] for key in kept)
                    fresh = torch.tensor(fresh_state(name, options)).item()
                    assert all(value[key] == fresh for key in grown)
                else:
                    assert torch.equal(torch.as_tensor(value), torch.as_tensor(old))
            assert torch.equal(layer.bias.detach(), biases[i])  # type: ignore[union-attr]
            bias_state = optimizer.state[layer.bias]  # type: ignore[index]
            for name, value in bias_states[i].items():
                assert torch.equal(torch.as_tensor(bias_state[name]), torch.as_tensor(value))
        assert (changed > 0) == (result is not None)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in parameters]
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert {id(p) for p in optimizer.state} <= {id(p) for p in parameters}
    assert all(bool(p.isfinite().all()) for p in parameters)


def test_state_of_an_unknown_shape_raises_and_nothing_is_changed() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rewirer = rewire.GSE(model, optimizer, every=1, until=LONG)
    default_loss(model, batch_of(model)).backward()
    optimizer.step()
    optimizer.state[model[4].values]["odd"] = torch.zeros(3, 7)
    before = values_of(model)
    with pytest.raises((ValueError, RuntimeError, TypeError), match="odd"):
        rewirer.step()
    assert values_of(model) == before
    assert all(
        optimizer.state[layer.values]["momentum_buffer"].shape == layer.values.shape
        for layer in layers_of(model)
    )


def test_a_layer_with_one_connection_keeps_the_scalars_of_its_state() -> None:
    """Where the length of the values and of a scalar cannot be told apart by counting."""
    model = nn.Sequential(
        SparseLinear(12, 9, connections=30, generator=seeded(0)),
        nn.Tanh(),
        SparseLinear(9, 5, connections=1, generator=seeded(1)),
    )
    for name in ("Adam", "NAdam", "ASGD", "Adafactor"):
        kind, options = OPTIMIZERS[name]
        twin = copy.deepcopy(model)
        optimizer = kind(twin.parameters(), **options)
        rewirer = rewire.GSE(twin, optimizer, every=2, until=LONG, fraction=0.5)
        for step in range(8):
            optimizer.zero_grad()
            default_loss(twin, batch_of(twin, step)).backward()
            optimizer.step()
            rewirer.step()
        for layer in layers_of(twin):
            assert float(optimizer.state[layer.values]["step"]) == 8


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    weights = [layer.values for layer in layers_of(model)]
    biases = [layer.bias for layer in layers_of(model)]
    return [
        {"params": biases, "weight_decay": 0.0},
        {"params": weights[:1], "lr": 0.05},
        {"params": weights[1:], "momentum": 0.5},
    ]


def test_several_groups_and_lr_schedulers_are_unaffected() -> None:
    def train(rewired: bool) -> tuple[list[Any], list[Any]]:
        model = mlp()
        optimizer = torch.optim.SGD(grouped(model), lr=0.1, momentum=0.9, weight_decay=1e-2)
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
            ],
            milestones=[4],
        )
        rewirer = rewire.GSE(model, optimizer, every=2, until=LONG) if rewired else None
        seen = []
        for step in range(9):
            optimizer.zero_grad()
            default_loss(model, batch_of(model, step)).backward()
            optimizer.step()
            if rewirer is not None:
                rewirer.step()
            scheduler.step()
            seen.append(
                [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            )
        names = {id(p): name for name, p in model.named_parameters()}
        return seen, [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups]

    assert train(True) == train(False)


def test_groups_and_default_arguments_together_train() -> None:
    """Weight decay and momentum of each group act on what survives, as without groups."""
    model, twin = mlp(), mlp()
    optimizers = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.SGD([{"params": [p]} for p in twin.parameters()], lr=0.1, momentum=0.9),
    )
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        rewirer = rewire.GSE(each, optimizer, every=2, until=LONG)
        for step in range(6):
            optimizer.zero_grad()
            default_loss(each, batch_of(each, step)).backward()
            optimizer.step()
            rewirer.step()
    assert values_of(model) == values_of(twin)


# The same answer again ----------------------------------------------------------------------------


def trio(make: Make, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    defaults = {"every": 3, "until": 20, "fraction": 0.4, "subset": 0.7}
    return model, optimizer, rewire.GSE(model, optimizer, **(defaults | options))


def train(parts: tuple[nn.Module, Any, Any], steps: range) -> nn.Module:
    model, optimizer, rewirer = parts
    for step in steps:
        optimizer.zero_grad()
        for micro in (0, 1):
            (default_loss(model, batch_of(model, 2 * step + micro)) / 2).backward()
        optimizer.step()
        rewirer.step()
    return model


def assert_same(a: nn.Module, b: nn.Module) -> None:
    assert keys_of(a) == keys_of(b)
    for (name, one), (_, other) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(one, other), name


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


def stored(*parts: Any) -> list[Any]:
    """State dicts through a file, without pickled code."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    states: list[Any] = torch.load(file, weights_only=True)
    return states


def other(make: Any) -> nn.Module:
    return make(seed=9)


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


class NothingDense(TorchDispatchMode):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.largest = limit, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
                assert tensor.numel() < self.limit, func
        return out


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


# The other methods --------------------------------------------------------------------------------

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
