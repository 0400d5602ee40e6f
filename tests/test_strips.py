"""Convolutions of batches that fill no vectors, whose images are packed in strips, and layers with one tap,
whose positions are samples: every shape agrees with dense PyTorch, by each instruction set."""

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rewire
from bodies import normal
from products import (
    NEEDS,
    Case,
    assert_close,
    assert_same_bits,
    dense_gradients,
    gradients,
    make,
)
from rewire import ops
from rewire.ops import Convolution

pytestmark = pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels")

DTYPES = [torch.float32, torch.float64]
BATCHES = [1, 2, 3, 4, 5, 7, 8, 15, 17, 31, 33, 48, 63, 65, 100, 129]
sizes = st.tuples(st.integers(1, 15), st.integers(1, 15))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kernel, stride = (
        draw(st.tuples(*(st.integers(1, 5),) * 2)),
        draw(st.tuples(*(st.integers(1, 3),) * 2)),
    )
    padding, dilation = (
        draw(st.tuples(*(st.integers(0, 3),) * 2)),
        draw(st.tuples(*(st.integers(1, 3),) * 2)),
    )
    reach = [d * (k - 1) + 1 - 2 * p for k, p, d in zip(kernel, padding, dilation, strict=True)]
    height, width = (max(1, r, size) for r, size in zip(reach, draw(sizes), strict=True))
    shape = (draw(st.sampled_from(BATCHES)), draw(st.integers(1, 9)), height, width)
    conv = Convolution(kernel, stride, padding, dilation)
    density = draw(st.sampled_from([0.05, 0.3, 1.0]))
    n_out, dtype, seed = (
        draw(st.integers(1, 9)),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(0, 99)),
    )
    return make(conv, shape, n_out, density, dtype, seed, draw(st.booleans()))


def compare(case: Case, needs: tuple[bool, ...] = (True, True, True)) -> None:
    right, right_grads = dense_gradients(case)
    y, grads = gradients(case.run, (case.x, case.values, case.bias), case.dy, needs)
    assert_close(y, right)
    for ours, theirs, needed in zip(grads, right_grads, needs, strict=True):
        if needed:
            assert_close(ours, theirs)


@settings(max_examples=60, deadline=None)
@given(
    case=cases(), needs=st.sampled_from(NEEDS), name=st.sampled_from(ops.instruction_sets() or [""])
)
def test_any_shape_agrees_with_dense(case: Case, needs: tuple[bool, ...], name: str) -> None:
    before = ops.instruction_set()
    ops.use_instruction_set(name)
    try:
        compare(case, needs)
    finally:
        ops.use_instruction_set(before)


# Images and kernels for which rows are packed one after the other or together, whole or in blocks of
# columns, with one copy or one for each tap: channels in and out, height, width, kernel, stride, padding.
LAYERS = [
    *(
        (4, 5, 7, 7, 3, 1, 1),
        (4, 5, 4, 4, 3, 2, 1),
        (3, 4, 30, 41, 7, 2, 3),
        (8, 3, 5, 64, 3, 1, 1),
    ),
    *(
        (70, 60, 9, 40, 3, 1, 1),
        (40, 30, 24, 24, 3, 2, 1),
        (6, 6, 12, 12, 1, 2, 0),
        (6, 5, 11, 13, 1, 1, 0),
    ),
    *(
        (2, 3, 1, 50, (1, 5), 1, (0, 2)),
        (3, 2, 2, 2, 3, 1, 1),
        (5, 4, 12, 9, 2, 3, 0),
        (2, 2, 1, 1, 3, 1, 1),
    ),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2, 3, 6, 21, 50, 66])
def test_each_way_to_pack_agrees_with_dense(isa: str, batch: int, dtype: torch.dtype) -> None:
    for n_in, n_out, height, width, *rest in LAYERS:
        kernel, stride, padding = ((n, n) if isinstance(n, int) else n for n in rest)
        conv = Convolution(kernel, stride, padding, (1, 1))  # type: ignore[arg-type]
        compare(make(conv, (batch, n_in, height, width), n_out, 0.2, dtype))


def block(stride: int) -> nn.Module:
    """What a convolution does on its way, in packing and in its backward pass."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 9, 3, stride, 1), nn.BatchNorm2d(9), nn.ReLU()),
        *(nn.Conv2d(9, 7, 1), nn.ReLU(), nn.Conv2d(7, 6, 3, stride, padding=1), nn.ReLU()),
    )


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("batch", [1, 2, 5, 20, 65])
def test_what_is_fused_agrees_with_dense(isa: str, batch: int, stride: int) -> None:
    torch.manual_seed(0)
    model = rewire.sparsify(block(stride).double(), sparsity=0.6)
    dense, found = rewire.densify(copy.deepcopy(model)), []
    for each in (model, dense):
        for seed in range(2):
            x = normal(batch, 3, 11, 10, seed=seed).requires_grad_()
            y = each(x)
            y.backward(normal(*y.shape, seed=2))
        norms = [part for part in each if isinstance(part, nn.BatchNorm2d)]
        small = [p for part in norms for p in (part.weight.grad, part.running_var)]
        found.append([y.detach(), x.grad, *small, each[6].bias.grad, each[8].bias.grad])
    for k in (0, 3, 6, 8):
        kept = model[k].connections
        flat = dense[k].weight.grad.permute(0, 2, 3, 1).flatten(1)
        found[0].append(model[k].values.grad[:, 0])
        found[1].append(flat[kept.outputs(), kept.inputs()])
    for ours, right in zip(*found, strict=True):
        assert_close(ours, right, 1e-9)


@pytest.mark.parametrize("batch", [2, 9, 33, 70])
def test_what_is_not_finite_stays_in_its_sample(isa: str, batch: int) -> None:
    for size, stride in (((7, 7), 1), ((6, 33), 1), ((9, 10), 2)):
        case = make(
            Convolution((3, 3), (stride, stride), (1, 1), (1, 1)), (batch, 6, *size), 5, 0.4
        )
        x, dy, wrong = case.x.clone(), case.dy.clone(), batch // 2
        x[wrong], dy[wrong] = torch.nan, torch.inf
        spoilt = Case(case.conv, case.connections, x, case.values, case.bias, dy)
        needs, others = (True, False, False), torch.arange(batch) != wrong
        y, (dx, *_) = gradients(spoilt.run, (x, case.values, case.bias), dy, needs)
        right, (right_dx, *_) = gradients(
            case.run, (case.x, case.values, case.bias), case.dy, needs
        )
        assert dx is not None
        assert right_dx is not None
        assert torch.equal(y[others], right[others])
        assert torch.equal(dx[others], right_dx[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2, 5, 24, 70])
def test_any_number_of_threads_gives_the_same_bits(
    isa: str, threads: Callable[[int], None], batch: int, dtype: torch.dtype
) -> None:
    for kernel, stride, size in (
        (3, 1, (20, 21)),
        (3, 2, (18, 20)),
        (1, 1, (14, 14)),
        (3, 1, (5, 5)),
    ):
        conv = Convolution((kernel, kernel), (stride, stride), (kernel // 2, kernel // 2), (1, 1))
        case = make(conv, (batch, 30, *size), 20, 0.3, dtype)

        def everything(count: int, case: Case = case) -> list[Tensor | None]:
            threads(count)
            tensors = (case.x, case.values, case.bias)
            y, grads = gradients(case.run, tensors, case.dy, (True,) * 3)
            return [y, *grads]

        assert_same_bits(everything)
