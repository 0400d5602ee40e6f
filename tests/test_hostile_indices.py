"""Index tensors that were changed behind torch's version counter: products raise, and never follow them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rewire
from rewire import ops
from rewire.nn import SparseConv2d, SparseLinear

FAR = 2**30
VECTORS = ("indptr", "indices", "slots", "outputs", "order")


def linear() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return SparseLinear(24, 16, connections=60), torch.randn(130, 24)


def few() -> tuple[nn.Module, Tensor]:
    layer, x = linear()
    return layer, x[:2]


def conv() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return SparseConv2d(4, 6, 3, padding=1, connections=70), torch.randn(3, 4, 8, 8)


def model() -> tuple[nn.Module, Tensor]:
    """Recorded by the engine."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5)
    )
    return rewire.sparsify(plain, sparsity=0.5), torch.randn(40, 4, 4, 4)


MAKERS = [linear, few, conv, model]


def first(module: nn.Module) -> Any:
    return next(m for m in module.modules() if isinstance(m, SparseLinear | SparseConv2d))


def use(module: nn.Module, x: Tensor) -> None:
    module(x).sum().item()
    module(x).sum().backward()


def past_numpy(tensor: Tensor, value: int) -> None:
    tensor.numpy()[tensor.numel() // 2] = value


def past_data(tensor: Tensor, value: int) -> None:
    tensor.data[tensor.numel() // 2] = value


def past_inference(tensor: Tensor, value: int) -> None:
    with torch.inference_mode():
        tensor[tensor.numel() // 2] = value


WRITES = [past_numpy, past_data, past_inference]


@pytest.mark.parametrize("value", [FAR, -FAR, -1])
@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("make", MAKERS)
def test_a_write_that_torch_does_not_count(
    make: Callable[[], Any], write: Callable[[Tensor, int], None], name: str, value: int
) -> None:
    module, x = make()
    x.requires_grad_()  # for that, connections are read by input
    module(x).sum().backward()  # everything is known to be sound
    write(getattr(first(module), name), value)
    with pytest.raises(ValueError, match=r".+"):  # a TopologyError is one, too
        use(module, x)


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("make", MAKERS)
def test_a_write_between_forward_and_backward(make: Callable[[], Any], name: str) -> None:
    module, x = make()
    layer = first(module)
    x.requires_grad_()
    loss = module(x).square().sum()
    loss.item()
    past_numpy(getattr(layer, name), FAR)
    if name in ("indptr", "indices"):  # they are read by forward passes
        with pytest.raises(ValueError, match=r".+"):
            use(module, x)
    else:
        with pytest.raises(ValueError, match=name):
            loss.backward()


def shorter(tensor: Tensor) -> None:
    tensor.data = tensor.data[:-1].clone()


def longer(tensor: Tensor) -> None:
    tensor.data = torch.cat([tensor.data, tensor.data])


def spread(tensor: Tensor) -> None:
    tensor.data = torch.zeros(1, dtype=torch.int32).expand(tensor.numel())


def small(tensor: Tensor) -> None:
    tensor.data = tensor.data.to(torch.int8)


def empty(tensor: Tensor) -> None:
    tensor.resize_(0)


def gone(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


CHANGES = [shorter, longer, spread, small, empty, gone]


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", MAKERS)
def test_other_memory(make: Callable[[], Any], change: Callable[[Tensor], None], name: str) -> None:
    module, x = make()
    module(x).sum().backward()
    change(getattr(first(module), name))
    with pytest.raises((ValueError, RuntimeError)):
        module(x).sum().backward()


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("change", [shorter, longer, spread, small])
@pytest.mark.parametrize("make", [linear, few, conv])
def test_other_memory_between_forward_and_backward_is_not_read(
    make: Callable[[], Any], change: Callable[[Tensor], None], name: str
) -> None:
    module, x = make()
    x.requires_grad_()
    module(x).square().sum().backward()
    expected, x.grad = x.grad, None
    loss = module(x).square().sum()
    change(getattr(module, name))
    loss.backward()
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)


def test_a_sound_change_past_the_counter_is_followed() -> None:
    """As by hand-written averages, which copy all buffers through ``.data``."""
    (layer, x), (other, _) = few(), few()
    torch.manual_seed(1)
    other = SparseLinear(24, 16, connections=60)
    other.values.data.copy_(layer.values.data)
    other.bias.data.copy_(layer.bias.data)
    layer(x)
    for mine, its in zip(layer.buffers(), other.buffers(), strict=True):
        mine.data.copy_(its.data)
    torch.testing.assert_close(layer(x), other(x), rtol=0, atol=0)
    large = torch.randn(200, 24)
    torch.testing.assert_close(layer(large), other(large), rtol=0, atol=0)


def test_a_row_out_of_order_is_refused_by_convolutions() -> None:
    """They look for the taps of a row by bisection: an unsorted one would be read outside of the image."""
    layer, x = conv()
    layer(x)
    begin = int(layer.indptr[1:][layer.indptr.diff() > 1][0]) - 1
    rows = layer.indptr.diff().argmax()
    begin, end = int(layer.indptr[rows]), int(layer.indptr[rows + 1])
    layer.indices.numpy()[begin:end] = layer.indices.numpy()[begin:end][::-1].copy()
    with pytest.raises(ValueError, match="ascend"):
        layer(x)


def test_the_operators_are_no_way_around() -> None:
    layer, x = linear()
    topology = layer.topology
    ops.linear(x, layer.values, layer.bias, topology)
    topology.indices.numpy()[0] = FAR
    with pytest.raises(ValueError, match="indices"):
        torch.ops.rewire.linear(x, layer.values, layer.bias, *topology)


def test_copies_of_a_model_hold_their_own_connections() -> None:
    layer, x = few()
    layer(x)
    other = copy.deepcopy(layer)
    y = other(x)
    layer.indices.numpy()[0] = FAR
    torch.testing.assert_close(other(x), y, rtol=0, atol=0)
    torch.testing.assert_close(other(x), y, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [model, few, conv])
def test_parameters_of_another_type_between_forward_and_backward(
    make: Callable[[], Any], dtype: torch.dtype
) -> None:
    """They are half as long, or twice: kernels would read past their end, and so of their gradients."""
    module, x = make()
    for name in dict(module.named_parameters()):
        module, x = make()
        parameter = module.get_parameter(name)
        loss = module(x.requires_grad_()).square().sum()
        parameter.data = parameter.data.to(dtype)
        try:
            loss.backward()
        except (ValueError, RuntimeError):
            continue
        assert make is not model  # the products of a layer by itself convert what they read
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
