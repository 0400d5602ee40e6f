"""Files that are either whole or not there, whenever the power goes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

HIDDEN = ".tmp"  # how names of what is not finished begin, also those of safetensors


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    flags = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) if path.is_dir() else os.O_RDONLY
    try:
        handle = os.open(path, flags)
    except PermissionError:  # Windows cannot open folders
        return
    try:
        os.fsync(handle)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(handle)


def write(path: Path, fill: Callable[[Path], None]) -> None:
    """Make or replace a file, or make a folder: ``fill`` writes to the temporary path it is given.

    A folder that is there already is replaced too, in a moment in which neither is there. Whatever
    ``fill`` made them with, files can be read by those who can read others made here.

    Raises:
        OSError: if it cannot be written there.
    """
    path = path.absolute()
    hidden = path.parent / f"{HIDDEN}-{os.getpid()}-{path.name}"
    mode = _try(hidden, path)
    try:
        fill(hidden)
        for file in hidden.iterdir() if hidden.is_dir() else [hidden]:
            if file.is_file():
                file.chmod(mode)  # safetensors makes its files private
            sync(file)
        if hidden.is_dir():
            sync(hidden)
        elif path.is_dir():
            raise IsADirectoryError(f"{path} cannot be written: it is a folder")
        if hidden.is_dir():
            remove(path)
        os.replace(hidden, path)
    except BaseException as error:
        with suppress(OSError):  # what went wrong first is what counts
            remove(hidden)
        _name(error, path)
        raise
    sync(path.parent)


def _name(error: BaseException, path: Path) -> None:
    """Let an error of writing say which file it was; those of libraries become an OSError."""
    if isinstance(error, OSError):
        if error.strerror and (error.filename is None or HIDDEN in str(error.filename)):
            error.filename, error.filename2 = str(path), None
    elif type(error).__name__ == "SafetensorError" or type(error) is RuntimeError:  # torch.save
        raise OSError(f"{path} cannot be written: {error}") from error


def _try(hidden: Path, path: Path) -> int:
    """See that a file can be made here, before libraries try it that do not say why not; its mode."""
    try:
        remove(hidden)
        hidden.touch()
        mode = stat.S_IMODE(hidden.stat().st_mode)
        remove(hidden)
    except OSError as error:
        raise type(error)(f"{path} cannot be written: {error.strerror}") from error
    return mode


def write_text(path: Path, text: str) -> None:
    """Make or replace a text file."""
    write(path, lambda hidden: _write_text(hidden, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        error.filename = str(path)  # rmtree knows a name inside of the folder only
        raise


def sweep(folder: Path) -> None:
    """Remove what a process that was killed has left unfinished; for whoever alone writes to the folder."""
    for path in folder.glob(f"{HIDDEN}*"):
        remove(path)


def is_empty(folder: Path) -> bool:
    """Whether there is nothing in a folder but what a process that was killed has left unfinished."""
    return all(path.name.startswith(HIDDEN) for path in folder.iterdir())


def parse_json(text: str) -> Any:
    """What a text in a file says as JSON.

    Raises:
        ValueError: if it is no JSON, or none that can be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sha256(path: Path) -> str:
    """The checksum of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def problem(error: Exception) -> str:
    """What to tell the user of an error, without the number that the system gave it.

    >>> problem(FileNotFoundError(2, "No such file or directory", "mine.toml"))
    'mine.toml: No such file or directory'
    >>> problem(ValueError("lr must be a number above 0"))
    'lr must be a number above 0'
    """
    if isinstance(error, MemoryError):
        return f"there is not enough memory ({error})"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
