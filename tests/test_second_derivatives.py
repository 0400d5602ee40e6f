"""Second derivatives of products and layers are those of finite differences and of dense PyTorch."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradgradcheck

from bodies import assert_close, normal
from products import LINEAR, Case, as_operator, make
from rewire import SparseConv2d, SparseLinear, use_engine
from rewire.ops import Convolution

CONVOLUTIONS = [
    Convolution((3, 3)),
    Convolution((3, 3), padding=(1, 1)),
    Convolution((3, 2), (2, 1), (1, 2)),
    Convolution((2, 3), (1, 2), (1, 1), (2, 1)),
    Convolution((1, 1), (2, 2)),
]


def cases() -> list[Case]:
    images = [make(conv, (2, 2, 4, 5), 3, 0.4, torch.float64) for conv in CONVOLUTIONS]
    return [*(make(LINEAR, (n, 6), 5, 0.5, torch.float64) for n in (4, 1)), *images]


@pytest.mark.parametrize("index", range(len(cases())))
@pytest.mark.parametrize("run", [Case.run, Case.run_and_relu, as_operator])
@pytest.mark.parametrize("bias", [False, True])
def test_products(index: int, run: Callable[..., Tensor], bias: bool) -> None:
    case = cases()[index]
    tensors = [case.x, case.values, *([case.bias] if bias else [])]
    for t in tensors:
        t.requires_grad_()

    def function(x: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
        return run(case, x, values, bias)

    assert gradgradcheck(function, tensors)
    for frozen in range(len(tensors)):  # a gradient that is not needed
        some = [t.detach().requires_grad_(i != frozen) for i, t in enumerate(tensors)]
        assert gradgradcheck(function, some)


@pytest.mark.parametrize("conv", [LINEAR, Convolution((3, 2), (2, 1), (1, 1))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(conv: Convolution, dtype: torch.dtype) -> None:
    """By the kernels for float32, by the reference for bfloat16."""
    case = make(conv, (4, 6) if conv is LINEAR else (4, 3, 5, 5), 5, 0.5, torch.float64)

    def penalty(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, values = (t.detach().to(dtype).requires_grad_() for t in (case.x, case.values))
        y = case.run(x, values, case.bias.to(dtype))
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), [x, values])

    for actual, right in zip(penalty(dtype), penalty(torch.float64), strict=True):
        assert actual.dtype == dtype
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
        assert_close(actual.double(), right, tolerance)


def test_third_derivative() -> None:
    case = make(Convolution((2, 2), padding=(1, 1)), (2, 2, 3, 3), 2, 0.6, torch.float64)
    x, values = case.x.requires_grad_(), case.values.requires_grad_()

    def gradient(x: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        y = case.run(x, values, case.bias)
        return torch.autograd.grad((y**3).sum(), [x, values], create_graph=True)

    assert gradgradcheck(gradient, [x, values])


LAYERS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: SparseLinear(6, 5, sparsity=0.5), (4, 6)),
    "linear without bias": (lambda: SparseLinear(6, 5, bias=False, sparsity=0.5), (4, 6)),
    "one sample": (lambda: SparseLinear(6, 5, sparsity=0.5), (6,)),
    "sequences": (lambda: SparseLinear(6, 5, sparsity=0.5), (2, 3, 6)),
    "convolution": (lambda: SparseConv2d(2, 3, 3, sparsity=0.5), (3, 2, 5, 5)),
    "one image": (lambda: SparseConv2d(2, 3, 3, sparsity=0.5), (2, 5, 5)),
    "strides": (
        lambda: SparseConv2d(2, 3, 3, 2, 1, bias=False, sparsity=0.5),
        (3, 2, 5, 5),
    ),
    "dilation": (lambda: SparseConv2d(2, 3, 3, 1, 2, 2, sparsity=0.5), (3, 2, 5, 5)),
    "reflect": (
        lambda: SparseConv2d(2, 3, 3, padding=1, padding_mode="reflect", sparsity=0.5),
        (3, 2, 4, 4),
    ),
    "no connections": (lambda: SparseLinear(6, 5, sparsity=1.0), (4, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("same_random_numbers")
def test_layers(name: str) -> None:
    make_layer, shape = LAYERS[name]
    layer = make_layer().double()
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        y: Tensor = torch.func.functional_call(layer, given, x)
        return y

    assert gradgradcheck(function, [normal(*shape).requires_grad_(), *parameters])


def test_an_input_that_depends_on_the_weights() -> None:
    """Direct dependence alone is the function's own; autograd sees to the other."""
    layer = SparseLinear(5, 5, sparsity=0.5, generator=torch.Generator().manual_seed(0)).double()
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU())
    use_engine(model)
    values, bias, c = layer.values, layer.bias, layer.connections

    def dense(x: Tensor) -> Tensor:
        weight = torch.zeros(5, 5, dtype=x.dtype).index_put(
            (c.outputs(), c.inputs()), values.view(-1)
        )
        return F.relu(F.linear(F.relu(F.linear(x, weight, bias)), weight, bias))

    def penalty(function: Callable[[Tensor], Tensor]) -> Sequence[Tensor]:
        y = function(function(normal(4, 5)))
        grads = torch.autograd.grad(y.square().sum(), [values, bias], create_graph=True)  # type: ignore[list-item]
        total = sum(g.square().sum() for g in grads) + y.sum()
        return torch.autograd.grad(total, [values, bias])  # type: ignore[list-item]

    right = penalty(dense)
    for function in (model, lambda x: F.relu(layer(F.relu(layer(x))))):
        for found, expected in zip(penalty(function), right, strict=True):
            assert_close(found, expected)
