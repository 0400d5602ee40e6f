"""Torch functions as nodes: how arguments are parsed, and which shapes come out.

A handler takes the arguments of its torch function. It answers NotImplemented for all that the engine does
not do, wrong arguments included: the region is run then, and torch says what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rewire.engine import graph as ir
from rewire.engine import private
from rewire.engine.lazy import HANDLERS, LazyTensor
from rewire.engine.observe import Why
from rewire.engine.region import Region
from rewire.engine.scope import recording
from rewire.engine.statistics import LazyBuffer, settled

No = NotImplemented


def shape_of(x: Tensor) -> tuple[int, ...]:
    if type(x) is LazyTensor:
        region = x._region
        if region is not None:
            return region.nodes[x._index][3]  # type: ignore[no-any-return]
        with private.without_functions():
            return tuple(x.shape)
    return tuple(x.shape)


def dtype_of(x: Tensor) -> torch.dtype:
    if type(x) is LazyTensor:
        region = x._region
        if region is not None:
            return region.dtype  # type: ignore[no-any-return]
        with private.without_functions():
            return x.dtype
    return x.dtype


def is_view(x: Any) -> bool:
    """Whether ``x`` may not lie in memory as its shape says."""
    region = x._region
    return region is None or region.nodes[x._index][0] == "slice"


def _one(op: str, attrs: Any, x: Any, shape: tuple[int, ...], in_place: bool = False) -> Any:
    """A node that reads a lazy tensor."""
    if type(x) is not LazyTensor or 0 in shape:
        return No
    region = recording(dtype_of(x))
    if region is None:
        return No
    if not in_place:
        return region.append(op, attrs, (x,), shape)
    return _in_place(region, op, attrs, x, (x,), shape)


def _in_place(
    region: Region, op: str, attrs: Any, x: LazyTensor, operands: Any, shape: tuple[int, ...]
) -> Any:
    if x._region is not region or not region.may_rename(x):
        return No
    new = region.append(op, attrs, operands, shape)
    return No if new is No else region.rename(x, new)


def _relu(input: Any, inplace: bool = False) -> Any:
    return _one("relu", ir.NOTHING, input, shape_of(input), inplace)


def _relu_(input: Any) -> Any:
    return _one("relu", ir.NOTHING, input, shape_of(input), True)


def _add(input: Any, other: Any, *, alpha: Any = 1, out: Any = None, in_place: bool = False) -> Any:
    if not isinstance(input, Tensor) or not isinstance(other, Tensor) or out is not None:
        return No
    shape, dtype = shape_of(input), dtype_of(input)
    if alpha != 1 or isinstance(alpha, bool) or shape != shape_of(other) or 0 in shape:
        return No
    if dtype is not dtype_of(other) or (in_place and type(input) is not LazyTensor):
        return No
    region = recording(dtype)
    if region is None:
        return No
    if in_place:
        return _in_place(region, "add", ir.NOTHING, input, (input, other), shape)  # type: ignore[arg-type]
    return region.append("add", ir.NOTHING, (input, other), shape)


def _add_(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return _add(input, other, alpha=alpha, in_place=True)


def _batch_norm(
    input: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if type(input) is not LazyTensor:
        return No
    for tensor in (weight, bias, running_mean, running_var):
        if type(tensor) is LazyBuffer:  # of a batch norm that shares it, or of an earlier call
            settled(tensor)
    shape = shape_of(input)
    if len(shape) not in (2, 4) or 0 in shape:
        return No
    channels, size = shape[1], math.prod(shape) // shape[1]
    track = running_mean is not None
    if track is (running_var is None) or (not track and not training) or (training and size == 1):
        return No
    for tensor in (weight, bias, running_mean, running_var):
        if tensor is not None and (tensor.shape != (channels,) or not tensor.is_contiguous()):
            return No
    statistics = () if running_mean is None or running_var is None else (running_mean, running_var)
    updated = statistics if training else ()
    for buffer in updated:
        if not _may_be_lazy(buffer):
            return No
    if updated and running_mean is running_var:
        return No
    region = recording(dtype_of(input))
    if region is not None and region.reads_any(*statistics):
        # Statistics are read or written once in a region: its parts may run in another order.
        region.run(Why.AGAIN)
        region = recording(dtype_of(input))
    if region is None:
        return No
    index = None
    if updated:
        index = len(region.scalars)
        region.scalars.append(momentum)
    attrs = ir.BatchNorm(bool(training), index, eps, bool(updated))
    operands = (input, weight, bias, running_mean, running_var)
    return region.append("batch_norm", attrs, operands, shape, updated)


def _may_be_lazy(buffer: Tensor) -> bool:
    """Whether nobody could read running statistics past their Python object: no C++ code holds them, as
    the graph of an earlier call does, and no other tensor is a view of them or has them as its view."""
    if type(buffer) is not Tensor or buffer.requires_grad:
        return False
    return not buffer._is_view() and buffer._use_count() == 1  # type: ignore[attr-defined]


def _max_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    if ceil_mode or return_indices or dilation not in (1, (1, 1), [1, 1]):
        return No
    found = _pool(input, kernel_size, stride, padding)
    return (
        No
        if found is None
        else _one("max_pool2d", ir.Pool(found[0], found[1], found[2]), input, found[3])
    )


def _avg_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    if ceil_mode or divisor_override is not None:
        return No
    found = _pool(input, kernel_size, stride, padding)
    if found is None:
        return No
    return _one(
        "avg_pool2d",
        ir.AvgPool(found[0], found[1], found[2], bool(count_include_pad)),
        input,
        found[3],
    )


def _pool(x: Any, kernel_size: Any, stride: Any, padding: Any) -> Any:
    """Kernel, stride, padding, and the shape that comes out; None if torch should see to it."""
    shape = shape_of(x)
    if len(shape) != 4 or 0 in shape:
        return None
    kernel, pad = _pair(kernel_size), _pair(padding)
    step = kernel if stride is None or stride == [] or stride == () else _pair(stride)
    if kernel is None or step is None or pad is None or min(*kernel, *step) < 1 or min(pad) < 0:
        return None
    if kernel[0] * kernel[1] > 255 or 2 * pad[0] > kernel[0] or 2 * pad[1] > kernel[1]:
        return None
    out = tuple((shape[2 + a] + 2 * pad[a] - kernel[a]) // step[a] + 1 for a in (0, 1))
    return None if min(out) < 1 else (kernel, step, pad, (*shape[:2], *out))


def _pair(value: Any) -> tuple[int, int] | None:
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) == 1:
        pair *= 2
    return pair if len(pair) == 2 and all(type(n) is int for n in pair) else None


def _adaptive_avg_pool2d(input: Any, output_size: Any) -> Any:
    shape = shape_of(input)
    if len(shape) != 4 or 0 in shape:
        return No
    wanted = output_size if isinstance(output_size, (tuple, list)) else (output_size, output_size)
    if len(wanted) != 2 or not all(n is None or type(n) is int for n in wanted):
        return No
    out = [shape[2 + a] if n is None else n for a, n in enumerate(wanted)]
    if out == [1, 1]:
        return _mean(input, (2, 3), True)
    if min(out) < 1 or shape[2] % out[0] or shape[3] % out[1]:
        return No
    return _avg_pool2d(input, (shape[2] // out[0], shape[3] // out[1]))


def _mean(
    input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kw: Any
) -> Any:
    shape = shape_of(input)
    if kw or dtype is not None or len(shape) != 4 or not isinstance(dim, (tuple, list)):
        return No
    if len(dim) != 2 or {d + 4 if d < 0 else d for d in dim} != {2, 3}:
        return No
    out = (*shape[:2], 1, 1) if keepdim else shape[:2]
    return _one("mean", ir.Mean(bool(keepdim)), input, out) if 0 not in shape else No


def _getitem(input: Any, index: Any) -> Any:
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
    return _one("slice", ir.Slice(steps[2], steps[3]), input, shape)


def _pad(input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    shape = shape_of(input)
    if mode != "constant" or len(shape) != 4 or not isinstance(pad, (tuple, list)):
        return No
    if not 0 < len(pad) <= 8 or len(pad) % 2:
        return No
    if not all(type(n) is int and n >= 0 for n in pad):
        return No
    around = [(pad[2 * i], pad[2 * i + 1]) for i in reversed(range(len(pad) // 2))]
    around = [(0, 0)] * (4 - len(around)) + around
    if any(around[0]):
        return No
    out = tuple(size + a + b for size, (a, b) in zip(shape, around, strict=True))
    amounts = tuple(n for pair in around for n in pair)
    return _one("pad", ir.Pad(amounts, 0.0 if value is None else float(value)), input, out)


def _view(input: Any, *shape: Any, **keywords: Any) -> Any:
    if keywords:  # view(size=...), reshape(shape=...)
        return No
    wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    given = shape_of(input)
    if type(input) is not LazyTensor or is_view(input) or not wanted or 0 in given:
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
    return _one("view", ir.View(tuple(out)), input, tuple(out))


def _reshape(input: Any, shape: Any) -> Any:
    return _view(input, shape)


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
    return _view(input, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))


def _contiguous(input: Any, *, memory_format: Any = torch.contiguous_format) -> Any:
    return input if memory_format is torch.contiguous_format and not is_view(input) else No


def _dropout(input: Any, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if type(input) is not LazyTensor or type(p) not in (int, float) or not 0 <= p < 1:
        return No
    if not training or p == 0:
        return input
    shape = shape_of(input)
    region = recording(dtype_of(input))
    if region is None or 0 in shape or (inplace and not _renamable(region, input)):
        return No
    attrs = ir.Dropout(float(p), len(region.scalars))
    region.scalars.append(int(torch.randint(1 << 62, ())))
    new = region.append("dropout", attrs, (input,), shape)
    return region.rename(input, new) if inplace and new is not No else new


def _renamable(region: Region, x: LazyTensor) -> bool:
    return x._region is region and region.may_rename(x)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), _relu),
    **dict.fromkeys((F.relu_, torch.relu_, Tensor.relu_), _relu_),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _add),
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__), _add_),
    F.batch_norm: _batch_norm,
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), _max_pool2d),
    F.avg_pool2d: _avg_pool2d,
    F.adaptive_avg_pool2d: _adaptive_avg_pool2d,
    **dict.fromkeys((torch.mean, Tensor.mean), _mean),
    Tensor.__getitem__: _getitem,
    F.pad: _pad,
    Tensor.view: _view,
    Tensor.reshape: _view,
    torch.reshape: _reshape,
    **dict.fromkeys((torch.flatten, Tensor.flatten), _flatten),
    Tensor.contiguous: _contiguous,
    F.dropout: _dropout,
}
HANDLERS |= _FUNCTIONS
