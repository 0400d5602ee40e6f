"""Torch functions of the weight of a sparse layer, by the kernels of the layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rewire.engine import lazy
from rewire.nn.weight import FUNCTIONS, SparseWeight, Weight, like


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """``F.linear`` with the weight of a linear layer."""
    if not isinstance(weight, Weight) or weight._turned or weight.ndim != 2:
        return NotImplemented
    if isinstance(input, Weight) or isinstance(bias, Weight):
        return NotImplemented
    return like(weight, bias).forward(input)


def _matmul(input: Any, other: Any) -> Any:
    """``x @ weight.t()``, or ``weight @ x``."""
    if isinstance(other, Weight):
        return _linear(input, other.t()) if other.ndim == 2 else NotImplemented
    if input._turned or input.ndim != 2:
        return NotImplemented
    if other.dim() == 1:
        return _linear(other, input)
    return _linear(other.transpose(-1, -2), input).transpose(-1, -2)


def _rmatmul(input: Any, other: Any) -> Any:
    return _matmul(other, input)


def _mm(input: Any, mat2: Any) -> Any:
    return _matmul(input, mat2) if input.dim() == mat2.dim() == 2 else NotImplemented


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """``torch.addmm(bias, x, weight.t())``."""
    plain = isinstance(mat2, Weight) and not isinstance(input, Weight) and beta == alpha == 1
    if not plain or mat2.ndim != 2 or input.dim() != 1 or mat1.dim() != 2:
        return NotImplemented
    return _linear(mat1, mat2.t(), input)


def _conv2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Any = 1,
) -> Any:
    """``F.conv2d`` with the weight of a convolution, and sizes of its own."""
    if not isinstance(weight, Weight) or isinstance(input, Weight) or isinstance(bias, Weight):
        return NotImplemented
    layer: Any = weight._layer
    if weight.ndim != 4 or groups != layer.groups:
        return NotImplemented
    own: Any = like(weight, bias)
    own._set_shape(
        *(layer.in_channels, layer.out_channels, layer.kernel_size, stride, padding, dilation),
        *(groups, "zeros"),
    )
    return own.forward(input)


def _attention(*args: Any, **kwargs: Any) -> Any:
    """``F.multi_head_attention_forward``, whose products with weights are ``F.linear``."""
    again = getattr(torch.overrides, "redispatch_function", None)
    if again is None:  # an older torch
        return NotImplemented
    return again(F.multi_head_attention_forward, (SparseWeight,), args, kwargs)


FUNCTIONS |= {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
    Tensor.__rmatmul__: _rmatmul,
    **dict.fromkeys((torch.mm, Tensor.mm), _mm),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm),
    F.conv2d: _conv2d,
    F.multi_head_attention_forward: _attention,
}
for _name, _method in list(vars(Weight).items()):  # torch.numel(weight), Tensor.detach(weight), ...
    if callable(_method) and not _name.startswith("_"):
        for _owner in (torch, Tensor):
            if hasattr(_owner, _name):
                FUNCTIONS.setdefault(getattr(_owner, _name), _method)
    elif isinstance(_method, property) and hasattr(Tensor, _name) and _method.fget is not None:
        FUNCTIONS[getattr(Tensor, _name).__get__] = _method.fget
FUNCTIONS |= {
    function: lazy.METADATA[function]
    for function in (
        *(Tensor.is_cpu.__get__, Tensor.is_cuda.__get__, Tensor.is_meta.__get__),  # type: ignore[attr-defined]
        *(Tensor.is_mps.__get__, Tensor.is_quantized.__get__, Tensor.is_nested.__get__),  # type: ignore[attr-defined]
        *(Tensor.is_xpu.__get__, Tensor.is_mkldnn.__get__, Tensor.is_leaf.__get__),  # type: ignore[attr-defined]
    )
}
