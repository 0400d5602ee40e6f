"""All methods by name: what makes them, what they cost, and where they come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rewire.methods.deepr import DeepR
from rewire.methods.dense import Dense
from rewire.methods.dsr import DSR
from rewire.methods.gradual import Gradual
from rewire.methods.grasp import grasp
from rewire.methods.gse import GSE
from rewire.methods.lottery import Lottery
from rewire.methods.rigl import RigL
from rewire.methods.set import SET
from rewire.methods.snfs import SNFS
from rewire.methods.snip import snip
from rewire.methods.static import Static
from rewire.methods.synflow import synflow
from rewire.methods.topkast import TopKAST


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        title: as it is called.
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
        reference: the paper.
    """

    title: str
    make: Callable[..., Any]
    kind: str
    start: dict[str, Any] | None
    storage: tuple[str, ...]
    dense_weights: str
    dense_gradients: str
    flops: str
    reference: str


LEGEND = (
    "f_D, f_S: forward pass of the dense and the sparse model; T: steps between rewirings; f_G: the "
    "gradient at GSE's subset; f_A, f_B: with Top-KAST's sets; s_t: the sparsity of step t; s_r: that of "
    "round r"
)

_BOTH = ("sparse", "masked")


def _dynamic(
    title: str, make: Callable[..., Any], flops: str, reference: str, dense_gradients: str = "never"
) -> Method:
    """Sparse from the first step to the last."""
    return Method(
        title=title,
        make=make,
        kind="rewirer",
        start={},
        storage=_BOTH,
        dense_weights="never",
        dense_gradients=dense_gradients,
        flops=flops,
        reference=reference,
    )


def _before(title: str, make: Callable[..., Any], scoring: str, reference: str) -> Method:
    """Pruned before training."""
    return Method(
        title=title,
        make=make,
        kind="pruning",
        start=None,
        storage=("sparse",),
        dense_weights="before training",
        dense_gradients="before training",
        flops=f"3 f_S; before: {scoring}",
        reference=reference,
    )


METHODS: dict[str, Method] = {
    "dense": Method(
        title="Dense",
        make=Dense,
        kind="rewirer",
        start=None,
        storage=("dense",),
        dense_weights="always",
        dense_gradients="always",
        flops="3 f_D",
        reference="",
    ),
    "lottery": Method(
        title="Lottery",
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
        make=Gradual,
        kind="rewirer",
        start={"density": 1.0, "weights": "keep", "storage": "masked"},
        storage=("masked, then sparse", "masked"),
        dense_weights="until the target",
        dense_gradients="until the target",
        flops="3 f_D until the target, then 3 f_S; in theory 3 f(s_t)",
        reference="Zhu and Gupta 2017",
    ),
    "static": _dynamic("Static", Static, "3 f_S", ""),
    "snip": _before("SNIP", snip, "3 f_D of the samples", "Lee et al. 2018"),
    "grasp": _before("GraSP", grasp, "about 9 f_D of the samples", "Wang et al. 2020"),
    "synflow": _before("SynFlow", synflow, "100 times 3 f_D of one sample", "Tanaka et al. 2020"),
    "rigl": _dynamic(
        "RigL",
        RigL,
        "(3 f_S T + 2 f_S + f_D) / (T + 1)",
        "Evci et al. 2020",
        dense_gradients="at rewirings, in blocks",
    ),
    "topkast": Method(
        title="Top-KAST",
        make=TopKAST,
        kind="rewirer",
        start={"weights": "dense", "storage": "masked"},
        storage=("masked",),
        dense_weights="always",
        dense_gradients="always, used at B",
        flops="2 f_A + f_B",
        reference="Jayakumar et al. 2020",
    ),
    "set": _dynamic("SET", SET, "3 f_S", "Mocanu et al. 2018"),
    "gse": _dynamic("GSE", GSE, "(3 f_S T + 2 f_S + f_G) / (T + 1)", "Heddes et al. 2024"),
    "dsr": _dynamic("DSR", DSR, "3 f_S", "Mostafa and Wang 2019"),
    "deepr": _dynamic("DeepR", DeepR, "3 f_S", "Bellec et al. 2018"),
    "snfs": _dynamic(
        "SNFS",
        SNFS,
        "2 f_S + f_D",
        "Dettmers and Zettlemoyer 2019",
        dense_gradients="every step; dense momentum",
    ),
}


def method(name: str) -> Method:
    """The method of a name.

    Example:
        >>> method("rigl").make.__name__
        'RigL'
    """
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]
