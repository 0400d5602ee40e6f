"""Running statistics that a recorded batch norm is going to update.

From the call of the batch norm until its region has run, the Python objects of its buffers are
:class:`LazyBuffer`: whoever reads or changes one makes the region run first, which turns the object into
the ordinary tensor that it was, with the same memory and version. The region has that tensor meanwhile.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from rewire.engine import private
from rewire.engine.lazy import METADATA, replaced

_lock = threading.RLock()  # for the two steps of becoming lazy and ordinary


class LazyBuffer(torch.Tensor):
    """A buffer whose update has been recorded."""

    _region: Any = None  # until it has run
    _tensor: Tensor  # the buffer as an ordinary tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        metadata = METADATA.get(func)
        if metadata is not None:
            return metadata(*args, **kwargs)
        return func(*_settled(args), **_settled(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # C++ code holds the wrapper, which is another Python object once the region has run.
        with private.as_called_from_python():
            args, kwargs = _settled(args), _settled(kwargs or {})
        return func(*args, **kwargs)


def hide(buffer: Tensor, region: Any) -> Tensor | None:
    """Make a buffer lazy; returns the ordinary tensor, as another object. None if that is not possible."""
    wrapper = private.make_wrapper(LazyBuffer, buffer.shape, dtype=buffer.dtype)
    with _lock:
        if type(buffer) is not Tensor:  # another thread was faster
            return None
        buffer._region, buffer._tensor = region, wrapper  # type: ignore[attr-defined]
        try:
            private.swap(buffer, wrapper)
        except RuntimeError:  # C++ code has a weak reference to it
            del buffer._region, buffer._tensor  # type: ignore[attr-defined]
            return None
    return wrapper


def show(buffer: Any, region: Any) -> None:
    """Make a buffer that a region has updated ordinary again. May be called again if it was interrupted."""
    with _lock:
        if getattr(buffer, "_region", None) is not region:
            return
        tensor = buffer._tensor
        # The class comes last: another thread that uses the buffer until then waits for the region.
        private.unswap(buffer, tensor)
        tensor._tensor = buffer
        del buffer._region, buffer._tensor


def settled(buffer: LazyBuffer) -> Tensor:
    """The ordinary tensor of a buffer, updated."""
    while type(buffer) is LazyBuffer:
        region = getattr(buffer, "_region", None)
        if region is None or not region.settle():
            return getattr(buffer, "_tensor", buffer)
        with private.without_functions():
            show(buffer, region)  # if an interrupt has kept the region from doing so
    return buffer


def _settled(arguments: Any) -> Any:
    return replaced(arguments, settled, LazyBuffer)
