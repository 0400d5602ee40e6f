"""What connections look like: where they were at the start of a run, and where they went."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewire import files
from rewire.report.runs import Run
from rewire.training.folder import CHECKPOINTS, MODEL, START

Array = NDArray[Any]
KEPT, NEW = (91, 107, 214), (240, 98, 56)  # colours that can be seen on light and dark
_COLUMNS, _ROWS = 96, 64  # cells of a picture, at most


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's connections, as ``output * n_in + input``, ascending.

    Attributes:
        name: in the model.
        n_out, n_in: units on each side.
        before, after: the connections.
        shape: of the images, if the layer's inputs are their pixels.
        groups: of units that see each other.
    """

    name: str
    n_out: int
    n_in: int
    before: Array
    after: Array
    shape: tuple[int, int, int] | None = None
    groups: int = 1

    @cached_property
    def kept(self) -> float:
        """Share of the first connections that are still there."""
        return float(np.isin(self.before, self.after).mean()) if self.before.size else math.nan

    def matrices(self) -> tuple[str, str]:
        """Pictures before and after, outputs down and inputs across; new connections are orange."""
        first = self._cells(self.before)
        new = self._cells(self.after[~np.isin(self.after, self.before)])
        kept = self._cells(self.after) - new
        most = max(float(np.percentile(both, 99)) for both in (first, kept + new)) or 1.0
        return _png(first / most, np.zeros_like(first)), _png(
            (kept + new) / most, new / np.maximum(kept + new, 1)
        )

    def _cells(self, keys: Array) -> Array:
        """Connections in each cell of a picture."""
        tall, wide = -(-self.n_out // _ROWS), -(-self.n_in // _COLUMNS)  # units in a cell
        cells: Array = np.zeros((-(-self.n_out // tall), -(-self.n_in // wide)))
        np.add.at(cells, (keys // self.n_in // tall, keys % self.n_in // wide), 1.0)
        return cells

    def pixels(self) -> tuple[str, str] | None:
        """How many connections each pixel of an image has, before and after."""
        if self.shape is None:
            return None
        first, then = (
            self.fan_out(keys).reshape(self.shape).sum(0) for keys in (self.before, self.after)
        )
        low, high = min(first.min(), then.min()), max(first.max(), then.max(), 1)
        shares = ((counts - low) / max(1, high - low) for counts in (first, then))
        before, after = (_png(0.06 + 0.94 * share, np.zeros_like(share)) for share in shares)
        return before, after

    def fan_out(self, keys: Array) -> Array:
        """Connections of each input unit."""
        return np.bincount(keys % self.n_in, minlength=self.n_in).astype(float)


def _png(alpha: Array, new: Array) -> str:
    """A picture as an address of its own: the more alpha the denser, the newer the warmer."""
    from PIL import Image

    colors = np.array(KEPT) + (np.array(NEW) - np.array(KEPT)) * new[..., None]
    shade = 255 * np.clip(alpha, 0, 1)[..., None] ** 0.75
    image = Image.fromarray(np.concatenate([colors, shade], -1).round().astype(np.uint8), "RGBA")
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def layers(run: Run) -> list[Layer]:
    """The layers of a run whose connections are known at the start and now; none if files are damaged."""
    from safetensors import SafetensorError

    start, now = run.path / START, _newest(run.path)
    if now is None or not start.is_file():
        return []
    path, prefix = now
    try:
        return _read(start, path, prefix)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _read(start: Path, now: Path, prefix: str) -> list[Layer]:
    from safetensors import safe_open

    found = []
    with safe_open(start, "np") as first, safe_open(now, "np") as then:
        about = files.parse_json(first.metadata()["rewire"])
        held, shape = set(then.keys()), tuple(about["notes"].get("shape", ()))
        for index, (name, (n_out, n_in, *rest)) in enumerate(about["sizes"].items()):
            dot = f"{name}." if name else ""
            if f"{prefix}{dot}indices" not in held:
                continue
            before, after = (
                _keys(file.get_tensor(f"{p}{dot}indptr"), file.get_tensor(f"{p}{dot}indices"), n_in)
                for file, p in ((first, ""), (then, prefix))
            )
            seen = shape if index == 0 and len(shape) == 3 and math.prod(shape) == n_in else None
            groups = rest[0] if rest else 1  # old files do not say
            found.append(Layer(name, n_out, n_in, before, after, seen, groups))
    return found


def _keys(indptr: Array, indices: Array, n_in: int) -> Array:
    outputs = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    if len(outputs) != len(indices) or (
        len(indices) and not 0 <= indices.min() <= indices.max() < n_in
    ):
        raise ValueError("connections are damaged")
    return outputs.astype(np.int64) * n_in + indices


def _newest(path: Path) -> tuple[Path, str] | None:
    """The file with the model as it is now, and how names in it begin."""
    if (path / MODEL).is_file():
        return path / MODEL, ""
    saved = sorted((path / CHECKPOINTS).glob("step-*/tensors.safetensors"))
    return (saved[-1], "model.") if saved else None


def densities(run: Run, found: list[Layer]) -> dict[str, tuple[list[float], list[float]]]:
    """Steps and densities in percent of each layer; empty if connections do not move between layers."""
    moves: list[tuple[float, Mapping[str, Any]]] = [
        (float(entry["step"]), entry["layers"])
        for entry in run.rewirings
        if isinstance(entry.get("layers"), dict)
    ]
    if not moves:
        return {}
    return {
        layer.name: (
            [0.0, *(step for step, _ in moves)],
            [
                100 * count * layer.groups / (layer.n_out * layer.n_in)
                for count in (len(layer.before), *(_count(at, layer.name) for _, at in moves))
            ],
        )
        for layer in found
    }


def _count(counts: Mapping[str, Any], name: str) -> float:
    value = counts.get(name)
    return float(value) if isinstance(value, int) else math.nan
