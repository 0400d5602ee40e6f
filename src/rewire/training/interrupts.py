"""Ctrl-C and SIGTERM stop the loop between two steps."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """The run has stopped because of a signal.

    Attributes:
        signal: which one.
        step: after how many steps.
    """

    def __init__(self, signal: int, step: int) -> None:
        super().__init__(f"stopped by signal {signal} after step {step}")
        self.signal, self.step = signal, step


class Interrupts:
    """Remembers the first signal while it is entered; a second one acts as usual.

    Attributes:
        received: the signal, None so far.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a process that reads data, forked from this one
            if number != signal.SIGINT:  # Ctrl-C reaches all of them; their parent ends them
                os._exit(128 + number)
            return
        self.received = number
        self._restore()
