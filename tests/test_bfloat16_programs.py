"""Random programs under autocast: types are exactly those of layers one by one and of the dense twin, and
numbers and gradients as right as rounding lets them be."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rewire
import test_engine_random as plain
import test_random_programs as hostile
from bodies import normal
from programs import Program, Step
from rewire import ops
from rewire.engine import use_engine

pytestmark = [
    pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels"),
    pytest.mark.usefixtures("small_panels"),
]
BF16 = torch.bfloat16


def near(ours: Any, dense: Any, truth: Any, size: float) -> None:
    """Of one type, and not further from the truth than rounding explains, which small batches amplify."""
    assert (ours is None) == (dense is None)
    if ours is None or truth is None or not ours.numel():
        return
    assert ours.dtype is dense.dtype
    if not ours.is_floating_point():
        assert torch.equal(ours, dense)
        return
    mine, theirs = (float((t.double() - truth).norm()) for t in (ours, dense))
    bound = 4 * theirs + 0.15 * float(truth.norm()) + 0.05 * size
    assert mine <= bound, f"error {mine:.3g}, layer by layer {theirs:.3g}, bound {bound:.3g}"


def of_types(program: list[tuple[str, int, int, bool]], training: bool, seed: int) -> None:
    torch.manual_seed(seed)
    on = rewire.sparsify(plain.Program(program), 0.5, keep_dense="depthwise").train(training)
    off = copy.deepcopy(on)
    use_engine(off, False)
    exact = copy.deepcopy(off).double()
    x = torch.randn(4, plain.CHANNELS, plain.SIZE, plain.SIZE)

    def run(model: nn.Module, x: Tensor, autocast: bool) -> list[Any]:
        with torch.autocast("cpu", BF16, enabled=autocast):
            return plain._run(model, x, True)

    try:
        truth, dense = run(exact, x.double(), False), run(off, x, True)
    except RuntimeError as error:
        assert "inplace" in str(error) or "in-place" in str(error)  # noqa: PT017
        return
    ours = run(on, x, True)
    assert len(ours) == len(dense) == len(truth)
    size = max(float(t.norm()) for t in truth if t is not None)
    for mine, theirs, right in zip(ours, dense, truth, strict=True):
        near(mine, theirs, right, size)


STEPS = st.lists(
    st.tuples(
        # Without what decides by a number: the ways may part.
        st.sampled_from([*plain.UNARY.keys() - {"control"}, *plain.IN_PLACE, *plain.BINARY]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(STEPS, st.booleans(), st.integers(0, 99))
def test_programs(program: list[tuple[str, int, int, bool]], training: bool, seed: int) -> None:
    of_types(program, training, seed)


def beside_its_twin(steps: list[Step], setting: hostile.Setting) -> None:
    """Forward and backward pass inside autocast."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = rewire.sparsify(
            Program(steps, outputs=setting.outputs), sparsity=0.4, weights="fresh"
        )
        twin = rewire.densify(copy.deepcopy(model))
        exact = copy.deepcopy(twin).double()
        data = normal(setting.batch, setting.width, 6, 6)
        try:
            with torch.autocast("cpu", BF16):
                dense = hostile.found(twin, model, data.float(), setting)
            truth = hostile.found(exact, model, data, setting)
        except (RuntimeError, ValueError):
            return  # torch refuses it
        try:
            with torch.autocast("cpu", BF16):
                ours = hostile.found(model, model, data.float(), setting)
        except RuntimeError as error:
            if any(refusal in str(error) for refusal in hostile.REFUSALS):
                return
            raise
    size = max(float(t.double().norm()) for t in truth.values() if t.numel())
    for name in truth.keys() & dense.keys() & ours.keys():
        try:
            near(ours[name], dense[name], truth[name], size)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=hostile.CHECKS)
@given(hostile.STEPS, hostile.SETTINGS)
def test_hostile_programs(steps: list[Step], setting: hostile.Setting) -> None:
    beside_its_twin(steps, setting)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=hostile.CHECKS)
@given(hostile.STEPS, hostile.SETTINGS)
def test_many_hostile_programs(steps: list[Step], setting: hostile.Setting) -> None:
    beside_its_twin(steps, setting)
