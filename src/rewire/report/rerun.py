"""The command that repeats a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rewire.training import config as configs

_ALWAYS = ("dataset", "model", "method", "sparsity", "seed")


def command(settings: Mapping[str, Any]) -> str:
    """What to type to get a config: what differs from the recipe, and what a reader wants to see.

    A config that this version does not know is given as the file that it came from.

    >>> command({**asdict(configs.resolve({"method": "set", "scale": 0.1}))})
    'rewire train --dataset digits --model mlp --method set --sparsity 0.98 --scale 0.1 --seed 0'
    >>> command(asdict(configs.resolve({"exact": False, "instead_of_step": True})))[-38:]
    ' --no-exact --instead-of-step --seed 0'
    """
    try:
        wanted = asdict(configs.resolve(settings))
    except ValueError:
        return "rewire train --config config.toml"
    given = {name: wanted[name] for name in _ALWAYS if wanted[name] is not None}
    if wanted["method"] == "dense":
        del given["sparsity"]
    for name in configs.NAMES:
        if asdict(configs.resolve(given))[name] != wanted[name]:
            given[name] = wanted[name]
    words = [w for name in configs.NAMES if name in given for w in _words(name, given[name])]
    return shlex.join(["rewire", "train", *words])


def _words(name: str, value: Any) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    if name == "keep_dense":
        return [word for layer in value for word in (option, layer)]
    if isinstance(value, bool):
        return [option if value else f"--no-{option[2:]}"]
    if isinstance(value, tuple):
        return [option, ",".join(map(_word, value))]
    return [option, _word(value)]


def _word(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else str(value)
