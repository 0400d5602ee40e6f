"""``rewire reproduce``: sweeps in worker processes, their folders, and what they show."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rewire.data import find
from rewire.reproduce import results
from rewire.reproduce.recipes import EXPERIMENTS
from rewire.reproduce.sweep import About, Sweep
from rewire.training import toml
from rewire.training.folder import Folder
from sweeps import do, metrics, run, runs, text

# One run of each kind -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("table1", ("static", "0.9")),
        ("table1", ("dense",)),
        ("imagenet", ("gse",)),
        ("scaling", ("2x",)),
        ("extended", ("300",)),
        ("vit-scaling", ("2x",)),
        ("subset", ("graest", "gamma0.25")),
        ("subset", ("uniform", "gamma100")),
        ("assignment", ("uniform", "set", "0.95")),
    ],
)
def test_a_run_of_each_kind_trains(what: str, words: tuple[str, ...], tmp_path: Path) -> None:
    (one,) = runs(what, *words)
    told = do(one, tmp_path)
    assert (told[0]["event"], told[-1]["event"]) == ("begin", "end")
    folder = Folder(tmp_path / "runs" / one.name)
    assert folder.finished
    assert folder.config() == one.config()
    sparsity = one.facets["sparsity"][0] if one.sparsities else ""
    assert results.accuracies(one, folder) == {sparsity: told[-1]["accuracy"]}


def test_wider_models_hold_as_many_connections(tmp_path: Path) -> None:
    dense, *wider = runs("scaling", scale=0.001)
    held = {do(one, tmp_path)[-1]["connections"] for one in (dense, *wider)}
    assert len(wider) == 3
    assert len(held) == 1


def test_a_lottery_gives_an_accuracy_for_every_round(tmp_path: Path) -> None:
    (one,) = runs("table1", "lottery")
    path = tmp_path / "runs" / one.name
    path.mkdir(parents=True)
    lines = [{"event": "round", "sparsity": s, "accuracy": s / 2} for s in (0.5, 0.9, 0.95, 0.98)]
    lines.append({"event": "end", "accuracy": 0.49})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert results.accuracies(one, Folder(path)) == {"0.9": 0.45, "0.95": 0.475, "0.98": 0.49}


# Sweeps -------------------------------------------------------------------------------------------

SWEEP = ("table1", "--digits", "--seeds", "2", "--scale", "0.02", "--only", "gse,0.9")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A sweep of which one run was finished before, in this process."""
    path = tmp_path_factory.mktemp("sweeps") / "one"
    Sweep(path, About("table1", "", 0.02, 2, digits=True)).claim()
    do(EXPERIMENTS["table1"].runs(scale=0.02, seeds=2, digits=True)[-3], path)
    return path, run(*SWEEP, "--workers", "2", "--out", path)


def test_a_sweep_leaves_its_folder_and_shows_results(sweep: tuple[Path, Any]) -> None:
    path, done = sweep
    assert done.exit_code == 0, done.output
    assert sorted(os.listdir(path)) == ["runs", "sweep.toml"]
    assert sorted(os.listdir(path / "runs")) == [
        "digits-mlp-gse-0.9-seed0",
        "digits-mlp-gse-0.9-seed1",
    ]
    about = toml.read(path / "sweep.toml")
    assert about["experiment"] == "table1"
    assert about["command"] == (
        "rewire reproduce table1 --scale 0.02 --seeds 2 --only gse,0.9 --digits "
        f"--out {path} --workers 2"
    )
    assert "2 runs: 1 to do, 1 finished" in done.stdout
    assert "[2/2]" in done.stdout
    ends = [metrics(folder)[-1]["accuracy"] for folder in sorted((path / "runs").iterdir())]
    shown = str(results.Accuracy(tuple(ends)))
    assert "±" in shown
    assert shown in done.stdout


def test_what_is_finished_is_not_done_again(sweep: tuple[Path, Any]) -> None:
    path, _ = sweep
    model = path / "runs" / "digits-mlp-gse-0.9-seed0" / "model.safetensors"
    before = model.stat().st_mtime_ns
    done = run(*SWEEP, "--out", path)
    assert done.exit_code == 0, done.output
    assert "2 runs: 2 finished" in done.stdout
    assert model.stat().st_mtime_ns == before


def test_a_dry_run_lists_and_changes_nothing(sweep: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = sweep
    done = run(*SWEEP[:-1], "gse,0.9,0.95", "--out", path, "--dry-run")
    assert "digits-mlp-gse-0.9-seed1: finished" in done.stdout
    assert "digits-mlp-gse-0.95-seed1\n" in done.stdout
    assert "4 runs: 2 to do, 2 finished" in done.stdout
    assert run(*SWEEP, "--out", tmp_path / "new", "--dry-run").exit_code == 0
    assert not (tmp_path / "new").exists()


def test_another_sweep_does_not_go_into_the_same_folder(
    sweep: tuple[Path, Any], tmp_path: Path
) -> None:
    path, _ = sweep
    done = run("table1", "--digits", "--scale", "0.1", "--out", path)
    assert done.exit_code == 1
    assert "holds a sweep with scale 0.02, and this one has 0.1" in text(done)
    (tmp_path / "mine.txt").write_text("mine")
    done = run("table1", "--digits", "--out", tmp_path, "--only", "gse")
    assert "is not empty and holds no sweep" in text(done)


def test_experiments_share_runs_in_the_usual_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = runs("progress-methods", "gse")[0]
    place = tmp_path / "sweeps" / "table1-digits-scale0.02"
    Sweep(place, About("table1", "", 0.02, 1, digits=True)).claim()
    do(one, place)
    options = ("--digits", "--scale", "0.02", "--seeds", "1", "--only", "gse")
    for where, found in (([], "1 run: 1 finished"), (["--out", "mine"], "1 run: 1 to do")):
        assert found in run("progress-methods", *options, *where, "--dry-run").stdout
    done = run("progress-methods", *options)
    assert done.exit_code == 0, done.output
    linked = tmp_path / "sweeps" / "progress-methods-digits-scale0.02" / "runs" / one.name
    assert linked.is_symlink()
    assert Folder(linked).finished
    assert f"{100 * metrics(linked)[-1]['accuracy']:.2f}" in done.stdout


# Without training ---------------------------------------------------------------------------------


def test_flops_and_products_are_measured_once(tmp_path: Path) -> None:
    for what, options in (("flops", ("0.99",)), ("matmul", ("0.9658",))):
        out = tmp_path / what
        arguments = (what, "--scale", "0.05", "--out", out, "--only", *options)
        assert "finished" not in run(*arguments, "--dry-run").stdout
        done = run(*arguments)
        assert done.exit_code == 0, done.output
        first = json.loads((out / "results.json").read_text())
        assert first["command"].startswith(f"rewire reproduce {what} --scale 0.05")
        assert run(*arguments).exit_code == 0
        assert json.loads((out / "results.json").read_text()) == first
        assert "finished" in run(*arguments, "--dry-run").stdout
    found = json.loads((tmp_path / "flops" / "results.json").read_text())["records"]
    assert [(r["head"], round(100 * r["saving_of_gse"], 1)) for r in found] == [
        ("dense", 13.3),
        ("sparse", 12.9),
    ]
    found = json.loads((tmp_path / "matmul" / "results.json").read_text())["records"]
    assert [r["units"] for r in found] == [102, 205, 410, 819]
    assert all(min(r[f"{f}_ms"] for f in ("dense", "coo", "csr", "ours")) > 0 for r in found)


# Mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("table2",), "there is no experiment 'table2'"),
        (("table1", "--scale", "0"), "must be a number above 0"),
        (("table1", "--only", "vgg19"), "nothing in it is called 'vgg19'"),
        (("table1", "--only", "gse", "--root", "nowhere"), "cifar10 was not found"),
    ],
)
def test_mistakes_are_explained(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.exit_code != 0
    assert message in text(done)
    assert not (tmp_path / "sweeps").exists()


# Real data, on demand -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(find("cifar10") is None, reason="CIFAR-10 is not there")
@pytest.mark.parametrize("model", ["vgg16", "resnet56", "vit"])
def test_table1_runs_on_cifar10(model: str, tmp_path: Path) -> None:
    only = f"cifar10,{model},0.98,gse"
    options = ("--scale", "0.0001", "--seeds", "1", "--only", only, "--out", tmp_path / "o")
    done = run("table1", *options)
    assert done.exit_code == 0, done.output
    assert Folder(tmp_path / "o" / "runs" / f"cifar10-{model}-gse-0.98-seed0").finished
