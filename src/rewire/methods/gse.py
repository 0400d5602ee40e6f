"""Guided stochastic exploration."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from rewire.connections import Connections
from rewire.methods.arguments import Fraction, check_choice, check_number
from rewire.methods.base import Rewirer
from rewire.methods.site import Site
from rewire.sampling import DISTRIBUTIONS


class GSE(Rewirer):
    r"""Guided stochastic exploration: grow the largest gradients of a random subset.

    Every ``every`` steps each layer draws ``ceil(subset * |A|)`` connections, input and output unit
    independently; S are the distinct inactive ones among them, or all inactive connections where these
    are no more than the draws. The k connections of S with the largest gradient grow, with weight zero,
    and the k smallest weights are pruned, ``k = min(ceil(alpha_t * |A|), |S|)`` and
    ``alpha_t = fraction / 2 * (1 + cos(pi * t / until))``.

    The gradient is that of the same training step: before the optimizer's update and before any
    clipping. The weights to prune are those after the update. GraBo and GraEst take their statistics
    from the first backward pass of that step.

    Args:
        model, optimizer, every, until, fraction, scope, seed: see :class:`Rewirer`.
        subset: draws per active connection (the paper's gamma).
        distribution: how units are drawn: ``"uniform"``, ``"grabo"`` (in proportion to an upper bound of
            the gradient) or ``"graest"`` (to an estimate of it); see :mod:`rewire.sampling`.

    Example:
        >>> import torch, rewire
        >>> model = rewire.sparsify(nn.Sequential(nn.Linear(20, 50), nn.Linear(50, 5)), sparsity=0.8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> rewirer = rewire.GSE(model, optimizer, every=2, until=100)
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(8, 20)).square().mean().backward()
        ...     optimizer.step()
        ...     rewiring = rewirer.step()
        >>> rewiring.grown, rewiring.pruned, rewiring.active
        (50, 50, 250)

    Reference: Heddes et al., *Always-Sparse Training by Growing Connections with Guided Stochastic
    Exploration*.
    """

    settings: ClassVar[tuple[str, ...]] = (*Rewirer.settings, "subset", "distribution")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int = 1000,
        until: int,
        fraction: Fraction = 0.2,
        subset: float = 1.0,
        distribution: str = "uniform",
        scope: str = "global",
        seed: int = 0,
    ) -> None:
        if not check_number("subset", subset) > 0:
            raise ValueError(f"subset must be positive: draws per active connection, got {subset}")
        check_choice("distribution", distribution, tuple(DISTRIBUTIONS))
        self.subset, self.distribution = subset, distribution
        super().__init__(
            model, optimizer, every=every, until=until, fraction=fraction, scope=scope, seed=seed
        )

    def explore(self, site: Site) -> Connections:
        """The inactive connections among ``ceil(subset * |A|)`` draws."""
        assert site.batch is not None
        weights = DISTRIBUTIONS[self.distribution](site.batch, site.stream)
        return site.draw(self.subset, weights)
