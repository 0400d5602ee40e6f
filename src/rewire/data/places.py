"""Where data sets are looked for, and what is said when they are not there or not whole."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "REWIRE_DATA"
Root = str | os.PathLike[str] | None


class DataError(RuntimeError):
    """A data set is missing, damaged, or cannot be downloaded."""


def places(root: Root = None) -> list[Path]:
    """``root`` alone, or without it the folder that REWIRE_DATA names and the user's cache.

    The first of them is where downloads go.
    """
    if root is not None:
        return [Path(root).expanduser()]
    found = [cache()]
    if named := os.environ.get(VARIABLE):
        found.insert(0, Path(named).expanduser())
    return found


def cache() -> Path:
    """The user's folder for files that can be had again."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("rewire", appauthor=False))


def missing(name: str, looked: Sequence[Path], advice: str) -> DataError:
    where = "\n".join(f"  {path}" for path in looked)
    return DataError(f"{name} was not found. Looked in:\n{where}\n{advice}")


def damaged(name: str, path: Path, why: str) -> DataError:
    return DataError(
        f"{name} in {path} is damaged: {why}.\n"
        f"Remove it and run `rewire data get {name}`, or put a good copy there."
    )
