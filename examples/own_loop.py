"""Your own model, your own loop: train, stop, resume, save, load.

Run it twice with fewer epochs than it needs to see it resume: ``python own_loop.py --stop-after 2``.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from rewire import data


class Net(nn.Module):
    """Any model will do; this is a small convolutional one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


def accuracy(model: nn.Module, loader: data.Loader) -> float:
    model.eval()
    with torch.no_grad():
        hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
    return hits / len(loader.split)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--stop-after", type=int, help="epochs in this sitting")
    parser.add_argument("--folder", type=Path, default=Path("own_loop"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = options.folder / "checkpoint.pt"

    torch.manual_seed(0)
    train, test = data.load("digits").loaders(batch_size=32)
    steps = options.epochs * len(train)

    # Three lines make it sparse, and the last of them rewires it.
    model = rewire.sparsify(Net(), sparsity=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    rewirer = rewire.GSE(model, optimizer, every=20, until=steps * 3 // 4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    parts = {"rewirer": rewirer, "model": model, "optimizer": optimizer}
    parts |= {"scheduler": scheduler, "data": train}
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():  # the rewirer, then the model, then the optimizer
            part.load_state_dict(state[name])
        print(f"resuming after epoch {train.epoch}")
    else:
        rewire.summary(model)

    last = min(options.epochs, train.epoch + (options.stop_after or options.epochs))
    while train.epoch < last:
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            rewirer.step()
            scheduler.step()
        turnover = f"{rewirer.history[-1].turnover:.1%}" if rewirer.history else "none"
        print(f"epoch {train.epoch}: test {accuracy(model, test):.1%}, last rewiring {turnover}")
        torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint)

    rewire.save(model, options.folder / "model.safetensors")
    again = rewire.load(options.folder / "model.safetensors", Net())
    assert accuracy(again, test) == accuracy(model, test)
    rewire.export(model, options.folder / "dense.pt")  # for those who have PyTorch alone
    print(f"saved to {options.folder}")


if __name__ == "__main__":
    main()
