"""Sparse layers as drop-ins: construction, conversion, state dicts, copies, types, and training."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rewire import ConnectedLayer, Connections, SparseConv2d, SparseLayer, SparseLinear
from rewire.ops import TopologyError

Layer = SparseLinear | SparseConv2d
csr = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")


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
    grad = flat(dense.weight.grad)[layer.connections.outputs(), layer.connections.inputs()]
    torch.testing.assert_close(layer.values.grad, grad, **close)
    if layer.bias is not None and dense.bias is not None:
        torch.testing.assert_close(layer.bias.grad, dense.bias.grad, **close)


def flat(weight: Tensor) -> Tensor:
    """A dense weight with its columns in the order of our input units: taps first."""
    return weight if weight.dim() == 2 else weight.permute(0, 2, 3, 1).flatten(1)


# Construction


@both
def test_the_layer_holds_what_was_asked_for(make: Make) -> None:
    layer = make()
    total = layer.n_in * layer.n_out
    assert layer.n_in == (12 if make is linear else 4 * 3 * 2)
    assert layer.n_out == (9 if make is linear else 6)
    assert layer.values.shape == (total // 4,)
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
        ((4, 6, 3), {"groups": 2}, "groups=1, got 2"),
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
        assert layer.values.grad.shape == (0,)
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


# Dense and CSR


@both
def test_to_dense_is_the_same_layer(make: Make) -> None:
    layer = make(dtype=torch.float64)
    dense = layer.to_dense()
    assert type(dense) is (nn.Linear if make is linear else nn.Conv2d)
    assert dense.weight.dtype == torch.float64
    assert int((dense.weight != 0).sum()) == layer.values.numel()
    assert isinstance(dense.weight, nn.Parameter)
    assert dense.weight.is_leaf
    assert dense.weight.requires_grad
    assert make(bias=False).to_dense().bias is None
    # Our numbering of input units, by hand.
    c = layer.connections
    for o, i, value in zip(c.outputs().tolist(), c.inputs().tolist(), layer.values, strict=True):
        place = (o, i) if make is linear else (o, i % 4, i // 4 // 2, i // 4 % 2)
        assert torch.equal(dense.weight[place], value)
    with torch.no_grad():
        dense.weight.zero_()
    assert bool(layer.values.all())  # a copy


@both
def test_from_dense_with_a_mask(make: Make) -> None:
    dense = make(sparsity=0.0).to_dense()
    mask = torch.rand(dense.weight.shape, generator=seeded(3)) < 0.3
    mask[2] = False
    masked = copy.deepcopy(dense)
    with torch.no_grad():
        masked.weight.mul_(mask)
    for form in (mask, mask.int(), mask.double() * -3):
        layer = type(make()).from_dense(dense, form)  # type: ignore[arg-type]
        assert layer.values.numel() == int(mask.sum())
        assert torch.equal(layer.to_dense().weight, masked.weight)
        assert layer.bias is not None
        assert torch.equal(layer.bias, dense.bias)
        torch.testing.assert_close(layer(data(layer)), masked(data(layer)), rtol=1e-5, atol=1e-5)
        assert_as_dense(layer)
    assert layer.values.requires_grad
    assert layer.bias.requires_grad


@both
def test_from_dense_keeps_the_largest(make: Make) -> None:
    dense = make(sparsity=0.0).to_dense()
    total = dense.weight.numel()
    order = dense.weight.detach().abs().flatten().sort(descending=True).values
    for options, count in [
        ({"connections": 7}, 7),
        ({"connections": 0}, 0),
        ({"connections": total}, total),
        ({"sparsity": 0.75}, total // 4),
        ({"sparsity": 0.0}, total),
        ({"sparsity": 1.0}, 0),
    ]:
        layer = type(make()).from_dense(dense, **options)  # type: ignore[arg-type]
        assert layer.values.numel() == count
        kept = layer.to_dense().weight
        threshold = float(order[count - 1]) if count else float("inf")
        expected = torch.where(dense.weight.abs() >= threshold, dense.weight, 0.0)
        assert torch.equal(kept, expected)


@both
def test_from_dense_takes_the_first_of_equal_weights(make: Make) -> None:
    dense = make(sparsity=0.0).to_dense()
    with torch.no_grad():
        dense.weight.fill_(1.0)
        dense.weight.flatten()[::2] = -1.0
        dense.weight.flatten()[-1] = 2.0
    layer = type(make()).from_dense(dense, connections=6)  # type: ignore[arg-type]
    kept = layer.to_dense().weight.detach().flatten().nonzero().flatten()
    assert kept.tolist() == [0, 1, 2, 3, 4, dense.weight.numel() - 1]


@both
def test_from_dense_and_the_constructor_count_alike(make: Make) -> None:
    dense = make(sparsity=0.0).to_dense()
    for hundredths in range(101):
        sparsity = hundredths / 100
        converted = type(make()).from_dense(dense, sparsity=sparsity)  # type: ignore[arg-type]
        assert converted.values.numel() == make(sparsity=sparsity).values.numel(), sparsity


@both
def test_from_dense_refuses_bad_choices(make: Make) -> None:
    dense: Any = make(sparsity=0.0).to_dense()
    convert = type(make()).from_dense
    mask = torch.ones_like(dense.weight)
    for options in ({}, {"mask": mask, "sparsity": 0.5}, {"sparsity": 0.5, "connections": 3}):
        with pytest.raises(ValueError, match="one of mask=, sparsity= or connections="):
            convert(dense, **options)
    with pytest.raises(ValueError, match="mask has shape"):
        convert(dense, mask[:-1])
    with pytest.raises(ValueError, match="mask has shape"):
        convert(dense, mask.flatten())
    for count in (-1, dense.weight.numel() + 1):
        with pytest.raises(ValueError, match=f"{count}"):
            convert(dense, connections=count)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        convert(dense, sparsity=1.5)


def test_from_dense_refuses_groups() -> None:
    with pytest.raises(ValueError, match="groups=1"):
        SparseConv2d.from_dense(nn.Conv2d(4, 4, 3, groups=2), sparsity=0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2, "padding": (1, 2), "dilation": (2, 1)},
        {"padding": "same", "padding_mode": "circular"},
        {"padding": 2, "padding_mode": "reflect", "bias": False},
        {"dtype": torch.float64},
    ],
)
def test_from_dense_keeps_the_sizes_of_a_convolution(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    dense = nn.Conv2d(3, 5, (3, 2), **options)
    layer = SparseConv2d.from_dense(dense, sparsity=0.0)
    x = torch.randn(4, 3, 8, 9, dtype=dense.weight.dtype)
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-5, atol=1e-5)
    back = layer.to_dense()
    assert torch.equal(back.weight, dense.weight)
    assert repr(back) == repr(dense)


@csr
@both
def test_sparse_csr_and_back(make: Make) -> None:
    layer = make(dtype=torch.float64)
    sparse = layer.to_sparse_csr()
    assert sparse.layout == torch.sparse_csr
    assert sparse.shape == (layer.n_out, layer.n_in)
    # Out x in, the columns of a convolution as in weight.flatten(1).
    assert torch.equal(sparse.to_dense(), layer.to_dense().weight.detach().flatten(1))
    for row in range(layer.n_out):
        begin, end = sparse.crow_indices()[row : row + 2].tolist()
        assert bool((sparse.col_indices()[begin:end].diff() > 0).all())
    assert not sparse.requires_grad
    if isinstance(layer, SparseLinear):
        back: Layer = SparseLinear.from_sparse_csr(sparse, layer.bias)
    else:
        back = SparseConv2d.from_sparse_csr(
            sparse, layer.bias, kernel_size=(3, 2), stride=2, padding=1
        )
    for name, tensor in layer.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    assert torch.equal(back(data(layer)), layer(data(layer)))
    assert isinstance(back.values, nn.Parameter)
    with torch.no_grad():
        layer.values.add_(1)
    assert torch.equal(back.to_sparse_csr().values(), sparse.values())  # copies, both


@csr
@both
def test_sparse_csr_without_bias_or_connections(make: Make) -> None:
    layer = make(sparsity=1.0, bias=False)
    sparse = layer.to_sparse_csr()
    assert sparse._nnz() == 0
    if isinstance(layer, SparseLinear):
        back: Layer = SparseLinear.from_sparse_csr(sparse)
    else:
        back = SparseConv2d.from_sparse_csr(sparse, kernel_size=(3, 2))
    assert back.bias is None
    assert back.values.shape == (0,)


@csr
def test_from_sparse_csr_in_any_order_and_type() -> None:
    crow, col = torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1])
    for index in (torch.int64, torch.int32):
        sparse = torch.sparse_csr_tensor(
            crow.to(index),
            col.to(index),
            torch.tensor([3.0, 1.0, 0.0]),
            size=(2, 3),
            check_invariants=False,
        )
        layer = SparseLinear.from_sparse_csr(sparse)
        assert layer.connections.keys().tolist() == [0, 2, 4]
        assert layer.values.tolist() == [1.0, 3.0, 0.0]  # a stored zero is a connection
        torch.testing.assert_close(
            layer(torch.tensor([[1.0, 2.0, 3.0]])), torch.tensor([[10.0, 0]])
        )


@csr
def test_from_sparse_csr_refuses_what_is_none() -> None:
    twice = torch.sparse_csr_tensor(
        torch.tensor([0, 2, 3]),
        torch.tensor([1, 1, 0]),
        torch.ones(3),
        size=(2, 3),
        check_invariants=False,
    )
    with pytest.raises(ValueError, match="twice"):
        SparseLinear.from_sparse_csr(twice)
    outside = torch.sparse_csr_tensor(
        torch.tensor([0, 1, 1]),
        torch.tensor([3]),
        torch.ones(1),
        size=(2, 3),
        check_invariants=False,
    )
    with pytest.raises(ValueError, match=r".+"):  # column 3 of row 0 is not column 0 of row 1
        SparseLinear.from_sparse_csr(outside)
    with pytest.raises(ValueError, match="CSR"):
        SparseLinear.from_sparse_csr(torch.ones(2, 3))
    with pytest.raises(ValueError, match="CSR"):
        SparseLinear.from_sparse_csr(torch.ones(2, 3).to_sparse_coo())
    with pytest.raises(ValueError, match="no multiple"):
        SparseConv2d.from_sparse_csr(torch.ones(2, 7).to_sparse_csr(), kernel_size=2)


# Changing the connections


@both
def test_set_connections(make: Make) -> None:
    layer = make()
    parameter = layer.values
    layer(data(layer)).sum().backward()
    new = Connections.random(layer.n_in, layer.n_out, 11, seeded(9))
    layer.set_connections(new, torch.arange(11))
    assert layer.values is parameter
    assert layer.values.grad is None
    assert layer.values.dtype == torch.float32
    assert layer.values.tolist() == list(range(11))
    assert torch.equal(layer.connections.keys(), new.keys())
    assert_as_dense(layer)


@both
@pytest.mark.parametrize("how", ["set_connections", "load_state_dict"])
def test_the_number_of_connections_changes_while_an_earlier_graph_is_alive(
    make: Make, how: str
) -> None:
    layer = make()
    loss = layer(data(layer)).sum()  # as in a loop that still holds the loss of its last step
    loss.backward()
    new = Connections.random(layer.n_in, layer.n_out, 11, seeded(9))
    other = copy.deepcopy(layer)
    other.set_connections(new, torch.ones(11))
    if how == "set_connections":
        layer.set_connections(new, torch.ones(11))
    else:
        layer.load_state_dict(other.state_dict())
    layer(data(layer)).sum().backward()
    other.zero_grad()
    other(data(layer)).sum().backward()
    assert layer.values.grad is not None
    assert torch.equal(layer.values.grad, other.values.grad)
    assert torch.isfinite(loss)


@both
def test_set_connections_refuses_what_does_not_fit(make: Make) -> None:
    layer = make()
    before, expected = copy.deepcopy(layer.state_dict()), layer(data(layer))
    new = Connections.random(layer.n_in, layer.n_out, 11, seeded(9))
    for values in (torch.zeros(10), torch.zeros(11, 1), torch.zeros(())):
        with pytest.raises(ValueError, match="values has shape"):
            layer.set_connections(new, values)
    for sizes in ((layer.n_in + 1, layer.n_out), (layer.n_in, layer.n_out - 1)):
        with pytest.raises(ValueError, match="do not fit"):
            layer.set_connections(Connections.random(*sizes, 11), torch.zeros(11))
    assert_state(layer, before)
    assert torch.equal(layer(data(layer)), expected)


@both
def test_buffers_that_are_written_to_are_checked(make: Make) -> None:
    layer = make()
    expected = layer(data(layer))
    kept = layer.indices.clone()
    layer.indices[0] = 10**6
    with pytest.raises(TopologyError):
        layer(data(layer))
    layer.indices.copy_(kept)
    assert torch.equal(layer(data(layer)), expected)


# State dicts


def assert_state(layer: nn.Module, expected: dict[str, Tensor]) -> None:
    state = layer.state_dict()
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
        assert state[name].dtype == tensor.dtype


@both
def test_state_dict_round_trip(make: Make) -> None:
    layer, other = make(seed=0), make(seed=1)
    state = layer.state_dict()
    assert set(state) == {"values", "bias", "indptr", "indices"}
    assert set(make(bias=False).state_dict()) == {"values", "indptr", "indices"}
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert_state(other, state)
    assert torch.equal(other(data(layer)), layer(data(layer)))
    assert_as_dense(other)


@both
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.95, 1.0])
def test_loading_a_topology_of_another_size(make: Make, sparsity: float) -> None:
    source, layer = make(seed=1, sparsity=sparsity), make()
    parameter, optimizer = layer.values, torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(data(layer)).sum().backward()
    result = layer.load_state_dict(source.state_dict(), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert layer.values is parameter
    assert optimizer.param_groups[0]["params"][0] is layer.values
    assert_state(layer, source.state_dict())
    assert torch.equal(layer(data(layer)), source(data(layer)))
    layer.zero_grad()
    assert_as_dense(layer)
    optimizer.step()


@both
def test_loading_converts_types(make: Make) -> None:
    source, layer = make(seed=1, dtype=torch.float64, sparsity=0.4), make()
    layer.load_state_dict(source.state_dict())
    assert layer.values.dtype == torch.float32
    assert torch.equal(layer.values, source.values.float())
    assert_as_dense(layer)


@both
def test_loading_with_assign(make: Make) -> None:
    for sparsity in (0.7, 0.4):
        source, layer = make(seed=1, sparsity=sparsity, dtype=torch.float64), make()
        layer.bias.requires_grad_(False)  # type: ignore[union-attr]
        state = copy.deepcopy(source.state_dict())
        layer.load_state_dict(state, assign=True)
        assert_state(layer, source.state_dict())
        assert isinstance(layer.values, nn.Parameter)
        assert layer.values.requires_grad
        assert layer.values.data_ptr() == state["values"].data_ptr()
        assert torch.equal(layer(data(source)), source(data(source)))
        layer.bias.requires_grad_(True)  # type: ignore[union-attr]
        assert_as_dense(layer)


@both
def test_a_loaded_layer_shares_no_memory_with_the_state(make: Make) -> None:
    source, layer = make(seed=1), make()
    state = source.state_dict()
    layer.load_state_dict(state)
    expected = layer(data(layer)).detach().clone()
    for name, tensor in state.items():
        assert tensor.data_ptr() != layer.state_dict()[name].data_ptr(), name
    for tensor in state.values():
        tensor.zero_()
    assert torch.equal(layer(data(layer)), expected)


def test_loading_into_a_larger_model() -> None:
    def model(seed: int, sparsity: float) -> nn.Sequential:
        return nn.Sequential(
            conv(seed, sparsity=sparsity),
            nn.BatchNorm2d(6),
            nn.Flatten(),
            SparseLinear(6 * 3 * 4, 5, sparsity=sparsity, generator=seeded(seed)),
        )

    source, target = model(0, 0.9), model(1, 0.5)
    target.load_state_dict(source.state_dict())
    x = torch.randn(4, 4, 6, 7)
    assert torch.equal(target.eval()(x), source.eval()(x))
    broken = source.state_dict()
    broken["3.indices"] = broken["3.indices"].flip(0)
    with pytest.raises(RuntimeError, match=r"3\..*output unit \d+ are corrupt"):
        target.load_state_dict(broken)


@both
@pytest.mark.parametrize("key", ["values", "indices", "indptr", "bias"])
def test_missing_keys(make: Make, key: str) -> None:
    layer = make()
    state = make(seed=1).state_dict()
    del state[key]
    with pytest.raises(RuntimeError, match=f'Missing key\\(s\\) in state_dict: "{key}"'):
        layer.load_state_dict(state)
    assert_as_dense(layer)  # it still fits together
    layer = make()
    try:
        result = layer.load_state_dict(state, strict=False)
    except RuntimeError:
        pass  # parts of a topology may be refused
    else:
        assert result.missing_keys == [key]
        assert not result.unexpected_keys
    assert_as_dense(layer)


@both
def test_an_empty_state(make: Make) -> None:
    layer = make()
    before = copy.deepcopy(layer.state_dict())
    result = layer.load_state_dict({}, strict=False)
    assert result.missing_keys == ["values", "bias", "indptr", "indices"]
    assert_state(layer, before)


@both
def test_unexpected_keys(make: Make) -> None:
    layer = make()
    state = {**make(seed=1).state_dict(), "weight": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "weight"'):
        layer.load_state_dict(state)
    assert layer.load_state_dict(state, strict=False).unexpected_keys == ["weight"]
    # The derived order is no part of it.
    assert layer.load_state_dict({**state, "slots": layer.slots}, strict=False).unexpected_keys == [
        *("weight", "slots")
    ]


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tiny(bias: bool) -> SparseLinear:
    """Unit 0 <- {0, 3}, unit 1 <- nothing, unit 2 <- {1, 2, 3}."""
    c = Connections(4, 3, int32([0, 2, 2, 5]), int32([0, 3, 1, 2, 3]))
    return SparseLinear(4, 3, bias=bias, connections=c, generator=seeded(0))


# What a damaged file may hold instead, and words of the error.
CORRUPT: dict[str, tuple[dict[str, Tensor], str]] = {
    "not ascending": ({"indices": int32([3, 0, 1, 2, 3])}, "output unit 0"),
    "twice": ({"indices": int32([0, 3, 1, 2, 2])}, "output unit 2"),
    "out of range": ({"indices": int32([0, 4, 1, 2, 3])}, "output unit 0"),
    "negative": ({"indices": int32([0, 3, -1, 2, 3])}, "output unit 2"),
    "huge": ({"indices": int32([0, 3, 1, 2, 2**31 - 1])}, "output unit 2"),
    "indptr falls": ({"indptr": int32([0, 2, 1, 5])}, "output unit 1"),
    "indptr starts late": ({"indptr": int32([1, 2, 2, 5])}, "output unit 0"),
    "indptr negative": ({"indptr": int32([0, -3, 2, 5])}, "output unit 0"),
    "indptr past the end": ({"indptr": int32([0, 2, 2, 6])}, "output unit 2"),
    "indptr before the end": ({"indptr": int32([0, 2, 2, 4])}, "output unit 2"),
    "units missing": ({"indptr": int32([0, 2, 5])}, "indptr has 3 elements"),
    "units too many": ({"indptr": int32([0, 2, 2, 4, 5])}, "indptr has 5 elements"),
    "indices too short": ({"indices": int32([0, 3, 1, 2])}, "output unit 2"),
    "indices too long": ({"indices": int32([0, 3, 0, 1, 2, 3])}, "output unit 2"),
    "no indices": ({"indices": int32([])}, "output unit 0"),
    "values too short": ({"values": torch.zeros(4)}, "values has shape"),
    "values too long": ({"values": torch.zeros(6)}, "values has shape"),
    "values 2-D": ({"values": torch.zeros(5, 1)}, "values has shape"),
    "values 0-D": ({"values": torch.zeros(())}, "values has shape"),
    "indptr int64": ({"indptr": torch.tensor([0, 2, 2, 5])}, "int32"),
    "indices int64": ({"indices": torch.tensor([0, 3, 1, 2, 3])}, "int32"),
    "indices float": ({"indices": torch.tensor([0.0, 3, 1, 2, 3])}, "int32"),
    "indices 2-D": ({"indices": int32([[0, 3, 1, 2, 3]])}, "1-D"),
    "indptr 0-D": ({"indptr": int32(0)}, "1-D"),
    "of another layer": (
        {"indptr": int32([0, 1, 2]), "indices": int32([0, 9]), "values": torch.zeros(2)},
        "indptr has 3 elements",
    ),
}


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt_states_are_refused(name: str, bias: bool, assign: bool) -> None:
    layer = tiny(bias)
    x = torch.randn(5, 4, generator=seeded(0))
    before, expected = copy.deepcopy(layer.state_dict()), layer(x)
    corrupt, words = CORRUPT[name]
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=words):
            layer.load_state_dict({**before, **corrupt}, strict=strict, assign=assign)
        assert_state(layer, before)
        assert torch.equal(layer(x), expected)
    assert_as_dense(layer, x)


def test_a_bias_of_another_size_leaves_a_working_layer() -> None:
    layer = tiny(bias=True)
    state = {**SparseLinear(4, 3, sparsity=0.2).state_dict(), "bias": torch.zeros(7)}
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        layer.load_state_dict(state)
    assert_as_dense(layer, torch.randn(5, 4))


@both
def test_files(make: Make) -> None:
    layer = make()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = make(seed=1, sparsity=0.2)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_state(other, layer.state_dict())
    assert torch.equal(other(data(layer)), layer(data(layer)))


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


@both
def test_autocast_runs_in_float32(make: Make) -> None:
    layer = make()
    x = data(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, from_half = layer(x), layer(x.bfloat16())
    assert y.dtype == from_half.dtype == torch.float32
    assert torch.equal(y, layer(x))
    assert torch.equal(from_half, layer(x.bfloat16().float()))
    from_half.sum().backward()
    assert layer.values.grad is not None
    assert layer.values.grad.dtype == torch.float32


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
    torch.testing.assert_close(layer.values.grad, expected, rtol=1e-4, atol=1e-4)


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
