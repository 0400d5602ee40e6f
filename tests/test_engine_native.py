"""The steps of the native executor, each against plain PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plans import Program, close, images, lay, panel_rows, unlay
from products import LINEAR, Case, dense_gradients, make
from rewire import ops
from rewire.ops import Convolution, native

pytestmark = [
    pytest.mark.skipif(not ops.instruction_sets(), reason="no compiled kernels"),
    pytest.mark.usefixtures("isa"),
]

DTYPES = [torch.float32, torch.float64]
PANELS = [0, 4, 16]  # 0: batch-last
PAIRS = [(0, 0), (4, 4), (4, 0), (0, 4), (16, 16)]  # of input and output
EPS = 1e-3


@pytest.fixture(
    params=[*((dtype, True) for dtype in (*DTYPES, torch.bfloat16)), (torch.bfloat16, False)],
    ids=["f32", "f64", "bf16", "bf16-without-pairs"],
)
def program(request: pytest.FixtureRequest, isa: str) -> Program:
    dtype, pairs = request.param
    if not pairs:
        if isa != "avx512_bf16":
            pytest.skip("this instruction set has no products of pairs")
        ops.use_instruction_set("avx512")  # the fixture restores what was in use
    return Program(dtype)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """In double precision, of what bfloat16 can hold."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().double()


def conv_case(kernel: int = 3, stride: int = 1, seed: int = 0, batch: int = 16) -> Case:
    conv = Convolution((kernel, kernel), (stride, stride), (kernel // 2, kernel // 2))
    return make(conv, (batch, 5, 7, 6), 4, 0.5, torch.float64, seed)


def linear_case(batch: int = 21) -> Case:
    return make(LINEAR, (batch, 13), 9, 0.4, torch.float64)


def geometry(case: Case, panels: tuple[int, int] = (0, 0)) -> Any:
    inputs = case.x.shape if case.x.dim() == 4 else (*case.x.shape, 1, 1)
    out = case.dy.shape[2:] if case.x.dim() == 4 else (1, 1)
    conv = case.conv
    return native.module().Geometry(
        *(*inputs, case.connections.n_out, *out),
        *(*conv.kernel, *conv.stride, *conv.padding, *conv.dilation),
        panel=max(panels),
        in_panels=panels[0] > 0,
        out_panels=panels[1] > 0,
    )


class Norm:
    """A batch norm with operands; ``training`` uses the moments of ``x``."""

    def __init__(
        self, program: Program, x: Tensor, training: bool = True, relu: bool = False, seed: int = 7
    ) -> None:
        channels = x.shape[1]
        self.training, self.relu = training, relu
        self.weight = (normal(channels, seed=seed) + 2).requires_grad_()
        self.bias = normal(channels, seed=seed + 1).requires_grad_()
        dims = [d for d in range(x.dim()) if d != 1]
        if training:
            variance, mean = torch.var_mean(x.detach(), dims, correction=0)
        else:
            mean, variance = normal(channels, seed=seed + 2), normal(channels, seed=seed + 3) ** 2
        self.mean, self.variance = mean, variance
        self.operands = program.native.NormOperands(
            weight=program.add(self.weight),
            bias=program.add(self.bias),
            mean=program.add(mean),
            variance=program.add(variance),
            training=training,
            relu=relu,
            eps=EPS,
        )

    def __call__(self, x: Tensor, residual: Tensor | float = 0) -> Tensor:
        if self.training:
            z = F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=EPS)
        else:
            z = F.batch_norm(x, self.mean, self.variance, self.weight, self.bias, eps=EPS)
        z = z + residual
        return z.relu() if self.relu else z


# Sparse layers


@pytest.mark.parametrize("panels", PAIRS)
@pytest.mark.parametrize("stride", [1, 2])
def test_convolution_forward(program: Program, panels: tuple[int, int], stride: int) -> None:
    case = conv_case(stride=stride)
    x, y = program.add(lay(case.x, panels[0])), program.empty(case.dy.numel())
    program.run(
        program.native.ConvForward(
            geometry=geometry(case, panels),
            topology=program.topology(case),
            values=program.add(case.values),
            bias=program.add(case.bias),
            x=x,
            y=y,
        )
    )
    expected, _ = dense_gradients(case)
    close(unlay(program[y], case.dy.shape, panels[1]), expected)


@pytest.mark.parametrize("panels", PAIRS)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_convolution_of_a_batch_norm_with_moments(
    program: Program, panels: tuple[int, int], training: bool, relu: bool
) -> None:
    case = conv_case()
    norm = Norm(program, case.x, training, relu=relu)
    x, y = program.add(lay(case.x, panels[0])), program.empty(case.dy.numel())
    mean, variance = program.empty(4), program.empty(4)
    program.run(
        program.native.ConvForward(
            geometry=geometry(case, panels),
            topology=program.topology(case),
            values=program.add(case.values),
            x=x,
            y=y,
            norm=norm.operands,
            mean=mean,
            variance=variance,
        )
    )
    expected = case.dense(norm(case.x), case.weight(case.values), None).detach()
    close(unlay(program[y], case.dy.shape, panels[1]), expected)
    right = torch.var_mean(expected, (0, 2, 3), correction=0)
    close(program[mean], right[1])
    close(program[variance], right[0])


@pytest.mark.parametrize("panel", PANELS)
def test_moments_are_of_what_is_written(program: Program, panel: int) -> None:
    case = conv_case()
    y, mean, variance = program.empty(case.dy.numel()), program.empty(4), program.empty(4)
    program.run(
        program.native.ConvForward(
            geometry=geometry(case, (panel, panel)),
            topology=program.topology(case),
            values=program.add(case.values),
            bias=program.add(case.bias),
            x=program.add(lay(case.x, panel)),
            y=y,
            relu=True,
            mean=mean,
            variance=variance,
        )
    )
    expected = dense_gradients(case)[0].relu()
    close(unlay(program[y], case.dy.shape, panel), expected)
    right = torch.var_mean(expected, (0, 2, 3), correction=0)
    close(program[mean], right[1])
    close(program[variance], right[0])


def test_linear_layers_are_convolutions_of_one_tap(program: Program) -> None:
    case = linear_case()
    y, dx, dvalues = (program.empty(n) for n in (21 * 9, 21 * 13, len(case.connections)))
    dbias = program.empty(9)
    x, topology, values = program.add(case.x.t()), program.topology(case), program.add(case.values)
    shared: dict[str, Any] = {"geometry": geometry(case), "topology": topology, "values": values}
    program.run(
        program.native.ConvForward(**shared, bias=program.add(case.bias), x=x, y=y),
        program.native.ConvBackward(
            **shared, x=x, dy=program.add(case.dy.t()), dx=dx, dvalues=dvalues, dbias=dbias
        ),
    )
    expected, grads = dense_gradients(case)
    close(program[y].view(9, 21).t(), expected)
    close(program[dx].view(13, 21).t(), grads[0])
    close(program[dvalues], grads[1])
    close(program[dbias], grads[2])


class Backward:
    """The backward pass of a convolution of ``before(x)`` followed by ``after``, by autograd."""

    def __init__(self, case: Case, x: Tensor, inner: Tensor, after: Any, *more: Tensor) -> None:
        weight = case.weight(case.values).requires_grad_()
        bias = case.bias.clone().requires_grad_()
        self.y = case.dense(inner, weight, bias)
        self.z = after(self.y)
        grads = torch.autograd.grad(self.z, [x, weight, bias, *more], case.dy, retain_graph=True)
        self.dx, self.dvalues, self.dbias = grads[0], grads[1][case.places()], grads[2]
        self.more = grads[3:]


def conv_backward(
    program: Program, case: Case, panels: tuple[int, int], x: Tensor, dy: Tensor, **options: Any
) -> dict[str, int]:
    """Run the step; where its results are."""
    found = {
        "dx": program.empty(case.x.numel()),
        "dvalues": program.empty(len(case.connections)),
        "dbias": program.empty(case.connections.n_out),
    }
    program.run(
        program.native.ConvBackward(
            geometry=geometry(case, panels),
            topology=program.topology(case),
            values=program.add(case.values),
            x=program.add(lay(x.detach(), panels[0])),
            dy=program.add(lay(dy, panels[1])),
            **found,
            **options,
        )
    )
    return found


@pytest.mark.parametrize("panels", PAIRS)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("gated", [False, True])
def test_convolution_backward(
    program: Program, panels: tuple[int, int], stride: int, gated: bool
) -> None:
    case = conv_case(stride=stride)
    x = case.x.clone().requires_grad_()
    right = Backward(case, x, x, torch.relu if gated else lambda y: y)
    options = {"gate": program.add(lay(right.z, panels[1]))} if gated else {}
    found = conv_backward(program, case, panels, x, case.dy, **options)
    close(unlay(program[found["dx"]], x.shape, panels[0]), right.dx)
    close(program[found["dvalues"]], right.dvalues)
    close(program[found["dbias"]], right.dbias)


@pytest.mark.parametrize("panels", PAIRS)
def test_convolution_backward_through_a_relu_before_it(
    program: Program, panels: tuple[int, int]
) -> None:
    case = conv_case()
    x = case.x.clone().requires_grad_()
    right = Backward(case, x, x.relu(), lambda y: y)
    sums = program.empty(5)
    found = conv_backward(program, case, panels, x.relu(), case.dy, relu_sums=sums)
    close(unlay(program[found["dx"]], x.shape, panels[0]), right.dx)
    close(program[found["dvalues"]], right.dvalues)
    close(program[sums], right.dx.sum((0, 2, 3)))


def resolved(program: Program, g: Tensor, x: Tensor, factors: int) -> Tensor:
    """What a deferred gradient stands for."""
    f = program[factors].double().view(3, 1, -1, 1, 1)
    return g.double() * f[0] + x * f[1] + f[2]


@pytest.mark.parametrize("panels", PAIRS)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_convolution_backward_of_a_batch_norm_before_it(
    program: Program, panels: tuple[int, int], training: bool, relu: bool, deferred: bool
) -> None:
    case = conv_case()
    norm = Norm(program, case.x, training, relu)
    x = case.x.clone().requires_grad_()
    right = Backward(case, x, norm(x), lambda y: y, norm.weight, norm.bias)
    dweight, dbias = program.empty(5), program.empty(5)
    factors = program.empty(15) if deferred else -1
    native_ = program.native
    found = conv_backward(
        program,
        case,
        panels,
        x,
        case.dy,
        before=native_.InputNorm(norm=norm.operands),
        dnorm=native_.NormGradientOperands(weight=dweight, bias=dbias, factors=factors),
    )
    dx = unlay(program[found["dx"]], x.shape, panels[0])
    if deferred:
        dx = resolved(program, dx, case.x, factors).to(program.dtype)
    close(dx, right.dx, 4)
    for k, expected in (
        (found["dvalues"], right.dvalues),
        (found["dbias"], right.dbias),
        (dweight, right.more[0]),
        (dbias, right.more[1]),
    ):
        close(program[k], expected, 2)


@pytest.mark.parametrize("panels", PAIRS)
def test_convolution_backward_adds_another_gradient_of_the_batch_norm_before_it(
    program: Program, panels: tuple[int, int]
) -> None:
    case = conv_case()
    norm = Norm(program, case.x, relu=True)
    x, other = case.x.clone().requires_grad_(), normal(*case.x.shape, seed=5)
    z, weight = norm(x), case.weight(case.values)
    total = (case.dense(z, weight, None) * case.dy).sum() + (z * other).sum()
    dx, *affine = torch.autograd.grad(total, [x, norm.weight, norm.bias])
    dweight, dbias = program.empty(5), program.empty(5)
    native_ = program.native
    found = conv_backward(
        program,
        case,
        panels,
        x,
        case.dy,
        before=native_.InputNorm(norm=norm.operands, more=program.add(lay(other, panels[0]))),
        dnorm=native_.NormGradientOperands(weight=dweight, bias=dbias),
    )
    close(unlay(program[found["dx"]], x.shape, panels[0]), dx, 4)
    close(program[dweight], affine[0], 2)
    close(program[dbias], affine[1], 2)


@pytest.mark.parametrize("panels", PAIRS)
@pytest.mark.parametrize("more", [False, True])
def test_convolution_backward_of_a_residual_sum_before_it(
    program: Program, panels: tuple[int, int], more: bool
) -> None:
    case = conv_case()
    before = normal(*case.x.shape, seed=3).requires_grad_()
    norm = Norm(program, before, relu=True)
    residual = normal(*case.x.shape, seed=4)
    z = norm(before, residual)
    other = normal(*case.x.shape, seed=5)
    weight = case.weight(case.values).requires_grad_()
    total = (case.dense(z, weight, None) * case.dy).sum() + more * (z * other).sum()
    dx, dvalues, *affine = torch.autograd.grad(total, [before, weight, norm.weight, norm.bias])
    dweight, dbias, factors = program.empty(5), program.empty(5), program.empty(15)
    native_ = program.native
    found = conv_backward(
        program,
        case,
        panels,
        z,
        case.dy,
        before=native_.InputNorm(
            norm=norm.operands,
            input=program.add(lay(before, panels[0])),
            more=program.add(lay(other, panels[0])) if more else -1,
        ),
        dnorm=native_.NormGradientOperands(weight=dweight, bias=dbias, factors=factors),
    )
    g = unlay(program[found["dx"]], z.shape, panels[0])
    close(resolved(program, g, before.detach(), factors).to(program.dtype), dx, 4)
    close(program[found["dvalues"]], dvalues[case.places()])
    close(program[dweight], affine[0], 2)
    close(program[dbias], affine[1], 2)


def deferred_after(
    program: Program, y: Tensor, dz: Tensor, panel: int
) -> tuple[Any, Tensor, Tensor]:
    """A batch norm's deferred gradient: its operands, g and the gradient that it stands for."""
    norm = Norm(program, y, relu=True, seed=20)
    y = y.detach().requires_grad_()
    (dy,) = torch.autograd.grad(norm(y), y, dz)
    g, factors = program.empty(y.numel()), program.empty(3 * y.shape[1])
    at = program.add(lay(y, panel))
    program.run(
        program.native.NormBackward(
            channels=y.shape[1],
            length=y.numel() // y.shape[1],
            panel_rows=panel_rows(y.shape, panel),
            norm=norm.operands,
            x=at,
            dz=program.add(lay(dz, panel)),
            dresidual=g,
            factors=factors,
        )
    )
    operands = program.native.DeferredGradient(y=at, factors=factors)
    return operands, unlay(program[g], y.shape, panel), dy


@pytest.mark.parametrize("panels", PAIRS)
def test_convolution_backward_completes_a_deferred_gradient(
    program: Program, panels: tuple[int, int]
) -> None:
    case = conv_case()
    y = case.dense(case.x, case.weight(case.values), case.bias)
    deferred, g, case.dy = deferred_after(program, y, case.dy, panels[1])
    x = case.x.clone().requires_grad_()
    right = Backward(case, x, x, lambda y: y)
    found = conv_backward(program, case, panels, x, g, deferred=deferred)
    close(unlay(program[found["dx"]], x.shape, panels[0]), right.dx, 4)
    close(program[found["dvalues"]], right.dvalues, 4)
    close(program[found["dbias"]], right.dbias, 100)  # zero but for rounding: the norm has a bias


@pytest.mark.parametrize("panels", PAIRS)
@pytest.mark.parametrize("how", ["plain", "gated", "deferred"])
@pytest.mark.parametrize("bias", [False, True])
def test_weight_gradient(program: Program, panels: tuple[int, int], how: str, bias: bool) -> None:
    case = conv_case(stride=2)
    dy, options = case.dy, {}
    if how == "gated":
        z = normal(*dy.shape, seed=6)
        options["gate"], case.dy = program.add(lay(z, panels[1])), dy * (z > 0)
    if how == "deferred":
        options["deferred"], dy, case.dy = deferred_after(
            program, normal(*dy.shape, seed=8), dy, panels[1]
        )
    _, right = dense_gradients(case)
    dvalues, dbias = program.empty(len(case.connections)), program.empty(4) if bias else -1
    program.run(
        program.native.WeightGradient(
            geometry=geometry(case, panels),
            topology=program.topology(case),
            x=program.add(lay(case.x, panels[0])),
            dy=program.add(lay(dy, panels[1])),
            dvalues=dvalues,
            dbias=dbias,
            **options,
        )
    )
    close(program[dvalues], right[1], 4)
    if bias:
        close(program[dbias], right[2], 100 if how == "deferred" else 4)


@pytest.mark.parametrize("panels", PAIRS)
@pytest.mark.parametrize("stride", [1, 2])
def test_input_gradient(program: Program, panels: tuple[int, int], stride: int) -> None:
    case = conv_case(stride=stride)
    dx = program.empty(case.x.numel())
    program.run(
        program.native.InputGradient(
            geometry=geometry(case, panels),
            topology=program.topology(case),
            values=program.add(case.values),
            dy=program.add(lay(case.dy, panels[1])),
            dx=dx,
        )
    )
    close(unlay(program[dx], case.x.shape, panels[0]), dense_gradients(case)[1][0])


@pytest.mark.parametrize("relu", [False, True])
def test_linear_rows(program: Program, relu: bool) -> None:
    case = linear_case()
    expected, _ = dense_gradients(case)
    z = expected.relu() if relu else expected
    y, dx, only_dx = program.empty(21 * 9), program.empty(21 * 13), program.empty(21 * 13)
    dvalues, dbias = program.empty(len(case.connections)), program.empty(9)
    shared: dict[str, Any] = {
        "geometry": geometry(case),
        "topology": program.topology(case),
        "values": program.add(case.values),
    }
    x, dy = program.add(case.x), program.add(case.dy)
    native_ = program.native
    program.run(
        native_.LinearRows(**shared, bias=program.add(case.bias), x=x, y=y, relu=relu),
        native_.LinearRowsBackward(
            **shared, x=x, dy=dy, gate=y if relu else -1, dx=dx, dvalues=dvalues, dbias=dbias
        ),
        native_.LinearRowsInputGradient(**shared, dy=dy, dx=only_dx),
    )
    close(program[y].view(21, 9), z)
    close(program[only_dx].view(21, 13), dense_gradients(case)[1][0])
    if relu:
        case.dy = case.dy * (z > 0)
    _, right = dense_gradients(case)
    close(program[dx].view(21, 13), right[0])
    close(program[dvalues], right[1])
    close(program[dbias], right[2])


def test_linear_rows_without_input_gradient_and_bias(program: Program) -> None:
    case = linear_case()
    dvalues = program.empty(len(case.connections))
    program.run(
        program.native.LinearRowsBackward(
            geometry=geometry(case),
            topology=program.topology(case),
            values=program.add(case.values),
            x=program.add(case.x),
            dy=program.add(case.dy),
            dvalues=dvalues,
        )
    )
    close(program[dvalues], dense_gradients(case)[1][1])


def test_a_layer_without_connections(program: Program) -> None:
    case = make(Convolution((3, 3), padding=(1, 1)), (8, 3, 4, 4), 2, 0.0, torch.float64)
    assert len(case.connections) == 0
    y = program.empty(case.dy.numel())
    program.run(
        program.native.ConvForward(
            geometry=geometry(case),
            topology=program.topology(case),
            values=program.add(case.values),
            bias=program.add(case.bias),
            x=program.add(lay(case.x, 0)),
            y=y,
        )
    )
    close(unlay(program[y], case.dy.shape, 0), dense_gradients(case)[0])
    found = conv_backward(program, case, (0, 0), case.x, case.dy)
    assert not program[found["dx"]].any()
    close(program[found["dbias"]], case.dy.sum((0, 2, 3)))


# Batch norm


SHAPE = (16, 5, 6, 3)


def channels(shape: tuple[int, ...], panel: int) -> dict[str, int]:
    n, c, h, w = shape
    return {"channels": c, "length": n * h * w, "panel_rows": panel_rows(shape, panel)}


@pytest.mark.parametrize("panel", PANELS)
def test_moments_and_running_statistics(program: Program, panel: int) -> None:
    x = normal(*SHAPE) + 3
    mean, variance = program.empty(5), program.empty(5)
    running_mean, running_variance = program.add(normal(5)), program.add(normal(5) ** 2)
    right = program[running_mean].double(), program[running_variance].double()
    length = x.numel() // 5
    program.scalars = [0.5, 0.1]
    program.run(
        program.native.Moments(
            **channels(SHAPE, panel), x=program.add(lay(x, panel)), mean=mean, variance=variance
        ),
        program.native.Track(
            channels=5,
            momentum=1,
            unbiased=length / (length - 1),
            mean=mean,
            variance=variance,
            running_mean=running_mean,
            running_variance=running_variance,
        ),
    )
    close(program[mean], x.mean((0, 2, 3)))
    close(program[variance], x.var((0, 2, 3), correction=0))
    F.batch_norm(x, *right, training=True, momentum=0.1)
    close(program[running_mean], right[0])
    close(program[running_variance], right[1])


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm(
    program: Program, panel: int, training: bool, relu: bool, with_residual: bool, affine: bool
) -> None:
    x = normal(*SHAPE).requires_grad_()
    residual = normal(*SHAPE, seed=1).requires_grad_()
    norm = Norm(program, x, training, relu)
    operands = norm.operands
    if not affine:
        norm.weight, norm.bias = (
            t.detach().fill_(v) for t, v in ((norm.weight, 1), (norm.bias, 0))
        )
        norm.weight.requires_grad_(), norm.bias.requires_grad_()
        operands = program.native.NormOperands(
            mean=operands.mean, variance=operands.variance, training=training, relu=relu, eps=EPS
        )
    expected = norm(x, residual if with_residual else 0)
    dz, more = normal(*SHAPE, seed=2), normal(*SHAPE, seed=3)
    right = torch.autograd.grad(
        expected, [x, norm.weight, norm.bias, residual], dz + more, allow_unused=True
    )
    z, dx, dresidual, g = (program.empty(x.numel()) for _ in range(4))
    dweight, dbias, factors, resolved = (program.empty(n) for n in (5, 5, 15, x.numel()))
    at = program.add(lay(x, panel))
    shared: dict[str, Any] = {**channels(SHAPE, panel), "norm": operands, "x": at}
    gradients: dict[str, Any] = {
        "z": z if with_residual else -1,
        "dz": program.add(lay(dz, panel)),
        "more": program.add(lay(more, panel)),
        "dweight": dweight,
        "dbias": dbias,
    }
    native_ = program.native
    program.run(
        native_.NormForward(
            **shared, residual=program.add(lay(residual, panel)) if with_residual else -1, z=z
        ),
        native_.NormBackward(**shared, **gradients, dx=dx, dresidual=dresidual),
        native_.NormBackward(**shared, **gradients, dresidual=g, factors=factors),
        native_.ResolveDeferred(**channels(SHAPE, panel), g=g, x=at, factors=factors, dx=resolved),
    )
    close(unlay(program[z], SHAPE, panel), expected)
    close(unlay(program[dx], SHAPE, panel), right[0], 2)
    close(unlay(program[resolved], SHAPE, panel), right[0], 4)
    close(program[dweight], right[1], 2)
    close(program[dbias], right[2], 2)
    if with_residual:
        close(unlay(program[dresidual], SHAPE, panel), right[3])
        close(unlay(program[g], SHAPE, panel), right[3])


@pytest.mark.parametrize("panel", PANELS)
def test_row_sums(program: Program, panel: int) -> None:
    x, sums = normal(*SHAPE), program.empty(5)
    program.run(
        program.native.RowSums(**channels(SHAPE, panel), x=program.add(lay(x, panel)), sums=sums)
    )
    close(program[sums], x.sum((0, 2, 3)))


# Pooling


POOLS = [((2, 2), (2, 2), (0, 0)), ((3, 2), (2, 1), (1, 1)), ((3, 3), (1, 2), (1, 0))]


def pool_of(x: Tensor, sizes: Any, panel: int, count_padding: bool = True) -> tuple[Any, Any]:
    """The sizes, and the shape of the output."""
    y = F.max_pool2d(x, *sizes)
    n, c, h, w = x.shape
    pool = native.module().Pool(
        *(n // panel if panel else 1, panel or n, c, h, w, *y.shape[2:]),
        *(*sizes[0], *sizes[1], *sizes[2]),
        count_padding=count_padding,
        in_panels=panel > 0,
    )
    return pool, y.shape


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("sizes", POOLS)
def test_max_pooling(program: Program, panel: int, sizes: Any) -> None:
    x = normal(*SHAPE).requires_grad_()
    expected = F.max_pool2d(x, *sizes)
    dy = normal(*expected.shape, seed=1)
    (right,) = torch.autograd.grad(expected, x, dy)
    pool, shape = pool_of(x, sizes, panel)
    y, dx = program.empty(dy.numel()), program.empty(x.numel())
    which, alone = program.empty(dy.numel(), dtype=torch.uint8), program.empty(dy.numel())
    at = program.add(lay(x, panel))
    native_ = program.native
    program.run(
        native_.MaxPool(pool=pool, x=at, y=y, which=which),
        native_.MaxPool(pool=pool, x=at, y=alone),
        native_.MaxPoolBackward(pool=pool, dy=program.add(lay(dy, panel)), which=which, dx=dx),
    )
    close(unlay(program[y], shape, panel), expected)
    close(unlay(program[alone], shape, panel), expected)
    close(unlay(program[dx], SHAPE, panel), right)


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_max_pooling_of_a_batch_norm(
    program: Program, panel: int, deferred: bool, relu: bool
) -> None:
    sizes = POOLS[1]
    x = normal(*SHAPE).requires_grad_()
    norm = Norm(program, x, relu=relu)
    expected = F.max_pool2d(norm(x), *sizes)
    dy = normal(*expected.shape, seed=1)
    right = torch.autograd.grad(expected, [x, norm.weight, norm.bias], dy)
    pool, shape = pool_of(x, sizes, panel)
    y, dx = program.empty(dy.numel()), program.empty(x.numel())
    which = program.empty(dy.numel(), dtype=torch.uint8)
    dweight, dbias = program.empty(5), program.empty(5)
    factors = program.empty(15) if deferred else -1
    at = program.add(lay(x, panel))
    native_ = program.native
    program.run(
        native_.MaxPool(pool=pool, norm=norm.operands, x=at, y=y, which=which),
        native_.MaxPoolBackward(
            pool=pool,
            norm=norm.operands,
            x=at,
            dy=program.add(lay(dy, panel)),
            which=which,
            dx=dx,
            dnorm=native_.NormGradientOperands(weight=dweight, bias=dbias, factors=factors),
        ),
    )
    close(unlay(program[y], shape, panel), expected)
    gradient = unlay(program[dx], SHAPE, panel)
    if deferred:
        gradient = resolved(program, gradient, x.detach(), factors).to(program.dtype)
    close(gradient, right[0], 4)
    close(program[dweight], right[1], 2)
    close(program[dbias], right[2], 2)


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("sizes", POOLS)
@pytest.mark.parametrize("count_padding", [False, True])
def test_average_pooling(program: Program, panel: int, sizes: Any, count_padding: bool) -> None:
    x = normal(*SHAPE).requires_grad_()
    expected = F.avg_pool2d(x, *sizes, count_include_pad=count_padding)
    dy = normal(*expected.shape, seed=1)
    (right,) = torch.autograd.grad(expected, x, dy)
    pool, shape = pool_of(x, sizes, panel, count_padding)
    y, dx = program.empty(dy.numel()), program.empty(x.numel())
    native_ = program.native
    program.run(
        native_.AvgPool(pool=pool, x=program.add(lay(x, panel)), y=y),
        native_.AvgPoolBackward(pool=pool, dy=program.add(lay(dy, panel)), dx=dx),
    )
    close(unlay(program[y], shape, panel), expected)
    close(unlay(program[dx], SHAPE, panel), right)


# Images as a whole


@pytest.mark.parametrize("panel", PANELS)
def test_global_mean(program: Program, panel: int) -> None:
    x, dy = normal(*SHAPE), normal(16, 5, seed=1)
    y, dx = program.empty(80), program.empty(x.numel())
    native_ = program.native
    program.run(
        native_.GlobalMean(images=images(SHAPE, panel), x=program.add(lay(x, panel)), y=y),
        native_.GlobalMeanBackward(images=images(SHAPE, panel), dy=program.add(dy.t()), dx=dx),
    )
    close(program[y].view(5, 16).t(), x.mean((2, 3)))
    close(unlay(program[dx], SHAPE, panel), (dy / 18)[:, :, None, None].expand(SHAPE))


def side(matrix: Tensor) -> Any:
    """How the pixels of one side, the columns of a matrix, are summed; a row for each of the output."""
    entries = matrix.nonzero()
    ptr = [0, *(matrix != 0).sum(1).cumsum(0).tolist()]
    weights = matrix[entries[:, 0], entries[:, 1]].tolist()
    return native.module().Side(ptr, entries[:, 1].tolist(), weights)


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("size", [(1, 1), (3, 7), (8, 2)])
def test_resampling(program: Program, panel: int, size: tuple[int, int]) -> None:
    x = normal(*SHAPE).requires_grad_()
    down, across = normal(size[0], SHAPE[2], seed=2), normal(size[1], SHAPE[3], seed=3)
    down[down.abs() < 0.5], across[0] = 0, 0  # some pixels are sums of nothing
    expected = torch.einsum("hi,ncij,wj->nchw", down, x, across)
    dy = normal(*expected.shape, seed=1)
    (right,) = torch.autograd.grad(expected, x, dy)
    y, dx = program.empty(dy.numel()), program.empty(x.numel())
    sides = {"down": side(down), "across": side(across)}
    back = {"down": side(down.t()), "across": side(across.t())}
    step = program.native.Resample
    program.run(
        step(images=images(SHAPE, panel), **sides, x=program.add(lay(x, panel)), y=y),
        step(images=images(dy.shape, panel), **back, x=program.add(lay(dy, panel)), y=dx),
    )
    close(unlay(program[y], expected.shape, panel), expected)
    close(unlay(program[dx], SHAPE, panel), right)


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize(
    ("shape", "groups"), [((16, 6, 3, 5), 2), ((16, 4, 5, 1), 4), ((32, 3, 1, 2), 1)]
)
@pytest.mark.parametrize("affine", [False, True])
def test_moments_of_groups(
    program: Program, panel: int, shape: tuple[int, ...], groups: int, affine: bool
) -> None:
    batch, channels, *_ = shape
    x = (2 * normal(*shape) + 1).requires_grad_()
    weight = normal(channels, seed=1).requires_grad_() if affine else None
    grouped = x.reshape(batch, groups, -1)
    mean, inverse = grouped.mean(2), (grouped.var(2, unbiased=False) + EPS).rsqrt()
    means, scales = (v.repeat_interleave(channels // groups, 1) for v in (mean, inverse))
    expected = torch.cat([means, scales if weight is None else scales * weight], 1)
    dmoments, more = normal(*expected.shape, seed=2), normal(*shape, seed=3)
    wanted = [x] if weight is None else [x, weight]
    right = torch.autograd.grad(expected, wanted, dmoments)
    by_sample = (batch, -1, 1, 1)
    ids = {"x": program.add(lay(x, panel))}
    ids |= {} if weight is None else {"weight": program.add(weight)}
    numbers = torch.float32 if program.dtype is torch.bfloat16 else program.dtype
    moments, saved, dweight = (
        program.empty(n, dtype=numbers) for n in (expected.numel(), mean.numel(), channels)
    )
    dx, n = program.empty(x.numel()), program.native
    sizes = {"images": images(shape, panel), "groups": groups}
    given = {"dmoments": program.add(lay(dmoments.view(by_sample), panel)), "moments": moments}
    program.run(
        n.GroupMoments(**sizes, **ids, eps=EPS, moments=moments, inverse=saved),
        n.GroupMomentsBackward(
            *(),
            **sizes,
            **ids,
            **given,
            inverse=saved,
            more=program.add(lay(more, panel)),
            dx=dx,
            dweight=dweight,
        ),
    )
    found = unlay(program[moments], (*expected.shape, 1, 1), panel)
    close(found.flatten(1), expected)
    close(unlay(program[saved], (batch, groups, 1, 1), panel).flatten(1), inverse)
    close(unlay(program[dx], shape, panel), right[0] + more, 4)
    if weight is not None:
        close(program[dweight], right[1], 4)


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("steps", [(1, 1), (2, 2), (1, 2), (4, 1), (9, 9)])
@pytest.mark.parametrize("around", [(0, 0), (2, 3)])
def test_slices(
    program: Program, panel: int, steps: tuple[int, int], around: tuple[int, int]
) -> None:
    x = normal(*SHAPE).requires_grad_()
    expected = F.pad(x[:, :, :: steps[0], :: steps[1]], (0, 0, 0, 0, *around), value=0.25)
    dy = normal(*expected.shape, seed=1)
    (right,) = torch.autograd.grad(expected, x, dy)
    y, dx = program.empty(dy.numel()), program.empty(x.numel())
    native_ = program.native
    shared = {"images": images(SHAPE, panel), "slicing": native_.Thinning(*steps, *around)}
    program.run(
        native_.Slice(**shared, value=0.25, x=program.add(lay(x, panel)), y=y),
        native_.SliceBackward(**shared, dy=program.add(lay(dy, panel)), dx=dx),
    )
    close(unlay(program[y], expected.shape, panel), expected)
    close(unlay(program[dx], SHAPE, panel), right)


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize(
    "amounts", [(0, 0, 0, 0, 0, 0), (1, 2, 0, 0, 0, 0), (0, 1, 2, 0, 0, 3), (3, 1, 1, 2, 2, 1)]
)
def test_padding(program: Program, panel: int, amounts: tuple[int, ...]) -> None:
    x = normal(*SHAPE).requires_grad_()
    expected = F.pad(x, amounts, value=-1.5)
    dy = normal(*expected.shape, seed=1)
    (right,) = torch.autograd.grad(expected, x, dy)
    y, dx = program.empty(dy.numel()), program.empty(x.numel())
    native_ = program.native
    left, right_, top, bottom, before, after = amounts
    padding = native_.Padding(
        channels_before=before,
        channels_after=after,
        top=top,
        bottom=bottom,
        left=left,
        right=right_,
    )
    shared = {"images": images(SHAPE, panel), "padding": padding}
    program.run(
        native_.Pad(**shared, value=-1.5, x=program.add(lay(x, panel)), y=y),
        native_.PadBackward(**shared, dy=program.add(lay(dy, panel)), dx=dx),
    )
    close(unlay(program[y], expected.shape, panel), expected)
    close(unlay(program[dx], SHAPE, panel), right)


LAYOUTS = ["contiguous", "batch_last", "panels"]


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(LAYOUTS, 2)))
@pytest.mark.parametrize(
    "shape", [(32, 5, 7, 6), (32, 3, 1, 1), (16, 70, 1, 1), (48, 2, 3, 150), (32, 4, 32, 32)]
)
@pytest.mark.parametrize("panel", [4, 16])
def test_relayout(
    program: Program, source: str, target: str, shape: tuple[int, ...], panel: int
) -> None:
    width = {"contiguous": -1, "batch_last": 0, "panels": panel}
    x = normal(*shape)
    y = program.empty(x.numel())
    native_ = program.native
    program.run(
        native_.Relayout(
            images=images(shape, panel),
            source=native_.Layout[source],
            target=native_.Layout[target],
            x=program.add(lay(x, width[source])),
            y=y,
        )
    )
    assert torch.equal(program[y], lay(x, width[target]).flatten().to(program.dtype))


def test_relayout_of_a_batch_that_fills_no_panels(program: Program) -> None:
    x, y, z = normal(7, 5, 3, 2), program.empty(210), program.empty(210)
    native_ = program.native
    layout, sizes = native_.Layout, images(x.shape, 0)
    program.run(
        native_.Relayout(
            images=sizes,
            source=layout.contiguous,
            target=layout.batch_last,
            x=program.add(x),
            y=y,
        ),
        native_.Relayout(
            images=sizes, source=layout.batch_last, target=layout.contiguous, x=y, y=z
        ),
    )
    assert torch.equal(program[y], lay(x, 0).flatten().to(program.dtype))
    assert torch.equal(program[z], x.flatten().to(program.dtype))


# Element by element


LENGTHS = [1, 31, 70_001]


@pytest.mark.parametrize("length", LENGTHS)
def test_copies(program: Program, length: int) -> None:
    a = normal(length)
    at = program.add(a)
    copied, filled = program.empty(length), program.empty(length)
    program.run(
        program.native.Copy(length=length, x=at, y=copied),
        program.native.Fill(length=length, value=0.75, y=filled),
    )
    assert torch.equal(program[copied], a.to(program.dtype))
    assert torch.equal(program[filled], torch.full_like(a, 0.75).to(program.dtype))


@pytest.mark.parametrize("length", LENGTHS)
def test_dropout(program: Program, length: int) -> None:
    x = normal(length)
    y, again, other, kept = (program.empty(length) for _ in range(4))
    at = program.add(x)
    program.seeds = [5, 2**62 + 3]
    native_ = program.native

    def dropout(probability: float, seed: int, to: int) -> Any:
        return native_.Dropout(length=length, probability=probability, seed=seed, x=at, y=to)

    program.run(
        dropout(0.3, 1, y), dropout(0.3, 1, again), dropout(0.3, 0, other), dropout(0, 0, kept)
    )
    expected = program[y]
    assert torch.equal(program[again], expected)
    assert torch.equal(program[kept], program[at])
    if length > 10_000:
        assert abs(float((program[y] == 0).double().mean()) - 0.3) < 0.01
        assert not torch.equal(program[other], expected)
    mask = program[y] != 0
    close(program[y][mask], program[at][mask] / 0.7)


# Plans of several steps


@pytest.mark.parametrize("panel", PANELS)
def test_a_block_in_the_arena_with_any_number_of_threads(program: Program, panel: int) -> None:
    """Convolution, batch norm and ReLU forward and backward, with all but the ends in the arena."""
    case = conv_case(batch=32)
    native_, size = program.native, program.dtype.itemsize
    number = max(size, 4)  # bytes of a statistic
    topology = program.topology(case)
    values, bias = program.add(case.values), program.add(case.bias)
    weight, shift = program.add(normal(4) + 2), program.add(normal(4, seed=1))
    x, dz = program.add(case.x), program.add(case.dy)
    z, dx = program.empty(case.dy.numel()), program.empty(case.x.numel())
    dvalues, dbias = program.empty(len(case.connections)), program.empty(4)
    dweight, dshift = program.empty(4), program.empty(4)
    operands = [native_.External() for _ in program.rooms]
    used = 0

    def arena(elements: int, size: int = size) -> int:
        nonlocal used
        operands.append(native_.Arena(used, elements * size))
        used += -(-elements * size // 64) * 64
        return len(operands) - 1

    inner, outer = case.x.numel(), case.dy.numel()
    x_, y_, z_, dz_, dx_ = (arena(n) for n in (inner, outer, outer, outer, inner))
    mean, variance, factors = arena(4, number), arena(4, number), arena(12, number)
    norm = native_.NormOperands(
        weight=weight, bias=shift, mean=mean, variance=variance, training=True, relu=True, eps=EPS
    )
    inside = native_.Layout.panels if panel else native_.Layout.batch_last
    outside = native_.Layout.contiguous
    sizes = geometry(case, (panel, panel))
    shape = tuple(case.dy.shape)
    steps = [
        native_.Relayout(
            images=images(case.x.shape, panel), source=outside, target=inside, x=x, y=x_
        ),
        native_.ConvForward(
            geometry=sizes,
            topology=topology,
            values=values,
            bias=bias,
            x=x_,
            y=y_,
            mean=mean,
            variance=variance,
        ),
        native_.NormForward(**channels(shape, panel), norm=norm, x=y_, z=z_),
        native_.Relayout(images=images(shape, panel), source=inside, target=outside, x=z_, y=z),
        native_.Relayout(images=images(shape, panel), source=outside, target=inside, x=dz, y=dz_),
        native_.NormBackward(
            **channels(shape, panel),
            norm=norm,
            x=y_,
            dz=dz_,
            dresidual=dz_,
            dweight=dweight,
            dbias=dshift,
            factors=factors,
        ),
        native_.ConvBackward(
            geometry=sizes,
            topology=topology,
            values=values,
            x=x_,
            dy=dz_,
            deferred=native_.DeferredGradient(y=y_, factors=factors),
            dx=dx_,
            dvalues=dvalues,
            dbias=dbias,
        ),
        native_.Relayout(
            images=images(case.x.shape, panel), source=inside, target=outside, x=dx_, y=dx
        ),
    ]
    program.narrow(*steps)
    plan = program.kernels.Plan(steps, operands, used)
    assert [step.name for step in plan.steps] == [step.name for step in steps]
    assert [repr(step) for step in plan.steps] == [repr(step) for step in steps]
    room = torch.full((used + 64,), 255, dtype=torch.uint8)
    start = -room.data_ptr() % 64
    results = []
    for threads in (1, 2, 3):
        for first, last in ((0, 4), (4, 6), (6, 8)):  # in segments
            plan.run(
                *(first, last, program.addresses(), program.elements()),
                arena=room.data_ptr() + start,
                arena_bytes=used,
                threads=threads,
            )
        results.append([program[k].clone() for k in (z, dx, dvalues, dbias, dweight, dshift)])
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))
    leaves = [
        t.clone().requires_grad_()
        for t in (case.x, case.weight(case.values), case.bias, normal(4) + 2, normal(4, seed=1))
    ]
    y = case.dense(leaves[0], leaves[1], leaves[2])
    expected = F.batch_norm(y, None, None, leaves[3], leaves[4], training=True, eps=EPS).relu()
    grads = list(torch.autograd.grad(expected, leaves, case.dy))
    grads[1] = grads[1][case.places()]
    found = results[0]
    close(found[0].view(shape), expected)
    close(found[1].view(case.x.shape), grads[0], 4)
    for actual, right in zip(found[2:], grads[1:], strict=True):
        close(actual, right, 100)
