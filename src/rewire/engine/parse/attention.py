"""Attention: it is computed between regions, and its queries, keys and values are views that leave one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rewire.engine import attention
from rewire.engine.lazy import LazyTensor, ordinary
from rewire.engine.parse.base import No, dtype_of, shape_of
from rewire.engine.scope import recording
from rewire.ops.precision import input_dtype


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale: Any = None,
    enable_gqa: Any = False,
) -> Any:
    tensors = (query, key, value)
    if attn_mask is not None or dropout_p != 0.0 or enable_gqa or type(is_causal) is not bool:
        return No
    if scale is not None and type(scale) is not float:
        return No
    if any(type(t) not in (LazyTensor, Tensor) for t in tensors):
        return No
    if any(type(t) is Tensor and (not t.is_cpu or t.layout is not torch.strided) for t in tensors):
        return No
    q, k, v = map(shape_of, tensors)
    fits = len(q) == len(k) == len(v) == 4 and q[:2] == k[:2] == v[:2] and k[2] == v[2]
    if not fits or q[3] != k[3] or 0 in (*q, *k, *v) or not attention.pays(k[2], q[3]):
        return No
    dtypes = {input_dtype(dtype_of(t), "cpu") for t in tensors}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        return No
    if recording(dtype_of(query)) is None:
        return No
    (dtype,) = dtypes
    for tensor in tensors:
        if type(tensor) is LazyTensor and tensor._region is not None:
            tensor._region.run((F.scaled_dot_product_attention, tensors, {}))
    query, key, value = (ordinary(t).to(dtype) for t in tensors)
    return attention.attend(query, key, value, is_causal, scale)


FUNCTIONS: dict[Any, Callable[..., Any]] = {F.scaled_dot_product_attention: _attention}
