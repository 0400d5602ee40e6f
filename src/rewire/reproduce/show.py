"""What a sweep shows while it runs: bars in a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rewire.reproduce.process import LAST
from rewire.reproduce.worker import Event
from rewire.training.formatting import duration, percent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

_PATIENCE = 60.0  # seconds between plain lines about all runs


class Show:
    """Lines for what is begun and what has ended, and one a minute for all runs in progress.

    Args:
        screen: where to.
        done: runs that were finished before.
        todo: runs that are to be done.
    """

    def __init__(self, screen: Console, done: int, todo: int) -> None:
        self.screen, self.ended, self.total = screen, done, done + todo
        self._left = float(todo)
        self.parts: dict[str, float] = {}  # how far each of those that are running is
        self._begun = self._told = time.monotonic()
        self._since: dict[str, float] = {}
        self._first: dict[str, float] = {}  # how far it was when it began, in this sitting

    def __enter__(self) -> Show:
        self._begun = self._told = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def tell(self, name: str, event: Event) -> None:
        """A run has told something."""
        what = event["event"]
        if what == "started":
            self._since[name] = time.monotonic()
            self.parts[name] = 0.0
            self.started(name)
        elif what in ("begin", "step"):
            self.parts[name] = event["step"] / event["steps"]
            if what == "begin":
                self._first[name] = self.parts[name]
        elif what == "note":
            self.note(f"{name}: {event['message']}")
        elif what in LAST:
            self.parts.pop(name, None)
            self.ended += what != "stopped"
            self._ended(name, event)
        self.moved(name, event)

    def started(self, name: str) -> None:
        """A run was begun, or resumes."""
        self.note(f"{name} ...")

    def _ended(self, name: str, event: Event) -> None:
        seconds = duration(time.monotonic() - self._since.pop(name, self._begun))
        words = {
            "end": lambda: f"{percent(event['accuracy'])}, {seconds}",
            "stopped": lambda: (
                "stopped" + (f" after step {event['step']:,}" if "step" in event else "")
            ),
            "failed": lambda: f"failed: {event['message']}",
        }
        self.note(f"[{self.ended}/{self.total}] {name}: {words[event['event']]()}")

    def moved(self, name: str, event: Event) -> None:
        """Something about a run has changed."""
        if time.monotonic() - self._told >= _PATIENCE and self.parts:
            self._told = time.monotonic()
            parts = ", ".join(f"{name} {percent(part)}" for name, part in self.parts.items())
            left = self.left()
            self.note(f"{parts}; all: {percent(self.share)}" + (f", {left} left" if left else ""))

    @property
    def share(self) -> float:
        """Of all runs, so much is done."""
        return (self.ended + sum(self.parts.values())) / max(1, self.total)

    def left(self) -> str:
        """How much longer it takes, if all runs take as long as those so far; empty as yet unknown."""
        before = self.total - self._left
        done = self.ended - before + sum(self.parts.values()) - sum(self._first.values())
        seconds = time.monotonic() - self._begun
        if done <= 0 or seconds < 5:
            return ""
        return duration(seconds / done * (self.total - self.ended - sum(self.parts.values())))

    def note(self, text: str) -> None:
        """A line."""
        self.screen.print(text, soft_wrap=True)


class Bars(Show):
    """A bar for all runs, and one for each that is running."""

    def __enter__(self) -> Bars:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        super().__enter__()
        columns = (TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn())
        self._bars = Progress(
            *columns, TextColumn("{task.fields[more]}"), console=self.screen, transient=True
        )
        self._all = self._bars.add_task("all", total=1.0, more="")
        self._tasks: dict[str, TaskID] = {}
        self._update()
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def started(self, name: str) -> None:
        self._tasks[name] = self._bars.add_task(name, total=1.0, more="starting")

    def moved(self, name: str, event: Event) -> None:
        task = self._tasks.get(name)
        if task is not None and event["event"] in LAST:
            self._bars.remove_task(self._tasks.pop(name))
        elif task is not None:
            self._bars.update(task, completed=self.parts[name])
            if event["event"] == "begin":
                self._bars.update(task, more="")
            elif event["event"] == "epoch":
                tested = f"epoch {event['epoch']}, test {percent(event['test_accuracy'])}"
                self._bars.update(task, more=tested)
        self._update()

    def _update(self) -> None:
        left = self.left()
        more = f"{self.ended} of {self.total} runs" + (f", {left} left" if left else "")
        self._bars.update(self._all, completed=self.share, more=more)


def choose(screen: Console, done: int, todo: int) -> Show:
    """What suits the terminal, or the lack of one."""
    return (Bars if screen.is_terminal else Show)(screen, done, todo)
