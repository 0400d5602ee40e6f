"""Drawing, choosing and replacing connections, and unit statistics: kernels with their reference twins.

Random words are those of Philox4x64-10, keyed by what they are for, so that nothing depends on threads
or on the order of calls. Draw i of a stream takes words 2i (input unit) and 2i + 1 (output unit). Where
there is no compiled kernel, numpy and torch compute the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rewire.engine.graph import numbers
from rewire.ops import layout, native, products, reference
from rewire.ops.reference import Convolution

if TYPE_CHECKING:
    from rewire import _native

_LIMIT = 2**31 - 1
_PRIME = 2**61 - 1
_WORD = 2**64 - 1


class Rows(NamedTuple):
    """Connections by output unit, int32 on the CPU: the inputs of each, ascending."""

    indptr: Tensor
    indices: Tensor


class Stream(NamedTuple):
    """The name of a stream of random words."""

    seed: int
    purpose: int
    step: int
    layer: int

    def words(self, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """The first ``count`` words."""
        return np.asarray(self._philox().random_raw(count))

    def generator(self) -> np.random.Generator:
        """A numpy generator on this stream."""
        return np.random.Generator(self._philox())

    def _philox(self) -> np.random.Philox:
        key = [self.seed & _WORD, self.purpose]
        return np.random.Philox(
            key=np.array(key, dtype=np.uint64),
            counter=np.array([0, self.layer, self.step, 0], dtype=np.uint64),
        )

    def _native(self) -> _native.Stream:
        return native.extension.Stream(self.seed & _WORD, self.purpose, self.step, self.layer)


class Alias(NamedTuple):
    """Vose's table: unit j where a 32-bit fraction is below ``threshold[j]``, else ``alias[j]``.

    Both are views of ``columns``, where a draw finds all it needs in one place of memory.
    """

    columns: Tensor  # int32, (units, 2): threshold, alias

    @property
    def threshold(self) -> Tensor:
        """uint32"""
        return self.columns.view(torch.uint32)[:, 0]

    @property
    def alias(self) -> Tensor:
        """int32"""
        return self.columns[:, 1]


def alias_tables(*weights: Tensor | None) -> list[Alias | None]:
    """The tables of the distributions in proportion to each of ``weights``, in O(n).

    None, the uniform distribution, where there are no weights or they define no other: they are all
    zero, or their sum is not finite.
    """
    given = [None if w is None else w.detach().to("cpu", torch.float64) for w in weights]
    tables: list[Alias | None] = [None] * len(given)
    made: list[tuple[Tensor, Alias]] = []
    for i, w in enumerate(given):
        if w is not None and _defines(w):
            tables[i] = table = Alias(native.integers(2 * w.numel()).view(-1, 2))
            made.append((w.contiguous(), table))
    if not native.available():
        for w, table in made:
            _vose(w.numpy(), table.threshold.numpy(), table.alias.numpy())
    elif made:
        native.extension.alias(
            weights=[w for w, _ in made],
            tables=[table.columns for _, table in made],
            threads=native.threads(),
        )
    return tables


def group_tables(
    inputs: Tensor | None, outputs: Tensor | None, n_out: int, groups: int, taps: int
) -> list[Alias | None]:
    """The tables of the same distributions, given that both units belong to the same group.

    The first is one table for each group, over its columns, one after the other; the second is in
    proportion to the weight of an output unit times that of all inputs of its group. Weights that define
    no distribution count as equal, as in :func:`alias_tables`.
    """
    f, g = (
        w.detach().to("cpu", torch.float64) if w is not None and _defines(w) else None
        for w in (inputs, outputs)
    )
    if f is None:
        return [None, *alias_tables(g)]
    by_group = f.view(taps, groups, -1).transpose(0, 1).flatten(1)
    g = torch.ones(n_out, dtype=torch.float64) if g is None else g
    (of_outputs,) = alias_tables((g.view(groups, -1) * by_group.sum(1, keepdim=True)).flatten())
    if of_outputs is None:
        return [None, None]
    ones = torch.ones_like(by_group[0])  # for groups that are never drawn
    parts = alias_tables(*(part if _defines(part) else ones for part in by_group))
    return [Alias(torch.cat([part.columns for part in parts if part is not None])), of_outputs]


def _defines(weights: Tensor) -> bool:
    """Whether they define a distribution; raises if one is negative."""
    weights = weights.detach().to("cpu", torch.float64)
    if bool((weights < 0).any()):
        raise ValueError(f"weights to draw with must be at least 0, got {float(weights.min())}")
    return 0 < float(weights.sum()) < math.inf


def _vose(weights: Any, threshold: Any, alias: Any) -> None:
    n = len(weights)
    share = (weights / np.cumsum(weights)[-1] * float(n)).tolist()
    small = [i for i in range(n) if share[i] < 1]
    large = [i for i in range(n) if not share[i] < 1]
    while small and large:
        s, most = small.pop(), large[-1]
        threshold[s], alias[s] = int(share[s] * 2.0**32), most
        share[most] = share[most] - (1 - share[s])
        if share[most] < 1:
            small.append(large.pop())
    for i in (*small, *large):  # what rounding has left over
        threshold[i], alias[i] = 0, i if weights[i] > 0 else int(np.argmax(weights))


def draw(
    stream: Stream,
    draws: int,
    n_in: int,
    n_out: int,
    active: Rows,
    inputs: Alias | None = None,
    outputs: Alias | None = None,
    groups: int = 1,
) -> Rows:
    """The distinct connections among so many independent draws that are not ``active``.

    Args:
        stream: where the randomness comes from.
        draws: how many connections are drawn.
        n_in, n_out: units on each side.
        active: the connections to leave out.
        inputs, outputs: distributions over the units of each side; uniform if None.
        groups: there are so many runs of output units, each with a table of ``inputs`` of its own.
    """
    if draws > _LIMIT:
        raise ValueError(f"at most {_LIMIT:,} connections are drawn at once, got {draws:,}")
    if not native.available():
        return _draw(stream, draws, n_in, n_out, active, inputs, outputs, groups)
    rows = Rows(native.integers(n_out + 1), native.integers(draws))
    kept = native.extension.draw(
        stream=stream._native(),
        draws=draws,
        n_in=n_in,
        n_out=n_out,
        inputs=None if inputs is None else inputs.columns,
        outputs=None if outputs is None else outputs.columns,
        groups=groups,
        indptr=active.indptr,
        indices=active.indices,
        to_indptr=rows.indptr,
        to_indices=rows.indices,
        threads=native.threads(),
    )
    few = kept < draws - draws // 8  # too few to hold on to the memory of all
    return Rows(rows.indptr, rows.indices[:kept].clone() if few else rows.indices[:kept])


def _draw(
    stream: Stream,
    draws: int,
    n_in: int,
    n_out: int,
    active: Rows,
    inputs: Alias | None,
    outputs: Alias | None,
    groups: int,
) -> Rows:
    words = stream.words(2 * draws)
    of_output = _pick(words[1::2], n_out, outputs)
    tables = of_output // max(1, n_out // groups) * n_in
    keys = of_output * n_in + _pick(words[::2], n_in, inputs, tables)
    keys = np.setdiff1d(keys, _keys(active, n_in).numpy())  # sorted and distinct
    return _rows(torch.from_numpy(keys), n_in, n_out)


def _pick(words: Any, n: int, table: Alias | None, first: Any = 0) -> Any:
    """The high word of ``word * n`` is a column, the upper half of the low one a fraction of it; the table
    is what begins at ``first``."""
    size, half = np.uint64(n), np.uint64(32)
    high, low = (words >> half) * size, (words & np.uint64(2**32 - 1)) * size
    columns = ((high + (low >> half)) >> half).astype(np.int64)
    if table is None:
        return columns
    fraction = ((high << half) + low) >> half
    at = first + columns
    taken = fraction < table.threshold.numpy()[at]
    return np.where(taken, columns, table.alias.numpy()[at].astype(np.int64))


def _keys(rows: Rows, n_in: int) -> Tensor:
    return reference.rows_of(rows.indptr) * n_in + rows.indices


def _rows(keys: Tensor, n_in: int, n_out: int) -> Rows:
    """From ascending keys."""
    outputs = torch.div(keys, max(n_in, 1), rounding_mode="floor")
    indptr = torch.zeros(n_out + 1, dtype=torch.int32)
    indptr[1:] = torch.bincount(outputs, minlength=n_out).cumsum(0)
    return Rows(indptr, (keys - outputs * n_in).int())


def complement(active: Rows, n_in: int, n_out: int) -> Rows:
    """All connections that are not ``active``, in O(n_in * n_out): for layers that are mostly full."""
    count = n_in * n_out - active.indices.numel()
    if count > _LIMIT:
        raise ValueError(
            f"{count:,} inactive connections are too many to list; ask for a smaller subset"
        )
    if native.available():
        rows = Rows(native.integers(n_out + 1), native.integers(count))
        native.extension.complement(
            indptr=active.indptr,
            indices=active.indices,
            n_in=n_in,
            n_out=n_out,
            to_indptr=rows.indptr,
            to_indices=rows.indices,
            threads=native.threads(),
        )
        return rows
    inactive = torch.ones(n_in * n_out, dtype=torch.bool)
    inactive[_keys(active, n_in)] = False
    return _rows(inactive.nonzero().flatten(), n_in, n_out)


def replace(
    active: Rows, pruned: Tensor, subset: Rows, grown: Tensor, n_in: int
) -> tuple[Rows, Tensor]:
    """``active`` without ``pruned`` and with the ``grown`` of ``subset`` (both boolean masks).

    Returns:
        The connections, and for each where it stood among ``active``, -1 if it is grown (int32).
    """
    n_out = active.indptr.numel() - 1
    pruned, grown = pruned.contiguous(), grown.contiguous()
    if native.available():
        count = pruned.numel() - number(pruned) + number(grown)
        rows = Rows(native.integers(n_out + 1), native.integers(count))
        source = native.integers(count)
        native.extension.replace(
            indptr=active.indptr,
            indices=active.indices,
            pruned=pruned,
            subset_indptr=subset.indptr,
            subset_indices=subset.indices,
            grown=grown,
            to_indptr=rows.indptr,
            to_indices=rows.indices,
            source=source,
            threads=native.threads(),
        )
        return rows, source
    kept = (~pruned).nonzero().flatten()
    new = _keys(subset, n_in)[grown]
    keys = torch.cat([_keys(active, n_in)[kept], new])
    keys, order = keys.sort()
    source = torch.cat([kept, torch.full_like(new, -1)])[order].int()
    return _rows(keys, n_in, n_out), source


def number(mask: Tensor) -> int:
    """How many elements are true. (A sum would widen each of them to eight bytes first.)"""
    return int(mask.count_nonzero())


def _kernels(x: Tensor) -> _native._Kernels | None:
    """The kernels for scores and sums, which are never of half precision."""
    return None if x.dtype == torch.bfloat16 else native.kernels(x)


def magnitude(x: Tensor) -> Tensor:
    """``|x|``, in memory that an earlier result has left."""
    if _kernels(x) is None or not x.is_contiguous():
        return x.abs()
    return torch.abs(x, out=native.empty(tuple(x.shape), x.stride(), x.dtype))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """A copy of vectors, one after the other, in such memory too."""
    if _kernels(parts[0]) is None or any(part.dtype != parts[0].dtype for part in parts):
        return torch.cat(list(parts))
    size = sum(part.numel() for part in parts)
    return torch.cat(list(parts), out=native.empty((size,), (1,), parts[0].dtype))


def follow(x: Tensor, source: Tensor, fresh: float = 0.0) -> Tensor:
    """``x`` at ``source`` (int32), ``fresh`` where that is -1: one element per new connection."""
    kernels, n = _kernels(x), source.numel()
    if kernels is not None and x.is_contiguous():
        out = native.empty((n,), (1,), x.dtype)
        kernels.follow(x=x, source=source, fresh=fresh, out=out, threads=native.threads())
        return out
    if x.numel() == 0:
        return x.new_full((n,), fresh)
    source = source.to(x.device)
    return x.index_select(0, source.clamp(min=0)).masked_fill_(source < 0, fresh)


def select(scores: Tensor, count: int, largest: bool = True) -> Tensor:
    """A mask of the ``count`` largest (or smallest) scores, in linear time.

    Equal scores are taken in the order of their place; NaN is below everything.
    """
    scores = scores.detach().contiguous()
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()
    chosen = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    n = scores.numel()
    if count <= 0 or count >= n:
        return chosen.fill_(count > 0)
    kernels = native.kernels(scores)
    if kernels is not None:
        kernels.select(
            scores=scores, count=count, largest=largest, chosen=chosen, threads=native.threads()
        )
        return chosen
    scores = torch.nan_to_num(scores, float("-inf"), float("inf"), float("-inf"))
    scores = -scores if largest else scores
    limit = scores.kthvalue(count).values
    chosen = scores < limit
    ties = (scores == limit).nonzero().flatten()
    chosen[ties[: count - int(chosen.sum())]] = True
    return chosen


def signs(
    stream: Stream, samples: int, positions: tuple[int, ...], like: Tensor, first: int = 0
) -> Tensor:
    """Random signs, (samples, 1, *positions), batch-last, of the type and device of ``like``.

    They are 4-wise independent, and depend on the number of a sample in the whole batch, which is
    ``first`` for the first of these.
    """
    count = int(np.prod(positions, dtype=np.int64))
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    out = torch.empty((count, samples), dtype=dtype)
    if native.available() and out.numel():
        kernels = native.kernels(out)
        assert kernels is not None
        kernels.signs(
            stream=stream._native(),
            first=first,
            samples=samples,
            positions=count,
            out=out,
            threads=native.threads(),
        )
    else:
        coefficients = [int(word) % _PRIME for word in stream.words(4)]
        samples_, positions_ = np.arange(first, first + samples), np.arange(count)
        at = (samples_[None].astype(object) * count + positions_[:, None]) % _PRIME
        value = np.full(at.shape, coefficients[3], dtype=object)
        for coefficient in coefficients[2::-1]:
            value = (value * at + coefficient) % _PRIME
        out = torch.from_numpy(((value & 1) * 2 - 1).astype(np.float64)).to(dtype)
    out = out.to(like.device, like.dtype).view(*positions, 1, samples)
    return out.movedim((-1, -2), (0, 1))


def gradient_over(conv: Convolution, dy: Tensor, x: Tensor, rows: Rows) -> Tensor:
    """The weight gradient at connections that are given by output unit."""
    products.check_gradient(conv, dy, x, rows.indptr.numel() - 1)
    if native.kernels(x) is None:
        outputs, inputs = reference.rows_of(rows.indptr), rows.indices.long()
        wide = numbers(x.dtype)
        image, dy = products.image(x).to(wide), products.image(dy).to(wide)
        return reference.weight_gradient(conv, dy, image, outputs.to(x.device), inputs.to(x.device))
    return products.gradient_over(conv, dy, x, rows.indptr, rows.indices)


def unit_sums(
    conv: Convolution, dy: Tensor, x: Tensor, signs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sums over samples and output positions of ``signs * x`` for every input unit and of ``signs * dy``
    for every output unit, or of ``|x|`` and ``|dy|``; ``signs`` is (batch, 1, ...) as ``dy`` is.

    Patches of an image are never written out: their sums are the weight gradient of an output unit
    whose own gradient is ``signs``.
    """
    if x.dtype == torch.bfloat16:
        return unit_sums(conv, dy.float(), x.float(), None if signs is None else signs.float())
    kernels = native.kernels(x)
    n_in = x.shape[1] * conv.kernel[0] * conv.kernel[1]
    every = Rows(torch.tensor([0, n_in], dtype=torch.int32), torch.arange(n_in, dtype=torch.int32))
    if kernels is None:
        if signs is None:
            dy, x, signs = dy.abs(), x.abs(), dy.new_ones((dy.shape[0], 1, *dy.shape[2:]))
        outputs = (dy * signs).transpose(0, 1).flatten(1).sum(1)
        return gradient_over(conv, signs, x, every), outputs
    x, dy = layout.to_batch_last(x), layout.to_batch_last(dy)
    outputs = _row_sums(kernels, dy, dy.shape[1], signs)
    if x.dim() == 2:
        return _row_sums(kernels, x, n_in, signs), outputs
    if signs is None:  # samples first: one image is left
        image = tuple(x.shape[1:])
        x = _row_sums(kernels, x, x[0].numel(), None).view(1, *image)
        signs = dy.new_ones((1, 1, *dy.shape[2:]))
    return gradient_over(conv, signs, x, every), outputs


def _row_sums(kernels: _native._Kernels, x: Tensor, rows: int, signs: Tensor | None) -> Tensor:
    """Of batch-last memory cut into so many rows."""
    sums = torch.zeros(rows, dtype=x.dtype)
    if x.numel():
        kernels.unit_sums(
            x=x.movedim(0, -1),
            signs=None if signs is None else signs.movedim(0, -1),
            sums=sums,
            threads=native.threads(),
        )
    return sums
