"""Batches in an order that is a function of the seed and the epoch, from any position on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rewire.data.augment import generator
from rewire.data.splits import Request, Split

_ORDER, _AUGMENTATION = 0, 1  # what random numbers are for


@dataclass(frozen=True)
class Batches(Sequence[Request]):
    """The batches of one epoch from ``start`` on, or one rank's share of each of them.

    With ``draws`` random numbers for each image, which do not depend on how the batches are shared.
    """

    order: NDArray[np.intp]
    batch_size: int
    draws: int
    seed: int
    epoch: int
    rank: int
    world: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        batch = self.start + index % len(self)
        indices = self.order[batch * self.batch_size : (batch + 1) * self.batch_size]
        share = slice(*(len(indices) * r // self.world for r in (self.rank, self.rank + 1)))
        if not self.draws:
            return indices[share], None
        random = generator(self.seed, _AUGMENTATION, self.epoch, batch)
        return indices[share], random.random((len(indices), self.draws))[share]


class Loader:
    """Batches of images and labels, from any position on, for one process or each of many.

    Training batches are shuffled and augmented, and a last partial batch is dropped. Their order is a
    function of (seed, epoch) and their augmentation of (seed, epoch, batch). ``for x, y in loader`` goes
    through the rest of the current epoch and then moves to the next; ``epoch`` and ``batch`` are the
    position after the batch that was handed out last. A loop that was left, or a loader that was given
    the state of another, resumes where that one stood; after the last batch of an epoch this is a loop
    over no batches, in which the epoch ends.

    Test batches are all images in order, always from the first one on.

    Of each batch a process gets the share of its ``rank`` out of ``world``: the shares one after the
    other are the batch of a single process.

    Args:
        split: where images and labels come from.
        batch_size: images in a batch, of all processes together.
        train: whether to shuffle, augment and drop.
        seed: at least 0.
        rank, world: this process and the number of them.

    Example:
        >>> train = Loader(load("digits").train, batch_size=128, train=True)
        >>> [(len(x), train.epoch, train.batch) for x, y in train][-1], train.epoch, train.batch
        ((128, 0, 10), 1, 0)
    """

    def __init__(
        self,
        split: Split,
        batch_size: int = 128,
        *,
        train: bool,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        if not 0 <= rank < world:
            raise ValueError(f"rank must be at least 0 and below world, got {rank} of {world}")
        if batch_size % world:
            raise ValueError(
                f"batch_size must be a multiple of the number of processes, got {batch_size} for "
                f"{world}: it is the batch of all of them together"
            )
        if len(split) == 0:
            raise ValueError("there are no images")
        if train and len(split) < batch_size:
            raise ValueError(
                f"there are {len(split)} training images, which is less than one batch of "
                f"{batch_size}; use a smaller batch_size"
            )
        self.split, self.batch_size, self.train = split, batch_size, train
        self.seed, self.rank, self.world = seed, rank, world
        self.epoch = self.batch = 0

    def __len__(self) -> int:
        """Batches in an epoch; without a last one of which this rank has no share."""
        whole, rest = divmod(len(self.split), self.batch_size)
        share = rest * (self.rank + 1) // self.world - rest * self.rank // self.world
        return whole + (share > 0 and not self.train)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self.batches()
        for i, images in enumerate(self.split.read_all(batches)):
            indices, _ = batches[i]
            if self.train:
                self.epoch, self.batch = batches.epoch, batches.start + i + 1
            yield images, self.split.labels[torch.from_numpy(indices)]
        if self.train:
            self.epoch, self.batch = batches.epoch + 1, 0

    def batches(self) -> Batches:
        """What the rest of the epoch consists of."""
        samples = len(self.split)
        if self.train:
            order = generator(self.seed, _ORDER, self.epoch).permutation(samples)
        else:
            order = np.arange(samples)
        return Batches(
            order=order,
            batch_size=self.batch_size,
            draws=self.split.draws if self.train else 0,
            seed=self.seed,
            epoch=self.epoch,
            rank=self.rank,
            world=self.world,
            start=self.batch,
            stop=len(self),
        )

    def state_dict(self) -> dict[str, int]:
        """The position, and what it is a position in."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "samples": len(self.split),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where the loader with this state stood, on any number of processes."""
        mine = self.state_dict()
        if state.keys() != mine.keys():
            raise ValueError(
                f"a loader's state has the keys {', '.join(mine)}; got {', '.join(state)}"
            )
        for key in ("seed", "batch_size", "samples"):
            if state[key] != mine[key]:
                raise ValueError(
                    f"this position is of a loader with {key} {state[key]}, but this one has "
                    f"{mine[key]}; make it with the same settings and data"
                )
        if state["epoch"] < 0 or not 0 <= state["batch"] <= len(self):
            raise ValueError(
                f"there is no batch {state['batch']} in epoch {state['epoch']}; an epoch has "
                f"{len(self)}"
            )
        self.epoch, self.batch = state["epoch"], state["batch"]
