"""Batch norm, pooling and padding of batch-last memory, and converted models that use them unseen.

A fused model is compared with the same model on torch's own layers, through everything a forward
pass may do with a batch norm's output: it gives torch's answer, or an error where one is allowed.
"""

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from rewire import SparseConv2d, SparseLinear, ops
from rewire.nn.fusion import fuse, unfuse
from rewire.ops import channels, pooling

pytestmark = [
    pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels"),
    pytest.mark.usefixtures("promise_always"),
]
DTYPES = [torch.float32, torch.float64]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}


def batch_last(x: Tensor) -> Tensor:
    return x.detach().movedim(0, -1).contiguous().movedim(-1, 0)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def is_fused(module: nn.Module) -> bool:
    return "_call_impl" in vars(module)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    *,
    training: bool,
    eps: float,
    relu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """The two kernels of a batch norm, one after the other."""
    if training:
        for statistic, computed in zip((mean, variance), channels.moments(x), strict=True):
            statistic.copy_(computed)
    norm = channels.Norm(weight, bias, mean, variance, training, eps, relu)
    return channels.batch_norm(x, norm, residual)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    expected = expected.to(torch.float64)
    scale = max(1.0, float(expected.detach().abs().nan_to_num().max())) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual.to(torch.float64), expected, rtol=0, atol=tolerance * scale, equal_nan=True
    )


# Kernels: batch norm


@dataclass
class Norm:
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    variance: Tensor
    residual: Tensor | None

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor | None]:
        return [
            None if t is None else t.detach().to(dtype or t.dtype).requires_grad_()
            for t in (self.x, self.weight, self.bias, self.residual)
        ]


def norm(
    shape: tuple[int, ...], dtype: torch.dtype, affine: bool, residual: bool, seed: int = 0
) -> Norm:
    count = shape[1]
    scale = normal(count, seed=seed + 1).view(1, -1, *(1,) * (len(shape) - 2))
    x = batch_last((normal(*shape, seed=seed) * (1 + scale.abs()) + scale).to(dtype))
    weight, bias = (normal(count, seed=seed + i, dtype=dtype) for i in (2, 3))
    mean, variance = normal(count, seed=seed + 4, dtype=dtype), normal(count, dtype=dtype).square()
    other = batch_last(normal(*shape, seed=seed + 5, dtype=dtype)) if residual else None
    return Norm(x, weight if affine else None, bias if affine else None, mean, variance, other)


def torch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    case: Norm,
    training: bool,
    relu: bool,
) -> Tensor:
    mean, variance = case.mean.double(), case.variance.double()
    y = F.batch_norm(x.contiguous(), mean, variance, weight, bias, training, 0.0, 1e-3)
    y = y if residual is None else y + residual
    return F.relu(y) if relu else y


def assert_norm(case: Norm, training: bool, relu: bool, dz: Tensor | None = None) -> None:
    ours, theirs = case.leaves(), case.leaves(torch.float64)
    mean, variance = case.mean.clone(), case.variance.clone()
    assert ours[0] is not None
    assert channels.can_batch_norm(ours[0], ours[1], ours[2], mean, variance)
    z = batch_norm(
        *(ours[0], ours[1], ours[2], mean, variance),
        training=training,
        eps=1e-3,
        relu=relu,
        residual=ours[3],
    )
    expected = torch_norm(*theirs, case, training, relu)  # type: ignore[arg-type]
    assert_close(z.detach(), expected.detach())
    if training:
        over = [d for d in range(case.x.dim()) if d != 1]
        assert_close(mean, case.x.double().mean(over))
        assert_close(variance, case.x.double().var(over, correction=0))
    else:
        assert torch.equal(mean, case.mean)
        assert torch.equal(variance, case.variance)
    dz = normal(*case.x.shape, seed=9, dtype=case.x.dtype) if dz is None else dz
    grads = torch.autograd.grad(z, [t for t in ours if t is not None], dz)
    right = torch.autograd.grad(expected, [t for t in theirs if t is not None], dz.double())
    for grad, reference in zip(grads, right, strict=True):
        assert_close(grad, reference, 5 * TOLERANCE[case.x.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_batch_norm(
    isa: str, training: bool, affine: bool, relu: bool, residual: bool, dtype: torch.dtype
) -> None:
    for shape in ((2, 3, 1, 2), (7, 1, 3, 5), (33, 5, 4, 4), (130, 6), (17, 4, 9), (5, 3, 30, 40)):
        assert_norm(norm(shape, dtype, affine, residual), training, relu)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 70),
    st.integers(2, 9),
    st.integers(1, 6),
    st.integers(1, 6),
    st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    st.sampled_from(DTYPES),
    st.integers(0, 2**20),
)
def test_batch_norm_of_any_shape(
    batch: int,
    count: int,
    height: int,
    width: int,
    flags: tuple[bool, bool, bool, bool],
    dtype: torch.dtype,
    seed: int,
) -> None:
    training, affine, relu, residual = flags
    case = norm((batch, count, height, width), dtype, affine, residual, seed)
    if training and dtype == torch.float32:  # a variance near zero amplifies rounding
        training = float(case.x.var((0, 2, 3), correction=0).min()) > 0.1
    assert_norm(case, training, relu)


@pytest.mark.parametrize("how", ["contiguous", "expanded", "batch-last"])
def test_gradients_of_any_strides_reach_a_batch_norm(how: str) -> None:
    dz = normal(9, 4, 3, 3, seed=3)
    dz = {
        "contiguous": dz,
        "expanded": dz[:1, :1].expand(9, 4, 3, 3),
        "batch-last": batch_last(dz),
    }[how]
    for relu in (False, True):
        assert_norm(norm((9, 4, 3, 3), torch.float64, True, True), True, relu, dz)


def test_a_residual_of_any_strides() -> None:
    case = norm((9, 4, 3, 3), torch.float64, True, True)
    assert case.residual is not None
    for residual in (
        case.residual.contiguous(),
        case.residual.contiguous(memory_format=torch.channels_last),
        case.residual[:1].expand(9, 4, 3, 3),
    ):
        case.residual = residual
        for relu in (False, True):
            assert_norm(case, True, relu)


@pytest.mark.parametrize("needed", range(4))
def test_each_gradient_of_a_batch_norm_alone(needed: int) -> None:
    case = norm((9, 4, 3, 3), torch.float64, True, True)
    results = []
    for run in ("ours", "torch"):
        leaves = [t for t in case.leaves() if t is not None]
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i == needed)
        x, weight, bias, residual = leaves
        if run == "ours":
            z = batch_norm(
                *(x, weight, bias, case.mean.clone(), case.variance.clone()),
                training=True,
                eps=1e-3,
                relu=True,
                residual=residual,
            )
        else:
            z = torch_norm(x, weight, bias, residual, case, True, True)
        results.append(torch.autograd.grad(z.square().sum(), leaves[needed])[0])
    assert_close(results[0], results[1])


def test_nothing_is_recorded_without_grad() -> None:
    case = norm((9, 4, 3, 3), torch.float64, True, False)
    x = case.x.requires_grad_()
    with torch.no_grad():
        z = batch_norm(
            *(x, case.weight, case.bias, case.mean, case.variance), training=False, eps=1e-3
        )
    assert not z.requires_grad


def test_a_rectifier_at_exactly_zero_and_nan(isa: str) -> None:
    # Where the output is exactly zero torch's rectifier passes no gradient; NaN goes through.
    x = torch.tensor([[1.0], [2.0], [3.0], [torch.nan], [-torch.inf], [torch.inf]]).repeat(3, 2)
    ours = batch_last(x).requires_grad_()
    theirs = x.clone().requires_grad_()
    mean, variance = torch.full((2,), 2.0), torch.ones(2)
    z = batch_norm(ours, None, None, mean, variance, training=False, eps=0.0, relu=True)
    expected = F.relu(F.batch_norm(theirs, mean, variance, eps=0.0))
    torch.testing.assert_close(z, expected, equal_nan=True)
    z.backward(torch.ones_like(z))
    expected.backward(torch.ones_like(z))
    torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)


def test_a_constant_channel(isa: str) -> None:
    x = batch_last(torch.full((9, 3, 2, 2), 5.0))
    mean, variance = torch.zeros(3), torch.ones(3)
    z = batch_norm(x, None, None, mean, variance, training=True, eps=1e-5)
    assert float(z.abs().max()) < 5e-4  # 5 / sqrt(eps) in float32
    assert torch.equal(mean, torch.full((3,), 5.0))
    assert torch.equal(variance, torch.zeros(3))


def test_large_means_do_not_cancel(isa: str) -> None:
    x = batch_last(normal(64, 3, 8, 8, dtype=torch.float32) + 1000)
    mean, variance = torch.zeros(3), torch.ones(3)
    z = batch_norm(x, None, None, mean, variance, training=True, eps=1e-5)
    expected = F.batch_norm(x.double(), None, None, training=True)
    torch.testing.assert_close(z.double(), expected, rtol=0, atol=1e-3)
    right = x.double().var((0, 2, 3), correction=0)
    torch.testing.assert_close(variance.double(), right, rtol=1e-3, atol=0)


def test_what_the_batch_norm_kernel_does_not_take() -> None:
    x = batch_last(normal(9, 4, 3, 3))
    assert channels.can_batch_norm(x)
    assert not channels.can_batch_norm(x.contiguous())
    assert not channels.can_batch_norm(x[:0])
    assert not channels.can_batch_norm(x.half())
    assert not channels.can_batch_norm(x, torch.ones(4))  # float32
    assert not channels.can_batch_norm(x, torch.ones(8, dtype=torch.float64)[::2])
    mean, variance = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    for residual in (x[:, :1], x.float()):
        with pytest.raises(ValueError, match="residual"):
            batch_norm(x, None, None, mean, variance, training=False, eps=0.0, residual=residual)


# Kernels: pooling and padding


def assert_pool(
    ours: Callable[[Tensor], Tensor | None], theirs: Callable[[Tensor], Tensor], x: Tensor
) -> None:
    mine, reference = batch_last(x).requires_grad_(), x.detach().double().requires_grad_()
    y = ours(mine)
    assert y is not None
    expected = theirs(reference)
    assert_close(y.detach(), expected.detach())
    dy = normal(*expected.shape, seed=3, dtype=x.dtype)
    (dx,) = torch.autograd.grad(y, mine, dy)
    (right,) = torch.autograd.grad(expected, reference, dy.double())
    assert_close(dx, right)
    with torch.no_grad():
        again = ours(mine)
        assert again is not None
        assert torch.equal(torch.nan_to_num(again, 7.0), torch.nan_to_num(y, 7.0))
        assert not again.requires_grad


@st.composite
def pools(draw: st.DrawFn) -> tuple[Tensor, dict[str, Any]]:
    def pair(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    kernel = pair(1, 5)
    padding = draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2))
    least = [max(1, k - 2 * p) for k, p in zip(kernel, padding, strict=True)]
    size = [n + draw(st.integers(0, 8)) for n in least]
    stride = draw(st.one_of(st.none(), st.just(pair(1, 4))))
    batch, count = draw(st.integers(2, 40)), draw(st.integers(2, 5))
    dtype = draw(st.sampled_from(DTYPES))
    x = normal(batch, count, *size, seed=draw(st.integers(0, 2**20)), dtype=dtype)
    if draw(st.booleans()):  # ties
        x = x.round()
    return x, {"kernel_size": kernel, "stride": stride, "padding": padding}


@settings(max_examples=120, deadline=None)
@given(pools())
def test_max_pool_of_any_shape(drawn: tuple[Tensor, dict[str, Any]]) -> None:
    x, options = drawn
    assert_pool(lambda t: pooling.max_pool2d(t, **options), lambda t: F.max_pool2d(t, **options), x)


@settings(max_examples=120, deadline=None)
@given(pools(), st.booleans())
def test_mean_pool_of_any_shape(drawn: tuple[Tensor, dict[str, Any]], count: bool) -> None:
    x, options = drawn
    options["count_include_pad"] = count
    assert_pool(lambda t: pooling.avg_pool2d(t, **options), lambda t: F.avg_pool2d(t, **options), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [2, 3, 17, 64, 130])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [(2, None, 0), (3, 2, 1), ((2, 3), (1, 2), (1, 0)), (1, 3, 0), (5, 1, 2), (2, 3, 1)],
)
def test_pools(
    isa: str, kernel: Any, stride: Any, padding: Any, batch: int, dtype: torch.dtype
) -> None:
    x = normal(batch, 3, 9, 8, dtype=dtype)
    for count in (True, False):
        assert_pool(
            lambda t, count=count: pooling.avg_pool2d(t, kernel, stride, padding, count),
            lambda t, count=count: F.avg_pool2d(
                t, kernel, stride, padding, count_include_pad=count
            ),
            x,
        )
    for values in (x, x.round(), torch.zeros_like(x)):
        assert_pool(
            lambda t: pooling.max_pool2d(t, kernel, stride, padding),
            lambda t: F.max_pool2d(t, kernel, stride, padding),
            values,
        )


def test_max_pool_of_nan_and_infinities(isa: str) -> None:
    x = normal(35, 3, 9, 8)
    x.view(-1)[::7] = torch.nan
    x[0] = torch.nan
    x[1] = -torch.inf
    x[2, :, ::2] = torch.inf
    for kernel, stride, padding in ((2, 2, 0), (3, 2, 1), (3, 1, 1)):
        assert_pool(
            lambda t, a=(kernel, stride, padding): pooling.max_pool2d(t, *a),
            lambda t, a=(kernel, stride, padding): F.max_pool2d(t, *a),
            x,
        )


@pytest.mark.parametrize(
    "size", [1, 2, (1, 4), (4, None), (None, 1), (None, None), [2, 2], (8, 4), 4]
)
def test_adaptive_mean_pool(isa: str, size: Any) -> None:
    assert_pool(
        lambda t: pooling.adaptive_avg_pool2d(t, size),
        lambda t: F.adaptive_avg_pool2d(t, size),
        normal(19, 3, 8, 4),
    )


def test_what_the_pooling_kernels_do_not_take() -> None:
    x = batch_last(normal(4, 3, 8, 8))
    assert pooling.max_pool2d(x.contiguous(), 2) is None
    assert pooling.max_pool2d(x[0], 2) is None
    assert pooling.max_pool2d(x, 3, padding=2) is None  # torch says what is wrong
    assert pooling.max_pool2d(x, 9) is None
    assert pooling.avg_pool2d(x, 0) is None
    assert pooling.avg_pool2d(x, 2, 0) is None
    assert pooling.adaptive_avg_pool2d(x, 3) is None  # windows of several sizes
    assert pooling.adaptive_avg_pool2d(x, 16) is None
    assert pooling.max_pool2d(batch_last(normal(4, 3, 20, 20)), 16) is None


@pytest.mark.parametrize(
    "amounts", [(1, 2), (0, 0), (1, 0, 0, 3), (0, 0, 0, 0, 4, 4), (1, 2, 3, 4, 5, 6), (0, 1)]
)
@pytest.mark.parametrize("value", [None, 0.0, -1.5])
def test_pad(amounts: tuple[int, ...], value: float | None) -> None:
    x = normal(6, 3, 4, 5)
    assert_pool(
        lambda t: pooling.pad(t, amounts, value=value),
        lambda t: F.pad(t, amounts, value=value),
        x,
    )
    padded = pooling.pad(batch_last(x), amounts, value=value)
    assert padded is not None
    assert padded.stride(0) == 1  # still batch-last
    # A strided slice, as a shortcut takes it.
    sliced = pooling.pad(batch_last(x)[:, :, ::2, ::2], amounts, value=value)
    assert sliced is not None
    assert torch.equal(sliced, F.pad(x[:, :, ::2, ::2], amounts, value=value))


def test_what_the_padding_does_not_take() -> None:
    x = batch_last(normal(6, 3, 4, 5))
    assert pooling.pad(x.contiguous(), (1, 1)) is None
    assert pooling.pad(x, (1, -1)) is None
    assert pooling.pad(x, (1, 1), "reflect") is None
    assert pooling.pad(x, (0, 0, 0, 0, 0, 0, 1, 1)) is None
    assert pooling.pad(x, (1,)) is None
    assert pooling.pad(x, ()) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_gives_the_same_bits(
    isa: str, threads: Callable[[int], None], dtype: torch.dtype
) -> None:
    case = norm((100, 13, 12, 12), dtype, True, True)

    def everything(count: int) -> list[Tensor]:
        threads(count)
        leaves = [t for t in case.leaves() if t is not None]
        x, weight, bias, residual = leaves
        mean, variance = case.mean.clone(), case.variance.clone()
        z = batch_norm(
            *(x, weight, bias, mean, variance),
            training=True,
            eps=1e-3,
            relu=True,
            residual=residual,
        )
        highest, average = pooling.max_pool2d(z, 3, 2, 1), pooling.avg_pool2d(z, 2)
        assert highest is not None
        assert average is not None
        loss = highest.square().sum() + average.square().sum()
        return [z, mean, variance, highest, average, *torch.autograd.grad(loss, leaves)]

    single = everything(1)
    for count in (2, 3, 5):
        for result, expected in zip(everything(count), single, strict=True):
            assert torch.equal(result, expected), f"{count} threads"


# Models

Body = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """Two sparse convolutions and two batch norms; what is done with them is the body."""

    def __init__(self, body: Body, **options: Any) -> None:
        super().__init__()
        settings: dict[str, Any] = {"sparsity": 0.5, "generator": torch.Generator().manual_seed(0)}
        self.conv = SparseConv2d(3, 6, 3, padding=1, **settings)
        self.conv2 = SparseConv2d(6, 6, 3, padding=1, bias=False, **settings)
        self.bn, self.bn2 = nn.BatchNorm2d(6, **options), nn.BatchNorm2d(6, **options)
        self.relu, self.relu_in_place = nn.ReLU(), nn.ReLU(inplace=True)
        self.body = body
        self.seen: list[Any] = []
        for i, bn in enumerate((self.bn, self.bn2)):
            if bn.affine:
                bn.weight.data = normal(6, seed=1 + i)
                bn.bias.data = normal(6, seed=3 + i)
            if bn.running_mean is not None and bn.running_var is not None:
                bn.running_mean.copy_(normal(6, seed=5 + i))
                bn.running_var.copy_(normal(6, seed=7 + i).square())
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def plain(model: nn.Module) -> Any:
    """The same model on torch's own layers, not fused."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        unfuse(module)
        for name, child in list(module.named_children()):
            if isinstance(child, SparseConv2d | SparseLinear):
                setattr(module, name, child.to_dense())
    return model


def grads_of(model: nn.Module, like: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by name; those of dense weights at the connections of ``like``'s sparse layers."""
    result: dict[str, Tensor | None] = {}
    for name, module in like.named_modules():
        twin = model.get_submodule(name)
        for key, parameter in twin.named_parameters(recurse=False):
            grad = parameter.grad
            if isinstance(module, SparseConv2d | SparseLinear) and key == "weight":
                c = module.connections
                if grad is not None:
                    flat = grad.permute(0, 2, 3, 1).flatten(1) if grad.dim() == 4 else grad
                    grad = flat[c.outputs(), c.inputs()]
                key = "values"
            result[f"{name}.{key}"] = grad
    return result


def tensors_in(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output
    return [t for item in items for t in tensors_in(item)]


def loss_of(tensors: list[Tensor]) -> Tensor | None:
    parts = [
        (t * torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view(t.shape)).sum() + t.square().sum()
        for t in tensors
        if t.requires_grad
    ]
    return torch.stack(parts).sum() if parts else None


def same_buffers(ours: nn.Module, theirs: nn.Module) -> None:
    expected = dict(theirs.named_buffers())
    for name, buffer in ours.named_buffers():
        if name in expected:
            if buffer.is_floating_point():
                assert_close(buffer, expected[name])
            else:
                assert torch.equal(buffer, expected[name]), name
    assert any("running" in name for name in expected) == any(
        "running" in name for name, _ in ours.named_buffers()
    )


def assert_same(
    model: Any, x: Tensor | None = None, *, may_raise: bool = False, steps: int = 2
) -> None:
    """Outputs, gradients and buffers of the fused model are torch's, over a few steps."""
    reference = plain(model)
    fuse(model)
    for step in range(steps):
        data = normal(8, 3, 6, 6, seed=20 + step) if x is None else x
        inputs = [data.detach().clone().requires_grad_() for _ in range(2)]
        expected = tensors_in(reference(inputs[1]))
        try:
            results = tensors_in(model(inputs[0]))
        except RuntimeError:
            if may_raise:
                return
            raise
        for result, right in zip(results, expected, strict=True):
            assert result.requires_grad == right.requires_grad
            assert_close(result.detach(), right.detach())
        same_buffers(model, reference)
        for m in (model, reference):
            m.zero_grad()
        loss, right_loss = loss_of(results), loss_of(expected)
        assert (loss is None) == (right_loss is None)
        if loss is None or right_loss is None:
            continue
        try:
            right_loss.backward()
        except RuntimeError:
            assert may_raise
            return  # torch itself refuses: its forward was all there was to compare
        loss.backward()
        assert (inputs[0].grad is None) == (inputs[1].grad is None)
        if inputs[0].grad is not None and inputs[1].grad is not None:
            assert_close(inputs[0].grad, inputs[1].grad, 1e-9)
        ours, theirs = grads_of(model, model), grads_of(reference, model)
        for name, grad in theirs.items():
            mine = ours[name]
            if grad is None or mine is None:
                assert mine is None or not mine.any(), name
                assert grad is None or not grad.any(), name
            else:
                assert_close(mine, grad, 1e-9)
        same_buffers(model, reference)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy * 2


BODIES: dict[str, Body] = {}
MAY_RAISE: set[str] = set()


def body(function: Body) -> Body:
    BODIES[function.__name__] = function
    return function


def body_that_may_raise(function: Body) -> Body:
    """What changes a tensor behind a promise: torch's answer or an error, nothing else."""
    MAY_RAISE.add(function.__name__)
    return body(function)


def expressions(**bodies: Body) -> None:
    BODIES.update(bodies)


# Rectified batch norms, in every spelling.
expressions(
    nothing=lambda m, x: m.bn(m.conv(x)),
    f_relu=lambda m, x: F.relu(m.bn(m.conv(x))),
    f_relu_in_place=lambda m, x: F.relu(m.bn(m.conv(x)), inplace=True),
    f_relu_positional=lambda m, x: F.relu(m.bn(m.conv(x)), True),
    f_relu_=lambda m, x: F.relu_(m.bn(m.conv(x))),
    torch_relu=lambda m, x: torch.relu(m.bn(m.conv(x))),
    torch_relu_keyword=lambda m, x: torch.relu(input=m.bn(m.conv(x))),
    torch_relu_=lambda m, x: torch.relu_(m.bn(m.conv(x))),
    method_relu=lambda m, x: m.bn(m.conv(x)).relu(),
    method_relu_=lambda m, x: m.bn(m.conv(x)).relu_(),
    module_relu=lambda m, x: m.relu(m.bn(m.conv(x))),
    module_relu_in_place=lambda m, x: m.relu_in_place(m.bn(m.conv(x))),
    clamp=lambda m, x: m.bn(m.conv(x)).clamp(min=0),
    relu6=lambda m, x: F.relu6(m.bn(m.conv(x))),
    two_layers=lambda m, x: F.relu(m.bn2(m.conv2(F.relu(m.bn(m.conv(x)))))),
    norm_of_norm=lambda m, x: F.relu(m.bn2(m.bn(m.conv(x)))),
    norm_of_relu=lambda m, x: m.bn2(F.relu(m.bn(m.conv(x)))),
    norm_of_relu_of_conv=lambda m, x: m.bn(F.relu(m.conv(x))),
    norm_of_padded=lambda m, x: F.relu(m.bn(F.pad(m.conv(x), (1, 1)))),
    sparse_layer_of_norm=lambda m, x: m.conv2(m.bn(m.conv(x))),
)

# Rectified sparse layers, without a batch norm between.
expressions(
    rectified_layer=lambda m, x: F.relu(m.conv(x)),
    rectified_layer_in_place=lambda m, x: m.relu_in_place(m.conv(x)),
    rectified_layers=lambda m, x: F.relu(m.conv2(F.relu(m.conv(x)))),
    layer_of_layer=lambda m, x: m.conv2(m.conv(x)),
    layer_plus_layer=lambda m, x: F.relu(m.conv(x) + m.conv2(m.conv(x))),
    layer_of_one_image=lambda m, x: F.relu(m.conv(x[0])),
    layer_of_no_image=lambda m, x: F.relu(m.conv(x[:0])),
    layer_of_float=lambda m, x: F.relu(m.conv(x.float().double())),
    custom_function_of_a_layer=lambda m, x: F.relu(Doubled.apply(m.conv(x))),
)


@body
def layer_rectified_and_plain(m: Any, x: Tensor) -> list[Tensor]:
    y = m.conv(x)
    return [F.relu(y), y, m.bn(y)]


@body
def layer_scaled_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y.mul_(2)
    return F.relu(y)


@body
def layer_written_to(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y[:, 0] = 1
    return m.bn(F.relu(y))


@body
def layer_added_to_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y += m.conv(-x)
    return F.relu(y)


@body
def layer_rectified_twice(m: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        y = m.conv(x)
        first, second = F.relu(y), F.relu(y)
        first.add_(1)
        return [first, second, y]


@body
def layer_rectified_in_place_through_a_view(m: Any, x: Tensor) -> list[Tensor]:
    y = m.conv(x)
    view = y.detach()
    return [m.relu_in_place(y), view]


@body
def layer_with_other_values(m: Any, x: Tensor) -> Tensor:
    key = "values" if isinstance(m.conv, SparseConv2d) else "weight"
    own = getattr(m.conv, key)
    return F.relu(torch.func.functional_call(m.conv, {key: own * 2 + 1 * (own != 0)}, (x,)))


@body
def layer_replaced_before_its_output_is_used(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    kept, m.conv.bias = m.conv.bias, nn.Parameter(torch.zeros_like(m.conv.bias))
    z = F.relu(y)
    m.conv.bias = kept
    return z


@body
def layer_that_another_one_stands_in_for(m: Any, x: Tensor) -> list[Tensor]:
    y = m.conv(x)
    z = m.conv(-x)
    return [F.relu(z), F.relu(y)]


# Sums.
expressions(
    plus=lambda m, x: F.relu(m.bn(m.conv(x)) + m.conv(x)),
    plus_from_right=lambda m, x: F.relu(m.conv(x) + m.bn(m.conv(x))),
    torch_add=lambda m, x: torch.add(m.bn(m.conv(x)), m.conv(x)).relu_(),
    torch_add_right=lambda m, x: torch.add(m.conv(x), m.bn(m.conv(x))).relu_(),
    torch_add_keywords=lambda m, x: torch.add(input=m.bn(m.conv(x)), other=m.conv(x)).relu(),
    torch_add_alpha=lambda m, x: F.relu(torch.add(m.bn(m.conv(x)), m.conv(x), alpha=2)),
    method_add=lambda m, x: F.relu(m.bn(m.conv(x)).add(m.conv(x))),
    method_add_=lambda m, x: F.relu(m.bn(m.conv(x)).add_(m.conv(x))),
    method_add_alpha=lambda m, x: F.relu(m.bn(m.conv(x)).add_(m.conv(x), alpha=0.5)),
    plus_number=lambda m, x: F.relu(m.bn(m.conv(x)) + 1),
    number_plus=lambda m, x: F.relu(1 + m.bn(m.conv(x))),
    plus_channel=lambda m, x: F.relu(m.bn(m.conv(x)) + m.bn.weight.view(6, 1, 1)),
    plus_one_sample=lambda m, x: F.relu(m.bn(m.conv(x)) + m.conv(x)[:1]),
    plus_contiguous=lambda m, x: F.relu(m.bn(m.conv(x)) + m.conv(x).contiguous()),
    plus_row_major=lambda m, x: F.relu(m.bn(m.conv(x)) + torch.cat([x, x], 1)),
    plus_float=lambda m, x: F.relu(m.bn(m.conv(x)) + m.conv(x).float()),
    plus_not_rectified=lambda m, x: m.bn(m.conv(x)) + m.conv(x),
    plus_twice=lambda m, x: F.relu(m.bn(m.conv(x)) + m.conv(x) + m.conv(x).exp()),
    plus_itself=lambda m, x: (lambda y: F.relu(y + y))(m.bn(m.conv(x))),
    two_norms=lambda m, x: F.relu(m.bn(m.conv(x)) + m.bn2(m.conv(x))),
    minus=lambda m, x: F.relu(m.bn(m.conv(x)) - m.conv(x)),
    times=lambda m, x: F.relu(m.bn(m.conv(x)) * m.conv(x)),
    minus_from_right=lambda m, x: F.relu(m.conv(x) - m.bn(m.conv(x))),
    plus_frozen=lambda m, x: F.relu(m.bn(m.conv(x)) + m.conv(x).detach()),
)


@body
def residual_in_place(m: Any, x: Tensor) -> Tensor:
    identity = m.conv(x)
    out = m.bn(m.conv2(identity))
    out += identity
    return m.relu_in_place(out)


@body
def residual_block(m: Any, x: Tensor) -> Tensor:
    identity = m.conv(x)
    out = m.bn2(m.conv2(F.relu(m.bn(identity))))
    return F.relu(out + identity)


@body
def in_place_sum_with_a_norm(m: Any, x: Tensor) -> Tensor:
    out = m.conv(x).clone()
    out += m.bn(m.conv(x))
    return F.relu(out)


@body
def in_place_sum_with_itself(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    y += y
    return F.relu(y)


@body
def in_place_sum_twice(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    y += m.conv(x)
    y += m.conv(x)
    return F.relu(y)


@body
def in_place_sum_seen_through_another_name(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    same = y
    y.add_(m.conv(x))
    return F.relu(same)


# The same output used more than once.


@body
def rectified_and_plain(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    return [F.relu(y), y]


@body
def plain_and_rectified(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    return [y * 2, F.relu(y)]


@body
def sum_and_plain(m: Any, x: Tensor) -> list[Tensor]:
    y, s = m.bn(m.conv(x)), m.conv(x)
    return [F.relu(y + s), F.relu(y), y, y + s]


@body
def rectified_twice(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    return [F.relu(y), F.relu(y) * 2]


@body
def rectified_twice_and_one_changed(m: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        y = m.bn(m.conv(x))
        first, second = F.relu(y), F.relu(y)
        first.add_(1)
    return [first, second]


@body
def rectified_changed_and_rectified_again(m: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        y = m.bn(m.conv(x))
        first = F.relu(y)
        first.mul_(3)
        return [first, F.relu(y), y]


@body
def rectified_in_place_and_used_again(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    z = F.relu(y, inplace=True)
    return [z, y * 2, y + m.conv(x)]


@body
def sum_kept_while_the_norm_is_rectified_in_place(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    total = y + m.conv(x)
    F.relu_(y)
    return [total, y]


# The output changed in place.


@body
def scaled_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    y.mul_(2)
    return F.relu(y)


@body
def shifted_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    y.add_(1)
    return F.relu(y)


@body
def written_to(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    y[:, 0] = 1
    return F.relu(y)


@body
def written_to_after_rectifying(m: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        y = m.bn(m.conv(x))
        z = F.relu(y)
        y.add_(1)
        return [z, F.relu(y), y]


@body
def clamped_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    y.clamp_(-0.5, 0.5)
    return torch.relu(y)


@body
def leaky_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    F.leaky_relu(y, 0.1, inplace=True)
    return y + m.conv(x)


@body
def a_view_of_it_written_to(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    y[:, :2].mul_(3)
    return F.relu(y)


@body
def a_view_of_it_before_rectifying_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    view = y.view(y.shape)
    F.relu_(y)
    return view * 1


@body
def a_detached_view_before_rectifying_in_place(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    view = y.detach()
    return [m.relu_in_place(y), view]


@body
def a_view_before_adding_in_place(m: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        y = m.bn(m.conv(x))
        view = y[:, 1]
        y += m.conv(x)
        return [y, view]


# What it was computed from changed in place, before it is used.


@body_that_may_raise
def input_shifted(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(h)
    h.add_(1)
    return F.relu(y)


@body_that_may_raise
def input_rectified_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(h)
    F.relu(h, inplace=True)
    return y


@body_that_may_raise
def input_rectified_in_place_and_added(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(h)
    h = F.relu(h, inplace=True)
    return y + h


@body_that_may_raise
def input_dropped_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(h)
    F.dropout(h, 1.0, training=True, inplace=True)
    y += m.conv(x)
    return F.relu(y)


@body_that_may_raise
def input_written_to(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(h)
    h[:, 0] = 3
    return F.relu(y)


@body_that_may_raise
def view_of_the_input_changed(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    view = h[:, 1:3]
    y = m.bn(h)
    view.mul_(2)
    return F.relu(y)


@body_that_may_raise
def data_of_the_input_changed(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(h)
    h.data.mul_(2)
    return y.detach()


@body_that_may_raise
def input_overwritten_through_out(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.conv(x)
        y = m.bn(h)
        torch.mul(h, 2, out=h)
        return F.relu(y)


@body_that_may_raise
def input_used_by_foreach(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.conv(x)
        y = m.bn(h)
        torch._foreach_mul_([h], 2.0)
        return F.relu(y)


@body_that_may_raise
def residual_changed(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(m.conv(x)) + h
    h.mul_(2)
    return F.relu(y)


@body_that_may_raise
def residual_rectified_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(m.conv(x))
    y += h
    F.relu(h, inplace=True)
    return F.relu(y)


@body_that_may_raise
def residual_rectified_in_place_and_added_again(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    y = m.bn(m.conv(x)) + h
    F.relu(h, inplace=True)
    return F.relu(y + h)


@body_that_may_raise
def residual_is_a_norm_changed_in_place(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.bn(m.conv(x))
        y = m.bn2(m.conv(x)) + h
        h.mul_(2)
        return F.relu(y)


@body_that_may_raise
def input_of_a_layer_changed(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    y = m.conv(h)
    h.add_(1)
    return F.relu(y)


@body_that_may_raise
def input_of_a_layer_rectified_in_place(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    y = m.conv(h)
    F.relu(h, inplace=True)
    return F.relu(y)


@body_that_may_raise
def data_of_a_layers_input_changed(m: Any, x: Tensor) -> Tensor:
    h = x * 2
    y = m.conv(h)
    h.data.mul_(2)
    return F.relu(y).detach()


@body_that_may_raise
def bias_of_a_layer_changed(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.conv(x)
        m.conv.bias.add_(1)
        result = F.relu(y)
        m.conv.bias.sub_(1)
        return result


@body_that_may_raise
def bias_of_a_layer_rectified_in_place(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        kept = m.conv.bias.clone()
        y = m.conv(x)
        F.relu(m.conv.bias, inplace=True)
        result = F.relu(y)
        m.conv.bias.copy_(kept)
        return result


@body_that_may_raise
def weight_changed(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.bn(m.conv(x))
        m.bn.weight.mul_(2)
        result = F.relu(y)
        m.bn.weight.div_(2)
        return result


@body_that_may_raise
def statistics_changed(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.bn(m.conv(x))
        m.bn.reset_running_stats()
        return F.relu(y)


# Not used, or only looked at.


@body
def dropped(m: Any, x: Tensor) -> Tensor:
    m.bn(m.conv(x))
    return m.conv(x) * 1


@body
def kept_but_not_used(m: Any, x: Tensor) -> Tensor:
    m.seen = [m.bn(m.conv(x))]
    return m.conv(x) * 1


@body
def overwritten(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    y = m.bn(m.conv2(m.conv(x)))
    return F.relu(y)


@body
def only_its_shape(m: Any, x: Tensor) -> Tensor:
    return torch.full(m.bn(m.conv(x)).shape, 2.0) * m.conv(x).sum()


@body
def looked_at(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    facts = [
        *(y.shape, y.size(), y.size(1), y.size(dim=0), len(y), y.dim(), y.ndim, y.numel()),
        *(y.nelement(), y.ndimension(), y.dtype, y.device, y.layout, y.is_cpu, y.is_cuda),
        *(torch.numel(y), torch.is_floating_point(y), y.is_floating_point(), y.element_size()),
        *(y.requires_grad, y.is_leaf, y.grad_fn is None, isinstance(y, Tensor)),
        *(torch.is_tensor(y), y.is_sparse, y.type(), y.itemsize, y.nbytes, y.is_meta),
        *(
            torch.is_complex(y),
            bool((y > 9).any()),
            torch.numel(input=y),
            y.untyped_storage().nbytes(),
        ),
    ]
    m.seen.append(facts)
    return [F.relu(y)]


@body
def statistics_read_after_the_call(m: Any, x: Tensor) -> list[Tensor]:
    y = m.bn(m.conv(x))
    if m.bn.running_mean is None:
        return [y]
    mean, variance = m.bn.running_mean.clone(), m.bn.running_var * 1
    return [F.relu(y), mean, variance]


@body
def statistics_used_by_another_norm(m: Any, x: Tensor) -> list[Tensor]:
    h = m.conv(x)
    mean, variance = m.bn.running_mean, m.bn.running_var
    if mean is None:
        return [h]
    first = F.batch_norm(h, mean, variance, training=True, momentum=0.3)
    second = F.batch_norm(h * 2, mean, variance, training=True, momentum=0.3)
    third = F.batch_norm(h, mean.clone(), variance.clone(), training=False)
    return [F.relu(third), F.relu(second), F.relu(first)]


# Other functions of it.
expressions(
    cat=lambda m, x: torch.cat([m.bn(m.conv(x)), m.conv(x)], 1),
    stack=lambda m, x: torch.stack([m.bn(m.conv(x)), m.bn2(m.conv(x))]),
    chunk=lambda m, x: list(m.bn(m.conv(x)).chunk(2, 1)),
    unbind=lambda m, x: list(m.bn(m.conv(x)).unbind(0)),
    iterate=lambda m, x: [t * 2 for t in m.bn(m.conv(x))],
    index=lambda m, x: m.bn(m.conv(x))[:, 1:4, ::2],
    mask=lambda m, x: (lambda y: y[y > 0])(m.bn(m.conv(x))),
    where=lambda m, x: (lambda y: torch.where(y > 0, y, 0.1 * y))(m.bn(m.conv(x))),
    mean=lambda m, x: m.bn(m.conv(x)).mean((2, 3)),
    flatten=lambda m, x: m.bn(m.conv(x)).flatten(1),
    permute=lambda m, x: m.bn(m.conv(x)).permute(0, 2, 3, 1).contiguous(),
    negative=lambda m, x: -m.bn(m.conv(x)),
    power=lambda m, x: m.bn(m.conv(x)) ** 2,
    matmul=lambda m, x: m.bn(m.conv(x)) @ torch.ones(6, 2, dtype=x.dtype),
    einsum=lambda m, x: torch.einsum("nchw,nchw->nc", m.bn(m.conv(x)), m.conv(x)),
    silu=lambda m, x: F.silu(m.bn(m.conv(x))),
    detach=lambda m, x: F.relu(m.bn(m.conv(x)).detach()) + m.conv(x),
    clone=lambda m, x: F.relu(m.bn(m.conv(x)).clone()),
    to_float=lambda m, x: F.relu(m.bn(m.conv(x)).float()),
    contiguous=lambda m, x: F.relu(m.bn(m.conv(x)).contiguous()),
    numpy=lambda m, x: torch.from_numpy(m.bn(m.conv(x)).detach().numpy().copy()),
    to_list=lambda m, x: torch.tensor(m.bn(m.conv(x))[0].tolist(), dtype=x.dtype),
    item=lambda m, x: m.conv(x) * m.bn(m.conv(x)).max().item(),
    deepcopied=lambda m, x: copy.deepcopy(m.bn(m.conv(x)).detach()),
    zeros_like=lambda m, x: torch.zeros_like(m.bn(m.conv(x))) + m.conv(x),
    new_zeros=lambda m, x: m.bn(m.conv(x)).new_zeros(3) + m.conv(x).sum(),
    layer_norm=lambda m, x: F.layer_norm(m.bn(m.conv(x)), (6, 6)),
    dense_convolution=lambda m, x: F.conv2d(m.bn(m.conv(x)), torch.ones(2, 6, 3, 3, dtype=x.dtype)),
    as_a_dict=lambda m, x: {"a": m.bn(m.conv(x)), "b": (F.relu(m.bn2(m.conv(x))),)},
    without_grad=lambda m, x: _no_grad(m, x),
    dropout_in_eval=lambda m, x: F.dropout(F.relu(m.bn(m.conv(x))), 0.5, training=False),
)


def _no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.bn(m.conv(x))
    return F.relu(y) + m.conv(x)


# Pooling and padding, as functions and modules.
expressions(
    max_pool=lambda m, x: F.max_pool2d(F.relu(m.bn(m.conv(x))), 2),
    max_pool_of_norm=lambda m, x: F.max_pool2d(m.bn(m.conv(x)), 3, 2, 1),
    max_pool_keywords=lambda m, x: F.max_pool2d(m.conv(x), kernel_size=2, stride=1, padding=1),
    max_pool_torch=lambda m, x: torch.max_pool2d(m.conv(x), (2, 3), stride=(1, 2)),
    max_pool_dilated=lambda m, x: F.max_pool2d(m.conv(x), 2, dilation=2),
    max_pool_ceil=lambda m, x: F.max_pool2d(m.conv(x), 4, 3, ceil_mode=True),
    max_pool_module=lambda m, x: nn.MaxPool2d(2, ceil_mode=False)(F.relu(m.bn(m.conv(x)))),
    max_pool_indices=lambda m, x: F.max_pool2d(m.bn(m.conv(x)), 2, return_indices=True)[0],
    max_pool_unbatched=lambda m, x: F.max_pool2d(m.conv(x)[0], 2),
    mean_pool=lambda m, x: F.avg_pool2d(F.relu(m.bn(m.conv(x))), 2),
    mean_pool_of_norm=lambda m, x: F.avg_pool2d(m.bn(m.conv(x)), 3, 2, 1, False, False),
    mean_pool_keywords=lambda m, x: F.avg_pool2d(m.conv(x), kernel_size=3, count_include_pad=False),
    mean_pool_ceil=lambda m, x: F.avg_pool2d(m.conv(x), 4, 3, ceil_mode=True),
    mean_pool_divisor=lambda m, x: F.avg_pool2d(m.conv(x), 2, divisor_override=3),
    mean_pool_module=lambda m, x: nn.AvgPool2d(3, 2, 1, count_include_pad=False)(m.conv(x)),
    global_pool=lambda m, x: F.adaptive_avg_pool2d(F.relu(m.bn(m.conv(x))), 1).flatten(1),
    global_pool_of_norm=lambda m, x: nn.AdaptiveAvgPool2d((1, 1))(m.bn(m.conv(x))),
    adaptive_pool=lambda m, x: F.adaptive_avg_pool2d(m.conv(x), (4, 5)),
    adaptive_max_pool=lambda m, x: F.adaptive_max_pool2d(m.bn(m.conv(x)), 2),
    pad=lambda m, x: F.pad(F.relu(m.bn(m.conv(x))), (1, 2, 0, 1)),
    pad_of_norm=lambda m, x: F.pad(m.bn(m.conv(x)), (1, 1), value=2.0),
    pad_keywords=lambda m, x: F.pad(input=m.bn(m.conv(x)), pad=(1, 1), mode="constant"),
    pad_channels=lambda m, x: F.pad(m.conv(x)[:, :, ::2, ::2], (0, 0, 0, 0, 2, 4)),
    pad_reflect=lambda m, x: F.pad(m.bn(m.conv(x)), (1, 1, 1, 1), mode="reflect"),
    pad_circular=lambda m, x: F.pad(m.conv(x), (1, 1, 1, 1), mode="circular"),
    pad_negative=lambda m, x: F.pad(m.conv(x), (-1, 1)),
    pad_module=lambda m, x: m.conv2(nn.ZeroPad2d(2)(m.bn(m.conv(x)))),
    pad_batch=lambda m, x: F.pad(m.conv(x), (0, 0, 0, 0, 0, 0, 1, 2)),
    pad_nothing=lambda m, x: F.pad(m.conv(x), ()),
    upsample=lambda m, x: F.interpolate(m.bn(m.conv(x)), scale_factor=2),
)

# Functions that torch's overrides do not see.


expressions(
    custom_function=lambda m, x: Doubled.apply(m.bn(m.conv(x))),
    custom_function_then_relu=lambda m, x: F.relu(Doubled.apply(m.bn(m.conv(x)))) + m.conv(x),
    checkpoint_of_a_block=lambda m, x: checkpoint(
        lambda t: F.relu(m.bn(m.conv(t))), x, use_reentrant=False
    ),
    checkpoint_of_a_block_reentrant=lambda m, x: checkpoint(
        lambda t: F.relu(m.bn(m.conv(t))), x, use_reentrant=True
    ),
    checkpoint_of_a_norm=lambda m, x: F.relu(checkpoint(m.bn, m.conv(x), use_reentrant=False)),
    checkpoint_of_a_norm_reentrant=lambda m, x: F.relu(
        checkpoint(m.bn, m.conv(x), use_reentrant=True)
    ),
    checkpoint_after_a_norm=lambda m, x: checkpoint(
        lambda t: F.relu(m.conv2(t)), m.bn(m.conv(x)), use_reentrant=False
    ),
    checkpoint_after_a_norm_reentrant=lambda m, x: checkpoint(
        lambda t: F.relu(m.conv2(t)), m.bn(m.conv(x)), use_reentrant=True
    ),
    checkpoint_rectifies=lambda m, x: checkpoint(F.relu, m.bn(m.conv(x)), use_reentrant=False),
)


@pytest.mark.parametrize("name", BODIES)
def test_training(name: str) -> None:
    assert_same(Net(BODIES[name]), may_raise=name in MAY_RAISE)


@pytest.mark.parametrize("name", BODIES)
def test_evaluation(name: str) -> None:
    assert_same(Net(BODIES[name]).eval(), may_raise=name in MAY_RAISE, steps=1)


@pytest.mark.parametrize("name", ["f_relu", "residual_block", "rectified_and_plain", "max_pool"])
@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.0},
        {"momentum": 1.0},
        {"momentum": 0.3, "eps": 0.1},
        {"affine": False, "track_running_stats": False},
    ],
)
def test_kinds_of_batch_norm(name: str, options: dict[str, Any]) -> None:
    assert_same(Net(BODIES[name], **options), steps=3)
    assert_same(Net(BODIES[name], **options).eval(), steps=1)


def test_a_batch_norm_frozen_in_a_training_model() -> None:
    model = Net(BODIES["residual_block"])
    model.bn.eval()
    for parameter in model.bn.parameters():
        parameter.requires_grad_(False)
    assert_same(model)


def test_training_and_evaluation_in_turn() -> None:
    model = Net(BODIES["residual_block"])
    reference = plain(model)
    fuse(model)
    optimizers = [torch.optim.SGD(m.bn.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(6):
        x = normal(8, 3, 6, 6, seed=step)
        for m, optimizer in zip((model, reference), optimizers, strict=True):
            m.train(step % 2 == 0)
            m.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
        assert_close(model(x), reference(x), 1e-9)
        same_buffers(model, reference)


@pytest.mark.parametrize("batch", [1, 2, 3, 16, 33])
def test_any_batch_size(batch: int) -> None:
    for name in ("residual_block", "max_pool", "global_pool", "pad"):
        assert_same(Net(BODIES[name]), normal(batch, 3, 6, 6), steps=1)


def test_float32() -> None:
    model = Net(BODIES["residual_block"]).float()
    reference = plain(model)
    fuse(model)
    x = normal(16, 3, 6, 6, dtype=torch.float32)
    torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-4)


def test_a_batch_that_is_too_small_is_refused_as_by_torch() -> None:
    model = Net(lambda m, x: F.relu(m.bn(m.conv(x)[:, :, :1, :1])))
    fuse(model)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(normal(1, 3, 6, 6))
    assert_same(model)


def test_running_statistics_are_updated_once_per_call() -> None:
    for name in ("sum_and_plain", "rectified_twice", "kept_but_not_used", "dropped"):
        model = Net(BODIES[name])
        reference = plain(model)
        fuse(model)
        for step in range(4):
            for m in (model, reference):
                m(normal(8, 3, 6, 6, seed=step))
        assert model.bn.num_batches_tracked == reference.bn.num_batches_tracked == 4
        same_buffers(model, reference)


class Features(nn.Module):
    """Linear layers and sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first = SparseLinear(7, 12, sparsity=0.5, generator=torch.Generator().manual_seed(0))
        self.norm = nn.BatchNorm1d(12)
        self.second = SparseLinear(12, 4, sparsity=0.5, generator=torch.Generator().manual_seed(1))
        self.norm2 = nn.BatchNorm1d(4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)))
        return self.norm2(self.second(y))


def test_batch_norm_after_linear_layers() -> None:
    assert_same(Features(), normal(9, 7))
    assert_same(Features(), normal(2, 7))
    assert_same(Features().eval(), normal(1, 7))


def test_three_dimensional_batch_norm() -> None:
    def sequences(m: Any, x: Tensor) -> Tensor:
        return F.relu(m.norm(m.conv(x).flatten(2)))

    model = Net(sequences)
    model.norm = nn.BatchNorm1d(6).double()
    assert_same(model)


# Hooks


def hooked(register: Callable[[Any, list[Any]], None], body: Body) -> tuple[list[Any], list[Any]]:
    """What hooks have seen, in the fused and in the plain model, after one step of each."""
    model = Net(body)
    seen = []
    for fused in (True, False):
        mine: list[Any] = []
        m = copy.deepcopy(model) if fused else plain(model)
        if fused:
            fuse(m)
        register(m, mine)
        x = normal(8, 3, 6, 6).requires_grad_()
        loss = loss_of(tensors_in(m(x)))
        assert loss is not None
        loss.backward()
        seen.append([*mine, x.grad, m.bn.weight.grad, m.bn2.weight.grad])
    return seen[0], seen[1]


def on_output(register: Callable[[Tensor, list[Any]], Any]) -> Callable[[Any, list[Any]], None]:
    """A forward hook of the first batch norm."""

    def attach(model: Any, seen: list[Any]) -> None:
        model.bn.register_forward_hook(lambda module, args, output: register(output, seen))

    return attach


HOOKS: dict[str, Callable[[Any, list[Any]], None]] = {
    "keeps the output": on_output(lambda y, seen: seen.append(y)),
    "keeps a detached output": on_output(lambda y, seen: seen.append(y.detach())),
    "keeps a copy": on_output(lambda y, seen: seen.append(y.detach().clone())),
    "keeps the mean": on_output(lambda y, seen: seen.append(y.mean())),
    "scales the output": on_output(lambda y, seen: y * 2),
    "changes the output in place": on_output(lambda y, seen: y.mul_(2)),
    "changes the output in place, returns nothing": on_output(
        lambda y, seen: seen.append(float(y.mul_(2).detach().sum()))
    ),
    "sees the gradient": on_output(
        lambda y, seen: seen.append(y.register_hook(lambda g: seen.append(g))) and None
    ),
    "changes the gradient": on_output(
        lambda y, seen: seen.append(y.register_hook(lambda g: 2 * g)) and None
    ),
    "module gradient": lambda m, seen: m.bn.register_full_backward_hook(
        lambda module, before, after: seen.extend([*before, *after])
    ),
    "module gradient of the rectifier": lambda m, seen: m.relu.register_full_backward_hook(
        lambda module, before, after: seen.extend([*before, *after])
    ),
    "module gradient of the whole": lambda m, seen: m.register_full_backward_hook(
        lambda module, before, after: seen.extend(after)
    ),
    "input of the rectifier": lambda m, seen: m.relu.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].detach().clone())
    ),
    "changes the input of the rectifier": lambda m, seen: m.relu.register_forward_pre_hook(
        lambda module, args: (args[0] - 0.3,)
    ),
    "output of the whole": lambda m, seen: m.register_forward_hook(
        lambda module, args, output: seen.append(output.detach().clone())
    ),
}
HOOKS |= {
    "sees the gradient of the layer": lambda m, seen: m.conv.register_forward_hook(
        lambda module, args, output: (
            seen.append(output.register_hook(lambda g: seen.append(g))) and None
        )
    ),
    "module gradient of the layer": lambda m, seen: m.conv.register_full_backward_hook(
        lambda module, before, after: seen.extend(after)
    ),
}
HOOKED: dict[str, Body] = {
    "rectified": lambda m, x: m.relu(m.bn(m.conv(x))),
    "residual": lambda m, x: m.relu(m.bn(m.conv(x)) + m.conv(x)),
    "plain": lambda m, x: m.conv2(m.relu(m.bn(m.conv(x)) * 1)),
    "without a norm": lambda m, x: m.bn2(m.relu(m.conv(x))) + m.bn(m.relu(m.conv(2 * x))),
}


@pytest.mark.parametrize("body", HOOKED)
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks(hook: str, body: str) -> None:
    ours, theirs = hooked(HOOKS[hook], HOOKED[body])
    assert len(ours) == len(theirs)
    for mine, right in zip(ours, theirs, strict=True):
        if isinstance(right, Tensor):
            assert_close(mine.detach().clone(), right.detach(), 1e-9)
        elif isinstance(right, float):
            assert mine == pytest.approx(right)
        else:
            assert type(mine) is type(right)


def test_a_gradient_kept_at_the_output() -> None:
    def retained(m: Any, x: Tensor) -> Tensor:
        y = m.bn(m.conv(x))
        y.retain_grad()
        m.seen.append(y)
        return F.relu(y)

    model = Net(retained)
    reference = plain(model)
    fuse(model)
    for m in (model, reference):
        m(normal(8, 3, 6, 6)).square().sum().backward()
    assert reference.seen[0].grad is not None
    assert model.seen[0].grad is not None
    assert_close(model.seen[0].grad, reference.seen[0].grad, 1e-9)


# What comes out, and what stays behind


def outside_is_untouched() -> None:
    """No mode is left active: torch's functions are torch's again."""
    x = batch_last(normal(4, 3, 2, 2))
    y = F.batch_norm(x, None, None, training=True)
    assert type(y) is Tensor
    assert type(F.relu(y)) is Tensor


def test_results_are_ordinary_tensors_in_batch_last_memory() -> None:
    model = Net(lambda m, x: {"norm": m.bn(m.conv(x)), "sum": [m.bn2(m.conv(x)) + m.conv(x)]})
    fuse(model)
    result = model(normal(8, 3, 6, 6))
    for tensor in (result["norm"], result["sum"][0]):
        assert type(tensor) is Tensor
        assert tensor.stride() == (1, 288, 48, 8)
    outside_is_untouched()


class Answer:
    """An output that no tree of tensors knows about."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def test_an_output_inside_an_object() -> None:
    model = Net(lambda m, x: Answer(m.bn(m.conv(x))))
    reference = plain(model)
    fuse(model)
    results = [m(normal(8, 3, 6, 6)) for m in (model, reference)]
    same_buffers(model, reference)
    for use in (lambda t: t * 2, F.relu, lambda t: t.mean(), lambda t: t + t):
        assert_close(use(results[0].value).detach(), use(results[1].value).detach())
    for m, result in zip((model, reference), results, strict=True):
        F.relu(result.value).square().sum().backward()
        assert m.bn.weight.grad is not None
    assert_close(model.bn.weight.grad, reference.bn.weight.grad, 1e-9)


def test_an_output_kept_by_the_model() -> None:
    model = Net(BODIES["kept_but_not_used"])
    reference = plain(model)
    fuse(model)
    for m in (model, reference):
        m(normal(8, 3, 6, 6))
    kept = [m.seen[0] for m in (model, reference)]
    assert_close(kept[0].detach(), kept[1].detach())
    assert_close(F.relu(kept[0]).detach(), F.relu(kept[1]).detach())
    assert_close((kept[0] * 2).detach(), (kept[1] * 2).detach())


def test_facts_about_a_promise_are_those_of_the_result() -> None:
    for training in (True, False):
        model = Net(BODIES["looked_at"]).train(training)
        reference = plain(model)
        fuse(model)
        for m in (model, reference):
            m(normal(8, 3, 6, 6))
        assert model.seen == reference.seen


def in_a_thread(function: Callable[[], None]) -> None:
    """Modes are a thread's own: what a failure leaves active does not spoil the other tests."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_an_error_in_the_forward(error: type[BaseException]) -> None:
    def failing(m: Any, x: Tensor) -> Tensor:
        y = m.bn(m.conv(x))
        if m.seen:
            raise m.seen.pop()
        return F.relu(y)

    def check() -> None:
        model = Net(failing)
        model.seen = [error("on purpose")]
        fuse(model)
        with pytest.raises(error, match="on purpose"):
            model(normal(8, 3, 6, 6))
        outside_is_untouched()
        assert_same(model)
        outside_is_untouched()

    in_a_thread(check)


def test_an_error_before_the_forward() -> None:
    def refuse(module: Any, args: Any) -> None:
        raise ValueError("on purpose")

    def forgiving(m: Any, x: Tensor) -> Tensor:
        with pytest.raises(ValueError, match="on purpose"):
            m.inner(x)
        return F.relu(m.bn(m.conv(x)))

    def check() -> None:
        model = Net(forgiving)
        model.inner = Net(BODIES["f_relu"])
        model.inner.register_forward_pre_hook(refuse)
        fuse(model.inner)
        assert_same(model)
        outside_is_untouched()

    in_a_thread(check)


def test_an_error_that_the_outer_model_handles() -> None:
    def failing(m: Any, x: Tensor) -> Tensor:
        y = m.bn(m.conv(x))
        raise ValueError(f"on purpose, with {y.shape}")

    def forgiving(m: Any, x: Tensor) -> Tensor:
        y = m.bn(m.conv(x))
        with contextlib.suppress(ValueError):
            y = m.inner(x)
        return F.relu(y + m.conv(x))

    model = Net(forgiving)
    model.inner = Net(failing)
    for m in (model, model.inner):
        fuse(m)
    assert_same(model)
    outside_is_untouched()


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Net(BODIES["residual_block"])
        self.second = Net(lambda m, x: m.bn(m.conv2(x)))
        self.bn = nn.BatchNorm2d(6).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.first(x))
        return F.relu(self.second(y) + y)


@pytest.mark.parametrize("inner", [True, False])
def test_fused_models_inside_a_fused_model(inner: bool) -> None:
    model = Nested()
    if inner:
        fuse(model.first)
        fuse(model.second)
    assert_same(model)
    outside_is_untouched()


def test_fusing_twice_and_taking_it_back() -> None:
    model = Net(BODIES["residual_block"])
    untouched = set(model.state_dict())
    fuse(model)
    fuse(model)
    assert is_fused(model)
    assert set(model.state_dict()) == untouched
    assert_same(model)
    unfuse(model)
    assert not is_fused(model)
    assert_same(model)


def test_no_grad_and_inference_mode() -> None:
    for training in (True, False):
        for mode in (torch.no_grad, torch.inference_mode):
            model = Net(BODIES["residual_block"]).train(training)
            reference = plain(model)
            fuse(model)
            with mode():
                x = normal(8, 3, 6, 6)
                y, expected = model(x), reference(x)
                assert not y.requires_grad
                assert_close(y.clone(), expected)
            same_buffers(model, reference)


def test_a_model_in_other_threads() -> None:
    model = Net(BODIES["residual_block"]).eval()
    reference = plain(model)
    fuse(model)
    inputs = [normal(8, 3, 6, 6, seed=i) for i in range(6)]
    results: dict[int, Tensor] = {}

    def work(i: int) -> None:
        for _ in range(5):
            results[i] = model(inputs[i]).detach()

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for i, x in enumerate(inputs):
        assert_close(results[i], reference(x).detach())
    outside_is_untouched()


def test_training_in_a_thread_does_not_touch_the_others() -> None:
    entered, leave, seen = threading.Event(), threading.Event(), []

    def waiting(m: Any, x: Tensor) -> Tensor:
        entered.set()
        assert leave.wait(30)
        return F.relu(m.bn(m.conv(x)))

    model = Net(waiting)
    fuse(model)
    worker = threading.Thread(target=lambda: seen.append(model(normal(8, 3, 6, 6))))
    worker.start()
    assert entered.wait(30)
    outside_is_untouched()
    leave.set()
    worker.join()
    assert type(seen[0]) is Tensor


def through_pickle(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def residual(m: Any, x: Tensor) -> Tensor:
    return BODIES["residual_block"](m, x)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_copies_of_a_fused_model(duplicate: Callable[[nn.Module], Any]) -> None:
    model = Net(residual)
    fuse(model)
    model(normal(8, 3, 6, 6))
    copied = duplicate(model)
    assert is_fused(copied)
    fuse(copied)
    assert is_fused(copied)  # it is
    x = normal(8, 3, 6, 6)
    assert torch.equal(copied.eval()(x), model.eval()(x))
    assert copied(x).stride(0) == 1
    assert_same(copied.train())
    unfuse(copied)
    assert not is_fused(copied)


def test_copying_leaves_no_shared_statistics() -> None:
    model = Net(residual)
    fuse(model)
    copied = copy.deepcopy(model)
    before = copied.bn.running_mean.clone()
    model(normal(8, 3, 6, 6))
    assert torch.equal(copied.bn.running_mean, before)
    assert not torch.equal(model.bn.running_mean, before)


def test_checkpointing_a_fused_model() -> None:
    for reentrant in (True, False):
        model = Net(BODIES["residual_block"])
        fuse(model)
        outer = Net(
            lambda m, x, reentrant=reentrant: checkpoint(m.inner, x, use_reentrant=reentrant)
        )
        outer.inner = model
        assert_same(outer)
        reference = plain(model)
        inputs = [normal(8, 3, 6, 6).requires_grad_() for _ in range(2)]
        for m, x in zip((model, reference), inputs, strict=True):
            checkpoint(m, x, use_reentrant=reentrant).square().sum().backward()
        assert inputs[0].grad is not None
        assert inputs[1].grad is not None
        assert_close(inputs[0].grad, inputs[1].grad, 1e-9)
        outside_is_untouched()


@pytest.mark.parametrize("name", ["f_relu", "residual_block", "max_pool", "mean_pool", "nothing"])
def test_a_second_derivative_raises(name: str) -> None:
    model = Net(BODIES[name])
    fuse(model)
    x = normal(8, 3, 6, 6).requires_grad_()
    y = model(x)
    with pytest.raises(RuntimeError):  # noqa: PT012 (either step may refuse)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (first.square().sum() + y.sum()).backward()


def test_going_back_twice() -> None:
    model = Net(BODIES["residual_block"])
    fuse(model)
    x = normal(8, 3, 6, 6).requires_grad_()
    loss = model(x).square().sum()
    first = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
    second = torch.autograd.grad(loss, [x, *model.parameters()])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["residual_block", "max_pool", "global_pool", "pad"])
def test_a_traced_model(name: str) -> None:
    model = Net(BODIES[name]).eval()
    reference = plain(model)
    fuse(model)
    traced = make_fx(model)(normal(8, 3, 6, 6))
    x = normal(8, 3, 6, 6, seed=1)
    assert_close(traced(x).detach(), reference(x).detach())  # not what was seen while tracing


def test_autocast_runs_in_float32() -> None:
    model = Net(BODIES["residual_block"]).float()
    fuse(model)
    model.eval()
    x = normal(8, 3, 6, 6, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
def test_a_compiled_fused_model() -> None:
    model = Net(BODIES["residual_block"])
    reference = plain(model)
    fuse(model)
    torch.compiler.reset()
    try:
        compiled = torch.compile(model, backend="aot_eager")
    except RuntimeError as error:
        pytest.skip(f"torch.compile is unavailable: {error}")
    for step in range(2):
        x = normal(8, 3, 6, 6, seed=step)
        y, expected = compiled(x), reference(x)
        assert_close(y.detach(), expected.detach(), 1e-9)
        for m, result in ((model, y), (reference, expected)):
            m.zero_grad()
            result.square().sum().backward()
        assert_close(model.bn.weight.grad, reference.bn.weight.grad, 1e-9)  # type: ignore[arg-type]
        same_buffers(model, reference)
    assert_same(model)
