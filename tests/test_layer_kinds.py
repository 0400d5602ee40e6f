"""What must be true of a sparse layer of every kind, and of its masked twin."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rewire
from rewire import flops, ops
from rewire.nn.kinds import KINDS, masked_kind, sparse_kind
from rewire.nn.shape import flatten
from rewired import METHODS, keys, sgd
from some_layers import assert_state, seeded

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}


class Kind(NamedTuple):
    dense: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of a batch


def of(kind: Any, *sizes: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(*sizes, **options, dtype=torch.float64)  # type: ignore[no-any-return]


LAYERS: dict[str, Kind] = {
    "linear": Kind(of(nn.Linear, 12, 9), (5, 12)),
    "linear of tokens": Kind(of(nn.Linear, 12, 9, bias=False), (2, 3, 12)),
    "conv1d": Kind(of(nn.Conv1d, 4, 6, 3, stride=2, padding=2, dilation=2), (3, 4, 11)),
    "conv1d same": Kind(of(nn.Conv1d, 4, 6, 4, padding="same", groups=2), (3, 4, 9)),
    "conv1d circular": Kind(of(nn.Conv1d, 4, 4, 3, padding=1, padding_mode="circular"), (3, 4, 9)),
    "conv2d": Kind(of(nn.Conv2d, 4, 6, (3, 2), stride=2, padding=1), (3, 4, 6, 5)),
    "conv2d groups": Kind(of(nn.Conv2d, 6, 9, 3, groups=3, bias=False), (3, 6, 5, 5)),
    "conv2d reflect": Kind(
        of(nn.Conv2d, 4, 4, 3, padding=(1, 2), padding_mode="reflect"), (3, 4, 5, 5)
    ),
    "conv2d same": Kind(of(nn.Conv2d, 4, 4, (2, 3), padding="same"), (3, 4, 5, 5)),
    "conv3d": Kind(
        of(nn.Conv3d, 2, 4, (3, 2, 3), stride=(2, 1, 2), padding=(1, 0, 2)), (2, 2, 5, 4, 5)
    ),
    "conv3d groups": Kind(of(nn.Conv3d, 4, 6, (2, 1, 3), dilation=2, groups=2), (2, 4, 4, 2, 7)),
    "conv3d replicate": Kind(
        of(nn.Conv3d, 2, 3, (3, 3, 2), padding=1, padding_mode="replicate"), (2, 2, 3, 3, 4)
    ),
    "conv3d flat": Kind(of(nn.Conv3d, 2, 3, (1, 2, 2), bias=False), (2, 2, 3, 3, 4)),
    "transposed 1d": Kind(
        of(nn.ConvTranspose1d, 4, 6, 4, stride=3, padding=1, output_padding=2, groups=2), (3, 4, 5)
    ),
    "transposed 2d": Kind(
        of(nn.ConvTranspose2d, 4, 6, (3, 2), stride=2, padding=(1, 0), output_padding=1),
        (3, 4, 3, 4),
    ),
    "transposed 2d groups": Kind(
        of(nn.ConvTranspose2d, 4, 2, 3, stride=(1, 2), groups=2, bias=False), (3, 4, 3, 4)
    ),
    "transposed 2d dilated": Kind(  # output padding beyond the stride
        of(nn.ConvTranspose2d, 4, 2, 2, stride=2, dilation=4, output_padding=3, padding=1),
        (3, 4, 3, 4),
    ),
}
every = pytest.mark.parametrize("name", LAYERS)


def dense_of(name: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return LAYERS[name].dense()


def sparse_of(name: str, **options: Any) -> Any:
    given_ = {"sparsity": 0.6, "weights": "fresh", "assignment": "uniform"} | options
    return rewire.sparsify(dense_of(name), **given_)


def batch(name: str, seed: int = 0) -> Tensor:
    return torch.randn(LAYERS[name].shape, generator=seeded(seed), dtype=torch.float64)


def columns(weight: Tensor) -> Tensor:
    return flatten(weight) if weight.dim() > 2 else weight


def assert_equal_to_dense(layer: Any, x: Tensor) -> None:
    """Output, all gradients and second derivatives."""
    dense = layer.to_dense()
    connections = layer.connections
    at = connections.outputs(), connections.columns()
    found = []
    for one in (layer, dense):
        mine = x.clone().requires_grad_()
        y = one(mine)
        weight = one.parameter if one is layer else one.weight
        wanted = [mine, weight] + ([] if one.bias is None else [one.bias])
        grads = torch.autograd.grad(y.sin().sum(), wanted, create_graph=True)
        loss = sum((g * g).sum() for g in (grads[0], *grads[2:]))
        loss = loss + (grads[1] ** 2 if one is layer else columns(grads[1])[at] ** 2).sum()
        again = torch.autograd.grad(loss, wanted[:2])
        numbers = [
            layer.gather(g) if one is layer else columns(g)[at] for g in (grads[1], again[1])
        ]
        found.append([y, grads[0], *grads[2:], again[0], *numbers])
        assert y.is_contiguous()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@every
@pytest.mark.parametrize("storage", ["sparse", "masked"])
def test_equals_the_dense_twin(name: str, storage: str) -> None:
    layer, dense = sparse_of(name, storage=storage), dense_of(name)
    kind = sparse_kind(dense) if storage == "sparse" else masked_kind(dense)
    assert type(layer) is kind
    assert type(layer.to_dense()) is type(dense)
    assert 0.3 < layer.density < 0.5
    assert layer.domain.size == dense.weight.numel()
    x = batch(name)
    assert_equal_to_dense(layer, x)
    if x.dim() > 2:
        torch.testing.assert_close(layer(x[0]), layer(x)[0], **CLOSE)
    if storage == "sparse":
        with ops_reference():
            torch.testing.assert_close(layer(x), layer.to_dense()(x), **CLOSE)


def ops_reference() -> Any:
    from test_sampling import reference

    return reference()


@every
def test_gradcheck(name: str) -> None:
    layer, x = sparse_of(name), batch(name)[:1].requires_grad_()
    tensors = [x, layer.values] + ([] if layer.bias is None else [layer.bias])
    torch.autograd.gradcheck(lambda *given_: layer(given_[0]), tensors)
    torch.autograd.gradgradcheck(lambda *given_: layer(given_[0]), tensors[:2])


@every
def test_conversion_there_and_back(name: str) -> None:
    dense = dense_of(name)
    kept = rewire.sparsify(copy.deepcopy(dense), sparsity=0.5, weights="keep")
    back = rewire.densify(copy.deepcopy(kept)).weight
    count = kept.count
    largest = dense.weight.abs().flatten().topk(count).indices
    expected = torch.zeros_like(dense.weight).flatten()
    expected[largest] = dense.weight.flatten()[largest]
    assert torch.equal(back, expected.view_as(back))
    if dense.bias is not None:
        assert torch.equal(kept.bias, dense.bias)
    full = sparse_of(name, sparsity=None, density=1.0, weights="keep")
    torch.testing.assert_close(full(batch(name)), dense(batch(name)), **CLOSE)
    twin = masked_kind(dense).from_sparse(kept)
    assert_state(twin.to_sparse(), kept.state_dict())
    assert_state(twin.to_dense(), rewire.densify(kept).state_dict())


@every
def test_states(name: str) -> None:
    one, other = sparse_of(name), sparse_of(name, seed=1)
    assert not torch.equal(one.indices, other.indices)
    other.load_state_dict(one.state_dict())
    assert_state(other, one.state_dict())
    assert_equal_to_dense(other, batch(name))
    copied = copy.deepcopy(one)
    assert torch.equal(copied(batch(name)), one(batch(name)))
    before = copy.deepcopy(one.state_dict())
    hostile: list[dict[str, Tensor]] = [
        {"indices": one.indices.flip(0)},
        {"indices": torch.full_like(one.indices, one.n_in)},
        {"indices": -1 - one.indices},
        {"values": one.values.detach()[:-1]},
        {"indptr": one.indptr[:-1]},
    ]
    for change in hostile:
        with pytest.raises(RuntimeError):
            one.load_state_dict({**before, **change})
        assert_state(one, before)


@every
def test_values_start_with_unit_variance(name: str) -> None:
    """Of outputs in the middle, where inputs have variance 1: on average over all layers drawn."""
    outputs = []
    for seed in range(60):
        layer = sparse_of(name, seed=seed, sparsity=0.3)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
        outputs.append(layer(batch(name, seed)).detach().flatten())
    variance = float(torch.cat(outputs).var())
    assert variance < 1.35  # padding takes some of it
    assert variance > (0.8 if name.startswith("linear") else 0.25)


@every
@pytest.mark.parametrize("method", METHODS)
def test_methods(name: str, method: str) -> None:
    """Keep the number of connections and the domain, and resume exactly."""
    model = nn.Sequential(sparse_of(name))

    def train(model: nn.Module, optimizer: Any, rewirer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(batch(name, step)).square().mean().backward()
            optimizer.step()
            rewirer.step()

    layer, before = model[0], keys(model[0].connections)
    rewirer = METHODS[method](model, optimizer := sgd(model))
    train(model, optimizer, rewirer, range(4))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), rewirer.state_dict()))
    assert layer.count == len(before)
    layer.domain.check(layer.indptr, layer.indices)
    if method in ("gse", "grabo", "set", "rigl", "snfs", "static"):
        assert (keys(layer.connections) != before) == (method != "static")
    torch.testing.assert_close(layer(batch(name)), layer.to_dense()(batch(name)), **CLOSE)
    twin = nn.Sequential(sparse_of(name))
    again = sgd(twin)
    other = METHODS[method](twin, again)
    for one, state in zip((twin, again, other), saved, strict=True):
        one.load_state_dict(state)
    train(model, optimizer, rewirer, range(4, 7))
    train(twin, again, other, range(4, 7))
    assert_state(twin, model.state_dict())


@every
@pytest.mark.parametrize("storage", ["sparse", "masked"])
def test_rigl_sees_the_dense_gradient(name: str, storage: str) -> None:
    """And grows its largest elements among the inactive connections."""
    model = nn.Sequential(sparse_of(name, storage=storage))
    layer, dense = model[0], model[0].to_dense()
    rewirer = rewire.RigL(model, sgd(model, lr=0.0), every=1, until=9, fraction=0.4)
    active = layer.connections
    for one in (model, dense):
        one(batch(name)).sin().sum().backward()
    grad = columns(dense.weight.grad).clone()
    grad[active.outputs(), active.columns()] = 0
    rewirer.optimizer.step()
    rewiring = rewirer.step()
    assert rewiring is not None
    assert rewiring.grown > 0
    new = keys(layer.connections) - keys(active)
    best = layer.domain.unpacked(
        rewire.Connections.from_keys(
            grad.abs().flatten().topk(rewiring.grown).indices, layer.domain.width, layer.n_out
        )
    )
    assert new == keys(best)


@every
@pytest.mark.parametrize("storage", ["sparse", "masked"])
def test_gse_sees_the_gradient_at_its_subset(name: str, storage: str) -> None:
    model = nn.Sequential(sparse_of(name, storage=storage))
    dense = model[0].to_dense()
    rewirer = rewire.GSE(model, sgd(model), every=1, until=9, distribution="graest")
    for one in (model, dense):
        one(batch(name)).sin().sum().backward()
    (subset,), (gradient,) = rewirer.subsets.values(), rewirer.gradients.values()
    assert len(subset) > 0
    expected = columns(dense.weight.grad)[subset.outputs(), subset.columns()]
    torch.testing.assert_close(gradient, expected, **CLOSE)


@every
def test_saved_and_loaded(name: str, tmp_path: Any) -> None:
    model = nn.Sequential(sparse_of(name))
    rewire.save(model, tmp_path / "m.safetensors")
    loaded = rewire.load(tmp_path / "m.safetensors", nn.Sequential(dense_of(name)))
    assert_state(loaded, model.state_dict())


@every
def test_shown(name: str) -> None:
    layer, dense = sparse_of(name), dense_of(name)
    (row,) = rewire.summary(layer, show=False).layers
    assert row.shape == tuple(dense.weight.shape)
    assert (row.weights, row.connections) == (dense.weight.numel(), layer.count)
    assert row.dense_memory == sum(8 * p.numel() for p in dense.parameters())
    text = repr(layer)
    assert text.startswith(f"Sparse{type(dense).__name__}(")
    assert f"connections={layer.count} of {dense.weight.numel()}" in text


def test_every_kind_is_here() -> None:
    assert {type(dense_of(name)) for name in LAYERS} == {*KINDS}


# Shapes -------------------------------------------------------------------------------------------

SIZES = st.tuples(
    st.integers(1, 2),  # groups
    st.integers(1, 3),  # channels of a group
    st.integers(1, 3),
    *[st.lists(st.integers(1, 3), min_size=3, max_size=3)] * 3,  # kernel, stride, dilation
    st.lists(st.integers(0, 2), min_size=3, max_size=3),  # padding
    st.lists(st.integers(0, 2), min_size=3, max_size=3),  # output padding
    st.lists(st.integers(1, 6), min_size=3, max_size=3),  # image
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([k for k in KINDS if k is not nn.Linear]), SIZES, st.integers(0, 99))
def test_any_shape(kind: Any, sizes: Any, seed: int) -> None:
    """As torch computes it, or refused where torch refuses."""
    groups, inner, outer, kernel, stride, dilation, padding, more, image = sizes
    dims = {"1": 1, "2": 2, "3": 3}[kind.__name__[-2]]
    options: dict[str, Any] = {
        "stride": tuple(stride[:dims]),
        "padding": tuple(padding[:dims]),
        "dilation": tuple(dilation[:dims]),
        "groups": groups,
    }
    if "Transpose" in kind.__name__:
        options["output_padding"] = tuple(
            min(m, max(s, d) - 1) for m, s, d in zip(more, stride, dilation, strict=True)
        )[:dims]
    channels = groups * inner, groups * outer
    dense = kind(*channels, tuple(kernel[:dims]), **options, dtype=torch.float64)
    layer = sparse_kind(dense).from_dense(dense, sparsity=0.5)  # type: ignore[union-attr]
    x = torch.randn(2, channels[0], *image[:dims], dtype=torch.float64, generator=seeded(seed))
    try:
        dense(x)
    except RuntimeError:
        with pytest.raises(ValueError, match="smaller"):
            layer(x)
        return
    assert_equal_to_dense(layer, x)


@pytest.mark.parametrize("name", ["transposed 1d", "transposed 2d"])
@pytest.mark.parametrize("storage", ["sparse", "masked"])
def test_output_size(name: str, storage: str) -> None:
    layer = sparse_of(name, storage=storage)
    dense, x = layer.to_dense(), batch(name)
    least = dense(x).shape[2:].numel() and [
        n - m for n, m in zip(dense(x).shape[2:], dense.output_padding, strict=True)
    ]
    for size in (least, [n + 1 for n in least], [*x.shape[:1], 6, *least]):
        torch.testing.assert_close(layer(x, size), dense(x, size), **CLOSE)
    with pytest.raises(ValueError, match="out of reach"):
        layer(x, [n + 9 for n in least])
    with pytest.raises(ValueError, match="elements"):
        layer(x, [1] * 7)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: rewire.SparseConv1d(4, 4, (3, 3), sparsity=0.5),
            "kernel_size must be one integer",
        ),
        (lambda: rewire.SparseConv3d(4, 4, (3, 3), sparsity=0.5), "one or three integers"),
        (lambda: rewire.SparseConv3d(4, 5, 3, groups=2, sparsity=0.5), "groups must divide"),
        (
            lambda: rewire.SparseConvTranspose2d(4, 4, 3, padding_mode="reflect", sparsity=0.5),
            "pad with zeros alone",
        ),
        (
            lambda: rewire.SparseConvTranspose1d(4, 4, 3, output_padding=1, sparsity=0.5),
            "output_padding must be smaller",
        ),
        (
            lambda: rewire.SparseConvTranspose1d(4, 4, 3, padding="same", sparsity=0.5),  # type: ignore[arg-type]
            "padding must be one integer",
        ),
        (
            lambda: rewire.SparseConv1d(4, 4, 3, sparsity=0.5)(torch.zeros(2, 5, 9)),
            r"an input of \(N, 4, L\)",
        ),
        (
            lambda: rewire.SparseConv3d(4, 4, 3, sparsity=0.5)(torch.zeros(2, 4, 2, 9, 9)),
            "a depth of 2 with its padding is smaller",
        ),
    ],
)
def test_refusals(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_work_is_that_of_the_connections() -> None:
    """Two operations for each connection and position, forward, and twice that backward."""
    for name in ("transposed 2d", "transposed 1d", "conv1d", "conv3d"):
        layer, x = sparse_of(name), batch(name)
        where = x if "transposed" in name else layer(x)
        work = 2 * where[:, 0].numel() * layer.count
        with FlopCounterMode(display=False) as counter:
            layer(x.requires_grad_()).sum().backward()
        assert counter.get_total_flops() == 3 * work
        assert flops.count(layer, tuple(x.shape[1:])).sparse * len(x) == work


def test_in_a_recorded_model() -> None:
    dense = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.ConvTranspose2d(8, 4, 2, stride=2), nn.ReLU(), nn.Conv2d(4, 2, 3, groups=2)),
    ).double()
    model = rewire.sparsify(dense, sparsity=0.5)
    twin = rewire.densify(copy.deepcopy(model))
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    for one in (model, twin):
        one(x).sin().sum().backward()
    torch.testing.assert_close(model(x), twin(x), **CLOSE)
    grad = columns(twin[3].weight.grad)
    active = model[3].connections
    expected = grad[active.outputs(), active.columns()]
    torch.testing.assert_close(model[3].values.grad.flatten(), expected, **CLOSE)
    assert ops.available()
