"""What the tests of sparse layers share: one of each kind, data for it, and the dense layer it equals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rewire import SparseConv2d, SparseLinear

Layer = SparseLinear | SparseConv2d


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(seed: int = 0, **options: Any) -> SparseLinear:
    options = {"sparsity": 0.75, "generator": seeded(seed)} | options
    return SparseLinear(12, 9, **options)


def conv(seed: int = 0, **options: Any) -> SparseConv2d:
    options = {"sparsity": 0.75, "generator": seeded(seed), "padding": 1, "stride": 2} | options
    return SparseConv2d(4, 6, (3, 2), **options)


def data(layer: Layer, batch: int = 5, seed: int = 7) -> Tensor:
    shape = (batch, 12) if isinstance(layer, SparseLinear) else (batch, 4, 6, 7)
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(layer.values.dtype)


both = pytest.mark.parametrize("make", [linear, conv])
Make = Callable[..., Layer]


def assert_as_dense(layer: Layer, x: Tensor | None = None) -> None:
    """Output and gradients are those of the dense layer."""
    dense = layer.to_dense()
    x = data(layer) if x is None else x
    inputs = [x.detach().clone().requires_grad_() for _ in range(2)]
    y, expected = layer(inputs[0]), dense(inputs[1])
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y, expected, **close)
    layer.zero_grad()
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, **close)
    assert dense.weight.grad is not None
    grad = flat(dense.weight.grad)[layer.connections.outputs(), layer.connections.columns()]
    torch.testing.assert_close(layer.values.grad, grad[:, None], **close)
    if layer.bias is not None and dense.bias is not None:
        torch.testing.assert_close(layer.bias.grad, dense.bias.grad, **close)


def flat(weight: Tensor) -> Tensor:
    """A dense weight with its columns in our order: taps first."""
    return weight if weight.dim() == 2 else weight.permute(0, 2, 3, 1).flatten(1)


def assert_state(layer: nn.Module, expected: dict[str, Tensor]) -> None:
    state = layer.state_dict()
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
        assert state[name].dtype == tensor.dtype
