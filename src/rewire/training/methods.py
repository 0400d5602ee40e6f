"""How the methods of :data:`rewire.methods.METHODS` train in a run: with which model, and what rewires it.

To add a method, add a row to that table.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol

import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

import rewire
from rewire.methods import METHODS, Rewiring
from rewire.methods.options import OPTIONS

if TYPE_CHECKING:
    from rewire.training.job import Job

__all__ = ["METHODS", "OPTIONS", "Steps", "rewirer", "shell", "start"]

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
        loss = partial(F.cross_entropy, label_smoothing=config.label_smoothing)
        return method.make(  # type: ignore[no-any-return]
            *(job.dense(), job.batches(SAMPLES), loss),
            sparsity=config.sparsity,
            keep_dense=config.keep_dense,
            seed=config.seed,
            **_settings(job),
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
    settings = _settings(job) | {"seed": config.seed}
    if method.make is rewire.Gradual:
        settings["sparsity"] = config.sparsity
    if config.instead_of_step:
        settings["growth_batches"] = 1
    return method.make(model, optimizer, **settings)  # type: ignore[no-any-return]


def _settings(job: Job) -> dict[str, Any]:
    """The options of the method that what makes it takes as arguments, times in steps."""
    config, taken = job.config, signature(job.method.make).parameters
    found = {name: getattr(config, name) for name in job.method.options if name in taken}
    for name, value in found.items():
        if name == "every":
            found[name] = job.schedule.every
        elif OPTIONS[name].epochs and value is not None:
            found[name] = config.in_steps(value, job.schedule.steps_per_epoch)
    return {name: value for name, value in found.items() if value is not None}
