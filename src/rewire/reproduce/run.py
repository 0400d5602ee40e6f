"""One training run of an experiment: its settings, its name, and what it can be chosen by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rewire.precision import FLOAT32

if TYPE_CHECKING:
    from rewire.training.config import Config

LOTTERY = "lottery"
"""One run of it goes through all sparsities up to its own."""

EPOCHS = 200  # of the paper's schedule, which extended training multiplies
Facets = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Run:
    """A run, by what sets it apart from the recipe that ``rewire train`` has.

    Attributes:
        settings: as for :func:`rewire.training.config.resolve`; ``dataset``, ``model``, ``method`` and
            ``seed`` must be among them, and ``sparsity`` unless the method is dense.
        sparsities: of the models that come out of it.
    """

    settings: Mapping[str, Any]
    sparsities: tuple[float, ...]

    def config(self) -> Config:
        """The whole config.

        Raises:
            ValueError: if the settings do not fit, such as a method that does not exist.
        """
        from rewire.training.config import resolve

        return resolve(self.settings)

    @cached_property
    def facets(self) -> Facets:
        """What it can be chosen by, in words: ``{"model": ("vgg16",), "sparsity": ("0.98",), ...}``."""
        get = self.settings.get
        found: dict[str, tuple[str, ...]] = {
            name: (self.settings[name],) for name in ("dataset", "model", "method")
        }
        found["sparsity"] = tuple(f"{s:.2g}" for s in self.sparsities)
        found["assignment"] = (get("assignment", "erdos-renyi"),) if self.sparsities else ()
        found["width"] = (f"{get('width', 1):g}x",)
        found["epochs"] = (f"{EPOCHS * get('extend', 1):g}",) if "extend" in self.settings else ()
        guided = self.settings["method"] == "gse"
        found["distribution"] = (get("distribution", "uniform"),) if guided else ()
        found["subset"] = (f"gamma{get('subset', 1):g}",) if guided else ()
        found["seed"] = (f"seed{self.settings['seed']}",)
        return found

    @property
    def name(self) -> str:
        """Of its folder: the same for the same settings, whichever experiment it belongs to."""
        get, facets = self.settings.get, self.facets
        parts = [*facets["dataset"], *facets["model"]]
        if get("width", 1) != 1:
            parts += facets["width"]
        parts += facets["method"]
        if self.settings["method"] != LOTTERY:
            parts += facets["sparsity"]
        if get("assignment", "erdos-renyi") != "erdos-renyi":
            parts.append(f"assigned-{facets['assignment'][0]}")
        for name, usual in (("distribution", "uniform"), ("subset", 1)):
            if get(name, usual) != usual:
                parts += facets[name]
        if get("extend", 1) != 1:
            parts.append(f"{facets['epochs'][0]}epochs")
        if get("precision", FLOAT32) != FLOAT32:
            parts.append(self.settings["precision"])
        return "-".join([*parts, *facets["seed"]])


class Chosen(Protocol):
    """What can be chosen by its facets."""

    @property
    def facets(self) -> Facets: ...


C = TypeVar("C", bound=Chosen)


def choose(items: Sequence[C], only: Iterable[str]) -> list[C]:
    """Those that have the wanted words: for each facet that a word belongs to, one of them.

    Raises:
        ValueError: if there is no such word.

    Example:
        >>> runs = [Run({"dataset": "digits", "model": "mlp", "method": m, "seed": 0}, (0.9,))
        ...         for m in ("gse", "set", "static")]
        >>> [run.name for run in choose(runs, ["gse", "static", "0.9"])]
        ['digits-mlp-gse-0.9-seed0', 'digits-mlp-static-0.9-seed0']
    """
    there: dict[str, dict[str, None]] = {}
    for item in items:
        for facet, words in item.facets.items():
            there.setdefault(facet, {}).update(dict.fromkeys(words))
    wanted: dict[str, set[str]] = {}
    for word in only:
        found = [facet for facet, words in there.items() if word in words]
        # "uniform" is a distribution and an assignment: what is the same in all is not what is meant.
        found = [facet for facet in found if len(there[facet]) > 1] or found
        if not found:
            known = "; ".join(
                f"{facet}: {', '.join(words)}" for facet, words in there.items() if words
            )
            raise ValueError(f"nothing in it is called {word!r}; there is {known}")
        for facet in found:
            wanted.setdefault(facet, set()).add(word)
    return [
        item
        for item in items
        if all(words.intersection(item.facets[facet]) for facet, words in wanted.items())
    ]
