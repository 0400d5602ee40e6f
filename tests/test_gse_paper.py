"""Guided stochastic exploration against the paper: written from the specification, not from the code.

Here one rewiring against the dense gradient, and its limits; other files have the rest.
"""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import rewire
from rewire import Connections, SparseConv2d, SparseLinear
from rewirings import (
    LONG,
    Batch,
    Make,
    Outcome,
    assert_grows,
    assert_prunes,
    assert_rewires,
    batch_of,
    cnn,
    constant,
    default_loss,
    distributions,
    inactive_of,
    keys_of,
    mlp,
    normal,
    once,
    sample,
    scopes,
    seeded,
    total,
    values_of,
    weighted_sum,
)

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
        **{"every": 1, "until": LONG, "fraction": 0.25, "subset": math.inf},
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
def test_a_rewiring_of_a_converted_model(distribution: str) -> None:
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

    outcome = once(make, subset=math.inf, fraction=constant(0.99), scope=scope)
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
    outcome = once(
        make, subset=math.inf, fraction=constant(0.3), distribution=distribution, scope=scope
    )
    assert_grows(outcome, inactive_of(make()), 0.3, scope)
    assert_prunes(outcome, scope)


@distributions
def test_a_large_subset_is_drawn_with_replacement(distribution: str) -> None:
    """However many draws there are, they are draws: a part of what is inactive is missed."""

    def make() -> nn.Module:
        return SparseLinear(9, 8, connections=40, dtype=torch.float64, generator=seeded(2))

    batches = [(normal(4, 9), normal(4, 8, seed=1))]  # 32 are inactive
    options: dict[str, Any] = {"distribution": distribution, "loss": weighted_sum}
    for gamma in (31.5 / 40, 1.0):  # as many draws as there are inactive connections, and more
        (found,) = sample(make, batches, subset=gamma, **options)
        assert 5 < len(found) < 32
    everything = sample(make, batches, subset=math.inf, **options)
    assert everything == inactive_of(make())


def test_a_hundred_draws_per_connection_miss_what_chance_misses() -> None:
    """At 98 % and gamma = 100 there are two draws for each connection: a share of exp(-2) is missed."""
    active = Connections.random(60, 50, 60, seeded(2))
    layer = SparseLinear(60, 50, connections=active, dtype=torch.float64)
    rewirer = rewire.GSE(layer, torch.optim.SGD(layer.parameters()), every=1, until=9, subset=100.0)
    layer(normal(4, 60)).square().sum().backward()
    (found,) = rewirer.subsets.values()
    expected = (3000 - 60) * (1 - (1 - 1 / 3000) ** (100 * 60))
    assert abs(len(found) - expected) < 80  # five deviations; all would be 400 more


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
