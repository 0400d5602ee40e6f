"""Looking at all connections of a layer without holding one number for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rewire.communication import Alone
from rewire.connections import Connections, Domain
from rewire.ops import dense
from rewire.ops.sampling import select
from rewire.sampling import Batch

if TYPE_CHECKING:
    from rewire.methods.layer_view import LayerView


class DenseGradient:
    """The gradient at all connections of a layer, summed over backward passes.

    It is held as what these passes have seen, and evaluated in blocks of rows when it is asked for; or as
    itself, where that is smaller.

    Args:
        domain: the connections that the layer can have.
        like: of the type and on the device of the gradient.
    """

    def __init__(self, domain: Domain, like: Tensor) -> None:
        self.domain = domain
        self._like = like.new_empty(0)
        self._batches: list[tuple[Batch, tuple[int, int]]] = []
        self._total: Tensor | None = None

    def add(self, batch: Batch) -> None:
        """Add a backward pass."""
        self._batches.append((batch, _versions(batch)))
        held = sum(b.x.numel() + b.dy.numel() for b, _ in self._batches)
        if self._total is not None or held >= self.domain.size:
            total = batch.x.new_empty((self.domain.n_out, self.domain.width))
            for first, last in dense.blocks(*total.shape):
                total[first:last] = self.rows(first, last)
            self._total, self._batches = total, []

    def rows(self, first: int, last: int) -> Tensor:
        """That of output units ``first`` to ``last``, by column: (last - first, width)."""
        sums = None if self._total is None else self._total[first:last]
        for batch, versions in self._batches:
            if _versions(batch) != versions:
                raise RuntimeError(
                    "the input of a layer was changed in place between its backward pass and the "
                    "rewiring; change a copy instead"
                )
            part = dense.gradient_rows(batch.conv, batch.dy, batch.x, first, last, self.domain)
            sums = part if sums is None else sums + part
        return self._like.new_zeros((last - first, self.domain.width)) if sums is None else sums


def _versions(batch: Batch) -> tuple[int, int]:
    return batch.x._version, batch.dy._version


def _inactive(view: LayerView, first: int, last: int, keys: Tensor) -> Tensor:
    """Which of these keys, of output units ``first`` to ``last`` and columns, are not active."""
    active = view.active.packed()
    indptr = active.indptr[first : last + 1].long().cpu()
    inputs = active.indices[int(indptr[0]) : int(indptr[-1])].cpu()
    rows = torch.repeat_interleave(torch.arange(first, last), indptr.diff())
    taken = rows * active.n_in + inputs  # ascending
    if taken.numel() == 0:
        return torch.ones_like(keys, dtype=torch.bool)
    at = torch.searchsorted(taken, keys).clamp_(max=taken.numel() - 1)
    return taken[at] != keys


class Best:
    """The inactive connections with the largest magnitudes of some number, over several layers.

    Of equal ones the first are kept, in the order of layers and connections. At most some times ``count``
    are held at once.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []  # layer, key, number
        self._held = 0
        self._least = -1.0

    def add(self, view: LayerView, first: int, last: int, rows: Tensor) -> None:
        """Look at the numbers of output units ``first`` to ``last``, by column: (last - first, width)."""
        flat = rows.flatten()
        if self._least < 0:
            places = torch.arange(flat.numel(), device=flat.device)
        else:
            places = (flat.abs() > self._least).nonzero().flatten()
        numbers, keys = flat[places].cpu(), places.cpu() + first * view.layer.domain.width
        free = _inactive(view, first, last, keys)
        keys, numbers = keys[free], numbers[free]
        self._found.append((torch.full_like(keys, view.index), keys, numbers))
        self._held += keys.numel()
        if self._held > 2 * self.count + dense.BLOCK:
            self._reduce()

    def _reduce(self) -> tuple[Tensor, Tensor, Tensor]:
        if not self._found:
            none = torch.empty(0, dtype=torch.int64)
            return none, none, torch.empty(0)
        layers, keys, numbers = (torch.cat(part) for part in zip(*self._found, strict=True))
        kept = select(numbers.abs(), self.count)
        found = layers[kept], keys[kept], numbers[kept]
        self._found, self._held = [found], found[1].numel()
        if self._held == self.count and self.count:
            least = float(found[2].abs().min())
            self._least = least if least >= 0 else -1.0  # not a number: compare with none
        return found

    def of(self, views: list[LayerView]) -> Iterator[tuple[LayerView, Connections, Tensor]]:
        """Each layer with those that were found in it, and their numbers."""
        layers, keys, numbers = self._reduce()
        for view in views:
            mine = layers == view.index
            domain = view.layer.domain
            found = Connections.from_keys(keys[mine], domain.width, domain.n_out)
            yield view, domain.unpacked(found), numbers[mine]


def keep_best(views: Sequence[LayerView], count: int, group: Alone) -> None:
    """Let S be the ``count`` inactive connections of these layers with the largest gradients, averaged over
    processes; the dense gradient is evaluated in blocks."""
    best = Best(count)
    for view in views:
        assert view.dense is not None
        for first, last in dense.blocks(view.layer.n_out, view.layer.domain.width):
            (rows,) = group.sum(view.dense.rows(first, last))
            best.add(view, first, last, rows / group.world)
    for view, subset, gradient in best.of(list(views)):
        view.subset, view.gradient, view.considered = subset, gradient, view.free
