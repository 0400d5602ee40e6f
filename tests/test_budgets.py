"""Budgets: the paper's models, small cases by hand, and properties that hold for any model."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rewire import models
from rewire.budgets import SHARES, LayerSize, assign, epsilon_for


def sizes_of(name: str) -> list[LayerSize]:
    with torch.device("meta"):
        model = models.build(name)
    sizes = []
    for key, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            sizes.append(LayerSize(key, layer.in_features, layer.out_features))
        elif isinstance(layer, nn.Conv2d):
            height, width = layer.kernel_size
            sizes.append(LayerSize(key, layer.in_channels, layer.out_channels, (height, width)))
    return sizes


def linear(n_in: int, n_out: int) -> LayerSize:
    return LayerSize(f"{n_in}x{n_out}", n_in, n_out)


# The models of the paper


@pytest.mark.parametrize(
    ("name", "sparsity", "epsilon", "clipped"),
    [
        ("resnet56", 0.90, 4.278, []),
        ("resnet56", 0.95, 2.139, []),
        ("resnet56", 0.98, 0.856, []),
        ("vgg16", 0.90, 10.778, ["features.0", "classifier.7"]),
        ("vgg16", 0.95, 5.389, []),
        ("vgg16", 0.98, 2.156, []),
        ("vit", 0.90, 24.184, ["head"]),
        ("vit", 0.95, 12.092, ["head"]),
        ("vit", 0.98, 4.837, []),
    ],
)
def test_erdos_renyi_of_the_papers_models(
    name: str, sparsity: float, epsilon: float, clipped: list[str]
) -> None:
    layers = sizes_of(name)
    assert epsilon_for(layers, 1 - sparsity) == pytest.approx(epsilon, abs=5e-4)
    counts = assign(layers, sparsity=sparsity)
    pairs = zip(layers, counts, strict=True)
    assert [layer.name for layer, count in pairs if count == layer.weights] == clipped
    target = (1 - sparsity) * sum(layer.weights for layer in layers)
    if clipped:
        assert sum(counts) < target
    else:
        assert target <= sum(counts) < target + len(layers) + 1


@pytest.mark.parametrize("assignment", SHARES)
@pytest.mark.parametrize("name", ["resnet56", "vgg16", "vit", "resnet50"])
def test_exact_total_of_the_papers_models(name: str, assignment: str) -> None:
    layers = sizes_of(name)
    total = sum(layer.weights for layer in layers) // 10
    assert sum(assign(layers, connections=total, assignment=assignment)) == total


# By hand


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        # 10x10 and 20x30: 700 weights, 70 units, shares 20 and 50.
        ({"density": 0.1}, [20, 50]),  # epsilon = 1
        ({"sparsity": 0.9}, [20, 50]),
        ({"epsilon": 1.0}, [20, 50]),
        ({"epsilon": 0.001}, [1, 1]),
        ({"epsilon": 5.01}, [100, 251]),  # 100.2 is clipped
        ({"density": 0.9}, [100, 450]),  # epsilon = 9: 180 is clipped and its excess lost
        ({"density": 1.0}, [100, 600]),
        ({"sparsity": 0.0}, [100, 600]),
        ({"connections": 70}, [20, 50]),
        ({"connections": 71}, [20, 51]),  # 20.29 and 50.71
        ({"connections": 630}, [100, 530]),  # the excess goes to the second
        ({"connections": 2}, [1, 1]),
        ({"connections": 3}, [1, 2]),
        ({"connections": 700}, [100, 600]),
    ],
)
def test_erdos_renyi_by_hand(target: dict[str, Any], expected: list[int]) -> None:
    assert assign([linear(10, 10), linear(20, 30)], **target) == expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({"density": 0.1}, [10, 60]),
        ({"density": 0.101}, [11, 61]),
        ({"sparsity": 0.9}, [10, 60]),
        ({"connections": 71}, [10, 61]),  # 10.14 and 60.86
        ({"connections": 3}, [1, 2]),
        ({"density": 1.0}, [100, 600]),
    ],
)
def test_uniform_by_hand(target: dict[str, Any], expected: list[int]) -> None:
    layers = [linear(10, 10), linear(20, 30)]
    assert assign(layers, **target, assignment="uniform") == expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        # 2x4 channels 3x3: 72 weights, share 12. 8x4 channels 3x3: 288 weights, share 18.
        ({"density": 0.25}, [36, 54]),  # level 3
        ({"density": 0.75}, [72, 198]),  # level 9 would give 108 and 162: the first is dense
        ({"density": 1.0}, [72, 288]),
        ({"connections": 270}, [72, 198]),
        ({"connections": 91}, [36, 55]),  # 36.4 and 54.6
    ],
)
def test_erk_by_hand(target: dict[str, Any], expected: list[int]) -> None:
    layers = [LayerSize("first", 2, 4, (3, 3)), LayerSize("second", 8, 4, (3, 3))]
    assert assign(layers, **target, assignment="erk") == expected


def test_a_convolution_is_flattened() -> None:
    layer = LayerSize("conv", 3, 16, (5, 2))
    assert (layer.n_in, layer.n_out, layer.weights) == (30, 16, 480)
    assert assign([layer], epsilon=2.0) == [92]


def test_equal_remainders_go_to_the_earlier_layers() -> None:
    assert assign([linear(4, 4)] * 4, connections=10) == [3, 3, 2, 2]


def test_what_one_connection_each_takes_is_returned_by_the_others() -> None:
    # Shares 2, 2 and 20,000: the small layers hold their one connection, the rest is elsewhere.
    layers = [linear(1, 1), linear(1, 1), linear(10_000, 10_000)]
    assert assign(layers, connections=100) == [1, 1, 98]


@pytest.mark.parametrize("assignment", SHARES)
def test_float_fuzz_does_not_add_connections(assignment: str) -> None:
    # 0.007 * 1000 is 7.000000000000001 and 1 - 0.9 is not 0.1.
    layers = [linear(10, 100)] * 2
    for thousandths in range(1, 1000):
        density = thousandths / 1000
        expected = [thousandths] * 2
        assert assign(layers, density=density, assignment=assignment) == expected
        assert assign(layers, sparsity=1 - density, assignment=assignment) == expected


# For any model

dimensions = st.integers(1, 60)
layer_sizes = st.builds(
    LayerSize,
    name=st.just("layer"),
    in_channels=dimensions,
    out_channels=dimensions,
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
networks = st.lists(layer_sizes, min_size=1, max_size=12)
densities = st.floats(0, 1, exclude_min=True)
assignments = st.sampled_from(sorted(SHARES))


def dense(layers: list[LayerSize]) -> int:
    return sum(layer.weights for layer in layers)


def assert_within_bounds(layers: list[LayerSize], counts: list[int]) -> None:
    assert len(counts) == len(layers)
    for layer, count in zip(layers, counts, strict=True):
        assert type(count) is int
        assert 1 <= count <= layer.weights


@given(networks, assignments, st.data())
def test_connections_are_met_exactly_and_in_proportion(
    layers: list[LayerSize], assignment: str, data: st.DataObject
) -> None:
    total = data.draw(st.integers(len(layers), dense(layers)))
    counts = assign(layers, connections=total, assignment=assignment)
    assert sum(counts) == total
    assert_within_bounds(layers, counts)
    # One level explains every layer: count is within one of clip(level*share, 1, dense).
    lowest, highest = Fraction(0), Fraction(10**9)
    for layer, count in zip(layers, counts, strict=True):
        share = SHARES[assignment](layer)
        if count > 1:
            lowest = max(lowest, Fraction(count - 1, share))
        if count < layer.weights:
            highest = min(highest, Fraction(count + 1, share))
    assert lowest < highest


@given(networks, assignments, st.data())
def test_one_more_connection_takes_at_most_one_from_a_layer(
    layers: list[LayerSize], assignment: str, data: st.DataObject
) -> None:
    # Largest remainders are not quite monotone (the Alabama paradox), the levels are.
    total = data.draw(st.integers(len(layers), dense(layers)))
    more = data.draw(st.integers(total, dense(layers)))
    before = assign(layers, connections=total, assignment=assignment)
    after = assign(layers, connections=more, assignment=assignment)
    assert all(b - 1 <= a for b, a in zip(before, after, strict=True))


@given(networks, assignments, densities, densities)
def test_more_density_is_never_fewer_connections(
    layers: list[LayerSize], assignment: str, density: float, other: float
) -> None:
    low, high = sorted([density, other])
    fewer = assign(layers, density=low, assignment=assignment)
    more = assign(layers, density=high, assignment=assignment)
    assert_within_bounds(layers, fewer)
    assert_within_bounds(layers, more)
    assert all(a <= b for a, b in zip(fewer, more, strict=True))


@given(networks, densities)
def test_erk_and_uniform_meet_the_density(layers: list[LayerSize], density: float) -> None:
    target = density * dense(layers)
    for assignment in ("erk", "uniform"):
        held = sum(assign(layers, density=density, assignment=assignment))
        assert target * (1 - 1e-8) <= held < target + len(layers) + 1e-6


@given(networks, st.floats(1e-6, 1, exclude_max=True))
def test_erk_is_that_of_its_authors(layers: list[LayerSize], density: float) -> None:
    # As in google-research/rigl: the layer most over-full becomes dense, the rest is re-solved.
    full: set[int] = set()
    while True:
        rest = [layer for i, layer in enumerate(layers) if i not in full]
        left = density * dense(layers) - sum(layers[i].weights for i in full)
        level = left / sum(SHARES["erk"](layer) for layer in rest)
        fill = {
            i: level * SHARES["erk"](layer) / layer.weights
            for i, layer in enumerate(layers)
            if i not in full
        }
        if max(fill.values()) <= 1 + 1e-12:
            break
        full |= {i for i, value in fill.items() if value == max(fill.values())}
    for i, count in enumerate(assign(layers, density=density, assignment="erk")):
        expected = layers[i].weights * fill.get(i, 1.0)
        assert expected - 1e-3 <= count <= expected + 1


@given(networks, st.floats(1e-9, 1, exclude_max=True))
def test_erdos_renyi_is_its_epsilon(layers: list[LayerSize], density: float) -> None:
    epsilon = epsilon_for(layers, density)
    assert assign(layers, density=density) == assign(layers, epsilon=epsilon)


# Bad arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give exactly one of sparsity, density, epsilon, connections, got none"),
        ({"sparsity": 0.5, "density": 0.5}, "exactly one of .*, got sparsity and density"),
        ({"sparsity": 1.0}, "sparsity must be .* below 1, got 1.0"),
        ({"sparsity": -0.1}, "sparsity must be"),
        ({"sparsity": float("nan")}, "sparsity must be"),
        ({"density": 0.0}, "density must be above 0 and at most 1, got 0.0"),
        ({"density": 1.1}, "density must be"),
        ({"density": float("nan")}, "density must be"),
        ({"epsilon": 0.0}, "epsilon must be"),
        ({"epsilon": float("inf")}, "epsilon must be"),
        ({"epsilon": 1.0, "assignment": "erk"}, "epsilon belongs to the erdos-renyi"),
        ({"epsilon": 1.0, "assignment": "uniform"}, "with 'uniform' give sparsity"),
        ({"connections": 1}, r"integer from 2 \(one for each layer\) to 700 \(dense\), got 1"),
        ({"connections": 701}, "got 701"),
        ({"connections": 70.0}, "integer from 2"),
        ({"density": 0.1, "assignment": "random"}, "no assignment 'random'; choose one of erdos"),
    ],
)
def test_bad_arguments_are_explained(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign([linear(10, 10), linear(20, 30)], **arguments)


def test_no_layers() -> None:
    with pytest.raises(ValueError, match="no layers"):
        assign([], density=0.1)
    with pytest.raises(ValueError, match="no layers"):
        epsilon_for([], 0.1)


@pytest.mark.parametrize("sizes", [(0, 3, (1, 1)), (3, 0, (1, 1)), (3, 3, (0, 1))])
def test_a_layer_without_weights_is_refused(sizes: tuple[int, int, tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="at least 1, got LayerSize"):
        LayerSize("empty", *sizes)
