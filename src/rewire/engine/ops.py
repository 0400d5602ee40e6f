"""The table of operations: what each one computes, with ordinary tensors that autograd knows.

How torch functions become nodes is in :mod:`rewire.engine.parse`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rewire.engine import aliases
from rewire.engine import graph as ir
from rewire.engine.resampling import resample
from rewire.engine.run import Data
from rewire.ops import eager, layout, native
from rewire.ops.reference import convolution

_nothing = nullcontext()


def _without_autocast() -> Any:
    """What autocast did is recorded, and its state may be another by now."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else _nothing


def _conv2d(a: ir.Conv, data: Data, x: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    with _without_autocast():
        return eager.conv2d_as_it_is(
            *(x, values.reshape(-1, 1), bias, data.topologies[a.topology], convolution(*a[:4])),
            probe=data.probes[a.topology],
        )


def _linear(a: ir.Linear, data: Data, x: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    topology, probe = data.topologies[a.topology], data.probes[a.topology]
    with _without_autocast():
        y = eager.linear_as_it_is(x.flatten(0, -2), values, bias, topology, probe)
    return y.view(*x.shape[:-1], y.shape[-1])


def _batch_norm(
    a: ir.BatchNorm,
    data: Data,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
) -> Tensor:
    if not a.training:
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, a.eps)
    if not a.track or not data.effects:
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, a.eps)
    assert a.momentum is not None
    momentum = float(data.scalars[a.momentum])
    return F.batch_norm(x, mean, variance, weight, bias, True, momentum, a.eps)


def _layer_norm(
    a: ir.LayerNorm, data: Data, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    if a.centered:
        return F.layer_norm(x, x.shape[-1:], weight, bias, a.eps)
    if weight is None or weight.dtype is x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, a.eps)
    return F.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, a.eps).to(x.dtype)


def _group_norm(
    a: ir.GroupNorm, data: Data, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    return F.group_norm(x, a.groups, weight, bias, a.eps)


def _resample(a: ir.Resample, data: Data, x: Tensor) -> Tensor:
    with _without_autocast():
        return resample(a, x)


def _shuffle(a: ir.Shuffle, data: Data, x: Tensor) -> Tensor:
    batch, channels, *image = x.shape
    split = x.reshape(batch, a.groups, channels // a.groups, *image)
    return split.transpose(1, 2).reshape(x.shape)


ACTIVATIONS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "hardtanh": lambda x, p, q: F.hardtanh(x, p, q),
    "leaky_relu": lambda x, p, q: F.leaky_relu(x, p),
    "elu": lambda x, p, q: F.elu(x, p) * q if q != 1 else F.elu(x, p),
    "silu": lambda x, p, q: F.silu(x),
    "gelu": lambda x, p, q: F.gelu(x),
    "gelu_tanh": lambda x, p, q: F.gelu(x, approximate="tanh"),
    "sigmoid": lambda x, p, q: torch.sigmoid(x),
    "tanh": lambda x, p, q: torch.tanh(x),
    "hardswish": lambda x, p, q: F.hardswish(x),
    "hardsigmoid": lambda x, p, q: F.hardsigmoid(x),
    "softplus": lambda x, p, q: F.softplus(x, p, q),
}
"""By kind: what an activation computes."""


def _affine(a: ir.Affine, data: Data, x: Tensor) -> Tensor:
    y = x if a.scale == 1 else x * a.scale
    return y + a.shift if a.shift or a.scale == 1 else y


def _pad(a: ir.Pad, data: Data, x: Tensor) -> Tensor:
    amounts = [n for dim in (3, 2, 1, 0) for n in a.amounts[2 * dim : 2 * dim + 2]]
    return F.pad(x, amounts, value=a.value)


def _dropout(a: ir.Dropout, data: Data, x: Tensor) -> Tensor:
    return dropout(x, a.p, int(data.scalars[a.seed]))


class _Dropout(torch.autograd.Function):
    """The noise of an element depends on its place in batch-last memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed = p, seed
        x, module, kernels = layout.to_batch_last(x), native.module(), native.kernels(x)
        y = layout.empty(tuple(x.shape), x)
        step = module.Dropout(length=x.numel(), probability=p, seed=0, x=0, y=1)
        native.run_step(kernels, step, (x, y), (seed,))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dropout(dy, ctx.p, ctx.seed), None, None  # it is linear


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """``F.dropout`` with the noise of a seed."""
    rows = x if x.dim() in (2, 4) else x.reshape(-1, x.shape[-1])
    y: Tensor = _Dropout.apply(rows, p, seed)  # type: ignore[no-untyped-call]
    return y.view(x.shape)


Eager = Callable[..., Tensor]
EAGER: dict[str, Eager] = {
    "conv2d": _conv2d,
    "linear": _linear,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "cast": lambda a, data, x: x.to(a.dtype),
    "relu": lambda a, data, x: F.relu(x),
    "activation": lambda a, data, x: ACTIVATIONS[a.kind](x, a.p, a.q),
    "affine": _affine,
    "add": lambda a, data, x, y: x + y,
    "sub": lambda a, data, x, y: x - y,
    "mul": lambda a, data, x, y: x * y,
    "div": lambda a, data, x, y: x / y,
    "max_pool2d": lambda a, data, x: F.max_pool2d(x, a.kernel, a.stride, a.padding, 1, a.ceil),
    "avg_pool2d": lambda a, data, x: F.avg_pool2d(
        x, a.kernel, a.stride, a.padding, a.ceil, a.count_include_pad
    ),
    "mean": lambda a, data, x: x.mean((2, 3), keepdim=a.keepdim),
    "slice": lambda a, data, x: x[:, :, :: a.down, :: a.across],
    "narrow": lambda a, data, x: x[:, a.first : a.last],
    "resample": _resample,
    "clone": lambda a, data, x: x.clone(memory_format=torch.contiguous_format),
    "shuffle": _shuffle,
    "cat": lambda a, data, *parts: torch.cat(parts, 1),
    "pad": _pad,
    "view": lambda a, data, x: x.reshape(a.shape),
    "permute": lambda a, data, x: x.permute(a.dims),
    "alias": lambda a, data, x: aliases.make(a.kind, a.arguments, x)[a.part],
    "dropout": _dropout,
}


def interpret(
    nodes: Sequence[tuple[Any, ...]], tensors: Sequence[Tensor | None], data: Data
) -> list[Tensor]:
    """The outputs of all nodes, computed one by one by operations that autograd knows.

    This is what a region means: the oracle of the tests, the fallback where there is no plan, and what
    gradients of gradients are taken of.

    Args:
        nodes: of a graph, as :class:`rewire.engine.graph.Node` or plain tuples.
        tensors: the inputs of the graph; None for running statistics if there are to be no effects.
        data: what else nodes refer to.
    """
    found: list[Tensor] = []
    for op, attrs, inputs, *_ in nodes:
        found.append(EAGER[op](attrs, data, *reads(inputs, found, tensors)))
    return found


def reads(
    inputs: Sequence[ir.Ref], found: Sequence[Tensor], tensors: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """What a node reads."""
    return [None if r is None else found[r] if r >= 0 else tensors[~r] for r in inputs]
