"""Train a sparse MLP and a small sparse CNN on the handwritten digits with guided stochastic exploration.

    python examples/digits.py                        # both, 98 and 95 % sparse, in about a minute
    python examples/digits.py --model cnn --steps 200 --distribution grabo

The digits come with the package: there is nothing to download.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import rewire
from rewire import data, models


def mlp() -> nn.Module:
    """Two hidden layers of 512 units: 300,032 weights when dense."""
    return models.mlp(in_features=64, hidden=(512, 512))


def cnn() -> nn.Module:
    """Three 3x3 convolutions and a linear layer: 93,344 weights when dense."""
    layers: list[nn.Module] = []
    for n_in, n_out in ((1, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


MODELS = {"mlp": mlp, "cnn": cnn}
SPARSITIES = {"mlp": 0.98, "cnn": 0.95}


def accuracy(model: nn.Module, loader: data.Loader) -> float:
    """Share of the images that a model, left in evaluation mode, classifies correctly."""
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
    return right / len(loader.split)


def train(name: str, sparsity: float, steps: int, distribution: str, seed: int) -> float:
    """Train one model, say how it goes, and return its test accuracy."""
    torch.manual_seed(seed)
    model = rewire.sparsify(MODELS[name](), sparsity=sparsity, seed=seed)
    print(
        f"{name}: {rewire.summary(model, show=False).connections:,} connections, {sparsity:.0%} sparse"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    every = max(1, steps // 40)
    rewirer = rewire.GSE(
        *(model, optimizer),
        every=every,
        until=max(every, 3 * steps // 4),
        fraction=0.2,
        distribution=distribution,
        seed=seed,
    )
    loader, test = data.load("digits").loaders(batch_size=64, seed=seed)
    while rewirer.t < steps:
        for x, y in loader:  # one epoch
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            rewirer.step()
            if rewirer.t % max(1, steps // 5) == 0:
                explored = rewirer.history[-1].explored if rewirer.history else 0.0
                print(
                    f"  step {rewirer.t}: loss {loss.item():.3f}, {len(rewirer.history)} rewirings, "
                    f"{explored:.1%} of all possible connections explored"
                )
            if rewirer.t == steps:
                break
    found = accuracy(model, test)
    print(f"{name}: {found:.1%} of {len(test.split)} test images right")
    return found


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), help="only this one")
    parser.add_argument("--sparsity", type=float, help="0.98 for the MLP, 0.95 for the CNN")
    parser.add_argument("--steps", type=int, default=800)
    choices = ["uniform", "grabo", "graest"]
    parser.add_argument("--distribution", choices=choices, default="uniform")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name in MODELS if given.model is None else [given.model]:
        sparsity = SPARSITIES[name] if given.sparsity is None else given.sparsity
        train(name, sparsity, given.steps, given.distribution, given.seed)


if __name__ == "__main__":
    main()
