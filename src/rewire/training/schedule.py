"""What happens at which step of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rewire.training.config import Config


MOST = 1e15  # steps


@dataclass(frozen=True)
class Schedule:
    """A run in steps.

    Attributes:
        steps: of the whole run.
        steps_per_epoch: batches in an epoch; the last epoch may be a part of one.
        drops: after how many steps the learning rate drops.
        warmup: steps in which it rises from zero.
        every: steps from one rewiring to the next; None if there are none.
        until: the last step that may end with one; None for no end.
        lr, drop_factor: the learning rate, and what a drop multiplies it with.
    """

    steps: int
    steps_per_epoch: int
    drops: tuple[int, ...]
    warmup: int
    every: int | None
    until: int | None
    lr: float
    drop_factor: float

    @classmethod
    def of(cls, config: Config, steps_per_epoch: int) -> Schedule:
        """``scale`` multiplies all of it, ``extend`` all but ``every``; then steps are rounded."""

        def steps(epochs: float) -> int:
            return config.in_steps(epochs, steps_per_epoch)

        every = None
        if config.every is not None:
            every = max(1, round(min(MOST, config.every * config.scale)))
        until = None if config.until is None else steps(config.until)
        total = steps(config.epochs)
        if every is not None and every > min(total, until or total):
            raise ValueError(
                f"the first rewiring would be after {every} steps, but the last may be after "
                f"{min(total, until or total)} (an epoch has {steps_per_epoch}): lower every, or raise "
                "until or epochs"
            )
        return cls(
            steps=total,
            steps_per_epoch=steps_per_epoch,
            drops=tuple(steps(drop) for drop in config.drops),
            warmup=steps(config.warmup),
            every=every,
            until=until,
            lr=config.lr,
            drop_factor=config.drop_factor,
        )

    @property
    def epochs(self) -> int:
        """Epochs that are begun."""
        return -(-self.steps // self.steps_per_epoch)

    def rate(self, step: int) -> float:
        """The learning rate of the step after ``step`` steps."""
        drops = sum(step >= drop for drop in self.drops)
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return self.lr * self.drop_factor**drops * rise
