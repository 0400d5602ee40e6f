"""A training step of a public model: dense in every precision and memory format, or sparse."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from rewire.bench.case import CHANNELS_LAST
from rewire.bench.timing import Function
from rewire.bench.zoo.public import IMAGES
from rewire.precision import FLOAT32, PRECISIONS, autocast

OURS = "ours "  # and its precision
COMPILED = " compiled"


def converted(model: nn.Module, sparsity: float) -> tuple[nn.Module, str]:
    """The sparse model, and what the conversion warned of: what stays dense."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = rewire.sparsify(model, sparsity=sparsity, weights="fresh")
    return model, "\n".join(dict.fromkeys(str(warning.message) for warning in caught))


def dense_steps(
    model: nn.Module, x: Any, data: str, *, compiled: bool, fused: bool
) -> dict[str, Function]:
    """Training steps of copies of a dense model, by precision and memory format."""
    formats: dict[str, Any] = {"": torch.contiguous_format}
    if data == IMAGES:
        formats[CHANNELS_LAST] = torch.channels_last
    steps = {}
    for precision in PRECISIONS:
        for name, memory_format in formats.items():
            for how in ("", COMPILED)[: 1 + compiled]:
                twin = copy.deepcopy(model).to(memory_format=memory_format)  # type: ignore[call-overload]
                if how:
                    twin = torch.compile(twin)
                its_x = x.to(memory_format=memory_format) if isinstance(x, Tensor) and name else x
                steps[precision + name + how] = training_step(twin, its_x, precision, fused=fused)
    return steps


def training_step(
    model: nn.Module, x: Any, precision: str = FLOAT32, *, fused: bool = False
) -> Function:
    """zero_grad, forward, loss, backward and AdamW; ``fused`` chooses its fused kernel."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused or None)
    targets: list[Tensor] = []

    def run() -> None:
        optimizer.zero_grad()
        with autocast(precision):
            output = model(**x) if isinstance(x, Mapping) else model(x)
        logits = _logits(output).float()
        if not targets:
            targets.append(torch.randint(logits.shape[-1], logits.shape[:-1]).flatten())
        F.cross_entropy(logits.flatten(0, -2), targets[0]).backward()
        optimizer.step()

    return run


def _logits(output: Any) -> Tensor:
    """What the loss is computed from, classes in the last dimension."""
    for name in ("logits", "logits_per_image", "logits_per_text"):
        if isinstance(found := getattr(output, name, None), Tensor):
            return found
    if isinstance(output, Mapping):  # of models that segment images
        output = output["out"].movedim(1, -1)
    found = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(found, Tensor) or found.dim() < 2:
        raise TypeError(
            f"the model returns a {type(output).__name__} without logits of (batch, classes)"
        )
    return found
