"""The engine in several processes, with real ones: what they compute, and that gradients leave early."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rewire
from engine_models import converted
from parallel import batch, run, share
from rewire import distributed
from rewire.bench import overlap
from rewire.engine import links, plan
from rewire.ops import native

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")

MODES = ("chain", "one function", "layer by layer")
METHODS: dict[str, Callable[..., rewire.Rewirer]] = {
    "uniform": lambda m, o: rewire.GSE(m, o, every=2, until=20),
    "graest": lambda m, o: rewire.GSE(m, o, every=2, until=20, distribution="graest"),
    "rigl": lambda m, o: rewire.RigL(m, o, every=2, until=20),
}


class Net(nn.Module):
    """Convolutions with batch norms, a residual sum and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(6)
        self.conv3 = nn.Conv2d(6, 8, 3, stride=2)
        self.fc1 = nn.Linear(8 * 9, 20)
        self.fc2 = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)) + x)
        x = F.relu(self.conv3(x)).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))  # type: ignore[no-any-return]


def build(mode: str) -> nn.Module:
    torch.manual_seed(0)
    return converted(Net(), 0.6, engine=mode != "layer by layer")


def train(rank: int, world: int, mode: str, method: str) -> dict[str, Any]:
    model = build(mode)
    parallel = distributed.Parallel(model, bucket_bytes=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rewirer = METHODS[method](model, optimizer)
    for step in range(8):
        optimizer.zero_grad()
        x, y = share(rank, world, *batch(2 * step))
        with parallel.no_sync():
            F.cross_entropy(model(x), y).backward()
        x, y = share(rank, world, *batch(2 * step + 1))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        rewirer.step()
    return {
        "state": model.state_dict(),
        "rewirings": [(r.step, r.grown, r.pruned) for r in rewirer.history],
    }


def ddp(rank: int, world: int, mode: str, **how: bool) -> dict[str, Any]:
    """Gradients of torch's DistributedDataParallel, which may train a model that nobody rewires."""
    model = build(mode)
    wrapper = DistributedDataParallel(model, bucket_cap_mb=0.001, **how)
    for step in range(3):
        x, y = share(rank, world, *batch(step))
        F.cross_entropy(wrapper(x), y).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def early(rank: int, world: int, mode: str) -> tuple[int, int, int]:
    """How many messages left before the last segment began, of how many; and segments."""
    model = build(mode)
    distributed.Parallel(model, bucket_bytes=1000)
    x, y = share(rank, world, *batch(0))
    (one,) = overlap.measure(model, x, y, mode, 1)
    before = sum(time < one.segments[-1] for time, _ in one.sent)
    return before, len(one.sent), len(one.segments)


def all_modes(rank: int, world: int) -> dict[Any, Any]:
    plan.SEGMENT_BYTES = 1
    assert links.wanted()
    found: dict[Any, Any] = {}
    for mode in MODES:
        with patch.object(links, "wanted", lambda mode=mode: mode == "chain"):
            for method in METHODS:
                found[method, mode] = train(rank, world, mode, method)
            found["ddp", mode] = ddp(rank, world, mode)
            found["ddp views", mode] = ddp(rank, world, mode, gradient_as_bucket_view=True)
            found["ddp unused", mode] = _unused(rank, world, mode)
    for mode in MODES[:2]:
        found["early", mode] = early(rank, world, mode)
    return found


def _unused(rank: int, world: int, mode: str) -> dict[str, Any]:
    with warnings.catch_warnings():  # that all are used
        warnings.simplefilter("ignore")
        return ddp(rank, world, mode, find_unused_parameters=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run(all_modes, store=tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("method", METHODS)
def test_training(two: list[Any], method: str) -> None:
    chain, one, layers = (two[0][method, mode] for mode in MODES)
    assert sum(grown for _, grown, _ in chain["rewirings"]) > 20
    assert chain["rewirings"] == one["rewirings"] == layers["rewirings"]
    for name, value in chain["state"].items():
        assert torch.equal(value, one["state"][name]), name
        torch.testing.assert_close(value, layers["state"][name], rtol=1e-8, atol=1e-10, msg=name)
        if "running" not in name:  # each has its own share of the batch
            assert torch.equal(value, two[1][method, "chain"]["state"][name]), name


@pytest.mark.parametrize("kind", ["ddp", "ddp views", "ddp unused"])
def test_torchs_own_averages(two: list[Any], kind: str) -> None:
    chain, one, layers = (two[0][kind, mode] for mode in MODES)
    assert len(chain) == len([*Net().parameters()])
    for name, value in chain.items():
        assert torch.equal(value, one[name]), name
        assert torch.equal(value, two[1][kind, "chain"][name]), name
        torch.testing.assert_close(value, layers[name], rtol=1e-8, atol=1e-10, msg=name)


def test_gradients_leave_while_the_backward_pass_goes_on(two: list[Any]) -> None:
    for rank in two:
        before, messages, segments = rank["early", "chain"]
        assert segments > 3
        assert messages > 3
        assert before >= messages - 2
        before, messages, segments = rank["early", "one function"]
        assert (before, segments) == (0, 1)


def test_the_command() -> None:
    """What it says of passes; the rest of it is used above."""
    one = overlap.Pass([(0.1, 500_000), (0.5, 250_000), (2.0, 250_000)], [0.0, 0.2, 1.0], 2.0)
    text = overlap.describe([one, one])
    assert text.startswith("0.50 MB at 5%, 0.25 MB at 25%, 0.25 MB at 100%; ")
    assert text.endswith(
        "2 of 3 messages, 0.75 of 1.00 MB, left before the last of 3 segments began (at 50%)"
    )
    one.segments = []
    assert overlap.describe([one]) == "0.50 MB at 5%, 0.25 MB at 25%, 0.25 MB at 100%"
