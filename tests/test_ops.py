"""Products over connections: kernels against the reference twins and against dense PyTorch."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from products import (
    LINEAR,
    NEEDS,
    Case,
    arranged,
    assert_agrees,
    assert_close,
    assert_same_bits,
    conv3,
    dense_gradients,
    gradients,
    make,
)
from rewire import ops
from rewire.ops import Convolution, native, reference

INSTRUCTION_SETS = ops.instruction_sets() or ["reference"]
DTYPES = [torch.float32, torch.float64]


@contextmanager
def instructions(name: str) -> Iterator[None]:
    before = ops.instruction_set()
    if name != before:
        ops.use_instruction_set(name)
    yield
    if name != before:
        ops.use_instruction_set(before)


# A layer on data, and what dense PyTorch makes of it


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


@pytest.mark.parametrize("how", ["contiguous", "batch-last", "sliced"])
def test_results_are_contiguous(isa: str, how: str) -> None:
    for case in (make(LINEAR, (40, 30), 20, 0.2), make(Convolution((3, 3)), (40, 3, 6, 6), 5, 0.2)):
        tensors = (arranged(case.x, how), case.values[:, None], case.bias)
        y, grads = gradients(case.run, tensors, arranged(case.dy, how), (True,) * 3)
        assert all(t is not None and t.is_contiguous() for t in (y, *grads))


# Sizes for every way of reading the source (csrc/plan.h): the tensor itself, or a window of it. The
# forward pass reads x, the backward pass dy; both are packed from 128 KB on, if 8 MB hold a window.


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

    assert_same_bits(everything)


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


def test_the_environment_chooses_the_instruction_set() -> None:
    """At import, whichever of those that this machine has; others are an error that names them."""
    code = "from rewire import ops; print(ops.instruction_set())"
    for name in (*ops.instruction_sets(), "sse9"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, "REWIRE_ISA": name},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if name == "sse9":
            assert "instruction set 'sse9' is not one of ['" in done.stderr
        else:
            assert done.stdout.split() == [name]


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
