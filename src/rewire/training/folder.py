"""The folder of a run: its config, metrics, checkpoints and, in the end, its model."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from rewire import files
from rewire.training import checkpoint, toml
from rewire.training import config as configs
from rewire.training.config import Config

CONFIG, METRICS, MODEL = "config.toml", "metrics.jsonl", "model.safetensors"
CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"
DATA, START = "data.toml", "start.safetensors"
ABOUT = "about.toml"  # of a copy without weights, see rewire.report.archive
_ROUND = "round-"


class RunError(RuntimeError):
    """A folder cannot be used as asked; the message says what to do."""


class Busy(RunError):
    """Another process is at work in a folder."""


class Folder:
    """A run on disk.

    A run is finished when its model is there, which is written last. To write to it, enter it.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics: BinaryIO | None = None
        self._lock: int | None = None
        self._entered = False

    @property
    def model(self) -> Path:
        """The final model."""
        return self.path / MODEL

    @property
    def start(self) -> Path:
        """The connections that training began with; not there if the model was dense."""
        return self.path / START

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def metrics(self) -> Path:
        """The lines of metrics."""
        return self.path / METRICS

    def check_config(self, config: Config, path: Path, theirs: Any) -> None:
        """Raise a RunError if a checkpoint or a model was written by a run of other settings; None are
        those of older files, which do not say."""
        if isinstance(theirs, dict) and (
            different := configs.differences(config, configs.BEFORE | theirs)
        ):
            raise RunError(
                f"{path} was written with other settings ({different}): put {self.path / CONFIG} "
                "back as it was, or start over with --overwrite"
            )

    def round(self, number: int) -> Folder:
        """The folder of one round of a sequence."""
        return Folder(self.path / f"{_ROUND}{number}")

    @property
    def exists(self) -> bool:
        """Whether there is a run in it."""
        return (self.path / CONFIG).exists()

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.model.exists()

    def config(self) -> Config:
        """The config of the run in it."""
        if not self.exists:
            raise RunError(f"{self.path} holds no run: there is no {CONFIG} in it")
        try:
            return configs.resolve(configs.read_run(self.path / CONFIG))
        except ValueError as error:
            name = "" if CONFIG in str(error) else f"{self.path / CONFIG}: "
            raise RunError(f"{name}{error}") from error

    @property
    def root(self) -> Path | None:
        """Where its data was looked for last, unless that is the usual place."""
        try:
            found = toml.read(self.path / DATA)
        except FileNotFoundError:
            return None
        if not isinstance(found.get("root"), str):
            raise RunError(
                f"{self.path / DATA} does not say where the data is: remove it, and give --root"
            )
        return Path(found["root"])

    def remember_root(self, root: Path | None) -> None:
        """Look for data there from now on. No part of the config: data may be anywhere."""
        if root is not None:
            place = str(root.expanduser().absolute())
            files.write_text(self.path / DATA, toml.dumps({"root": place}))

    def claim(self, config: Config, *, overwrite: bool = False) -> bool:
        """Make this the folder of a run; whether it is one already, of the same config, to resume.

        Raises:
            RunError: if it holds another run, or a finished one.
        """
        if (self.path / ABOUT).is_file():
            raise RunError(
                f"{self.path} holds a copy of a run without its weights: choose another folder with --out"
            )
        files.sweep(self.path)
        if self.exists and not overwrite:
            if different := configs.differences(config, self.config()):
                raise RunError(
                    f"{self.path} holds a run with other settings ({different}): choose another folder "
                    "with --out, or start over with --overwrite"
                )
            if self.finished:
                raise RunError(
                    f"{self.path} holds this run, finished: see `rewire eval {self.path}`; to train "
                    "again choose another folder with --out, or start over with --overwrite"
                )
            return True
        if not self.exists and self.path.is_dir() and not files.is_empty(self.path):
            raise RunError(
                f"{self.path} is not empty and holds no run: choose another folder with --out"
            )
        # The config goes last, in one moment with the new one: without it, what is left would be no run.
        for name in (MODEL, CHECKPOINTS, METRICS, TENSORBOARD, DATA, START):
            files.remove(self.path / name)
        for path in self.path.glob(f"{_ROUND}*"):
            files.remove(path)
        files.write_text(self.path / CONFIG, config.to_toml())
        return False

    def __enter__(self) -> Folder:
        """Keep other processes out.

        Raises:
            Busy: if another one is in.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            import fcntl
        except ImportError:  # Windows
            self._entered = True
            return self
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            self._lock = None
            raise Busy(f"another process is training in {self.path}; wait for it") from error
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self._entered = False
        metrics, self._metrics = self._metrics, None
        try:
            if metrics is not None:
                with self._named(METRICS):
                    metrics.close()
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    # Metrics --------------------------------------------------------------------------------------

    def open_metrics(self, position: int) -> None:
        """Continue writing metrics after so many bytes; what comes later is forgotten."""
        with self._named(METRICS):
            file = (self.path / METRICS).open("ab")
            file.truncate(min(position, file.tell()))
            file.seek(0, os.SEEK_END)
            self._metrics = file

    def write(self, entry: Mapping[str, Any]) -> None:
        """Write one line of metrics; numbers that are not finite become null."""
        assert self._metrics is not None
        with self._named(METRICS):
            self._metrics.write(_line(entry))

    def flush(self, *, sync: bool = False) -> int:
        """Make lines visible to others, or safe on disk; how many bytes there are.

        Raises:
            RunError: if the file is not there any more.
        """
        assert self._metrics is not None
        with self._named(METRICS):
            self._metrics.flush()
            mine = os.fstat(self._metrics.fileno())
            try:
                there = os.path.samestat(mine, (self.path / METRICS).stat())
            except FileNotFoundError:
                there = False
            if not there:
                raise RunError(
                    f"{self.path / METRICS} was removed, moved or replaced while the run wrote to it"
                )
            if sync:
                os.fsync(self._metrics.fileno())
            return self._metrics.tell()

    def digest(self) -> str:
        """The checksum of the metrics so far."""
        return files.sha256(self.path / METRICS)

    def restore(
        self, position: int, digest: str | None, known: Sequence[Mapping[str, Any]]
    ) -> bool:
        """See that metrics are as they were when they had so many bytes and this checksum, and make them
        anew if not: from the lines that can be read, and from those that are ``known`` all the same.

        Returns:
            Whether they were as they should be.
        """
        path = self.path / METRICS
        content = path.read_bytes()[:position] if path.exists() else b""
        if len(content) == position and digest in (None, hashlib.sha256(content).hexdigest()):
            return True
        last = max((entry["step"] for entry in known), default=0)
        lines: dict[tuple[int, str], bytes] = {}
        for line in content.splitlines():
            with suppress(ValueError, KeyError, TypeError):
                entry = files.parse_json(line.decode())
                if 0 < entry["step"] <= last:
                    lines[entry["step"], _ORDER[entry["event"]]] = line + b"\n"
        for entry in known:
            lines[entry["step"], _ORDER[entry["event"]]] = _line(entry)
        whole = b"".join(lines[key] for key in sorted(lines))
        files.write(path, lambda hidden: _write_bytes(hidden, whole))
        return False

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Let errors of a file say which one it is."""
        try:
            yield
        except OSError as error:
            if error.filename is None:
                error.filename = str(self.path / name)
            raise

    def read(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics."""
        with suppress(FileNotFoundError), (self.path / METRICS).open(encoding="utf-8") as file:
            for line in file:
                yield files.parse_json(line)

    # Checkpoints ----------------------------------------------------------------------------------

    def save(self, step: int, state: Any) -> None:
        """Write a checkpoint."""
        checkpoint.save(self.checkpoints, step, state)

    def load(self) -> checkpoint.Loaded | None:
        """The newest checkpoint that is whole, if there is any."""
        if self._entered and self.checkpoints.is_dir():  # else another process may be writing there
            files.sweep(self.checkpoints)
        try:
            return checkpoint.load_newest(self.checkpoints)
        except checkpoint.CheckpointError as error:
            raise RunError(
                f"{error}. Nothing is left to resume from: start over with "
                f"`rewire train --out {self.path} --overwrite` and the options of the run."
            ) from error


_ORDER = {"rewiring": "1", "epoch": "2"}  # of the same step


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(plain(entry), allow_nan=False).encode() + b"\n"


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def plain(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A line as JSON can have it: numbers that are not finite become None."""
    return {key: _plain(value) for key, value in entry.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
