"""A worker process as seen from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rewire.reproduce.worker import Event, Task

LAST = ("end", "stopped", "failed")
"""Events after which there are no others."""

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Process:
    """A process that does a task.

    It has a session of its own, so that Ctrl-C in the terminal does not reach it.
    """

    def __init__(self, task: Task) -> None:
        self._log = Path(task.log)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rewire.reproduce.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                encoding="utf-8",
                env=os.environ | dict.fromkeys(_THREADS, str(task.threads)),
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died already, which events() will say
            self._process.stdin.write(task.to_json() + "\n")
            self._process.stdin.flush()

    def events(self) -> Iterator[Event]:
        """What it tells, until it ends; the last one is one of ``LAST``."""
        assert self._process.stdout is not None
        last: Event | None = None
        for line in self._process.stdout:
            event: Event = json.loads(line)
            if event["event"] in LAST:
                last = event
            else:
                yield event
        code = self._process.wait()
        self.stop()
        self._process.stdout.close()
        if last is None:
            last = {"event": "failed", "message": _why(code)}
        if last["event"] == "failed" and self._log.stat().st_size:
            last["message"] += f" (more in {self._log})"
        if not self._log.stat().st_size:
            self._log.unlink()
        yield last

    def stop(self) -> None:
        """Let it save where it is, and end."""
        assert self._process.stdin is not None
        with self._lock, suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


def _why(code: int) -> str:
    if code >= 0:
        return f"the worker ended with code {code}"
    hint = ": perhaps there was not enough memory" if code == -signal.SIGKILL else ""
    return f"the worker was ended by {signal.Signals(-code).name}{hint}"
