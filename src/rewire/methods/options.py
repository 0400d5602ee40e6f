"""What can be set of a method in ``rewire train``, in one table.

The command line, ``config.toml`` and their checks come from it. A method's row in
:mod:`rewire.methods.registry` names those that it takes, and what makes the method takes the values as
arguments of these names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rewire.methods.synflow import SOFTMAX
from rewire.sampling import DISTRIBUTIONS


@dataclass(frozen=True)
class Option:
    """A setting that only some methods take.

    Attributes:
        kind: its type, as in ``int``.
        about: for the help of the command line.
        default: of the paper's recipe for CIFAR; None where it depends on other settings.
        shown: that, and what other recipes have, in words.
        least, most: bounds, which the value must be within; it must be above ``over`` and below ``under``.
        choices: the words that it may be.
        epochs: whether it is a time in epochs, which what makes the method takes in steps.
        before: what runs did before there was this setting.
    """

    kind: str
    about: str
    default: Any
    shown: str
    least: float | None = None
    over: float | None = None
    under: float | None = None
    choices: tuple[str, ...] = ()
    epochs: bool = False
    before: Any = None

    def check(self, name: str, value: Any) -> None:
        """Raise a ValueError unless the value, if there is one, makes sense."""
        if value is None:
            return
        if self.choices and value not in self.choices:
            raise ValueError(
                f"there is no {name} {value!r}; choose one of {', '.join(self.choices)}"
            )
        wanted = {
            "at least {}": self.least is None or value >= self.least,
            "above {}": self.over is None or value > self.over,
            "below {}": self.under is None or value < self.under,
        }
        bounds = zip(wanted, (self.least, self.over, self.under), strict=True)
        if not all(wanted.values()):
            words = " and ".join(how.format(f"{at:g}") for how, at in bounds if at is not None)
            raise ValueError(f"{name} must be {words}, got {value}")


OPTIONS: dict[str, Option] = {
    "every": Option(
        *("int", "Steps from one rewiring to the next.", 1000, "1000; digits 50; deepr 1"), least=1
    ),
    "until": Option(
        *("float", "The last epoch with rewirings.", 120.0, "120; digits 30; imagenet 60"),
        over=0,
        under=math.inf,
        epochs=True,
    ),
    "fraction": Option(
        *("float", "Share of the connections to replace at first (alpha).", 0.2, "0.2"),
        over=0,
        under=1,
    ),
    "subset": Option(
        *("float", "Draws of gse per connection (gamma); inf is everything.", 1.0, "1; imagenet 2"),
        over=0,
    ),
    "distribution": Option(
        *("str", f"How gse draws units: {', '.join(DISTRIBUTIONS)}.", "uniform", "uniform"),
        choices=tuple(DISTRIBUTIONS),
    ),
    "growth_batches": Option(
        *("int", "Rewire before the step, on so many other batches; 0: after it, on its own."),
        *(0, "0"),
        least=0,
    ),
    "instead_of_step": Option(
        *("bool", "Rewire instead of the optimizer's step, on its batch: the paper's Algorithm 2."),
        *(False, "no"),
    ),
    "growth": Option(
        *(
            "str",
            "Where set grows: uniform over all that is inactive, or proportional: as layers are",
        ),
        *("uniform", "uniform"),
        choices=("uniform", "proportional"),
        before="proportional",
    ),
    "curve": Option(
        *("str", "How gradual's sparsity rises: cubic or cosine.", "cubic", "cubic"),
        choices=("cubic", "cosine"),
    ),
    "explore": Option(
        *("float", "Epochs in which topkast chooses anew after every step.", 0.0, "0"),
        least=0,
        under=math.inf,
        epochs=True,
    ),
    "softmax": Option(
        *("str", "What synflow makes of a softmax: shares of its sum, or identity.", "shares"),
        "shares",
        choices=SOFTMAX,
    ),
    "initial": Option(
        *(
            "str",
            "Weights of methods that begin dense: fan-in, as sparse layers have, or own: the model's",
        ),
        *("fan-in", "fan-in; dense own"),
        choices=("fan-in", "own"),
        before="own",
    ),
    "scope": Option(
        *("str", "Compare weights globally, or by layer.", None, "global; deepr layer"),
        choices=("global", "layer"),
    ),
    "storage": Option(
        *("str", "sparse, or masked: dense weights under masks.", "sparse", "sparse"),
        choices=("sparse", "masked"),
    ),
    "rounds": Option(
        *("tuple[float, ...]", "Sparsities of the lottery's rounds.", None),
        "0,0.5,0.75,0.9,0.95,0.98 up to the sparsity",
    ),
}


def check_options(config: Mapping[str, Any]) -> None:
    """Raise a ValueError unless the options among these settings make sense, also together."""
    for name, option in OPTIONS.items():
        option.check(name, config[name])
    rounds, sparsity = config["rounds"], config["sparsity"]
    if rounds and (rounds[-1] != sparsity or rounds[0] != 0):
        raise ValueError(
            f"rounds must begin with 0 and end with the sparsity {sparsity}, got {list(rounds)}"
        )
    if rounds and any(a >= b for a, b in pairwise(rounds)):
        raise ValueError(f"rounds must ascend, got {list(rounds)}")
    if config["instead_of_step"] and config["growth_batches"]:
        raise ValueError(
            "instead_of_step rewires on the step's own batch: leave out growth_batches"
        )
