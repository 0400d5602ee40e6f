"""The paper's experiments as recipes: what they run, and how runs are named and chosen."""

import pytest
import torch
from torch import nn

import rewire
from rewire import data, models
from rewire.reproduce.recipes import EXPERIMENTS, weights
from rewire.reproduce.run import LOTTERY, Run, choose
from rewire.training.config import Config
from rewire.training.methods import METHODS

PAPER = {  # runs of one seed: data sets x models x ...
    "table1": 2 * 3 * (1 + 1 + 9 * 3),
    "imagenet": 12,
    "scaling": 3 * 4,
    "extended": 3 * 3,
    "vit-scaling": 4,
    "subset": 2 * 3 * (1 + 3 * 10),
    "assignment": 2 * 3 * 3 * 2 * 3,
    "progress-methods": 2 * 3 * 10,
    "progress-width": 3 * 4,
}


def config(experiment: str, *words: str) -> Config:
    (run,) = choose(EXPERIMENTS[experiment].runs(seeds=1), words)
    return run.config()


@pytest.mark.parametrize("digits", [False, True])
@pytest.mark.parametrize("what", EXPERIMENTS)
def test_every_experiment_expands(what: str, digits: bool) -> None:
    runs = EXPERIMENTS[what].runs(scale=0.05, seeds=2, digits=digits)
    names = [run.name for run in runs]
    assert len(set(names)) == len(names)
    if not digits:
        assert len(runs) == 2 * PAPER[what]
    known = [run for run in runs if run.settings["method"] in METHODS]
    assert known
    for run in known:
        made = run.config()
        assert (made.scale, made.seed) == (0.05, run.settings["seed"])
        assert (made.dataset == "digits") is digits


def test_names_say_what_a_run_is_and_do_not_depend_on_scale_or_experiment() -> None:
    names = {what: [run.name for run in one.runs(seeds=1)] for what, one in EXPERIMENTS.items()}
    assert names["table1"][:4] == [
        "cifar10-resnet56-dense-seed0",
        "cifar10-resnet56-lottery-seed0",
        "cifar10-resnet56-gradual-0.9-seed0",
        "cifar10-resnet56-gradual-0.95-seed0",
    ]
    assert "imagenet-resnet50-gse-0.9-gamma2-seed0" in names["imagenet"]
    assert "cifar100-vit-4x-gse-0.94-seed0" in names["scaling"]
    assert "cifar100-vgg16-gse-0.98-300epochs-seed0" in names["extended"]
    assert "cifar100-vit-3x-dense-seed0" in names["vit-scaling"]
    assert "cifar10-vit-gse-0.98-grabo-gamma0.25-seed0" in names["subset"]
    assert "cifar10-vgg16-set-0.9-assigned-uniform-seed0" in names["assignment"]
    assert set(names["progress-methods"]) < set(names["table1"])
    assert names["progress-width"] == names["scaling"]
    assert "cifar100-vgg16-gse-0.98-seed0" in (
        set(names["table1"])
        & set(names["extended"])
        & set(names["subset"])
        & set(names["assignment"])
    )
    assert names["table1"] == [run.name for run in EXPERIMENTS["table1"].runs(scale=0.1, seeds=1)]


def test_runs_of_one_name_are_the_same_run() -> None:
    found: dict[str, Config] = {}
    for one in EXPERIMENTS.values():
        for run in one.runs(seeds=1):
            if run.settings["method"] in METHODS:
                assert found.setdefault(run.name, run.config()) == run.config()


# Settings of the paper ----------------------------------------------------------------------------


def test_table1_has_the_papers_schedule() -> None:
    made = config("table1", "cifar100", "vit", "set", "0.95")
    assert (made.epochs, made.drops, made.batch_size, made.lr) == (200, (80, 120), 128, 0.01)
    assert (made.every, made.until, made.fraction, made.scope) == (1000, 120, 0.2, "global")
    made = config("table1", "cifar10", "vgg16", "gse", "0.98")
    assert (made.subset, made.distribution, made.assignment, made.lr) == (
        1,
        "uniform",
        "erdos-renyi",
        0.1,
    )


def test_imagenet_has_its_own() -> None:
    made = config("imagenet", "gse")
    assert (made.model, made.sparsity, made.subset) == ("resnet50", 0.9, 2)
    assert (made.epochs, made.drops, made.until) == (100, (30, 60, 90), 60)
    assert (made.warmup, made.label_smoothing) == (5, 0.1)


def test_extended_training_keeps_the_steps_between_rewirings() -> None:
    made = config("extended", "vgg16", "400").schedule(390)
    assert (made.steps, made.drops) == (400 * 390, (160 * 390, 240 * 390))
    assert (made.every, made.until) == (1000, 240 * 390)


@pytest.mark.parametrize("width", [2.0, 4.0])
def test_wider_models_have_as_many_connections(width: float) -> None:
    made = config("scaling", "vgg16", f"{width:g}x")
    with torch.device("meta"):
        model = models.for_images("vgg16", *data.sizes("cifar100"), width)
    sparse = rewire.sparsify(model, made.sparsity, exact=made.exact)
    dense = models.vgg16(num_classes=100)
    kinds = (nn.Linear, nn.Conv2d)
    wanted = sum(m.weight.numel() for m in dense.modules() if isinstance(m, kinds))
    assert rewire.summary(sparse, show=False).connections == wanted
    assert weights("cifar100", "vgg16", 1.0) == wanted


def test_the_narrowest_is_dense() -> None:
    assert config("scaling", "vit", "1x").method == "dense"


def test_the_lottery_is_one_run_for_all_sparsities() -> None:
    runs = [r for r in EXPERIMENTS["table1"].runs(seeds=3) if r.settings["method"] == LOTTERY]
    assert len(runs) == 2 * 3 * 3
    assert {r.settings["sparsity"] for r in runs} == {0.98}
    (chosen,) = choose(EXPERIMENTS["table1"].runs(seeds=1), [LOTTERY, "0.9", "cifar10", "vit"])
    assert chosen.facets["sparsity"] == ("0.9", "0.95", "0.98")


# Choosing -----------------------------------------------------------------------------------------


def names(what: str, *words: str) -> list[str]:
    return [run.name for run in choose(EXPERIMENTS[what].runs(seeds=1), words)]


def test_words_of_one_kind_are_alternatives_and_kinds_add_up() -> None:
    assert names("table1", "cifar10", "vgg16", "0.98", "gse", "set") == [
        "cifar10-vgg16-set-0.98-seed0",
        "cifar10-vgg16-gse-0.98-seed0",
    ]
    assert names("vit-scaling", "2x") == ["cifar100-vit-2x-dense-seed0"]
    assert names("subset", "cifar10", "vit", "grabo", "gamma0.5", "gamma100") == [
        "cifar10-vit-gse-0.98-grabo-gamma0.5-seed0",
        "cifar10-vit-gse-0.98-grabo-gamma100-seed0",
    ]


def test_a_word_of_two_meanings_is_the_one_that_chooses() -> None:
    found = names("assignment", "uniform", "cifar10", "vit", "0.9")
    assert len(found) == 3
    assert all("assigned-uniform" in name for name in found)


def test_an_unknown_word_is_told_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"called 'vgg19'; there is .*model: resnet56, vit, vgg16"):
        names("table1", "vgg19")


def test_a_method_that_does_not_exist_is_only_told_when_its_config_is_wanted() -> None:
    settings = {"dataset": "digits", "model": "mlp", "method": "magic", "seed": 0}
    run = Run(settings, (0.9,))
    assert run.name == "digits-mlp-magic-0.9-seed0"
    with pytest.raises(ValueError, match="no method 'magic'"):
        run.config()
