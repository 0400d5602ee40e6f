"""Which pixels of an image a model looks at, in characters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rewire.nn.linear import SparseLinear

_SHADES = " ░▒▓█"
_LARGEST = 16  # pixels in a row that fit a screen twice


def pixels(model: nn.Module, shape: tuple[int, int, int]) -> Tensor | None:
    """How many connections each pixel has, if the model's first layer sees pixels and they are few."""
    first = next((m for m in model.modules() if isinstance(m, SparseLinear)), None)
    channels, height, width = shape
    if first is None or first.in_features != channels * height * width or width > _LARGEST:
        return None
    counts = torch.bincount(first.indices.cpu(), minlength=first.in_features)
    return counts.view(shape).sum(0)


def side_by_side(pictures: dict[str, Tensor]) -> str:
    """Pictures with their titles, in shades from the least number in all of them to the largest.

    >>> print(side_by_side({"a": torch.tensor([[0, 1], [2, 4]]), "b": torch.zeros(2, 2)}))
    a         b
      ░░
    ▒▒██
    """
    numbers = torch.stack(list(pictures.values()))
    least, most = float(numbers.min()), float(numbers.max())
    columns = []
    for title, picture in pictures.items():
        levels = (
            ((picture - least) * (len(_SHADES) - 1) / max(1, most - least)).round().int().tolist()
        )
        rows = ["".join(2 * _SHADES[level] for level in row) for row in levels]
        wide = max(len(title), 2 * picture.shape[1])
        columns.append([line.ljust(wide) for line in (title, *rows)])
    lines = zip(*columns, strict=True)
    return "\n".join("      ".join(line).rstrip() for line in lines)
