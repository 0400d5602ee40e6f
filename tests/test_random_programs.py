"""Random programs on converted models and on their dense twins: the same values, gradients and buffers."""

from __future__ import annotations

import copy
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import rewire
from bodies import grads_of, normal
from programs import OPERATIONS, Program, Step
from rewire import ops

pytestmark = [
    pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels"),
    pytest.mark.usefixtures("small_panels"),
]
# What a converted model may refuse.
REFUSALS = (
    "was changed in place",  # before what reads it was computed
    "changes a tensor in place that shares its memory with a view, and C++ code holds",
    "failed in the TorchScript interpreter",  # which loses what it was
)


class Setting(NamedTuple):
    """How a program is run."""

    batch: int = 8
    width: int = 4
    training: bool = True
    input_gradient: bool = True
    outputs: int = 2
    way: str = "backward"
    frozen: str = "nothing"


def found(model: Any, like: Any, data: Tensor, setting: Setting) -> dict[str, Tensor]:
    """All that a program computes, gradients at the connections of ``like``."""
    model.seen.clear()
    model.train(setting.training)
    model.zero_grad()
    leaf = data.detach().clone().requires_grad_(setting.input_gradient)
    with torch.set_grad_enabled(setting.way != "no_grad"):
        outputs = model(leaf * 1 if setting.way == "twice" else leaf)
    result = {f"output {i}": output.detach().clone() for i, output in enumerate(outputs)}
    losses = [
        (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum()
        + y.square().mean()
        for y in outputs
        if y.requires_grad and y.numel()
    ]
    result["recorded"] = torch.tensor([float(y.requires_grad) for y in outputs])
    if losses and setting.way == "twice":
        torch.stack(losses).sum().backward(retain_graph=True)
        torch.stack(losses).sum().backward()
    elif losses and setting.way == "each":
        for loss in losses:
            loss.backward(retain_graph=True)
    elif losses:
        torch.stack(losses).sum().backward()
    result |= {f"seen {i}": seen for i, seen in enumerate(model.seen)}
    grads = {"input": leaf.grad, **grads_of(model, like)}
    if model.kept is not None:
        grads["kept"], model.kept = model.kept.grad, None
    result |= {f"gradient of {name}": g for name, g in grads.items() if g is not None and g.any()}
    result |= {n: b.clone() for n, b in model.named_buffers() if "running" in n or "batches" in n}
    return result


def check(steps: list[Step], setting: Setting) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about programs like these
        program = Program(steps, outputs=setting.outputs).double()
        model = rewire.sparsify(program, sparsity=0.4, weights="fresh")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(setting.frozen not in name)
        twin = rewire.densify(copy.deepcopy(model))
        for seed in range(2):
            data = normal(setting.batch, setting.width, 6, 6, seed=seed)
            nearby = data * (1 + 1e-14 * normal(*data.shape, seed=seed + 2))
            other = copy.deepcopy(twin)  # to see how far rounding goes
            try:
                right = found(twin, model, data, setting)
                noise = found(other, model, nearby, setting)
            except (RuntimeError, ValueError):
                return  # torch refuses it
            try:
                ours = found(model, model, data, setting)
            except RuntimeError as error:
                if any(refusal in str(error) for refusal in REFUSALS):
                    return
                raise
            compare(ours, right, noise)


def compare(ours: dict[str, Tensor], right: dict[str, Tensor], noise: dict[str, Tensor]) -> None:
    largest = max(float(t.abs().max()) for t in right.values() if t.numel())
    for name in {**ours, **right}:
        expected = right.get(name)
        if expected is None:
            expected = torch.zeros_like(ours[name])
        mine = ours.get(name, torch.zeros_like(expected))
        assert mine.shape == expected.shape, name
        moved = noise.get(name, torch.zeros_like(expected)) - expected
        room = 1e-9 * max(1.0, largest) + 100 * float(moved.nan_to_num().abs().sum())
        torch.testing.assert_close(
            mine,
            expected,
            rtol=0,
            atol=room,
            equal_nan=True,
            msg=lambda text, n=name: f"{n}: {text}",
        )


STEPS = st.lists(
    st.tuples(
        st.one_of(
            st.sampled_from(sorted(OPERATIONS)),
            st.sampled_from(["unit", "residual", "conv", "norm", "sequence", "relu", "total"]),
        ),
        st.integers(0, 3),
        st.integers(0, 35),
    ),
    min_size=2,
    max_size=10,
)
SETTINGS = st.builds(
    Setting,
    batch=st.sampled_from([8, 3, 1, 9, 16]),
    width=st.sampled_from([4, 6]),
    training=st.booleans(),
    input_gradient=st.booleans(),
    outputs=st.integers(1, 3),
    way=st.sampled_from(["backward", "backward", "twice", "each", "no_grad"]),
    frozen=st.sampled_from(["nothing", "nothing", "values", "norms", "bias"]),
)
CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


@example([("norm", 0, 0), ("unit", 0, 0)], Setting())
@example([("unit", 0, 0), ("relu", 0, 0), ("conv", 0, 0), ("watched", 2, 0)], Setting())
@settings(
    max_examples=400, deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS
)
@given(steps=STEPS, setting=SETTINGS)
def test_programs(steps: list[Step], setting: Setting) -> None:
    check(steps, setting)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None, suppress_health_check=CHECKS)
@given(steps=STEPS, setting=SETTINGS)
def test_many_programs(steps: list[Step], setting: Setting) -> None:
    check(steps, setting)
