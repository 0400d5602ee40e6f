"""Writes metrics for TensorBoard, too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewire.training.folder import TENSORBOARD
from rewire.training.progress import Progress

if TYPE_CHECKING:
    from rewire.training.loop import Trainer

_NOT_SHOWN = ("event", "epoch", "step", "layers")


class Logged(Progress):
    """Another progress, whose lines also go to a folder for TensorBoard.

    Raises:
        ValueError: if tensorboard is not installed.
    """

    def __init__(self, progress: Progress, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "--tensorboard needs tensorboard: pip install 'rewire[tensorboard]'"
            ) from error
        self._progress, self._folder, self._kind = progress, folder / TENSORBOARD, SummaryWriter
        self._writer: Any = None

    def begin(self, trainer: Trainer) -> None:
        self._writer = self._kind(str(self._folder), purge_step=trainer.step + 1)
        self._progress.begin(trainer)

    def step(self, trainer: Trainer) -> None:
        self._progress.step(trainer)

    def line(self, entry: dict[str, Any]) -> None:
        if entry["event"] not in ("round", "end"):
            for name, value in entry.items():
                if name not in _NOT_SHOWN:
                    self._writer.add_scalar(f"{entry['event']}/{name}", value, entry["step"])
        self._progress.line(entry)

    def note(self, text: str) -> None:
        self._progress.note(text)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._progress.close()
