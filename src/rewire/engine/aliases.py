"""Views that leave a region and that no kernel reads, such as the heads of tokens before an attention.

They are recorded so that who makes several of them does not make the region run, and so that attention
(:mod:`rewire.engine.attention`) still sees lazy tensors. Everything else that reads one makes the region
run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_FUNCTIONS: dict[str, Callable[..., Tensor | Sequence[Tensor]]] = {
    "view": lambda x, *shape: x.view(shape),
    "permute": lambda x, *dims: x.permute(dims),
    "select": lambda x, dim, index: x.select(dim, index),
    "unbind": lambda x, dim: x.unbind(dim),
    "split": lambda x, dim, *sizes: x.split(sizes, dim),
}
SEVERAL = frozenset(("unbind", "split"))
"""Those that give a tuple, which their nodes, one behind the other, are the parts of."""


def make(kind: str, arguments: tuple[Any, ...], x: Tensor) -> Sequence[Tensor]:
    """The views of a tensor that a function makes."""
    made = _FUNCTIONS[kind](x, *arguments)
    return (made,) if isinstance(made, Tensor) else made


class Layout(NamedTuple):
    """How a view lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


@lru_cache(maxsize=1024)
def layouts(
    kind: str, arguments: tuple[Any, ...], shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[Layout, ...]:
    """Shape and strides of each of them; none if torch refuses the arguments."""
    try:
        views = make(kind, arguments, torch.empty_strided(shape, strides, device="meta"))
    except (RuntimeError, IndexError):
        return ()
    return tuple(Layout(tuple(view.shape), view.stride()) for view in views)
