"""My own loop over several processes: the handwritten digits, at 95 % sparsity.

    torchrun --nproc-per-node 2 examples/distributed.py

or, for one process, ``python examples/distributed.py``: the result is the same to rounding.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import rewire
from rewire import data, distributed

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
steps = parser.parse_args().steps

device = distributed.setup()  # joins the processes that torchrun has started
digits = data.load("digits")
share = {"rank": distributed.rank(), "world": distributed.world()}
train = data.Loader(digits.train, 128, train=True, **share)
test = data.Loader(digits.test, 128, train=False, **share)
size = next(iter(test))[0][0].numel()

model = nn.Sequential(
    nn.Flatten(),
    nn.Linear(size, 512),
    nn.ReLU(),
    nn.Linear(512, 512),
    nn.ReLU(),
    nn.Linear(512, 10),
)
model = rewire.sparsify(model, sparsity=0.95).to(device)
parallel = distributed.Parallel(model)  # from here on gradients are averages
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
rewirer = rewire.GSE(model, optimizer, every=10, until=3 * steps // 4, distribution="graest")

done = 0
while done < steps:
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
        rewirer.step()
        done += 1
        if done == steps:
            break

parallel.sync_buffers()  # if the model had any: running statistics of batch norms
model.eval()
right = samples = 0
with torch.no_grad():
    for x, y in test:
        right += int((model(x.to(device)).argmax(1).cpu() == y).sum())
        samples += len(y)
right_of_all, all_samples = distributed.total(right, samples)

if distributed.is_main():
    print(f"{parallel.world} processes, {len(rewirer.history)} rewirings")
    print(f"test accuracy {right_of_all / all_samples:.1%} of {all_samples:.0f} images")
    print(parallel.traffic)
distributed.teardown()
