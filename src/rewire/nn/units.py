"""Layer, batch norm, rectifier and pooling as one step, where they follow each other in an
``nn.Sequential``.

A running model may do anything with the output of a layer, so each layer answers with a promise. What one
module of a sequence gives to the next is seen by nobody else: there only the last of a unit needs to
promise anything, which saves most of the time between two kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from rewire.nn import promises
from rewire.nn.conv import SparseConv2d
from rewire.nn.linear import SparseLinear
from rewire.nn.promises import kept, kinds, promise
from rewire.nn.state import hooked
from rewire.ops import channels, layout, native, pooling
from rewire.ops.channels import Moments, Norm

_LAYERS = (SparseConv2d, SparseLinear)
_WATCHED = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def take(sequence: nn.Sequential) -> None:
    """Let a sequence run its units in one step each."""
    sequence.__dict__.setdefault("forward", partial(_forward, sequence))


def leave(sequence: nn.Sequential) -> None:
    """Take :func:`take` back."""
    if getattr(sequence.__dict__.get("forward"), "func", None) is _forward:
        del sequence.__dict__["forward"]


def _forward(sequence: nn.Sequential, input: Any) -> Any:
    """What ``nn.Sequential.forward`` does."""
    modules = list(sequence._modules.values())
    units = promises.running() and torch.is_grad_enabled() and not _has_any_global_hook()
    at = 0
    while at < len(modules):
        found = _unit(modules, at, input) if units and type(modules[at]) in _LAYERS else None
        if found is None:
            input = modules[at](input)
            at += 1
        else:
            input, at = found
    return input


def _own(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module is of one of these types and just what they say, and nobody watches it."""
    if type(module) not in kinds:
        return False
    own = module.__dict__
    return "forward" not in own and not any(own[name] for name in _WATCHED)


def _unit(modules: Sequence[nn.Module], at: int, x: Any) -> tuple[Tensor, int] | None:
    """The output of the unit that starts here, and where the next module stands; None if none does."""
    if len(modules) < at + 2 or not isinstance(x, Tensor) or hooked():
        return None
    conv, bn, *rest = modules[at : at + 4]
    if not _own(conv, *_LAYERS):
        return None
    if _own(bn, nn.ReLU):
        with torch._C.DisableTorchFunction():
            rectified = conv.rectified(x)  # type: ignore[operator]
            return None if rectified is None else (kept(rectified, None), at + 2)
    if not (isinstance(conv, SparseConv2d) and _own(bn, nn.BatchNorm2d)):
        return None
    assert isinstance(bn, nn.BatchNorm2d)
    with torch._C.DisableTorchFunction():
        measured = conv.measured(x) if _fit(conv, bn) else None
        if measured is None:
            return None
        y, moments = measured
        norm, end = _normalise(bn, y, moments), at + 2
        if rest and _own(rest[0], nn.ReLU):
            norm, end, rest = norm._replace(relu=True), end + 1, rest[1:]
        if rest and _own(rest[0], nn.MaxPool2d):
            pooled = _pool(rest[0], y, norm)
            if pooled is not None:
                return pooled, end + 1
        reads = tuple(t for t in (y, bn.weight, bn.bias) if t is not None)
        shape, (compute, plus) = layout.image_shape(y), kinds(y, norm)
        add = None if norm.relu else plus
        return promise(shape, reads, compute, add, norm=norm, leaves=moments.owed), end


def _fit(conv: SparseConv2d, bn: nn.BatchNorm2d) -> bool:
    """Whether the batch norm uses the batch's own statistics, and the kernels can do it."""
    tensors = (bn.weight, bn.bias, bn.running_mean, bn.running_var)
    tracked = [t is not None for t in (*tensors[2:], bn.num_batches_tracked)]
    if not bn.training or bn.momentum is None or tracked != [bn.track_running_stats] * 3:
        return False
    if native.kernels(conv.values) is None:
        return False
    shape, dtype = (conv.out_channels,), conv.values.dtype
    return all(
        t is None or (t.shape == shape and t.dtype == dtype and t.is_cpu and t.is_contiguous())
        for t in tensors
    )


def _normalise(bn: nn.BatchNorm2d, y: Tensor, moments: Moments) -> Norm:
    """What ``bn`` does to ``y``; its running statistics see the batch."""
    mean, variance, owed = moments
    if bn.running_mean is not None and bn.running_var is not None:
        assert bn.num_batches_tracked is not None
        assert bn.momentum is not None
        bn.num_batches_tracked.add_(1)
        statistics = (bn.running_mean, bn.running_var)
        channels.track(mean, variance, y.numel() // y.shape[1], bn.momentum, statistics)
    return Norm(bn.weight, bn.bias, mean, variance, True, bn.eps, owed=owed)


def _pool(pool: Any, y: Tensor, norm: Norm) -> Tensor | None:
    if pool.ceil_mode or pool.return_indices or pool.dilation not in (1, (1, 1)):
        return None
    pooled = pooling.max_pool2d(y, pool.kernel_size, pool.stride, pool.padding, norm)
    return None if pooled is None else kept(pooled, None)
