"""Products over connections: kernels against the reference twins and against dense PyTorch."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from rewire import Connections, ops
from rewire.ops import Convolution, Topology, TopologyError, native, reference
from rewire.ops.topology import build

LINEAR = Convolution()
INSTRUCTION_SETS = ops.instruction_sets() or ["reference"]
DTYPES = [torch.float32, torch.float64]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 1e-2, torch.bfloat16: 5e-2}
NEEDS = [needs for needs in itertools.product([False, True], repeat=3) if any(needs)]


@contextmanager
def instructions(name: str) -> Iterator[None]:
    before = ops.instruction_set()
    if name != before:
        ops.use_instruction_set(name)
    yield
    if name != before:
        ops.use_instruction_set(before)


# A layer on data, and what dense PyTorch makes of it


@dataclass
class Case:
    """A layer with random connections, values and data; ``conv`` is LINEAR and x 2-D, or 4-D."""

    conv: Convolution
    connections: Connections
    x: Tensor
    values: Tensor
    bias: Tensor
    dy: Tensor

    @cached_property
    def topology(self) -> Topology:
        c = self.connections
        return build(c.indptr, c.indices, c.n_in, self.taps)

    @property
    def taps(self) -> int:
        return self.conv.kernel[0] * self.conv.kernel[1]

    def run(self, x: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        if self.x.dim() == 2:
            return ops.linear(x, values, bias, self.topology)
        return ops.conv2d(x, values, bias, self.topology, self.conv)

    def run_and_relu(self, x: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        return F.relu(self.run(x, values, bias))

    def dense(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.x.dim() == 2:
            return F.linear(x, weight, bias)
        return F.conv2d(x, weight, bias, self.conv.stride, self.conv.padding, self.conv.dilation)

    def places(self) -> tuple[Tensor, ...]:
        """Where each connection lies in the dense weight."""
        outputs, inputs = self.connections.outputs(), self.connections.inputs()
        if self.x.dim() == 2:
            return outputs, inputs
        channels, wide = self.x.shape[1], self.conv.kernel[1]
        tap = inputs // channels
        return outputs, inputs % channels, tap // wide, tap % wide

    def weight(self, values: Tensor) -> Tensor:
        shape: tuple[int, ...] = (self.connections.n_out, self.x.shape[1])
        if self.x.dim() == 4:
            shape += self.conv.kernel
        weight = values.new_zeros(shape)
        weight[self.places()] = values
        return weight


def make(
    conv: Convolution,
    shape: tuple[int, ...],
    n_out: int,
    density: float,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    empty_rows: bool = False,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    n_in = shape[1] * conv.kernel[0] * conv.kernel[1]
    if density < 0.01:
        connections = Connections.random(n_in, n_out, int(density * n_in * n_out), generator)
    else:
        mask = torch.rand(n_out, n_in, generator=generator) < density
        if empty_rows:
            mask[::2] = False
            mask[:, ::3] = False
        connections = Connections.from_mask(mask)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    out = conv.output_size(*shape[2:]) if len(shape) == 4 else ()
    values, bias = normal(len(connections)), normal(n_out)
    return Case(conv, connections, normal(*shape), values, bias, normal(shape[0], n_out, *out))


def gradients(
    run: Callable[..., Tensor], tensors: tuple[Tensor, ...], dy: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor, list[Tensor | None]]:
    """The output and the gradients that are needed."""
    leaves = [t.detach().requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]
    y = run(*leaves)
    grads = iter(torch.autograd.grad(y, [t for t in leaves if t.requires_grad], dy))
    return y.detach(), [next(grads) if n else None for n in needs]


def dense_gradients(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of input, values and bias, by dense PyTorch."""
    x, values, bias, dy = (t.to(dtype) for t in (case.x, case.values, case.bias, case.dy))
    y, (dx, dw, db) = gradients(
        case.dense, (x.contiguous(), case.weight(values), bias), dy, (True,) * 3
    )
    assert dx is not None
    assert dw is not None
    assert db is not None
    return y, [dx, dw[case.places()], db]


def assert_close(actual: Tensor | None, expected: Tensor, tolerance: float | None = None) -> None:
    assert actual is not None
    assert actual.shape == expected.shape
    if not expected.numel():
        return
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    error = float((actual.to(expected.dtype) - expected).abs().max())
    assert error <= tolerance * max(1.0, float(expected.abs().max()))  # false for NaN


def assert_agrees(case: Case, needs: tuple[bool, ...] = (True, True, True)) -> None:
    """Output and gradients are those of dense PyTorch in float64."""
    expected_y, expected = dense_gradients(case)
    y, grads = gradients(case.run, (case.x, case.values, case.bias), case.dy, needs)
    assert y.dtype == case.x.dtype
    assert_close(y, expected_y)
    for grad, right, need in zip(grads, expected, needs, strict=True):
        if need:
            assert_close(grad, right)


def arranged(x: Tensor, how: str) -> Tensor:
    """The values of ``x`` (or for "expanded" its first sample's) in other memory."""
    if how == "batch-last":
        return x.movedim(0, -1).contiguous().movedim(-1, 0)
    if how == "channels-last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if how == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "expanded":
        return x[:1].expand(x.shape) if x.shape[0] else x
    if how == "sliced":
        room = x.new_full([2 * n + 3 for n in x.shape], torch.nan)
        view = room[tuple(slice(1, 2 * n + 1, 2) for n in x.shape)]
        return view.copy_(x)
    if how == "offset":
        room = x.new_full((x.numel() + 1,), torch.nan)[1:]
        return room.copy_(x.flatten()).view(x.shape)
    return x.contiguous()


ARRANGEMENTS = [
    *("contiguous", "batch-last", "channels-last", "transposed", "expanded", "sliced", "offset")
]


# Any shape: kernels, reference and dense agree

batches = st.one_of(st.sampled_from([0, 1, 128, 130]), st.integers(2, 70))
common = {
    "dtype": st.sampled_from(DTYPES),
    "density": st.sampled_from([0.0, 0.05, 0.3, 0.7, 1.0]),
    "empty_rows": st.booleans(),
    "how": st.sampled_from(ARRANGEMENTS),
    "dy_how": st.sampled_from(ARRANGEMENTS),
    "needs": st.sampled_from(NEEDS),
    "seed": st.integers(0, 2**31),
}


@st.composite
def linear_cases(draw: st.DrawFn) -> tuple[Case, tuple[bool, ...]]:
    options = {name: draw(strategy) for name, strategy in common.items()}
    shape = (draw(batches), draw(st.integers(1, 50)))
    return _case(LINEAR, shape, draw(st.integers(1, 50)), options), options["needs"]


@st.composite
def conv_cases(draw: st.DrawFn) -> tuple[Case, tuple[bool, ...]]:
    options = {name: draw(strategy) for name, strategy in common.items()}

    def pair(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    conv = Convolution(pair(1, 5), pair(1, 3), pair(0, 3), pair(1, 3))
    sizes = (
        max(1, d * (k - 1) + 1 - 2 * p) + draw(st.integers(0, 6))
        for k, p, d in zip(conv.kernel, conv.padding, conv.dilation, strict=True)
    )
    shape = (draw(batches), draw(st.integers(1, 5)), *sizes)
    return _case(conv, shape, draw(st.integers(1, 6)), options), options["needs"]


def _case(conv: Convolution, shape: tuple[int, ...], n_out: int, options: dict[str, Any]) -> Case:
    chosen = {name: options[name] for name in ("density", "dtype", "seed", "empty_rows")}
    case = make(conv, shape, n_out, **chosen)
    case.x, case.dy = arranged(case.x, options["how"]), arranged(case.dy, options["dy_how"])
    return case


def assert_all_agree(case: Case, needs: tuple[bool, ...]) -> None:
    for name in INSTRUCTION_SETS:
        with instructions(name):
            assert_agrees(case)
            assert_agrees(case, needs)


@settings(max_examples=100, deadline=None)
@given(linear_cases())
def test_linear_of_any_shape(drawn: tuple[Case, tuple[bool, ...]]) -> None:
    assert_all_agree(*drawn)


@settings(max_examples=200, deadline=None)
@given(conv_cases())
def test_convolution_of_any_shape(drawn: tuple[Case, tuple[bool, ...]]) -> None:
    assert_all_agree(*drawn)


@settings(max_examples=100, deadline=None)
@given(st.one_of(linear_cases(), conv_cases()))
def test_reference_twins_of_any_shape(drawn: tuple[Case, tuple[bool, ...]]) -> None:
    case = drawn[0]
    expected_y, (dx, dw, _) = dense_gradients(case)
    outputs, inputs = case.connections.outputs(), case.connections.inputs()

    def image(t: Tensor) -> Tensor:
        return t.double().reshape(*t.shape, *(1,) * (4 - t.dim()))

    x, dy, values = image(case.x), image(case.dy), case.values.double()
    y = reference.forward(
        case.conv, x, values, case.bias.double(), outputs, inputs, case.connections.n_out
    )
    assert_close(y, image(expected_y))
    back = reference.input_gradient(case.conv, dy, tuple(x.shape), values, outputs, inputs)
    assert_close(back, image(dx))
    assert_close(reference.weight_gradient(case.conv, dy, x, outputs, inputs), dw)


@settings(max_examples=100, deadline=None)
@given(st.one_of(linear_cases(), conv_cases()), st.data())
def test_gradient_at_any_coordinates(
    drawn: tuple[Case, tuple[bool, ...]], data: st.DataObject
) -> None:
    case = drawn[0]
    count = data.draw(st.integers(0, 60))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    n_in, n_out = case.connections.n_in, case.connections.n_out
    coordinate = data.draw(st.sampled_from([torch.int64, torch.int32]))
    # Unsorted and, there being few of them, often the same ones again.
    outputs = torch.randint(n_out, (count,), generator=generator).to(coordinate)
    inputs = torch.randint(n_in, (count,), generator=generator).to(coordinate)
    weight = case.weight(case.values).double()
    _, (_, dw, _) = gradients(
        case.dense, (case.x.double(), weight, case.bias.double()), case.dy.double(), (True,) * 3
    )
    assert dw is not None
    taps_first = dw.permute(0, 2, 3, 1).flatten(1) if dw.dim() == 4 else dw
    expected = taps_first[outputs.long(), inputs.long()]
    sizes = {} if case.x.dim() == 2 else {"conv": case.conv}
    for name in INSTRUCTION_SETS:
        with instructions(name):
            assert_close(ops.gradient_at(case.dy, case.x, outputs, inputs, **sizes), expected)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_every_small_convolution(isa: str, kernel: int, axis: int) -> None:
    # One row or one column of an image, in all sizes: where the padding is most of it.
    for stride, padding, dilation, size in itertools.product(
        (1, 2, 3), (0, 1, 2, 3), (1, 2), (1, 2, 3, 4)
    ):
        if size + 2 * padding <= dilation * (kernel - 1):
            continue

        def along(value: int, other: int) -> tuple[int, int]:
            return (value, other) if axis == 0 else (other, value)

        conv = Convolution(
            along(kernel, 1), along(stride, 1), along(padding, 0), along(dilation, 1)
        )
        assert_agrees(make(conv, (3, 2, *along(size, 1)), 3, 0.7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("needs", NEEDS)
def test_each_set_of_gradients(isa: str, dtype: torch.dtype, needs: tuple[bool, ...]) -> None:
    assert_agrees(make(LINEAR, (37, 20), 30, 0.3, dtype), needs)
    conv = Convolution((3, 2), (2, 1), (1, 1), (1, 2))
    assert_agrees(make(conv, (19, 4, 9, 8), 7, 0.3, dtype), needs)


@pytest.mark.parametrize("how", ARRANGEMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_arrangement_of_input_and_gradient(isa: str, dtype: torch.dtype, how: str) -> None:
    cases = [
        make(LINEAR, (70, 33), 41, 0.2, dtype),
        make(LINEAR, (1, 33), 41, 0.2, dtype),
        make(Convolution((3, 3), padding=(1, 1)), (34, 5, 7, 6), 8, 0.2, dtype),
    ]
    for case in cases:
        case.x, case.dy = arranged(case.x, how), arranged(case.dy, how)
        assert_agrees(case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_bias_of_any_strides(isa: str, dtype: torch.dtype) -> None:
    conv = Convolution((3, 3))
    for case in (
        make(LINEAR, (33, 60), 50, 0.5, dtype),
        make(conv, (9, 32, 7, 7), 64, 0.5, dtype),
    ):
        case.values, case.bias = arranged(case.values, "sliced"), arranged(case.bias, "sliced")
        assert not case.values.is_contiguous()
        assert_agrees(case)
        case.values = case.values[:1].expand(case.values.shape)
        case.bias = case.bias[:1].expand(case.bias.shape)
        assert_agrees(case)
        with torch.no_grad():
            y = case.run(case.x, case.values, case.bias)
        assert_close(y, dense_gradients(case)[0])


def test_without_bias(isa: str) -> None:
    conv = Convolution((3, 3), padding=(1, 1))
    for case in (make(LINEAR, (40, 30), 20, 0.2), make(conv, (40, 3, 6, 6), 5, 0.2)):
        y, expected = case.run(case.x, case.values, None), dense_gradients(case)[0]
        shape = (-1, *(1,) * (case.x.dim() - 2))
        assert_close(y, expected - case.bias.double().view(shape))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("batch", [0, 1, 3, 37, 130])
def test_rectified_in_the_same_pass(isa: str, batch: int, dtype: torch.dtype) -> None:
    cases = [
        make(LINEAR, (batch, 60), 50, 0.2, dtype),
        make(Convolution((3, 2), (2, 1), (1, 1)), (batch, 4, 9, 8), 7, 0.3, dtype),
        make(conv3(), (batch, 8, 12, 12), 8, 0.3, dtype),
    ]
    for case in cases:
        tensors = (case.x, case.values, case.bias)
        for row_major in (False, True) if case.x.dim() == 2 else (False,):
            options = {"row_major": row_major} if case.x.dim() == 2 else {"conv": case.conv}
            run = ops.linear if case.x.dim() == 2 else ops.conv2d
            rectified = partial(run, topology=case.topology, relu=True, **options)
            for needs in NEEDS:
                y, grads = gradients(rectified, tensors, case.dy, needs)
                expected, right = gradients(case.run_and_relu, tensors, case.dy, needs)
                assert torch.equal(y, expected)
                for grad, reference_grad in zip(grads, right, strict=True):
                    if reference_grad is not None:
                        assert_close(grad, reference_grad)
            with torch.no_grad():
                assert torch.equal(rectified(*tensors), expected)


def test_the_rectifier_is_torchs_at_zero_and_nan(isa: str) -> None:
    c = Connections.from_mask(torch.eye(4))
    topology = build(c.indptr, c.indices, 4)
    x = torch.tensor([[0.0, torch.nan, torch.inf, -torch.inf]]).repeat(37, 1)
    for rows in (x, x[:1]):
        grads = []
        for relu in (True, False):
            bias = torch.zeros(4, requires_grad=True)
            y = ops.linear(rows, torch.ones(4), bias, topology, relu=relu)
            y = y if relu else F.relu(y)
            (grad,) = torch.autograd.grad(y, bias, torch.full_like(y, torch.inf))
            grads.append([y.detach(), grad])
        for ours, torchs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, torchs, equal_nan=True)


def test_results_are_batch_last_unless_row_major_is_asked_for(isa: str) -> None:
    case = make(LINEAR, (40, 30), 20, 0.2)
    y = ops.linear(case.x, case.values, case.bias, case.topology)
    rows = ops.linear(case.x, case.values, case.bias, case.topology, row_major=True)
    assert y.stride() == (1, 40)
    assert rows.is_contiguous()
    assert torch.equal(y, rows)
    x = case.x.clone().requires_grad_()
    rows = ops.linear(x, case.values, case.bias, case.topology, row_major=True)
    (dx,) = torch.autograd.grad(rows, x, case.dy)
    assert_close(dx, dense_gradients(case)[1][0])
    image = make(Convolution((3, 3)), (40, 3, 6, 6), 5, 0.2)
    y = image.run(image.x, image.values, image.bias)
    assert y.stride() == (1, 4 * 4 * 40, 4 * 40, 40)


# Sizes for every way of reading the source (csrc/plan.h): the tensor itself, or a window of it. The
# forward pass reads x, the backward pass dy; both are packed from 128 KB on, if 8 MB hold a window.


def conv3(stride: int = 1) -> Convolution:
    return Convolution((3, 3), (stride, stride), (1, 1))


LARGE: dict[str, tuple[Convolution, tuple[int, ...], int, float]] = {
    "linear: window, window": (LINEAR, (128, 600), 700, 0.05),
    "linear: window, window, uneven": (LINEAR, (100, 600), 700, 0.05),
    "linear: window, direct": (LINEAR, (130, 600), 20, 0.1),
    "linear: direct, window": (LINEAR, (130, 20), 600, 0.1),
    "linear: too large to pack, direct": (LINEAR, (128, 140_000), 3, 0.002),
    "linear: direct, too large to pack": (LINEAR, (128, 3), 140_000, 0.002),
    "linear: many connections": (LINEAR, (70, 600), 500, 0.6),
    "conv: window, window": (conv3(), (128, 16, 32, 32), 24, 0.1),
    "conv: window, window, stride 2": (conv3(2), (128, 16, 32, 32), 24, 0.1),
    "conv: window, window, uneven": (conv3(), (100, 16, 32, 32), 24, 0.1),
    "conv: window, window, wide": (conv3(), (70, 64, 12, 12), 64, 0.05),
    "conv: window, window, few channels": (conv3(), (130, 3, 32, 32), 16, 0.5),
    "conv: window, window, skewed": (
        *(Convolution((5, 2), (3, 2), (3, 1), (2, 3)), (75, 7, 33, 29), 40, 0.2),
    ),
    "conv: window, window, far apart": (
        *(Convolution((2, 3), (1, 1), (3, 3), (3, 3)), (66, 8, 14, 9), 9, 0.5),
    ),
    "conv: window, direct": (Convolution((3, 3), (3, 3)), (70, 16, 16, 16), 1, 0.5),
    "conv: direct, window": (conv3(), (70, 1, 10, 10), 16, 0.5),
    "conv: too large to pack": (conv3(), (65, 700, 7, 32), 5, 0.02),
    "conv: many connections": (conv3(), (66, 128, 5, 4), 128, 0.95),
    "conv: one position in": (Convolution((3, 3), padding=(2, 2)), (70, 500, 1, 1), 60, 0.1),
    "conv: one position out": (Convolution((4, 4)), (70, 30, 4, 4), 600, 0.1),
    "conv: 1x1": (Convolution(), (128, 24, 10, 10), 30, 0.3),
    "conv: 1x1, stride 2": (Convolution(stride=(2, 2)), (128, 24, 10, 10), 30, 0.3),
    "conv: stride over kernel": (Convolution((2, 2), (3, 3)), (128, 24, 11, 10), 30, 0.3),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_sizes_agree_with_dense(isa: str, name: str) -> None:
    case = make(*LARGE[name])
    expected_y, expected = dense_gradients(case, torch.float32)
    tensors = (case.x, case.values, case.bias)
    y, grads = gradients(case.run, tensors, case.dy, (True, True, True))
    assert_close(y, expected_y, 2e-5)
    for grad, right in zip(grads, expected, strict=True):
        assert_close(grad, right, 2e-5)
    _, (dx, _, _) = gradients(case.run, tensors, case.dy, (True, False, False))
    assert_close(dx, expected[0], 2e-5)
    _, (_, dw, _) = gradients(case.run, tensors, case.dy, (False, True, False))
    assert_close(dw, expected[1], 2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name",
    [
        "linear: window, window",
        "linear: window, window, uneven",
        "linear: many connections",
        "conv: window, window",
        "conv: window, window, stride 2",
        "conv: window, window, uneven",
        "conv: window, window, skewed",
        "conv: one position in",
        "conv: one position out",
    ],
)
def test_any_number_of_threads_gives_the_same_bits(
    isa: str, threads: Callable[[int], None], dtype: torch.dtype, name: str
) -> None:
    case = make(*LARGE[name], dtype=dtype)
    tensors = (case.x, case.values, case.bias)
    outputs, inputs = case.connections.outputs(), case.connections.inputs()
    sizes = {} if case.x.dim() == 2 else {"conv": case.conv}

    def everything(count: int) -> list[Tensor | None]:
        threads(count)
        y, grads = gradients(case.run, tensors, case.dy, (True, True, True))
        _, (dx, _, _) = gradients(case.run, tensors, case.dy, (True, False, False))
        _, (_, dw, _) = gradients(case.run, tensors, case.dy, (False, True, False))
        return [y, *grads, dx, dw, ops.gradient_at(case.dy, case.x, outputs, inputs, **sizes)]

    single = everything(1)
    for count in (2, 3, 5):
        for result, expected in zip(everything(count), single, strict=True):
            assert result is not None
            assert expected is not None
            assert torch.equal(result, expected), f"{count} threads"


def test_batch_one_gives_the_same_bits_for_any_number_of_threads(
    isa: str, threads: Callable[[int], None]
) -> None:
    case = make(LINEAR, (1, 2000), 2000, 0.05)
    results = []
    for count in (1, 2, 3, 5):
        threads(count)
        results.append(case.run(case.x, case.values, case.bias))
    assert_close(results[0], dense_gradients(case)[0])
    assert all(torch.equal(result, results[0]) for result in results)


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


def sizes_of(conv: Convolution) -> list[list[int]]:
    return [list(pair) for pair in (conv.kernel, conv.stride, conv.padding, conv.dilation)]


def as_operator(case: Case, x: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """The same through the dispatcher, as torch.compile and dispatch modes see it."""
    if case.x.dim() == 2:
        y: Tensor = torch.ops.rewire.linear(x, values, bias, *case.topology, False)
        return y
    y = torch.ops.rewire.conv2d(x, values, bias, *case.topology, *sizes_of(case.conv))
    return y


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
    row_major = [False] if case.x.dim() == 2 else []
    rest = (*case.topology, *operator_sizes(case), *row_major)
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


@pytest.mark.parametrize(("conv", "shape", "n_out"), OPERATOR_CASES)
def test_opcheck_gradient_at(conv: Convolution, shape: tuple[int, ...], n_out: int) -> None:
    case = make(conv, shape, n_out, 0.5)
    outputs, inputs = case.connections.outputs(), case.connections.inputs()
    rest = operator_sizes(case)
    opcheck(case, "_gradient_at", case.dy, case.x, outputs.flip(0), inputs.flip(0), *rest)
    dy, x = arranged(case.dy, "batch-last"), arranged(case.x, "batch-last")
    opcheck(case, "_gradient_at", dy, x, outputs, inputs, *rest)


def test_opcheck_row_major() -> None:
    case = make(LINEAR, (6, 9), 5, 0.5)
    tensors = [t.requires_grad_() for t in (case.x, case.values, case.bias)]
    args = (*tensors, *case.topology, True)
    torch.library.opcheck(torch.ops.rewire.linear.default, args)


@pytest.mark.parametrize("operator", [False, True])
@pytest.mark.parametrize("target", ["x", "values"])
def test_a_second_derivative_raises(operator: bool, target: str) -> None:
    conv = Convolution((3, 3))
    for case in (make(LINEAR, (5, 6), 4, 0.5), make(conv, (5, 2, 4, 4), 4, 0.5)):
        x, values = case.x.requires_grad_(), case.values.requires_grad_()
        y = (as_operator if operator else Case.run)(case, x, values, case.bias)
        of = x if target == "x" else values
        with pytest.raises(RuntimeError):  # noqa: PT012 (either step may refuse)
            (first,) = torch.autograd.grad(y.square().sum(), of, create_graph=True)
            # A gradient penalty: without an error its part would just be missing.
            (first.square().sum() + y.sum()).backward()


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


@pytest.mark.parametrize("run", [frozen, trained, as_operator])
def test_forward_mode_derivatives_are_right_or_raise(run: Callable[..., Tensor]) -> None:
    for case in (make(LINEAR, (5, 6), 4, 0.5), make(Convolution((3, 3)), (5, 2, 4, 4), 4, 0.5)):
        tangent = torch.ones_like(case.x)
        rest = (case.values, case.bias) if run is as_operator else ()
        with forward_ad.dual_level():
            try:
                y = run(case, forward_ad.make_dual(case.x, tangent), *rest)
            except (RuntimeError, NotImplementedError):
                continue
            derivative = forward_ad.unpack_dual(y).tangent
        assert derivative is not None  # None stands for zero
        assert_close(derivative, case.run(tangent, case.values.detach(), None))


def test_transforms_and_traces_are_right_or_raise() -> None:
    for case in (make(LINEAR, (5, 6), 4, 0.5), make(Convolution((3, 3)), (5, 2, 4, 4), 4, 0.5)):
        run = partial(frozen, case)
        expected = run(case.x)
        with suppress(RuntimeError):
            assert_close(torch.func.vmap(run)(torch.stack([case.x, -case.x]))[0], expected)
        with suppress(RuntimeError):
            derivative = torch.func.jvp(run, (case.x,), (case.x,))[1]
            assert_close(derivative, case.run(case.x, case.values, None))
        with suppress(RuntimeError):
            grad = torch.func.grad(lambda x, run=run, case=case: (run(x) * case.dy).sum())(case.x)
            assert_close(grad, dense_gradients(case)[1][0])
        traced = make_fx(run)(torch.zeros_like(case.x))
        assert_close(traced(case.x), expected)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            y = run(mode.from_tensor(case.x))
        assert (y.shape, y.stride()) == (expected.shape, expected.stride())


# Types


@pytest.mark.parametrize("operator", [False, True])
def test_autocast_runs_in_float32(operator: bool) -> None:
    for case in (make(LINEAR, (9, 6), 4, 0.5), make(conv3(), (9, 2, 4, 4), 4, 0.5)):
        run = as_operator if operator else Case.run
        for x in (case.x, case.x.bfloat16()):
            expected = case.run(x.float(), case.values, case.bias)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = run(case, x, case.values, case.bias)
            assert y.dtype == torch.float32
            assert torch.equal(y, expected)
        x = case.x.bfloat16().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run(case, x, case.values, case.bias)
        (dx,) = torch.autograd.grad(y, x, case.dy)
        assert dx.dtype == torch.bfloat16
        assert_close(dx, dense_gradients(case)[1][0])


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


# Bad input


def linear_layer() -> Case:
    return make(LINEAR, (5, 6), 4, 0.5)


def image_layer() -> Case:
    return make(conv3(), (5, 2, 4, 4), 4, 0.5)


@pytest.mark.parametrize("shape", [(), (6,), (5, 7, 6), (5, 6, 7), (5, 6, 1, 1)])
def test_linear_refuses_other_dimensions(shape: tuple[int, ...]) -> None:
    case = linear_layer()
    with pytest.raises(ValueError, match="2-D"):
        ops.linear(torch.zeros(shape), case.values, case.bias, case.topology)
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        as_operator(case, torch.zeros(shape), case.values, case.bias)


@pytest.mark.parametrize("shape", [(), (2,), (5, 2), (2, 4, 4), (5, 2, 4, 4, 1)])
def test_conv2d_refuses_other_dimensions(shape: tuple[int, ...]) -> None:
    case = image_layer()
    with pytest.raises(ValueError, match="4-D"):
        ops.conv2d(torch.zeros(shape), case.values, case.bias, case.topology, case.conv)
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        as_operator(case, torch.zeros(shape), case.values, case.bias)


@pytest.mark.parametrize("run", [Case.run, as_operator])
@pytest.mark.parametrize("layer", [linear_layer, image_layer])
class TestBadInput:
    def test_types_that_differ(self, layer: Callable[[], Case], run: Callable[..., Tensor]) -> None:
        case = layer()
        x, values, bias = case.x, case.values, case.bias
        with pytest.raises(ValueError, match=r"types differ.*float64"):
            run(case, x.double(), values, bias)
        with pytest.raises(ValueError, match=r"types differ.*float64"):
            run(case, x, values.double(), bias)
        with pytest.raises(ValueError, match=r"types differ.*float64"):
            run(case, x, values, bias.double())
        with pytest.raises(ValueError, match="types differ"):
            run(case, x.half(), values, bias)
        with pytest.raises(ValueError, match="types differ"):
            run(case, x.long(), values, bias)

    def test_values(self, layer: Callable[[], Case], run: Callable[..., Tensor]) -> None:
        case = layer()
        for values in (case.values[:-1], case.values.repeat(2), case.values[None], case.values[:0]):
            with pytest.raises(ValueError, match="values has shape"):
                run(case, case.x, values, case.bias)

    def test_bias(self, layer: Callable[[], Case], run: Callable[..., Tensor]) -> None:
        case = layer()
        for bias in (case.bias[:-1], case.bias[:0], case.bias[None], torch.zeros(())):
            with pytest.raises(ValueError, match="bias has shape"):
                run(case, case.x, case.values, bias)

    def test_units(self, layer: Callable[[], Case], run: Callable[..., Tensor]) -> None:
        case = layer()
        for x in (torch.cat([case.x] * 2, 1), case.x[:, :-1], case.x[:, :0]):
            with pytest.raises(ValueError, match=r".+"):
                run(case, x, case.values, case.bias)


@pytest.mark.parametrize("run", [Case.run, as_operator])
def test_an_image_smaller_than_the_kernel(run: Callable[..., Tensor]) -> None:
    case = make(Convolution((3, 2), padding=(0, 1), dilation=(2, 1)), (5, 2, 5, 4), 4, 0.5)
    run(case, case.x[:, :, :, :1], case.values, case.bias)
    for x in (case.x[:, :, :4], case.x[:, :, :1], case.x[:, :, :0]):
        with pytest.raises(ValueError, match="smaller than the kernel"):
            run(case, x, case.values, case.bias)


@pytest.mark.parametrize("layer", [linear_layer, image_layer])
def test_gradient_at_refuses_bad_coordinates(layer: Callable[[], Case]) -> None:
    case = layer()
    sizes = {} if case.x.dim() == 2 else {"conv": case.conv}
    n_in, n_out = case.connections.n_in, case.connections.n_out

    def at(outputs: list[int], inputs: list[int]) -> Tensor:
        where = torch.tensor(outputs, dtype=torch.int64), torch.tensor(inputs, dtype=torch.int64)
        return ops.gradient_at(case.dy, case.x, *where, **sizes)

    assert at([0, n_out - 1], [n_in - 1, 0]).shape == (2,)
    for outputs, inputs, name in [
        ([0, n_out], [0, 0], "output"),
        ([0, -1], [0, 0], "output"),
        ([0, 0], [n_in, 0], "input"),
        ([0, 0], [-1, 0], "input"),
    ]:
        with pytest.raises(ValueError, match=f"{name} coordinates"):
            at(outputs, inputs)
    with pytest.raises(ValueError, match="one length"):
        at([0, 1], [0])
    with pytest.raises(ValueError, match="1-D"):
        at([[0], [1]], [[0], [1]])  # type: ignore[list-item]


@pytest.mark.parametrize("layer", [linear_layer, image_layer])
def test_gradient_at_refuses_data_that_does_not_fit(layer: Callable[[], Case]) -> None:
    case = layer()
    sizes = {} if case.x.dim() == 2 else {"conv": case.conv}
    zero = torch.zeros(1, dtype=torch.int64)
    bad = [
        (case.dy[:-1], case.x),
        (case.dy.double(), case.x),
        (case.dy.flatten(), case.x),
        (case.dy, case.x[:, :, None] if case.x.dim() == 2 else case.x.flatten(2)),
    ]
    if case.x.dim() == 4:  # the output of another image
        bad += [(F.pad(case.dy, (0, 1)), case.x), (F.pad(case.dy, (0, 0, 0, 2)), case.x)]
        bad += [(case.dy, case.x[:, :, :-1])]
    else:
        bad += [(case.dy[:, :, None, None].expand(-1, -1, 2, 2), case.x)]
    for dy, x in bad:
        with pytest.raises((ValueError, RuntimeError, IndexError)):
            ops.gradient_at(dy, x, zero, zero, **sizes)


@pytest.mark.parametrize("layer", [linear_layer, image_layer])
def test_backward_operators_refuse_data_that_does_not_fit(layer: Callable[[], Case]) -> None:
    case = layer()
    name, sizes = ("linear", []) if case.x.dim() == 2 else ("conv2d", sizes_of(case.conv))
    operator = getattr(torch.ops.rewire, f"{name}_backward")

    def run(dy: Tensor, x: Tensor, values: Tensor) -> None:
        operator(dy, x, values, *case.topology, *sizes, [True, True, True])

    run(case.dy, case.x, case.values)
    bad = [
        (torch.cat([case.dy] * 2), case.x, case.values),
        (torch.cat([case.dy] * 2, 1), case.x, case.values),
        (case.dy, torch.cat([case.x] * 2, 1), case.values),
        (case.dy, case.x, case.values.repeat(2)),
        (case.dy.double(), case.x, case.values),
    ]
    if case.x.dim() == 4:
        bad += [(F.pad(case.dy, (0, 1)), case.x, case.values)]
    for args in bad:
        with pytest.raises((ValueError, RuntimeError)):
            run(*args)


# Corrupt connections


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def topology_2x3(taps: int = 1) -> Topology:
    """Two output units over three input units (channels): 0 <- {0, 2}, 1 <- {1, 2}."""
    return build(int32([0, 2, 4]), int32([0, 2, 1, 2]), 3 * taps, taps)


# Each replaces one tensor of the topology above; all stay inside memory if no check were made.
CORRUPTIONS: dict[str, dict[str, Any]] = {
    "not ascending": {"indices": int32([2, 0, 1, 2])},
    "twice the same": {"indices": int32([0, 0, 1, 2])},
    "negative input": {"indices": int32([-1, 2, 1, 2])},
    "input out of range": {"indices": int32([0, 3, 1, 2])},
    "input far out of range": {"indices": int32([0, 2**31 - 1, 1, 2])},
    "indptr falls": {"indptr": int32([0, 4, 2])},
    "indptr beyond the end": {"indptr": int32([0, 2, 5])},
    "indptr before the end": {"indptr": int32([0, 2, 3])},
    "indptr starts late": {"indptr": int32([1, 2, 4])},
    "indptr negative": {"indptr": int32([0, -2, 4])},
    "indptr long": {"indptr": torch.tensor([0, 2, 4])},
    "indices long": {"indices": torch.tensor([0, 2, 1, 2])},
    "indices float": {"indices": torch.tensor([0.0, 2.0, 1.0, 2.0])},
    "indptr 2-D": {"indptr": int32([[0, 2, 4]])},
    "indices 2-D": {"indices": int32([[0, 2, 1, 2]])},
    "too many indices": {"indices": int32([0, 2, 1, 2, 2])},
    "too few indices": {"indices": int32([0, 2, 1])},
    "slots of other connections": {"slots": int32([0, 2, 3, 4])},
    "slots too short": {"slots": int32([0, 1, 2])},
    "slots beyond the end": {"slots": int32([0, 1, 2, 5])},
    "slots long": {"slots": torch.tensor([0, 1, 2, 4])},
    "outputs swapped": {"outputs": int32([1, 0, 0, 1])},
    "output out of range": {"outputs": int32([0, 1, 0, 2])},
    "outputs negative": {"outputs": int32([0, 1, 0, -1])},
    "outputs too short": {"outputs": int32([0, 1, 0])},
    "order swapped": {"order": int32([0, 2, 3, 1])},
    "order out of range": {"order": int32([0, 2, 1, 4])},
    "order negative": {"order": int32([0, 2, 1, -1])},
    "order empty": {"order": int32([])},
    "order float": {"order": torch.tensor([0.0, 2.0, 1.0, 3.0])},
    "not contiguous": {"indices": int32([0, 9, 2, 9, 1, 9, 2, 9])[::2]},
}


def test_the_sound_topology_of_the_corruptions() -> None:
    assert [t.tolist() for t in topology_2x3()] == [
        *([0, 2, 4], [0, 2, 1, 2], [0, 1, 2, 4], [0, 1, 0, 1], [0, 2, 1, 3])
    ]


def calls(topology: Topology) -> list[Callable[[], Any]]:
    """Every way to run a topology of three input channels, without fear of its tensors."""
    x, image, sizes = torch.ones(4, 3), torch.ones(4, 3, 2, 2), sizes_of(Convolution())
    values = torch.ones(4)
    return [
        lambda: ops.linear(x, values, None, topology),
        lambda: ops.linear(x.clone().requires_grad_(), values, None, topology),
        lambda: torch.ops.rewire.linear(x, values, None, *topology, False),
        lambda: ops.conv2d(image, values, None, topology, Convolution()),
        lambda: torch.ops.rewire.conv2d(image, values, None, *topology, *sizes),
    ]


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_corrupt_connections_are_refused(corruption: str) -> None:
    topology = topology_2x3()
    for call in calls(topology):
        call()
    # "too many" and "too few" differ from the values before the connections are looked at.
    kind = ValueError if corruption.startswith("too") else TopologyError
    for call in calls(topology._replace(**CORRUPTIONS[corruption])):
        with pytest.raises(kind):
            call()
    for call in calls(topology):
        call()


@pytest.mark.parametrize(
    "corruption", ["not ascending", "twice the same", "outputs swapped", "order swapped"]
)
def test_backward_operators_refuse_corrupt_connections(corruption: str) -> None:
    topology = topology_2x3()._replace(**CORRUPTIONS[corruption])
    x, dy, values, needs = torch.ones(4, 3), torch.ones(4, 2), torch.ones(4), [True, True, True]
    with pytest.raises(TopologyError):
        torch.ops.rewire.linear_backward(dy, x, values, *topology, needs)


@pytest.mark.parametrize("name", Topology._fields)
def test_a_checked_tensor_that_is_changed_in_place_is_checked_again(name: str) -> None:
    for index in range(len(calls(topology_2x3()))):
        topology = topology_2x3()
        call = calls(topology)[index]
        before = call()
        tensor = getattr(topology, name)
        kept = tensor.clone()
        tensor[1] = tensor[1] + 1
        with pytest.raises(TopologyError):
            call()
        tensor.copy_(kept)
        assert torch.equal(call(), before)


def test_new_tensors_at_the_address_of_checked_ones_are_checked() -> None:
    memory = np.array([0, 2, 1, 2], dtype=np.int32)
    indptr = int32([0, 2, 4])
    _, _, slots, outputs, order = build(indptr, torch.from_numpy(memory), 3)
    # The tensor that was checked is gone; another one is where it was.
    memory[:] = [2, 0, 1, 2]
    topology = Topology(indptr, torch.from_numpy(memory), slots, outputs, order)
    for call in calls(topology):
        with pytest.raises(TopologyError):
            call()


def test_connections_of_other_taps_are_refused() -> None:
    case = make(conv3(), (5, 2, 4, 4), 4, 0.5)
    as_linear = build(case.connections.indptr, case.connections.indices, 18)
    with pytest.raises(TopologyError):
        ops.conv2d(case.x, case.values, case.bias, as_linear, case.conv)


def test_build_does_not_write_to_what_it_is_given() -> None:
    indptr, indices = int32([0, 2, 4]), int32([0, 2, 1, 2])
    build(indptr, indices, 3)
    assert indptr.tolist() == [0, 2, 4]
    assert indices.tolist() == [0, 2, 1, 2]


# Instruction sets


def test_instruction_sets_can_be_chosen() -> None:
    before = ops.instruction_set()
    assert ops.available() == bool(ops.instruction_sets())
    if ops.available():
        assert ops.instruction_sets()[-1] == "generic"
        assert before in ops.instruction_sets()
    for name in ops.instruction_sets():
        with instructions(name):
            assert ops.instruction_set() == name
    assert ops.instruction_set() == before
    with pytest.raises(ValueError, match="sse9"):
        ops.use_instruction_set("sse9")


def test_memory_is_kept_and_given_back() -> None:
    if not ops.available():
        pytest.skip("needs the compiled kernels")
    case = make(LINEAR, (128, 600), 700, 0.01)
    with torch.no_grad():
        case.run(case.x, case.values, case.bias)
    assert ops.empty_cache() >= 128 * 700 * 4
    assert ops.empty_cache() == 0
    # What is given back early must not be in use: both results stay what they are.
    with torch.no_grad():
        first = case.run(case.x, case.values, case.bias)
        kept = first.clone()
        ops.empty_cache()
        second = case.run(-case.x, case.values, case.bias)
    assert torch.equal(first, kept)
    assert not torch.equal(second, first)


def test_memory_of_other_sizes_does_not_cost_what_is_kept() -> None:
    """A rewiring asks for sizes of its own, and the next step for those of the last one again."""
    if not ops.available():
        pytest.skip("needs the compiled kernels")
    empty = native.module().f32.empty
    ops.empty_cache()
    large, small = 1 << 20, 1 << 16  # elements
    empty((large,), (1,))  # given back at once
    empty((small,), (1,))
    assert ops.empty_cache() == 4 * (large + small)
    sizes = range(small, 2 * small, 64)
    for size in sizes:  # but not without end
        empty((size,), (1,))
    assert ops.empty_cache() < 3 * sum(sizes)  # of 4 bytes each
