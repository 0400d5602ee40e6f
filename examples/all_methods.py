"""All methods of the paper, trained briefly one after the other, in one table.

    python examples/all_methods.py
    python examples/all_methods.py --dataset cifar10 --model vgg16 --root data --steps 40

The recipe is the paper's, scaled to ``--steps``: the learning rate drops at 40 and at 60 % of them, and
there are eight rewirings in the first 60 %. Accuracies after so few steps say that a method runs, not how
good it is. The lottery takes as many steps in each of its rounds.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

import rewire
from rewire import data
from rewire.methods import METHODS
from rewire.training.config import resolve
from rewire.training.job import Job, load_data
from rewire.training.loop import Trainer
from rewire.training.progress import Progress


class Shown(Progress):
    """Moves a bar, and remembers with how many connections training has begun."""

    def __init__(self, bar: Bar, name: str) -> None:
        self.bar, self.began = bar, 0
        self.task = bar.add_task(name)

    def begin(self, trainer: Trainer) -> None:
        held = rewire.summary(trainer.model, show=False)
        self.began = held.connections or sum(row.connections for row in held.layers)
        self.bar.reset(self.task, total=trainer.schedule.steps)

    def step(self, trainer: Trainer) -> None:
        self.bar.update(self.task, completed=trainer.step)


def job_of(method: str, given: argparse.Namespace) -> Job:
    """A method's run on some of the images, as short as asked for."""
    settings: dict[str, Any] = {"dataset": given.dataset, "model": given.model, "method": method}
    settings |= {"sparsity": given.sparsity, "seed": given.seed}
    images = load_data(resolve(settings), given.root)
    train, test = images.train, images.test
    assert isinstance(train, data.Images)
    assert isinstance(test, data.Images)
    train = replace(train, images=train.images[: given.images], labels=train.labels[: given.images])
    test = replace(test, images=test.images[: given.images], labels=test.labels[: given.images])
    epochs = given.steps / (len(train) // resolve(settings).batch_size)
    settings |= {"epochs": epochs, "drops": [0.4 * epochs, 0.6 * epochs]}
    options = METHODS[method].options
    if "every" in options and method != "deepr":
        settings |= {"every": max(1, round(0.6 * given.steps / 8)), "until": 0.6 * epochs}
    return Job(resolve(settings), replace(images, train=train, test=test))


def main() -> None:
    """Read the command line, train, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dataset", default="digits", help="digits, cifar10, ...")
    parser.add_argument("--root", type=Path, help="the folder that holds the data set")
    parser.add_argument("--model", help="of the recipe, if not given")
    parser.add_argument("--images", type=int, help="of training and of test; all by default")
    parser.add_argument("--sparsity", type=float, default=0.98)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", action="append", choices=list(METHODS), help="only these")
    given = parser.parse_args()
    console = Console()
    table = Table("method", "accuracy", "began with", "ended with", "training FLOPs", "seconds")
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        for name in given.method or METHODS:
            shown = Shown(bar, name)
            found = Trainer(job_of(name, given), progress=shown).run()
            bar.remove_task(shown.task)
            cells = [f"{found['accuracy']:.2%}", f"{shown.began:,}", f"{found['connections']:,}"]
            cells += [f"{found['training_flops'] / found['dense_training_flops']:.1%} of dense"]
            table.add_row(name, *cells, f"{found['seconds']:.1f}")
            console.print(f"{name}: {cells[0]} in {found['seconds']:.1f} s")
    console.print(table)


if __name__ == "__main__":
    main()
