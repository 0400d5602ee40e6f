"""Calling a model without a trace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy

_TABLES = ("_parameters", "_buffers", "_modules")


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put everything back that a call of a model may change: parameters, buffers, gradients, attributes of
    its modules, and random number generators."""
    tensors = list({id(t): t for t in (*model.parameters(), *model.buffers())}.values())
    if any(is_lazy(tensor) for tensor in tensors):
        raise ValueError("the model has lazy modules that have not been called: call it once first")
    copies = [tensor.detach().clone() for tensor in tensors]
    grads = [(p, p.grad) for p in model.parameters()]
    attributes = [
        (part, dict(part.__dict__), [dict(getattr(part, name)) for name in _TABLES])
        for part in model.modules()
    ]
    python, arrays = random.getstate(), numpy.random.get_state()  # noqa: NPY002
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=cuda):
        try:
            for parameter, _ in grads:
                parameter.grad = None
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)  # noqa: NPY002
            for part, own, tables in attributes:
                _restore(part.__dict__, own)
                for name, table in zip(_TABLES, tables, strict=True):
                    _restore(getattr(part, name), table)
            for tensor, copy in zip(tensors, copies, strict=True):
                # Past the version counter: graphs of before that have it saved stay valid.
                if not torch.equal(tensor.detach(), copy):
                    tensor.data.copy_(copy)
            for parameter, grad in grads:
                parameter.grad = grad


def _restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    """The same objects under the same names, in the same order."""
    if list(now) != list(before) or any(now[name] is not value for name, value in before.items()):
        now.clear()
        now.update(before)
