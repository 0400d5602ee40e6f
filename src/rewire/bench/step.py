"""Whole training steps: zero_grad, forward, cross entropy, backward, SGD; dense against sparse."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import rewire
from rewire import models
from rewire.bench.case import DENSE, OURS, STEP, Case, Functions, Groups
from rewire.bench.timing import Function
from rewire.ops import native

SPARSITIES = (0.9, 0.95, 0.98)
QUICK_MODELS, QUICK_SPARSITIES = ("vgg16", "mlp"), (0.95,)
_TOKENS = 128  # of a sequence
_REST = "Python, and what has no operator"


@dataclass(frozen=True)
class Workload:
    """A model and data for it.

    Attributes:
        build: makes the dense model.
        shape: of one input; None for sequences of tokens.
        assignment: how connections are shared out among its layers.
        convolutional: whether dense is also tried in the channels-last memory format.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] | None = (3, 32, 32)
    assignment: str = "erdos-renyi"
    convolutional: bool = False

    def data(self, batch: int) -> tuple[Tensor, Tensor]:
        """Random inputs and classes; a batch of tokens has an eighth as many sequences."""
        if self.shape is None:
            size = (max(1, batch // 8), _TOKENS)
            return torch.randint(65, size), torch.randint(65, size)
        return torch.randn(batch, *self.shape), torch.randint(10, (batch,))


WORKLOADS: dict[str, Workload] = {
    "vgg16": Workload(models.vgg16, convolutional=True),
    "resnet56": Workload(models.resnet56, convolutional=True),
    "vit": Workload(models.vit),
    "mlp": Workload(partial(models.mlp, hidden=(1024, 1024)), shape=(784,)),
    "gpt": Workload(models.gpt, shape=None, assignment="uniform"),
}


@dataclass(frozen=True)
class Plan:
    """What to measure: names of ``WORKLOADS``, sparsities, and images in a batch."""

    models: tuple[str, ...] = field(default_factory=lambda: tuple(WORKLOADS))
    sparsities: tuple[float, ...] = SPARSITIES
    batch: int = 128


def cases(plan: Plan) -> list[Case]:
    """All measurements of a plan, in the order of the tables."""
    return [
        Case("model", name, sparsity, plan.batch, (STEP,), groups)
        for name in plan.models
        for sparsity in plan.sparsities
        for groups in [partial(_groups, WORKLOADS[name], sparsity, plan.batch)]
    ]


def _groups(workload: Workload, sparsity: float, batch: int) -> Groups:
    x, y = workload.data(batch)
    dense = workload.build()
    functions: Functions = {(OURS, ""): _step(_converted(workload, sparsity), x, y)}
    functions[DENSE, "contiguous"] = _step(dense, x, y)
    if workload.convolutional:
        last: Any = {"memory_format": torch.channels_last}
        functions[DENSE, "channels_last"] = _step(copy.deepcopy(dense).to(**last), x.to(**last), y)
    yield STEP, functions


def _converted(workload: Workload, sparsity: float) -> nn.Module:
    return rewire.sparsify(workload.build(), sparsity=sparsity, assignment=workload.assignment)


def _step(model: nn.Module, x: Tensor, y: Tensor) -> Function:
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=1e-4, foreach=True)

    def run() -> None:
        optimizer.zero_grad()
        logits = model(x)
        F.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
        optimizer.step()

    return run


# Where the time goes ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What one operator takes of a step: its share of the time, milliseconds, and calls."""

    operator: str
    share: float
    milliseconds: float
    calls: float


class _Seen:
    """Kernels that the profiler sees, under names of their own."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kernels, name)
        if not callable(found) or isinstance(found, type):
            return found

        def call(*args: Any) -> Any:
            with record_function(f"kernel {name}"):
                return found(*args)

        return call


@contextmanager
def _kernels_seen() -> Iterator[None]:
    if not native.available():
        yield
        return
    module = native.module()
    seen = {"f32": _Seen(module.f32), "f64": _Seen(module.f64)}
    by_type = {torch.float32: seen["f32"], torch.float64: seen["f64"]}
    with (
        patch.object(native, "kernels", lambda x: by_type.get(x.dtype) if x.is_cpu else None),
        patch.object(native, "module", lambda: SimpleNamespace(**{**vars(module), **seen})),
    ):
        yield


def where_time_goes(
    name: str, sparsity: float, batch: int = 128, *, steps: int = 10, top: int = 15
) -> list[Share]:
    """The operators that take most of our training step, the rest of them as one row at the end.

    Times are those of an operator itself, without what it calls, on the thread that trains: a row of an
    autograd function is what Python and torch take around its kernels.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes log lines otherwise
    workload = WORKLOADS[name]
    step = _step(_converted(workload, sparsity), *workload.data(batch))
    for _ in range(3):
        step()
    with _kernels_seen(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(steps):
            with record_function(_REST):
                step()
    events = [(e.key, e.self_cpu_time_total / 1e3, e.count) for e in profiled.key_averages()]
    events.sort(key=lambda event: -event[1])
    total = sum(milliseconds for _, milliseconds, _ in events)
    shown = [
        Share(key, milliseconds / total, milliseconds / steps, calls / steps)
        for key, milliseconds, calls in events[:top]
    ]
    left = sum(milliseconds for _, milliseconds, _ in events[top:])
    calls = sum(count for _, _, count in events[top:])
    return [*shown, Share("all other operators", left / total, left / steps, calls / steps)]
