"""TOML files of one table: read with the standard library, written here."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read(path: Path) -> dict[str, Any]:
    """The table in a file.

    Raises:
        ValueError: if it is not TOML.
        OSError: if it cannot be read.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is no TOML file: it is nested too deeply") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML file: {error}") from error


def dumps(table: Mapping[str, Any]) -> str:
    """A table of booleans, numbers, strings and lists of them; what is None is left out.

    >>> print(dumps({"lr": 0.1, "drops": [80, 120], "until": None, "model": "vgg16"}))
    lr = 0.1
    drops = [80, 120]
    model = "vgg16"
    <BLANKLINE>
    """
    return "".join(f"{key} = {_value(v)}\n" for key, v in table.items() if v is not None)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"{value!r} has no place in a flat TOML table")
