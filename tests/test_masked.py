"""Masked twins: the same functions, the same rewirings, and weights that stay where they belong."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from rewire import MaskedConv2d, MaskedLinear, SparseConv2d, SparseLinear
from rewired import dense_gradients

METHODS: dict[str, Any] = {
    "gse": rewire.GSE,
    "grabo": lambda m, o, **k: rewire.GSE(m, o, distribution="grabo", **k),
    "graest": lambda m, o, **k: rewire.GSE(m, o, distribution="graest", **k),
    "gse layer": lambda m, o, **k: rewire.GSE(m, o, scope="layer", **k),
    "set": rewire.SET,
    "rigl": rewire.RigL,
    "rigl layer": lambda m, o, **k: rewire.RigL(m, o, scope="layer", **k),
    "snfs": rewire.SNFS,
    "snfs layer": lambda m, o, **k: rewire.SNFS(m, o, scope="layer", **k),
    "dsr": lambda m, o, **k: rewire.DSR(m, o, threshold=0.02, **k),
    "deepr": lambda m, o, every, until: rewire.DeepR(m, o, l1=0.02, temperature=0.01),
    "deepr global": lambda m, o, every, until: rewire.DeepR(m, o, l1=0.02, scope="global"),
    "static": rewire.Static,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2, padding="valid")
        self.fc1 = nn.Linear(8 * 9, 20)
        self.fc2 = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        x = F.relu(self.conv2(x)).flatten(1)
        return self.fc2(torch.tanh(self.fc1(x)))  # type: ignore[no-any-return]


def net(storage: str, sparsity: float = 0.8, **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net().double()
    return rewire.sparsify(model, sparsity=sparsity, storage=storage, **options)


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 2, 8, 8, generator=generator, dtype=torch.float64)
    y = model(x)
    # The gradient of the cross entropy alone sums to zero over classes: GraEst's probabilities would be
    # such as 1/2 to the last bit, and rounding, not the model, would decide what is drawn.
    (F.cross_entropy(y, torch.arange(6) % 4) + 0.1 * y[:, 0].square().mean()).backward()


def layers(model: nn.Module) -> dict[str, rewire.ConnectedLayer]:
    return {n: m for n, m in model.named_modules() if isinstance(m, rewire.ConnectedLayer)}


def topology(model: nn.Module) -> dict[str, list[int]]:
    return {name: layer.connections.keys().tolist() for name, layer in layers(model).items()}


def weights(layer: rewire.ConnectedLayer) -> Tensor:
    return layer.gather(layer.parameter.detach())


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, **options}
    return torch.optim.SGD(model.parameters(), **settings)


# Layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: SparseLinear(12, 7, sparsity=0.6, dtype=torch.float64),
        lambda: SparseLinear(12, 7, bias=False, sparsity=0.6, dtype=torch.float64),
        lambda: SparseConv2d(3, 5, 3, 2, 1, sparsity=0.6, dtype=torch.float64),
        lambda: SparseConv2d(
            *(3, 5, (2, 3)), padding="same", bias=False, sparsity=0.6, dtype=torch.float64
        ),
        lambda: SparseConv2d(
            *(3, 5, 3), padding=1, padding_mode="circular", sparsity=0.6, dtype=torch.float64
        ),
    ],
)
def test_twins_compute_alike(make: Any) -> None:
    sparse = make()
    linear = isinstance(sparse, SparseLinear)
    masked = (MaskedLinear if linear else MaskedConv2d).from_sparse(sparse)
    x = torch.randn(*((2, 4, 12) if linear else (4, 3, 9, 8)), dtype=torch.float64)
    seen: list[tuple[Any, Tensor, Tensor]] = []
    outputs = []
    for layer in (sparse, masked):
        layer.probe = lambda *what: seen.append(what)
        copied = x.clone().requires_grad_()
        y = layer(copied)
        y.square().sum().backward()
        outputs.append((y, copied.grad, layer.gather(layer.parameter.grad)))
    for a, b in zip(*outputs, strict=True):
        torch.testing.assert_close(a, b)
    assert seen[0][0].kernel == seen[1][0].kernel
    for a, b in zip(seen[0][1:], seen[1][1:], strict=True):
        torch.testing.assert_close(a, b)
    assert masked.connections.keys().tolist() == sparse.connections.keys().tolist()
    back = masked.to_sparse()
    assert torch.equal(back.values, sparse.values)
    assert torch.equal(back.indices, sparse.indices)
    assert torch.equal(masked.to_dense().weight, sparse.to_dense().weight)
    assert repr(masked).count("connections=") == 1
    assert not masked.weight[~masked.mask].any()


def test_masked_state_travels() -> None:
    a, b = net("masked"), net("masked", sparsity=0.9)
    assert topology(a) != topology(b)
    b.load_state_dict(a.state_dict())
    assert topology(a) == topology(b)
    assert topology(copy.deepcopy(a)) == topology(a)
    dense = rewire.densify(copy.deepcopy(a))
    x = torch.randn(3, 2, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(dense.eval()(x), a.eval()(x))


def test_masked_and_sparse_models_start_alike() -> None:
    sparse, masked = net("sparse"), net("masked")
    assert topology(sparse) == topology(masked)
    for a, b in zip(layers(sparse).values(), layers(masked).values(), strict=True):
        assert torch.equal(weights(a), weights(b))
    x = torch.randn(5, 2, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(sparse(x), masked(x))
    dense = net("masked", weights="dense")
    for layer in layers(dense).values():
        assert isinstance(layer, rewire.MaskedLayer)
        magnitudes = layer.weight.detach().abs()
        assert magnitudes[~layer.mask].all()
        assert magnitudes[layer.mask].min() >= magnitudes[~layer.mask].max()
    assert (
        rewire.summary(masked, show=False).connections
        == rewire.summary(sparse, show=False).connections
    )


def test_masked_attention_computes_what_sparse_attention_does() -> None:
    found = {}
    for storage in ("sparse", "masked"):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True).double()
        rewire.sparsify(model, sparsity=0.6, storage=storage)
        torch.manual_seed(1)
        x = torch.randn(2, 5, 8, dtype=torch.float64)
        for mode in (True, False):
            found[storage, mode] = model.train(mode)(x)
        counts = [layer.count for layer in layers(model).values()]
        assert len(counts) == 6
    for mode in (True, False):
        torch.testing.assert_close(found["sparse", mode], found["masked", mode])
    dense = rewire.densify(model)
    assert isinstance(dense.self_attn, nn.MultiheadAttention)
    torch.testing.assert_close(dense.eval()(x), found["masked", False])


def test_bad_storage() -> None:
    with pytest.raises(ValueError, match="storage"):
        net("csr")
    with pytest.raises(ValueError, match="masked"):
        net("sparse", weights="dense")


# Rewiring --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_rewirings_are_those_of_sparse_storage(name: str) -> None:
    """The first from equal state, and many more over float64 steps."""
    runs = []
    for storage in ("sparse", "masked"):
        model = net(storage)
        optimizer = sgd(model)
        rewirer = METHODS[name](model, optimizer, every=3, until=60)
        runs.append((model, optimizer, rewirer))
    start = topology(runs[0][0])
    for step in range(60):
        for model, optimizer, rewirer in runs:
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            rewirer.step()
        (a, first, _), (b, second, _) = runs
        assert topology(a) == topology(b), f"step {step}"
        for x, y in zip(layers(a).values(), layers(b).values(), strict=True):
            torch.testing.assert_close(weights(x), weights(y), rtol=1e-6, atol=1e-9)
            momentum = second.state[y.parameter]["momentum_buffer"]
            torch.testing.assert_close(
                x.gather(first.state[x.parameter]["momentum_buffer"]),
                y.gather(momentum),
                rtol=1e-6,
                atol=1e-9,
            )
    assert list(runs[0][2].history) == list(runs[1][2].history)
    assert name == "static" or topology(runs[0][0]) != start


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.3),
    lambda p: torch.optim.RMSprop(p, lr=0.001, momentum=0.9, centered=True),
    lambda p: torch.optim.Rprop(p, lr=0.001),
    lambda p: torch.optim.Adadelta(p),
    lambda p: torch.optim.NAdam(p),
    lambda p: torch.optim.ASGD(p),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("name", ["gse", "deepr", "snfs"])
def test_updates_respect_masks(make: Any, name: str) -> None:
    """Inactive weights stay zero, their optimizer state fresh, and what grows starts so too."""
    model = net("masked")
    optimizer = make(model.parameters())
    rewirer = METHODS[name](model, optimizer, every=3, until=60)
    before = {n: layer.count for n, layer in layers(model).items()}
    parameters = {n: layer.parameter for n, layer in layers(model).items()}
    rewired = False
    for step in range(8):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        old = topology(model)
        rewiring = rewirer.step()
        rewired |= rewiring is not None and rewiring.grown > 0
        for n, layer in layers(model).items():
            assert isinstance(layer, rewire.MaskedLayer)
            assert layer.weight is parameters[n]
            assert not layer.weight[~layer.mask].any()
            grown = torch.isin(layer.connections.keys(), torch.tensor(old[n])).logical_not()
            assert not weights(layer)[grown].any()
            for key, value in optimizer.state[layer.weight].items():
                if isinstance(value, Tensor) and value.shape == layer.weight.shape:
                    fresh = {"sum": 0.3, "step_size": 0.001}.get(key, 0.0)
                    assert (layer.gather(value)[grown] == fresh).all(), key
                    assert (value[~layer.mask] == fresh).all(), key
    assert sum(layer.count for layer in layers(model).values()) == sum(before.values())
    assert rewired


def test_dense_gradients_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """RigL and SNFS do the same whatever the size of a block."""
    from rewire.ops import dense

    def run(method: Any, block: int) -> Any:
        monkeypatch.setattr(dense, "BLOCK", block)
        model = net("sparse")
        optimizer = sgd(model)
        rewirer = method(model, optimizer, every=2, until=60)
        for step in range(6):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            rewirer.step()
        return topology(model)

    for method in (rewire.RigL, rewire.SNFS):
        assert run(method, 1 << 20) == run(method, 100) == run(method, 1)


# RigL and SNFS by definition -------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_rigl_grows_the_largest_of_the_dense_gradient(scope: str, parts: int) -> None:
    model = net("sparse")
    optimizer = sgd(model)
    rewirer = rewire.RigL(model, optimizer, every=1, until=9, fraction=lambda t: 0.3, scope=scope)
    total: dict[str, Tensor] = {}
    for part in range(parts):  # accumulated, as .grad is
        for name, gradient in dense_gradients(model, part, backward).items():
            total[name] = total.get(name, 0) + gradient
        backward(model, part)
    before = topology(model)
    optimizer.step()
    rewiring = rewirer.step()
    assert rewiring is not None
    assert rewiring.subset == sum(
        m.n_in * m.n_out - len(before[n]) for n, m in layers(model).items()
    )
    after = topology(model)
    groups = [list(before)] if scope == "global" else [[name] for name in before]
    for group in groups:
        k = math.ceil(0.3 * sum(len(before[n]) for n in group))
        scores = {
            (n, key): abs(float(g))
            for n in group
            for key, g in enumerate(total[n].flatten())
            if key not in set(before[n])
        }
        best = sorted(scores, key=lambda c: -scores[c])[:k]
        grown = {(n, key) for n in group for key in set(after[n]) - set(before[n])}
        assert grown == set(best)


def test_rigl_is_the_limit_of_gse() -> None:
    def run(method: Any, **options: Any) -> Any:
        model = net("sparse")
        optimizer = sgd(model)
        rewirer = method(model, optimizer, every=2, until=40, **options)
        for step in range(20):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            rewirer.step()
        return topology(model)

    assert run(rewire.RigL) == run(rewire.GSE, subset=math.inf)


def test_rigl_notices_inputs_that_change() -> None:
    layer = MaskedLinear.from_sparse(SparseLinear(50, 50, connections=100))
    rewirer = rewire.RigL(layer, sgd(layer), every=1, until=9)
    x = torch.randn(2, 50)
    layer(x).sum().backward()
    x.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        rewirer.step()


def test_snfs_by_definition() -> None:
    model = net("sparse")
    optimizer = sgd(model)
    rewirer = rewire.SNFS(model, optimizer, every=4, until=40, fraction=lambda t: 0.2)
    momentum = {n: torch.zeros(m.n_out, m.n_in).double() for n, m in layers(model).items()}
    for step in range(4):
        optimizer.zero_grad()
        for name, gradient in dense_gradients(model, step, backward).items():
            momentum[name] = 0.9 * momentum[name] + 0.1 * gradient
        backward(model, step)
        optimizer.step()
        if step < 3:
            assert rewirer.step() is None
    before = topology(model)
    rewiring = rewirer.step()
    assert rewiring is not None
    after = topology(model)
    mean = {n: float(m.flatten()[before[n]].abs().mean()) for n, m in momentum.items()}
    removed = sum(len(set(before[n]) - set(after[n])) for n in before)
    assert removed == math.ceil(0.2 * sum(map(len, before.values())))
    share = {n: removed * m / sum(mean.values()) for n, m in mean.items()}
    free = {n: m.numel() - len(before[n]) for n, m in momentum.items()}
    full = [n for n in share if share[n] > free[n]]
    memories = {view.name: view.memory["momentum"] for view in rewirer._views}
    for name, matrix in momentum.items():
        torch.testing.assert_close(memories[name], matrix)
        grown = set(after[name]) - set(before[name])
        if name in full:
            assert len(grown) == free[name]
        else:  # and more, where others are full
            assert math.floor(share[name]) <= len(grown)
            assert full or len(grown) <= math.ceil(share[name])
        scores = matrix.flatten().abs()
        scores[before[name]] = -1
        assert grown == set(scores.topk(len(grown)).indices.tolist())
