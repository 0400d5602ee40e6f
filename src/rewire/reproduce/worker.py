"""A process that does one run: ``python -m rewire.reproduce.worker``.

It reads its task, a line of JSON, from standard input, and tells on standard output how it goes, in
lines of JSON. The end of its input is the wish that it stop: it saves where it is and ends. So a sweep
that is killed leaves no run behind that goes on by itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

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
    tell = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what others print does not mix with what we tell
    line = sys.stdin.readline()
    if not line:  # stopped before it began
        return 0
    try:
        _train(Task(**json.loads(line)), tell)
    except Exception as error:
        traceback.print_exc()
        say(tell, {"event": "failed", "message": str(error) or repr(error)})
        return 1
    return 0


def say(tell: TextIO, event: dict[str, Any]) -> None:
    """Tell it, if there is still someone to be told."""
    try:
        print(json.dumps(event), file=tell, flush=True)
    except OSError:
        return


def _train(task: Task, tell: TextIO) -> None:
    import torch

    from rewire.training.config import resolve
    from rewire.training.folder import Busy, Folder
    from rewire.training.interrupts import Interrupted, Interrupts
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
            self.told = time.monotonic()
            say(tell, {"event": event, "step": trainer.step, "steps": trainer.schedule.steps})

        def line(self, entry: dict[str, Any]) -> None:
            if entry["event"] in ("epoch", "end"):
                say(tell, entry)

        def note(self, text: str) -> None:
            say(tell, {"event": "note", "message": text})

    torch.set_num_threads(task.threads)
    config, folder = resolve(task.config), Folder(Path(task.folder))
    root = None if task.root is None else Path(task.root)
    with Interrupts() as interrupts:
        threading.Thread(target=_watch, args=(interrupts,), daemon=True).start()
        data = load_data(config, root, workers=task.threads)
        deadline = time.monotonic() + _WAIT
        while True:
            try:
                with folder:
                    folder.claim(config)
                    Trainer(Job(config, data), folder, Told(), interrupts).run()
                return
            except Interrupted as stop:
                say(tell, {"event": "stopped", "step": stop.step})
                return
            except Busy:  # by the worker of a sweep that was killed, which saves and ends
                if time.monotonic() > deadline or interrupts.received is not None:
                    raise
                time.sleep(0.2)


def _watch(interrupts: Any) -> None:
    """Wish to stop at the end of the input."""
    sys.stdin.read()
    interrupts.received = interrupts.received or signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())
