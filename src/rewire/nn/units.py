"""Layers, batch norms, rectifiers and poolings as one step, where they follow each other in an
``nn.Sequential``.

A running model may do anything with the output of a layer, so each layer answers with a promise. What one
module of a sequence gives to the next is seen by nobody else: there only the last one needs to promise
anything, and autograd need not know of the others. That saves most of the time between two kernels.

A *unit* is a layer and what follows it at once: a rectifier; or a batch norm, maybe with a rectifier and a
maximum pooling; or nothing, at the end of the model. Units that follow each other are one
:mod:`rewire.ops.chain`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from rewire.nn import promises
from rewire.nn.conv import SparseConv2d
from rewire.nn.linear import SparseLinear
from rewire.nn.promises import kept, normed
from rewire.nn.state import hooked
from rewire.nn.taking import taken
from rewire.ops import chain, channels, eager, native, pooling, products, topology
from rewire.ops.chain import Link
from rewire.ops.norms import Moments, Norm, Owed
from rewire.ops.topology import Topology

_LAYERS = (SparseConv2d, SparseLinear)


def forward(sequence: nn.Sequential, input: Any) -> Any:
    """What ``nn.Sequential.forward`` does."""
    if not promises.running() or _has_any_global_hook():
        for module in sequence:
            input = module(input)
        return input
    return go_on(list(_parts(sequence)), input, promises.answers(sequence))


def go_on(modules: Sequence[nn.Module], input: Any, final: bool) -> Any:
    """The output of modules that run one after the other. ``final`` says that it leaves the model."""
    at = 0
    while at < len(modules):
        run = _run(modules, at, input, final) if type(modules[at]) in _LAYERS else None
        if run is None:
            input = modules[at](input)
            at += 1
        else:
            input, at = run
    return input


def start(sequence: nn.Sequential, input: Any) -> tuple[Any, Sequence[nn.Module]] | None:
    """What the first units of a model that is a sequence give, and the modules after them: no function
    of torch is called on the way that anyone would have to see. None if there is none of them."""
    if not taken(sequence) or _watched(sequence) or _has_any_global_hook():
        return None
    modules = list(_parts(sequence))
    run = _run(modules, 0, input, True) if modules and type(modules[0]) in _LAYERS else None
    return None if run is None else (run[0], modules[run[1] :])


def single(sequence: nn.Sequential, x: Any) -> Tensor | None:
    """What a converted sequence of linear layers and rectifiers gives for one sample, where nothing is
    recorded; None if it has to run as usual. One such layer takes less time than what is asked about it,
    so little is asked, and all of them are one call."""
    if type(x) is not Tensor or x.dim() != 2 or x.shape[0] != 1 or not taken(sequence):
        return None
    kernels = native.kernels(x)
    if kernels is None or x.is_neg() or not x.is_contiguous():
        return None
    if _watched(sequence) or _has_any_global_hook():
        return None
    if torch.is_autocast_enabled("cpu") or torch._C._len_torch_function_stack() > 0:
        return None
    layers: list[tuple[int, int, int, int, int, bool]] = []
    width, dtype = x.shape[1], x.dtype
    for module in sequence._modules.values():
        assert module is not None
        kind, own = type(module), module.__dict__
        if _watched(module) or ("forward" in own and not taken(module)):
            return None
        if kind is nn.ReLU and layers:
            layers[-1] = (*layers[-1][:-1], True)
            continue
        if kind is not SparseLinear or own["in_features"] != width:
            return None
        parameters, buffers = own["_parameters"], own["_buffers"]
        values, bias = parameters.get("values"), parameters.get("bias")
        if type(values) is not nn.Parameter or not values.is_contiguous():
            return None
        if bias is not None and not bias.is_contiguous():
            return None
        indptr, indices, out = buffers["indptr"], buffers["indices"], own["out_features"]
        if len(indptr) != out + 1:  # somebody has put other connections there
            return None
        fits = values.dtype == dtype and values.shape == (indices.numel(), 1)
        if bias is not None:
            fits = fits and bias.dtype == dtype and bias.shape == (out,)
        if not fits or not topology.known(indptr, indices, width):
            products.check_layer(products.LINEAR, width, dtype, *cast(SparseLinear, module).parts)
        width = out
        addresses = indptr.data_ptr(), indices.data_ptr(), values.data_ptr()
        layers.append((width, *addresses, 0 if bias is None else bias.data_ptr(), False))
    if not layers or not width:
        return None
    products.refuse_tangents()
    y = x.new_empty((1, width))
    kernels.forward_single(layers, x.data_ptr(), y.data_ptr(), native.threads())
    return y


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
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    )


def _own(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module is of one of these types and just what they say, and nobody watches it."""
    if type(module) not in kinds or ("forward" in module.__dict__ and not taken(module)):
        return False
    return not _watched(module)


class NormParts(NamedTuple):
    """A batch norm and its tensors."""

    module: nn.BatchNorm2d
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    @classmethod
    def of(cls, module: nn.BatchNorm2d) -> NormParts:
        """Read past ``nn.Module.__getattr__``, which is slow, where they are in their places."""
        parameters, buffers = module._parameters, module._buffers
        try:
            return cls(
                *(module, parameters["weight"], parameters["bias"], buffers["running_mean"]),
                *(buffers["running_var"], buffers["num_batches_tracked"]),
            )
        except KeyError:
            return cls(module, *(getattr(module, name, None) for name in cls._fields[1:]))

    def uses_batch(self) -> bool:
        """Whether it uses the batch's own statistics, and tracks all of them or none."""
        module = self.module
        if not module.training or module.momentum is None:
            return False
        tracks = module.track_running_stats
        return all((tensor is not None) == tracks for tensor in self[3:])

    def uses_running(self) -> bool:
        """Whether it uses what it has tracked."""
        tracked = self.running_mean is not None and self.running_var is not None
        return not self.module.training and tracked

    def track(self, moments: Moments, size: int) -> None:
        """The running statistics see the batch."""
        _, _, _, mean, variance, count = self
        momentum = self.module.momentum
        if not (mean is None or variance is None or count is None or momentum is None):
            count.add_(1)
            promises.before_tracking((mean, variance))
            channels.track(moments.mean, moments.variance, size, momentum, (mean, variance))

    def norm(self, moments: Moments | None, relu: bool) -> Norm:
        """What the kernels do, with these statistics or those it has tracked."""
        mean, variance, owed = moments or (self.running_mean, self.running_var, None)
        assert mean is not None
        assert variance is not None
        module = self.module
        return Norm(self.weight, self.bias, mean, variance, module.training, module.eps, relu, owed)


class _Unit(NamedTuple):
    """A layer and what follows it, by where the next module stands."""

    layer: SparseConv2d | SparseLinear
    parts: tuple[Tensor, Tensor | None, Topology]
    norm: NormParts | None
    relu: bool
    pool: nn.MaxPool2d | None
    end: int


def _unit(modules: Sequence[nn.Module], at: int, final: bool) -> _Unit | None:
    """The unit that starts here, if one does; a layer alone if it is the last module and ``final``."""
    alone = at + 1 == len(modules)
    if at >= len(modules) or (alone and not final) or not _own(modules[at], *_LAYERS):
        return None
    layer: Any = modules[at]
    if layer.probe is not None:
        return None
    parts = layer.parts
    if not parts[0].requires_grad and torch.is_grad_enabled():
        return None
    if alone:
        return _Unit(layer, parts, None, False, None, at + 1)
    bn: Any = modules[at + 1]
    if _own(bn, nn.ReLU):
        return _Unit(layer, parts, None, True, None, at + 2)
    if not (isinstance(layer, SparseConv2d) and _own(bn, nn.BatchNorm2d)):
        return None
    norm = NormParts.of(bn)
    if not _fit(layer.out_channels, parts[0], norm):
        return None
    rest: list[Any] = list(modules[at + 2 : at + 4])
    relu, pool = bool(rest) and _own(rest[0], nn.ReLU), None
    rest = rest[relu:]
    if rest and _own(rest[0], nn.MaxPool2d):
        pool = rest[0]
    return _Unit(layer, parts, norm, relu, pool, at + 2 + relu + (pool is not None))


def _fit(channels: int, values: Tensor, norm: NormParts) -> bool:
    """Whether the kernels can do the batch norm of so many channels."""
    if not (norm.uses_batch() or norm.uses_running()) or native.kernels(values) is None:
        return False
    shape, dtype = (channels,), values.dtype
    return all(
        t is None or (t.shape == shape and t.dtype == dtype and t.is_cpu and t.is_contiguous())
        for t in norm[1:5]
    )


def _run(modules: Sequence[nn.Module], at: int, x: Any, final: bool) -> tuple[Tensor, int] | None:
    """The output of the units that start here, and where the next module stands; None if there are
    none. ``final`` says that the last module's output leaves the model."""
    if type(x) not in (Tensor, promises.Pending) or hooked():
        return None
    if torch._C._len_torch_dispatch_stack() > 0:  # who watches sees each layer
        return None
    with torch._C.DisableTorchFunction():
        if type(x) is Tensor and x.is_neg():  # the kernels read memory, which has the other sign
            return None
        links = _Links(x)
        while (unit := _unit(modules, at, final)) is not None:
            if not links.add(unit, final and unit.end == len(modules)):
                break
            at = unit.end - (unit.pool is not None and links.norm is not None)
        if links.source is None:
            return None
        products.refuse_tangents()
        y, norm = chain.run(links.source, links.found), links.norm
        if norm is None:
            return kept(y, None), at
        statistics = () if norm.training else norm[2:4]
        reads = tuple(t for t in (y, norm.weight, norm.bias, *statistics) if t is not None)
        return normed(links.shape, reads, norm), at


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
        self._rectified = False  # whether that is a product, and rectified

    def add(self, unit: _Unit, last: bool) -> bool:
        """Add a unit if it can be done; if its pooling cannot, without it. ``last`` says that its output
        leaves the model."""
        layer, parts, own, dtype = unit.layer, unit.parts, unit.norm, self.x.dtype
        shape = layer.output_shape(self.shape)
        if parts[0].dtype != dtype or shape is None or min(shape) < 1:
            return False
        size = math.prod(shape) // shape[1]
        training = own is not None and own.module.training
        if training and size < 2:
            return False  # torch says what is wrong
        products.check_layer(layer.sizes, self.shape[1], dtype, *parts)
        norm, self.norm = self.norm, None
        if self.source is None:
            self.source, norm = layer.source(self.x)
        moments, track = None, None
        if own is not None and training:
            mean, variance = (torch.empty(shape[1], dtype=dtype) for _ in range(2))
            moments = Moments(mean, variance, Owed())
            track = partial(own.track, moments, size)
        relu, last = own is None and unit.relu, own is None and last
        link = eager.link(*(layer.sizes, *parts, norm, track, relu, moments, self._rectified, last))
        self.found.append(link)
        self.shape, self._rectified = shape, relu
        if own is None:
            return True
        self.norm = own.norm(moments, unit.relu)
        sizes = None if unit.pool is None else _sizes(unit.pool, shape)
        if sizes is not None:
            self.found.append(pooling.link(self.norm, *sizes))
            self.shape, self.norm = (*shape[:2], *sizes[1]), None
        return True


def _sizes(pool: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, int]] | None:
    """Those of a pooling, and of its output; None if the kernels cannot do it."""
    if pool.ceil_mode or pool.return_indices or pool.dilation not in (1, (1, 1)):
        return None
    return pooling.sizes(shape, pool.kernel_size, pool.stride, pool.padding)
