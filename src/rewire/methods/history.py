"""What happened at each rewiring, for logs and plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from rewire.methods.arguments import copy_of


@dataclass(frozen=True, slots=True)
class LayerRewiring:
    """What a rewiring did to one layer.

    Attributes:
        active: connections afterwards.
        grown, pruned: connections that came and went.
        subset: the size of S, the inactive connections that were considered.
        ever: how many different connections have ever been active; exact unless the layer is both
            large and very sparse, where it is an estimate within a few percent.
        possible: connections of the dense layer.
    """

    active: int
    grown: int
    pruned: int
    subset: int
    ever: int
    possible: int

    @property
    def turnover(self) -> float:
        """Share of the connections before that is gone."""
        return self.pruned / max(1, self.active - self.grown + self.pruned)

    @property
    def explored(self) -> float:
        """Share of all possible connections that have ever been active."""
        return self.ever / max(1, self.possible)


@dataclass(frozen=True, slots=True)
class Rewiring(LayerRewiring):
    """What a rewiring did to the model: the totals, and each layer's part.

    Attributes:
        step: after how many training steps.
        fraction: share of the connections that were to be replaced (the paper's alpha_t).
        layers: by name; those that took no part, too.
    """

    step: int
    fraction: float
    layers: Mapping[str, LayerRewiring]


_COUNTS = ("active", "grown", "pruned", "subset", "ever", "possible")


def total(step: int, fraction: float, layers: Mapping[str, LayerRewiring]) -> Rewiring:
    """The layers' parts, added up."""
    sums = {name: sum(getattr(layer, name) for layer in layers.values()) for name in _COUNTS}
    return Rewiring(**sums, step=step, fraction=fraction, layers=layers)


class History(Sequence[Rewiring]):
    """All rewirings so far, first to last, kept as plain numbers.

    Example:
        >>> [(r.step, r.turnover) for r in rewirer.history]  # doctest: +SKIP
        [(1000, 0.199), (2000, 0.197)]
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._rows: list[tuple[int, float, torch.Tensor]] = []

    def append(self, rewiring: Rewiring) -> None:
        """Append a rewiring."""
        counts = [[getattr(rewiring.layers[n], c) for c in _COUNTS] for n in self._names]
        row = torch.tensor(counts, dtype=torch.int64).view(len(self._names), len(_COUNTS))
        self._rows.append((rewiring.step, rewiring.fraction, row))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Rewiring: ...
    @overload
    def __getitem__(self, index: slice) -> list[Rewiring]: ...
    def __getitem__(self, index: int | slice) -> Rewiring | list[Rewiring]:
        if isinstance(index, slice):
            return [self._rewiring(row) for row in self._rows[index]]
        return self._rewiring(self._rows[index])

    def __iter__(self) -> Iterator[Rewiring]:
        return map(self._rewiring, self._rows)

    def __repr__(self) -> str:
        return f"History({len(self)} rewirings of {len(self._names)} layers)"

    def _rewiring(self, row: tuple[int, float, torch.Tensor]) -> Rewiring:
        step, fraction, counts = row
        parts = (LayerRewiring(*layer) for layer in counts.tolist())
        return total(step, fraction, dict(zip(self._names, parts, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """The history as lists and one tensor."""
        empty = torch.empty((0, len(self._names), len(_COUNTS)), dtype=torch.int64)
        return {
            "steps": [step for step, _, _ in self._rows],
            "fractions": [fraction for _, fraction, _ in self._rows],
            "counts": torch.stack([c for _, _, c in self._rows]) if self._rows else empty,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.put(self.checked(state))

    def checked(self, state: Mapping[str, Any]) -> list[tuple[int, float, torch.Tensor]]:
        """Rows for :meth:`put`; raises a ValueError unless they are those of as many layers."""
        steps, fractions = state["steps"], state["fractions"]
        counts = copy_of("counts", state["counts"])
        shape = (len(steps), len(self._names), len(_COUNTS))
        if (
            tuple(counts.shape) != shape
            or counts.dtype != torch.int64
            or len(fractions) != shape[0]
        ):
            raise ValueError(
                f"the history has {len(steps)} steps, {len(fractions)} fractions and counts of shape "
                f"{tuple(counts.shape)} ({counts.dtype}), expected counts of shape {shape} (torch.int64)"
            )
        return list(zip(map(int, steps), map(float, fractions), counts, strict=True))

    def put(self, rows: list[tuple[int, float, torch.Tensor]]) -> None:
        """Store what :meth:`checked` returned."""
        self._rows = rows
