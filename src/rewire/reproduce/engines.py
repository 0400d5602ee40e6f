"""Where the runs of a sweep are done: in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import queue
import signal
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from rewire.reproduce.process import LAST, Process
from rewire.reproduce.worker import Event, Task

Told = tuple[str, Event]  # the name of a run, and what it tells


class Engine(Protocol):
    """What a sweep needs."""

    def start(self, tasks: Sequence[Task]) -> None:
        """Begin with the tasks."""

    def poll(self, seconds: float) -> list[Told]:
        """What was told since, waiting at most so long for something."""

    @property
    def busy(self) -> bool:
        """Whether there is something to be done or told."""

    def stop(self) -> None:
        """Let runs save where they are and end; begin no others."""

    def kill(self) -> None:
        """End all at once."""


class Local:
    """So many processes at a time, on this machine."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._waiting: deque[Task] = deque()
        self._live: set[Process] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, tasks: Sequence[Task]) -> None:
        self._waiting.extend(tasks)
        count = min(self._workers, len(tasks))
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        """Do what is waiting, one after the other."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                task = self._waiting.popleft()
                process = Process(task)
                self._live.add(process)
            self._told.put((task.name, {"event": "started"}))
            for event in process.events():
                self._told.put((task.name, event))
            with self._lock:
                self._live.remove(process)

    def poll(self, seconds: float) -> list[Told]:
        found: list[Told] = []
        try:
            found.append(self._told.get(timeout=seconds))
            while True:
                found.append(self._told.get_nowait())
        except queue.Empty:
            return found

    @property
    def busy(self) -> bool:
        return any(thread.is_alive() for thread in self._threads) or not self._told.empty()

    def stop(self) -> None:
        with self._lock:
            self._waiting.clear()
            for process in self._live:
                process.stop()

    def kill(self) -> None:
        with self._lock:
            self._waiting.clear()
            for process in self._live:
                process.kill()


class Ray:
    """On the machines of a Ray cluster, or of one that is made on this machine if there is none.

    A run takes as many CPUs as it has threads. All machines must see the folder of the sweep and the data
    under the same paths. A run whose machine is lost resumes, from its last checkpoint, on another.

    Args:
        workers: at most so many runs at a time; None for as many as there are CPUs for.
        threads: of a run.
    """

    def __init__(self, workers: int | None, threads: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise ValueError(
                "--engine ray needs Ray: install it with `pip install 'rewire[ray]'`"
            ) from error
        self._ray: Any = ray
        self._workers, self._threads = workers, threads
        self._waiting: deque[Task] = deque()
        self._running: dict[Any, str] = {}

    def start(self, tasks: Sequence[Task]) -> None:
        ray = self._ray
        handler = signal.getsignal(
            signal.SIGTERM
        )  # which Ray replaces by one that ends all at once
        ray.init(log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
        signal.signal(signal.SIGTERM, handler)
        if max(node["Resources"].get("CPU", 0) for node in ray.nodes()) < self._threads:
            raise ValueError(
                f"no machine of the Ray cluster has {self._threads} CPUs: lower --threads"
            )
        self._board = ray.remote(num_cpus=0)(Board).remote()
        self._do = ray.remote(num_cpus=self._threads, max_retries=3)(_do)
        self._waiting.extend(tasks)
        self._submit()

    def _submit(self) -> None:
        while self._waiting and (self._workers is None or len(self._running) < self._workers):
            task = self._waiting.popleft()
            self._running[self._do.remote(task, self._board)] = task.name

    def poll(self, seconds: float) -> list[Told]:
        ended, _ = self._ray.wait([*self._running], num_returns=1, timeout=seconds)
        told: list[Told] = self._ray.get(self._board.take.remote())
        for reference in ended:
            name = self._running.pop(reference)
            try:
                told.append((name, self._ray.get(reference)))
            except Exception as error:  # the machine is gone, and so was every other one
                told.append((name, {"event": "failed", "message": str(error)}))
        self._submit()
        if not self.busy:
            self._ray.shutdown()
        return told

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def stop(self) -> None:
        self._waiting.clear()
        self._ray.get(self._board.stop.remote())

    def kill(self) -> None:
        self._waiting.clear()
        self._running.clear()
        self._ray.shutdown()


class Board:
    """Where runs tell how they go, and are told to stop; an actor of Ray."""

    def __init__(self) -> None:
        self._told: list[Told] = []
        self._stop = False

    def tell(self, name: str, event: Event) -> None:
        self._told.append((name, event))

    def take(self) -> list[Told]:
        """What was told since the last time."""
        told, self._told = self._told, []
        return told

    def stop(self) -> None:
        self._stop = True

    def stopping(self) -> bool:
        return self._stop


def _do(task: Task, board: Any) -> Event:
    """Do one task, in a process of its own, and return what it told last."""
    import ray

    if ray.get(board.stopping.remote()):
        return {"event": "stopped"}
    ray.get(board.tell.remote(task.name, {"event": "started"}))
    process = Process(task)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            if ray.get(board.stopping.remote()):
                process.stop()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        last: Event = {}
        for event in process.events():
            if event["event"] in LAST:
                last = event
            else:
                board.tell.remote(task.name, event)
        return last
    finally:
        ended.set()
        watcher.join()
