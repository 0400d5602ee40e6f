"""Files that are either whole or not there, whenever the power goes."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

HIDDEN = ".tmp-"  # how names of what is not finished begin


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    flags = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) if path.is_dir() else os.O_RDONLY
    try:
        handle = os.open(path, flags)
    except PermissionError:  # Windows cannot open folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(path: Path, fill: Callable[[Path], None]) -> None:
    """Make or replace a file, or make a folder: ``fill`` writes to the temporary path it is given.

    A folder that is there already is replaced too, in a moment in which neither is there.
    """
    path = path.absolute()
    hidden = path.parent / f"{HIDDEN}{os.getpid()}-{path.name}"
    remove(hidden)
    try:
        fill(hidden)
        for file in [*hidden.iterdir(), hidden] if hidden.is_dir() else [hidden]:
            sync(file)
        if hidden.is_dir():
            remove(path)
        os.replace(hidden, path)
    except BaseException:
        remove(hidden)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Make or replace a text file."""
    write(path, lambda hidden: _write_text(hidden, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what a process that was killed has left unfinished."""
    for path in folder.glob(f"{HIDDEN}*"):
        remove(path)


def sha256(path: Path) -> str:
    """The checksum of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
