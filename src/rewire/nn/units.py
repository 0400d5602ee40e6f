"""Layers, batch norms, rectifiers and poolings as one step, where they follow each other in an
``nn.Sequential``.

A running model may do anything with the output of a layer, so each layer answers with a promise. What one
module of a sequence gives to the next is seen by nobody else: there only the last one needs to promise
anything, and autograd need not know of the others. That saves most of the time between two kernels.

A *unit* is a layer and what follows it at once: a rectifier; or a batch norm, maybe with a rectifier and a
maximum pooling. Units that follow each other are one :mod:`rewire.ops.chain`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from rewire.nn import promises
from rewire.nn.conv import SparseConv2d
from rewire.nn.linear import SparseLinear
from rewire.nn.promises import kept, kinds, promise
from rewire.nn.state import hooked
from rewire.nn.taking import taken
from rewire.ops import chain, channels, eager, native, pooling, products
from rewire.ops.chain import Between, Link
from rewire.ops.norms import Moments, Norm, Owed

_LAYERS = (SparseConv2d, SparseLinear)
_WATCHED = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def forward(sequence: nn.Sequential, input: Any) -> Any:
    """What ``nn.Sequential.forward`` does."""
    if not promises.running() or _has_any_global_hook():
        for module in sequence:
            input = module(input)
        return input
    modules, at = list(_parts(sequence)), 0
    while at < len(modules):
        run = _run(modules, at, input, sequence) if type(modules[at]) in _LAYERS else None
        if run is None:
            input = modules[at](input)
            at += 1
        else:
            input, at = run
    return input


def _parts(sequence: nn.Sequential) -> Iterator[nn.Module]:
    """The modules that run one after the other, those of inner sequences among them."""
    for module in sequence._modules.values():
        assert module is not None
        if type(module) is nn.Sequential and taken(module) and not _watched(module):
            yield from _parts(module)
        else:
            yield module


def _watched(module: nn.Module) -> bool:
    own = module.__dict__
    return any(own[name] for name in _WATCHED)


def _own(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module is of one of these types and just what they say, and nobody watches it."""
    own = "forward" in module.__dict__ and not taken(module)
    return type(module) in kinds and not own and not _watched(module)


class _Unit(NamedTuple):
    """A layer and what follows it, by where the next module stands."""

    layer: SparseConv2d | SparseLinear
    norm: nn.BatchNorm2d | None
    relu: bool
    pool: nn.MaxPool2d | None
    end: int


def _unit(modules: Sequence[nn.Module], at: int) -> _Unit | None:
    """The unit that starts here, if one does."""
    if len(modules) < at + 2 or not _own(modules[at], *_LAYERS):
        return None
    layer: Any = modules[at]
    bn: Any = modules[at + 1]
    rest: list[Any] = list(modules[at + 2 : at + 4])
    if layer.probe is not None or (torch.is_grad_enabled() and not layer.values.requires_grad):
        return None
    if _own(bn, nn.ReLU):
        return _Unit(layer, None, True, None, at + 2)
    if not (isinstance(layer, SparseConv2d) and _own(bn, nn.BatchNorm2d) and _fit(layer, bn)):
        return None
    relu, pool = bool(rest) and _own(rest[0], nn.ReLU), None
    rest = rest[relu:]
    if rest and _own(rest[0], nn.MaxPool2d):
        pool = rest[0]
    return _Unit(layer, bn, relu, pool, at + 2 + relu + (pool is not None))


def uses_batch(bn: Any) -> bool:
    """Whether a batch norm uses the batch's own statistics, and tracks all of them or none."""
    tracked = [t is not None for t in (bn.running_mean, bn.running_var, bn.num_batches_tracked)]
    all_or_none = tracked == [bn.track_running_stats] * 3
    return bool(bn.training and bn.momentum is not None and all_or_none)


def _uses_running(bn: Any) -> bool:
    """Whether a batch norm uses what it has tracked."""
    return not bn.training and bn.running_mean is not None and bn.running_var is not None


def _fit(conv: SparseConv2d, bn: Any) -> bool:
    """Whether the kernels can do the batch norm."""
    tensors = (bn.weight, bn.bias, bn.running_mean, bn.running_var)
    if not (uses_batch(bn) or _uses_running(bn)) or native.kernels(conv.values) is None:
        return False
    shape, dtype = (conv.out_channels,), conv.values.dtype
    return all(
        t is None or (t.shape == shape and t.dtype == dtype and t.is_cpu and t.is_contiguous())
        for t in tensors
    )


def _run(
    modules: Sequence[nn.Module], at: int, x: Any, sequence: nn.Sequential
) -> tuple[Tensor, int] | None:
    """The output of the units that start here, and where the next module stands; None if there are
    none. ``modules`` are those of ``sequence``."""
    if type(x) not in (Tensor, promises.Pending) or hooked():
        return None
    if torch._C._len_torch_dispatch_stack() > 0:  # who watches sees each layer
        return None
    with torch._C.DisableTorchFunction():
        links = _Links(x)
        while (unit := _unit(modules, at)) is not None and links.add(unit):
            at = unit.end - (unit.pool is not None and links.norm is not None)
        if links.source is None:
            return None
        products.refuse_tangents()
        if at == len(modules) and links.norm is None and promises.answers(sequence):
            links.found[-1] = eager.as_answer(links.found[-1])
        y, norm = chain.run(links.source, links.found), links.norm
        if norm is None:
            return kept(y, None), at
        statistics = () if norm.training else norm[2:4]
        reads = tuple(t for t in (y, norm.weight, norm.bias, *statistics) if t is not None)
        compute, plus = kinds(y, norm)
        add = None if norm.relu else plus
        return promise(links.shape, reads, compute, add, norm=norm, leaves=norm.owed), at


class _Links:
    """What a chain of units of ``x`` consists of.

    Attributes:
        source: what the first link reads, once there is one.
        found: the links.
        shape: of what the last of them gives.
        norm: the batch norm that whoever reads that has to do.
    """

    def __init__(self, x: Tensor) -> None:
        self.x, self.shape = x, tuple(x.shape)
        self.source: Tensor | None = None
        self.found: list[Link] = []
        self.norm: Norm | None = None
        self._between: Between | None = (
            None  # the last product, if it is rectified, and the next one
        )

    def add(self, unit: _Unit) -> bool:
        """Add a unit if it can be done; if its pooling cannot, without it."""
        layer, bn, dtype = unit.layer, unit.norm, self.x.dtype
        shape = layer.output_shape(self.shape)
        if layer.values.dtype != dtype or shape is None or min(shape) < 1:
            return False
        size = math.prod(shape) // shape[1]
        if bn is not None and bn.training and size < 2:
            return False  # torch says what is wrong
        products.check_layer(layer.sizes, self.shape[1], dtype, *layer.parts)
        norm, self.norm = self.norm, None
        if self.source is None:
            self.source, norm = layer.source(self.x)
        before, self._between = self._between, Between() if bn is None else None
        if bn is None:
            self._append(layer, norm, shape, relu=True, between=(before, self._between))
            return True
        moments, after = Moments(bn.running_mean, bn.running_var), None  # type: ignore[arg-type]
        if bn.training:
            mean, variance = (torch.empty(shape[1], dtype=dtype) for _ in range(2))
            moments = Moments(mean, variance, Owed())
            after = partial(_track, bn, moments, size)
        measured = moments if bn.training else None
        self._append(layer, norm, shape, after, moments=measured, between=(before, None))
        mean, variance, owed = moments
        self.norm = Norm(bn.weight, bn.bias, mean, variance, bn.training, bn.eps, unit.relu, owed)
        sizes = None if unit.pool is None else _sizes(unit.pool, shape)
        if sizes is not None:
            self.found.append(pooling.link(self.norm, *sizes))
            self.shape, self.norm = (*shape[:2], *sizes[1]), None
        return True

    def _append(
        self,
        layer: SparseConv2d | SparseLinear,
        norm: Norm | None,
        shape: tuple[int, ...],
        after: Callable[[], None] | None = None,
        **extras: Any,
    ) -> None:
        self.found.append(eager.link(layer.sizes, *layer.parts, norm, after, **extras))
        self.shape = shape


def _track(bn: Any, moments: Moments, size: int) -> None:
    """The running statistics see the batch."""
    if bn.running_mean is not None:
        bn.num_batches_tracked.add_(1)
        statistics = (bn.running_mean, bn.running_var)
        channels.track(moments.mean, moments.variance, size, bn.momentum, statistics)


def _sizes(pool: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, int]] | None:
    """Those of a pooling, and of its output; None if the kernels cannot do it."""
    if pool.ceil_mode or pool.return_indices or pool.dilation not in (1, (1, 1)):
        return None
    return pooling.sizes(shape, pool.kernel_size, pool.stride, pool.padding)
