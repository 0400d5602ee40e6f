"""Products over connections as torch's operators: derivatives, transforms and types."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from products import (
    LINEAR,
    NEEDS,
    Case,
    arranged,
    as_operator,
    assert_agrees,
    assert_close,
    dense_gradients,
    gradients,
    make,
    sizes_of,
)
from rewire import Connections, ops
from rewire.ops import Convolution
from rewire.ops.topology import build

# Autograd, operators


def test_gradcheck() -> None:
    conv = Convolution((2, 3), (2, 1), (1, 2), (1, 2))
    for case in (
        make(LINEAR, (5, 6), 4, 0.4, torch.float64, empty_rows=True),
        make(conv, (3, 2, 5, 6), 3, 0.4, torch.float64),
    ):
        tensors = [t.requires_grad_() for t in (case.x, case.values, case.bias)]
        assert torch.autograd.gradcheck(case.run, tensors)
        assert torch.autograd.gradcheck(lambda *t, case=case: as_operator(case, *t), tensors)


OPERATOR_CASES = [
    (LINEAR, (6, 9), 5),
    (LINEAR, (1, 9), 5),
    (LINEAR, (0, 9), 5),
    (LINEAR, (67, 1), 1),
    (Convolution((3, 2), (2, 1), (1, 0), (1, 2)), (6, 3, 7, 8), 5),
    (Convolution((3, 3), padding=(1, 1)), (1, 3, 4, 4), 5),
    (Convolution((3, 3), padding=(1, 1)), (0, 3, 4, 4), 5),
]


@pytest.mark.parametrize(("conv", "shape", "n_out"), OPERATOR_CASES)
def test_operators_agree_with_dense(conv: Convolution, shape: tuple[int, ...], n_out: int) -> None:
    case = make(conv, shape, n_out, 0.5)
    expected_y, expected = dense_gradients(case)
    for needs in NEEDS:
        y, grads = gradients(
            lambda *t: as_operator(case, *t), (case.x, case.values, case.bias), case.dy, needs
        )
        assert_close(y, expected_y)
        for grad, right in zip(grads, expected, strict=True):
            if grad is not None:
                assert_close(grad, right)


def opcheck(case: Case, suffix: str, *args: Any) -> None:
    name = "linear" if case.x.dim() == 2 else "conv2d"
    torch.library.opcheck(getattr(torch.ops.rewire, name + suffix).default, args)


def operator_sizes(case: Case) -> list[list[int]]:
    return [] if case.x.dim() == 2 else sizes_of(case.conv)


@pytest.mark.parametrize(("conv", "shape", "n_out"), OPERATOR_CASES)
def test_opcheck_forward(conv: Convolution, shape: tuple[int, ...], n_out: int) -> None:
    case = make(conv, shape, n_out, 0.5)
    rest = (*case.topology, *operator_sizes(case))
    opcheck(case, "", case.x, case.values, None, *rest)
    opcheck(case, "", arranged(case.x, "batch-last"), case.values, case.bias, *rest)
    for needs in ((True, True, True), (False, True, False)):
        leaves = zip((case.x, case.values, case.bias), needs, strict=True)
        opcheck(case, "", *(t.detach().clone().requires_grad_(n) for t, n in leaves), *rest)


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize(("conv", "shape", "n_out"), OPERATOR_CASES[::2])
def test_opcheck_backward(
    conv: Convolution, shape: tuple[int, ...], n_out: int, needs: tuple[bool, ...]
) -> None:
    case = make(conv, shape, n_out, 0.5)
    rest = (*case.topology, *operator_sizes(case), list(needs))
    opcheck(case, "_backward", case.dy, case.x, case.values, *rest)
    leaves = [t.detach().clone().requires_grad_() for t in (case.dy, case.x, case.values)]
    opcheck(case, "_backward", *leaves, *rest)


@pytest.mark.parametrize(("conv", "shape", "n_out"), OPERATOR_CASES)
def test_opcheck_gradient_at(conv: Convolution, shape: tuple[int, ...], n_out: int) -> None:
    case = make(conv, shape, n_out, 0.5)
    outputs, inputs = case.connections.outputs(), case.connections.inputs()
    rest = operator_sizes(case)
    opcheck(case, "_gradient_at", case.dy, case.x, outputs.flip(0), inputs.flip(0), *rest)
    dy, x = arranged(case.dy, "batch-last"), arranged(case.x, "batch-last")
    opcheck(case, "_gradient_at", dy, x, outputs, inputs, *rest)


@pytest.mark.parametrize("name", ["x", "values", "indices", "slots", "outputs", "order"])
def test_what_changes_in_place_before_backward_raises(name: str) -> None:
    case = make(LINEAR, (5, 6), 4, 0.5)
    topology = case.topology
    tensors = {"x": arranged(case.x, "batch-last"), "values": case.values, **topology._asdict()}
    x, values = tensors["x"].requires_grad_(), case.values.requires_grad_()
    y = ops.linear(x, values, case.bias, topology)
    with torch.no_grad():
        tensors[name].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def frozen(case: Case, x: Tensor) -> Tensor:
    return case.run(x, case.values, case.bias)


def trained(case: Case, x: Tensor) -> Tensor:
    return case.run(x, case.values.requires_grad_(), case.bias)


@pytest.mark.parametrize("run", [frozen, trained])
def test_forward_mode_derivatives(run: Callable[..., Tensor]) -> None:
    for case in (make(LINEAR, (5, 6), 4, 0.5), make(Convolution((3, 3)), (5, 2, 4, 4), 4, 0.5)):
        tangent = torch.ones_like(case.x)
        with forward_ad.dual_level():
            y = run(case, forward_ad.make_dual(case.x, tangent))
            derivative = forward_ad.unpack_dual(y).tangent
        assert derivative is not None  # None stands for zero
        assert_close(derivative.detach(), case.run(tangent, case.values.detach(), None))


def test_operators_have_no_forward_mode() -> None:
    case = make(LINEAR, (5, 6), 4, 0.5)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="call the layers"),
    ):
        as_operator(case, forward_ad.make_dual(case.x, case.x), case.values, case.bias)


def test_transforms_and_traces() -> None:
    for case in (make(LINEAR, (5, 6), 4, 0.5), make(Convolution((3, 3)), (5, 2, 4, 4), 4, 0.5)):
        run = partial(frozen, case)
        expected = run(case.x)
        assert_close(torch.func.vmap(run)(torch.stack([case.x, -case.x]))[0], expected)
        derivative = torch.func.jvp(run, (case.x,), (case.x,))[1]
        assert_close(derivative, case.run(case.x, case.values, None))
        grad = torch.func.grad(lambda x, run=run, case=case: (run(x) * case.dy).sum())(case.x)
        assert_close(grad, dense_gradients(case)[1][0])
        traced = make_fx(run)(torch.zeros_like(case.x))
        assert_close(traced(case.x), expected)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            y = run(mode.from_tensor(case.x))
        assert (y.shape, y.stride()) == (expected.shape, expected.stride())


# Types


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_goes_through_the_reference(dtype: torch.dtype) -> None:
    for case in (
        make(LINEAR, (9, 6), 4, 0.5, dtype),
        make(Convolution((3, 2), padding=(1, 0)), (9, 2, 4, 4), 4, 0.5, dtype),
    ):
        assert_agrees(case)
        outputs, inputs = case.connections.outputs(), case.connections.inputs()
        sizes = {} if case.x.dim() == 2 else {"conv": case.conv}
        grad = ops.gradient_at(case.dy, case.x, outputs, inputs, **sizes)
        assert_close(grad, dense_gradients(case)[1][1])


def test_non_finite_values_pass_through(isa: str) -> None:
    # A unit without connections to them stays finite; nothing is multiplied by a stored zero.
    mask = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]])
    c = Connections.from_mask(mask)
    x = torch.tensor([[1.0, torch.inf, torch.nan]]).repeat(37, 1)
    y = ops.linear(x, torch.ones(3), None, build(c.indptr, c.indices, 3))
    expected = torch.tensor([[1.0, torch.inf, torch.nan, 0.0]]).repeat(37, 1)
    torch.testing.assert_close(y, expected, equal_nan=True)
