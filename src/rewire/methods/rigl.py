"""The rigged lottery."""

from __future__ import annotations

from rewire.methods.beforehand import Beforehand
from rewire.methods.layer_view import LayerView


class RigL(Beforehand):
    """The rigged lottery: the smallest weights go, the largest gradients of all connections grow.

    The template's rules with S as everything. The dense gradient of a layer is evaluated in blocks of
    rows, of which the k largest are kept, over the whole model (or layer by layer): time is dense at a
    rewiring, memory is not. Until the rewiring each layer's input and output gradient are held, or its
    dense gradient where that is smaller.

    Args:
        model, optimizer, every, until, fraction, scope, seed: see :class:`Rewirer`; nothing is random.
        growth_batches: as for :class:`rewire.GSE`.

    Reference: Evci et al., *Rigging the lottery: making all tickets winners*, 2020.
    """

    def explore(self, view: LayerView) -> None:
        """All inactive connections."""
