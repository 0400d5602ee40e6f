"""Test accuracy of always-sparse methods: static, SET, and GSE with its three distributions.

    python examples/compare_methods.py --data digits --model mlp --steps 1560
    python examples/compare_methods.py --data cifar10 --images 10000 --steps 1950 --json cifar10.json

Every method starts from the same connections and weights, and sees the same batches, for every seed
from 0 on. The recipe is the paper's for CIFAR-10 scaled to ``--steps``: SGD, momentum 0.9, weight
decay 1e-4, learning rate 0.1 and a tenth of it from 40 and from 60 % of the steps on, batch 128, and a
rewiring every 78th part of the steps until 60 % of them, of 20 % of the connections, falling to zero.

With ``--json`` every run is written to a file as it ends, and what is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import digits
import rewire
from rewire import data, models
from rewire.bench import machine

METHODS: dict[str, Callable[..., rewire.Rewirer]] = {
    "Static": rewire.Static,
    "SET": rewire.SET,
    "GSE uniform": partial(rewire.GSE, distribution="uniform"),
    "GSE GraBo": partial(rewire.GSE, distribution="grabo"),
    "GSE GraEst": partial(rewire.GSE, distribution="graest"),
}
MODELS: dict[str, Callable[[], nn.Module]] = {**digits.MODELS, "vgg16": models.vgg16}
DEFAULT_MODELS = {"digits": "mlp", "cifar10": "vgg16"}


def run(
    method: str, seed: int, images: data.Dataset, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Train a model from scratch; returns its test accuracy and the connections of its layers."""
    torch.manual_seed(seed)
    model = MODELS[settings["model"]]()
    rewire.sparsify(model, sparsity=settings["sparsity"], seed=seed)
    steps, lr = settings["steps"], settings["lr"]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    drops = [round(0.4 * steps), round(0.6 * steps)]
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, drops, gamma=0.1)
    rewirer = METHODS[method](
        *(model, optimizer),
        every=settings["every"],
        until=max(settings["every"], drops[-1]),
        fraction=0.2,
        scope="global",
        seed=seed,
    )
    train, test = images.loaders(128, seed=seed)
    while rewirer.t < steps:
        for x, y in train:  # one epoch
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            rewirer.step()
            if rewirer.t == steps:
                break
    layers = {row.name: row.connections for row in rewire.summary(model, show=False).layers}
    return {"accuracy": digits.accuracy(model, test), "layers": layers}


def load(name: str, count: int | None, root: Path | None) -> data.Dataset:
    """A data set with so many of its training images, the first ones, and all of its test images."""
    images = data.load(name, root=root)
    if count is None:
        return images
    split = images.train
    assert isinstance(split, data.Images)
    if not 128 <= count <= len(split):
        raise SystemExit(f"--images must be between 128 and {len(split)}, got {count}")
    part = replace(split, images=split.images[:count], labels=split.labels[:count])
    return replace(images, train=part)


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Mean and deviation of each method, and of what it has over Static at the same seed."""
    found: dict[str, dict[int, float]] = {}
    for one in runs:
        found.setdefault(one["method"], {})[one["seed"]] = 100 * one["accuracy"]
    lines = ["| method | test accuracy, % | over Static | seeds |", "|---|---|---|---|"]
    for method, by_seed in found.items():
        shared = [seed for seed in by_seed if seed in found.get("Static", {})]
        over = [by_seed[seed] - found["Static"][seed] for seed in shared]
        cells = (_spread(list(by_seed.values())), "" if method == "Static" else _spread(over, "+"))
        lines.append(f"| {method} | {cells[0]} | {cells[1]} | {len(by_seed)} |")
    return "\n".join(lines)


def layers(runs: Sequence[Mapping[str, Any]]) -> str:
    """Where the connections are in the end, in the mean over seeds."""
    found: dict[str, list[Mapping[str, int]]] = {}
    for one in runs:
        if "layers" in one:
            found.setdefault(one["method"], []).append(one["layers"])
    names = list(next(iter(found.values()))[0]) if found else []
    lines = [f"| layer | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for name in names:
        means = (statistics.mean(counts[name] for counts in all_) for all_ in found.values())
        lines.append(f"| {name} | {' | '.join(f'{mean:,.0f}' for mean in means)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return ""
    mean = format(statistics.mean(values), f"{sign}.2f")
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


def known_runs(path: Path | None, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a file holds of an earlier call with the same settings."""
    if path is None or not path.exists():
        return []
    document = json.loads(path.read_text())
    if document["settings"] != settings:
        raise SystemExit(
            f"{path} holds runs with other settings, {document['settings']}: give another file"
        )
    return list(document["runs"])


def main() -> None:
    """Read the command line, run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", choices=list(DEFAULT_MODELS), default="digits")
    parser.add_argument("--root", type=Path, help="the folder that holds the data set")
    parser.add_argument("--images", type=int, help="training images; all of them by default")
    parser.add_argument("--model", choices=list(MODELS), help="mlp for digits, vgg16 for cifar10")
    parser.add_argument("--sparsity", type=float, default=0.98)
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0 on")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=780)
    parser.add_argument("--every", type=int, help="steps between rewirings; steps / 78 by default")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--method", action="append", choices=list(METHODS), help="only these")
    parser.add_argument("--layers", action="store_true", help="show where the connections end up")
    parser.add_argument("--json", type=Path, help="write runs to this file, and resume from it")
    given = parser.parse_args()
    settings = {
        "data": given.data,
        "images": given.images,
        "model": given.model or DEFAULT_MODELS[given.data],
        "sparsity": given.sparsity,
        "steps": given.steps,
        "every": given.every or max(1, round(given.steps / 78)),
        "lr": given.lr,
    }
    images = load(given.data, given.images, given.root)
    runs = known_runs(given.json, settings)
    done = {(one["method"], one["seed"]) for one in runs}
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for method in given.method or METHODS:
            if (method, seed) in done:
                continue
            start = time.perf_counter()
            found = run(method, seed, images, settings)
            seconds = time.perf_counter() - start
            print(f"seed {seed}, {method}: {found['accuracy']:.2%} in {seconds:.0f} s", flush=True)
            runs.append({"method": method, "seed": seed, **found})
            if given.json is not None:
                document = {"machine": machine.facts(), "settings": settings, "runs": runs}
                machine.save(given.json, document)
    print(table(runs))
    if given.layers:
        print(f"\n{layers(runs)}")


if __name__ == "__main__":
    main()
