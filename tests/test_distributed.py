"""Data-parallel training, with real processes: two ranks do what one does."""

import contextlib
import multiprocessing
import os
import queue
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rewire
from rewire import SparseLayer, distributed

ROOT = Path(__file__).parents[1]
Job = Callable[..., Any]


class Failed(Exception):
    """What a rank has raised."""


def _rank(job: Job, args: tuple[Any, ...], rank: int, world: int, store: str, out: Any) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout
    )
    try:
        torch.save(job(rank, world, *args), f"{store}.{rank}")  # tensors do not outlive a queue
        out.put((rank, True, f"{store}.{rank}"))
    except Exception:
        out.put((rank, False, traceback.format_exc()))
    out.close()
    out.join_thread()


@contextlib.contextmanager
def ranks(job: Job, *args: Any, world: int = 2, store: Path) -> Iterator[Any]:
    """Processes that run ``job(rank, world, *args)``; gives a function that waits for their results."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rewire"])
    out = context.Queue()
    processes = [
        context.Process(target=_rank, args=(job, args, rank, world, str(store / "store"), out))
        for rank in range(world)
    ]

    def results(expected: int = world, timeout: float = 60) -> dict[int, tuple[bool, Any]]:
        found: dict[int, tuple[bool, Any]] = {}
        while len(found) < expected:
            rank, worked, result = out.get(timeout=timeout)
            found[rank] = (worked, result)
        return found

    for process in processes:
        process.start()
    try:
        yield results
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def run(job: Job, *args: Any, world: int = 2, store: Path) -> list[Any]:
    """The results of all ranks."""
    with ranks(job, *args, world=world, store=store) as results:
        found = results()
    for rank, (worked, result) in found.items():
        if not worked:
            raise Failed(f"rank {rank}: {result}")
    return [torch.load(found[rank][1], weights_only=False) for rank in range(world)]


# What two ranks do, one does --------------------------------------------------------------------


class Net(nn.Module):
    """Two convolutions and two linear layers, nothing that depends on the size of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2, bias=False)
        self.fc1 = nn.Linear(8 * 9, 20)
        self.fc2 = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x)).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))  # type: ignore[no-any-return]


METHODS: dict[str, Callable[..., rewire.Rewirer]] = {
    "uniform": lambda m, o: rewire.GSE(m, o, every=3, until=30),
    "grabo": lambda m, o: rewire.GSE(m, o, every=3, until=30, distribution="grabo"),
    "graest": lambda m, o: rewire.GSE(m, o, every=3, until=30, distribution="graest", subset=0.5),
    "graest layer": lambda m, o: rewire.GSE(
        m, o, every=2, until=30, distribution="graest", scope="layer"
    ),
    "set": lambda m, o: rewire.SET(m, o, every=3, until=30),
    "dsr": lambda m, o: rewire.DSR(m, o, every=3, until=30, threshold=0.05),
    "deepr": lambda m, o: rewire.DeepR(m, o, l1=0.05, temperature=0.01),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}
CASES = [(m, o) for m in METHODS for o in OPTIMIZERS]
STEPS, BATCH = 20, 12


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return rewire.sparsify(Net().double(), sparsity=0.6, seed=seed)


def share(rank: int, world: int, *tensors: Tensor) -> list[Tensor]:
    return [t[len(t) * rank // world : len(t) * (rank + 1) // world] for t in tensors]


def batch(step: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    x = torch.randn(size, 2, 8, 8, generator=g, dtype=torch.float64)
    return x, torch.randint(4, (size,), generator=g)


def train(rank: int, world: int, method: str, optimizer: str, micro: int = 1) -> dict[str, Any]:
    """A run; its ranks start from different models."""
    model = build(seed=rank)
    parallel = distributed.Parallel(model, bucket_bytes=2000)
    opt = OPTIMIZERS[optimizer](model.parameters())
    rewirer = METHODS[method](model, opt)
    lengths = set()
    for step in range(STEPS):
        opt.zero_grad()
        for i in range(micro):
            x, y = share(rank, world, *batch(micro * step + i))
            last = i == micro - 1
            with contextlib.nullcontext() if last else parallel.no_sync():
                (F.cross_entropy(model(x), y) / micro).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        rewirer.step()
        lengths.add(tuple(m.values.numel() for m in model.modules() if isinstance(m, SparseLayer)))
    return {
        "state": model.state_dict(),
        "rewirings": [(r.step, r.grown, r.pruned, r.subset, r.ever) for r in rewirer.history],
        "lengths": lengths,
        "traffic": vars(parallel.traffic),
    }


def all_cases(rank: int, world: int) -> dict[tuple[str, ...], dict[str, Any]]:
    found: dict[tuple[str, ...], dict[str, Any]] = {c: train(rank, world, *c) for c in CASES}
    for method in ("uniform", "graest"):
        found[method, "accumulated"] = train(rank, world, method, "sgd", micro=3)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run(all_cases, store=tmp_path_factory.mktemp("two"))


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Connections are equal, values to rounding."""
    assert one["rewirings"] == other["rewirings"]
    assert one["state"].keys() == other["state"].keys()
    for name, mine in one["state"].items():
        if mine.is_floating_point():
            torch.testing.assert_close(mine, other["state"][name], rtol=1e-9, atol=1e-11, msg=name)
        else:
            assert torch.equal(mine, other["state"][name]), name


@pytest.mark.parametrize("case", [*CASES, ("uniform", "accumulated"), ("graest", "accumulated")])
def test_two_ranks_with_half_the_batch_train_as_one_with_all(
    two: list[Any], case: tuple[str, str]
) -> None:
    method, optimizer = case
    micro = 3 if optimizer == "accumulated" else 1
    alone = train(0, 1, method, "sgd" if optimizer == "accumulated" else optimizer, micro)
    assert sum(grown for _, grown, *_ in alone["rewirings"]) > 20
    assert len(alone["rewirings"]) >= 6
    for rank in two:
        same(rank[case], alone)
    for key, mine in two[0][case]["state"].items():  # among themselves to the bit
        assert torch.equal(mine, two[1][case]["state"][key])
    if method in ("uniform", "dsr"):
        assert len(alone["lengths"]) > 1
