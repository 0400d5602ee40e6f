"""Values of sparse layers are a column, (n, 1); operators take them as they are, and 1-D ones too."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rewire
from products import LINEAR, Case, as_operator, conv3, dense_gradients, gradients, make, sizes_of
from rewire import SparseConv2d, SparseLinear
from rewire.ops import native

CASES = {"linear": (LINEAR, (6, 9), 5), "conv": (conv3(), (3, 2, 5, 6), 4)}


def eager(case: Case, x: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    return case.run(x, values, bias)


PATHS = {"eager": eager, "operator": as_operator}


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("memory", ["column", "vector", "strided column"])
@pytest.mark.parametrize("share", [0.5, 0.0])
def test_gradients_have_the_shape_of_the_values(
    share: float, memory: str, kind: str, path: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(native, "kernels", lambda x: None)
    case = make(*CASES[kind], share, torch.float64)
    count = case.values.numel()
    values = case.values
    if memory == "column":
        values = values[:, None]
    elif memory == "strided column":
        values = values[:, None].repeat(1, 2)[:, 1:]
    y, expected = dense_gradients(case, torch.float64)
    found, grads = gradients(
        lambda *given: PATHS[path](case, *given), (case.x, values, case.bias), case.dy, (True,) * 3
    )
    torch.testing.assert_close(found, y)
    grad = grads[1]
    assert grad is not None
    assert expected[1] is not None
    assert grad.shape == ((count,) if memory == "vector" else (count, 1))
    torch.testing.assert_close(grad.flatten(), expected[1])


@pytest.mark.parametrize("shape", [(1, -1), (-1, 2), (-1, 1, 1), ()])
@pytest.mark.parametrize("kind", CASES)
def test_other_shapes_are_refused(kind: str, shape: tuple[int, ...]) -> None:
    case = make(*CASES[kind], 0.5, torch.float64)
    values = (
        case.values[0] if shape == () else case.values[: case.values.numel() // 2 * 2].view(shape)
    )
    for run in (eager, as_operator):
        with pytest.raises(ValueError, match=r"values has shape .* expected one value for each"):
            run(case, case.x, values, case.bias)


LAYERS = {
    "linear": (lambda: SparseLinear(12, 9, sparsity=0.5, dtype=torch.float64), (5, 12)),
    "conv": (lambda: SparseConv2d(3, 4, 3, sparsity=0.5, dtype=torch.float64), (5, 3, 6, 6)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_nothing_stands_between_the_product_and_its_values(kind: str) -> None:
    make_layer, shape = LAYERS[kind]
    layer: Any = make_layer()
    y = layer(torch.randn(shape, dtype=torch.float64))
    leaves = [node.variable for node, _ in y.grad_fn.next_functions if hasattr(node, "variable")]
    assert any(leaf is layer.values for leaf in leaves)
    y.sum().backward()
    assert layer.values.grad.stride() == layer.values.stride()  # or autograd would copy it


@pytest.mark.parametrize("kind", LAYERS)
def test_exported_and_compiled_layers(kind: str) -> None:
    make_layer, shape = LAYERS[kind]
    layer: Any = make_layer()
    x = torch.randn(shape, dtype=torch.float64)
    y = layer(x)
    y.square().sum().backward()
    expected = layer.values.grad.clone()
    exported = torch.export.export(nn.Sequential(layer), (x,))
    assert exported.state_dict["0.values"].shape == (layer.count, 1)
    torch.testing.assert_close(exported.module()(x), y)
    layer.zero_grad()
    torch.compiler.reset()
    torch.compile(layer, backend="aot_eager")(x).square().sum().backward()
    assert layer.values.grad.shape == (layer.count, 1)
    torch.testing.assert_close(layer.values.grad, expected)


@pytest.mark.parametrize("kind", CASES)
def test_the_fake_rules_have_the_same_shapes(kind: str) -> None:
    case = make(*CASES[kind], 0.5, torch.float64)
    values = case.values[:, None].clone().requires_grad_()
    name, rest = ("linear", []) if kind == "linear" else ("conv2d", sizes_of(case.conv))
    operator = getattr(torch.ops.rewire, name).default
    torch.library.opcheck(operator, (case.x, values, case.bias, *case.topology, *rest))


@pytest.mark.parametrize("storage", ["sparse", "masked"])
def test_numbers_of_connections_are_vectors_whatever_the_storage(storage: str) -> None:
    model = rewire.sparsify(nn.Sequential(nn.Conv2d(2, 3, 3)), sparsity=0.5, storage=storage)
    layer = model[0]
    assert isinstance(layer, rewire.ConnectedLayer)
    vector = layer.gather(layer.parameter.detach())
    assert vector.shape == (layer.count,)
    assert torch.equal(layer.scatter(layer.connections, vector), layer.parameter)
    layer.assign(torch.arange(layer.count).float())
    assert layer.gather(layer.parameter.detach()).tolist() == list(range(layer.count))
