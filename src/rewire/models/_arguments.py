"""What every model builder does with its arguments: check them, and scale channel counts."""

import math


def check_counts(**counts: int) -> None:
    """Raise ``ValueError`` unless every argument is an integer of at least 1."""
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {count!r}")


def check_width(width: float) -> None:
    """Raise ``ValueError`` unless ``width`` is a usable width multiplier."""
    if not (math.isfinite(width) and width > 0):
        raise ValueError(f"width must be a finite number above 0, got {width!r}")


def check_dropout(dropout: float) -> None:
    """Raise ``ValueError`` unless ``dropout`` is a probability below 1."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout!r}")


def scaled(channels: int, width: float) -> int:
    """``channels`` times ``width``, rounded, never less than one."""
    return max(1, round(channels * width))
