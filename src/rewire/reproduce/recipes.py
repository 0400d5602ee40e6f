"""The experiments of the paper that train, as functions that return runs.

Each gives what differs from the paper's recipe, which ``rewire train`` has for every data set; see
:mod:`rewire.training.config`. All of them also run on the packaged digits, with an MLP for each model,
to see in a minute how they go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from rewire.precision import FLOAT32
from rewire.reproduce.run import LOTTERY, Run

SPARSITIES = (0.9, 0.95, 0.98)
MODELS = ("resnet56", "vit", "vgg16")
CIFAR = ("cifar10", "cifar100")
DISTRIBUTIONS = ("uniform", "grabo", "graest")
SUBSETS = (0.25, 0.5, 1.0, 1.5, 2.0)
LARGE_SUBSETS = (5.0, 10.0, 25.0, 50.0, 100.0)
WIDTHS = (1.0, 2.0, 3.0, 4.0)
METHODS = ("gradual", "static", "snip", "grasp", "synflow", "rigl", "topkast", "set", "gse")

Settings = dict[str, Any]
Draft = tuple[Settings, tuple[float, ...]]  # the settings but for scale and seed, and sparsities


@dataclass(frozen=True)
class Place:
    """What an experiment runs on: the data and models of the paper, or the digits."""

    digits: bool = False

    def pairs(self, datasets: tuple[str, ...], models: tuple[str, ...]) -> Iterator[Settings]:
        """Each data set with each model."""
        if self.digits:
            datasets, models = ("digits",), ("mlp",)
        for dataset in datasets:
            for model in models:
                yield {"dataset": dataset, "model": model}


def _dense(where: Settings, **more: Any) -> Draft:
    return where | {"method": "dense"} | more, ()


def _sparse(where: Settings, method: str, sparsity: float, **more: Any) -> Draft:
    """The paper prunes and grows globally with all methods."""
    scope = {"scope": "global"} if method in ("gse", "set") else {}
    return where | {"method": method, "sparsity": sparsity} | scope | more, (sparsity,)


def _lottery(where: Settings, sparsities: tuple[float, ...]) -> Draft:
    """One sequence of rounds gives all sparsities: it is trained to the highest."""
    return where | {"method": LOTTERY, "sparsity": max(sparsities)}, sparsities


def _compared(where: Settings, sparsities: tuple[float, ...]) -> Iterator[Draft]:
    """All methods of table 1."""
    yield _lottery(where, sparsities)
    for method in METHODS:
        for sparsity in sparsities:
            yield _sparse(where, method, sparsity)


def table1(place: Place) -> Iterator[Draft]:
    """Methods, models, data sets and sparsities."""
    for where in place.pairs(CIFAR, MODELS):
        yield _dense(where)
        yield from _compared(where, SPARSITIES)


def progress_methods(place: Place) -> Iterator[Draft]:
    """Test accuracy by epoch of every method at 98 % sparsity: a part of table 1."""
    for where in place.pairs(CIFAR, MODELS):
        yield from _compared(where, (0.98,))


def imagenet(place: Place) -> Iterator[Draft]:
    """ResNet-50 at 90 % sparsity."""
    for where in place.pairs(("imagenet",), ("resnet50",)):
        yield _dense(where)
        yield _lottery(where, (0.9,))
        for method in (
            "gradual",
            "static",
            "snip",
            "grasp",
            "set",
            "dsr",
            "snfs",
            "rigl",
            "topkast",
        ):
            yield _sparse(where, method, 0.9)
        yield _sparse(where, "gse", 0.9, subset=2.0)


def scaling(place: Place) -> Iterator[Draft]:
    """Wider models with as many connections as the dense model of width 1 has."""
    for where in place.pairs(("cifar100",), MODELS):
        for width in WIDTHS:
            if width == 1:
                yield _dense(where)
                continue
            size = [weights(where["dataset"], where["model"], w) for w in (1.0, width)]
            yield _sparse(where, "gse", 1 - size[0] / size[1], width=width, exact=True)


def extended(place: Place) -> Iterator[Draft]:
    """1, 1.5 and 2 times as many epochs, with as many steps as ever between rewirings."""
    for where in place.pairs(("cifar100",), MODELS):
        for extend in (1.0, 1.5, 2.0):
            yield _sparse(where, "gse", 0.98, extend=extend)


def vit_scaling(place: Place) -> Iterator[Draft]:
    """Wider dense ViTs."""
    for where in place.pairs(("cifar100",), ("vit",)):
        for width in WIDTHS:
            yield _dense(where, width=width)


def subset(place: Place) -> Iterator[Draft]:
    """How many connections GSE draws, and how, against RigL."""
    for where in place.pairs(CIFAR, MODELS):
        yield _sparse(where, "rigl", 0.98)
        for distribution in DISTRIBUTIONS:
            for gamma in (*SUBSETS, *LARGE_SUBSETS):
                yield _sparse(where, "gse", 0.98, distribution=distribution, subset=gamma)


def assignment(place: Place) -> Iterator[Draft]:
    """Sparsity shared out uniformly or by Erdos-Renyi."""
    for where in place.pairs(CIFAR, MODELS):
        for method in ("set", "rigl", "gse"):
            for how in ("uniform", "erdos-renyi"):
                for sparsity in SPARSITIES:
                    yield _sparse(where, method, sparsity, assignment=how)


@cache
def weights(dataset: str, model: str, width: float) -> int:
    """How many weights the linear layers and convolutions of a dense model have."""
    import torch
    from torch import nn

    from rewire import data, models

    with torch.device("meta"):
        built = models.for_images(model, *data.sizes(dataset), width)
    kinds = (nn.Linear, nn.Conv2d)
    return sum(m.weight.numel() for m in built.modules() if isinstance(m, kinds))


@dataclass(frozen=True)
class Experiment:
    """An experiment, and how its results are laid out.

    Attributes:
        about: in a few words.
        recipe: gives the runs.
        tables, rows, columns: the facets of runs that tell tables, rows and columns apart.
    """

    about: str
    recipe: Callable[[Place], Iterator[Draft]]
    tables: tuple[str, ...]
    rows: tuple[str, ...]
    columns: str

    def runs(
        self,
        *,
        scale: float = 1.0,
        seeds: int = 3,
        digits: bool = False,
        precision: str = FLOAT32,
    ) -> list[Run]:
        """All runs, seed by seed.

        Args:
            scale: multiplies the schedule, see ``rewire train --scale``.
            seeds: how often each is repeated.
            digits: on the packaged digits instead of the paper's data.
            precision: see ``rewire train --precision``.

        Example:
            >>> runs = EXPERIMENTS["extended"].runs(seeds=1)
            >>> len(runs), runs[1].name, runs[1].config().extend
            (9, 'cifar100-resnet56-gse-0.98-300epochs-seed0', 1.5)
        """
        drafts = list(self.recipe(Place(digits)))
        more = {"scale": scale, "precision": precision}
        return [
            Run(settings | more | {"seed": seed}, sparsities)
            for seed in range(seeds)
            for settings, sparsities in drafts
        ]


_WHERE = ("dataset", "model")
EXPERIMENTS = {
    "table1": Experiment(
        "all methods on CIFAR-10 and CIFAR-100", table1, _WHERE, ("method",), "sparsity"
    ),
    "imagenet": Experiment("ResNet-50 on ImageNet", imagenet, _WHERE, ("method",), "sparsity"),
    "scaling": Experiment(
        "wider models with the same number of connections, on CIFAR-100",
        *(scaling, ("dataset",), ("model",), "width"),
    ),
    "extended": Experiment(
        "200, 300 and 400 epochs on CIFAR-100", extended, ("dataset",), ("model",), "epochs"
    ),
    "vit-scaling": Experiment(
        "wider dense ViTs on CIFAR-100", vit_scaling, ("dataset",), ("model",), "width"
    ),
    "subset": Experiment(
        "how many connections GSE draws, and how, against RigL",
        *(subset, _WHERE, ("method", "distribution"), "subset"),
    ),
    "assignment": Experiment(
        "sparsity shared out uniformly or by Erdos-Renyi",
        *(assignment, _WHERE, ("method", "assignment"), "sparsity"),
    ),
    "progress-methods": Experiment(
        "test accuracy by epoch of all methods", progress_methods, _WHERE, ("method",), "sparsity"
    ),
    "progress-width": Experiment(
        "train and test accuracy by epoch of wider models; the runs of scaling",
        *(scaling, ("dataset",), ("model",), "width"),
    ),
}
