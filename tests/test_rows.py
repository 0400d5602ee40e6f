"""Linear layers whose input and output are row-major: against dense PyTorch, and without copies."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from products import (
    LINEAR,
    NEEDS,
    Case,
    arranged,
    assert_close,
    assert_same_bits,
    gradients,
    make,
)
from rewire import SparseLinear, ops
from rewire.ops import Convolution, layout

DTYPES = [torch.float32, torch.float64]
# Rows, units in and out, density: around the widths of panels and of what is turned at once.
SHAPES = [
    *((0, 5, 4, 0.5), (1, 9, 7, 0.5), (2, 3, 5, 0.7), (7, 40, 33, 0.2), (16, 16, 16, 0.3)),
    *(
        (31, 17, 65, 0.2),
        (32, 64, 48, 0.1),
        (33, 100, 257, 0.05),
        (65, 1, 30, 0.5),
        (65, 30, 1, 0.5),
    ),
    *((130, 513, 260, 0.02), (200, 300, 20, 0.0), (129, 255, 600, 0.05)),
]


def run_rows(case: Case, relu: bool = False) -> Callable[..., Tensor]:
    return partial(ops.linear, topology=case.topology, row_major=True, relu=relu)


def expected_gradients(case: Case, relu: bool) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients by dense PyTorch in float64."""
    x, values, bias, dy = (t.double() for t in (case.x, case.values, case.bias, case.dy))

    def dense(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = F.linear(x, weight, bias)
        return y.relu() if relu else y

    y, (dx, dw, db) = gradients(dense, (x, case.weight(values), bias), dy, (True,) * 3)
    assert dx is not None
    assert dw is not None
    assert db is not None
    return y, [dx, dw[case.places()], db]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "n_in", "n_out", "density"), SHAPES)
def test_each_shape_agrees_with_dense(
    isa: str, batch: int, n_in: int, n_out: int, density: float, dtype: torch.dtype, relu: bool
) -> None:
    case = make(LINEAR, (batch, n_in), n_out, density, dtype, empty_rows=batch == 130)
    expected_y, expected = expected_gradients(case, relu)
    for needs in NEEDS:
        y, grads = gradients(run_rows(case, relu), (case.x, case.values, case.bias), case.dy, needs)
        assert y.is_contiguous()
        assert_close(y, expected_y)
        for grad, right, need in zip(grads, expected, needs, strict=True):
            if need:
                assert grad is not None
                assert grad.is_contiguous()
                assert_close(grad, right)
    without = ops.linear(case.x, case.values, None, case.topology, row_major=True)
    assert_close(without, F.linear(case.x.double(), case.weight(case.values.double())))


@pytest.mark.parametrize("how", ["batch-last", "expanded", "sliced", "offset"])
def test_any_strides_of_input_and_gradient(isa: str, how: str) -> None:
    case = make(LINEAR, (70, 60), 50, 0.2)
    for changed in ("x", "dy"):
        other = make(LINEAR, (70, 60), 50, 0.2)
        setattr(other, changed, arranged(getattr(case, changed), how))
        expected_y, expected = expected_gradients(other, relu=True)
        tensors = (other.x, other.values, other.bias)
        y, grads = gradients(run_rows(other, relu=True), tensors, other.dy, (True,) * 3)
        assert y.is_contiguous()
        for result, right in zip([y, *grads], [expected_y, *expected], strict=True):
            assert_close(result, right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(32, 700, 600), (100, 600, 700), (1000, 90, 80)])
@pytest.mark.parametrize("density", [0.05, 0.6])
def test_any_number_of_threads_gives_the_same_bits(
    isa: str,
    threads: Callable[[int], None],
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    density: float,
) -> None:
    case = make(LINEAR, shape[:2], shape[2], density, dtype)
    tensors = (case.x, case.values, case.bias)

    def everything(count: int) -> list[Tensor | None]:
        threads(count)
        y, grads = gradients(run_rows(case, relu=True), tensors, case.dy, (True,) * 3)
        _, (dx, _, _) = gradients(run_rows(case), tensors, case.dy, (True, False, False))
        return [y, *grads, dx]

    assert_same_bits(everything)


@pytest.mark.skipif(not ops.instruction_sets(), reason="there are no kernels")
def test_the_input_is_kept_as_it_is() -> None:
    layer = SparseLinear(48, 40, sparsity=0.8)
    x = torch.randn(4, 20, 48, requires_grad=True)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    assert x.data_ptr() in kept


def test_a_layer_by_itself_answers_in_the_memory_of_its_input() -> None:
    layer = SparseLinear(48, 40, sparsity=0.8)
    x = torch.randn(70, 48)
    assert layer(x).is_contiguous()
    assert layer(x[:, None]).is_contiguous()
    y = layer(layout.to_batch_last(x))
    assert layout.prefers_batch_last(y)
    assert torch.equal(y, layer(x))


@pytest.mark.parametrize("relu", [False, True])
def test_a_probe_sees_the_input_and_the_gradient_behind_the_rectifier(isa: str, relu: bool) -> None:
    case = make(LINEAR, (70, 60), 50, 0.2)
    seen: list[Tensor] = []

    def probe(conv: Convolution, x: Tensor, dy: Tensor) -> None:
        seen.extend((x, dy))

    run = partial(run_rows(case, relu), probe=probe)
    y, grads = gradients(run, (case.x, case.values, case.bias), case.dy, (True,) * 3)
    for grad, right in zip(grads, expected_gradients(case, relu)[1], strict=True):
        assert_close(grad, right)
    assert torch.equal(seen[0], case.x)
    assert torch.equal(seen[1], case.dy * (y > 0) if relu else case.dy)


@pytest.mark.usefixtures("small_panels")
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU(inplace=True), nn.GELU(), nn.Identity()])
def test_a_converted_perceptron_of_sequences_agrees_with_dense(activation: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 96), activation, nn.Linear(96, 32))
    model = rewire.sparsify(model, sparsity=0.8)
    dense = rewire.densify(copy.deepcopy(model))
    x = torch.randn(5, 9, 32)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    y, expected = model(ours), dense(theirs)
    assert y.is_contiguous()
    assert_close(y.detach(), expected.detach())
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert_close(ours.grad, theirs.grad)
