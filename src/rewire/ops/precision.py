"""In which precision a product reads its input: as a dense layer of torch does."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
"""What a product may read, and write, beside parameters of float32; it is computed in float32."""


def input_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """What torch's autocast makes of an input of a layer; without it, what that is."""
    if torch.is_autocast_enabled(device) and dtype.is_floating_point and dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return dtype


def autocast(x: Tensor, values: Tensor) -> Tensor:
    """The input of a layer as its product reads it: converted where autocast is on. The parameters stay
    what they are. Raises where they are of different types and autocast is off, as a dense layer does."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return x.to(input_dtype(x.dtype, device))
    if x.dtype != values.dtype:
        raise ValueError(
            f"types differ (input {x.dtype}, values {values.dtype}): convert the input or the layer with "
            ".to(dtype), or call the model inside torch.autocast"
        )
    return x


def belong(dtype: torch.dtype, values: torch.dtype) -> bool:
    """Whether a product reads inputs of one type with parameters of another."""
    return dtype == values or (values == torch.float32 and dtype in HALF)
