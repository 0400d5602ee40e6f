"""Nested Python values as JSON and tensors apart, and back, exactly.

What state dicts are made of: dicts, lists, tuples, None, booleans, numbers, strings and tensors. JSON has
no tuples, no infinite numbers and no keys but strings; these, and tensors, become an object with one key
that says what it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Json = Any


def encode(value: Any) -> tuple[Json, dict[str, Tensor]]:
    """The value as JSON, and the tensors in it by name: contiguous copies on the CPU.

    >>> encode({"lr": 0.1, "betas": (0.9, 0.99), "m": torch.zeros(2)})
    ({'dict': {'lr': 0.1, 'betas': {'tuple': [0.9, 0.99]}, 'm': {'tensor': 'm'}}}, {'m': tensor([0., 0.])})
    """
    tensors: dict[str, Tensor] = {}
    return _encode(value, (), tensors), tensors


def _encode(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Json:
    def inner(key: object, part: Any) -> Json:
        return _encode(part, (*path, str(key)), tensors)

    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta:
            raise TypeError(f"{'.'.join(path)} is a tensor that cannot be saved: {value.layout}")
        name = ".".join(path) or "tensor"
        while name in tensors:
            name += "'"
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, list):
        return [inner(i, part) for i, part in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [inner(i, part) for i, part in enumerate(value)]}
    if isinstance(value, dict):
        if all(type(key) is str for key in value):
            return {"dict": {key: inner(key, part) for key, part in value.items()}}
        return {"items": [[_encode(k, path, tensors), inner(k, v)] for k, v in value.items()]}
    raise TypeError(
        f"{'.'.join(path) or 'the value'} is a {type(value).__name__}, which has no JSON"
    )


def decode(tree: Json, tensors: Mapping[str, Tensor]) -> Any:
    """The value that :func:`encode` was given; subclasses of dict and list come back as those."""
    if isinstance(tree, list):
        return [decode(part, tensors) for part in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        (kind, content), *_ = tree.items()
        if kind == "float":
            return float(content)
        if kind == "tensor":
            return tensors[content]
        if kind == "tuple":
            return tuple(decode(part, tensors) for part in content)
        if kind == "dict":
            return {key: decode(part, tensors) for key, part in content.items()}
        if kind == "items":
            return {decode(k, tensors): decode(v, tensors) for k, v in content}
    raise ValueError(f"not an encoded value: {str(tree)[:80]}")
