"""Layers by themselves under autocast and in bfloat16: types and numbers of dense layers, also compiled."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rewire
from products import LINEAR, conv3, dense_gradients, gradients, sizes_of
from products import make as case_of
from rewire import ops
from rewire.ops import native
from rounding import no_worse
from some_layers import Make, both, conv, data, flat, linear

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OTHERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "1-D": (lambda: rewire.SparseConv1d(4, 6, 3, padding=1, sparsity=0.5), (5, 4, 9)),
    "3-D": (lambda: rewire.SparseConv3d(2, 3, 2, sparsity=0.5), (2, 2, 4, 5, 3)),
    "transposed": (lambda: rewire.SparseConvTranspose2d(4, 6, 3, sparsity=0.5), (5, 4, 6, 7)),
    "tokens": (lambda: rewire.SparseLinear(6, 5, sparsity=0.5), (3, 7, 6)),
    "one image": (lambda: rewire.SparseConv2d(4, 3, 3, sparsity=0.5), (4, 5, 6)),
    "one sample": (lambda: rewire.SparseLinear(6, 5, sparsity=0.5), (6,)),
    "grouped": (lambda: rewire.SparseConv2d(4, 6, 3, groups=2, sparsity=0.5), (5, 4, 6, 7)),
    "reflecting": (
        lambda: rewire.SparseConv2d(4, 3, 3, padding=1, padding_mode="reflect", sparsity=0.5),
        (5, 4, 6, 7),
    ),
}


def passes(layer: Any, x: Tensor, autocast: torch.dtype | None) -> dict[str, Tensor]:
    """Output and gradients."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", autocast or BF16, enabled=autocast is not None):
        y = layer(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    layer.zero_grad()
    (y.double() * weights).sum().backward()
    assert x.grad is not None
    found = {"y": y.detach(), "x": x.grad}
    return found | {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def as_dense(layer: Any, x: Tensor, autocast: torch.dtype | None) -> None:
    """Types of the dense layer, and numbers as near to those in float64."""
    dense = layer.to_dense()
    ours, theirs = passes(layer, x, autocast), passes(dense, x, autocast)
    truth = passes(copy.deepcopy(dense).double(), x.double(), None)
    for found in (theirs, truth):
        if isinstance(layer, rewire.SparseLinear | rewire.SparseConv2d):
            columns = layer.connections.outputs(), layer.connections.columns()
            found["values"] = flat(found["weight"])[columns][:, None]
    for name, mine in ours.items():
        if name in truth:
            no_worse(mine, theirs[name], truth[name])
    assert ours["values"].dtype == layer.values.dtype


@both
@pytest.mark.parametrize("half", [BF16, F16])
@pytest.mark.parametrize("given", [F32, BF16, F16])
def test_under_autocast(make: Make, half: torch.dtype, given: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is fast
        as_dense(make(), data(make()).to(given), half)


@both
@pytest.mark.parametrize("given", [F32, BF16])
def test_in_bfloat16_under_autocast(make: Make, given: torch.dtype) -> None:
    as_dense(make().to(BF16), data(make()).to(given), BF16)


@both
def test_in_bfloat16(make: Make) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = make().to(BF16)
        as_dense(layer, data(layer), None)
        with torch.no_grad():
            assert layer(data(layer)).dtype is BF16


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds(name: str) -> None:
    make, shape = OTHERS[name]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(shape)
    as_dense(layer, x, BF16)
    as_dense(layer.to(BF16), x.to(BF16), None)


@both
def test_of_float64_autocast_changes_nothing(make: Make) -> None:
    layer = make().double()
    x = data(layer)
    with torch.autocast("cpu", BF16):
        y = layer(x)
    assert y.dtype is torch.float64
    assert torch.equal(y, layer(x))


@both
def test_what_dense_layers_refuse(make: Make) -> None:
    layer = make()
    with pytest.raises(ValueError, match=r"types differ.*bfloat16.*inside torch\.autocast"):
        layer(data(layer).to(BF16))
    with (
        torch.autocast("cpu", BF16),
        torch.autocast("cpu", enabled=False),
        pytest.raises(ValueError, match="types differ"),
    ):
        layer(data(layer).to(BF16))
    with torch.autocast("cpu", BF16), pytest.raises(ValueError, match="types differ"):
        layer(data(layer).double())


@both
@pytest.mark.parametrize("way", ["autocast", "bfloat16"])
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_compiled_code_agrees(make: Make, way: str, backend: str) -> None:
    torch.compiler.reset()
    layer, autocast = make(), BF16
    if way == "bfloat16":
        layer, autocast = layer.to(BF16), None  # type: ignore[assignment]
    x, compiled = data(layer), torch.compile(layer, backend=backend)
    ours = passes(layer, x, autocast)
    theirs = passes(compiled, x, autocast)
    for name, mine in ours.items():
        other = theirs[name if name in theirs else f"_orig_mod.{name}"]
        assert mine.dtype is other.dtype
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-2)
    if way == "autocast":  # compiled again for this
        assert passes(compiled, x, None)["y"].dtype is F32


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_operators_convert_their_input_alone(dtype: torch.dtype) -> None:
    layer = linear()
    x = data(layer)
    with torch.autocast("cpu", BF16):
        y = torch.ops.rewire.linear(x.to(dtype), layer.values, layer.bias, *layer.parts[2])
    assert y.dtype is BF16
    assert torch.equal(
        y, torch.ops.rewire.linear(x.to(BF16), layer.values, layer.bias, *layer.parts[2])
    )
    image = conv()
    sizes = sizes_of(image.sizes)
    with torch.autocast("cpu", BF16):
        y = torch.ops.rewire.conv2d(
            data(image).to(dtype), *image.parts[:2], *image.parts[2], *sizes
        )
    assert y.dtype is BF16


@both
def test_checks_of_torch_library(make: Make) -> None:
    layer = make()
    x = data(layer).to(BF16).requires_grad_()
    arguments: tuple[Any, ...] = (x, *layer.parts[:2], *layer.parts[2])
    if isinstance(layer, rewire.SparseLinear):
        torch.library.opcheck(torch.ops.rewire.linear.default, arguments)
        return
    sizes = sizes_of(layer.sizes)
    torch.library.opcheck(torch.ops.rewire.conv2d.default, (*arguments, *sizes))


@both
def test_second_derivatives(make: Make) -> None:
    """A gradient penalty, all of it under autocast, beside the one in float32."""

    def penalty(autocast: bool) -> list[Tensor]:
        layer = make()
        x = data(layer).requires_grad_()
        with torch.autocast("cpu", BF16, enabled=autocast):
            y = layer(x).float().square().sum()
            (slope,) = torch.autograd.grad(y, x, create_graph=True)
            slope.square().sum().backward()
        assert slope.dtype is F32
        found = [x.grad, layer.values.grad]
        assert all(grad is not None and grad.dtype is F32 for grad in found)
        return found  # type: ignore[return-value]

    for mine, right in zip(penalty(True), penalty(False), strict=True):
        assert float((mine - right).norm()) <= 0.02 * float(right.norm())


@both
def test_gradients_at_coordinates_are_sums_in_float32(make: Make) -> None:
    layer = make()
    x = data(layer, 40).to(BF16)
    dy = torch.randn_like(layer(x.float())).to(BF16)
    outputs = torch.arange(layer.n_out).repeat_interleave(layer.n_in)
    inputs = torch.arange(layer.n_in).repeat(layer.n_out)
    sizes = {} if isinstance(layer, rewire.SparseLinear) else {"conv": layer.sizes}
    found = ops.gradient_at(dy, x, outputs, inputs, **sizes)
    right = ops.gradient_at(dy.double(), x.double(), outputs, inputs, **sizes)
    assert found.dtype is F32
    torch.testing.assert_close(found, right.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not ops.available(), reason="without kernels all types are as slow")
def test_float16_says_that_it_is_slow() -> None:
    native.warn_of_reference.cache_clear()
    with pytest.warns(rewire.PerformanceWarning, match=r"in float16.*model\.bfloat16\(\)"):
        linear().half()(data(linear()).half())


def test_a_step_with_a_gradient_scaler() -> None:
    """Powers of two: the same numbers as without."""

    def trained(scaled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        model = rewire.sparsify(nn.Sequential(*model, nn.Linear(288, 4)), 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        for seed in range(3):
            x = torch.randn((8, 3, 8, 8), generator=torch.Generator().manual_seed(seed))
            with torch.autocast("cpu", BF16):
                loss = model(x).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach() for p in model.parameters()]

    for plain, scaled in zip(trained(False), trained(True), strict=True):
        assert plain.dtype is F32
        assert torch.equal(plain, scaled)


def test_a_model_that_has_run_under_autocast_is_saved_as_it_is() -> None:
    model = rewire.sparsify(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)), 0.5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.autocast("cpu", BF16):
        model(torch.randn(5, 12)).sum().backward()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype is before[name].dtype
        assert torch.equal(tensor, before[name])


def test_a_model_in_bfloat16_is_saved_and_loaded(tmp_path: Any) -> None:
    model = rewire.sparsify(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)), 0.5).to(
        BF16
    )
    rewire.save(model, tmp_path / "model.safetensors")
    loaded = rewire.load(
        tmp_path / "model.safetensors",
        nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)).to(BF16),
    )
    x = torch.randn(5, 12).to(BF16)
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("shape", [(5, 7), (64, 33), (130, 12), (3, 4, 6, 7), (64, 3, 5, 5)])
def test_odd_sizes_in_every_instruction_set(isa: str, shape: tuple[int, ...]) -> None:
    kind = conv3(2) if len(shape) == 4 else LINEAR
    case = case_of(kind, shape, 9, 0.3, BF16)

    def run(x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return case.run(x, values, bias)

    tensors = case.x, case.values.float(), case.bias.float()
    y, grads = gradients(run, tensors, case.dy, (True, True, True))
    truth_y, truth = dense_gradients(case)
    dense_y, dense = dense_gradients(case, BF16)
    no_worse(y, dense_y, truth_y)
    for grad, theirs, right, dtype in zip(grads, dense, truth, (BF16, F32, F32), strict=True):
        assert grad is not None
        no_worse(grad, theirs.to(dtype), right)
