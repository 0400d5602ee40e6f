"""Data-parallel training, with real processes: two ranks do what one does."""

import contextlib
import multiprocessing
import os
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
    assert len(alone["rewirings"]) >= 5
    for rank in two:
        same(rank[case], alone)
    for key, mine in two[0][case]["state"].items():  # among themselves to the bit
        assert torch.equal(mine, two[1][case]["state"][key])
    if method in ("uniform", "dsr"):
        assert len(alone["lengths"]) > 1


# Whatever else happens in a loop ----------------------------------------------------------------


class Branches(nn.Module):
    """Layers that some ranks, or none, use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, second: bool) -> Tensor:
        return (self.second if second else self.first)(x)  # type: ignore[no-any-return]


def branches() -> nn.Module:
    return rewire.sparsify(Branches().double(), sparsity=0.5)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def layers_of(model: nn.Module) -> dict[str, SparseLayer]:
    return {n: m for n, m in model.named_modules() if isinstance(m, SparseLayer)}


def unused_parameters(rank: int, world: int) -> Any:
    model = branches()
    distributed.Parallel(model)
    rewirer = rewire.GSE(model, sgd(model), every=1, until=50, fraction=0.5)
    model(torch.full((2, 6), 1.0 + rank, dtype=torch.float64), second=rank == 1).sum().backward()
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    rewirer.optimizer.step()
    rewiring = rewirer.step()
    assert rewiring is not None
    grown = {name: layer.grown for name, layer in rewiring.layers.items()}
    return grads, grown, {n: layer.indices for n, layer in layers_of(model).items()}


def different_ways(rank: int, world: int) -> Any:
    model = branches()
    distributed.Parallel(model)
    rewirer = rewire.GSE(model, sgd(model), every=1, until=50, distribution="grabo")
    model(torch.ones(2, 6, dtype=torch.float64), second=rank == 1).sum().backward()
    rewirer.step()


def different_lengths(rank: int, world: int) -> Any:
    """One rank is done with its backward pass when the other is at one more layer."""
    model = branches()
    distributed.Parallel(model)
    rewirer = rewire.GSE(model, sgd(model), every=1, until=50, distribution="graest")
    x = torch.ones(2, 6, dtype=torch.float64)
    model(x if rank == 0 else model(x, second=True), second=False).sum().backward()
    rewirer.step()


def other_connections(rank: int, world: int) -> Any:
    model = build()
    distributed.Parallel(model)
    opt = sgd(model)
    rewirer = rewire.SET(model, opt, every=1, until=9)
    if rank == 1:
        layer = layers_of(model)["fc1"]
        count = layer.values.numel()
        other = rewire.Connections.random(layer.n_in, layer.n_out, count)
        layer.set_connections(other, layer.values.detach())
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    opt.step()
    rewirer.step()


def other_model(rank: int, world: int) -> Any:
    distributed.Parallel(rewire.sparsify(nn.Sequential(nn.Linear(5, 4 + rank)), sparsity=0.5))


def other_optimizer(rank: int, world: int) -> Any:
    """Weights that drift apart are noticed as soon as they lead to other connections."""
    model = build()
    distributed.Parallel(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1 + rank)
    rewirer = rewire.GSE(model, opt, every=1, until=50)
    for step in range(20):
        opt.zero_grad()
        F.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
        opt.step()
        rewirer.step()


def handed_over(rank: int, world: int) -> None:
    model = rewire.sparsify(Net(), density=1, weights="keep", storage="masked")
    distributed.Parallel(model)
    rewire.Gradual(model, sgd(model), sparsity=0.5, every=1, until=2).step()


def forgotten(rank: int, world: int) -> Any:
    model = build()
    rewire.SET(model, sgd(model), every=3, until=9).step()


def stepping_too_early(rank: int, world: int) -> Any:
    model = nn.Linear(2, 1, bias=False)
    parallel = distributed.Parallel(model)
    opt = sgd(model)
    with parallel.no_sync():
        model(torch.full((1, 2), float(rank))).sum().backward()
    other = nn.Linear(2, 1)
    other(torch.ones(1, 2)).sum().backward()
    sgd(other).step()  # has nothing to do with it
    try:
        opt.step()
    except RuntimeError as error:
        parallel.average()
        opt.step()
        return str(error), model.weight.grad
    raise AssertionError("stepped with gradients that were not averaged")


def twice(rank: int, world: int) -> Any:
    """Without no_sync each pass is averaged; also where one of them does not reach all layers."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}).double()
    distributed.Parallel(model)
    x = torch.tensor([[1.0 + rank, 2.0]], dtype=torch.float64)
    model["b"](model["a"](x)).sum().backward()
    model["a"](x).sum().backward()
    once = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    both = [torch.tensor([[1.0 + r, 2.0]], dtype=torch.float64) for r in range(world)]
    for each in both:  # no hooks here: autograd.grad does not accumulate
        loss = model["b"](model["a"](each)).sum() + model["a"](each).sum()
        for p, g in zip(
            model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
        ):
            p.grad = g / world if p.grad is None else p.grad + g / world
    return once, [p.grad for p in model.parameters()]


def thawing(rank: int, world: int) -> Any:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    distributed.Parallel(model)
    found = []
    for _ in range(2):
        model.zero_grad()
        (model(torch.ones(1, 2)) * (rank + 1)).sum().backward()
        found.append(None if model.bias.grad is None else model.bias.grad.item())
        model.bias.requires_grad_(True)
    return found


def buffers(rank: int, world: int) -> Any:
    model = nn.BatchNorm1d(2)
    model.running_mean.fill_(5.0 + rank)  # type: ignore[union-attr]
    parallel = distributed.Parallel(model)
    start = model.running_mean.tolist()  # type: ignore[union-attr]
    model(torch.randn(4, 2) + 10 * rank)
    apart = model.running_mean.clone()  # type: ignore[union-attr]
    parallel.sync_buffers()
    return start, apart, model.running_mean  # type: ignore[return-value]


def sparse_gradient(rank: int, world: int) -> Any:
    model = nn.Embedding(4, 2, sparse=True)
    distributed.Parallel(model)
    model(torch.tensor([1])).sum().backward()


def uneven(rank: int, world: int) -> Any:
    """Shares of different size, each loss weighted by its share."""
    model = build()
    parallel = distributed.Parallel(model)
    opt = sgd(model)
    rewirer = rewire.GSE(model, opt, every=2, until=50, distribution="graest")
    for step in range(8):
        opt.zero_grad()
        x, y = share(rank, world, *batch(step, size=13))
        (F.cross_entropy(model(x), y, reduction="sum") / 13 * parallel.world).backward()
        opt.step()
        rewirer.step()
    return {
        "state": model.state_dict(),
        "rewirings": [(r.step, r.grown, r.subset) for r in rewirer.history],
    }


def each_alone(rank: int, world: int) -> Any:
    """Processes that train models of their own, each in a group of one."""
    groups = [dist.new_group([r]) for r in range(world)]
    model = build(seed=rank)
    parallel = distributed.Parallel(model, group=groups[rank])
    opt = sgd(model)
    rewirer = rewire.SET(model, opt, every=1, until=9)
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    opt.step()
    rewirer.step()
    return parallel.world, len(rewirer.history)


def numbers(rank: int, world: int) -> Any:
    distributed.barrier()
    return (
        *(distributed.rank(), distributed.world(), distributed.is_main()),
        *(distributed.total(rank + 1, torch.tensor(2.0)), distributed.average(rank + 1.0)),
    )


JOBS: list[Job] = [
    *(unused_parameters, different_ways, different_lengths),
    *(other_connections, other_model, other_optimizer, forgotten, handed_over),
    *(stepping_too_early, twice, thawing, buffers, sparse_gradient, uneven, each_alone, numbers),
]


def assorted(rank: int, world: int) -> dict[str, tuple[bool, Any]]:
    found: dict[str, tuple[bool, Any]] = {}
    for job in JOBS:
        try:
            found[job.__name__] = (True, job(rank, world))
        except Exception as error:
            found[job.__name__] = (False, f"{type(error).__name__}: {error}")
    return found


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Job], list[Any]]:
    found = run(assorted, store=tmp_path_factory.mktemp("assorted"))

    def of(job: Job, works: bool = True) -> list[Any]:
        for rank in found:
            assert rank[job.__name__][0] == works, rank[job.__name__][1]
        return [rank[job.__name__][1] for rank in found]

    return of


def test_parameters_without_gradient_on_some_ranks(outcome: Any) -> None:
    (grads, grown, indices), (others, other_grown, other_indices) = outcome(unused_parameters)
    assert grown == other_grown
    assert grown["first"] + grown["second"] > 0
    assert grown["never"] == 0
    for name, grad in grads.items():
        if name.startswith("never"):
            assert grad is None
            assert others[name] is None
        else:  # rank 0 had ones in the first, rank 1 twos in the second, two samples each; halved
            expected = 1.0 if name.startswith("first") or name.endswith("bias") else 2.0
            assert grad.eq(expected).all()
            assert others[name].eq(expected).all()
    for name, mine in indices.items():
        assert torch.equal(mine, other_indices[name])


@pytest.mark.parametrize("job", [different_ways, different_lengths])
def test_ranks_that_go_different_ways_are_told(outcome: Any, job: Job) -> None:
    for message in outcome(job, works=False):
        assert "RuntimeError: the processes went different ways" in message
        assert "draw uniformly" in message
        where = "at sparse layer 1" if job is different_ways else "done, at sparse layer 1"
        assert where in message


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (
            other_connections,
            "different connections after the rewiring of step 1: fc1 differs on rank 1",
        ),
        (other_model, "the processes have different models: 0.bias differs on rank 1 from rank 0"),
        (other_optimizer, "different connections after the rewiring"),
        (forgotten, "rewire.distributed.Parallel(model)"),
        (handed_over, 'give Gradual storage="masked"'),
        (sparse_gradient, "ValueError: weight has a gradient of layout torch.sparse_coo"),
    ],
)
def test_mistakes_are_errors_on_every_rank(outcome: Any, job: Job, message: str) -> None:
    for found in outcome(job, works=False):
        assert message in found


def test_steps_with_gradients_that_are_not_averaged_raise(outcome: Any) -> None:
    for message, grad in outcome(stepping_too_early):
        assert "the gradients of weight are not averaged" in message
        assert grad.tolist() == [[0.5, 0.5]]


def test_every_backward_pass_outside_no_sync_is_averaged(outcome: Any) -> None:
    for once, expected in outcome(twice):
        for mine, theirs in zip(once, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_parameters_may_be_thawed_later(outcome: Any) -> None:
    assert outcome(thawing) == [[None, 1.5], [None, 1.5]]


def test_buffers_are_those_of_rank_0_when_asked(outcome: Any) -> None:
    (start, mine, end), (other_start, apart, other_end) = outcome(buffers)
    assert start == other_start == [5.0, 5.0]
    assert not torch.equal(mine, apart)
    assert torch.equal(end, mine)
    assert torch.equal(other_end, mine)


def test_uneven_shares_have_the_signs_of_the_whole_batch(outcome: Any) -> None:
    alone = uneven(0, 1)
    for rank in outcome(uneven):
        same(rank, alone)


def test_processes_may_train_models_of_their_own(outcome: Any) -> None:
    assert outcome(each_alone) == [(1, 1), (1, 1)]


def test_numbers_are_summed_over_ranks(outcome: Any) -> None:
    assert outcome(numbers) == [(0, 2, True, (3.0, 4.0), (1.5,)), (1, 2, False, (3.0, 4.0), (1.5,))]
    assert distributed.total(3, 4.5) == distributed.average(3, 4.5) == (3.0, 4.5)
    assert (distributed.rank(), distributed.world(), distributed.is_main()) == (0, 1, True)


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
