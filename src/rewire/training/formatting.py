"""Text about a run: numbers, its title, and the report at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import rewire
from rewire.precision import FLOAT32
from rewire.training.picture import pixels, side_by_side

if TYPE_CHECKING:
    from rewire.training.loop import Trainer


def percent(share: float) -> str:
    """A share in percent, with the digits that matter.

    >>> percent(0.98712), percent(0.02), percent(0.0004)
    ('98.71 %', '2 %', '0.04 %')
    """
    return f"{100 * share:.4g} %"


def duration(seconds: float) -> str:
    """A duration in its two largest units.

    >>> duration(7.4), duration(75), duration(7_380)
    ('7 s', '1 min 15 s', '2 h 3 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def images(rate: float) -> str:
    """Images per second."""
    return f"{rate:,.0f} images/s"


def big(count: float) -> str:
    """A large number in few digits.

    >>> big(1234567), big(640)
    ('1.23 M', '640')
    """
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.3g}"


def title(trainer: Trainer) -> str:
    """What is about to be trained."""
    job, config = trainer.job, trainer.job.config
    held = rewire.summary(trainer.model, show=False)
    wired = "dense"
    if held.connections:
        weights = sum(row.weights for row in held.layers if row.sparse)
        wired = f"{held.connections:,} of {weights:,} connections ({percent(held.density)})"
    threads = torch.get_num_threads()
    where = f"{job.device}, {threads} thread{'s' * (threads > 1)}"
    if config.precision != FLOAT32:
        where += f", {config.precision}"
    out = "" if trainer.folder is None else f"\nto {trainer.folder.path}"
    return (
        f"{config.model} on {config.dataset} by {config.method}: {wired}, {trainer.schedule.epochs:,} "
        f"epochs of {trainer.schedule.steps_per_epoch:,} steps, {where}{out}"
    )


def report(trainer: Trainer, entry: dict[str, Any]) -> str:
    """The report at the end of a run."""
    seconds = max(entry["seconds"], 1e-9)
    seen = entry["steps"] * trainer.job.config.batch_size
    forward, training = (
        entry[f"{kind}flops"] / max(1, entry[f"dense_{kind}flops"]) for kind in ("", "training_")
    )
    best = f"best {percent(entry['best'])} in epoch {entry['best_epoch']}"
    wired = f"{entry['connections']:,} of {entry['weights']:,}"
    rows = {
        "test accuracy": f"{percent(entry['accuracy'])} ({best})",
        "time": f"{duration(seconds)}, {images(seen / seconds)}",
        "connections": f"{wired} ({percent(entry['connections'] / max(1, entry['weights']))})",
        "FLOPs, forward": f"{big(entry['flops'])} per image, {percent(forward)} of dense",
        "FLOPs, training": f"{big(entry['training_flops'])} per image, {percent(training)} of dense",
    }
    if trainer.folder is not None:
        rows["model"] = str(trainer.folder.model)
    wide = max(map(len, rows))
    lines = [f"{name:<{wide}}  {value}" for name, value in rows.items()]
    return "\n".join([*lines, *_seen(trainer)])


def _seen(trainer: Trainer) -> list[str]:
    """Where the connections of small images are, and were."""
    job = trainer.job
    after = pixels(trainer.model, job.dataset.shape)
    if after is None or job.schedule.every is None or job.method.start != {}:
        return []
    before = pixels(job.sparse(), job.dataset.shape)
    if before is None:
        return []
    shown = {"connections of each pixel before": before, "and after": after}
    return ["", side_by_side(shown)]
