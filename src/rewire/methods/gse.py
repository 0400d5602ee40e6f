"""Guided stochastic exploration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from rewire.connections import Connections
from rewire.methods.arguments import Fraction, check_choice, check_number
from rewire.methods.beforehand import Beforehand
from rewire.methods.change import Replaced, lowest, replace, spare, subset_of, topk
from rewire.methods.layer_view import LayerView
from rewire.ops.sampling import Stream, magnitude
from rewire.sampling import DISTRIBUTIONS, Weights, ceil, draw

# Algorithm 1 ----------------------------------------------------------------------------------------


def sample_subset(A: Connections, f_g: Weights, gamma: float, stream: Stream) -> Connections | None:
    r"""S, of one layer: ``sample_connections(f, g, ceil(gamma * |A|)) \ A``.

    ``f_g`` are the weights of input and output units; with an infinite gamma S is everything (None).
    """
    return None if gamma == math.inf else draw(A, gamma, stream, f_g)


def grow_and_prune(
    A: Sequence[Connections],
    theta: Sequence[Tensor],
    S: Sequence[Connections],
    grad: Sequence[Tensor],
    alpha_t: float,
) -> list[Replaced]:
    r"""The connections that come after A: Algorithm 1 of the paper, once S and its gradient are known.

    A layer has one entry in each list, and the layers are compared with each other. The sizes of A and S
    are those of all of them together.

    Args:
        A, theta: the active connections and their weights.
        S, grad: the sampled inactive connections and the gradient there.
        alpha_t: the cosine decay, ``alpha / 2 * (1 + cos(pi * t / T_end))``.
    """
    size_A, size_S = sum(map(len, A)), sum(map(len, S))
    k = min(ceil(alpha_t * size_A), size_S, spare(map(len, A)))
    G = topk([magnitude(g) for g in grad], k)
    P = lowest([magnitude(w) for w in theta], k)  # topk(-|theta|, k), but a layer keeps its largest
    # A <- (A \ P) + G; theta follows, with zeros where a connection is grown
    return [replace(*layer) for layer in zip(A, P, S, G, strict=True)]


# The method -----------------------------------------------------------------------------------------


class GSE(Beforehand):
    r"""Guided stochastic exploration: grow the largest gradients of a random subset.

    Every ``every`` steps each layer draws ``ceil(subset * |A|)`` connections, input and output unit
    independently; S are the distinct inactive ones among them. The k connections of S with the largest
    gradient grow, with weight zero, and the k smallest weights are pruned,
    ``k = min(ceil(alpha_t * |A|), |S|)`` and ``alpha_t = fraction / 2 * (1 + cos(pi * t / until))``. See
    :func:`grow_and_prune`; scores of other kinds are for methods of your own, on :class:`Rewirer`.

    The gradient is that of the same training step: before the optimizer's update and before any
    clipping. The weights to prune are those after the update. GraBo and GraEst take their statistics
    from the first backward pass of that step.

    Args:
        model, optimizer, every, until, fraction, scope, seed: see :class:`Rewirer`.
        subset: draws per active connection (the paper's gamma), with replacement; ``math.inf`` makes S all
            inactive connections, which grows what RigL grows and takes as long.
        distribution: how units are drawn: ``"uniform"``, ``"grabo"`` (in proportion to an upper bound of
            the gradient) or ``"graest"`` (to an estimate of it); see :mod:`rewire.sampling`.
        growth_batches: 0 takes the gradient of the training step itself, as above. Otherwise the rewiring
            is done before the step, by the gradients of so many batches of its own: call :meth:`rewire`
            with their losses whenever ``waits`` is true.

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

    settings: ClassVar[tuple[str, ...]] = (
        *Beforehand.settings,
        *("subset", "distribution"),
    )

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int = 1000,
        until: int | None = None,
        fraction: Fraction = 0.2,
        subset: float = 1.0,
        distribution: str = "uniform",
        growth_batches: int = 0,
        scope: str = "global",
        seed: int = 0,
    ) -> None:
        if not check_number("subset", subset) > 0:
            raise ValueError(f"subset must be positive: draws per active connection, got {subset}")
        check_choice("distribution", distribution, tuple(DISTRIBUTIONS))
        self.subset, self.distribution = subset, distribution
        super().__init__(
            *(model, optimizer),
            every=every,
            until=until,
            fraction=fraction,
            growth_batches=growth_batches,
            scope=scope,
            seed=seed,
        )

    def __init_subclass__(cls, **more: Any) -> None:
        """Refuse scores of a subclass: they would be ignored."""
        super().__init_subclass__(**more)
        for rule in {"growth", "survival"} & vars(cls).keys():
            raise TypeError(
                f"{cls.__name__}.{rule}() would not be used: GSE compares magnitudes of gradients and of "
                "weights; derive from rewire.Rewirer to score otherwise"
            )

    def explore(self, view: LayerView) -> Connections | None:
        """Sample S, in the backward pass that then evaluates the gradient there."""
        assert view.batch is not None
        f_g = DISTRIBUTIONS[self.distribution](view.batch, view.stream)
        return sample_subset(view.active, f_g, self.subset, view.stream)

    def choose(self, views: Sequence[LayerView]) -> None:
        """Grow and prune, over the whole model or layer by layer."""
        for group in self.groups(views):
            A, S = [view.active for view in group], [subset_of(view) for view in group]
            theta = [view.weights for view in group]
            grad = [view.gradient for view in group if view.gradient is not None]
            for view, after in zip(
                group, grow_and_prune(A, theta, S, grad, self.alpha(self.t)), strict=True
            ):
                view.after, view.pruned, view.grown = after, after.pruned, after.grown
