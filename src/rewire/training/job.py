"""Builds the data, models and optimizer of a config."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rewire import data, models
from rewire.data.decode import MARGIN, Crop
from rewire.initial import reinitialize
from rewire.methods import METHODS, Method
from rewire.precision import autocast
from rewire.sparsify import sparsify
from rewire.training.config import Config
from rewire.training.schedule import Schedule


@dataclass(frozen=True)
class Job:
    """A config with its data at hand.

    Attributes:
        config: the settings.
        dataset: the images.
        device: where the model is.
        ticket: the model of this round, in a sequence of them.
        method: how it trains.
        schedule: what happens at which step.
    """

    config: Config
    dataset: data.Dataset
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ticket: nn.Module | None = None

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if the model cannot take the images, or the schedule does not fit."""
        _check_fit(self.config, self.dataset)
        batches = self.schedule.steps_per_epoch
        if (self.config.growth_batches or 0) > batches:
            raise ValueError(
                f"growth_batches must be at most an epoch, {batches}, got {self.config.growth_batches}"
            )

    @property
    def method(self) -> Method:
        return METHODS[self.config.method]

    @property
    def schedule(self) -> Schedule:
        batches = len(self.dataset.train) // self.config.batch_size
        if batches == 0:
            raise ValueError(
                f"{self.config.dataset} has {len(self.dataset.train)} training images, less than one "
                f"batch of {self.config.batch_size}: lower batch_size"
            )
        return self.config.schedule(batches)

    def autocast(self) -> AbstractContextManager[None]:
        """What forward passes and losses run in."""
        return autocast(self.config.precision, self.device.type)

    def dense(self) -> nn.Module:
        """The model with all its weights, as the seed gives them."""
        config = self.config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = self._build()
        if config.initial == "fan-in":
            reinitialize(model, keep_dense=config.keep_dense, seed=config.seed)
        return self._placed(model)

    def sparse(
        self, *, density: float | None = None, weights: str = "fresh", storage: str = "sparse"
    ) -> nn.Module:
        """The model with the connections that the seed gives it.

        Args:
            density: by default what the sparsity leaves.
            weights, storage: as for :func:`rewire.sparsify`. With ``"fresh"`` weights and ``"sparse"``
                storage no dense weight is made.
        """
        config = self.config
        if weights == "fresh":
            with torch.device("meta"):
                model = self._build()
        else:
            model = self.dense()
        model = sparsify(
            model,
            config.sparsity if density is None else None,
            density=density,
            weights=weights,
            storage=storage,
            assignment=config.assignment,
            exact=config.exact,
            keep_dense=config.keep_dense,
            seed=config.seed,
        )
        return model.to(self.device) if storage == "sparse" else self._placed(model)

    def _placed(self, model: nn.Module) -> nn.Module:
        """With dense weights in the memory format that torch is fastest in."""
        if self.config.model != "mlp" and self.device.type == "cpu":
            model = cast(Any, model).to(memory_format=torch.channels_last)
        return model.to(self.device)

    def _build(self) -> nn.Module:
        shape, classes = self.dataset.shape, self.dataset.num_classes
        return models.for_images(self.config.model, shape, classes, self.config.width)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of all parameters of a model."""
        config, decay = self.config, self.config.weight_decay
        if config.optimizer == "sgd":
            momentum = config.momentum
            # All parameters at once: there are many small ones. (Fused would be faster still, but takes
            # the memory of weights and momentum to be alike, which it is not after a resume.)
            return torch.optim.SGD(
                *(model.parameters(), config.lr, momentum), weight_decay=decay, foreach=True
            )
        kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
        return kind(model.parameters(), lr=config.lr, weight_decay=decay)

    def growth_batches(
        self, step: int, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The first ``growth_batches`` of an epoch of its own, shuffled and augmented as all are."""
        config = self.config
        key = f"{config.seed}:growth".encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:7], "little")
        train, _ = self.dataset.loaders(config.batch_size, seed=seed, rank=rank, world=world)
        train.epoch = step
        for x, y in islice(train, config.growth_batches):
            yield x.to(self.device), y.to(self.device)

    def batches(self, per_class: int) -> list[tuple[Tensor, Tensor]]:
        """A number of training images of each class, not augmented, with their labels, in batches of all
        classes in turn; the seed says which."""
        split, seed = self.dataset.train, self.config.seed
        order = np.random.default_rng(seed).permutation(len(split))
        labels = split.labels.numpy()[order]
        chosen = [order[labels == c][:per_class] for c in range(self.dataset.num_classes)]
        turns = [np.arange(len(found)) for found in chosen]
        indices = np.concatenate(chosen)[np.argsort(np.concatenate(turns), kind="stable")]
        return [
            (
                split.read((part, None)).to(self.device),
                split.labels[torch.from_numpy(part)].to(self.device),
            )
            for part in np.split(
                indices, range(self.config.batch_size, len(indices), self.config.batch_size)
            )
        ]

    def notes(self) -> dict[str, Any]:
        """What has to be known to use the model on other images."""
        test = self.dataset.test
        return {
            "dataset": self.config.dataset,
            "classes": list(self.dataset.classes),
            "shape": list(self.dataset.shape),
            "mean": list(test.mean),
            "std": list(test.std),
            "config": asdict(self.config),
            "margin": MARGIN if isinstance(test, data.ImageFiles) else 1.0,
            "precision": self.config.precision,
        }


def load_data(
    config: Config, root: Path | None = None, *, download: bool = False, workers: int | None = None
) -> data.Dataset:
    """The data set of a config."""
    found = data.load(
        config.dataset,
        root,
        download=download,
        size=config.image_size,
        crop=cast("Crop | None", config.crop),
        workers=workers,
    )
    if config.pad is None:
        return found
    if not isinstance(found.train, data.Images):
        raise ValueError(f"images of {config.dataset} are cropped, not padded: leave out pad")
    return replace(found, train=replace(found.train, pad=config.pad))


def _check_fit(config: Config, dataset: data.Dataset) -> None:
    channels, height, width = dataset.shape
    model, problem = config.model, None
    if model != "mlp" and channels != 3:
        problem = "images in colour"
    elif model.startswith("vgg") and (height, width) != (32, 32):
        problem = "images of 32x32 pixels"
    elif model == "vit" and (height != width or height % 4):
        problem = "square images of a multiple of 4 pixels"
    if problem is not None:
        colour = "grey " if channels == 1 else ""
        raise ValueError(
            f"{model} takes {problem}, but those of {config.dataset} are {colour}{height}x{width}: use "
            "another model, such as mlp, or other data"
        )
