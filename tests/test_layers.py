"""Sparse layers: how they are made, and that they compute and train as dense ones do."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rewire import Connections, SparseConv2d, SparseLayer, SparseLinear
from some_layers import Layer, Make, assert_as_dense, both, conv, data, linear, seeded

# Construction


@both
def test_the_layer_holds_what_was_asked_for(make: Make) -> None:
    layer = make()
    total = layer.n_in * layer.n_out
    assert layer.n_in == (12 if make is linear else 4 * 3 * 2)
    assert layer.n_out == (9 if make is linear else 6)
    assert layer.values.shape == (total // 4, 1)
    assert layer.density == layer.values.numel() / total
    assert [name for name, _ in layer.named_parameters()] == ["values", "bias"]
    assert make(sparsity=None, connections=17).values.numel() == 17
    assert make(sparsity=0.0).values.numel() == total
    assert make(sparsity=1).values.numel() == 0
    assert make(bias=False).bias is None
    assert make(dtype=torch.float64).values.dtype == torch.float64
    assert make(device="cpu").values.device.type == "cpu"
    given = Connections.random(layer.n_in, layer.n_out, 20, seeded(1))
    layer = make(sparsity=None, connections=given)
    assert torch.equal(layer.connections.keys(), given.keys())
    assert_as_dense(layer)


@both
def test_the_generator_decides_everything(make: Make) -> None:
    first, again, other = make(seed=1), make(seed=1), make(seed=2)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert not torch.equal(first.indices, other.indices)
    assert not torch.equal(first.values, other.values)


@both
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": None}, "either sparsity= or connections="),
        ({"sparsity": 0.5, "connections": 3}, "not both"),
        ({"sparsity": -0.1}, r"\[0, 1\], got -0.1"),
        ({"sparsity": 1.1}, r"\[0, 1\], got 1.1"),
        ({"sparsity": float("nan")}, r"\[0, 1\], got nan"),
        ({"sparsity": None, "connections": -1}, "got -1"),
        ({"sparsity": None, "connections": 10**6}, "got 1000000"),
        ({"sparsity": None, "connections": Connections.random(3, 3, 2)}, "do not fit"),
    ],
)
def test_bad_densities(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((4, 6, 3), {"groups": 3}, "groups must divide both"),
        ((6, 4, 3), {"groups": 3}, "groups must divide both"),
        ((4, 6, 3), {"groups": 0}, "groups must divide both"),
        ((0, 6, 3), {}, "channels must be positive"),
        ((4, -1, 3), {}, "channels must be positive"),
        ((4, 6, 0), {}, "kernel_size"),
        ((4, 6, (3, 3, 3)), {}, "kernel_size"),
        ((4, 6, 2.5), {}, "kernel_size"),
        ((4, 6, 3), {"stride": 0}, "stride"),
        ((4, 6, 3), {"stride": (1, 0)}, "stride"),
        ((4, 6, 3), {"dilation": 0}, "dilation"),
        ((4, 6, 3), {"padding": -1}, "padding"),
        ((4, 6, 3), {"padding": (0, 1, 0)}, "padding"),
        ((4, 6, 3), {"padding": "full"}, "full"),
        ((4, 6, 3), {"padding": "same", "stride": 2}, "stride 1"),
        ((4, 6, 3), {"padding_mode": "mirror"}, "mirror"),
    ],
)
def test_bad_convolutions(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        SparseConv2d(*arguments, **options, sparsity=0.5)


def test_bad_linear_layers() -> None:
    for sizes in ((-1, 3), (3, -1)):
        with pytest.raises(ValueError, match="negative"):
            SparseLinear(*sizes, sparsity=0.5)


def test_extra_repr() -> None:
    assert repr(SparseLinear(100, 20, connections=150)) == (
        "SparseLinear(in_features=100, out_features=20, bias=True, "
        "connections=150 of 2,000 (7.5 %))"
    )
    assert "bias=False, connections=0 of 0 (0 %)" in repr(SparseLinear(0, 3, False, sparsity=0))
    text = repr(SparseConv2d(4, 6, 3, connections=54))
    assert text == (
        "SparseConv2d(4, 6, kernel_size=(3, 3), bias=True, connections=54 of 216 (25 %))"
    )
    full = SparseConv2d(
        *(4, 6, (3, 2), (2, 1), (1, 2), (1, 3)),
        bias=False,
        padding_mode="circular",
        connections=1234 // 100,
    )
    assert repr(full) == (
        "SparseConv2d(4, 6, kernel_size=(3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 3), "
        "padding_mode=circular, bias=False, connections=12 of 144 (8.33 %))"
    )
    assert "padding=same" in repr(SparseConv2d(4, 6, 3, padding="same", connections=1))


# Initialisation


def uneven() -> Connections:
    """Output units with 0, 1, 4, 25 and 400 inputs, many of each."""
    fan_in = torch.tensor([0, 1, 4, 25, 400]).repeat(40)
    rows = [torch.randperm(400, generator=seeded(i))[:n] for i, n in enumerate(fan_in.tolist())]
    return Connections.from_keys(
        torch.cat([units + 400 * o for o, units in enumerate(rows)]), 400, 200
    )


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_initial_values_are_uniform_within_the_fan_in(kind: str) -> None:
    c = uneven()
    layer: Layer = SparseLinear(400, 200, connections=c, generator=seeded(0))
    if kind == "conv":
        layer = SparseConv2d(100, 200, 2, connections=c, generator=seeded(0))
    for fan_in in (1, 4, 25, 400):
        bound = (3 / fan_in) ** 0.5
        units = (c.fan_in() == fan_in).nonzero().flatten()
        values = layer.values.detach()[torch.isin(c.outputs(), units)]
        assert values.numel() == 40 * fan_in
        assert float(values.abs().max()) <= bound * (1 + 1e-6)
        assert float(values.abs().max()) > 0.9 * bound
        assert float(values.square().mean()) == pytest.approx(1 / fan_in, rel=0.35)
        assert abs(float(values.mean())) < 4 * (1 / fan_in / values.numel()) ** 0.5
    assert layer.bias is not None
    for fan_in in (0, 1, 4, 25, 400):
        bound = (3 / max(1, fan_in)) ** 0.5  # without inputs: as with one
        bias = layer.bias.detach()[c.fan_in() == fan_in]
        assert 0.8 * bound < float(bias.abs().max()) <= bound * (1 + 1e-6)


def test_preactivations_have_unit_variance() -> None:
    c = uneven()
    layer = SparseLinear(400, 200, bias=False, connections=c)
    x = torch.randn(500, 400, generator=seeded(1))
    total = torch.zeros(200)
    for seed in range(50):
        layer.reset_parameters(seeded(seed))
        total += layer(x).detach().var(0)
    variance = total / 50
    for fan_in in (1, 4, 25, 400):
        # The mean of 40 units times 50 draws of the values.
        assert float(variance[c.fan_in() == fan_in].mean()) == pytest.approx(1, abs=0.08)
    assert float(variance[c.fan_in() == 0].max()) == 0


@both
def test_reset_parameters_draws_again(make: Make) -> None:
    layer = make()
    before = layer.values.detach().clone()
    indices = layer.indices.clone()
    layer.reset_parameters(seeded(5))
    again = layer.values.detach().clone()
    assert not torch.equal(before, again)
    assert torch.equal(indices, layer.indices)
    layer.reset_parameters(seeded(5))
    assert torch.equal(layer.values, again)


# Forward and backward like the dense layer


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_like_the_dense_layer(make: Make, dtype: torch.dtype, bias: bool) -> None:
    layer = make(dtype=dtype, bias=bias)
    for batch in (0, 1, 2, 33):
        assert_as_dense(layer, data(layer, batch))


@pytest.mark.parametrize("shape", [(12,), (3, 12), (2, 3, 12), (2, 1, 3, 12), (2, 0, 12), (0, 12)])
def test_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    layer = linear()
    x = torch.randn(shape, generator=seeded(0))
    assert layer(x).shape == (*shape[:-1], 9)
    assert_as_dense(layer, x)


def test_sequences_of_any_strides() -> None:
    layer, x = linear(), torch.randn(4, 5, 12, generator=seeded(0))
    expected = layer.to_dense()(x)
    for same in (
        x.transpose(0, 1).contiguous().transpose(0, 1),
        x.transpose(1, 2).contiguous().transpose(1, 2),
        x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        x.repeat(1, 1, 2)[..., :12],
    ):
        torch.testing.assert_close(layer(same), expected, rtol=1e-5, atol=1e-5)
    assert layer(x).is_contiguous()  # what follows in a transformer wants rows
    expanded = x[:1].expand(4, 5, 12)
    torch.testing.assert_close(layer(expanded)[3], layer(x[:1])[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (11,), (3, 13), (12, 3), (2, 12, 3)])
def test_linear_refuses_other_features(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="12 features"):
        linear()(torch.zeros(shape))


def test_unbatched_images() -> None:
    layer = conv()
    x = data(layer)[0]
    assert layer(x).shape == layer(x[None])[0].shape
    assert_as_dense(layer, x)


@pytest.mark.parametrize("shape", [(4, 6), (5, 3, 6, 7), (3, 6, 7), (1, 5, 4, 6, 7), ()])
def test_conv_refuses_other_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(N, 4, H, W\)"):
        conv()(torch.zeros(shape))


def test_an_image_smaller_than_the_kernel() -> None:
    with pytest.raises(ValueError, match="smaller than the kernel"):
        conv(padding=0)(torch.zeros(2, 4, 2, 7))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", ["same", "valid", 0, 1, (2, 1), (0, 3)])
@pytest.mark.parametrize("kernel", [(3, 3), (2, 2), (4, 3), 1])
def test_padding(kernel: Any, padding: Any, mode: str) -> None:
    layer = SparseConv2d(
        *(3, 4, kernel),
        padding=padding,
        padding_mode=mode,
        sparsity=0.5,
        generator=seeded(0),
    )
    dense = nn.Conv2d(3, 4, kernel, padding=padding, padding_mode=mode)
    x = torch.randn(5, 3, 7, 6, generator=seeded(0))
    assert layer(x).shape == dense(x).shape
    assert_as_dense(layer, x)
    assert_as_dense(layer, x[0])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("dilation", [1, 2, (3, 2)])
@pytest.mark.parametrize("kernel", [3, (2, 4)])
def test_same_padding_with_dilation(kernel: Any, dilation: Any) -> None:
    layer = SparseConv2d(
        3, 4, kernel, padding="same", dilation=dilation, sparsity=0.5, generator=seeded(0)
    )
    x = torch.randn(5, 3, 7, 8, generator=seeded(0))
    assert layer(x).shape == (5, 4, 7, 8)
    assert_as_dense(layer, x)


@pytest.mark.parametrize("stride", [1, 2, (3, 1)])
@pytest.mark.parametrize("dilation", [1, (2, 1)])
def test_strides_and_dilations(stride: Any, dilation: Any) -> None:
    layer = conv(stride=stride, dilation=dilation)
    assert_as_dense(layer, torch.randn(6, 4, 9, 8, generator=seeded(0)))


@both
@pytest.mark.parametrize("frozen", ["values", "bias", "input", "values and bias", "all"])
def test_frozen_parts_get_no_gradient(make: Make, frozen: str) -> None:
    layer, reference = make(), make()
    x, x_reference = (data(layer).requires_grad_() for _ in range(2))
    reference(x_reference).square().sum().backward()
    assert layer.bias is not None
    if frozen in ("values", "values and bias", "all"):
        layer.values.requires_grad_(False)
    if frozen in ("bias", "values and bias", "all"):
        layer.bias.requires_grad_(False)
    if frozen in ("input", "all"):
        x = x.detach()
    y = layer(x)
    assert y.requires_grad == (frozen != "all")
    if frozen == "all":
        return
    y.square().sum().backward()
    pairs = [(layer.values, reference.values), (layer.bias, reference.bias), (x, x_reference)]
    for tensor, right in pairs:
        assert right is not None
        if tensor.requires_grad:
            torch.testing.assert_close(tensor.grad, right.grad)
        else:
            assert tensor.grad is None


@both
def test_no_grad_and_inference_mode(make: Make) -> None:
    layer = make()
    x, expected = data(layer), layer(data(layer)).detach()
    with torch.no_grad():
        y = layer(x)
        assert not y.requires_grad
        assert torch.equal(y, expected)
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer(data(layer)), expected)
        assert torch.equal(make()(x), expected)
        assert torch.equal(copy.deepcopy(layer)(x), expected)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0), (4, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_without_connections(sizes: tuple[int, int], bias: bool) -> None:
    layer = SparseLinear(*sizes, bias=bias, connections=0)
    x = torch.ones(5, sizes[0], requires_grad=True)
    y = layer(x)
    assert y.shape == (5, sizes[1])
    expected = torch.zeros(5, sizes[1])
    assert torch.equal(y, expected if layer.bias is None else expected + layer.bias)
    if y.requires_grad:
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.zeros_like(x))
        assert layer.values.grad is not None
        assert layer.values.grad.shape == (0, 1)
    if layer.bias is not None:
        assert layer.bias.grad is not None
        assert torch.equal(layer.bias.grad, torch.full((sizes[1],), 5.0))
    copied = copy.deepcopy(layer)
    copied.load_state_dict(layer.state_dict())
    assert torch.equal(copied(x), y)
    assert layer.to_dense().weight.shape == (sizes[1], sizes[0])


def test_a_convolution_without_connections() -> None:
    layer = conv(sparsity=1.0)
    assert_as_dense(layer)
    assert float(layer(data(layer)).detach().var((0, 2, 3)).max()) == 0


# Training is that of the dense layer with its absent weights held at zero


def sparse_net(kind: str) -> nn.Sequential:
    options: dict[str, Any] = {"sparsity": 0.6, "generator": seeded(0), "dtype": torch.float64}
    if kind == "mlp":
        return nn.Sequential(
            SparseLinear(10, 16, **options),
            nn.Tanh(),
            SparseLinear(16, 12, bias=False, **options),
            nn.ReLU(),
            SparseLinear(12, 3, **options),
        )
    return nn.Sequential(
        SparseConv2d(2, 6, 3, padding=1, **options),
        nn.ReLU(),
        SparseConv2d(6, 4, (3, 2), stride=2, **options),
        nn.Flatten(),
        SparseLinear(4 * 2 * 3, 3, **options),
    )


def optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    return {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
        "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    }


@pytest.mark.parametrize("optimizer", optimizers())
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_training_equals_masked_dense_training(kind: str, optimizer: str) -> None:
    sparse = sparse_net(kind)
    dense = nn.Sequential(
        *(m.to_dense() if isinstance(m, SparseLayer) else m for m in sparse)  # type: ignore[operator]
    )
    masks = {p: (p != 0).double() for m in dense for n, p in m.named_parameters() if n == "weight"}
    make = optimizers()[optimizer]
    steps = make(sparse.parameters()), make(dense.parameters())
    shape = (10,) if kind == "mlp" else (2, 5, 6)
    losses = []
    for i in range(12):
        x = torch.randn(7, *shape, generator=seeded(i), dtype=torch.float64)
        target = torch.randint(3, (7,), generator=seeded(i))
        for model, opt in zip((sparse, dense), steps, strict=True):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), target)
            loss.backward()
            if model is dense:
                for weight, mask in masks.items():
                    assert weight.grad is not None
                    weight.grad.mul_(mask)
            opt.step()
            losses.append(loss.item())
    assert losses[::2] == pytest.approx(losses[1::2], abs=1e-10)
    assert losses[0] != losses[-2]
    for ours, theirs in zip(sparse, dense, strict=True):
        if isinstance(ours, SparseLinear | SparseConv2d):
            weight: Any = theirs.weight
            torch.testing.assert_close(ours.to_dense().weight, weight, rtol=0, atol=1e-10)
            assert int((weight != 0).sum()) == ours.values.numel()
            if ours.bias is not None:
                torch.testing.assert_close(ours.bias, theirs.bias, rtol=0, atol=1e-10)
