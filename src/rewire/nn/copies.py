"""Deep copies of sparse layers, and which of them are averages of a model that trains.

An average holds values of the model's connections, in the same order. After a rewiring it would mix
values of different connections, and nobody would notice: ``torch.optim.swa_utils.AveragedModel`` and its
like pair parameters by place. So layers note their deep copies, and a rewirer looks at them first.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from rewire.nn.sparse import SparseLayer

_REMEDY = (
    "average with rewire.EMA, or call rewirer.follow(averaged) once, so that it follows rewirings"
)


class _Note:
    """What a copy was when it was made, and how often it was seen to have changed since."""

    def __init__(self, original: SparseLayer, copy: SparseLayer) -> None:
        self.original = weakref.ref(original)
        self.indices = weakref.ref(copy.indices)
        self.version = _version(copy.indices)
        self.total = _total(copy.values)
        self.changes = 0

    def observe(self, copy: SparseLayer) -> None:
        """Count it if the values are not those of the last time."""
        total = _total(copy.values)
        same = torch.equal(total.cpu(), self.total.cpu()) or bool(total.isnan())
        self.total, self.changes = total, self.changes + (not same)


_notes: weakref.WeakKeyDictionary[SparseLayer, _Note] = weakref.WeakKeyDictionary()


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


@torch.no_grad()
def _total(values: Tensor) -> Tensor:
    """Other values have another one; what is written through ``.data`` has no version."""
    return values.sum(dtype=torch.float64)


def note(original: SparseLayer, copy: SparseLayer) -> None:
    """Remember that a sparse layer is a deep copy of another."""
    _notes[copy] = _Note(original, copy)


def release(layer: nn.Module) -> None:
    """Forget that a layer is a copy: it follows, or has a rewirer of its own."""
    _notes.pop(layer, None)  # type: ignore[call-overload]


def _copies(layers: Mapping[str, nn.Module]) -> Iterator[tuple[str, SparseLayer, _Note]]:
    """The living deep copies of these layers that have the connections they were made with."""
    names = {id(layer): name for name, layer in layers.items()}
    for copy, note in list(_notes.items()):
        original = note.original()
        if original is not None and id(original) in names and note.indices() is copy.indices:
            yield names[id(original)], copy, note


def observe(layers: Mapping[str, nn.Module]) -> None:
    """Look at the deep copies of layers that will be rewired a step later."""
    for _, copy, note in _copies(layers):
        note.observe(copy)


def check(layers: Mapping[str, nn.Module]) -> None:
    """Look at the deep copies of layers that are about to be rewired.

    Raises:
        RuntimeError: if somebody writes to the connections of a copy in place. Those who average models by
            place do so, and nobody else: layers replace these tensors as a whole.

    Warns:
        UserWarning: if the weights of a copy change again and again while it has no gradient: it may be
            an average, or trained by itself.
    """
    for name, copy, note in _copies(layers):
        if note.version >= 0 and _version(copy.indices) != note.version:
            raise RuntimeError(
                f"a deep copy of {name} is averaged with it by place, as torch's AveragedModel and timm's "
                "ModelEma do: after a rewiring that would mix weights of different connections; "
                f"{_REMEDY}; if the copy is not updated any more, keep copy.deepcopy() of it instead"
            )
        note.observe(copy)
        if note.changes > 1 and copy.values.grad is None:
            release(copy)  # once is enough
            warnings.warn(
                f"the weights of a deep copy of {name} keep changing. If it is an average of the model's "
                "weights by place, it mixes weights of different connections from this rewiring on: "
                f"{_REMEDY}. If it is trained by itself, all is well",
                stacklevel=4,
            )
