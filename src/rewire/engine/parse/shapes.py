"""Views and slices as nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rewire.engine import graph as ir
from rewire.engine.graph import numbers
from rewire.engine.lazy import LazyTensor, strides_of
from rewire.engine.parse.base import No, alias, cast, dtype_of, is_alias, is_view, shape_of, unary
from rewire.engine.scope import recording


def _cat(tensors: Any, dim: Any = 0, *, out: Any = None) -> Any:
    if out is not None or not isinstance(tensors, (tuple, list)) or not tensors:
        return No
    shapes = [shape_of(t) if isinstance(t, Tensor) else () for t in tensors]
    rank = len(shapes[0])
    if type(dim) is not int or rank not in (2, 4) or dim not in (1, 1 - rank):
        return No
    others = {(*shape[:1], *shape[2:]) for shape in shapes if len(shape) == rank}
    kinds = {dtype_of(t) for t in tensors if isinstance(t, Tensor)}
    dtype = kinds.pop() if len(kinds) == 1 else torch.float32
    if len(others) != 1 or any(len(s) != rank or 0 in s for s in shapes):
        return No
    if any(numbers(dtype_of(t)) is not numbers(dtype) for t in tensors):
        return No
    region = recording(dtype)
    if region is None:
        return No
    parts = tuple(cast(region, t, dtype) for t in tensors)
    if any(part is No for part in parts):
        return No
    shape = (shapes[0][0], sum(s[1] for s in shapes), *shapes[0][2:])
    return region.append("cat", ir.NOTHING, parts, shape, dtype)


def _narrowed(x: Any, first: int, last: int) -> Any:
    shape = shape_of(x)
    attrs, out = ir.Narrow(first, last), (shape[0], last - first, *shape[2:])
    return x if last - first == shape[1] else unary("narrow", attrs, x, out)


def _channels(x: Any, dim: Any) -> int | None:
    """How many channels there are along a dimension, if it is that of channels."""
    shape = shape_of(x)
    if type(x) is not LazyTensor or type(dim) is not int or len(shape) not in (2, 4) or is_view(x):
        return None
    return shape[1] if dim in (1, 1 - len(shape)) and 0 not in shape else None


def _parts(x: Any, ends: list[int]) -> Any:
    found = [_narrowed(x, a, b) for a, b in zip([0, *ends], ends, strict=False)]
    return No if any(part is No for part in found) else tuple(found)


def _length(x: Any, dim: Any) -> int | None:
    """Of a lazy tensor along a dimension."""
    shape = shape_of(x)
    if type(x) is not LazyTensor or type(dim) is not int or not -len(shape) <= dim < len(shape):
        return None
    return shape[dim] or None


def _heads(x: Any, sizes: Any, dim: Any) -> Any:
    """Parts along a dimension that is not that of channels: of tokens, such as queries, keys and values."""
    length = _length(x, dim)
    if length is None or len(shape_of(x)) != 3:
        return No
    if type(sizes) is int and sizes > 0:
        sizes = [min(sizes, length - first) for first in range(0, length, sizes)]
    if not isinstance(sizes, (tuple, list)) or not all(type(n) is int and n > 0 for n in sizes):
        return No
    return alias(x, "split", dim, *sizes) if sum(sizes) == length else No


def _split(tensor: Any, split_size_or_sections: Any, dim: Any = 0) -> Any:
    channels, sizes = _channels(tensor, dim), split_size_or_sections
    if channels is None:
        return _heads(tensor, sizes, dim)
    if type(sizes) is int and sizes > 0:
        sizes = [min(sizes, channels - first) for first in range(0, channels, sizes)]
    if not isinstance(sizes, (tuple, list)) or not all(type(n) is int and n > 0 for n in sizes):
        return No
    return _parts(tensor, list(accumulate(sizes))) if sum(sizes) == channels else No


def _chunk(input: Any, chunks: Any, dim: Any = 0) -> Any:
    length = _length(input, dim)
    if length is None or type(chunks) is not int or chunks < 1:
        return No
    return _split(input, -(-length // chunks), dim)


def _narrow(input: Any, dim: Any, start: Any, length: Any) -> Any:
    channels = _channels(input, dim)
    if channels is None or type(start) is not int or type(length) is not int:
        return No
    fits = start >= 0 and length > 0 and start + length <= channels
    return _narrowed(input, start, start + length) if fits else No


def _getitem(input: Any, index: Any) -> Any:
    if type(index) is int:
        return alias(input, "select", 0, index) if is_alias(input) else No
    if type(index) is tuple and len(index) > 1 and type(index[1]) is slice:
        first, last, step = index[1].start, index[1].stop, index[1].step
        rest = [*index[:1], *index[2:]]
        whole = all(type(part) is slice and part == slice(None) for part in rest)
        if whole and step in (None, 1) and len(index) <= 4:
            channels = _channels(input, 1)
            given = all(n is None or type(n) is int for n in (first, last))
            if channels is not None and given and (first, last) != (None, None):
                start, stop, _ = index[1].indices(channels)
                return _narrowed(input, start, stop) if start < stop else No
    if type(index) is not tuple or len(index) != 4 or len(shape_of(input)) != 4 or is_view(input):
        return No
    for part in index:
        if type(part) is not slice or part.start is not None or part.stop is not None:
            return No
    steps = [1 if part.step is None else part.step for part in index]
    if any(type(step) is not int for step in steps) or steps[:2] != [1, 1] or min(steps) < 1:
        return No
    n, c, h, w = shape_of(input)
    shape = (n, c, -(-h // steps[2]), -(-w // steps[3]))
    return unary("slice", ir.Slice(steps[2], steps[3]), input, shape)


def _view(input: Any, *shape: Any, copies: bool = False, **keywords: Any) -> Any:
    """Another shape in place, or else of a copy."""
    if keywords:  # view(size=...), reshape(shape=...)
        return No
    wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    given = shape_of(input)
    if type(input) is not LazyTensor or input._region is None or not wanted or 0 in given:
        return No
    if not all(type(n) is int for n in wanted):
        return No
    out, total = list(wanted), math.prod(given)
    if out.count(-1) == 1:
        rest = math.prod(n for n in out if n != -1)
        if rest <= 0 or total % rest:
            return No
        out[out.index(-1)] = total // rest
    if min(out) < 1 or math.prod(out) != total:
        return No
    if is_alias(input):
        return alias(input, "view", *out)
    if is_view(input) and not _is_viewable(input, tuple(out)):
        input = unary("clone", ir.NOTHING, input, given) if copies else No
    return unary("view", ir.View(tuple(out)), input, tuple(out))


def _reshape(input: Any, *shape: Any, **keywords: Any) -> Any:
    return _view(input, *shape, copies=True, **keywords)


def _is_viewable(x: Any, shape: tuple[int, ...]) -> bool:
    """Whether torch gives a value that does not lie in memory as its shape says another one in place."""
    strides = strides_of(x._region, x._index)
    try:
        torch.empty_strided(shape_of(x), strides, device="meta").view(shape)
    except RuntimeError:
        return False
    return True


def _unflatten(input: Any, dim: Any, sizes: Any) -> Any:
    shape = shape_of(input)
    if (
        type(dim) is not int
        or not -len(shape) <= dim < len(shape)
        or not isinstance(sizes, tuple | list)
    ):
        return No
    dim %= len(shape)
    if not sizes or math.prod(n for n in sizes if n != -1) * max(sizes.count(-1), 1) < 1:
        return No
    sizes = [shape[dim] // math.prod(n for n in sizes if n != -1) if n == -1 else n for n in sizes]
    if math.prod(sizes) != shape[dim]:
        return No
    return _view(input, *shape[:dim], *sizes, *shape[dim + 1 :])


def _unbind(input: Any, dim: Any = 0) -> Any:
    return alias(input, "unbind", dim) if type(dim) is int else No


def _flatten(input: Any, start_dim: Any = 0, end_dim: Any = -1) -> Any:
    shape = shape_of(input)
    dims = len(shape)
    if type(start_dim) is not int or type(end_dim) is not int or type(input) is not LazyTensor:
        return No
    first = start_dim + dims if start_dim < 0 else start_dim
    last = end_dim + dims if end_dim < 0 else end_dim
    if not 0 <= first <= last < dims:
        return No
    if first == last:
        return input
    return _reshape(input, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))


def _contiguous(input: Any, *, memory_format: Any = torch.contiguous_format) -> Any:
    if memory_format is not torch.contiguous_format or type(input) is not LazyTensor:
        return No
    return unary("clone", ir.NOTHING, input, shape_of(input)) if is_view(input) else input


def _clone(input: Any, *, memory_format: Any = torch.preserve_format) -> Any:
    kept = memory_format is torch.preserve_format and not is_view(input)
    if not kept and memory_format is not torch.contiguous_format:
        return No
    return unary("clone", ir.NOTHING, input, shape_of(input))


def _channel_shuffle(input: Any, groups: Any) -> Any:
    shape = shape_of(input)
    if len(shape) != 4 or type(groups) is not int or groups < 1 or shape[1] % groups:
        return No
    return unary("shuffle", ir.Shuffle(groups), input, shape)


def _new(make: Callable[..., Tensor], input: Any, *size: Any, **options: Any) -> Any:
    """An ordinary tensor like a lazy one, of which no numbers are needed."""
    if not {*options} <= {"dtype", "requires_grad"} or type(input) is not LazyTensor:
        return No
    return make(*size, **{"dtype": dtype_of(input), "device": "cpu"} | options)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _cat),
    **dict.fromkeys((torch.split, Tensor.split), _split),
    **dict.fromkeys((torch.chunk, Tensor.chunk), _chunk),
    **dict.fromkeys((torch.narrow, Tensor.narrow), _narrow),
    Tensor.__getitem__: _getitem,
    Tensor.view: _view,
    **dict.fromkeys((torch.reshape, Tensor.reshape), _reshape),
    **dict.fromkeys((torch.flatten, Tensor.flatten), _flatten),
    **dict.fromkeys((torch.unflatten, Tensor.unflatten), _unflatten),
    **dict.fromkeys((torch.unbind, Tensor.unbind), _unbind),
    Tensor.contiguous: _contiguous,
    **dict.fromkeys((torch.clone, Tensor.clone), _clone),
    torch.channel_shuffle: _channel_shuffle,
    Tensor.new_empty: partial(_new, torch.empty),
    Tensor.new_zeros: partial(_new, torch.zeros),
    Tensor.new_ones: partial(_new, torch.ones),
}
