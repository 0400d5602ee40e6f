"""FLOPs: what a forward pass takes, and training by method."""

import json
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import rewire
from rewire import costs, flops, models
from rewire.budgets import LayerSize, assign
from rewire.cli import app


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["flops", *arguments])


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 10))


@pytest.fixture(scope="module")
def resnet50() -> nn.Module:
    with torch.device("meta"):
        return models.build("resnet50", num_classes=1000)


# Counting -----------------------------------------------------------------------------------------


def test_what_would_be_is_what_is() -> None:
    would = flops.assigned(small(), (3, 8, 8), 0.8)
    made = flops.count(rewire.sparsify(small(), 0.8), (3, 8, 8))
    assert would == made


def test_a_dense_head_counts_in_full() -> None:
    found = flops.assigned(small(), (3, 8, 8), 0.8, dense_head=True)
    assert found.layers["2"].connections == 8 * 36 * 10
    assert found.layers["0"].connections < 3 * 9 * 8


def test_resnet50_is_that_of_the_literature(resnet50: nn.Module) -> None:
    dense = flops.count(resnet50, (3, 224, 224))
    assert dense.dense == pytest.approx(8.18e9, rel=1e-3)
    found = {s: flops.assigned(resnet50, (3, 224, 224), s).sparse for s in (0.9, 0.95, 0.98, 0.99)}
    shares = [round(count / dense.dense, 3) for count in found.values()]
    assert shares == [0.249, 0.124, 0.050, 0.025]


# Methods ------------------------------------------------------------------------------------------


def test_every_method_costs_what_its_formula_says() -> None:
    layer = flops.LayerFlops(positions=5, connections=10, weights=100)
    here, rounds = flops.Flops({"a": layer}), [flops.Flops({"a": flops.LayerFlops(5, 50, 100)})]
    f_d, f_s = 1000, 100
    setting = costs.Setting(every=9, subset=3.0, until=0.5, samples=20)
    found = {cost.method: cost for cost in costs.costs(here, rounds, setting)}
    training = {name: cost.training for name, cost in found.items()}
    assert training == {
        "dense": 3 * f_d,
        "lottery": 3 * 500 + 3 * f_s,
        "gradual": 0.5 * 3 * f_d + 0.5 * 3 * f_s,
        "gradual, if zeros were free": 0.5 * 3 * (f_d + 3 * f_s) / 4 + 0.5 * 3 * f_s,
        **dict.fromkeys(("static", "snip", "grasp", "synflow", "deepr", "dsr", "set"), 3 * f_s),
        "snfs": 2 * f_s + f_d,
        "topkast": 2 * f_s + 2 * f_s,
        "rigl": (27 * f_s + 2 * f_s + f_d) / 10,
        "gse": (27 * f_s + 2 * f_s + 3 * f_s) / 10,
    }
    before = {name: cost.before for name, cost in found.items() if cost.before}
    assert before == {"snip": 60 * f_d, "grasp": 180 * f_d, "synflow": 300 * f_d}


def test_gse_saves_what_the_paper_says(resnet50: nn.Module) -> None:
    savings = [
        costs.saving(
            flops.assigned(resnet50, (3, 224, 224), s, dense_head=head == "dense"),
            s,
            head,
            100,
            1.0,
        )
        for head in ("sparse", "dense")
        for s in (0.95, 0.99)
    ]
    both_ways = [(round(100 * s.of_rigl, 2), round(100 * s.of_gse, 2)) for s in savings]
    assert both_ways == [(2.27, 2.32), (11.44, 12.92), (2.38, 2.43), (11.71, 13.26)]
    assert costs.papers(savings) == ("dense", "gse")
    assert costs.papers(savings[:2]) is None  # with a sparse head nothing gives both
    assert costs.papers(savings[2:3]) is None


# The command --------------------------------------------------------------------------------------


def test_the_command_shows_which_ratio_is_the_papers() -> None:
    done = run("--method", "gse,rigl")
    assert done.exit_code == 0, done.output
    words = " ".join(done.stdout.split())
    for part in ("13.26 %", "11.44 %", "2.43 %", "2.27 %", "training, rigl", "8.18 G"):
        assert part in words
    assert "training, set" not in words
    assert (
        "The paper's 2.4 % at 95 % and 13.3 % at 99 % are those with a dense head, divided by GSE's FLOPs."
        in words
    )


def test_the_paper_is_not_mentioned_for_other_settings() -> None:
    for options in (("--every", "1000"), ("--model", "mlp"), ("--sparsity", "0.9")):
        done = run(*options)
        assert done.exit_code == 0, done.output
        assert "The paper's" not in done.stdout


def test_json_holds_what_is_shown() -> None:
    done = run("--model", "vgg16", "--dataset", "cifar100", "--sparsity", "0.95", "--json")
    found = json.loads(done.stdout)
    made = flops.count(rewire.sparsify(models.vgg16(num_classes=100), 0.95), (3, 32, 32))
    assert found["inference"] == [
        {"sparsity": 0.95, "flops": made.sparse, "dense_flops": made.dense}
    ]
    assert {row["method"] for row in found["training"]} >= {"dense", "lottery", "rigl", "gse"}
    assert len(found["savings"]) == 2
    assert found["paper"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "alexnet"), "there is no model 'alexnet'"),
        (("--dataset", "mnist"), "there is no data set 'mnist'"),
        (("--method", "adam"), "there is no method 'adam'"),
        (("--sparsity", "95"), "'95' is no sparsity"),
        (("--assignment", "even"), "there is no assignment 'even'"),
    ],
)
def test_mistakes_are_explained(options: tuple[str, ...], message: str) -> None:
    done = run(*options)
    assert done.exit_code != 0
    assert message in " ".join(done.output.replace("│", " ").split())


# Exact budgets ------------------------------------------------------------------------------------


def test_exact_budgets_hold_what_was_asked_for() -> None:
    layers = [LayerSize("tiny", 2, 2), LayerSize("large", 100, 100)]
    assert sum(assign(layers, sparsity=0.5)) < 5002  # the tiny one is full, and its excess lost
    assert sum(assign(layers, sparsity=0.5, exact=True)) == 5002
    assert sum(assign(layers, density=0.5, exact=True)) == 5002
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(100, 100))
    assert rewire.summary(rewire.sparsify(model, 0.5, exact=True), show=False).connections == 5002
    with pytest.raises(ValueError, match="epsilon cannot be exact"):
        assign(layers, epsilon=1.0, exact=True)


@pytest.mark.parametrize("subset", ["nan", "0", "-1"])
def test_a_subset_that_is_none(subset: str) -> None:
    found = run("--subset", subset)
    assert found.exit_code == 1
    assert f"--subset must be above 0, got {float(subset)}" in found.output


def test_everything_is_a_subset() -> None:
    assert run("--subset", "inf").exit_code == 0
