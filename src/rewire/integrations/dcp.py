"""Checkpoints of ``torch.distributed.checkpoint`` (DCP) for models whose layers change their sizes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rewire.training import json_codec

_TREE, _TENSORS = "rewire", "tensors"


def save(state: Mapping[str, Any], checkpoint_id: str | os.PathLike[str]) -> None:
    """Write state dicts to a folder with ``dcp.save``, for :func:`load`.

    ``dcp.load`` alone reads into tensors that are there already, and raises where a layer has not as many
    connections as in the checkpoint.

    Example:
        >>> parts = {"rewirer": rewirer, "model": model, "optimizer": optimizer}  # doctest: +SKIP
        >>> save({name: part.state_dict() for name, part in parts.items()}, folder)  # doctest: +SKIP

    Args:
        state: dicts, lists, tuples, numbers, strings and tensors, the same on all processes.
        checkpoint_id: the folder.
    """
    content, tensors = json_codec.encode(dict(state))
    state_dict_saver.save(
        {_TREE: json.dumps(content), _TENSORS: tensors}, checkpoint_id=checkpoint_id
    )


def load(checkpoint_id: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint that :func:`save` has written; its tensors are on the CPU.

    Example:
        >>> state = load(folder)  # doctest: +SKIP
        >>> for name, part in parts.items():  # the rewirer first  # doctest: +SKIP
        ...     part.load_state_dict(state[name])

    Raises:
        ValueError: if the folder was not written by :func:`save`.
    """
    reader = filesystem.FileSystemReader(checkpoint_id)
    stored = reader.read_metadata().state_dict_metadata
    if _TREE not in stored:
        raise ValueError(
            f"{checkpoint_id} was not written by rewire.integrations.dcp.save: dcp.load reads "
            "what dcp.save alone "
            "has written, if every layer has as many connections as then"
        )
    found: dict[str, Any] = {
        key: torch.empty(one.size, dtype=one.properties.dtype)
        if isinstance(one, TensorStorageMetadata)
        else ""
        for key, one in stored.items()
    }
    state_dict_loader.load(found, storage_reader=reader)
    prefix = f"{_TENSORS}."
    tensors = {key.removeprefix(prefix): one for key, one in found.items() if key != _TREE}
    state: dict[str, Any] = json_codec.decode(json.loads(found[_TREE]), tensors)
    return state
