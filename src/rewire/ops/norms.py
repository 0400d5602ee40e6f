"""What batch norms and the layers before and after them say to each other.

The gradient of a batch norm takes two passes over memory. Both can be made by neighbours that read or
write there anyway; here is what they need to know, and how they find out that nobody else is concerned.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rewire.ops import layout, native

_PASSES = 4  # backward passes that things are left in at once; those that ended early count, too


def _current_pass() -> int:
    return int(torch._C._current_graph_task_id())


def _any_alive(links: list[weakref.ref[Any]]) -> bool:
    return any(link() is not None for link in links)


class Owed:
    """What is left to do to the gradient of a tensor, by the layer that made it.

    The gradient of a batch norm's input is a weighted sum of a tensor that has just been computed and
    of that input itself. Where nothing else has read the input, the batch norm returns the first alone;
    the layer that made the input adds the rest as it reads, and saves a pass over memory.
    """

    def __init__(self) -> None:
        self.readers = 0  # autograd functions that will return a gradient of the tensor
        self.kept = False  # whether the layer's own autograd function will do what is left
        self.links: list[weakref.ref[Any]] = []  # more of them, which may, while they live
        # By backward pass: several may be under way at once.
        self._left: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def sole(self) -> bool:
        """Whether a reader may leave the rest to the layer."""
        return (
            self.kept
            and self.readers == 1
            and len(self._left) < _PASSES
            and not _any_alive(self.links)
        )

    def leave(self, gradient: Tensor, x: Tensor, factors: Tensor) -> None:
        """Say what is to be done to a gradient that is returned, of the tensor ``x``. It is held until
        it arrives, so that nothing else comes to lie in its memory and nothing is added to it there."""
        self._left[_current_pass()] = gradient, x, factors

    def take(self, gradient: Tensor) -> tuple[Tensor, Tensor] | None:
        """The tensor and the factors that belong to the gradient that has arrived, if any do."""
        left = self._left.pop(_current_pass(), None)
        if left is None:
            return None
        if left[0].data_ptr() != gradient.data_ptr():
            raise RuntimeError(
                "the gradient of a convolution's output was changed between its batch norm and the "
                "convolution: change it by a hook of that tensor, not of a node of the graph"
            )
        return left[1:]


class Moments(NamedTuple):
    """Where a layer writes the mean and biased variance of its output by channel, and where readers say
    what they leave to it."""

    mean: Tensor
    variance: Tensor
    owed: Owed | None = None


class Norm(NamedTuple):
    """A batch norm. ``training`` says that mean and variance are the batch's own (from
    :func:`moments`), so that gradients flow through them; ``relu`` that a rectifier follows."""

    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    variance: Tensor
    training: bool
    eps: float
    relu: bool = False
    owed: Owed | None = None

    def over(self, tensors: Sequence[Tensor]) -> Norm:
        """The same with the first of ``tensors`` for weight and bias, where it has them, and nothing of its
        gradient left to anyone."""
        rest = iter(tensors)
        weight = None if self.weight is None else next(rest)
        bias = None if self.bias is None else next(rest)
        return self._replace(weight=weight, bias=bias, owed=None)

    def read(self) -> None:
        """An autograd function is going to return a gradient of the input."""
        if self.owed is not None:
            self.owed.readers += 1

    def factors(self) -> Tensor | None:
        """Where the kernels write what is left to do to the gradient; None if nothing may be left."""
        if self.owed is None or not self.owed.sole():
            return None
        return torch.empty(3, self.mean.numel(), dtype=self.mean.dtype)

    def leave(self, gradient: Tensor, x: Tensor, factors: Tensor | None) -> Tensor:
        """``gradient`` of ``x``, of which ``factors`` say what is left to do."""
        if factors is not None:
            assert self.owed is not None
            self.owed.leave(gradient, x, factors)
        return gradient

    def kernel(self, kernels: Any, x: Tensor) -> Any:
        """What the kernels take, for an input ``x``."""
        channels = x.shape[1]
        return kernels.BatchNorm(
            *(channels, x.numel() // channels, self.training, self.relu, self.eps),
            *(native.address(self.weight), native.address(self.bias)),
            *(self.mean.data_ptr(), self.variance.data_ptr(), layout.panel_rows(x)),
        )


class Relay:
    """The gradient of a rectified residual sum, where the one layer that reads the sum computes it.

    Its gradient is what the layer computes plus what comes from the next sum, where the rectifier let
    it pass. The layer reads the sum anyway, so all of this is done before anything is written, and what
    the batch norm wants to know as well. The next sum has computed its part by then.
    """

    def __init__(self, x: Tensor, norm: Norm) -> None:
        self.x: Tensor | None = x  # the batch norm's input
        self.norm = norm
        self.reads: Owed | None = None  # counts who reads the sum, but for the next sum
        self.twin_read = False  # by the next sum
        self.layers = self.sums = 0  # autograd functions that will return a gradient of the sum
        self.hidden = False  # whether more of them have been made in a backward pass
        self.links: list[weakref.ref[Any]] = []  # more of them, which may, while they live
        # By backward pass: several may be under way at once.
        self._more: dict[int, Tensor] = {}
        self._done: dict[int, tuple[Tensor, Tensor | None, tuple[Tensor, ...]]] = {}

    def leave(self, gradient: Tensor) -> None:
        """Say what gradient the next sum returns."""
        if len(self._more) < _PASSES:
            self._more[_current_pass()] = gradient

    def more(self) -> Tensor | None:
        """The gradient of the next sum, in this backward pass."""
        return self._more.get(_current_pass())

    def usable(self) -> bool:
        """Whether the layer may compute the gradient: nobody else reads the sum or what the batch norm
        reads, and what comes from elsewhere is there. A promise that is used in two ways may have been
        computed twice, and then reads twice."""
        if self.x is None or self.reads is None or self.reads.readers != 1:
            return False
        if self.hidden or self.layers != 1 or self.sums > 1:
            return False
        if len(self._done) >= _PASSES or _any_alive(self.links):
            return False
        owed = self.norm.owed
        return owed is not None and owed.sole() and self.twin_read == (self.more() is not None)

    def done(self, gradient: Tensor, *found: Tensor) -> None:
        """The layer has computed the gradient, and found those of weight and bias, and the factors of
        what is left to do."""
        self._done[_current_pass()] = gradient, self.more(), found

    def take(self, dz: Tensor | None, more: Tensor | None) -> tuple[Tensor, ...] | None:
        """What the layer has found, if these are the gradients it has worked with."""
        now = _current_pass()
        done = self._done.pop(now, None)
        self._more.pop(now, None)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self.x = None
        if done is None:
            return None
        if not (_same(done[0], dz) and _same(done[1], more)):
            raise RuntimeError(
                "a gradient of a residual sum was changed on its way: change it by a hook of that "
                "tensor, not of a node of the graph"
            )
        return done[2]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and a.data_ptr() == b.data_ptr())


def relay_of(x: Tensor | None) -> Relay | None:
    """That of a residual sum, or of its twin."""
    return getattr(x, "_rewire_relay", None)
