"""Checkpoints: a folder each, whole or not there, with checksums, and nothing in it that can run.

``manifest.json`` holds all but the tensors, which are in ``tensors.safetensors``.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewire import files
from rewire.training import json_codec

KEPT = 2
VERSION = 1
_MANIFEST, _TENSORS = "manifest.json", "tensors.safetensors"


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, or there is none."""


@dataclass(frozen=True)
class Loaded:
    """What was found.

    Attributes:
        path: the checkpoint.
        state: what was saved.
        damaged: newer ones that could not be used, and why.
    """

    path: Path
    state: Any
    damaged: tuple[str, ...] = ()


def save(folder: Path, step: int, state: Any) -> Path:
    """Write the checkpoint of a step, and then remove all but the newest two.

    Args:
        folder: of all checkpoints of a run.
        step: what it is called by; a higher one is newer.
        state: dicts, lists, tuples, numbers, strings and tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}"
    files.write(path, lambda hidden: _fill(hidden, state))
    for old in found(folder)[KEPT:]:
        files.remove(old)
    return path


def _fill(folder: Path, state: Any) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    encoded, tensors = json_codec.encode(state)
    save_file(tensors, folder / _TENSORS)
    size, checksum = (folder / _TENSORS).stat().st_size, files.sha256(folder / _TENSORS)
    body = {
        "version": VERSION,
        "files": {_TENSORS: {"bytes": size, "sha256": checksum}},
        "state": encoded,
    }
    manifest = {"sha256": _checksum(body), "body": body}
    (folder / _MANIFEST).write_text(json.dumps(manifest, allow_nan=False), encoding="utf-8")


def load(path: Path) -> Any:
    """What was saved in one checkpoint.

    Raises:
        CheckpointError: if it is not exactly what was written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        manifest = files.parse_json((path / _MANIFEST).read_text(encoding="utf-8"))
        body = manifest["body"]
        if manifest["sha256"] != _checksum(body):
            raise CheckpointError(f"{path / _MANIFEST} does not match its checksum")
        if body["version"] != VERSION:
            raise CheckpointError(
                f"{path} is of format {body['version']}, and this version of rewire reads {VERSION}"
            )
        for name, facts in body["files"].items():
            if (path / name).stat().st_size != facts["bytes"]:
                raise CheckpointError(f"{path / name} is not as long as it was written")
            if files.sha256(path / name) != facts["sha256"]:
                raise CheckpointError(f"{path / name} does not match its checksum")
        return json_codec.decode(body["state"], load_file(path / _TENSORS))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (
        *(ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError),
    ) as error:
        raise CheckpointError(f"{path / _MANIFEST} is damaged: {error!r}") from error


def load_newest(folder: Path) -> Loaded | None:
    """The newest checkpoint that is whole; None if there never was one.

    Raises:
        CheckpointError: if there are some and all are damaged.
    """
    damaged: list[str] = []
    paths = found(folder)
    for path in paths:
        try:
            return Loaded(path, load(path), tuple(damaged))
        except CheckpointError as error:
            damaged.append(str(error))
    if found(folder)[:1] != paths[:1]:  # a run that writes them has replaced them meanwhile
        return load_newest(folder)
    if damaged:
        raise CheckpointError("no checkpoint can be used: " + "; ".join(damaged))
    return None


def peek(folder: Path, name: str) -> Any:
    """One entry of the newest checkpoint that says it, read without the tensors; None if none does."""
    for path in found(folder):
        try:
            body = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))["body"]
            return json_codec.decode(body["state"]["dict"][name], {})
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def found(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(paths, key=lambda path: int(path.name[5:]), reverse=True)


def _checksum(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
