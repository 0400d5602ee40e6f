"""How many connections each layer gets.

A layer is a bipartite graph of ``n_in`` by ``n_out`` units (a convolution is flattened); with groups,
several such graphs side by side. An assignment gives each layer a *share*, and its number of connections
is a level times that share:

- ``"erdos-renyi"``: ``n_in + n_out``, so that a unit has as many connections in any layer.
- ``"erk"``: ``C_in + C_out + kh + kw``, Erdos-Renyi for kernels (Evci et al., 2020); with groups, the
  sum of that over the groups, ``C_in + C_out + groups * (kh + kw)``.
- ``"uniform"``: ``n_in * n_out / groups``, the same density everywhere.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class LayerSize:
    """The size of a linear layer or, with a ``kernel``, of a convolution."""

    name: str
    in_channels: int
    out_channels: int
    kernel: tuple[int, ...] = (1, 1)
    groups: int = 1

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a size below 1, or groups that do not divide the channels."""
        if min(self.in_channels, self.out_channels, *self.kernel, self.groups) < 1:
            raise ValueError(f"every size of a layer must be at least 1, got {self}")
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise ValueError(f"groups must divide both numbers of channels, got {self}")

    @property
    def n_in(self) -> int:
        """Input units: channels times kernel positions."""
        return self.in_channels * math.prod(self.kernel)

    @property
    def n_out(self) -> int:
        """Output units."""
        return self.out_channels

    @property
    def weights(self) -> int:
        """Connections of the dense layer."""
        return self.n_in * self.n_out // self.groups


SHARES: dict[str, Callable[[LayerSize], int]] = {
    "erdos-renyi": lambda layer: layer.n_in + layer.n_out,
    "erk": lambda layer: layer.in_channels + layer.out_channels + layer.groups * sum(layer.kernel),
    "uniform": lambda layer: layer.weights,
}


def epsilon_for(layers: Sequence[LayerSize], density: float) -> float:
    """The Erdos-Renyi ``epsilon`` for which ``sum(epsilon*(n_in + n_out))`` meets ``density``.

    Clipping is not accounted for: where a layer would exceed dense, the model gets less.

    Example:
        >>> epsilon_for([LayerSize("linear", 300, 100)], density=0.1)
        7.5
    """
    _check_layers(layers)
    _check_density(density)
    return density * _total(layers) / sum(layer.n_in + layer.n_out for layer in layers)


def assign(
    layers: Sequence[LayerSize],
    *,
    sparsity: float | None = None,
    density: float | None = None,
    epsilon: float | None = None,
    connections: int | None = None,
    assignment: str = "erdos-renyi",
    exact: bool = False,
) -> list[int]:
    """The number of connections of each layer: at least 1, at most dense.

    Exactly one of the four targets must be given.

    ``sparsity``, ``density`` and ``epsilon`` round every layer up. With ``"erdos-renyi"`` layers
    that would exceed dense are clipped and, as in the authors' code, their excess is lost, so
    that the model can end up with less than was asked for; density 1 nevertheless means dense.
    With ``"erk"`` the other layers take up the excess, and with ``"uniform"`` there is none.

    ``connections`` is met exactly: the excess of dense layers goes to the others in proportion
    to their shares, and what rounding leaves over goes to the largest remainders. With ``exact`` so
    is the number of connections that ``sparsity`` or ``density`` means.

    Args:
        layers: the sizes of the layers.
        sparsity: fraction of the weights that are missing, in [0, 1).
        density: fraction of the weights that exist, in (0, 1].
        epsilon: connections per unit, above 0; for ``"erdos-renyi"`` alone.
        connections: number of connections of the whole model.
        assignment: ``"erdos-renyi"``, ``"erk"`` or ``"uniform"``.
        exact: let the model have just as many connections as asked for.

    Example:
        >>> layers = [LayerSize("conv", 3, 16, (3, 3)), LayerSize("linear", 784, 100)]
        >>> assign(layers, sparsity=0.9)
        [366, 7518]
        >>> assign(layers, density=0.1, assignment="uniform")
        [44, 7840]
        >>> assign(layers, connections=8000)
        [371, 7629]
    """
    _check_layers(layers)
    if assignment not in SHARES:
        raise ValueError(
            f"there is no assignment {assignment!r}; choose one of {', '.join(SHARES)}"
        )
    targets = {
        "sparsity": sparsity,
        "density": density,
        "epsilon": epsilon,
        "connections": connections,
    }
    given = [name for name, value in targets.items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"give exactly one of {', '.join(targets)}, got {' and '.join(given) or 'none'}"
        )
    shares = [SHARES[assignment](layer) for layer in layers]
    weights = [layer.weights for layer in layers]

    if connections is not None:
        if not isinstance(connections, int) or not len(layers) <= connections <= sum(weights):
            raise ValueError(
                f"connections must be an integer from {len(layers)} (one for each layer) to "
                f"{sum(weights)} (dense), got {connections!r}"
            )
        return _exact(shares, weights, connections)

    if epsilon is not None:
        if exact:
            raise ValueError("epsilon cannot be exact; give sparsity, density or connections")
        if assignment != "erdos-renyi":
            raise ValueError(
                f"epsilon belongs to the erdos-renyi assignment; "
                f"with {assignment!r} give sparsity, density or connections"
            )
        if not (math.isfinite(epsilon) and epsilon > 0):
            raise ValueError(f"epsilon must be a finite number above 0, got {epsilon!r}")
        return _rounded_up(shares, weights, epsilon)

    if sparsity is not None:
        if not 0 <= sparsity < 1:
            raise ValueError(f"sparsity must be at least 0 and below 1, got {sparsity!r}")
        density = 1 - sparsity
    assert density is not None
    _check_density(density)
    if density == 1:
        return weights
    if exact:
        return _exact(shares, weights, max(len(layers), held(sum(weights), density)))
    if assignment == "erdos-renyi":
        return _rounded_up(shares, weights, epsilon_for(layers, density))
    if assignment == "erk":
        level = _level(shares, weights, Fraction(density) * sum(weights))
        return _rounded_up(shares, weights, float(level))
    return _rounded_up(shares, weights, density)


def held(weights: int, density: float) -> int:
    """The number of connections at a density, rounded up; for methods that meet it exactly."""
    return math.ceil(density * weights * (1 - 1e-9))


def _rounded_up(shares: Sequence[int], weights: Sequence[int], level: float) -> list[int]:
    """``ceil(level*share)``, from 1 to dense, blind to float fuzz such as 1000.0000000001."""
    return [
        min(max(math.ceil(level * share * (1 - 1e-9)), 1), dense)
        for share, dense in zip(shares, weights, strict=True)
    ]


def _exact(shares: Sequence[int], weights: Sequence[int], total: int) -> list[int]:
    """Whole numbers near ``level*share``, from 1 to dense, that sum to ``total``."""
    level = _level(shares, weights, Fraction(total), least=1)
    quotas = [_clip(level * s, 1, w) for s, w in zip(shares, weights, strict=True)]
    counts = [math.floor(quota) for quota in quotas]
    # The sort is stable: of equal remainders the earlier layer comes first.
    by_remainder = sorted(range(len(quotas)), key=lambda i: counts[i] - quotas[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _level(
    shares: Sequence[int], weights: Sequence[int], total: Fraction, least: int = 0
) -> Fraction:
    """The level at which ``sum(clip(level*share, least, dense))`` is ``total``.

    That sum is linear between the levels at which some layer reaches a bound, so the search is
    for the two of those that enclose ``total``. Fractions make the answer exact.
    """

    def held(level: Fraction) -> Fraction:
        layers = zip(shares, weights, strict=True)
        return sum((_clip(level * s, least, w) for s, w in layers), Fraction(0))

    bounds = [(least, s) for s in shares] + list(zip(weights, shares, strict=True))
    knots = sorted({Fraction(bound, share) for bound, share in bounds})
    upper = bisect_left(knots, total, key=held)
    if upper == 0:
        return knots[0]
    low, high = knots[upper - 1], knots[upper]
    return low + (high - low) * (total - held(low)) / (held(high) - held(low))


def _clip(quota: Fraction, least: int, most: int) -> Fraction:
    return min(max(quota, Fraction(least)), Fraction(most))


def _total(layers: Sequence[LayerSize]) -> int:
    return sum(layer.weights for layer in layers)


def _check_layers(layers: Sequence[LayerSize]) -> None:
    if not layers:
        raise ValueError("there are no layers to assign connections to")


def _check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ValueError(f"density must be above 0 and at most 1, got {density!r}")
