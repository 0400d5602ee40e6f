"""Training round by round: one sequence gives a model of every sparsity on its way.

Each round is a run of its own, in a folder in that of the sequence, which also holds a line of metrics for
each and the model of the last. Rounds that are finished are not trained again.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from rewire import distributed, saving
from rewire.methods import Lottery
from rewire.training.folder import Folder, RunError
from rewire.training.progress import Progress

if TYPE_CHECKING:
    from rewire.training.loop import Trainer


def run(whole: Trainer) -> dict[str, Any]:
    """Train all rounds that are left, and return the summary of the sequence."""
    config, folder, main = whole.job.config, whole.folder, whole.processes.main
    assert config.rounds is not None
    lottery = Lottery(whole.job.dense(), sparsities=config.rounds, keep_dense=config.keep_dense)
    if folder is not None and main:
        folder.open_metrics(0)
    while not lottery.done:
        entry, lottery.model = _round(whole, lottery)
        entry |= {"event": "round", "round": lottery.round, "sparsity": lottery.ticket.sparsity}
        if folder is not None and main:
            folder.write(entry)
            folder.flush(sync=True)
        lottery.advance(entry)
    summary = _whole(lottery.results)
    whole.progress.line(summary)
    if folder is not None and main:
        folder.write(summary)
        folder.flush(sync=True)
        saving.save(lottery.model, folder.model, notes=whole.job.notes())
    return summary


def _round(whole: Trainer, lottery: Lottery) -> tuple[dict[str, Any], nn.Module]:
    """The summary of a round and its trained model."""
    ticket = lottery.ticket
    settings: dict[str, Any] = {"sparsity": ticket.sparsity, "rounds": ()}
    config = replace(whole.job.config, **settings)
    job = replace(whole.job, config=config, ticket=ticket.model)
    told = _Told(whole.progress, ticket.round, ticket.sparsity)
    more = (told, whole.interrupts, whole.processes, whole.every, whole.through_nan)
    if whole.folder is None:
        trainer = type(whole)(job, None, *more)
        return trainer.run(), trainer.model
    folder = whole.folder.round(ticket.round)
    if folder.finished:
        ticket.model.load_state_dict(saving.load(folder.model).state_dict())
        return _end(folder), ticket.model
    with folder if whole.processes.main else nullcontext():
        if whole.processes.main:
            folder.claim(config)
            folder.remember_root(whole.folder.root)
        distributed.barrier()
        trainer = type(whole)(job, folder, *more)
        summary = trainer.run()
    distributed.barrier()
    return summary, trainer.model


def _end(folder: Folder) -> dict[str, Any]:
    """The last line of a finished round."""
    last: deque[Any] = deque(maxlen=1)
    with suppress(ValueError):
        last.extend(folder.read())
    if not last or not isinstance(last[0], dict) or last[0].get("event") != "end":
        raise RunError(
            f"{folder.metrics} is damaged, it does not end with the end of the round: remove "
            f"{folder.path} to train this round again"
        )
    end: dict[str, Any] = last[0]
    return end


def _whole(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The last round's summary, with what all have cost."""
    *_, last = rounds
    summary = {key: value for key, value in last.items() if key not in ("round", "sparsity")}
    costs = ("training_flops", "seconds")
    return summary | {"event": "end"} | {key: sum(r[key] for r in rounds) for key in costs}


class _Told(Progress):
    """Tells of a round as a part of the sequence."""

    def __init__(self, progress: Progress, number: int, sparsity: float) -> None:
        self._progress, self._number, self._sparsity = progress, number, sparsity

    def begin(self, trainer: Trainer) -> None:
        self._progress.begin(trainer)

    def step(self, trainer: Trainer) -> None:
        self._progress.step(trainer)

    def line(self, entry: dict[str, Any]) -> None:
        if entry["event"] == "end":
            entry = {**entry, "event": "round", "round": self._number, "sparsity": self._sparsity}
        self._progress.line(entry)

    def note(self, text: str) -> None:
        self._progress.note(text)

    def close(self) -> None:
        self._progress.close()
