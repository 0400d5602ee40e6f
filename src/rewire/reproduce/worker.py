"""A process that does one run: ``python -m rewire.reproduce.worker``.

It reads its task, a line of JSON, from standard input, and tells on standard output how it goes, in
lines of JSON. The end of its input is the wish that it stop: it saves where it is and ends. So a sweep
that is killed leaves no run behind that continues by itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewire.training.folder import Folder
    from rewire.training.interrupts import Interrupts

Event = dict[str, Any]

_PATIENCE = 0.5  # seconds between two lines about steps
_WAIT = 60.0  # seconds in which a stopped worker has to have left the folder


@dataclass(frozen=True)
class Task:
    """What a worker is to do.

    Attributes:
        name: of the run.
        config: all settings, by name.
        folder: of the run.
        log: a file for warnings and errors; it is removed if it stays empty.
        root: where the data are; None for the usual places.
        threads: to compute with.
    """

    name: str
    config: dict[str, Any]
    folder: str
    log: str
    root: str | None
    threads: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main() -> int:
    """Do the run whose task is on standard input."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what others print does not mix with what we tell

    def tell(event: Event) -> None:
        with suppress(OSError):  # no one is there any more
            print(json.dumps(event), file=stream, flush=True)

    line = sys.stdin.readline()
    if not line:  # stopped before it began
        return 0
    from rewire.training.interrupts import Interrupts

    try:
        with Interrupts() as interrupts:
            threading.Thread(target=_watch, args=(interrupts,), daemon=True).start()
            train(Task(**json.loads(line)), tell, interrupts)
    except Exception as error:
        traceback.print_exc()
        tell({"event": "failed", "message": str(error) or repr(error)})
        return 1
    return 0


def _watch(interrupts: Interrupts) -> None:
    """Wish to stop at the end of the input."""
    sys.stdin.read()
    interrupts.received = interrupts.received or signal.SIGTERM


def train(task: Task, tell: Callable[[Event], None], interrupts: Interrupts) -> None:
    """Do a run, from its start or from where it was left."""
    import torch

    from rewire.training.config import resolve
    from rewire.training.folder import Folder, plain
    from rewire.training.interrupts import Interrupted
    from rewire.training.job import Job, load_data
    from rewire.training.loop import Trainer
    from rewire.training.progress import Progress

    class Told(Progress):
        """Tells the sweep."""

        told = 0.0

        def begin(self, trainer: Trainer) -> None:
            self._at("begin", trainer)

        def step(self, trainer: Trainer) -> None:
            if time.monotonic() - self.told >= _PATIENCE:
                self._at("step", trainer)

        def _at(self, event: str, trainer: Trainer) -> None:
            self.told, steps = time.monotonic(), trainer.schedule.steps
            before = steps * rounds.index(trainer.job.config.sparsity)
            tell({"event": event, "step": before + trainer.step, "steps": steps * len(rounds)})

        def line(self, entry: Event) -> None:
            if entry["event"] in ("epoch", "end"):
                tell(plain(entry))

        def note(self, text: str) -> None:
            tell({"event": "note", "message": text})

    torch.set_num_threads(task.threads)
    config, folder = resolve(task.config), Folder(Path(task.folder))
    rounds = task.config.get("rounds") or [config.sparsity]  # a lottery has several, equally long
    root = None if task.root is None else Path(task.root)
    job = Job(config, load_data(config, root, workers=task.threads))
    try:
        with _alone_in(folder, interrupts):
            folder.claim(config)
            Trainer(job, folder, Told(), interrupts).run()
    except Interrupted as stop:
        tell({"event": "stopped", "step": stop.step})


@contextmanager
def _alone_in(folder: Folder, interrupts: Interrupts) -> Iterator[None]:
    """Wait for the worker of a sweep that was killed, which saves where it is and ends."""
    from rewire.training.folder import Busy

    deadline = time.monotonic() + _WAIT
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(folder)
                break
            except Busy:
                if time.monotonic() > deadline or interrupts.received is not None:
                    raise
                time.sleep(0.2)
        yield


if __name__ == "__main__":
    sys.exit(main())
