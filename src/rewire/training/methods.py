"""The methods that ``rewire train`` knows: one table, from a name to how it trains.

A method says with which model training starts and what rewires it. To add one, add a row to ``METHODS``;
see :class:`Method` for methods that prune before training, or exchange the model during it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.optim import Optimizer

import rewire
from rewire import flops
from rewire.flops import Flops
from rewire.methods import Rewirer, Rewiring

if TYPE_CHECKING:
    from rewire.training.job import Job
    from rewire.training.loop import Trainer

OPTIONS = ("every", "until", "fraction", "subset", "distribution", "scope")
"""Settings that only some methods take."""


class Steps(Protocol):
    """What is called after every step of the optimizer, and saved; a Rewirer is one."""

    def step(self) -> Rewiring | None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


def dense(job: Job) -> nn.Module:
    """The dense model."""
    return job.dense()


def sparse(job: Job) -> nn.Module:
    """The model with random connections; no dense weight is ever made."""
    return job.sparse()


def no_rewirer(job: Job, model: nn.Module, optimizer: Optimizer) -> Steps | None:
    """Nothing rewires."""
    return None


def rewirer(kind: type[Rewirer]) -> Callable[[Job, nn.Module, Optimizer], Steps | None]:
    """A rewirer with those settings of the run that its method takes."""

    def make(job: Job, model: nn.Module, optimizer: Optimizer) -> Steps:
        config = job.config
        found = {"every": job.schedule.every, "until": job.schedule.until}
        found |= {name: getattr(config, name) for name in OPTIONS if name not in found}
        settings: dict[str, Any] = {k: v for k, v in found.items() if v is not None}
        return kind(model, optimizer, seed=config.seed, **settings)

    return make


@dataclass(frozen=True)
class Method:
    """How a method trains.

    Attributes:
        about: in a few words, for the help.
        start: the model that training starts with; a method that prunes before training does it here,
            with ``job.dense()`` and ``job.samples()``.
        rewirer: what is called after every step of the optimizer; None for nothing.
        options: settings of ``OPTIONS`` that it takes.
        defaults: settings in which it differs from the recipe.
        rewires: whether ``every`` and ``until`` have to fit the length of the run.
        after_step: called after every step; may exchange the model with ``trainer.swap(model)``.
        shell: a model to load a checkpoint into, given the state in it (``state["stage"]`` counts
            swaps); only which layers it has matters.
        flops: of training, per sample, from those of the forward pass.
    """

    about: str
    start: Callable[[Job], nn.Module] = sparse
    rewirer: Callable[[Job, nn.Module, Optimizer], Steps | None] = no_rewirer
    options: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rewires: bool = False
    after_step: Callable[[Trainer], None] | None = None
    shell: Callable[[Job, Mapping[str, Any]], nn.Module] = lambda job, state: job.sparse()
    flops: Callable[[Flops, Job], float] = lambda found, job: flops.static(found)


_SCHEDULE = ("every", "until", "fraction")


def _gse_flops(found: Flops, job: Job) -> float:
    assert job.schedule.every is not None
    assert job.config.subset is not None
    return flops.guided(found, job.schedule.every, found.subset(job.config.subset))


METHODS: dict[str, Method] = {
    "gse": Method(
        "guided stochastic exploration, the paper's method",
        rewirer=rewirer(rewire.GSE),
        options=OPTIONS,
        defaults={"scope": "global"},
        rewires=True,
        flops=_gse_flops,
    ),
    "set": Method(
        "sparse evolutionary training: grows at random",
        rewirer=rewirer(rewire.SET),
        options=(*_SCHEDULE, "scope"),
        defaults={"scope": "layer"},
        rewires=True,
    ),
    "dsr": Method(
        "dynamic sparse reparameterization: moves connections between layers",
        rewirer=rewirer(rewire.DSR),
        options=_SCHEDULE,
        rewires=True,
    ),
    "deepr": Method(
        "deep rewiring: at every step, what would change sign goes",
        rewirer=rewirer(rewire.DeepR),
        options=("every", "until", "scope"),
        defaults={"every": 1, "until": None, "scope": "layer"},
        rewires=True,
    ),
    "static": Method("random connections that stay", rewirer=rewirer(rewire.Static)),
    "dense": Method(
        "all connections, as plain PyTorch",
        start=dense,
        shell=lambda job, state: job.dense(),
        flops=lambda found, job: flops.dense(found),
    ),
}
