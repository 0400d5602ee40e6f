"""Whole training steps: zero_grad, forward, cross entropy, backward, SGD; dense against sparse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from rewire import models
from rewire.bench.case import CHANNELS_LAST, DENSE, OFF, OURS, STEP, Case, Functions, Groups
from rewire.bench.timing import Function
from rewire.engine import use_engine
from rewire.precision import FLOAT32, PRECISIONS, autocast

SPARSITIES = (0.9, 0.95, 0.98)
QUICK_MODELS, QUICK_SPARSITIES = ("vgg16", "mlp"), (0.95,)
_TOKENS = 128  # of a sequence


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
    """What to measure.

    Attributes:
        models: names of ``WORKLOADS``.
        sparsities: shares of the weights that are absent.
        batch: images in a batch.
        engines: how ours runs: ``"on"``, ``"off"`` (layer by layer), or first one and then the other.
        precisions: which ours runs in; dense runs in all.
    """

    models: tuple[str, ...] = field(default_factory=lambda: tuple(WORKLOADS))
    sparsities: tuple[float, ...] = SPARSITIES
    batch: int = 128
    engines: tuple[str, ...] = ("on",)
    precisions: tuple[str, ...] = PRECISIONS


def cases(plan: Plan) -> list[Case]:
    """All measurements of a plan, in the order of the tables."""
    return [
        Case("model", name, sparsity, plan.batch, (STEP,), groups, plan.engines[0])
        for name in plan.models
        for sparsity in plan.sparsities
        for groups in [partial(_groups, WORKLOADS[name], sparsity, plan)]
    ]


def _groups(workload: Workload, sparsity: float, plan: Plan) -> Groups:
    x, y = workload.data(plan.batch)
    functions: Functions = {
        (who, precision): training_step(converted(workload, sparsity, engine), x, y, precision)
        for who, engine in zip((OURS, OFF), plan.engines, strict=False)
        for precision in plan.precisions
    }
    model = workload.build()
    for variant in dense_variants(workload.convolutional):
        functions[DENSE, variant] = dense_step(copy.deepcopy(model), x, y, variant)
    yield STEP, functions


def dense_variants(convolutional: bool) -> list[str]:
    """Names of all that a dense model is tried in: each precision, contiguous and channels-last."""
    formats = ("", CHANNELS_LAST) if convolutional else ("",)
    return [precision + how for precision in PRECISIONS for how in formats]


def dense_step(model: nn.Module, x: Tensor, y: Tensor, variant: str) -> Function:
    """A training step of a dense model in one of these; the model is changed in place."""
    precision = variant.removesuffix(CHANNELS_LAST)
    if precision != variant:
        model, x = channels_last(model, x)
    return training_step(model, x, y, precision)


def converted(workload: Workload, sparsity: float, engine: str) -> nn.Module:
    """The sparse model, with the engine on or off. Its dense weights are never there."""
    with torch.device("meta"):
        model = workload.build()
    model = rewire.sparsify(model, sparsity=sparsity, assignment=workload.assignment)
    use_engine(model, engine == "on")
    return model


def channels_last(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """A dense model, changed in place, and its input in this memory format."""
    last: Any = {"memory_format": torch.channels_last}
    return model.to(**last), x.to(**last)


def phases(model: nn.Module, x: Tensor, y: Tensor, precision: str = FLOAT32) -> dict[str, Function]:
    """The parts of a training step by name, to be called in this order."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=1e-4, foreach=True)
    handed_on: list[Tensor] = []  # from one part to the next, which lets go of it

    def forward() -> None:
        with autocast(precision):
            handed_on.append(model(x))

    def loss() -> None:
        logits = handed_on.pop()
        with autocast(precision):
            handed_on.append(F.cross_entropy(logits.flatten(0, -2), y.flatten()))

    return {
        "zero_grad": optimizer.zero_grad,
        "forward": forward,
        "loss": loss,
        "backward": lambda: handed_on.pop().backward(),
        "optimizer": optimizer.step,
    }


def training_step(model: nn.Module, x: Tensor, y: Tensor, precision: str = FLOAT32) -> Function:
    """A whole training step."""
    parts = tuple(phases(model, x, y, precision).values())

    def run() -> None:
        for part in parts:
            part()

    return run
