"""What the tests of sweeps share."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from rewire.cli import app
from rewire.reproduce.recipes import EXPERIMENTS
from rewire.reproduce.run import Run, choose
from rewire.reproduce.sweep import About, Sweep
from rewire.reproduce.worker import train
from rewire.training.folder import Folder
from rewire.training.interrupts import Interrupts


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["reproduce", *map(str, arguments)])


def text(done: Any) -> str:
    return " ".join(done.output.replace("│", " ").split())


def runs(what: str, *words: str, scale: float = 0.02) -> list[Run]:
    return choose(EXPERIMENTS[what].runs(scale=scale, seeds=1, digits=True), words)


def do(one: Run, path: Path) -> list[dict[str, Any]]:
    """Train in this process, as a worker does; what it tells."""
    sweep, told = Sweep(path, About("table1", "", 1.0, 1)), list[dict[str, Any]]()
    train(sweep.task(one, one.config(), None, 1), told.append, Interrupts())
    return told


def metrics(folder: Path) -> list[dict[str, Any]]:
    entries = list(Folder(folder).read())
    for entry in entries:
        entry.pop("seconds", None)
    return entries


@contextmanager
def when(file: Path, word: str, action: Any) -> Iterator[None]:
    """Act as soon as a file has a word in it."""

    def watch() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if file.exists() and word in file.read_text():
                action()
                return
            time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join()
