"""Inference with the model of a run: testing it, and classifying images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewire import data, saving
from rewire.precision import FLOAT32, autocast
from rewire.training.folder import Folder, RunError
from rewire.training.job import Job, load_data
from rewire.training.loop import shell


@dataclass(frozen=True)
class Tested:
    """Loss and accuracy of a model.

    Attributes:
        what: which model it is, in words.
        dataset: whose test images were used.
        images: how many.
        accuracy, loss: over all of them.
        classes: the accuracy of each class.
    """

    what: str
    dataset: str
    images: int
    accuracy: float
    loss: float
    classes: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def load(
    path: Path, *, root: Path | None = None, workers: int | None = None
) -> tuple[nn.Module, str]:
    """The model of a run, or of its newest checkpoint, and which of them it is."""
    folder = Folder(path)
    if folder.finished:
        if folder.exists:
            theirs = saving.read_notes(folder.model).get("config")
            folder.check_config(folder.config(), folder.model, theirs)
        return saving.load(folder.model), str(folder.model)
    config = folder.config()
    loaded = folder.load()
    if loaded is None:
        raise RunError(f"the run in {path} has no checkpoint yet; resume it first")
    folder.check_config(config, loaded.path, loaded.state.get("config"))
    data = load_data(config, root or folder.root, workers=workers)
    model = shell(Job(config, data), loaded.state)
    return model, f"{loaded.path} (unfinished)"


def example(path: Path) -> Tensor:
    """Two inputs like those that the model of a run was trained with."""
    folder = Folder(path)
    if folder.finished:
        shape = saving.read_notes(folder.model)["shape"]
    else:
        shape = load_data(folder.config(), folder.root).shape
    return torch.zeros(2, *shape)


def evaluate(
    path: Path, device: torch.device, *, root: Path | None = None, workers: int | None = None
) -> Tested:
    """Test the model of a run on its data set."""
    folder = Folder(path)
    config, root = folder.config(), root or folder.root
    model, what = load(path, root=root, workers=workers)
    dataset = load_data(config, root, workers=workers)
    _, loader = dataset.loaders(config.batch_size)
    model.to(device).eval()
    loss, right = 0.0, torch.zeros(dataset.num_classes, dtype=torch.int64)
    with torch.no_grad():
        for x, y in loader:
            with autocast(config.precision, device.type):
                logits = model(x.to(device))
                loss += float(F.cross_entropy(logits, y.to(device), reduction="sum"))
            logits = logits.cpu()
            right += torch.bincount(y[logits.argmax(1) == y], minlength=dataset.num_classes)
    count = torch.bincount(dataset.test.labels, minlength=dataset.num_classes)
    images = int(count.sum())
    shares = (right / count.clamp(min=1)).tolist()
    return Tested(
        what=what,
        dataset=config.dataset,
        images=images,
        accuracy=int(right.sum()) / images,
        loss=loss / images,
        classes=dict(zip(dataset.classes, shares, strict=True)),
    )


def predict(
    path: Path, images: Sequence[Path], top: int, device: torch.device
) -> list[list[tuple[str, float]]]:
    """The most likely classes of each image, with their probabilities, in the run's precision."""
    folder = Folder(path)
    if not folder.finished:
        folder.config()  # says so if there is no run at all
        raise RunError(f"the run in {path} is not finished; resume it first")
    notes = saving.read_notes(folder.model)
    model = saving.load(folder.model).to(device).eval()
    x = data.open_images(
        images, tuple(notes["shape"]), notes["mean"], notes["std"], notes["margin"]
    )
    with torch.no_grad(), autocast(notes.get("precision", FLOAT32), device.type):
        shares: Tensor = model(x.to(device)).float().softmax(1).cpu()
    best = shares.topk(min(top, shares.shape[1]), dim=1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [[(notes["classes"][i], s) for i, s in zip(*row, strict=True)] for row in pairs]
