"""The kernels of a batch norm in batch-last memory; and threads, of pooling too."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused import DTYPES, TOLERANCE, assert_close, batch_last, marks, normal
from rewire.ops import channels, norms, pooling

pytestmark = marks


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
    norm = norms.Norm(weight, bias, mean, variance, training, eps, relu)
    return channels.batch_norm(x, norm, residual)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.5, 1.0])
def test_running_statistics_take_in_what_is_small_beside_them(
    dtype: torch.dtype, momentum: float
) -> None:
    x = batch_last(normal(9, 4, 3, 3, dtype=dtype) * 1e-6)
    ours, theirs = ([torch.full((4,), -5.0, dtype=dtype), torch.ones(4, dtype=dtype)] for _ in "ab")
    channels.track(*channels.moments(x), x.numel() // 4, momentum, (ours[0], ours[1]))
    F.batch_norm(x, *theirs, training=True, momentum=momentum)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=0)


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
