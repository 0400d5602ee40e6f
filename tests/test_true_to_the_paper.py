"""What the paper and its authors' code do where it is easy to do otherwise; see docs/differences.md."""

import copy
import inspect
import itertools
import math
import re
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rewire
from rewire import Connections, SparseLinear, budgets
from rewire.methods import METHODS
from rewire.methods.gse import grow_and_prune
from rewire.methods.options import OPTIONS
from rewire.methods.pruning import layers_of
from rewire.methods.sharing import share_at_random
from rewire.methods.snip import snip_scores
from rewire.methods.synflow import synflow_scores
from rewire.ops.sampling import Stream
from rewire.report import paper
from rewire.reproduce import measured
from rewire.training.config import read_run, resolve
from rewire.training.job import Job
from rewire.training.loop import Trainer
from rewired import by_key, layers, mlp, net, rows, sgd
from test_registry import Net, batch
from test_training import job_of, result, run

# Algorithm 1 --------------------------------------------------------------------------------------


def test_algorithm_1_on_figure_1() -> None:
    """A and theta of the paper's figure: (2, 2) is pruned and (3, 2) grown."""
    A = Connections.from_keys(torch.tensor([2, 3, 4, 7]), 3, 3)  # output * 3 + input, from 0
    theta = torch.tensor([0.73, -0.48, -0.14, -0.46])
    S = Connections.from_keys(torch.tensor([0, 5, 6]), 3, 3)
    (after,) = grow_and_prune([A], [theta], [S], [torch.tensor([0.1, -0.9, 0.2])], 0.25)
    assert after.connections.keys().tolist() == [2, 3, 5, 7]
    assert after.follow(theta).tolist() == pytest.approx([0.73, -0.48, 0.0, -0.46])


def test_algorithm_1_compares_layers_and_counts_them_together() -> None:
    A = [Connections.from_keys(torch.arange(4), 4, 4), Connections.from_keys(torch.arange(5), 5, 5)]
    theta = [torch.tensor([0.1, 0.2, 9.0, 8.0]), torch.tensor([5.0, 6.0, 7.0, 0.3, 0.4])]
    S = [
        Connections.from_keys(torch.tensor([6, 9]), 4, 4),
        Connections.from_keys(torch.tensor([8]), 5, 5),
    ]
    grad = [torch.tensor([0.1, -0.2]), torch.tensor([0.3])]
    first, second = grow_and_prune(A, theta, S, grad, 0.2)  # k = ceil(0.2 * 9) = 2
    assert first.connections.keys().tolist() == [2, 3, 9]
    assert second.connections.keys().tolist() == [0, 1, 2, 3, 4, 8]
    every = grow_and_prune(A, theta, S, grad, 0.9)  # k = |S|, not ceil(0.9 * 9)
    assert sum(int(one.grown.sum()) for one in every) == 3
    assert sum(int(one.pruned.sum()) for one in every) == 3
    assert sum(len(one.connections) for one in every) == 9


def test_gse_runs_that_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from rewire.methods import gse

    seen: list[Any] = []
    whole = gse.grow_and_prune

    def spy(*given: Any) -> Any:
        seen.append(whole(*given))
        return seen[-1]

    monkeypatch.setattr(gse, "grow_and_prune", spy)
    model = mlp()
    rewirer = rewire.GSE(model, sgd(model), every=1, until=9)
    F.cross_entropy(model(rows(0)[0]), rows(0)[1]).backward()
    rewirer.step()
    (after,) = seen
    layers = [m for m in model if isinstance(m, SparseLinear)]
    for layer, one in zip(layers, after, strict=True):
        assert layer.connections.keys().tolist() == one.connections.keys().tolist()


def test_scores_that_gse_would_ignore_are_refused() -> None:
    for rule in ("growth", "survival"):
        with pytest.raises(TypeError, match=rf"Other.{rule}\(\) would not be used"):
            type("Other", (rewire.GSE,), {rule: lambda self, view: view.weights})
    type("Other", (rewire.GSE,), {"explore": lambda self, view: view.draw(1.0)})


def test_the_page_on_methods_quotes_that_function() -> None:
    page = (Path(__file__).parents[1] / "docs/methods.md").read_text()
    quoted = page.split("<!-- quoted: grow_and_prune -->\n```python\n")[1].split("```")[0]
    assert inspect.getsource(grow_and_prune).endswith(textwrap.indent(quoted, "    "))


def test_rigl_is_a_rule_on_the_template() -> None:
    own = {name for name in vars(rewire.RigL) if not name.startswith("__")}
    assert own == {"explore"}
    assert "__init__" not in vars(rewire.RigL)


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_gse_of_everything_is_rigl_without_listing_it(scope: str) -> None:
    found = []
    for make in (rewire.RigL, lambda *a, **k: rewire.GSE(*a, subset=math.inf, **k)):
        model = net()
        optimizer = sgd(model)
        rewirer = make(model, optimizer, every=2, until=20, fraction=0.3, scope=scope)
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(6, 2, 8, 8, generator=torch.Generator().manual_seed(step))
            F.cross_entropy(model(x), torch.arange(6) % 4).backward()
            optimizer.step()
            rewirer.step()
        found.append((model.state_dict(), list(rewirer.history)))
    (mine, history), (theirs, other) = found
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert history == other


# SET grows uniformly over the model ---------------------------------------------------------------


def two_layers() -> nn.Module:
    """Inactive: 9,700 of the first and 300 of the second; active: 300 of each."""
    return nn.Sequential(
        SparseLinear(100, 100, connections=300), nn.ReLU(), SparseLinear(100, 6, connections=300)
    )


def grown_by_set(seed: int, **options: Any) -> list[int]:
    model = two_layers()
    settings = {"every": 1, "until": 9, "fraction": lambda t: 1 / 3, "seed": seed, **options}
    rewirer = rewire.SET(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    model(torch.randn(4, 100)).square().sum().backward()
    rewiring = rewirer.step()
    assert rewiring is not None
    assert rewiring.grown == rewiring.pruned == 200
    return [part.grown for part in rewiring.layers.values()]


def test_set_grows_uniformly_over_all_that_is_inactive() -> None:
    counts = [grown_by_set(seed)[1] for seed in range(40)]
    # Hypergeometric: 200 of 10,000, of which 300 are in the second layer: 6 on average, deviation 2.4.
    assert abs(sum(counts) / 40 - 6) < 5 * 2.4 / math.sqrt(40)
    assert len(set(counts)) > 3
    assert grown_by_set(0, growth="proportional") == [100, 100]
    with pytest.raises(ValueError, match="growth must be one of uniform, proportional"):
        grown_by_set(0, growth="even")


@settings(max_examples=60, deadline=None)
@given(limits=st.lists(st.integers(0, 10**12), min_size=1, max_size=6), part=st.floats(0, 1))
def test_shares_at_random_keep_within_their_limits(limits: list[int], part: float) -> None:
    total = int(part * min(sum(limits), 2000))
    counts = share_at_random(total, limits, Stream(3, 0, step=1, layer=2))
    assert sum(counts) == total
    assert all(0 <= count <= limit for count, limit in zip(counts, limits, strict=True))
    assert counts == share_at_random(total, limits, Stream(3, 4, step=1, layer=2))


@pytest.mark.parametrize(("limits", "total"), [([3, 5], 2), ([3, 5], 6), ([40, 0, 60], 7)])
def test_shares_at_random_are_hypergeometric(limits: list[int], total: int) -> None:
    draws = [share_at_random(total, limits, Stream(seed, 0, 1, 0))[0] for seed in range(2000)]
    first, others = limits[0], sum(limits) - limits[0]
    for count in range(max(0, total - others), min(total, first) + 1):
        ways = math.comb(first, count) * math.comb(others, total - count)
        share = ways / math.comb(sum(limits), total)
        deviation = math.sqrt(share * (1 - share) / 2000)
        assert abs(draws.count(count) / 2000 - share) < 4 * deviation + 1e-9


def test_shares_at_random_are_drawn_without_listing_all_places() -> None:
    limits, total = [1_000_000, 3_000_000], 300_000  # as at 75 % sparsity
    tracemalloc.start()
    counts = share_at_random(total, limits, Stream(0, 0, step=1, layer=0))
    _, peak = tracemalloc.get_traced_memory()  # of numpy, as draws by numpy were
    tracemalloc.stop()
    assert abs(counts[0] - total / 4) < 5 * math.sqrt(total * 3 / 16)
    assert peak < 8 * sum(limits) / 3


# The same start for all methods -------------------------------------------------------------------


def test_reinitialize_draws_what_sparse_layers_draw() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(100, 50), nn.Linear(50, 7))
    kept = model[3].weight.clone()
    assert rewire.reinitialize(model, keep_dense="3", seed=1) is model
    for layer, fan_in in ((model[0], 27), (model[2], 100)):
        for parameter in (layer.weight, layer.bias):
            assert isinstance(parameter, Tensor)
            bound = math.sqrt(3 / fan_in)
            assert 0.8 * bound < float(parameter.detach().abs().max()) <= bound
        assert float(layer.weight.detach().std()) == pytest.approx(math.sqrt(1 / fan_in), rel=0.1)
    assert torch.equal(model[3].weight, kept)
    again = rewire.reinitialize(copy.deepcopy(model), seed=1)
    assert torch.equal(again[0].weight, model[0].weight)
    assert not torch.equal(rewire.reinitialize(again, seed=2)[0].weight, model[0].weight)


def test_reinitialize_reaches_packed_projections() -> None:
    attention = nn.MultiheadAttention(16, 2)
    before = attention.in_proj_weight.detach().clone()
    rewire.reinitialize(attention)
    assert not (attention.in_proj_weight == before).any()


BORN_DENSE = ("snip", "grasp", "synflow", "gradual", "topkast", "lottery")


@pytest.mark.parametrize("method", BORN_DENSE)
def test_methods_that_begin_dense_begin_as_sparse_ones_do(method: str) -> None:
    more = {"every": 5} if method in ("gradual", "topkast") else {}
    job = job_of(method=method, **more)
    assert job.config.initial == "fan-in"
    linear = [m for m in job.dense().modules() if isinstance(m, nn.Linear)]
    for layer in linear:
        bound = math.sqrt(3 / layer.in_features)
        for parameter in (layer.weight, layer.bias):
            assert 0.6 * bound < float(parameter.detach().abs().max()) <= bound
    own = job_of(method=method, initial="own", **more)
    torch.manual_seed(own.config.seed)
    (first, *_) = [m for m in own.dense().modules() if isinstance(m, nn.Linear)]
    assert float(first.weight.detach().abs().max()) <= math.sqrt(1 / first.in_features)


def test_library_calls_keep_the_users_weights() -> None:
    model = Net()
    before = set(model.fc1.weight.detach().flatten().tolist())
    pruned = rewire.snip(model, [batch(0)], F.cross_entropy, sparsity=0.5)
    (fc1,) = [layer for name, layer in layers(pruned).items() if name == "fc1"]
    assert set(fc1.values.flatten().tolist()) <= before


# Budgets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["vit", "vgg16", "resnet56"])
def test_recipes_hold_exactly_as_many_connections_as_pruning_keeps(model: str) -> None:
    from rewire import data, flops, models

    config = resolve({"dataset": "cifar10", "model": model, "method": "gse", "sparsity": 0.9})
    shape, classes = data.sizes("cifar10")
    with torch.device("meta"):
        dense = models.for_images(model, shape, classes)
    found = flops.assigned(dense, shape, 0.9, exact=config.exact).layers.values()
    weights = sum(layer.weights for layer in found)
    assert sum(layer.connections for layer in found) == budgets.held(weights, 1 - 0.9)


def test_all_methods_of_a_table_hold_the_same_number(tmp_path: Path) -> None:
    held = set()
    for name in METHODS.keys() - {"dense", "lottery"}:  # the lottery: see test_registry
        more = {"every": 5} if "every" in METHODS[name].options else {}
        trainer = Trainer(job_of(method=name, sparsity=0.9, **more))
        trainer.begin()
        if name == "gradual":
            while trainer.step < trainer.schedule.steps:
                trainer._epoch()
                trainer._evaluate()
        layers = [m for m in trainer.model.modules() if isinstance(m, rewire.ConnectedLayer)]
        held.add(sum(layer.count for layer in layers))
    assert len(held) == 1


# Rewiring before a step, or instead of it ---------------------------------------------------------


def losses(model: nn.Module, *steps: int) -> Iterator[Tensor]:
    for step in steps:
        x, y = rows(step)
        yield F.cross_entropy(model(x), y)


@pytest.mark.parametrize("make", [rewire.GSE, rewire.RigL])
def test_growth_batches_rewire_before_the_step(make: Callable[..., Any]) -> None:
    model = mlp()
    optimizer = sgd(model)
    rewirer = make(model, optimizer, every=2, until=40, growth_batches=2, fraction=0.3)
    assert not rewirer.waits
    sum(losses(model, 0)).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert rewirer.step() is None
    assert rewirer.waits
    sum(losses(model, 7)).backward()  # type: ignore[union-attr]
    assert not rewirer.gradients  # the step's own batches are not looked at
    bias = model[0].bias.grad.clone()  # type: ignore[index, union-attr, operator]
    full = rewire.densify(copy.deepcopy(model)).double()
    full.zero_grad()
    for step in (20, 21):
        x, y = rows(step)
        F.cross_entropy(full(x.double()), y).backward()
    before = {n: set(m.connections.keys().tolist()) for n, m in layers(model).items()}
    weights = {n: by_key(m) for n, m in layers(model).items()}
    rewiring = rewirer.rewire(losses(model, 20, 21))
    assert torch.equal(model[0].bias.grad, bias)  # type: ignore[index, union-attr, arg-type]
    assert (rewiring.step, rewiring.grown) == (2, rewiring.pruned)
    assert rewiring.grown > 0
    after = {n: set(m.connections.keys().tolist()) for n, m in layers(model).items()}
    if make is rewire.RigL:  # the largest of the summed gradient, and the smallest weights of now
        score = {
            (n, key): abs(float(full.get_submodule(n).weight.grad.flatten()[key]))  # type: ignore[union-attr, index]
            for n, m in layers(model).items()
            for key in range(m.n_in * m.n_out)
            if key not in before[n]
        }
        best = sorted(score, key=score.__getitem__)[-rewiring.grown :]
        assert {(n, key) for n in after for key in after[n] - before[n]} == set(best)
    largest = {n: max(w, key=lambda k, w=w: abs(w[k])) for n, w in weights.items()}
    small = sorted(
        (abs(v), n, k) for n, w in weights.items() for k, v in w.items() if k != largest[n]
    )
    assert {(n, k) for n in before for k in before[n] - after[n]} == {
        (n, k) for _, n, k in small[: rewiring.pruned]
    }
    assert not rewirer.waits
    with pytest.raises(RuntimeError, match="no rewiring is due before step 2"):
        rewirer.rewire(losses(model, 20, 21))
    optimizer.zero_grad()
    sum(losses(model, 1)).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert rewirer.step() is None
    assert [r.step for r in rewirer.history] == [2]


def test_forgotten_and_wrong_growth_batches_raise() -> None:
    model = mlp()
    rewirer = rewire.GSE(model, sgd(model), every=1, until=9, growth_batches=2)
    with pytest.raises(RuntimeError, match=r"step 1 begins with a rewiring: call rewire\(losses\)"):
        rewirer.step()
    assert rewirer.t == 0
    with pytest.raises(ValueError, match="expected growth_batches=2 losses, got 1"):
        rewirer.rewire(losses(model, 0))
    with pytest.raises(ValueError, match="computed before rewire"):
        rewirer.rewire([*losses(model, 0, 1)])
    assert rewirer.rewire(losses(model, 0, 1)).grown > 0
    with pytest.raises(ValueError, match="growth_batches must be 0"):
        rewire.GSE(model, sgd(model), every=1, until=9, growth_batches=-1)


def test_a_state_from_between_the_rewiring_and_its_step() -> None:
    parts = []
    for load in (False, True):
        model = mlp()
        optimizer = sgd(model)
        rewirer = rewire.GSE(model, optimizer, every=1, until=9, growth_batches=1)
        if load:
            for part, state in zip((rewirer, model, optimizer), parts[0], strict=True):
                part.load_state_dict(state)  # type: ignore[attr-defined]
            assert not rewirer.waits
            assert rewirer.step() is None
        else:
            rewirer.rewire(losses(model, 0))
            parts.append([part.state_dict() for part in (rewirer, model, optimizer)])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "given",
    [
        {"growth_batches": 2},
        {"instead_of_step": True},
        {"method": "rigl", "growth_batches": 1},
        {"method": "topkast", "explore": 1.0},
        {"method": "gradual", "curve": "cosine"},
    ],
    ids=str,
)
def test_runs_with_other_rewirings_are_resumed_to_the_bit(
    given: dict[str, Any], tmp_path: Path
) -> None:
    job = job_of(every=5, **given)
    run(job, tmp_path / "new")
    run(job, tmp_path / "old", {4, 5, 11})
    assert result(tmp_path / "old") == result(tmp_path / "new")


def test_algorithm_2_leaves_out_the_step() -> None:
    trainer = Trainer(job_of(every=5, instead_of_step=True))
    trainer.begin()
    moved = []
    for x, y in trainer.train:
        before = [p.detach().clone() for p in trainer.model.parameters() if p.dim() == 1]  # biases
        trainer._step(x, y)
        after = [p for p in trainer.model.parameters() if p.dim() == 1]
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        if len(moved) == 6:
            break
    assert moved == [True, True, True, True, False, True]
    assert [r.step for r in trainer.rewirer.history] == [5]  # type: ignore[attr-defined]


# FLOPs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"growth_batches": 2}, {"instead_of_step": True}], ids=str)
def test_training_flops_are_those_of_the_steps_as_they_were(given: dict[str, Any]) -> None:
    trainer = Trainer(job_of(every=5, **given))
    trainer.begin()
    forward, total = trainer.spent.forward, 0.0
    assert trainer.spent.forward.sparse > 0
    for x, y in trainer.train:
        before = trainer.spent.forward
        trainer._step(x, y)
        after = trainer.spent.forward
        if trainer.rewiring is None:
            total += 3 * before.sparse
            continue
        explored = sum(
            layer.of(trainer.rewiring.layers[name].subset) for name, layer in before.layers.items()
        )
        total += {
            "": 3 * before.sparse + explored,
            "growth_batches": 2 * (2 * before.sparse + explored) + 3 * after.sparse,
            "instead_of_step": 2 * before.sparse + explored,
        }["".join(given)]
    assert trainer.spent.total == total
    held = {n: m.count for n, m in layers(trainer.model).items()}
    assert {n: layer.connections for n, layer in trainer.spent.forward.layers.items()} == held
    assert trainer.spent.forward != forward


def test_the_summary_of_a_run_has_the_mean_over_its_steps() -> None:
    """Not what the last connections would give: GSE's cost grows on the way."""

    class Counting(Trainer):
        total = 0.0

        def _step(self, x: Tensor, y: Tensor) -> None:
            before = self.spent.forward
            super()._step(x, y)
            self.total += 3 * before.sparse
            if self.rewiring is not None:
                for name, layer in before.layers.items():
                    self.total += layer.of(self.rewiring.layers[name].subset)

    trainer = Counting(job_of(every=5))
    summary = trainer.run()
    assert summary["training_flops"] == pytest.approx(trainer.total / summary["steps"])
    assert summary["training_flops"] != pytest.approx(3 * summary["flops"], rel=1e-3)


# The report ---------------------------------------------------------------------------------------


def test_like_is_compared_with_like() -> None:
    config = vars(resolve({"dataset": "cifar10", "model": "vgg16", "sparsity": 0.98}))
    assert paper.lookup(config) is not None
    for other in (
        *({"subset": 2.0}, {"distribution": "grabo"}, {"assignment": "erk"}, {"scope": "layer"}),
        *({"lr": 0.2}, {"every": 100}, {"growth_batches": 1}, {"warmup": 5.0}),
    ):
        assert paper.lookup({**config, **other}) is None
        found = paper.nearest({**config, **other})
        assert found is not None
        assert found.accuracy == 85.1
        assert list(paper.differences({**config, **other})) == list(other)
    assert not paper.differences({**config, "seed": 7, "scale": 0.1, "storage": "masked"})


def test_where_the_paper_contradicts_itself() -> None:
    config = vars(resolve({"dataset": "cifar100", "model": "vit", "method": "dense"}))
    (note,) = paper.contradictions(config)
    found = {
        one.accuracy
        for table in paper.TABLES
        for one in paper.printed(table)
        if one.fits(config) and one.settings.get("width") == 1
    }
    assert found == {58.8, 60.3}
    assert all(f"{accuracy} %" in note for accuracy in found)
    assert not paper.contradictions({**config, "model": "vgg16"})


def test_figure_8_has_the_authors_sizes_and_sparsities() -> None:
    keys = [one.key for one in measured.matmul(1.0)]
    assert list(dict.fromkeys(key["units"] for key in keys)) == [2048, 4096, 8192, 16384]
    sparsities = list(dict.fromkeys(key["sparsity"] for key in keys))
    expected = 1 - torch.logspace(math.log10(0.2), math.log10(0.001), 10, dtype=torch.float64)
    assert sparsities == pytest.approx(expected.tolist(), abs=1e-6)


# Smaller ------------------------------------------------------------------------------------------


def test_snip_scores_with_the_loss_of_the_run() -> None:
    kept = []
    for smoothing in (0.0, 0.4):
        job = job_of(method="snip", label_smoothing=smoothing, sparsity=0.9)
        trainer = Trainer(job)
        trainer.begin()
        kept.append({n: m.connections.keys().tolist() for n, m in layers(trainer.model).items()})
        model, found = layers_of(job.dense())
        scores = snip_scores(
            *(model, found, job.batches(10)),
            lambda a, b, s=smoothing: F.cross_entropy(a, b, label_smoothing=s),
        )
        flat = torch.cat([score.flatten() for score in scores.values()])
        limit = flat.sort(descending=True).values[sum(map(len, kept[-1].values())) - 1]
        for (_, score), keys in zip(scores.items(), kept[-1].values(), strict=True):
            assert (score.flatten() >= limit).nonzero().flatten().tolist() == keys
    assert kept[0] != kept[1]


def test_gradual_can_follow_a_cosine() -> None:
    model = rewire.sparsify(Net(), density=1, weights="keep", storage="masked")
    rewirer = rewire.Gradual(model, sgd(model), sparsity=0.9, every=10, until=100, curve="cosine")
    for t in (0, 10, 50, 100):
        assert rewirer.target(t) == pytest.approx(0.9 * (1 - (1 + math.cos(math.pi * t / 100)) / 2))
    with pytest.raises(ValueError, match="curve must be one of cubic, cosine"):
        rewire.Gradual(model, sgd(model), sparsity=0.9, until=100, curve="linear")


def test_topkast_can_choose_after_every_step() -> None:
    model = rewire.sparsify(Net(), sparsity=0.8, weights="dense", storage="masked")
    rewirer = rewire.TopKAST(model, sgd(model), every=5, explore=3)
    assert [t for t in range(13) if rewirer.due(t)] == [1, 2, 3, 5, 10]


def test_synflow_can_let_a_softmax_pass() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(6, 18, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v)

    model = Attention()
    _, found = layers_of(model)
    sample = torch.zeros(1, 4, 6)
    scores = synflow_scores(model, found, sample, softmax="identity")["qkv.weight"]
    weight = model.qkv.weight.detach().double().abs().requires_grad_()
    q, k, v = (torch.ones(1, 4, 6, dtype=torch.float64) @ weight.T).chunk(3, -1)
    flow = (q @ k.transpose(-1, -2) / math.sqrt(6) @ v).sum()
    (gradient,) = torch.autograd.grad(flow, weight)
    torch.testing.assert_close(scores, (gradient * weight).abs().detach())
    assert not torch.allclose(scores, synflow_scores(model, found, sample)["qkv.weight"])


def test_synflow_takes_the_magnitude_of_computed_positions_too() -> None:
    angles = torch.linspace(1, 6, 24).view(4, 6)

    class Placed(nn.Module):
        def __init__(self, computed: bool) -> None:
            super().__init__()
            self.register_buffer("kept", angles.sin().abs() + angles.cos().abs())
            self.fc = nn.Linear(6, 3)
            self.computed = computed

        def forward(self, x: Tensor) -> Tensor:
            waves = angles.sin() + angles.cos()
            return self.fc(x + (waves if self.computed else self.kept))

    torch.manual_seed(0)
    models = [Placed(True), Placed(False)]
    models[1].fc.load_state_dict(models[0].fc.state_dict())
    scores = [
        synflow_scores(model, layers_of(model)[1], torch.zeros(1, 4, 6))["fc.weight"]
        for model in models
    ]
    torch.testing.assert_close(*scores)


def test_keys_that_ascend_are_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.arange(0, 60, 3)
    plain = Connections.from_keys(keys, 8, 8)
    monkeypatch.setattr(Tensor, "sort", None)
    assert Connections.from_keys(keys, 8, 8).keys().tolist() == keys.tolist()
    mask = torch.arange(20) % 2 == 0
    assert plain.where(mask).keys().tolist() == keys[mask].tolist()
    assert plain.where(torch.zeros(20, dtype=torch.bool)).keys().tolist() == []


# Options ------------------------------------------------------------------------------------------


def test_options_are_taken_by_what_makes_the_method() -> None:
    by_the_run = {"storage", "initial", "rounds", "instead_of_step"}
    for name, option in OPTIONS.items():
        assert set(option.differs) <= set(option.of) <= set(METHODS)
        for method in set() if name in by_the_run else option.of:
            assert name in inspect.signature(METHODS[method].make).parameters, method


def test_recipes_and_the_library_have_the_same_defaults() -> None:
    assert OPTIONS["l1"].default == 1e-4
    by_the_run = {"until", "explore", "initial", "instead_of_step", "rounds", "scope", "storage"}
    for name in OPTIONS.keys() - by_the_run:
        for method in OPTIONS[name].of:
            there = inspect.signature(METHODS[method].make).parameters[name].default
            assert there == OPTIONS[name].differs.get(method, OPTIONS[name].default), (name, method)
    for method in OPTIONS["scope"].of:
        there = inspect.signature(METHODS[method].make).parameters["scope"].default
        assert there == OPTIONS["scope"].differs.get(method, "global"), method


ONE_MORE = """
from importlib.machinery import SourceFileLoader

plain = SourceFileLoader.get_code
row = 'temperature": Option("float", "Divides logits.", 200.0, "200", of=("grasp",), over=0),'


def get_code(self, name):
    if name != "rewire.methods.options":
        return plain(self, name)
    first, *rest = self.get_source(name).split('"softmax": Option(')
    return compile(f'{first} "{row} "softmax": Option({rest[0]}', name, "exec")


SourceFileLoader.get_code = get_code
import pathlib, typer.testing
from rewire.cli import app
from rewire.training import methods
from rewire.training.config import resolve
from rewire.training.job import Job, load_data

given = [*"train --out run --method grasp --epochs 1 --drops= --temperature".split()]
result = typer.testing.CliRunner().invoke(app, [*given, "0"])
assert "temperature must be above 0, got 0.0" in result.output, result.output
result = typer.testing.CliRunner().invoke(app, [*given, "0.5"])
assert result.exit_code == 0, result.output
assert "temperature = 0.5" in pathlib.Path("run/config.toml").read_text().splitlines()
config = resolve({"method": "grasp", "temperature": 0.5})
assert methods._settings(Job(config, load_data(config)))["temperature"] == 0.5
assert resolve({"method": "grasp"}).temperature == 200.0
try:
    resolve({"method": "gse", "temperature": 1.0})
except ValueError as error:
    print(error)
"""


def test_a_new_option_is_one_row(tmp_path: Path) -> None:
    """Command line, config, checks and what makes the method follow a row that is put into the table."""
    command = [sys.executable, "-c", ONE_MORE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "gse has no temperature, leave it out; it is for grasp\n"


def test_the_page_on_training_names_the_options_of_every_method() -> None:
    page = (Path(__file__).parents[1] / "docs/training.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| `\w+`", line)]
    found = {}
    for row in rows:
        _, methods, options, _ = row.split("|")
        names = re.sub(r"\(.*?\)", "", options).split(",")
        found |= {name: {o.strip() for o in names} for name in re.findall(r"`(\w+)`", methods)}
    assert found == {name: set(method.options) for name, method in METHODS.items()}


def test_the_page_on_differences_names_options_that_there_are() -> None:
    page = (Path(__file__).parents[1] / "docs/differences.md").read_text()
    spans = re.findall(r"`(--[^`]+)`", page)
    named = {pair for s in spans for pair in re.findall(r"--([a-z0-9-]+)(?: ([^ -]\S*))?", s)}
    assert len(named) > 12
    for flag, value in named:
        name = flag.removeprefix("no-").replace("-", "_")
        method = OPTIONS[name].of[0] if name in OPTIONS else "gse"
        plain = {"no-exact": False, "instead-of-step": True}.get(flag, value)
        number = isinstance(plain, str) and re.fullmatch(r"[0-9.e-]+|inf", plain)
        kind = int if name == "growth_batches" else float
        settings = {"method": method, name: kind(value) if number else plain}
        assert getattr(resolve({"dataset": "imagenet", **settings}), name) == settings[name]


def test_a_file_from_before_an_option_means_what_runs_did_then(tmp_path: Path) -> None:
    for method, name, before in (("set", "growth", "proportional"), ("snip", "initial", "own")):
        text = resolve({"method": method}).to_toml()
        old = "".join(line for line in text.splitlines(True) if not line.startswith(name))
        assert old != text
        (tmp_path / "config.toml").write_text(old)
        assert getattr(resolve(read_run(tmp_path / "config.toml")), name) == before
    assert resolve({"method": "set"}).growth == "uniform"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"subset": 0.0}, "subset must be above 0, got 0"),
        ({"growth_batches": -1}, "growth_batches must be at least 0"),
        ({"until": math.inf}, "until must be above 0 and below inf"),
        ({"method": "set", "growth": "even"}, "no growth 'even'; choose one of uniform, prop"),
        ({"instead_of_step": True, "growth_batches": 2}, "leave out growth_batches"),
        ({"method": "set", "growth_batches": 1}, "it is for rigl, gse"),
    ],
)
def test_options_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(given)
    assert resolve({"subset": math.inf}).subset == math.inf


def test_growth_batches_are_others_at_every_step_and_for_every_seed() -> None:
    job = job_of(every=5, growth_batches=2)
    batch_size = job.config.batch_size
    first, again, later, other = (
        [x for x, _ in one.growth_batches(step)]
        for one, step in (
            (job, 5),
            (job, 5),
            (job, 10),
            (job_of(every=5, growth_batches=2, seed=1), 5),
        )
    )
    assert [len(x) for x in first] == [batch_size, batch_size]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    train, _ = job.dataset.loaders(batch_size, seed=job.config.seed)
    trained = [x for x, _ in itertools.islice(train, 2)]
    for others in (later, other, trained, first[::-1]):
        assert not any(torch.equal(a, b) for a, b in zip(first, others, strict=True))


def test_more_growth_batches_than_there_are() -> None:
    job = job_of(every=5)
    many = job.schedule.steps_per_epoch + 1
    with pytest.raises(ValueError, match="growth_batches must be at most an epoch"):
        Job(resolve({**vars(job.config), "growth_batches": many}), job.dataset)
