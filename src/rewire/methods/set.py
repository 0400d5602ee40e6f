"""Sparse evolutionary training."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from rewire.connections import Connections
from rewire.methods.arguments import Fraction
from rewire.methods.base import Rewirer
from rewire.methods.site import Site


class SET(Rewirer):
    """Sparse evolutionary training: the smallest weights go, and as many connections grow at random.

    The weights of all layers are compared, and layers grow in proportion to their connections; with
    ``scope="layer"``, as in the original, each layer keeps its number of connections.

    Args:
        model, optimizer, every, until, fraction, scope, seed: see :class:`Rewirer`.

    Reference: Mocanu et al., *Scalable training of artificial neural networks with adaptive sparse
    connectivity inspired by network science*, 2018.
    """

    guided = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int = 1000,
        until: int,
        fraction: Fraction = 0.2,
        scope: str = "global",
        seed: int = 0,
    ) -> None:
        super().__init__(
            model, optimizer, every=every, until=until, fraction=fraction, scope=scope, seed=seed
        )

    def explore(self, site: Site) -> Connections:
        """As many inactive connections as are to grow, at random."""
        return site.choose(site.quota)

    def growth(self, site: Site) -> Tensor:
        """Any of them."""
        assert site.subset is not None
        return site.random(len(site.subset))
