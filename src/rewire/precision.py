"""In which precision whole models compute: float32, or bfloat16 with parameters of float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

FLOAT32, BFLOAT16 = "float32", "bfloat16"
PRECISIONS = (FLOAT32, BFLOAT16)


def autocast(precision: str, device: str = "cpu") -> AbstractContextManager[None]:
    """The context of the forward pass and the loss of a model: nothing for float32, autocast for bfloat16.

    Example:
        >>> with autocast("bfloat16"):
        ...     torch.nn.Linear(2, 3)(torch.ones(1, 2)).dtype
        torch.bfloat16
    """
    return torch.autocast(device, torch.bfloat16) if precision == BFLOAT16 else nullcontext()
