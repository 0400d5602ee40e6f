"""A method of your own, against others, on the packaged digits."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

import rewire
from rewire import data, models


class Saliency(rewire.Rewirer):
    """Prunes where removing a weight changes the loss least, to first order; grows like GSE."""

    def explore(self, view: rewire.LayerView) -> rewire.Connections:
        return view.draw(1.0)  # S: one random draw per active connection

    def growth(self, view: rewire.LayerView) -> Tensor:
        return view.gradient.abs()  # of the loss, at S: the largest grow

    def survival(self, view: rewire.LayerView) -> Tensor:
        return (view.weights * view.slopes).abs()  # at A: the smallest go


def train(method: type[rewire.Rewirer], epochs: int, sparsity: float, seed: int) -> float:
    """The test accuracy that a method ends with."""
    train, test = data.load("digits").loaders(batch_size=32, seed=seed)
    with torch.device("meta"):
        model = models.mlp(64)
    model = rewire.sparsify(model, sparsity, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    steps = epochs * len(train)
    rewirer = method(model, optimizer, every=20, until=steps * 3 // 4, seed=seed)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for x, y in train:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            rewirer.step()
            scheduler.step()
    with torch.no_grad():
        return sum(int((model(x).argmax(1) == y).sum()) for x, y in test) / len(test.split)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--sparsity", type=float, default=0.98)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for method in (rewire.Static, rewire.SET, rewire.GSE, Saliency):
        found = [train(method, options.epochs, options.sparsity, s) for s in range(options.seeds)]
        scores = ", ".join(f"{score:.1%}" for score in found)
        print(f"{method.__name__:8}  mean {sum(found) / len(found):.1%}  ({scores})", flush=True)


if __name__ == "__main__":
    main()
