"""The rigged lottery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from rewire import sampling
from rewire.communication import Alone
from rewire.methods.arguments import Fraction
from rewire.methods.base import Rewirer
from rewire.methods.site import Site
from rewire.methods.streaming import Best, DenseGradient
from rewire.ops import dense
from rewire.sampling import Batch


class RigL(Rewirer):
    """The rigged lottery: the smallest weights go, the largest gradients of all connections grow.

    The dense gradient of a layer is evaluated in blocks of rows, of which the k largest are kept, over the
    whole model (or layer by layer): time is dense at a rewiring, memory is not. Until the rewiring each
    layer's input and output gradient are held, or its dense gradient where that is smaller.

    Args:
        model, optimizer, every, until, fraction, scope, seed: see :class:`Rewirer`; nothing is random.

    Reference: Evci et al., *Rigging the lottery: making all tickets winners*, 2020.
    """

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
        self._dense: dict[str, DenseGradient] = {}
        super().__init__(
            model, optimizer, every=every, until=until, fraction=fraction, scope=scope, seed=seed
        )

    def observe(self, site: Site, batch: Batch) -> None:
        """Add to the dense gradient; after a resume from within a step, to that of the best alone."""
        if site.subset is not None:
            site.add_gradient(batch)
            return
        self._dense.setdefault(site.name, _dense_gradient(site)).add(batch)

    def has_seen(self, site: Site) -> bool:
        """Whether a layer had a gradient."""
        return site.gradient is not None or site.name in self._dense

    def average(self, sites: Sequence[Site]) -> None:
        """Which layers had a gradient in any process; the gradients are averaged block by block."""
        super().average(sites)
        seen = self._group.gather([site.name in self._dense for site in sites])
        for site, ranks in zip(sites, zip(*seen, strict=True), strict=True):
            if any(ranks):
                self._dense.setdefault(site.name, _dense_gradient(site))

    def choose(self, sites: Sequence[Site]) -> None:
        """S is the k largest gradients of all inactive connections: all of it grows."""
        self._find(sites, self.t, self._group)
        super().choose(sites)
        self._dense.clear()

    def _find(self, sites: Sequence[Site], t: int, processes: Alone) -> None:
        for group in self.groups([site for site in sites if site.name in self._dense]):
            active = sum(site.layer.count for site in group)
            best = Best(sampling.ceil(self.alpha(t) * active))
            for site in group:
                gradient = self._dense[site.name]
                for first, last in dense.blocks(site.layer.n_out, site.layer.n_in):
                    (rows,) = processes.sum(gradient.rows(first, last))
                    best.add(site, first, last, rows / processes.world)
            for site, subset, numbers in best.of(list(group)):
                site.subset, site.gradient, site.considered = subset, numbers, site.free

    @property
    def gradients(self) -> dict[str, Any]:
        """The gradients that would grow, as far as they are summed up."""
        with self._settled():
            return super().gradients

    @property
    def subsets(self) -> dict[str, Any]:
        """The connections that would grow."""
        with self._settled():
            return super().subsets

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`Rewirer.state_dict`; from within a step, with the best gradients so far."""
        with self._settled():
            return super().state_dict()

    def load_state_dict(self, state: Any) -> None:
        """As :meth:`Rewirer.load_state_dict`."""
        self._dense.clear()
        super().load_state_dict(state)

    def _settled(self) -> _Settled:
        return _Settled(self)


def _dense_gradient(site: Site) -> DenseGradient:
    return DenseGradient(site.layer.n_in, site.layer.n_out, site.weights)


class _Settled:
    """For a while, S is what would be chosen now."""

    def __init__(self, rewirer: RigL) -> None:
        self._rewirer = rewirer
        self._sites = [site for site in rewirer._sites if site.name in rewirer._dense]

    def __enter__(self) -> None:
        self._rewirer._find(self._sites, self._rewirer.t + 1, Alone())

    def __exit__(self, *error: object) -> None:
        for site in self._sites:
            site.subset = site.gradient = site.considered = None
