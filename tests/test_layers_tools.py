"""Copies and types of sparse layers, and torch's tools for modules."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rewire
from rewire import ConnectedLayer, Connections, SparseConv2d, SparseLinear, ops
from rewire.ops import native
from some_layers import Layer, Make, assert_as_dense, assert_state, both, data, flat, linear, seeded

# Copies, types and tools


def through_pickle(layer: Layer) -> Layer:
    copied: Layer = pickle.loads(pickle.dumps(layer))
    return copied


def through_torch_save(layer: Layer) -> Layer:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copied: Layer = torch.load(file, weights_only=False)
    return copied


@both
@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
def test_copies_are_independent(make: Make, duplicate: Callable[[Layer], Layer]) -> None:
    layer = make()
    layer(data(layer)).sum().backward()
    expected = layer(data(layer)).detach()
    copied = duplicate(layer)
    assert_state(copied, layer.state_dict())
    assert repr(copied) == repr(layer)
    assert torch.equal(copied(data(layer)), expected)
    with torch.no_grad():
        copied.values.zero_()
    new = Connections.random(layer.n_in, layer.n_out, 3, seeded(1))
    copied.set_connections(new, torch.ones(3))
    assert torch.equal(layer(data(layer)), expected)
    assert_as_dense(copied)
    assert_as_dense(layer)


def test_a_layer_of_ones_own_must_be_whole() -> None:
    class Half(ConnectedLayer):
        def assign(self, values: Tensor) -> None: ...

    with pytest.raises(TypeError, match="set_connections"):
        Half()  # type: ignore[abstract]


@both
def test_moving_between_types(make: Make) -> None:
    layer = make()
    x, kept = data(layer), copy.deepcopy(layer.state_dict())
    expected = layer(x).detach()
    assert layer.to(torch.float64) is layer
    assert layer.values.dtype == torch.float64
    assert layer.bias is not None
    assert layer.bias.dtype == torch.float64
    assert {t.dtype for t in (layer.indptr, layer.indices)} == {torch.int32}
    torch.testing.assert_close(layer(x.double()), expected.double(), rtol=1e-5, atol=1e-5)
    assert_as_dense(layer)
    with pytest.raises(ValueError, match=r"types differ.*\.to\(dtype\)"):
        layer(x)
    layer.float()
    assert_state(layer, kept)
    assert torch.equal(layer(x), expected)
    for half in (torch.float16, torch.bfloat16):
        layer.to(half)
        assert {t.dtype for t in (layer.indptr, layer.indices)} == {torch.int32}
        y = layer(x.to(half))
        assert y.dtype == half
        torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)
        layer.float()
        torch.testing.assert_close(layer(x), expected, rtol=0.05, atol=0.05)
    assert layer.half().values.dtype == torch.float16


@pytest.mark.skipif(not ops.available(), reason="without kernels all types are as slow")
@both
@pytest.mark.parametrize("half", [torch.float16])
@pytest.mark.parametrize("through", [lambda f: f, torch.no_grad()], ids=["grad", "no_grad"])
def test_half_precision_says_once_that_it_is_slow(
    make: Make, half: torch.dtype, through: Callable[[Any], Any]
) -> None:
    native.warn_of_reference.cache_clear()
    layer = make()
    run = through(lambda kind: layer.to(kind)(data(layer).to(kind)))
    name = str(half).removeprefix("torch.")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(torch.float32)
        run(torch.float64)
        with torch.autocast("cpu", dtype=half):
            run(torch.float32)
        assert not caught
        run(half)
        run(half)
        copy.deepcopy(layer)(data(layer).to(half))
    (warning,) = caught
    assert warning.category is rewire.PerformanceWarning
    assert issubclass(rewire.PerformanceWarning, UserWarning)
    assert f"in {name} they run on the plain PyTorch reference" in str(warning.message)
    assert "model.float()" in str(warning.message)


@both
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("ema", [False, True])
def test_averaged_models(make: Make, use_buffers: bool, ema: bool) -> None:
    layer = make()
    average_of = get_ema_multi_avg_fn(0.5) if ema else None
    averaged = AveragedModel(layer, multi_avg_fn=average_of, use_buffers=use_buffers)
    first = layer.values.detach().clone()
    averaged.update_parameters(layer)
    with torch.no_grad():
        layer.values.add_(1)
    averaged.update_parameters(layer)
    average: Any = averaged.module
    torch.testing.assert_close(average.values.detach(), first + 0.5)
    assert torch.equal(average.indices, layer.indices)
    assert average.indices.data_ptr() != layer.indices.data_ptr()
    torch.testing.assert_close(
        averaged(data(layer)), average.to_dense()(data(layer)), rtol=1e-5, atol=1e-5
    )
    assert_as_dense(layer)


@both
def test_functional_call(make: Make) -> None:
    layer = make()
    values = torch.randn(layer.values.shape, generator=seeded(3), requires_grad=True)
    y = torch.func.functional_call(layer, {"values": values}, (data(layer),))
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.values.copy_(values)
    assert torch.equal(y, other(data(layer)))
    (grad,) = torch.autograd.grad(y.square().sum(), values)
    (right,) = torch.autograd.grad(other(data(layer)).square().sum(), other.values)
    assert torch.equal(grad, right)


@both
def test_checkpointing(make: Make) -> None:
    layer = make()
    grads = []
    for run in (layer, partial(torch.utils.checkpoint.checkpoint, layer, use_reentrant=False)):
        x = data(layer).requires_grad_()
        layer.zero_grad()
        run(x).square().sum().backward()
        grads.append((x.grad, layer.values.grad))
    for with_it, without in zip(*grads, strict=True):
        assert torch.equal(with_it, without)


@both
def test_pruned_units_and_repeated_use(make: Make) -> None:
    # The same layer twice in one graph: gradients add up.
    layer = make()
    x = data(layer)
    (layer(x).sum() + layer(2 * x).square().sum()).backward()
    dense = layer.to_dense()
    (dense(x).sum() + dense(2 * x).square().sum()).backward()
    assert dense.weight.grad is not None
    c = layer.connections
    expected = flat(dense.weight.grad)[c.outputs(), c.inputs()]
    torch.testing.assert_close(layer.values.grad, expected[:, None], rtol=1e-4, atol=1e-4)


# torch.compile


def mlp() -> nn.Module:
    return nn.Sequential(
        SparseLinear(12, 20, sparsity=0.7, generator=seeded(0)),
        nn.ReLU(),
        SparseLinear(20, 5, sparsity=0.5, bias=False, generator=seeded(1)),
    )


def block() -> nn.Module:
    layers = nn.Sequential(
        SparseConv2d(4, 8, 3, padding=1, sparsity=0.7, generator=seeded(0)),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        SparseConv2d(8, 3, 2, stride=2, sparsity=0.7, bias=False, generator=seeded(0)),
    )
    return layers


def step(model: Any, called: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = called(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters()), *model.buffers()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("make", "shape"), [(mlp, (12,)), (block, (4, 6, 6))])
def test_compiled_models_do_the_same(make: Callable[[], Any], shape: tuple[int, ...]) -> None:
    eager, model = make(), make()
    torch.compiler.reset()
    try:
        compiled = torch.compile(model, backend="aot_eager")
    except RuntimeError as error:
        pytest.skip(f"torch.compile is unavailable: {error}")
    for batch in (6, 6, 9):  # another size: another graph
        x = torch.randn(batch, *shape, generator=seeded(batch))
        pairs = zip(step(model, compiled, x), step(eager, eager, x), strict=True)
        for ours, expected in pairs:
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    eager.eval()
    compiled.eval()
    x = torch.randn(3, *shape, generator=seeded(1))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), eager(x), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_layer_sees_new_connections() -> None:
    layer = linear()
    torch.compiler.reset()
    try:
        compiled = torch.compile(layer, backend="aot_eager")
    except RuntimeError as error:
        pytest.skip(f"torch.compile is unavailable: {error}")
    x = data(layer)
    compiled(x)
    for count in (layer.values.numel(), 17):
        new = Connections.random(layer.n_in, layer.n_out, count, seeded(count))
        layer.set_connections(new, torch.randn(count, generator=seeded(1)))
        torch.testing.assert_close(compiled(x), layer.to_dense()(x), rtol=1e-5, atol=1e-5)
