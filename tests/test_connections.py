"""The set of active connections: drawn uniformly in linear time, checked, read in every form."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rewire import Connections
from rewire.ops import TopologyError


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def small() -> Connections:
    """Unit 0 <- {0, 3}, unit 1 <- nothing, unit 2 <- {1, 2, 3}."""
    return Connections(4, 3, int32([0, 2, 2, 5]), int32([0, 3, 1, 2, 3]))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Reading


def test_forms_by_hand() -> None:
    c = small()
    assert len(c) == 5
    assert c.density == 5 / 12
    assert c.outputs().tolist() == [0, 0, 2, 2, 2]
    assert c.inputs().tolist() == [0, 3, 1, 2, 3]
    assert c.keys().tolist() == [0, 3, 9, 10, 11]
    assert c.fan_in().tolist() == [2, 0, 3]
    forms = (c.outputs(), c.inputs(), c.keys(), c.fan_in())
    assert {t.dtype for t in forms} == {torch.int64}
    assert (c.indptr.dtype, c.indices.dtype) == (torch.int32, torch.int32)


def test_keys_do_not_overflow() -> None:
    n = 2**31 - 1
    c = Connections(n, 2, int32([0, 1, 2]), int32([n - 1, n - 1]))
    assert c.keys().tolist() == [n - 1, 2 * n - 1]
    assert Connections.from_keys(c.keys(), n, 2).indices.tolist() == [n - 1, n - 1]


@pytest.mark.parametrize(("n_in", "n_out"), [(0, 0), (0, 3), (3, 0), (3, 2)])
def test_no_connections(n_in: int, n_out: int) -> None:
    none = torch.zeros(n_out, n_in)
    for c in (
        Connections.random(n_in, n_out, 0),
        Connections.from_mask(none),
        Connections.from_keys(torch.empty(0, dtype=torch.int64), n_in, n_out),
    ):
        assert (len(c), c.density, c.n_in, c.n_out) == (0, 0.0, n_in, n_out)
        assert c.indptr.tolist() == [0] * (n_out + 1)
        assert c.keys().tolist() == c.outputs().tolist() == c.inputs().tolist() == []
        assert c.fan_in().tolist() == [0] * n_out


# Checking

BAD: dict[str, tuple[list[int], list[int]]] = {
    "not ascending": ([0, 2, 2, 5], [3, 0, 1, 2, 3]),
    "twice": ([0, 2, 2, 5], [0, 3, 1, 1, 3]),
    "negative": ([0, 2, 2, 5], [-1, 3, 1, 2, 3]),
    "out of range": ([0, 2, 2, 5], [0, 3, 1, 2, 4]),
    "indptr too short": ([0, 2, 5], [0, 3, 1, 2, 3]),
    "indptr too long": ([0, 2, 2, 5, 5], [0, 3, 1, 2, 3]),
    "indptr falls": ([0, 3, 2, 5], [0, 1, 3, 2, 3]),
    "indptr starts late": ([1, 2, 2, 5], [0, 3, 1, 2, 3]),
    "indptr negative": ([0, -1, 2, 5], [0, 3, 1, 2, 3]),
    "indptr ends early": ([0, 2, 2, 4], [0, 3, 1, 2, 3]),
    "indptr ends late": ([0, 2, 2, 6], [0, 3, 1, 2, 3]),
}


@pytest.mark.parametrize("name", BAD)
def test_corrupt_connections_are_refused(name: str) -> None:
    indptr, indices = BAD[name]
    with pytest.raises(TopologyError, match=r"indptr has|output unit"):
        Connections(4, 3, int32(indptr), int32(indices))
    # The same for memory that has to be read with strides.
    with pytest.raises(TopologyError, match=r"indptr has|output unit"):
        Connections(4, 3, int32(indptr), int32(indices).repeat_interleave(2)[::2])


def test_the_error_names_the_unit() -> None:
    for indices in (int32([0, 3, 2, 1, 3]), int32([0, 3, 2, 1, 3]).repeat_interleave(2)[::2]):
        with pytest.raises(TopologyError, match="output unit 2 "):
            Connections(4, 3, int32([0, 2, 2, 5]), indices)


def test_connections_of_no_unit_are_refused() -> None:
    for indices in (int32([1, 2]), int32([1, 1, 2, 2])[::2]):
        with pytest.raises(TopologyError):
            Connections(4, 0, int32([0]), indices)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.int16, torch.bool])
def test_other_types_are_refused(dtype: torch.dtype) -> None:
    c = small()
    with pytest.raises(TopologyError, match=f"indptr must be a 1-D int32 .*{dtype}"):
        Connections(4, 3, c.indptr.to(dtype), c.indices)
    with pytest.raises(TopologyError, match=f"indices must be a 1-D int32 .*{dtype}"):
        Connections(4, 3, c.indptr, c.indices.to(dtype))
    with pytest.raises(TopologyError, match="2-D"):
        Connections(4, 3, c.indptr, c.indices[None])
    with pytest.raises(TopologyError, match="2-D"):
        Connections(4, 3, c.indptr[None], c.indices)


# From masks and keys


@settings(deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.floats(0, 1), st.integers(0, 2**31))
def test_masks_and_keys_of_any_size(n_in: int, n_out: int, density: float, seed: int) -> None:
    mask = torch.rand(n_out, n_in, generator=seeded(seed)) < density
    expected = [
        (output, unit)
        for output, row in enumerate(mask.tolist())
        for unit, active in enumerate(row)
        if active
    ]
    keys = torch.tensor([output * n_in + unit for output, unit in expected], dtype=torch.int64)
    shuffled = keys[torch.randperm(keys.numel(), generator=seeded(seed))]
    for c in (Connections.from_mask(mask), Connections.from_keys(shuffled, n_in, n_out)):
        pairs = list(zip(c.outputs().tolist(), c.inputs().tolist(), strict=True))
        assert pairs == expected
        assert torch.equal(c.keys(), keys)
        assert c.fan_in().tolist() == mask.sum(1).tolist()
        assert (c.n_in, c.n_out) == (n_in, n_out)


def test_masks_of_any_type_and_strides() -> None:
    mask = torch.tensor([[0.5, 0.0, -2.0], [0.0, 0.0, torch.nan]])
    expected = [0, 2, 5]
    for form in (mask, mask != 0, mask.t().contiguous().t(), (mask != 0).int()):
        assert Connections.from_mask(form).keys().tolist() == expected


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 1)])
def test_a_mask_has_two_dimensions(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="two dimensions"):
        Connections.from_mask(torch.ones(shape))


@pytest.mark.parametrize("keys", [[-1, 3], [3, 12], [0, 10**15]])
def test_keys_out_of_range(keys: list[int]) -> None:
    with pytest.raises(ValueError, match="outside 3 x 4"):
        Connections.from_keys(torch.tensor(keys), 4, 3)


def test_the_same_key_twice() -> None:
    with pytest.raises(ValueError, match=r"output unit 1 .* distinct"):
        Connections.from_keys(torch.tensor([7, 3, 5, 7]), 4, 3)


def test_keys_are_not_changed() -> None:
    keys = torch.tensor([7, 3, 5])
    assert Connections.from_keys(keys, 4, 3).keys().tolist() == [3, 5, 7]
    assert keys.tolist() == [7, 3, 5]


# Drawing


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(0, 30), st.data())
def test_random_has_exactly_as_many_as_asked(n_in: int, n_out: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, n_in * n_out))
    generator = seeded(data.draw(st.integers(0, 2**31)))
    c = Connections.random(n_in, n_out, count, generator)
    keys = c.keys()
    assert len(c) == count
    assert keys.unique().numel() == count
    assert bool((keys.diff() > 0).all())
    assert count == 0 or 0 <= int(keys[0]) <= int(keys[-1]) < n_in * n_out
    assert (c.n_in, c.n_out) == (n_in, n_out)


@pytest.mark.parametrize("count", [-1, 13, 10**9])
def test_random_refuses_impossible_counts(count: int) -> None:
    with pytest.raises(ValueError, match=rf"3 \* 4 = 12, got {count}"):
        Connections.random(4, 3, count)


def test_random_refuses_more_units_than_fit() -> None:
    for n_in, n_out in ((2**31, 1), (1, 2**31)):
        with pytest.raises(ValueError, match="at most"):
            Connections.random(n_in, n_out, 1)


def test_random_is_decided_by_its_generator() -> None:
    for count in (30, 80):  # drawn, and permuted
        first = Connections.random(10, 10, count, seeded(1))
        assert torch.equal(first.keys(), Connections.random(10, 10, count, seeded(1)).keys())
        assert not torch.equal(first.keys(), Connections.random(10, 10, count, seeded(2)).keys())
        torch.manual_seed(3)
        default = Connections.random(10, 10, count)
        torch.manual_seed(3)
        assert torch.equal(default.keys(), Connections.random(10, 10, count).keys())


def chi_square(observed: list[int], expected: float) -> float:
    return sum((count - expected) ** 2 for count in observed) / expected


def limit(freedom: int) -> float:
    """What a chi-square variable exceeds once in about 30,000 times (Wilson and Hilferty)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 4 * math.sqrt(part)) ** 3


@pytest.mark.parametrize(("n_in", "n_out", "count"), [(3, 2, 2), (2, 3, 1), (3, 2, 3), (3, 2, 4)])
def test_every_set_of_connections_is_as_likely(n_in: int, n_out: int, count: int) -> None:
    generator, draws = seeded(0), 4000
    drawn = [Connections.random(n_in, n_out, count, generator) for _ in range(draws)]
    sets = Counter(tuple(c.keys().tolist()) for c in drawn)
    possible = math.comb(n_in * n_out, count)
    assert len(sets) == possible
    assert chi_square(list(sets.values()), draws / possible) < limit(possible - 1)


@pytest.mark.parametrize("count", [20, 45, 60])
def test_every_connection_is_as_likely(count: int) -> None:
    # With 45 of 100 many draws fall on each other and the surplus is thrown away.
    generator, draws = seeded(0), 2000
    counts = torch.zeros(100, dtype=torch.int64)
    for _ in range(draws):
        counts[Connections.random(20, 5, count, generator).keys()] += 1
    # Draws without replacement vary less than independent ones: 99 / (1 - density) freedom.
    expected = draws * count / 100
    assert chi_square(counts.tolist(), expected) / (1 - count / 100) < limit(99)


def test_large_layers_spread_over_all_units() -> None:
    c = Connections.random(1000, 1000, 100_000, seeded(0))
    for units in (c.outputs(), c.inputs()):
        counts = torch.bincount(units.reshape(-1) // 10, minlength=100)
        assert chi_square(counts.tolist(), 1000.0) < limit(99)


def test_a_huge_layer_needs_memory_for_its_connections_only() -> None:
    n = 10**6
    c = Connections.random(n, n, 10**5, seeded(0))
    assert len(c) == 10**5
    assert c.keys().unique().numel() == 10**5
    assert int(c.keys()[-1]) < n * n
    assert int(c.indices.max()) > 0.99 * n
    assert int(c.outputs().max()) > 0.99 * n


def test_the_largest_layer() -> None:
    n = 2**31 - 1
    c = Connections.random(n, 3, 1000, seeded(0))
    assert len(c) == 1000
    assert 0.98 * n < int(c.indices.max()) < n
    assert c.fan_in().tolist() == pytest.approx([333] * 3, abs=80)


class LargestResult(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operator has made."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.size = max(self.size, tensor.numel())
        return result


@pytest.mark.parametrize("count", [100, 10_000, 200_000])
def test_drawing_is_linear_in_connections_and_units(count: int) -> None:
    n = 2000
    with LargestResult() as largest:
        Connections.random(n, n, count, seeded(0)).keys()
    assert count <= largest.size <= 2 * count + n + 1
