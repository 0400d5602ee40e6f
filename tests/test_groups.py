"""Grouped convolutions: connections inside of groups alone, in all that counts, draws and replaces them."""

import copy
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rewire
from rewire import Connections, MaskedConv2d, SparseConv2d, ops, sampling
from rewire.budgets import LayerSize, assign
from rewire.connections import Domain
from rewire.ops import sampling as kernels
from rewire.ops.dense import gradient_rows
from rewired import METHODS, keys, sgd
from some_layers import assert_as_dense, assert_state, seeded
from test_sampling import STREAM, everywhere

GROUPS = st.tuples(*[st.integers(1, 4)] * 3, st.integers(1, 3))  # groups, sides of each, taps


def possible(domain: Domain) -> list[tuple[int, int]]:
    """All connections, one after the other."""
    channels = domain.n_in // domain.taps
    group_in, group_out = channels // domain.groups, domain.n_out // domain.groups
    return [
        (o, tap * channels + c)
        for o, tap, c in itertools.product(range(domain.n_out), range(domain.taps), range(channels))
        if o // group_out == c // group_in
    ]


@settings(deadline=None)
@given(GROUPS)
def test_columns(sizes: tuple[int, int, int, int]) -> None:
    groups, inner, outer, taps = sizes
    domain = Domain(groups * inner * taps, groups * outer, groups, taps)
    every = torch.tensor(possible(domain))
    columns = torch.arange(domain.width).repeat(domain.n_out)
    assert len(every) == domain.size
    assert torch.equal(domain.columns(every[:, 0], every[:, 1]), columns)
    assert torch.equal(domain.inputs(every[:, 0], columns), every[:, 1])
    whole = domain.random(domain.size)
    assert torch.equal(torch.stack([whole.outputs(), whole.inputs()], 1), every)
    assert whole.density == 1


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@settings(max_examples=30, deadline=None)
@given(GROUPS, st.integers(1, 2), st.integers(0, 2), st.integers(0, 2**31), st.booleans())
def test_as_dense(
    sizes: tuple[int, int, int, int], stride: int, padding: int, seed: int, masked: bool
) -> None:
    groups, inner, outer, _ = sizes
    layer = SparseConv2d(
        *(groups * inner, groups * outer, (3, 2), stride, padding),
        groups=groups,
        dtype=torch.float64,
        sparsity=0.5,
        generator=seeded(seed),
    )
    layer.domain.check(layer.indptr, layer.indices)
    x = torch.randn(3, groups * inner, 6, 5, dtype=torch.float64, generator=seeded(seed))
    assert_as_dense(layer, x)
    twin = MaskedConv2d.from_sparse(layer)
    assert (twin.count, twin.density) == (layer.count, layer.density)
    torch.testing.assert_close(twin(x), layer(x))
    back = twin.to_sparse() if masked else SparseConv2d.from_dense(layer.to_dense(), twin.mask)
    assert_state(back, layer.state_dict())
    csr = SparseConv2d.from_sparse_csr(
        *(layer.to_sparse_csr(), layer.bias),
        kernel_size=(3, 2),
        stride=stride,
        padding=padding,
        groups=groups,
    )
    assert_state(csr, layer.state_dict())
    assert torch.equal(layer.to_sparse_csr().to_dense(), layer.to_dense().weight.flatten(1))


def test_fan_in_and_budgets() -> None:
    layer = SparseConv2d(64, 96, 3, groups=4, sparsity=0.9, generator=seeded(0))
    assert layer.count == 1383 == layer.connections.fan_in().sum()  # 96 * 16 * 9 / 10
    bound = (3 / layer.connections.fan_in()).sqrt().repeat_interleave(layer.connections.fan_in())
    assert (layer.values.flatten().abs() <= bound).all()
    assert layer.values.flatten().abs().max() > 0.9 * bound.min()
    size = LayerSize("conv", 64, 96, (3, 3), groups=4)
    assert (size.n_in, size.n_out, size.weights) == (576, 96, 13_824)
    # As four layers side by side.
    each = LayerSize("conv", 16, 24, (3, 3))
    other = LayerSize("linear", 300, 100)
    for assignment in ("erdos-renyi", "erk", "uniform"):
        grouped = assign([size, other], density=0.1, assignment=assignment)
        apart = assign([each] * 4 + [other], density=0.1, assignment=assignment)
        assert grouped[1] == apart[4]
        assert 0 <= sum(apart[:4]) - grouped[0] <= 4  # rounded up four times
    with pytest.raises(ValueError, match="groups must divide"):
        LayerSize("conv", 64, 96, groups=5)


# Drawing ------------------------------------------------------------------------------------------

DOMAIN = Domain(n_in=2 * 6, n_out=9, groups=3, taps=2)


def weights(n: int, seed: int) -> Tensor:
    return torch.rand(n, generator=seeded(seed), dtype=torch.float64) + 0.1


@pytest.mark.parametrize("given_", [(True, True), (True, False), (False, True), (False, False)])
def test_draws_are_the_same_everywhere(given_: tuple[bool, bool]) -> None:
    domain = Domain(n_in=3 * 60, n_out=90, groups=6, taps=3)
    active = domain.random(400, seeded(1))
    of = [weights(n, n) if use else None for n, use in zip((180, 90), given_, strict=True)]

    def found() -> Any:
        s = sampling.draw(active, 1.5, STREAM, tuple(of))  # type: ignore[arg-type]
        return s.indptr, s.indices

    indptr, indices = everywhere(found)
    subset = domain.of(indptr, indices)  # raises for a connection between groups
    assert 300 < len(subset) <= 600
    assert not keys(subset) & keys(active)


@pytest.mark.parametrize("case", ["both", "inputs", "outputs", "uniform", "dead group"])
def test_draws_follow_both_distributions_inside_groups(case: str) -> None:
    """The product of both, given that the units are of one group."""
    f, g = weights(12, 3), weights(9, 4)
    f = torch.ones(12) if case in ("outputs", "uniform") else f
    g = torch.ones(9) if case in ("inputs", "uniform") else g
    if case == "dead group":
        f.view(2, 3, 2)[:, 1] = 0.0
    tables = kernels.group_tables(f, g, DOMAIN.n_out, DOMAIN.groups, DOMAIN.taps)
    none = DOMAIN.random(0).packed()
    hits: Counter[tuple[int, int]] = Counter()
    trials = 4000
    for step in range(trials):
        found = kernels.draw(STREAM._replace(step=step), 1, 4, 9, sampling.rows(none), *tables, 3)
        one = DOMAIN.unpacked(Connections(4, 9, *found))
        hits[(int(one.outputs()), int(one.inputs()))] += 1
    every = possible(DOMAIN)
    assert set(hits) <= set(every)
    expected = torch.tensor([float(f[i] * g[o]) for o, i in every])
    expected = expected / expected.sum() * trials
    seen = torch.tensor([hits[pair] for pair in every])
    live = expected > 0
    assert not seen[~live].any()
    chi = ((seen - expected)[live] ** 2 / expected[live]).sum()
    freedom = int(live.sum()) - 1
    assert chi < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_weights_that_define_no_distribution(bad: float) -> None:
    active = DOMAIN.random(8, seeded(0))
    broken, fine = torch.full((12,), bad), weights(9, 1)
    for given_, same in (((broken, fine), (None, fine)), ((broken, broken[:9]), (None, None))):
        found, expected = (sampling.draw(active, 1.0, STREAM, w) for w in (given_, same))
        assert keys(found) == keys(expected)


@settings(deadline=None)
@given(GROUPS, st.floats(0, 1), st.data())
def test_choices_and_complements(
    sizes: tuple[int, int, int, int], density: float, data: st.DataObject
) -> None:
    groups, inner, outer, taps = sizes
    domain = Domain(groups * inner * taps, groups * outer, groups, taps)
    active = domain.random(round(density * domain.size), seeded(0))
    every = {o * domain.n_in + i for o, i in possible(domain)}
    free = every - keys(active)
    assert keys(sampling.inactive(active)) == free
    count = data.draw(st.integers(0, len(free) + 2))
    chosen = sampling.choose(active, count, STREAM)
    assert keys(chosen) <= free
    assert len(chosen) == min(count, len(free))


def test_choices_are_uniform() -> None:
    active, trials = DOMAIN.random(6, seeded(5)), 3000
    hits = Counter(
        key
        for step in range(trials)
        for key in keys(sampling.choose(active, 3, STREAM._replace(step=step)))
    )
    share = 3 * trials / (DOMAIN.size - 6)
    assert len(hits) == DOMAIN.size - 6
    assert all(abs(n - share) < 5 * share**0.5 for n in hits.values())


def test_large_layers_take_little_memory() -> None:
    """7e11 connections between all units, a million inside of groups."""
    layer = SparseConv2d(2**20, 2**16, 1, groups=2**16, connections=5000, bias=False)
    assert layer.domain.size == 2**20
    subset = sampling.draw(layer.connections, 1.0, STREAM, (weights(2**20, 0), weights(2**16, 1)))
    assert not keys(subset) & keys(layer.connections)


# Rewiring -----------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 8, 3, stride=2, groups=4)
        self.last = nn.Linear(8 * 9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        return self.last(F.relu(self.conv2(x)).flatten(1))  # type: ignore[no-any-return]


def net(storage: str = "sparse", **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return rewire.sparsify(Net(), **{"sparsity": 0.6, "storage": storage} | options)


def backward(model: nn.Module, step: int) -> None:
    x = torch.randn(6, 2, 8, 8, generator=seeded(step))
    F.cross_entropy(model(x), torch.arange(6) % 4).backward()


def train(model: nn.Module, optimizer: Any, rewirer: rewire.Rewirer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        rewirer.step()


def grouped(model: nn.Module) -> rewire.ConnectedLayer:
    layer = model.get_submodule("conv2")
    assert isinstance(layer, rewire.ConnectedLayer)
    return layer


@pytest.mark.parametrize("storage", ["sparse", "masked"])
@pytest.mark.parametrize("method", list(METHODS))
def test_methods_keep_to_the_domain(method: str, storage: str) -> None:
    model = net(storage)
    before, total = keys(grouped(model).connections), rewire.summary(model, show=False).connections
    rewirer = METHODS[method](model, optimizer := sgd(model))
    train(model, optimizer, rewirer, range(6))
    layer = grouped(model)
    assert layer.domain == Domain(12 * 9, 8, 4, 9)
    layer.domain.check(layer.connections.indptr, layer.connections.indices)
    assert rewire.summary(model, show=False).connections == total
    assert (keys(layer.connections) != before) == (method != "static")
    for rewiring in rewirer.history:
        part = rewiring.layers["conv2"]
        assert part.active <= part.ever <= part.possible == 8 * 27
    # Saved in the middle and taken up again, training goes on the same way.
    twin = net(storage)
    other = METHODS[method](twin, again := sgd(twin))
    twin.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(copy.deepcopy(rewirer.state_dict()))
    for m, o, r in ((model, optimizer, rewirer), (twin, again, other)):
        train(m, o, r, range(6, 10))
    assert_state(twin, model.state_dict())


def test_topkast_keeps_to_the_domain() -> None:
    model = net("masked", weights="dense")
    rewirer = rewire.TopKAST(model, optimizer := sgd(model), every=2)
    train(model, optimizer, rewirer, range(4))
    assert grouped(model).count == net().get_submodule("conv2").count
    assert rewirer.history[-1].layers["conv2"].possible == 8 * 27


def test_rigl_grows_the_largest_gradients_inside_groups() -> None:
    model = net()
    rewirer = rewire.RigL(model, optimizer := sgd(model), every=1, until=10, scope="layer")
    dense = rewire.densify(copy.deepcopy(model))
    backward(model, 0)
    backward(dense, 0)
    layer = grouped(model)
    active, weight = layer.connections, dense.get_submodule("conv2").weight
    grad = weight.grad.permute(0, 2, 3, 1).flatten(1).clone()  # type: ignore[union-attr,operator]
    grad[active.outputs(), active.columns()] = 0
    optimizer.step()
    rewiring = rewirer.step()
    assert rewiring is not None
    grown = [k for k in layer.connections.keys().tolist() if k not in keys(active)]
    best = grad.abs().flatten().topk(len(grown)).indices
    expected = Connections.from_keys(best, 27, 8)
    assert set(grown) == keys(layer.domain.unpacked(expected))
    assert rewiring.layers["conv2"].subset == layer.domain.size - len(active)


@settings(deadline=None)
@given(st.integers(0, 8), st.integers(0, 8))
def test_blocks_of_the_dense_gradient(first: int, last: int) -> None:
    """Also those that begin and end inside of groups."""
    first, last = sorted((first, last))
    conv = nn.Conv2d(12, 8, 3, stride=2, padding=1, groups=4, dtype=torch.float64)
    x = torch.randn(3, 12, 5, 6, dtype=torch.float64, generator=seeded(0))
    y = conv(x)
    dy = torch.randn(y.shape, dtype=torch.float64, generator=seeded(1))
    (grad,) = torch.autograd.grad(y, conv.weight, dy)
    layer = SparseConv2d.from_dense(conv, sparsity=0.5)
    rows = gradient_rows(layer.sizes, dy, x, first, last, layer.domain)
    torch.testing.assert_close(rows, grad.permute(0, 2, 3, 1).flatten(1)[first:last])


# State --------------------------------------------------------------------------------------------


def test_connections_between_groups_are_refused() -> None:
    layer = SparseConv2d(4, 6, 1, groups=2, connections=5)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    bad = Connections.from_keys(torch.tensor([0 * 4 + 1, 4 * 4 + 1]), 4, 6)
    message = (
        "unit 4 has a connection from channel 1, but belongs to group 1 of 2, with channels 2 to 3"
    )
    with pytest.raises(ops.TopologyError, match=message):
        layer.set_connections(bad, torch.zeros(2))
    with pytest.raises(ops.TopologyError, match=message):
        SparseConv2d(4, 6, 1, groups=2, connections=bad)
    state = {"indptr": bad.indptr, "indices": bad.indices, "values": torch.zeros(2, 1)}
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict({**before, **state})
    assert_state(layer, before)
    with pytest.raises(ValueError, match="between 0 and 6 \\* 2 = 12, got 13"):
        SparseConv2d(4, 6, 1, groups=2, connections=13)
    good = Connections.from_keys(torch.tensor([0 * 4 + 1, 4 * 4 + 3]), 4, 6)
    layer.set_connections(good, torch.ones(2))
    assert layer.connections.groups == 2


def test_saving(tmp_path: Any) -> None:
    model = net()
    rewire.save(model, tmp_path / "model.safetensors")
    loaded = rewire.load(tmp_path / "model.safetensors", Net())
    assert_state(loaded, model.state_dict())
    dense = Net()
    dense.load_state_dict(rewire.dense_state_dict(model))
    x = torch.randn(2, 2, 8, 8)
    torch.testing.assert_close(dense.eval()(x), model.eval()(x))


def test_summary_and_text() -> None:
    model = net(density={"conv2": 0.25}, sparsity=None)
    (row,) = [row for row in rewire.summary(model, show=False).layers if row.sparse]
    assert (row.shape, row.connections, row.weights) == ((8, 3, 3, 3), 54, 216)
    assert row.dense_memory == 4 * (216 + 8)
    assert "groups=4, bias=True, connections=54 of 216 (25 %)" in repr(model.get_submodule("conv2"))
