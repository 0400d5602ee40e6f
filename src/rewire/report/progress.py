"""Showing how far the making of a page is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Tell = Callable[[str, int, int], None]
"""Is given what is being done, how much of it is done, and how much there is."""

_SECONDS = 5.0  # from one plain line to the next


def silent(what: str, done: int, total: int) -> None:
    """Says nothing."""


class Shown:
    """A bar in a terminal, and a line now and then elsewhere; both on the error stream."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console

        self._screen, self._quiet = Console(stderr=True), quiet
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}
        self._told = time.monotonic()

    def __enter__(self) -> Shown:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        if self._screen.is_terminal and not self._quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(*columns, console=self._screen, transient=True)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tell(self, what: str, done: int, total: int) -> None:
        """Show it, unless it is quiet."""
        if self._bar is not None:
            if what not in self._tasks:
                self._tasks[what] = self._bar.add_task(what)
            self._bar.update(self._tasks[what], completed=done + 1, total=total)
        elif not self._quiet and time.monotonic() - self._told > _SECONDS:
            self._told = time.monotonic()
            self._screen.print(f"{what}: {done:,} of {total:,}")
