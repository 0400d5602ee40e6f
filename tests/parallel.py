"""What the tests of several processes share: starting them, and what comes of it."""

import contextlib
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import rewire

LIMIT = 300  # seconds: of what hangs, not of what is slow
Job = Callable[..., Any]


class Failed(Exception):
    """What a rank has raised."""


def _rank(job: Job, args: tuple[Any, ...], rank: int, world: int, store: str, out: Any) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=LIMIT)
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
    context.set_forkserver_preload(["rewire", "torch._dynamo"])  # what each would import
    out = context.Queue()
    processes = [
        context.Process(target=_rank, args=(job, args, rank, world, str(store / "store"), out))
        for rank in range(world)
    ]

    def results(expected: int = world) -> dict[int, tuple[bool, Any]]:
        found: dict[int, tuple[bool, Any]] = {}
        while len(found) < expected:
            rank, worked, result = out.get(timeout=LIMIT)
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


STEPS, BATCH = 10, 12


def build(seed: int = 0, **how: Any) -> nn.Module:
    torch.manual_seed(seed)
    return rewire.sparsify(Net().double(), sparsity=0.6, seed=seed, **how)


def share(rank: int, world: int, *tensors: Tensor) -> list[Tensor]:
    return [t[len(t) * rank // world : len(t) * (rank + 1) // world] for t in tensors]


def batch(step: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    x = torch.randn(size, 2, 8, 8, generator=g, dtype=torch.float64)
    return x, torch.randint(4, (size,), generator=g)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Connections are equal, values to rounding."""
    assert one["rewirings"] == other["rewirings"]
    assert one["state"].keys() == other["state"].keys()
    for name, mine in one["state"].items():
        if mine.is_floating_point():
            torch.testing.assert_close(mine, other["state"][name], rtol=1e-9, atol=1e-11, msg=name)
        else:
            assert torch.equal(mine, other["state"][name]), name


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)
