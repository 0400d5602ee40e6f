"""Linear layers around the widths of what is turned at once, alone and with a ReLU in a converted model:
against dense PyTorch, and without copies."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from products import LINEAR, NEEDS, Case, arranged, assert_close, assert_same_bits, gradients, make
from rewire import SparseLinear, ops, use_engine
from rewire.ops import Convolution, layout

DTYPES = [torch.float32, torch.float64]
# Rows, units in and out, density.
SHAPES = [
    *((0, 5, 4, 0.5), (1, 9, 7, 0.5), (2, 3, 5, 0.7), (7, 40, 33, 0.2), (16, 16, 16, 0.3)),
    *((31, 17, 65, 0.2), (32, 64, 48, 0.1), (33, 100, 257, 0.05), (65, 1, 30, 0.5)),
    *((65, 30, 1, 0.5), (130, 513, 260, 0.02), (200, 300, 20, 0.0), (129, 255, 600, 0.05)),
]


def converted(case: Case, bias: bool = True) -> Callable[..., Tensor]:
    """The layer of a case and a ReLU as a converted model, a function of the tensors."""
    c = case.connections
    layer = SparseLinear(c.n_in, c.n_out, bias, connections=len(c), dtype=case.values.dtype)
    layer.set_connections(c, case.values)
    model = nn.Sequential(layer, nn.ReLU())
    use_engine(model)

    def run(x: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
        given = {"0.values": values[:, None]} | ({} if bias is None else {"0.bias": bias})
        y: Tensor = torch.func.functional_call(model, given, x)
        return y

    return run


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
def test_each_shape_agrees_with_dense(isa: str, dtype: torch.dtype, relu: bool) -> None:
    for batch, n_in, n_out, density in SHAPES:
        case = make(LINEAR, (batch, n_in), n_out, density, dtype, empty_rows=batch == 130)
        expected_y, expected = expected_gradients(case, relu)
        run = converted(case) if relu else case.run
        for needs in NEEDS:
            y, grads = gradients(run, (case.x, case.values, case.bias), case.dy, needs)
            assert y.is_contiguous()
            assert_close(y, expected_y)
            for grad, right, need in zip(grads, expected, needs, strict=True):
                if need:
                    assert grad is not None
                    assert grad.is_contiguous()
                    assert_close(grad, right)
        if not relu:
            without = ops.linear(case.x, case.values, None, case.topology)
            assert_close(without, F.linear(case.x.double(), case.weight(case.values.double())))


@pytest.mark.parametrize("how", ["batch-last", "expanded", "sliced", "offset"])
def test_any_strides_of_input_and_gradient(isa: str, how: str) -> None:
    case = make(LINEAR, (70, 60), 50, 0.2)
    for changed in ("x", "dy"):
        other = make(LINEAR, (70, 60), 50, 0.2)
        setattr(other, changed, arranged(getattr(case, changed), how))
        tensors = (other.x, other.values, other.bias)
        for relu in (False, True):
            expected_y, expected = expected_gradients(other, relu)
            run = converted(other) if relu else other.run
            y, grads = gradients(run, tensors, other.dy, (True,) * 3)
            assert y.is_contiguous()
            for result, right in zip([y, *grads], [expected_y, *expected], strict=True):
                assert_close(result, right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.05, 0.6])
def test_any_number_of_threads_gives_the_same_bits(
    isa: str, threads: Callable[[int], None], dtype: torch.dtype, density: float
) -> None:
    for rows, n_in, n_out in ((32, 700, 600), (100, 600, 700), (1000, 90, 80)):
        case = make(LINEAR, (rows, n_in), n_out, density, dtype)
        tensors, run = (case.x, case.values, case.bias), converted(case)

        def everything(
            count: int,
            case: Case = case,
            tensors: tuple[Tensor, ...] = tensors,
            run: Callable[..., Tensor] = run,
        ) -> list[Tensor | None]:
            threads(count)
            y, grads = gradients(run, tensors, case.dy, (True,) * 3)
            _, (dx, _, _) = gradients(case.run, tensors, case.dy, (True, False, False))
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


def test_a_layer_by_itself_takes_any_memory_and_gives_contiguous_results() -> None:
    layer = SparseLinear(48, 40, sparsity=0.8)
    x = torch.randn(70, 48)
    expected = layer(x)
    for given in (x, x[:, None], layout.to_batch_last(x), x.repeat(1, 2)[:, ::1][:, :48]):
        y = layer(given)
        assert y.is_contiguous()
        assert torch.equal(y.flatten(0, -2), expected)


@pytest.mark.parametrize("relu", [False, True])
def test_a_probe_sees_the_input_and_the_output_gradient(isa: str, relu: bool) -> None:
    """That of the product, which the ReLU has let through."""
    layer = SparseLinear(60, 50, sparsity=0.8)
    model = nn.Sequential(layer, nn.ReLU() if relu else nn.Identity())
    use_engine(model)
    seen: list[Tensor] = []

    def probe(conv: Convolution, x: Tensor, dy: Tensor) -> None:
        seen.extend((x.clone(), dy.clone()))

    layer.probe = probe
    x, dy = torch.randn(70, 60), torch.randn(70, 50)
    y = model(x)
    y.backward(dy)
    assert torch.equal(seen[0], x)
    assert torch.equal(seen[1], dy * (y > 0) if relu else dy)


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
