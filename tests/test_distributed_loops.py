"""Data-parallel training, with real processes: whatever else happens in a loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from parallel import Job, Net, batch, build, run, same, sgd, share
from rewire import SparseLayer, distributed


class Branches(nn.Module):
    """Layers that some ranks, or none, use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, second: bool) -> Tensor:
        return (self.second if second else self.first)(x)  # type: ignore[no-any-return]


def branches() -> nn.Module:
    return rewire.sparsify(Branches().double(), sparsity=0.5)


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
