"""The options of methods in ``rewire train``, in one table.

The command line, ``config.toml``, their checks and defaults come from it. A new option is a row here, and
an argument of that name of what makes the methods that take it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rewire.methods.gradual import CURVES
from rewire.methods.set import GROWTH
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
        of: the methods that take it.
        differs: what it is for methods that differ from the recipe.
        least, most: bounds, which the value must be within; it must be above ``over`` and below ``under``.
        choices: the words that it may be.
        epochs: whether it is a time in epochs, which what makes the method takes in steps.
        before: what runs did before there was this setting.
    """

    kind: str
    about: str
    default: Any
    shown: str
    of: tuple[str, ...]
    differs: Mapping[str, Any] = field(default_factory=dict)
    least: float | None = None
    over: float | None = None
    under: float | None = None
    choices: tuple[str, ...] = ()
    epochs: bool = False
    before: Any = None

    @property
    def many(self) -> bool:
        """Whether it is a list of numbers."""
        return self.kind.startswith("tuple")

    @property
    def help(self) -> str:
        """For the command line: what it is, what it may be, and for which methods."""
        words = f" One of {', '.join(self.choices)}." if self.choices else ""
        return f"{self.about}{words} For {', '.join(self.of)}."

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


_REWIRING = ("rigl", "set", "gse", "dsr", "snfs")
_DENSE_AT_FIRST = ("lottery", "gradual", "snip", "grasp", "synflow", "topkast")
_SPARSE = ("static", *_REWIRING, "deepr")

OPTIONS: dict[str, Option] = {
    "every": Option(
        *("int", "Steps from one rewiring to the next.", 1000, "1000; digits 50; deepr 1"),
        of=(*_REWIRING, "deepr", "topkast", "gradual"),
        differs={"deepr": 1},
        least=1,
    ),
    "until": Option(
        *("float", "The last epoch with rewirings.", 120.0, "120; digits 30; imagenet 60"),
        of=(*_REWIRING, "deepr", "topkast", "gradual"),
        differs={"deepr": None},
        over=0,
        under=math.inf,
        epochs=True,
    ),
    "fraction": Option(
        *("float", "Share of the connections to replace at first (alpha).", 0.2, "0.2"),
        of=_REWIRING,
        over=0,
        under=1,
    ),
    "subset": Option(
        *("float", "Draws per connection (gamma); inf is everything.", 1.0, "1; imagenet 2"),
        of=("gse",),
        over=0,
    ),
    "distribution": Option(
        *("str", "How units are drawn.", "uniform", "uniform"),
        of=("gse",),
        choices=tuple(DISTRIBUTIONS),
    ),
    "growth_batches": Option(
        *("int", "Rewire before the step, on so many other batches; 0: after it, on its own."),
        *(0, "0"),
        of=("gse", "rigl"),
        least=0,
    ),
    "instead_of_step": Option(
        *("bool", "Rewire instead of the optimizer's step, on its batch: the paper's Algorithm 2."),
        *(False, "no"),
        of=("gse", "rigl"),
    ),
    "growth": Option(
        *(
            "str",
            "Where connections grow: anywhere alike, or in proportion to a layer's active ones.",
        ),
        *("uniform", "uniform"),
        of=("set",),
        choices=GROWTH,
        before="proportional",
    ),
    "curve": Option(
        *("str", "How the sparsity rises.", "cubic", "cubic"), of=("gradual",), choices=CURVES
    ),
    "explore": Option(
        *("float", "Epochs in which connections are chosen anew after every step.", 0.0, "0"),
        of=("topkast",),
        least=0,
        under=math.inf,
        epochs=True,
    ),
    "l1": Option(
        *("float", "The prior's pull towards zero.", 1e-4, "1e-4"),
        of=("deepr",),
        least=0,
        under=math.inf,
    ),
    "softmax": Option(
        *("str", "What becomes of a softmax: shares of its sum, or the identity.", "shares"),
        "shares",
        of=("synflow",),
        choices=SOFTMAX,
    ),
    "initial": Option(
        *("str", "First weights: fan-in, as sparse layers have, or the model's own.", "fan-in"),
        "fan-in; dense own",
        of=(*_DENSE_AT_FIRST, "dense"),
        differs={"dense": "own"},
        choices=("fan-in", "own"),
        before="own",
    ),
    "scope": Option(
        *("str", "Compare weights over the whole model, or by layer.", "global"),
        "global; deepr layer",
        of=("rigl", "set", "gse", "snfs", "deepr", "gradual", "snip", "grasp", "synflow"),
        differs={"deepr": "layer"},
        choices=("global", "layer"),
    ),
    "storage": Option(
        *("str", "sparse, or masked: dense weights under masks.", "sparse", "sparse"),
        of=(*_SPARSE, "gradual"),
        choices=("sparse", "masked"),
    ),
    "rounds": Option(
        *("tuple[float, ...]", "Sparsities of the rounds, such as 0,0.5.", None),
        "0,0.5,0.75,0.9,0.95,0.98 up to the sparsity",
        of=("lottery",),
    ),
}


def options_of(method: str) -> tuple[str, ...]:
    """The names of the options that a method takes."""
    return tuple(name for name, option in OPTIONS.items() if method in option.of)


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
