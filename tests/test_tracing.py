"""Layers and converted models under ``torch.jit.trace`` and ``torch.fx``."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rewire
from bodies import assert_close, normal
from rewire import SparseConv2d, SparseLinear
from rewire.methods import RigL

pytestmark = [
    pytest.mark.usefixtures("same_random_numbers"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    # Sizes of inputs are checked, which is no control flow that matters.
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


def cnn() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    return rewire.sparsify(model, sparsity=0.5)


def mlp() -> nn.Module:
    return rewire.sparsify(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), sparsity=0.5)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
    return rewire.sparsify(layer, sparsity=0.5)


# A model, and the shapes it is traced and used with.
MODELS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "linear": (lambda: SparseLinear(6, 5, sparsity=0.5), [(4, 6), (7, 6), (1, 6), (0, 6)]),
    "sequences": (lambda: SparseLinear(6, 5, sparsity=0.5), [(4, 2, 6), (1, 5, 6)]),
    "one sample": (lambda: SparseLinear(6, 5, bias=False, sparsity=0.5), [(6,)]),
    "convolution": (
        lambda: SparseConv2d(3, 4, 3, 2, 1, sparsity=0.5),
        [(4, 3, 6, 6), (9, 3, 6, 6), (1, 3, 8, 5)],
    ),
    "reflect": (
        lambda: SparseConv2d(3, 4, 3, padding=1, padding_mode="reflect", sparsity=0.5),
        [(4, 3, 6, 6), (9, 3, 6, 6)],
    ),
    "one image": (lambda: SparseConv2d(3, 4, 3, sparsity=0.5), [(3, 6, 6), (3, 7, 4)]),
    "cnn": (cnn, [(4, 3, 8, 8), (64, 3, 8, 8), (128, 3, 8, 8), (1, 3, 8, 8)]),
    "mlp": (mlp, [(1, 6), (9, 6)]),
    "transposed": (
        lambda: rewire.SparseConvTranspose2d(3, 4, 3, 2, 1, sparsity=0.5),
        [(4, 3, 6, 6), (9, 3, 5, 7), (1, 3, 6, 6)],
    ),
    "three dimensions": (
        lambda: rewire.SparseConv3d(2, 4, 3, padding=1, sparsity=0.5),
        [(4, 2, 4, 5, 6), (3, 2, 5, 4, 3)],
    ),
    "one dimension": (
        lambda: rewire.SparseConv1d(2, 4, 3, padding=1, sparsity=0.5),
        [(4, 2, 7), (3, 2, 9)],
    ),
    "encoder": (encoder, [(3, 5, 6), (2, 7, 6)]),
}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_traced_model(name: str, training: bool, recorded: bool) -> None:
    make, shapes = MODELS[name]
    model = make().double().train(training)
    with torch.set_grad_enabled(recorded):
        traced: Any = torch.jit.trace(copy.deepcopy(model), normal(*shapes[0]))  # type: ignore[no-untyped-call]
    names = {n for n, _ in model.named_parameters()}
    for seed, shape in enumerate(shapes):
        if training and name == "cnn" and shape[0] == 1:
            continue
        x = normal(*shape, seed=seed + 1)
        y, expected = traced(x), model(x)
        assert_close(y.detach(), expected.detach())
        for m, output in ((traced, y), (model, expected)):
            m.zero_grad()
            output.square().sum().backward()
        right = {n: p.grad for n, p in model.named_parameters()}
        for n, p in traced.named_parameters():
            assert_close(p.grad, right[n])  # type: ignore[arg-type]
        assert names == {n for n, _ in traced.named_parameters()}


def test_a_traced_model_as_a_file() -> None:
    model, x = cnn().double().eval(), normal(5, 3, 8, 8)
    traced: Any = torch.jit.trace(model, normal(2, 3, 8, 8))  # type: ignore[no-untyped-call]
    file = io.BytesIO()
    torch.jit.save(traced, file)  # type: ignore[no-untyped-call]
    file.seek(0)
    loaded: Any = torch.jit.load(file)  # type: ignore[no-untyped-call]
    assert_close(loaded(x).detach(), model(x).detach())


def test_a_traced_call_has_nothing_for_a_rewirer() -> None:
    model = cnn().double()
    RigL(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1, until=10)
    with pytest.raises(RuntimeError, match="cannot be taken from a traced call"):
        torch.jit.trace(model, normal(2, 3, 8, 8))  # type: ignore[no-untyped-call]
