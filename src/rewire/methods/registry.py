"""All methods by name, in one table: what makes them, what they take and cost, where they come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rewire import flops
from rewire.flops import Flops
from rewire.methods.deepr import DeepR
from rewire.methods.dense import Dense
from rewire.methods.dsr import DSR
from rewire.methods.gradual import Gradual
from rewire.methods.grasp import grasp
from rewire.methods.gse import GSE
from rewire.methods.history import Rewiring
from rewire.methods.lottery import Lottery
from rewire.methods.options import options_of
from rewire.methods.rigl import RigL
from rewire.methods.set import SET
from rewire.methods.snfs import SNFS
from rewire.methods.snip import snip
from rewire.methods.static import Static
from rewire.methods.synflow import synflow
from rewire.methods.topkast import TopKAST


@dataclass(frozen=True)
class Spent:
    """What a method's cost depends on, besides the model.

    Attributes:
        every: steps from one rewiring to the next; None if there are none.
        subset: draws of GSE per connection; None for others.
        until: the share of the steps up to the last rewiring; None for no end.
    """

    every: int | None = None
    subset: float | None = None
    until: float | None = None


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        title: as it is called.
        about: in a few words.
        make: what makes it, by kind:
            ``"rewirer"``: a class, ``make(model, optimizer, ...)``, stepped after the optimizer;
            ``"pruning"``: a function, ``make(model, batches, loss, sparsity=...)``, that returns the sparse
            model, which :class:`Static` then trains;
            ``"rounds"``: a class, ``make(model, sparsities=...)``, whose tickets are trained one by one.
        kind: one of these.
        start: arguments of :func:`rewire.sparsify` for the model that a rewirer starts with, besides the
            sparsity (unless ``density`` is among them); None if it starts with the dense model.
        storage: what its layers can be while it trains, the usual first.
        dense_weights, dense_gradients: when it holds or computes them.
        flops: of training, per sample; see ``LEGEND``.
        cost: that as a number, from the forward pass of the trained model.
        step: what one step takes, from the forward pass as it is, and whether connections may change yet.
        explored: what a rewiring computes besides, from the forward pass before it; None for nothing.
        reference: the paper.
        options: names of the settings that it takes, from :mod:`rewire.methods.options`.
    """

    title: str
    about: str
    make: Callable[..., Any]
    kind: str
    start: dict[str, Any] | None
    storage: tuple[str, ...]
    dense_weights: str
    dense_gradients: str
    flops: str
    reference: str
    cost: Callable[[Flops, Spent], float] = lambda found, spent: flops.static(found)
    step: Callable[[Flops, bool], float] = lambda found, changing: flops.static(found)
    explored: Callable[[Flops, Rewiring], float] | None = None
    options: tuple[str, ...] = ()


LEGEND = (
    "f_D, f_S: forward pass of the dense and the sparse model; T: steps between rewirings; f_G: the "
    "gradient at GSE's subset; f_A, f_B: with Top-KAST's sets; s_r: the sparsity of "
    "round r"
)

_BOTH = ("sparse", "masked")


def _dynamic(
    title: str, about: str, make: Callable[..., Any], flops: str, reference: str, **more: Any
) -> Method:
    """Sparse from the first step to the last."""
    return Method(
        title=title,
        about=about,
        make=make,
        kind="rewirer",
        start={},
        storage=_BOTH,
        dense_weights="never",
        flops=flops,
        reference=reference,
        **{"dense_gradients": "never", **more},
    )


def _before(
    title: str, about: str, make: Callable[..., Any], scoring: str, reference: str
) -> Method:
    """Pruned before training."""
    return Method(
        title=title,
        about=about,
        make=make,
        kind="pruning",
        start=None,
        storage=("sparse",),
        dense_weights="before training",
        dense_gradients="before training",
        flops=f"3 f_S; before: {scoring}",
        reference=reference,
    )


def _gse_cost(found: Flops, spent: Spent) -> float:
    assert spent.every is not None
    assert spent.subset is not None
    return flops.guided(found, spent.every, found.subset(spent.subset))


def _at_subset(found: Flops, rewiring: Rewiring) -> float:
    """The gradient at S, as large as it was in each layer."""
    there = [name for name in found.layers if name in rewiring.layers]
    return sum(found.layers[name].of(rewiring.layers[name].subset) for name in there)


def _until_done(found: Flops, changing: bool) -> float:
    return flops.dense(found) if changing else flops.static(found)


def _with_momentum(found: Flops, changing: bool) -> float:
    return flops.snfs(found) if changing else flops.static(found)


def _rigl_cost(found: Flops, spent: Spent) -> float:
    assert spent.every is not None
    return flops.guided(found, spent.every, found.dense)


def _gradual_cost(found: Flops, spent: Spent) -> float:
    until = 1.0 if spent.until is None else min(1.0, spent.until)
    return until * flops.dense(found) + (1 - until) * flops.static(found)


_ROWS: dict[str, Method] = {
    "dense": Method(
        title="Dense",
        about="all connections, as plain PyTorch",
        make=Dense,
        kind="rewirer",
        start=None,
        storage=("dense",),
        dense_weights="always",
        dense_gradients="always",
        flops="3 f_D",
        reference="",
        cost=lambda found, spent: flops.dense(found),
        step=lambda found, changing: flops.dense(found),
    ),
    "lottery": Method(
        title="Lottery",
        about="trains, prunes and rewinds, round by round",
        make=Lottery,
        kind="rounds",
        start=None,
        storage=("dense, then sparse",),
        dense_weights="in the first round",
        dense_gradients="in the first round",
        flops="sum over rounds of 3 f(s_r)",
        reference="Frankle and Carbin 2018",
    ),
    "gradual": Method(
        title="Gradual",
        about="prunes a dense model while it trains",
        make=Gradual,
        kind="rewirer",
        start={"density": 1.0, "weights": "keep", "storage": "masked"},
        storage=("masked, then sparse", "masked"),
        dense_weights="until the target",
        dense_gradients="until the target",
        flops="3 f_D until the target, then 3 f_S",
        reference="Zhu and Gupta 2017",
        cost=_gradual_cost,
        step=_until_done,
    ),
    "static": _dynamic("Static", "random connections that stay", Static, "3 f_S", ""),
    "snip": _before(
        *("SNIP", "prunes before training what the loss feels least", snip),
        *("3 f_D of the samples", "Lee et al. 2018"),
    ),
    "grasp": _before(
        *("GraSP", "prunes before training what carries the gradient least", grasp),
        *("about 9 f_D of the samples", "Wang et al. 2020"),
    ),
    "synflow": _before(
        *("SynFlow", "prunes before training, without data, what carries the least flow", synflow),
        *("100 times 3 f_D of one sample", "Tanaka et al. 2020"),
    ),
    "rigl": _dynamic(
        *("RigL", "the rigged lottery: grows the largest of all gradients", RigL),
        *("(3 f_S T + 2 f_S + f_D) / (T + 1)", "Evci et al. 2020"),
        dense_gradients="at rewirings, in blocks",
        cost=_rigl_cost,
        explored=lambda found, rewiring: found.dense,
    ),
    "topkast": Method(
        title="Top-KAST",
        about="uses the largest weights, trains some more, keeps all",
        make=TopKAST,
        kind="rewirer",
        start={"weights": "dense", "storage": "masked"},
        storage=("masked",),
        dense_weights="always",
        dense_gradients="always, used at B",
        flops="2 f_A + f_B",
        reference="Jayakumar et al. 2020",
        cost=lambda found, spent: flops.topkast(found),
        step=lambda found, changing: flops.topkast(found),
    ),
    "set": _dynamic(
        *("SET", "sparse evolutionary training: grows at random", SET),
        *("3 f_S", "Mocanu et al. 2018"),
    ),
    "gse": _dynamic(
        *("GSE", "guided stochastic exploration, the paper's method", GSE),
        *("(3 f_S T + 2 f_S + f_G) / (T + 1)", "Heddes et al. 2024"),
        cost=_gse_cost,
        explored=_at_subset,
    ),
    "dsr": _dynamic(
        *("DSR", "dynamic sparse reparameterization: moves connections between layers", DSR),
        *("3 f_S", "Mostafa and Wang 2019"),
    ),
    "deepr": _dynamic(
        *("DeepR", "deep rewiring: at every step, what would change sign goes", DeepR),
        *("3 f_S", "Bellec et al. 2018"),
    ),
    "snfs": _dynamic(
        *("SNFS", "sparse momentum: grows the largest momenta of all", SNFS),
        *("2 f_S + f_D", "Dettmers and Zettlemoyer 2019"),
        dense_gradients="every step; dense momentum",
        cost=lambda found, spent: flops.snfs(found),
        step=_with_momentum,
    ),
}


METHODS = {name: replace(row, options=options_of(name)) for name, row in _ROWS.items()}


def method(name: str) -> Method:
    """The method of a name.

    Example:
        >>> method("rigl").make.__name__
        'RigL'
    """
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]
