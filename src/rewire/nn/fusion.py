"""Keeping a converted model's forward pass in batch-last memory, with nothing to change in it.

While a converted model runs, the torch functions it calls on batch-last tensors (batch norm, pooling,
padding) go to kernels for that memory; every other function sees ordinary tensors and does what it
always does. A batch norm answers with a :class:`Pending` result, a promise that is computed when it is
first used: if that use adds a tensor or rectifies, it happens in the same pass over memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from rewire.ops import channels, layout

Compute = Callable[[bool, Tensor | None], Tensor]  # (rectify, residual) -> result


class Pending(torch.Tensor):
    """A result that is not computed yet, and may take in what is done to it first."""

    _compute: Compute
    _like: Tensor
    _residual: Tensor | None
    _results: dict[bool, Tensor]  # plain and rectified
    _grad_mode: bool
    _versions: tuple[int, int]

    @staticmethod
    def promise(like: Tensor, compute: Compute, residual: Tensor | None = None) -> Pending:
        """The promise of a tensor of the shape, strides and type of ``like``."""
        pending: Pending = torch.Tensor._make_wrapper_subclass(
            Pending, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        pending._compute, pending._like, pending._residual = compute, like, residual
        pending._results, pending._grad_mode = {}, torch.is_grad_enabled()
        pending._versions = pending._current_versions()
        return pending

    def _current_versions(self) -> tuple[int, int]:
        return self._like._version, 0 if self._residual is None else self._residual._version

    def settle(self, rectify: bool = False) -> Tensor:
        """The result as an ordinary tensor."""
        if rectify not in self._results:
            with torch._C.DisableTorchFunction(), torch.set_grad_enabled(self._grad_mode):
                if self._versions != self._current_versions():
                    raise RuntimeError(
                        "the input of a batch norm was changed in place before its output was used; "
                        "change a copy instead"
                    )
                self._results[rectify] = self._compute(rectify, self._residual)
        return self._results[rectify]

    def _rectify(self, in_place: bool) -> Tensor:
        result = self.settle(rectify=True)
        if in_place:
            self._results[False] = result
        return result

    def _plus(self, other: Any, in_place: bool) -> Any:
        """The promise of the sum, or NotImplemented."""
        other = settled(other)
        if not isinstance(other, Tensor) or self._residual is not None or self._results:
            return NotImplemented
        with torch._C.DisableTorchFunction():
            same = other.shape == self._like.shape and other.dtype == self._like.dtype
            if not same or not other.is_cpu or not layout.prefers_batch_last(other):
                return NotImplemented
            if in_place:
                self._residual = other
                self._versions = self._current_versions()
                return self
            return _track(Pending.promise(self._like, self._compute, other))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return func(args[0]._like, *args[1:], **kwargs)
        if func in _RECTIFY and isinstance(args[0], Pending):
            in_place = (
                func in _IN_PLACE or bool(args[1:] and args[1]) or bool(kwargs.get("inplace"))
            )
            return args[0]._rectify(in_place)
        if func in _ADD and len(args) == 2 and not kwargs:
            if isinstance(args[0], Pending):
                result = args[0]._plus(args[1], func in _IN_PLACE)
            else:
                result = NotImplemented if func in _IN_PLACE else args[1]._plus(args[0], False)
            if result is not NotImplemented:
                return result
        args, kwargs = pytree.tree_map_only(Pending, Pending.settle, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Pending, Pending.settle, (args, kwargs or {}))
        return func(*args, **kwargs)


_METADATA = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cpu")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "layout")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point),
    *(Tensor.__len__, Tensor.nelement, Tensor.ndimension, torch.numel, torch.is_floating_point),
}
_RECTIFY = {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
_ADD = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
_IN_PLACE = {F.relu_, torch.relu_, Tensor.relu_, Tensor.add_, Tensor.__iadd__}


def settled(x: Any) -> Any:
    """``x`` as an ordinary tensor, computed now if it was pending."""
    return x.settle() if isinstance(x, Pending) else x


# Torch functions on batch-last tensors ------------------------------------------------------------


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
    statistics = (running_mean, running_var)
    if input.dim() < 2 or not channels.can_batch_norm(input, weight, bias, *statistics):
        return None
    size = input.numel() // input.shape[1]
    if training:
        if size == 1:
            return None  # torch says what is wrong
        mean, variance = (torch.empty(input.shape[1], dtype=input.dtype) for _ in range(2))
    elif running_mean is None or running_var is None:
        return None
    else:
        mean, variance = running_mean, running_var
    updates = training and running_mean is not None

    def compute(rectify: bool, residual: Tensor | None) -> Tensor:
        nonlocal updates
        z = channels.batch_norm(
            *(input, weight, bias, mean, variance),
            training=training,
            eps=eps,
            relu=rectify,
            residual=residual,
        )
        if updates:  # once, however often it is computed
            updates = False
            assert running_mean is not None
            assert running_var is not None
            with torch.no_grad():
                running_mean.lerp_(mean, momentum)
                running_var.lerp_(variance * (size / (size - 1)), momentum)
        return z

    return _track(Pending.promise(input, compute))


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
    return channels.max_pool2d(input, kernel_size, stride, padding)


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
    return channels.avg_pool2d(input, kernel_size, stride, padding, count_include_pad)


_FUNCTIONS: dict[Any, Callable[..., Tensor | None]] = {
    F.batch_norm: _batch_norm,
    F.max_pool2d: _max_pool2d,
    torch.max_pool2d: _max_pool2d,
    F.avg_pool2d: _avg_pool2d,
    F.adaptive_avg_pool2d: channels.adaptive_avg_pool2d,
    F.pad: channels.pad,
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


def _recomputed() -> bool:
    """Whether activation checkpointing will run this again, outside of the model's own call."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class _Fusion(TorchFunctionMode):
    """Active while a converted model runs."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[weakref.ref[Pending]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = _FUNCTIONS.get(func)
        if special is not None and _recomputed():
            special = None
        if special is not None and args and isinstance(args[0], Tensor):
            x = settled(args[0])
            if type(x) is Tensor:
                result = special(
                    x, *pytree.tree_map_only(Pending, Pending.settle, args[1:]), **kwargs
                )
                if result is not None:
                    return result
        elif "out" in kwargs or (
            (_writes(func) or kwargs.get("inplace")) and not (args and isinstance(args[0], Pending))
        ):
            self.settle()  # what is pending must not see the change
        return func(*args, **kwargs)

    def settle(self) -> None:
        """Compute all that is still pending."""
        pending, self.pending = self.pending, []
        for reference in pending:
            if (it := reference()) is not None and not it._results:
                it.settle()


class _Local(threading.local):
    def __init__(self) -> None:
        self.modes: list[_Fusion | None] = []


_local = _Local()


def _track(pending: Pending) -> Pending:
    if _local.modes and (mode := _local.modes[-1]) is not None:
        mode.pending.append(weakref.ref(pending))
    return pending


def _enter(module: nn.Module, args: Any) -> None:
    plain = not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None
    mode = _Fusion() if plain else None
    _local.modes.append(mode)
    if mode is not None:
        mode.__enter__()  # type: ignore[no-untyped-call]


def _leave(module: nn.Module, args: Any, output: Any) -> Any:
    if not _local.modes or (mode := _local.modes.pop()) is None:
        return None
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    mode.settle()
    return pytree.tree_map_only(Pending, Pending.settle, output)


def fuse(module: nn.Module) -> None:
    """Let ``module`` run as described above whenever it is called."""
    if _enter not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_leave, always_call=True)


def unfuse(module: nn.Module) -> None:
    """Take :func:`fuse` back."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in (_enter, _leave)]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)
