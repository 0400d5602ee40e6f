"""How the methods of :data:`rewire.methods.METHODS` train in a run: with which model, and what rewires it.

To add a method, add a row to that table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

import rewire
from rewire.flops import Flops
from rewire.methods import METHODS, Rewiring
from rewire.methods.registry import Spent

if TYPE_CHECKING:
    from rewire.training.job import Job

__all__ = ["METHODS", "OPTIONS", "Steps", "cost", "rewirer", "shell", "start"]

OPTIONS = ("every", "until", "fraction", "subset", "distribution", "scope", "storage", "rounds")
"""Settings that only some methods take."""

SAMPLES = 10  # of each class, for methods that prune before training


class Steps(Protocol):
    """What is called after every step of the optimizer, and saved; a Rewirer is one."""

    def step(self) -> Rewiring | None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


def start(job: Job) -> nn.Module:
    """The model that training starts with; always-sparse methods never make a dense weight."""
    method, config = job.method, job.config
    if job.ticket is not None:
        return job.ticket
    if method.kind == "pruning":
        return method.make(  # type: ignore[no-any-return]
            *(job.dense(), job.batches(SAMPLES), F.cross_entropy),
            sparsity=config.sparsity,
            scope=config.scope,
            keep_dense=config.keep_dense,
            seed=config.seed,
        )
    if method.start is None:
        return job.dense()
    return job.sparse(**_how(job))


def shell(job: Job, state: Mapping[str, Any]) -> nn.Module:
    """A model to load a checkpoint of this state into; only which layers it has matters."""
    method = job.method
    if job.ticket is not None:
        return job.ticket
    if method.start is None:
        dense = method.kind == "rewirer" or (method.kind == "rounds" and job.config.sparsity == 0)
        return job.dense() if dense else job.sparse()
    if state["rewirer"].get("handed_over"):
        return job.sparse()
    how = _how(job)
    return job.sparse(storage=how.get("storage", "sparse"))


def _how(job: Job) -> dict[str, Any]:
    """How :func:`rewire.sparsify` makes the first model."""
    assert job.method.start is not None
    return {"storage": job.config.storage or "sparse", **job.method.start}


def rewirer(job: Job, model: nn.Module, optimizer: Optimizer) -> Steps:
    """What is called after every step: a rewirer with those settings of the run that its method takes."""
    method, config = job.method, job.config
    if method.kind == "rounds":
        return rewire.Dense(model, optimizer)
    if method.kind == "pruning":
        return rewire.Static(model, optimizer)
    found: dict[str, Any] = {"every": job.schedule.every, "until": job.schedule.until}
    names = ("fraction", "subset", "distribution", "scope")
    found |= {name: getattr(config, name) for name in names}
    if method.make is rewire.Gradual:
        found |= {"sparsity": config.sparsity, "storage": config.storage}
    settings = {k: v for k, v in found.items() if v is not None}
    return method.make(model, optimizer, seed=config.seed, **settings)  # type: ignore[no-any-return]


def cost(job: Job, found: Flops) -> float:
    """Operations of training, per sample, from those of the forward pass of the trained model."""
    schedule = job.schedule
    until = None if schedule.until is None else schedule.until / schedule.steps
    return job.method.cost(found, Spent(schedule.every, job.config.subset, until))
