"""Training FLOPs by method, as Evci et al. (2020) count them, from the FLOPs of forward passes.

A sample costs a forward pass, the gradient of its activations and the gradient of the weights. What
choosing, sorting and drawing connections takes is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rewire import flops
from rewire.flops import Flops
from rewire.methods.registry import METHODS, Spent

ROUNDS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98)
"""The sparsities of the lottery's rounds."""


@dataclass(frozen=True)
class Setting:
    """What the costs depend on, besides the model.

    Attributes:
        every: steps between rewirings (T).
        subset: GSE's draws per connection (gamma).
        until: the share of training in which gradual pruning prunes.
        samples: images that SNIP and GraSP look at before training.
    """

    every: int = 1000
    subset: float = 1.0
    until: float = 0.6
    samples: int = 100


@dataclass(frozen=True)
class Cost:
    """FLOPs of a method.

    Attributes:
        method: its name.
        training: per sample of an epoch, as a mean over the run.
        formula: of that.
        before: once, before training.
        once: the formula of that.
    """

    method: str
    training: float
    formula: str
    before: float = 0.0
    once: str = ""


def costs(here: Flops, before: Sequence[Flops], setting: Setting) -> list[Cost]:
    """The training FLOPs of every method.

    Args:
        here: the forward pass at the target.
        before: those of the lottery's rounds that come before it.
        setting: all else.
    """
    f_d, f_s, samples = here.dense, here.sparse, setting.samples
    spent = Spent(setting.every, setting.subset, setting.until)
    looked = {
        "snip": (3.0 * samples * f_d, f"3 f_D of {samples:,} samples"),
        "grasp": (9.0 * samples * f_d, f"9 f_D of {samples:,} samples"),
        "synflow": (300.0 * f_d, "3 f_D in each of 100 rounds"),
    }
    rounds = sum(map(flops.static, before), flops.static(here))
    found = []
    for name, method in METHODS.items():
        training = rounds if name == "lottery" else method.cost(here, spent)
        formula = "3 f_S" if name in looked else method.flops
        found.append(Cost(name, training, formula, *looked.get(name, ())))
        if name == "gradual":
            # Of the cubic schedule 1 - (1 - u)^3 the mean is 3/4: so much of what has to go is gone.
            thinning = 3 * (setting.until * (f_d + 3 * f_s) / 4 + (1 - setting.until) * f_s)
            found.append(Cost("gradual, if zeros were free", thinning, "3 f_S, as it falls"))
    return found


# GSE against RigL ---------------------------------------------------------------------------------

PAPER_SAVING = {0.95: 0.024, 0.99: 0.133}
"""What the paper says that GSE saves on ResNet-50, by sparsity."""


@dataclass(frozen=True)
class Saving:
    """The share of FLOPs that GSE saves over RigL, relative to either of the two.

    Attributes:
        sparsity: of the layers that are sparse.
        head: "dense" or "sparse".
        gse, rigl: FLOPs of training, per sample.
    """

    sparsity: float
    head: str
    gse: float
    rigl: float

    @property
    def of_rigl(self) -> float:
        """``(RigL - GSE) / RigL``."""
        return (self.rigl - self.gse) / self.rigl

    @property
    def of_gse(self) -> float:
        """``(RigL - GSE) / GSE``."""
        return (self.rigl - self.gse) / self.gse


def saving(here: Flops, sparsity: float, head: str, every: int, subset: float) -> Saving:
    """GSE against RigL."""
    gse = flops.guided(here, every, here.subset(subset))
    return Saving(sparsity, head, gse, flops.guided(here, every, here.dense))


def papers(savings: list[Saving]) -> tuple[str, str] | None:
    """Which head and which divisor ("rigl" or "gse") give the paper's figures, to their last digit.

    None if there are not all of its sparsities among them, or nothing gives both.
    """
    for head in ("dense", "sparse"):
        found = {one.sparsity: one for one in savings if one.head == head}
        if not found.keys() >= PAPER_SAVING.keys():
            continue
        for by in ("rigl", "gse"):
            if all(
                round(getattr(found[s], f"of_{by}"), 3) == paper
                for s, paper in PAPER_SAVING.items()
            ):
                return head, by
    return None
