"""How much is replaced, and checks of what says so."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

Fraction = float | Callable[[int], float]


def cosine(fraction: float, t: int, until: int) -> float:
    """``fraction / 2 * (1 + cos(pi * t / until))``, zero from ``until`` on."""
    return fraction / 2 * (1 + math.cos(math.pi * min(1.0, t / until)))


def check_schedule(every: int, until: int | None, fraction: Fraction) -> None:
    """Raise a ValueError unless rewirings can be planned with this."""
    if operator.index(every) < 1:
        raise ValueError(f"every must be at least 1 step, got {every}")
    if until is None and not callable(fraction):
        raise ValueError(
            "until is missing: say at which step the fraction has come down to zero, or give a function "
            "of the step as fraction"
        )
    if until is not None and operator.index(until) < every:
        raise ValueError(
            f"until is {until}, before the first rewiring at {every}: raise until, or lower every"
        )
    if not callable(fraction) and not 0 < fraction < 1:
        raise ValueError(f"fraction must be in (0, 1), or a function of the step, got {fraction}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise a ValueError unless ``value`` is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
