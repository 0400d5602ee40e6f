"""The lazy tensor: shape, dtype, and the node of a region that will compute it.

Torch functions on it are looked up in a table (:mod:`rewire.engine.parse`). Those that are known append a
node to the region; every other one makes the region run first. Then there are two cases:

* Only Python holds the tensor. Its object becomes an ordinary ``torch.Tensor`` with its place in the graph.
* C++ code holds it, too: ``autograd.Function.apply`` (activation checkpointing, gradient reversal),
  ``torch.jit.script`` and the like do not ask ``__torch_function__``, and have linked to its place in the
  shadow graph. It then stays a lazy tensor, *linked*, which has its numbers in ``_data``: torch works on
  it as on any wrapper subclass, and all its gradient goes through the shadow graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rewire.engine import private
from rewire.engine.aliases import layouts
from rewire.engine.graph import is_strided
from rewire.engine.private import without_functions
from rewire.ops.layout import contiguous_strides

METADATA: dict[Any, Callable[..., Any]] = {}
"""By torch function: what answers without any numbers. A part of the following."""

HANDLERS: dict[Any, Callable[..., Any]] = {}
"""By torch function: answers with the result, or NotImplemented if the region has to run. Takes the
function's own arguments."""


OTHERS: set[type] = set()
"""Kinds of tensors that see to all functions of a lazy tensor and one of theirs."""


class LazyTensor(torch.Tensor):
    """A tensor that has not been computed yet, or whose place in the graph C++ code knows."""

    _region: Any = None  # while it is not computed
    _index: int = -1  # of its node
    _data: Tensor | None = None  # its numbers, once it is linked
    _shared = False  # whether another linked tensor has the same memory

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = HANDLERS.get(func)
        if handler is not None and (not kwargs or takes(handler, *kwargs)):
            result = handler(*args, **kwargs) if kwargs else handler(*args)
            if result is not NotImplemented:
                return result
        return call(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        held = list(lazies((args, kwargs)))
        for lazy in held:
            if lazy._region is not None:
                with private.as_called_from_python():
                    lazy._region.run(func, held)
        writes = func._schema.is_mutable
        if writes and any(lazy._shared for lazy in held):
            raise RuntimeError(
                f"{func} changes a tensor in place that shares its memory with a view, and C++ code holds "
                "one of them: change a copy, or call rewire.use_engine(model, False)"
            )
        result = func(*replaced(args, data_of), **replaced(kwargs, data_of))
        if not writes:
            return result
        return replaced(
            result, lambda t: next((lazy for lazy in held if lazy._data is t), t), Tensor
        )


@cache
def takes(handler: Callable[..., Any], *names: str) -> bool:
    """Whether a handler has arguments of these names: torch functions have aliases of some."""
    parameters = inspect.signature(handler).parameters.values()
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return anything or {*names} <= {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}


def lazies(value: Any) -> Iterator[LazyTensor]:
    """The lazy tensors in the arguments of a torch function."""
    if type(value) is LazyTensor:
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from lazies(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from lazies(part)


def replaced(value: Any, change: Callable[[Any], Any], kind: type = LazyTensor) -> Any:
    """Arguments of a torch function, or its results, with every tensor of a kind changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        parts = [replaced(part, change, kind) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, list):
        return [replaced(part, change, kind) for part in value]
    if isinstance(value, dict):
        return {key: replaced(part, change, kind) for key, part in value.items()}
    return value


def call(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """A torch function that the engine does not know, once its arguments are computed."""
    if not OTHERS.isdisjoint(types):
        return NotImplemented
    linked = False
    for lazy in lazies((args, kwargs)):
        if lazy._region is not None:
            lazy._region.run((func, args, kwargs))
        linked = linked or type(lazy) is LazyTensor
    if not linked:
        return func(*args, **kwargs)
    if func in NEEDS_MEMORY or not all(kind in _PLAIN for kind in types):
        return func(*replaced(args, ordinary), **replaced(kwargs, ordinary))
    with without_functions():
        return func(*args, **kwargs)


def ordinary(x: Any) -> Any:
    """``x`` as an ordinary tensor, computed now if it was lazy: itself, or a view of what is linked."""
    if type(x) is not LazyTensor:
        return x
    if x._region is not None:
        x._region.run()
    if type(x) is not LazyTensor:
        return x
    with without_functions():
        return x.view_as(x)


def data_of(tensor: Tensor) -> Tensor:
    """The ordinary tensor with the numbers of one that is computed."""
    if type(tensor) is not LazyTensor:
        return tensor
    data = tensor._data
    if data is None:
        raise RuntimeError(
            "this tensor was made from a lazy tensor behind PyTorch's back and has no numbers; call "
            "rewire.use_engine(model, False)"
        )
    return data


class Shadow(torch.autograd.Function):
    """The place of a lazy tensor in a graph that mirrors the program node by node. Gradients come here
    only from C++ code that has read the tensor past ``__torch_function__``."""

    @staticmethod
    def forward(ctx: Any, region: Any, index: int, positions: Any, *reads: Tensor) -> Tensor:
        ctx.region, ctx.index, ctx.positions = region, index, positions
        return make(region, index)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        grads = ctx.region.gradients(ctx.index, ctx.positions, dy)
        return None, None, None, *grads


def make(region: Any, index: int) -> LazyTensor:
    """The tensor of a node."""
    _, _, _, shape, _, dtype = region.nodes[index]
    if not is_strided(region.nodes, index):
        return private.make_wrapper(LazyTensor, shape, dtype=dtype)
    strides = strides_of(region, index)
    return private.make_wrapper(LazyTensor, shape, strides=strides, dtype=dtype)


def strides_of(region: Any, index: int) -> tuple[int, ...]:
    """Those of torch's result; of what is no view, as if it was contiguous."""
    op, attrs, inputs, shape, *_ = region.nodes[index]
    if op == "slice":
        rows, columns, down, across = strides_of(region, inputs[0])
        return (rows, columns, attrs.down * down, attrs.across * across)
    if op == "narrow":
        return strides_of(region, inputs[0])
    if op == "permute":
        strides = strides_of(region, inputs[0])
        return tuple(strides[dim] for dim in attrs.dims)
    if op == "alias":
        source = inputs[0]
        shape = region.nodes[source][3]
        made = layouts(attrs.kind, attrs.arguments, shape, strides_of(region, source))
        part: int = attrs.part
        return made[part].strides
    if op == "view" and is_strided(region.nodes, index):
        source = inputs[0]
        strides = strides_of(region, source)
        given = torch.empty_strided(region.nodes[source][3], strides, device="meta")
        return given.view(shape).stride()
    return contiguous_strides(shape)


ShadowBackward: Any = Shadow._backward_cls
_PLAIN = (LazyTensor, Tensor, torch.nn.Parameter)
NEEDS_MEMORY = {
    *(Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage),
    *(Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.__dlpack__, Tensor.__repr__),
    *(Tensor.__format__, Tensor.tolist, Tensor.data.__get__, Tensor.share_memory_),  # type: ignore[attr-defined]
}
"""Functions that want the memory itself, which a linked tensor does not have."""


def _native(function: Callable[..., Any]) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        with without_functions():
            return function(*args, **kwargs)

    return answer


_ATTRIBUTES = (
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "itemsize"),
    *("is_cpu", "is_cuda", "is_mps", "is_xpu", "is_meta", "is_mkldnn", "is_nested", "is_sparse"),
    *("is_sparse_csr", "is_quantized", "is_vulkan", "is_ipu", "is_xla", "nbytes"),
)
_QUESTIONS = (
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.stride),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.element_size),
    *(Tensor.__len__, Tensor.is_conj, Tensor.is_neg, Tensor.is_inference, Tensor.get_device),
    *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_conj, torch.is_neg),
)

for _name in _ATTRIBUTES:
    if hasattr(Tensor, _name):
        _get = getattr(Tensor, _name).__get__
        METADATA[_get] = _native(_get)
for _function in _QUESTIONS:
    METADATA[_function] = _native(_function)
HANDLERS |= METADATA
