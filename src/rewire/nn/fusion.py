"""Keeping a converted model's forward pass in batch-last memory, with nothing to change in it.

While a converted model runs, the torch functions it calls on batch-last tensors (batch norm, pooling,
padding) go to kernels for that memory; every other function sees ordinary tensors and does what it
always does. Batch norms answer with promises (:mod:`rewire.nn.promises`), and so do sparse layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from rewire.nn import units
from rewire.nn.promises import (
    Pending,
    Promises,
    before_tracking,
    begin,
    copied,
    end,
    inner,
    kept,
    normalized,
    normed,
    running,
    settled,
    thinned,
    unthinned,
)
from rewire.nn.sparse import SparseLayer
from rewire.nn.state import hooked
from rewire.nn.taking import leave, take
from rewire.ops import channels, layout, pooling
from rewire.ops.norms import Norm
from rewire.ops.sharding import has_fsdp


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    statistics: tuple[Tensor | None, ...] = (running_mean, running_var)
    moments, images = None, False
    if training and running_mean is not None and running_var is not None:
        before_tracking((running_mean, running_var))
    if isinstance(input, Pending):
        images = len(input._state.shape) == 4
        input, moments = input.measured() if training else (inner(input), None)
    # Whether a layer of ours has written it; else five dimensions are those of a volume.
    known = moments is not None or (images and layout.is_panels(input))
    if not known and layout.is_panels(input):
        return None
    if not known and input.dim() < 2:
        return None
    if not channels.can_batch_norm(input, weight, bias, *statistics, known=known):
        return None
    size = input.numel() // input.shape[1]
    if training:
        if size == 1:
            return None  # torch says what is wrong
        mean, variance, owed = moments or (*channels.moments(input), None)
        if running_mean is not None and running_var is not None:
            channels.track(mean, variance, size, momentum, (running_mean, running_var))
        statistics = ()
    elif running_mean is None or running_var is None:
        return None
    else:
        mean, variance, owed = running_mean, running_var, None

    norm = Norm(weight, bias, mean, variance, training, eps, owed=owed)

    reads = (input, weight, bias, *statistics)
    present = tuple(tensor for tensor in reads if tensor is not None)
    shape = layout.image_shape(input)
    return normed(shape, present, norm)


def _norm_forward(bn: nn.BatchNorm2d, input: Tensor) -> Tensor:
    """What ``nn.BatchNorm2d.forward`` does, past torch's dispatch where a layer of ours has just promised
    the input."""
    ours = type(bn) is nn.BatchNorm2d and running() and not hooked()
    if type(input) is Pending and ours and len(input._state.shape) == 4:
        parts = units.NormParts.of(bn)
        if parts.uses_batch():
            _, weight, bias, mean, variance, count = parts
            with torch._C.DisableTorchFunction():
                y = _batch_norm(input, mean, variance, weight, bias, True, bn.momentum, bn.eps)  # type: ignore[arg-type]
                if y is not None:
                    if count is not None:
                        count.add_(1)
                    return y
    return type(bn).forward(bn, input)  # which may have become another type since


def _max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    if ceil_mode or return_indices or dilation not in (1, (1, 1), [1, 1]):
        return None
    if input.dim() != 4:
        return None
    behind = normalized(input)
    if behind is not None:
        (source, *_), norm = behind
        with torch._C.DisableTorchFunction():
            pooled = pooling.max_pool2d(source, kernel_size, stride, padding, norm)
        if pooled is not None:
            return kept(pooled, input)
    with torch._C.DisableTorchFunction():
        pooled = pooling.max_pool2d(inner(input), kernel_size, stride, padding)
    return None if pooled is None else kept(pooled, input)


def _whole_mean(x: Tensor) -> Tensor | None:
    """(N, C) means of images, where they are in panels."""
    if type(x) is not Pending or len(x._state.shape) != 4 or not x._state.panels:
        return None
    with torch._C.DisableTorchFunction():
        images = inner(x)
        return pooling.mean(images) if layout.is_panels(images) else None


def _mean(input: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor | None:
    wanted = dim if isinstance(dim, (tuple, list)) else ()
    if kwargs or {d + 4 if d in (-1, -2) else d for d in wanted} != {2, 3} or len(wanted) != 2:
        return None
    found = _whole_mean(input)
    return found if found is None or not keepdim else found[:, :, None, None]


def _adaptive_avg_pool2d(input: Tensor, output_size: Any) -> Tensor | None:
    found = _whole_mean(input) if output_size in (1, (1, 1), [1, 1]) else None
    if found is not None:
        return found[:, :, None, None]
    return pooling.adaptive_avg_pool2d(settled(input), output_size)


def _avg_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor | None:
    if ceil_mode or divisor_override is not None:
        return None
    sizes = (kernel_size, kernel_size) if isinstance(kernel_size, int) else tuple(kernel_size)
    if sizes == tuple(input.shape[2:]) and padding in (0, (0, 0), [0, 0]):
        found = _whole_mean(input)
        if found is not None:
            return found[:, :, None, None]
    return pooling.avg_pool2d(settled(input), kernel_size, stride, padding, count_include_pad)


def _pad(
    input: Tensor, pad: Any, mode: str = "constant", value: float | None = None
) -> Tensor | None:
    around = tuple(pad)
    if mode == "constant" and len(around) == 6 and not any(around[:4]) and min(around[4:]) >= 0:
        found = unthinned(input)
        if found is not None:
            with torch._C.DisableTorchFunction():
                return kept(pooling.thinned(*found, around[4:], value or 0.0), input)
    return pooling.pad(settled(input), pad, mode, value)


def _getitem(x: Tensor, index: Any) -> Tensor | None:
    """Every so many rows and columns of images: the shortcut of a ResNet, which pads the channels next."""
    if type(x) is not Pending or type(index) is not tuple or len(index) != 4:
        return None
    if any(
        type(part) is not slice or part.start is not None or part.stop is not None for part in index
    ):
        return None
    steps = [1 if part.step is None else part.step for part in index]
    if any(type(step) is not int for step in steps) or steps[:2] != [1, 1] or min(steps) < 1:
        return None
    state = x._state
    if steps == [1, 1, 1, 1] or state.result is not None:
        return None
    return thinned(x, (steps[2], steps[3])) if len(state.shape) == 4 and state.panels else None


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    # Where autograd does not record, this may be computed again when no model runs: with torch's noise.
    if not training or inplace or not torch.is_grad_enabled():
        return None
    return channels.dropout(input, p)


def _view(x: Tensor, *shape: Any, **kwargs: Any) -> Tensor | None:
    """What can be viewed in row-major memory is copied if it cannot be in ours."""
    if kwargs or not shape or isinstance(shape[0], torch.dtype) or x.is_contiguous():
        return None
    try:
        return x.view(*shape)
    except RuntimeError:
        return copied(x, x.reshape(*shape))


_FUNCTIONS: dict[Any, Callable[..., Tensor | None]] = {
    F.batch_norm: _batch_norm,
    F.max_pool2d: _max_pool2d,
    torch.max_pool2d: _max_pool2d,
    F.avg_pool2d: _avg_pool2d,
    F.adaptive_avg_pool2d: _adaptive_avg_pool2d,
    torch.mean: _mean,
    Tensor.mean: _mean,
    F.pad: _pad,
    Tensor.__getitem__: _getitem,
    F.dropout: _dropout,
    Tensor.view: _view,
}
_OF_PROMISES = {
    *(F.batch_norm, F.max_pool2d, torch.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d),
    *(torch.mean, Tensor.mean, F.pad, Tensor.__getitem__),
}


_IN_PLACE_OPERATORS = {
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
    *("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__idiv__"),
}


@cache
def _writes(func: Any) -> bool:
    """Whether a torch function changes one of its arguments."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or name in _IN_PLACE_OPERATORS
    return bool(name.endswith("_"))


class _Fusion(TorchFunctionMode):
    """Active while a converted model runs."""

    def __init__(self, promises: Promises) -> None:
        super().__init__()
        self.promises = promises

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # a part of the model
            return func(*args, **kwargs)
        special = _FUNCTIONS.get(func)
        if special is not None and hooked():
            special = None
        if special is not None and args and isinstance(args[0], Tensor):
            x = args[0] if func in _OF_PROMISES else settled(args[0])
            if type(x) in (Tensor, Pending):
                result = special(x, *map(settled, args[1:]), **kwargs)
                if result is not None:
                    return result
        writes = "out" in kwargs or _writes(func) or bool(kwargs.get("inplace"))
        if writes:
            # What is pending must not see the change; it reads floating-point numbers alone.
            if "out" in kwargs or not args or not isinstance(args[0], Tensor):
                self.promises.settle()
            elif isinstance(args[0], Pending):
                for changing in (args[0]._kept.computed, args[0]._kept.result):
                    if changing is not None:
                        self.promises.settle(changing)
            elif args[0].is_floating_point():
                self.promises.settle(args[0])
        if writes and self.promises.copied:
            result = self._run(func, types, args, kwargs)
            changed = kwargs.get("out", args[0] if args else None)
            self.promises.copied = [both for both in self.promises.copied if both.follow(changed)]
            return result
        return self._run(func, types, args, kwargs)

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if args and type(args[0]) is Pending:  # past a second round of torch's dispatch
            return Pending.__torch_function__(func, types, args, kwargs)
        return func(*args, **kwargs)


def _has_compiled(module: nn.Module) -> bool:
    """Whether a part of a module is compiled by itself: it takes ordinary tensors only."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None:
        return False
    return any(
        isinstance(part, compiler.OptimizedModule) or part._compiled_call_impl is not None
        for part in module.modules()
        if part is not module
    )


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What ``module(...)`` does once it is fused: a run, unless it is a part of a model that runs.

    It is none where something else watches, nor with compiled parts inside, nor with FSDP: parameters are
    gone there before what is pending would read them. Parts of such a model are runs.
    """
    call: Any = type(module)._call_impl
    if running():
        return call(module, *args, **kwargs)
    watched = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    if watched or torch._C._len_torch_dispatch_stack() > 0 or has_fsdp(module):
        return call(module, *args, **kwargs)
    if _has_compiled(module):
        return call(module, *args, **kwargs)
    sequence = module if type(module) is nn.Sequential and len(args) == 1 and not kwargs else None
    if sequence is not None and not torch.is_grad_enabled():
        output = units.single(sequence, args[0])
        if output is not None:
            return output
    promises = begin(module)
    try:
        begun = None if sequence is None else units.start(sequence, args[0])
        if begun is None:
            with _Fusion(promises):
                output = call(module, *args, **kwargs)
        else:
            output, rest = begun
            if rest:
                with _Fusion(promises):
                    output = units.go_on(rest, output, True)
    finally:
        end()
    promises.settle()
    if type(output) is Tensor:
        return output
    return pytree.tree_map_only(Pending, Pending.leave, output)


_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Sequential: units.forward,
    nn.BatchNorm2d: _norm_forward,
}


def fuse(module: nn.Module) -> None:
    """Let ``module`` run as described above whenever it is called, and every part of it that has sparse
    layers in it: whichever of them is called first is the model that runs."""
    for part in module.modules():
        inside = any(isinstance(below, SparseLayer) for below in part.modules())
        if part is module or (inside and not isinstance(part, SparseLayer)):
            part.__dict__["_call_impl"] = partial(_call, part)
        if type(part) in _FORWARDS:
            take(part, _FORWARDS[type(part)])


def unfuse(module: nn.Module) -> None:
    """Take :func:`fuse` back, for all parts of a module too."""
    for part in module.modules():
        part.__dict__.pop("_call_impl", None)
        leave(part)
