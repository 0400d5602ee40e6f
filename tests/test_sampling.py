"""Drawing S, choosing, replacing and counting connections: kernels against their twins and by hand."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rewire import Connections, ops, sampling
from rewire.ops import Convolution, native
from rewire.ops import sampling as kernels
from rewire.ops.counting import Counter
from rewire.ops.sampling import Alias, Stream
from rewire.ops.topology import TopologyError, build
from rewire.sampling import Batch

STREAM = Stream(seed=7, purpose=sampling.DRAWS, step=3, layer=1)
needs_kernels = pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels")


@contextmanager
def reference() -> Iterator[None]:
    """As if the extension were not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_module", None)
        yield


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def everywhere(function: Any) -> Any:
    """The one result of the kernel, on any number of threads, and of its twin."""
    with reference():
        expected = function()
    for count in (1, 2, 3):
        with threads(count):
            got = function()
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
    return expected


def active(n_in: int, n_out: int, count: int, seed: int = 0) -> Connections:
    return Connections.random(n_in, n_out, count, torch.Generator().manual_seed(seed))


def keys(connections: Connections) -> set[int]:
    return set(connections.keys().tolist())


def weights(n: int, seed: int = 0) -> Tensor:
    drawn = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn**4 * (drawn > 0.2)


# Drawing


@st.composite
def layers(draw: Any) -> Connections:
    n_in, n_out = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    count = draw(st.integers(0, n_in * n_out))
    return active(n_in, n_out, count, draw(st.integers(0, 99)))


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(
    a=layers(), draws=st.integers(0, 3000), seed=st.integers(-(2**63), 2**64), shaped=st.booleans()
)
def test_draws_are_those_of_numpy(a: Connections, draws: int, seed: int, shaped: bool) -> None:
    if a.n_in * a.n_out == 0:
        return
    tables: list[Alias | None] = [None, None]
    if shaped:
        tables = kernels.alias_tables(weights(a.n_in), weights(a.n_out))
    stream = STREAM._replace(seed=seed)
    rows = sampling.rows(a)
    everywhere(lambda: kernels.draw(stream, draws, a.n_in, a.n_out, rows, *tables))


@needs_kernels
def test_long_rows_and_many_draws_are_those_of_numpy() -> None:
    for n_in, n_out, draws in ((100_000, 3, 60_000), (300, 5000, 200_000)):
        a = active(n_in, n_out, 5000)
        rows = sampling.rows(a)
        f, g = kernels.alias_tables(weights(n_in), weights(n_out))
        everywhere(
            lambda r=rows, n=n_in, m=n_out, d=draws, t=(f, g): kernels.draw(STREAM, d, n, m, r, *t)
        )


@needs_kernels
def test_draws_among_very_many_inputs_are_those_of_numpy() -> None:
    """Input unit and output unit of a band do not fit 32 bits together."""
    n_in, n_out, draws = 2_000_000_000, 5000, 50_000
    few = everywhere(
        lambda: kernels.draw(STREAM, 1000, n_in, n_out, sampling.rows(active(n_in, n_out, 0)))
    )
    rows = everywhere(lambda: kernels.draw(STREAM, draws, n_in, n_out, few))
    assert (
        rows.indices.numel() == draws - few.indices.numel()
    )  # which are drawn again, and left out


@needs_kernels
@pytest.mark.parametrize("taps", [1, 9])
def test_the_order_by_input_is_that_of_a_stable_sort(taps: int) -> None:
    for n_in, n_out, count in ((9000, 4000, 70_000), (90, 20_000, 50_000), (9000, 5, 40_000)):
        c = active(n_in, n_out, count)
        everywhere(lambda c=c: build(c.indptr, c.indices, c.n_in, taps))


@needs_kernels
def test_the_first_bad_row_is_found_in_many() -> None:
    c = active(1000, 40_000, 200_000)
    for rows in ([39_999], [21_000, 5000, 39_000]):
        indices = c.indices.clone()
        for row in rows:
            indices[c.indptr[row + 1] - 1] = 1000
        with pytest.raises(TopologyError, match=f"output unit {min(rows)} "):
            Connections(1000, 40_000, c.indptr, indices)


@settings(max_examples=60, deadline=None)
@given(a=layers(), factor=st.floats(0.01, 5))
def test_s_is_inactive_and_within_its_bound(a: Connections, factor: float) -> None:
    s = sampling.draw(a, factor, STREAM)
    assert not keys(s) & keys(a)
    assert len(s) <= min(sampling.ceil(factor * len(a)), a.n_in * a.n_out - len(a))


def test_draws_are_with_replacement_however_many() -> None:
    a = active(10, 10, 50)
    sizes = [len(sampling.draw(a, factor, STREAM)) for factor in (0.9, 1.0, 1.1, 5.0, 100.0)]
    assert sizes == sorted(sizes)
    assert sizes[2] < 40  # 55 draws of 100 hit about 42 %, half of them inactive
    assert sizes[-1] == 50  # 5000 draws miss nothing
    assert len(sampling.draw(active(10, 10, 100), 1.0, STREAM)) == 0
    assert len(sampling.draw(active(10, 10, 0), 5.0, STREAM)) == 0


def test_streams_differ() -> None:
    a = active(100, 100, 500)
    streams = [STREAM, *(STREAM._replace(**{k: 9}) for k in ("seed", "step", "layer"))]
    found = [frozenset(keys(sampling.draw(a, 1.0, stream))) for stream in streams]
    assert len(set(found)) == 4
    assert frozenset(keys(sampling.draw(a, 1.0, STREAM))) == found[0]


@needs_kernels
@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(0, 1), st.floats(1e-300, 1e300)), min_size=1).filter(
        lambda w: 0 < sum(w) < float("inf")
    )
)
def test_alias_tables_are_exact(given_: list[float]) -> None:
    w = torch.tensor(given_, dtype=torch.float64)
    table = everywhere(lambda: kernels.alias_tables(w)[0])
    share = table.threshold.numpy().astype(np.float64) / 2**32
    mass = np.zeros(len(given_))
    np.add.at(mass, np.arange(len(given_)), share)
    np.add.at(mass, table.alias.numpy(), 1 - share)
    scaled = w.numpy() / w.numpy().max()
    np.testing.assert_allclose(mass / len(given_), scaled / scaled.sum(), atol=1e-9)
    assert not mass[w.numpy() == 0].any()


@pytest.mark.parametrize("w", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_weights_that_say_nothing_are_uniform(w: list[float]) -> None:
    assert kernels.alias_tables(torch.tensor(w)) == [None]


def chi_square(counts: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """In deviations above its mean."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = len(counts) - 1
    return float((statistic - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize("shaped", [False, True])
def test_frequencies_are_f_times_g(shaped: bool) -> None:
    n_in, n_out, rounds = 12, 9, 8_000
    f, g = (weights(n) + 0.05 if shaped else torch.ones(n).double() for n in (n_in, n_out))
    joint = torch.outer(g / g.sum(), f / f.sum()).flatten().numpy()
    tables = kernels.alias_tables(f, g)
    empty = sampling.rows(active(n_in, n_out, 0))
    # One draw at a time, so that no duplicate is removed.
    counts = np.zeros(n_in * n_out)
    for step in range(rounds):
        rows = kernels.draw(STREAM._replace(step=step), 1, n_in, n_out, empty, *tables)
        counts[int(rows.indptr.diff().argmax()) * n_in + int(rows.indices[0])] += 1
    assert abs(chi_square(counts, rounds * joint)) < 4
    # And within one stream: how often each connection is among three draws.
    counts = np.zeros(n_in * n_out)
    for step in range(rounds // 4):
        rows = kernels.draw(STREAM._replace(step=step, seed=1), 3, n_in, n_out, empty, *tables)
        for o in range(n_out):
            counts[o * n_in + rows.indices[rows.indptr[o] : rows.indptr[o + 1]].long()] += 1
    expected = rounds // 4 * (1 - (1 - joint) ** 3)
    assert abs(chi_square(counts, expected)) < 4


@needs_kernels
@settings(max_examples=40, deadline=None)
@given(a=layers())
def test_complement(a: Connections) -> None:
    rows = everywhere(lambda: kernels.complement(sampling.rows(a), a.n_in, a.n_out))
    rest = Connections(a.n_in, a.n_out, *rows)
    assert keys(rest) == set(range(a.n_in * a.n_out)) - keys(a)


@settings(max_examples=40, deadline=None)
@given(a=layers(), count=st.integers(0, 500))
def test_choose_gives_as_many_as_asked(a: Connections, count: int) -> None:
    chosen = sampling.choose(a, count, STREAM)
    assert len(chosen) == min(count, a.n_in * a.n_out - len(a))
    assert not keys(chosen) & keys(a)


@pytest.mark.parametrize("full", [2, 9])  # by drawing, and from the list of all
def test_choose_is_uniform(full: int) -> None:
    a = active(5, 4, full)
    free = sorted(set(range(20)) - keys(a))
    counts = dict.fromkeys(free, 0)
    for step in range(3000):
        for key in keys(sampling.choose(a, 3, STREAM._replace(step=step))):
            counts[key] += 1
    expected = np.full(len(free), 9_000 / len(free))
    assert abs(chi_square(np.array([counts[k] for k in free]), expected)) < 4


def test_too_many_draws_are_refused() -> None:
    rows = sampling.rows(active(10, 10, 5))
    with pytest.raises(ValueError, match="at most"):
        kernels.draw(STREAM, 2**31, 10, 10, rows)
    with pytest.raises(ValueError, match="smaller subset"):
        sampling.inactive(active(100_000, 100_000, 5))


# Choosing and replacing


scores = st.lists(
    st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf")])),
    max_size=200,
)


@needs_kernels
@settings(max_examples=150, deadline=None)
@given(scores, st.integers(0, 210), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_select(values: list[float], k: int, largest: bool, dtype: torch.dtype) -> None:
    given_ = torch.tensor(values, dtype=dtype)
    (mask,) = everywhere(lambda: (kernels.select(given_, k, largest),))
    plain = [float("-inf") if v != v else v for v in values]
    order = sorted(range(len(values)), key=lambda i: -plain[i] if largest else plain[i])
    assert set(mask.nonzero().flatten().tolist()) == set(order[:k])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_select_from_many(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    given_ = torch.randn(300_000, generator=generator, dtype=dtype).mul(1000).round()  # many ties
    for k, largest in itertools.product((1, 1000, 150_000, 299_999), (True, False)):
        (mask,) = everywhere(lambda k=k, m=largest: (kernels.select(given_, k, m),))
        assert int(mask.sum()) == k
        chosen, others = given_[mask], given_[~mask]
        assert chosen.min() >= others.max() if largest else chosen.max() <= others.min()


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(a=layers(), seed=st.integers(0, 99))
def test_replace(a: Connections, seed: int) -> None:
    s = sampling.draw(a, 1.0, STREAM)
    generator = torch.Generator().manual_seed(seed)
    pruned = torch.rand(len(a), generator=generator) < 0.3
    grown = torch.rand(len(s), generator=generator) < 0.3
    arguments = (sampling.rows(a), pruned, sampling.rows(s), grown, a.n_in)

    def replaced() -> tuple[Tensor, ...]:
        rows, source = kernels.replace(*arguments)
        return (*rows, source)

    indptr, indices, source = everywhere(replaced)
    new = Connections(a.n_in, a.n_out, indptr, indices)
    assert keys(new) == (keys(a) - set(a.keys()[pruned].tolist())) | set(s.keys()[grown].tolist())
    old = source >= 0
    assert torch.equal(a.keys()[source[old].long()], new.keys()[old])
    assert set(new.keys()[~old].tolist()) == set(s.keys()[grown].tolist())


@needs_kernels
@pytest.mark.parametrize(("n_in", "taps", "count"), [(500, 1, 40_000), (90, 9, 3000), (6, 3, 0)])
def test_the_other_traversal_order(n_in: int, taps: int, count: int) -> None:
    a = active(n_in, 700, count)
    everywhere(lambda: build(a.indptr, a.indices, n_in, taps))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_follow(dtype: torch.dtype) -> None:
    x = torch.arange(5, dtype=dtype)
    source = torch.tensor([4, -1, 0, -1, 2, 2], dtype=torch.int32)
    (out,) = everywhere(lambda: (kernels.follow(x, source, 0.5),))
    assert out.tolist() == [4, 0.5, 0, 0.5, 2, 2]
    (out,) = everywhere(lambda: (kernels.follow(x[:0], source.clamp(max=-1), 0.5),))
    assert out.tolist() == [0.5] * 6


# Counting


@needs_kernels
@pytest.mark.parametrize("size", [(30, 40), (20_000, 10_000)])
def test_counting(size: tuple[int, int]) -> None:
    def counted() -> tuple[Tensor, Tensor]:
        counter = Counter(*size, 500)
        for seed in range(4):
            a = active(*size, 500, seed)
            chosen = None if seed < 3 else torch.arange(500) % 2 == 0
            counter.add(sampling.rows(a), chosen)
        return counter.memory, torch.tensor(counter.total())

    _, total = everywhere(counted)
    parts = [active(*size, 500, seed).keys() for seed in range(4)]
    exact = len(torch.cat([*parts[:3], parts[3][::2]]).unique())
    assert abs(int(total) - exact) <= (0 if size[0] < 100 else 0.05 * exact)


def test_sketch_of_many() -> None:
    counter = Counter(200_000, 200_000, 0)
    assert counter.exact is None
    for seed in range(3):
        counter.add(sampling.rows(active(200_000, 200_000, 200_000, seed)))
    assert abs(counter.total() - 600_000) < 0.06 * 600_000


# Distributions


CONVOLUTIONS = [
    Convolution(),
    Convolution((3, 3), (1, 1), (1, 1), (1, 1)),
    Convolution((3, 2), (2, 1), (0, 1), (1, 2)),
]


def batch(conv: Convolution, samples: int, seed: int = 0, linear: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, 7, 6, generator=generator, dtype=torch.float64)
    if linear:
        dy = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
        return Batch(ops.eager.LINEAR, x[:, :, 0, 0].contiguous(), dy)
    shape = (samples, 5, *conv.output_size(7, 6))
    return Batch(conv, x, torch.randn(shape, generator=generator, dtype=torch.float64))


def patches(batch: Batch) -> tuple[Tensor, Tensor]:
    """Activations and output gradients as the paper writes them: (units, samples)."""
    conv, x, dy = batch[:3]
    if x.dim() == 2:
        return x.t(), dy.t()
    taps = conv.kernel[0] * conv.kernel[1]
    columns = F.unfold(
        x, conv.kernel, dilation=conv.dilation, padding=conv.padding, stride=conv.stride
    )  # (batch, channel * taps, positions)
    columns = columns.unflatten(1, (x.shape[1], taps)).transpose(1, 2).flatten(1, 2)
    return columns.transpose(0, 1).flatten(1), dy.flatten(2).transpose(0, 1).flatten(1)


BATCHES = [batch(c, n) for c in CONVOLUTIONS for n in (1, 6)] + [
    batch(CONVOLUTIONS[0], 6, linear=True)
]


@pytest.mark.parametrize("given_", BATCHES)
@pytest.mark.parametrize("compiled", [True, False])
def test_unit_statistics(given_: Batch, compiled: bool) -> None:
    h, delta = patches(given_)
    shape = given_.dy.shape
    with reference() if not compiled else threads(2):
        f, g = sampling.grabo(given_, STREAM)
        torch.testing.assert_close(f, h.abs().sum(1))
        torch.testing.assert_close(g, delta.abs().sum(1))
        f, g = sampling.graest(given_, STREAM)
        stream = STREAM._replace(purpose=sampling.SIGNS)
        s = kernels.signs(stream, shape[0], tuple(shape[2:]), given_.dy)
        s = s.flatten(1).flatten()  # by sample, then position
        torch.testing.assert_close(f, (h @ s).abs())
        torch.testing.assert_close(g, (delta @ s).abs())


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(0, 999), st.sampled_from(CONVOLUTIONS), st.booleans())
def test_grabo_bounds_the_gradient(n: int, seed: int, conv: Convolution, linear: bool) -> None:
    given_ = batch(conv, n, seed, linear)
    h, delta = patches(given_)
    f, g = sampling.grabo(given_, STREAM)
    assert f is not None and g is not None  # noqa: PT018
    gradient, bound = (delta @ h.t()).abs(), torch.outer(g, f)
    assert (gradient <= bound * (1 + 1e-9)).all()
    if linear and n == 1:
        torch.testing.assert_close(gradient, bound)


@pytest.mark.parametrize("linear", [True, False])
def test_graest_estimates_the_gradient_without_bias(linear: bool) -> None:
    given_ = batch(CONVOLUTIONS[1], 3, linear=linear)
    h, delta = patches(given_)
    rounds, gradient = 3000, delta @ h.t()
    sums = [sampling.signed_sums(given_, STREAM._replace(step=t)) for t in range(rounds)]
    estimates = torch.stack([torch.outer(g, f) for f, g in sums])
    error = (estimates.mean(0) - gradient) / (estimates.std(0) / rounds**0.5)
    # In standard errors: a sample of a standard normal distribution.
    assert error.abs().max() < 5
    assert abs(float(error.square().mean()) - 1) < 0.5


@needs_kernels
def test_signs_are_those_of_the_polynomial() -> None:
    like = torch.empty(0)
    for samples, positions in ((5, (3, 4)), (1, ()), (300, (40,)), (0, (3, 3))):
        (s,) = everywhere(lambda n=samples, p=positions: (kernels.signs(STREAM, n, p, like),))
        assert s.shape == (samples, 1, *positions)
        assert set(s.flatten().tolist()) <= {-1.0, 1.0}
    whole = kernels.signs(STREAM, 9, (4,), like)
    assert torch.equal(whole[5:], kernels.signs(STREAM, 4, (4,), like, first=5))


def test_signs_are_four_wise_independent() -> None:
    like = torch.empty(0)
    drawn = torch.stack(
        [kernels.signs(STREAM._replace(step=t), 5, (), like).flatten() for t in range(4000)]
    )
    for size in (1, 2, 3, 4):
        for index in itertools.combinations(range(5), size):
            assert abs(float(drawn[:, index].prod(1).mean())) < 5 / 4000**0.5


def test_magnitudes_of_strided_memory() -> None:
    x = torch.randn(1 << 18)
    for view in (x, x[::4], x.view(512, 512).t(), x[: 1 << 15, None].expand(-1, 4)):
        assert torch.equal(kernels.magnitude(view), view.abs())
