"""How often to write checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Interval:
    """An interval in steps or in seconds."""

    steps: int | None = None
    seconds: float | None = None

    def over(self, steps: int, seconds: float) -> bool:
        """Whether the interval is over after these steps and seconds."""
        by_steps = self.steps is not None and steps >= self.steps
        return by_steps or (self.seconds is not None and seconds >= self.seconds)

    @classmethod
    def parse(cls, text: str) -> Interval:
        """A number of steps, or a time with its unit.

        >>> Interval.parse("500"), Interval.parse("10m")
        (Interval(steps=500, seconds=None), Interval(steps=None, seconds=600.0))
        """
        if re.fullmatch(r"[1-9]\d*", text):
            return cls(steps=int(text))
        found = re.fullmatch(r"(\d+(?:\.\d*)?)([smh])", text)
        if found is None or float(found[1]) == 0:
            raise ValueError(
                f"{text!r} is neither a number of steps nor a time such as 30s, 10m or 1h"
            )
        return cls(seconds=float(found[1]) * _UNITS[found[2]])
