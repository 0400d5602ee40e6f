"""Torch functions element by element as nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rewire.engine import graph as ir
from rewire.engine.graph import numbers
from rewire.engine.lazy import LazyTensor
from rewire.engine.parse.base import No, cast, dtype_of, may_rename, shape_of, unary
from rewire.engine.region import Region
from rewire.engine.scope import recording

# Activations: a handler for each signature


def _relu(input: Any, inplace: bool = False) -> Any:
    return unary("relu", ir.NOTHING, input, shape_of(input), inplace)


def _relu_(input: Any) -> Any:
    return _relu(input, True)


def _activation(x: Any, in_place: Any, kind: str, *parameters: Any) -> Any:
    if not all(type(p) in (int, float) and math.isfinite(p) for p in parameters):
        return No
    attrs = ir.Activation(kind, *map(float, parameters))
    return unary("activation", attrs, x, shape_of(x), bool(in_place))


def _plain(kind: str, in_place: bool, input: Any, inplace: bool = False, *, out: Any = None) -> Any:
    return No if out is not None else _activation(input, in_place or inplace, kind)


def _hardtanh(input: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False) -> Any:
    return _activation(input, inplace, "hardtanh", min_val, max_val) if min_val < max_val else No


def _relu6(input: Any, inplace: bool = False) -> Any:
    return _activation(input, inplace, "hardtanh", 0.0, 6.0)


def _leaky_relu(input: Any, negative_slope: Any = 0.01, inplace: bool = False) -> Any:
    if inplace and not negative_slope > 0:  # torch refuses its gradient
        return No
    return _activation(input, inplace, "leaky_relu", negative_slope)


def _elu(input: Any, alpha: Any = 1.0, inplace: bool = False) -> Any:
    if inplace and not alpha > 0:
        return No
    return _activation(input, inplace, "elu", alpha, 1.0)


def _selu(input: Any, inplace: bool = False) -> Any:
    return _activation(input, inplace, "elu", 1.6732632423543772, 1.0507009873554805)


def _gelu(input: Any, *, approximate: str = "none") -> Any:
    kinds = {"none": "gelu", "tanh": "gelu_tanh"}
    return _activation(input, False, kinds[approximate]) if approximate in kinds else No


def _softplus(input: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    return _activation(input, False, "softplus", beta, threshold) if beta else No


# Sums and products


def _binary(op: str, in_place: bool, input: Any, other: Any) -> Any:
    """Two tensors, of which one has the shape of the result, or a tensor and a number."""
    if isinstance(other, (int, float)) and not isinstance(other, bool):
        return _with_number(op, in_place, input, other)
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return No
    left, right, dtype = shape_of(input), shape_of(other), dtype_of(input)
    shape = left if left == right else _broadcast(left, right)
    if shape is None or 0 in shape or numbers(dtype) is not numbers(dtype_of(other)):
        return No
    if in_place and (type(input) is not LazyTensor or shape != left):
        return No
    region = recording(dtype)
    if region is None or (in_place and not may_rename(region, input)):  # type: ignore[arg-type]
        return No
    for tensor, given in ((input, left), (other, right)):
        summed = given == shape or _summable(given, shape) or _is_vector(given, shape)
        if not summed and tensor.requires_grad:
            return No
    result = dtype if in_place else _promoted(input, other)
    new = _computed(region, op, (input, other), shape, result)
    return region.rename(input, new) if in_place and new is not No else new  # type: ignore[arg-type]


def _promoted(x: Tensor, y: Tensor) -> torch.dtype:
    """The type of a result of two tensors, of which one with dimensions counts before one without."""
    kinds = {dtype_of(t) for t in (x, y) if shape_of(t)}
    return kinds.pop() if len(kinds) == 1 else torch.float32


def _computed(
    region: Region, op: str, operands: tuple[Tensor, Tensor], shape: Any, result: torch.dtype
) -> Any:
    """The node of a sum or a product in the wider of two types, and what turns it into the result's."""
    kinds = {dtype_of(t) for t in operands}
    dtype = kinds.pop() if len(kinds) == 1 else torch.float32
    given = tuple(cast(region, t, dtype) for t in operands)
    new = No if any(t is No for t in given) else region.append(op, ir.NOTHING, given, shape, dtype)
    return new if new is No else cast(region, new, result)


def _broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of the result if one operand has it, and the other one is broadcast to it."""
    full, small = (left, right) if math.prod(left) >= math.prod(right) else (right, left)
    if len(small) > len(full) or len(full) not in (2, 3, 4):
        return None
    pairs = zip(reversed(small), reversed(full), strict=False)
    return full if all(a in (1, b) for a, b in pairs) else None


def _summable(small: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether there is a kernel for the gradient of a broadcast operand: it has channels, and samples or
    not, and no places."""
    lifted = (1,) * (len(full) - len(small)) + small
    return lifted[1] == full[1] and all(n == 1 for n in lifted[2:])


_LEAST = 2.0**-100  # of a divisor: one over it is a number in every type


def _is_vector(small: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether a broadcast operand has the last dimension of tokens alone: channels of rows."""
    return len(full) > 2 and math.prod(small) == small[-1:][0] == full[-1] > 1 if small else False


def _with_number(op: str, in_place: bool, x: Any, number: float) -> Any:
    if not math.isfinite(number) or (op == "div" and abs(number) < _LEAST):
        return No
    scale, shift = {
        "add": (1.0, float(number)),
        "sub": (1.0, -float(number)),
        "mul": (float(number), 0.0),
        "div": (1 / float(number) if op == "div" else 1.0, 0.0),
    }[op]
    return unary("affine", ir.Affine(scale, shift), x, shape_of(x), in_place)


def _add(input: Any, other: Any, *, alpha: Any = 1, out: Any = None) -> Any:
    return No if out is not None or not _is_one(alpha) else _binary("add", False, input, other)


def _add_(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return _binary("add", True, input, other) if _is_one(alpha) else No


def _sub(input: Any, other: Any, *, alpha: Any = 1, out: Any = None) -> Any:
    return No if out is not None or not _is_one(alpha) else _binary("sub", False, input, other)


def _sub_(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return _binary("sub", True, input, other) if _is_one(alpha) else No


def _rsub(input: Any, other: Any) -> Any:
    """``other - input``."""
    if isinstance(other, Tensor):
        return _binary("sub", False, other, input)
    if type(other) not in (int, float) or not math.isfinite(other):
        return No
    return unary("affine", ir.Affine(-1.0, float(other)), input, shape_of(input))


def _neg(input: Any, *, out: Any = None) -> Any:
    return No if out is not None else unary("affine", ir.Affine(-1.0, 0.0), input, shape_of(input))


def _mul(input: Any, other: Any, *, out: Any = None) -> Any:
    return No if out is not None else _binary("mul", False, input, other)


def _mul_(input: Any, other: Any) -> Any:
    return _binary("mul", True, input, other)


def _div(input: Any, other: Any, *, rounding_mode: Any = None, out: Any = None) -> Any:
    return (
        No if out is not None or rounding_mode is not None else _binary("div", False, input, other)
    )


def _div_(input: Any, other: Any, *, rounding_mode: Any = None) -> Any:
    return No if rounding_mode is not None else _binary("div", True, input, other)


def _addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1, out: Any = None) -> Any:
    if out is not None or not _is_one(value):
        return No
    product = _mul(tensor1, tensor2)
    return No if product is No else _add(input, product)


def _is_one(alpha: Any) -> bool:
    return type(alpha) in (int, float) and alpha == 1


# Dropout


def _dropout(input: Any, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if type(input) is not LazyTensor or type(p) not in (int, float) or not 0 <= p < 1:
        return No
    if not training or p == 0:
        return input
    shape, dtype = shape_of(input), dtype_of(input)
    region = recording(dtype)
    if region is None or 0 in shape or (inplace and not may_rename(region, input)):
        return No
    attrs = ir.Dropout(float(p), len(region.scalars))
    region.scalars.append(int(torch.randint(1 << 62, ())))
    new = region.append("dropout", attrs, (input,), shape, dtype)
    return region.rename(input, new) if inplace and new is not No else new


def _dropout2d(input: Any, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Of whole channels, with torch's own noise."""
    if type(input) is not LazyTensor or type(p) not in (int, float) or not 0 <= p < 1:
        return No
    shape = shape_of(input)
    if len(shape) != 4 or 0 in shape:
        return No
    if not training or p == 0:
        return input
    noise = torch.empty((*shape[:2], 1, 1), dtype=dtype_of(input), device="cpu")
    return _binary("mul", inplace, input, noise.bernoulli_(1 - p).div_(1 - p))


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), _relu),
    **dict.fromkeys((F.relu_, torch.relu_, Tensor.relu_), _relu_),
    F.silu: partial(_plain, "silu", False),
    **dict.fromkeys((F.sigmoid, torch.sigmoid, Tensor.sigmoid), partial(_plain, "sigmoid", False)),
    **dict.fromkeys((torch.sigmoid_, Tensor.sigmoid_), partial(_plain, "sigmoid", True)),
    **dict.fromkeys((F.tanh, torch.tanh, Tensor.tanh), partial(_plain, "tanh", False)),
    **dict.fromkeys((torch.tanh_, Tensor.tanh_), partial(_plain, "tanh", True)),
    F.hardswish: partial(_plain, "hardswish", False),
    F.hardsigmoid: partial(_plain, "hardsigmoid", False),
    F.hardtanh: _hardtanh,
    F.relu6: _relu6,
    F.leaky_relu: _leaky_relu,
    F.elu: _elu,
    F.selu: _selu,
    F.gelu: _gelu,
    F.softplus: _softplus,
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _add),
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__), _add_),
    **dict.fromkeys((torch.sub, torch.subtract, Tensor.sub, Tensor.__sub__), _sub),
    **dict.fromkeys((Tensor.sub_, Tensor.__isub__), _sub_),
    **dict.fromkeys((torch.rsub, Tensor.__rsub__), _rsub),
    **dict.fromkeys((torch.neg, Tensor.neg, Tensor.__neg__), _neg),
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _mul),
    **dict.fromkeys((Tensor.mul_, Tensor.__imul__), _mul_),
    **dict.fromkeys((torch.addcmul, Tensor.addcmul), _addcmul),
    **dict.fromkeys((torch.div, torch.divide, Tensor.div, Tensor.__truediv__), _div),
    **dict.fromkeys((Tensor.div_, Tensor.__itruediv__), _div_),
    F.dropout: _dropout,
    F.dropout2d: _dropout2d,
}
