"""Data-parallel training, with real processes: two ranks do what one does."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rewire
from parallel import LIMIT, STEPS, Net, batch, build, ranks, run, same, sgd, share
from rewire import SparseLayer, distributed

ROOT = Path(__file__).parents[1]

# What two ranks do, one does --------------------------------------------------------------------


METHODS: dict[str, Callable[..., rewire.Rewirer]] = {
    "uniform": lambda m, o: rewire.GSE(m, o, every=2, until=20),
    "grabo": lambda m, o: rewire.GSE(m, o, every=2, until=20, distribution="grabo"),
    "graest": lambda m, o: rewire.GSE(m, o, every=2, until=20, distribution="graest", subset=0.5),
    "graest layer": lambda m, o: rewire.GSE(
        m, o, every=2, until=30, distribution="graest", scope="layer"
    ),
    "set": lambda m, o: rewire.SET(m, o, every=2, until=20),
    "dsr": lambda m, o: rewire.DSR(m, o, every=2, until=20, threshold=0.05),
    "deepr": lambda m, o: rewire.DeepR(m, o, l1=0.05, temperature=0.01),
    "rigl": lambda m, o: rewire.RigL(m, o, every=2, until=20),
    "snfs": lambda m, o: rewire.SNFS(m, o, every=2, until=20),
    "graest masked": lambda m, o: rewire.GSE(m, o, every=2, until=20, distribution="graest"),
    "topkast": lambda m, o: rewire.TopKAST(m, o, every=2, until=20, penalty=0.5),
}
STARTS = {
    "graest masked": {"storage": "masked"},
    "topkast": {"storage": "masked", "weights": "dense"},
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}
CASES = [(m, o) for m in METHODS for o in OPTIMIZERS]


def train(rank: int, world: int, method: str, optimizer: str, micro: int = 1) -> dict[str, Any]:
    """A run; its ranks start from different models."""
    model = build(seed=rank, **STARTS.get(method, {}))
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


@pytest.mark.parametrize("case", [*CASES, ("uniform", "accumulated"), ("graest", "accumulated")])
def test_two_ranks_with_half_the_batch_train_as_one_with_all(
    two: list[Any], case: tuple[str, str]
) -> None:
    method, optimizer = case
    micro = 3 if optimizer == "accumulated" else 1
    alone = train(0, 1, method, "sgd" if optimizer == "accumulated" else optimizer, micro)
    assert sum(grown for _, grown, *_ in alone["rewirings"]) > 20
    assert len(alone["rewirings"]) >= 5
    for rank in two:
        same(rank[case], alone)
    for key, mine in two[0][case]["state"].items():  # among themselves to the bit
        assert torch.equal(mine, two[1][case]["state"][key])
    if method in ("uniform", "dsr"):
        assert len(alone["lengths"]) > 1


def test_only_values_travel(two: list[Any]) -> None:
    traffic = two[0]["uniform", "sgd"]["traffic"]
    model = build()
    parameters = [p.numel() for p in model.parameters()]
    dense = [p.numel() for p in Net().parameters()]
    assert traffic["averages"] == STEPS
    assert traffic["gradients"] == 8 * STEPS * (sum(parameters) + len(parameters))
    assert traffic["dense"] == 8 * STEPS * sum(dense)
    assert 0 < traffic["other"] < traffic["gradients"]
    assert "48" in (text := str(distributed.Traffic(1, 48, 100, 7)))
    assert "of dense" in text


# Ranks that are lost ----------------------------------------------------------------------------


def lost(rank: int, world: int, how: str, reported: str) -> None:
    model = build()
    dist.barrier()  # a busy machine may have started them far apart, which is not what is timed here
    distributed.Parallel(model, timeout=3)
    for step in range(2):
        dist.barrier()
        F.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
    if rank == 1 and how == "ends":
        os._exit(1)
    while rank == 1 and not Path(reported).exists():
        time.sleep(0.02)
    if rank == 0:
        F.cross_entropy(model(batch(2)[0]), batch(2)[1]).backward()


@pytest.mark.parametrize("how", ["ends", "hangs"])
def test_a_lost_rank_is_an_error_on_the_others(tmp_path: Path, how: str) -> None:
    reported = tmp_path / "reported"
    with ranks(lost, how, str(reported), store=tmp_path) as results:
        try:
            found = results(expected=1)
        finally:
            reported.touch()
    worked, message = found[0]
    assert not worked
    assert "averaging gradients over 2 processes failed on rank 0" in message


class Broken:
    """A message that gloo could not deliver."""

    def __init__(self, problem: str) -> None:
        self.problem = problem

    def wait(self) -> None:
        raise RuntimeError(self.problem)


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (
            "unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation to complete",
            TimeoutError,
        ),
        ("unbound_buffer.cc:79] Application timeout caused pair closure", TimeoutError),
        ("pair.cc:553] Connection closed by peer [127.0.0.1]:30311", ConnectionError),
    ],
)
def test_whatever_gloo_says_of_a_lost_rank(problem: str, kind: type[Exception]) -> None:
    """Which of the first two it is depends on which of its threads sees the end of the time first."""
    parallel = distributed.Parallel(build())
    bucket = parallel._buckets[0]
    bucket.work, bucket.flat = Broken(problem), torch.zeros(1)  # type: ignore[assignment]
    with pytest.raises(kind, match="averaging gradients over 1 processes failed on rank 0"):
        parallel._receive(bucket)


# In one process ---------------------------------------------------------------------------------


@pytest.fixture
def lone_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_process_needs_no_torchrun() -> None:
    assert distributed.setup("cpu") == torch.device("cpu")
    assert distributed.world() == 1
    model = build()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    parallel = distributed.Parallel(model)
    assert (parallel.rank, parallel.world, parallel.traffic.gradients) == (0, 1, 0)
    with parallel.no_sync():
        F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    sgd(model).step()
    parallel.average()
    parallel.sync_buffers()
    assert before.keys() == model.state_dict().keys()
    with pytest.raises(RuntimeError, match="made parallel already"):
        distributed.Parallel(model[0] if isinstance(model, nn.Sequential) else model)


@pytest.mark.parametrize(
    ("values", "layers", "given", "expected"),
    [
        (1 << 10, 8, None, [8]),  # at least 64 KB, of 32 KB
        (1 << 15, 8, None, [1] * 8),  # an eighth of 1 MB
        (1 << 16, 16, None, [2] * 8),  # an eighth of 4 MB
        (1 << 17, 32, None, [2] * 16),  # at most 1 MB, of 16 MB
        (1 << 10, 8, 8192, [2] * 4),
    ],
)
def test_the_size_of_messages(
    values: int, layers: int, given: int | None, expected: list[int]
) -> None:
    model = nn.ParameterList(torch.zeros(values) for _ in range(layers))
    parallel = distributed.Parallel(model, bucket_bytes=given)
    assert [len(bucket.indices) for bucket in parallel._buckets] == expected


@pytest.mark.usefixtures("lone_group")
def test_wrapping_in_ddp_raises() -> None:
    model = build()
    wrapper = DistributedDataParallel(model)
    for given in (wrapper, model):
        with pytest.raises(ValueError, match=r"take the wrapper off and call rewire.distributed"):
            rewire.SET(given, sgd(model), until=1000)
        with pytest.raises(ValueError, match=r"take the wrapper off and call rewire.distributed"):
            distributed.Parallel(given)
    del wrapper, given
    rewirer = rewire.SET(model, sgd(model), until=1000)
    again = DistributedDataParallel(model)  # after the rewirer was made
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        rewirer.step()
    assert again.module is model


def test_the_example_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--no-python"]
    command += [sys.executable, str(ROOT / "examples" / "distributed.py"), "--steps", "30"]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout
    assert re.search(r"MB of gradients in 30 averages, [0-9.]+% of dense", done.stdout), done.stdout
