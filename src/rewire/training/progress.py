"""What a run reports while it trains: nothing, lines, JSON, or a live display."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from rewire.training.formatting import duration, images, percent, report, title

if TYPE_CHECKING:
    from rewire.training.loop import Trainer

_PATIENCE = 1.0  # seconds between plain lines


class Progress:
    """Shows nothing; the base class of the others."""

    def begin(self, trainer: Trainer) -> None:
        """The first step is about to be done."""

    def step(self, trainer: Trainer) -> None:
        """A step was done."""

    def line(self, entry: dict[str, Any]) -> None:
        """A line was written to the metrics."""

    def note(self, text: str) -> None:
        """Something the user should know; also shown when all else is not."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """The run has ended, or was interrupted."""


class JsonLines(Progress):
    """The lines of the metrics, on standard output."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def line(self, entry: dict[str, Any]) -> None:
        from rewire.training.folder import plain

        print(json.dumps(plain(entry)), file=self._stream, flush=True)


class Speed:
    """Images per second and time left, of this sitting."""

    def __init__(self, trainer: Trainer) -> None:
        self._begun, self._first = time.perf_counter(), trainer.step

    def now(self, trainer: Trainer) -> tuple[float, float]:
        """Images per second, seconds left."""
        seconds, steps = time.perf_counter() - self._begun, trainer.step - self._first
        batch = trainer.job.config.batch_size
        if not steps:
            return 0.0, 0.0
        return steps * batch / seconds, (trainer.schedule.steps - trainer.step) * seconds / steps


class Lines(Progress):
    """A line for an epoch, but not more than one in a second."""

    def begin(self, trainer: Trainer) -> None:
        self._trainer, self._speed = trainer, Speed(trainer)
        self._told, self._rewired = 0.0, ""
        print(title(trainer), flush=True)

    def line(self, entry: dict[str, Any]) -> None:
        if entry["event"] == "rewiring":
            self._rewired = rewired(entry)
        elif entry["event"] in ("round", "end"):
            print(report(self._trainer, entry), flush=True)
        else:
            self._epoch(entry)

    def _epoch(self, entry: dict[str, Any]) -> None:
        schedule, now = self._trainer.schedule, time.monotonic()
        last = entry["step"] == schedule.steps
        if now - self._told < _PATIENCE and not last:
            return
        self._told = now
        rate, left = self._speed.now(self._trainer)
        parts = [
            f"epoch {entry['epoch']}/{schedule.epochs}",
            f"loss {entry['train_loss']:.4f}",
            f"accuracy {percent(entry['train_accuracy'])}",
            f"test {percent(entry['test_accuracy'])} (best {percent(entry['best'])})",
            f"lr {entry['lr']:.3g}",
            images(rate),
            f"density {percent(entry['density'])}",
            *([self._rewired] if self._rewired else []),
            *([] if last else [f"{duration(left)} left"]),
        ]
        print(", ".join(parts), flush=True)


class Screen(Progress):
    """A live display at the bottom of a terminal."""

    def begin(self, trainer: Trainer) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bar

        self._trainer, self._speed, self._shown = trainer, Speed(trainer), 0.0
        self._tested, self._rewired = "", ""
        self._console = Console(highlight=False, markup=False)
        self._console.print(title(trainer), soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(None), TaskProgressColumn())
        self._bar = Bar(
            *columns, TextColumn("{task.fields[left]}"), console=self._console, expand=True
        )
        total = trainer.schedule.steps
        self._task = self._bar.add_task("", total=total, completed=trainer.step, left="")
        self._live: Live | None = Live(
            console=self._console, get_renderable=self._render, transient=True, refresh_per_second=8
        )
        self._live.start()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        trainer = self._trainer
        rate, left = self._speed.now(trainer)
        epoch = min(trainer.step // trainer.schedule.steps_per_epoch + 1, trainer.schedule.epochs)
        self._bar.update(
            self._task,
            completed=trainer.step,
            description=f"epoch {epoch}/{trainer.schedule.epochs}",
            left=f"{duration(left)} left",
        )
        loss, hits, seen = trainer.sums.tolist()
        parts = [f"lr {trainer.schedule.rate(trainer.step):.3g}", images(rate)]
        if seen:
            parts = [f"loss {loss / seen:.4f}", f"accuracy {percent(hits / seen)}", *parts]
        below = [self._tested, f"density {percent(trainer.density)}", self._rewired]
        lines = ("   ".join(filter(None, part)) for part in (parts, below))
        return Group(self._bar, *(Text(line, style="dim") for line in lines))

    def line(self, entry: dict[str, Any]) -> None:
        if entry["event"] == "rewiring":
            self._rewired = rewired(entry)
        elif entry["event"] == "epoch":
            self._tested = f"test {percent(entry['test_accuracy'])}, best {percent(entry['best'])}"
        else:
            self.close()
            self._console.print(report(self._trainer, entry), soft_wrap=True)

    def close(self) -> None:
        if getattr(self, "_live", None) is not None:
            assert self._live is not None
            self._live.stop()
            self._live = None


def rewired(entry: dict[str, Any]) -> str:
    """A short description of a rewiring."""
    return f"rewired {percent(entry['turnover'])} at step {entry['step']:,}"


def choose(*, quiet: bool, as_json: bool) -> Progress:
    """The progress for this terminal, or for none, and the user's options."""
    if as_json:
        return JsonLines()
    if quiet:
        return Progress()
    return Screen() if sys.stdout.isatty() else Lines()
