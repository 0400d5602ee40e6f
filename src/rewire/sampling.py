"""Drawing the subset S of the inactive connections of a layer, in time linear in S, A and the units.

A connection is drawn by drawing its input unit from a distribution f and its output unit from a
distribution g, independently. With activations ``h`` (units x batch) and output gradients ``delta``:

- uniform: every connection is as likely as any other;
- GraBo: ``f ~ |h| 1``, ``g ~ |delta| 1``: an upper bound of the gradient's magnitude, exact at batch 1;
- GraEst: ``f ~ |h s|``, ``g ~ |delta s|`` with random signs ``s``: ``(h s)(delta s)^T`` estimates the
  gradient without bias.

The patches of a convolution are its batch. Reference: Heddes et al., *Always-Sparse Training by Growing
Connections with Guided Stochastic Exploration*.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rewire.communication import Alone
from rewire.connections import Connections
from rewire.ops import sampling
from rewire.ops.reference import Convolution
from rewire.ops.sampling import Rows, Stream

# What random words are for, so that no two uses share them.
DRAWS, SIGNS, CHOICE, SCORES, NORMALS, SHARES, PLACES = range(7)


class Batch(NamedTuple):
    """The input and output gradient of a layer in its backward pass, its sizes, and the group of
    processes that share the batch."""

    conv: Convolution
    x: Tensor
    dy: Tensor
    group: Alone = Alone()


Weights = tuple[Tensor, Tensor] | tuple[None, None]  # over input and output units, not normalised
Distribution = Callable[[Batch, Stream], Weights]


def uniform(batch: Batch, stream: Stream) -> Weights:
    """Every connection is as likely as any other."""
    return None, None


def grabo(batch: Batch, stream: Stream) -> Weights:
    """An upper bound of the gradient's magnitude: ``|h| 1`` and ``|delta| 1``."""
    batch.group.meet(stream.layer, batch.dy.shape[0])
    h, delta = batch.group.sum(*sampling.unit_sums(batch.conv, batch.dy, batch.x))
    return h, delta


def graest(batch: Batch, stream: Stream) -> Weights:
    """An estimate of the gradient's magnitude: ``|h s|`` and ``|delta s|``, with random signs s."""
    h, delta = signed_sums(batch, stream)
    return h.abs(), delta.abs()


def signed_sums(batch: Batch, stream: Stream) -> tuple[Tensor, Tensor]:
    """``h s`` and ``delta s``, whose outer product is the gradient in expectation over s. Over several
    processes the batch is their shares one after the other."""
    conv, x, dy, group = batch
    first = sum(group.meet(stream.layer, dy.shape[0])[: group.rank])
    named = stream._replace(purpose=SIGNS)
    s = sampling.signs(named, dy.shape[0], tuple(dy.shape[2:]), dy, first)
    h, delta = group.sum(*sampling.unit_sums(conv, dy, x, s))
    return h, delta


DISTRIBUTIONS: dict[str, Distribution] = {"uniform": uniform, "grabo": grabo, "graest": graest}


def rows(connections: Connections) -> Rows:
    """The connections as the operators take them."""
    return Rows(connections.indptr.cpu().contiguous(), connections.indices.cpu().contiguous())


def _connections(like: Connections, found: Rows) -> Connections:
    """What was found among the connections that ``like`` could have, by columns."""
    domain = like.domain
    return domain.unpacked(Connections(domain.width, like.n_out, *found))


def ceil(exact: float) -> int:
    """The next integer, not one more for a rounding error."""
    return math.ceil(exact - 1e-9 * max(1.0, abs(exact)))


def inactive(active: Connections) -> Connections:
    """All connections that are not active."""
    packed = active.packed()
    return _connections(active, sampling.complement(rows(packed), packed.n_in, packed.n_out))


def draw(
    active: Connections, factor: float, stream: Stream, weights: Weights = (None, None)
) -> Connections:
    """S: the distinct inactive connections among ``ceil(factor * |A|)`` draws, with replacement.

    In a grouped layer both distributions hold given that the two units belong to the same group.

    Args:
        active: the connections A of a layer.
        factor: draws per active connection (the paper's gamma).
        stream: where the randomness comes from.
        weights: over input and output units, in proportion to their probabilities; None is uniform, and
            so are weights that are all zero or not finite.

    Example:
        >>> a = Connections.random(1000, 1000, 5000)
        >>> s = draw(a, 1.0, Stream(seed=0, purpose=DRAWS, step=0, layer=0))
        >>> 4950 < len(s) <= 5000 and not set(s.keys().tolist()) & set(a.keys().tolist())
        True
    """
    packed, groups = active.packed(), active.groups
    if groups == 1:
        inputs, outputs = sampling.alias_tables(*weights)
    else:
        f, g = weights
        inputs, outputs = sampling.group_tables(f, g, active.n_out, groups, active.taps)
    units = (packed.n_in, packed.n_out, rows(packed))
    draws = ceil(factor * len(active))
    found = sampling.draw(stream, draws, *units, inputs, outputs, groups)
    return _connections(active, found)


def choose(active: Connections, count: int, stream: Stream, purpose: int = CHOICE) -> Connections:
    """``count`` inactive connections (or all there are), every such set as likely as any other.

    More are drawn than are wanted; ``purpose`` is of the words that say which of them are kept.
    """
    total, free = active.domain.size, active.domain.size - len(active)
    if count >= free:
        return inactive(active)
    crowding = (len(active) + count) / max(1, total)
    if crowding > 0.5:
        found = inactive(active)
    else:
        draws = int(1.1 * count / (1 - crowding)) + 16
        packed = active.packed()
        units = (packed.n_in, packed.n_out, rows(packed))
        while True:  # more draws hold the former ones
            found = _connections(active, sampling.draw(stream, draws, *units))
            if len(found) >= count:
                break
            draws *= 2
    kept = sampling.select(uniforms(stream, len(found), purpose), count)
    return found.where(kept)


def uniforms(stream: Stream, count: int, purpose: int = SCORES) -> Tensor:
    """Random numbers in [0, 1), float64."""
    words = stream._replace(purpose=purpose).words(count)
    return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def normals(stream: Stream, count: int) -> Tensor:
    """Random numbers with mean 0 and deviation 1, float64."""
    return torch.from_numpy(stream._replace(purpose=NORMALS).generator().standard_normal(count))
