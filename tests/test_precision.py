"""Runs in bfloat16: what computes in it, that they resume, and that runs of before go on in float32."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from typer.testing import CliRunner

import rewire
from rewire.cli import app
from rewire.precision import autocast
from rewire.report import groups
from rewire.report.costs import faster
from rewire.report.rerun import command
from rewire.report.runs import Run, find
from rewire.reproduce.recipes import EXPERIMENTS
from rewire.training import checkpoint, loop
from rewire.training.config import differences, read_run, resolve
from rewire.training.folder import Folder, RunError
from rewire.training.job import Job, load_data
from rewire.training.loop import Trainer
from test_training import CONVOLUTIONAL, RUNS, images, job_of, result, run

OLD = Path(__file__).parent / "old_files"
SMALL = [
    *("--width", "0.06", "--sparsity", "0.8", "--batch-size", "128", "--epochs", "2"),
    *("--drops", "1", "--until", "2", "--every", "5", "--precision", "bfloat16"),
]


def cli(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def text(done: Any) -> str:
    return " ".join(done.output.replace("│", " ").split())


# Runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["gse", "gse masked", "rigl", "topkast", "gradual masked", "grasp", "static", "dense"]
)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    job = job_of(**RUNS[name], precision="bfloat16")
    run(job, tmp_path / "whole")
    run(job, tmp_path / "parts", {1, 5, 9, 10, 24}, every=3)
    assert result(tmp_path / "parts") == result(tmp_path / "whole")
    single = job_of(**RUNS[name])
    run(single, tmp_path / "single")
    assert result(tmp_path / "single")[1] != result(tmp_path / "whole")[1]


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_so_does_one_with_dropout_and_batch_norm(name: str, tmp_path: Path) -> None:
    given = {"dataset": "cifar10", "model": "vgg11", "width": 0.25, "batch_size": 32, "epochs": 2}
    given |= {"method": name.split()[0], "drops": [1], "lr": 0.01, **CONVOLUTIONAL[name]}
    job = Job(resolve({**given, "precision": "bfloat16"}), images())
    run(job, tmp_path / "whole")
    run(job, tmp_path / "parts", {1, 3, 5})
    assert result(tmp_path / "parts") == result(tmp_path / "whole")


def test_a_lottery_trains_its_rounds_in_it(tmp_path: Path) -> None:
    job = job_of(method="lottery", rounds=[0, 0.5], sparsity=0.5, precision="bfloat16")
    run(job, tmp_path / "whole")
    run(job, tmp_path / "parts", {4, 24, 27})
    for folder in (".", "round-0", "round-1"):
        assert result(tmp_path / "parts" / folder) == result(tmp_path / "whole" / folder)
    assert Folder(tmp_path / "whole" / "round-1").config().precision == "bfloat16"


@pytest.mark.parametrize("given", [{}, {"method": "dense"}, {"instead_of_step": True}])
def test_outputs_are_in_it_and_all_that_is_kept_is_not(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[bool, torch.dtype]] = set()
    losses: set[torch.dtype] = set()
    counts = loop._counts

    def counted(loss: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        seen.add((trainer.model.training, logits.dtype))
        losses.add(loss.dtype)
        return counts(loss, logits, labels)

    monkeypatch.setattr(loop, "_counts", counted)
    every = {} if given.get("method") else {"every": 5}
    trainer = Trainer(job_of(**given, **every, precision="bfloat16"))
    trainer.run()
    assert seen == {(True, torch.bfloat16), (False, torch.bfloat16)}
    assert losses == {torch.float32}
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    state = [v for one in trainer.optimizer.state.values() for v in one.values()]
    assert {v.dtype for v in state if isinstance(v, Tensor)} == {torch.float32}


def test_float32_is_no_autocast() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with autocast("float32"):
        assert layer(x).dtype == torch.float32
    with autocast("bfloat16"):
        assert layer(x).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_a_loss_that_is_not_finite_is_looked_for_in_the_same_precision() -> None:
    job = job_of(method="dense", lr=1e30, precision="bfloat16")
    trainer = Trainer(job)
    with pytest.raises(loop.Diverged, match="is not finite"):
        trainer.run()
    assert not torch.is_autocast_enabled("cpu")


# Settings -----------------------------------------------------------------------------------------


def test_other_precisions_are_refused() -> None:
    with pytest.raises(ValueError, match="no precision 'float16'; choose one of float32, bfloat16"):
        resolve({"precision": "float16"})


def test_runs_are_called_as_they_were_before_there_was_a_choice() -> None:
    given = {"dataset": "cifar10", "scale": 0.1, "sparsity": 0.98, "seed": 1}
    assert resolve({}).label == "digits-mlp-gse-0.98-seed0-530cf6"
    assert resolve(given).label == "cifar10-vgg16-gse-0.98-seed1-184b07"
    dense = {"dataset": "cifar10", "method": "dense"}
    assert resolve(dense).label == "cifar10-vgg16-dense-seed0-7821fe"
    label = resolve(given | {"precision": "bfloat16"}).label
    assert label.startswith("cifar10-vgg16-gse-0.98-bfloat16-seed1-")
    assert not label.endswith("184b07")


OLD_RUNS = [OLD / "sgd", OLD / "adamw", *(p / "run" for p in OLD.iterdir() if p.name[0].isdigit())]


@pytest.mark.parametrize("old", OLD_RUNS, ids=lambda path: str(path.relative_to(OLD)))
def test_runs_from_before_there_was_a_choice_are_float32(old: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(old, path)
    written = (path / "config.toml").read_text()
    assert "precision" not in written
    config = Folder(path).config()
    assert config.precision == read_run(path / "config.toml")["precision"] == "float32"
    assert not differences(config, resolve(read_run(path / "config.toml")))
    loaded = checkpoint.load_newest(path / "checkpoints")
    assert loaded is not None
    if "config" not in loaded.state:  # older ones do not say
        return
    # A checkpoint of then is not continued in another precision.
    (path / "config.toml").write_text(written + 'precision = "bfloat16"\n')
    config = Folder(path).config()
    with pytest.raises(RunError, match="precision float32 there, bfloat16 here"):
        run(Job(config, load_data(config)), path)


# The command line ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    done = cli("train", *SMALL, "--out", path)
    assert done.exit_code == 0, done.output
    assert ", bfloat16" in done.stdout.splitlines()[0]
    return path


def test_a_run_is_tested_and_used_in_its_precision(trained: Path, tmp_path: Path) -> None:
    assert 'precision = "bfloat16"' in (trained / "config.toml").read_text()
    last = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    found = json.loads(cli("eval", trained, "--json").stdout)
    assert found["accuracy"] == last["accuracy"]
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-6)
    model = rewire.load(trained / "model.safetensors").eval()
    test = rewire.data.load("digits").test
    Image.fromarray(np.asarray(test.images[0, 0])).save(tmp_path / "0.png")  # type: ignore[attr-defined]
    done = cli("predict", trained, tmp_path / "0.png", "--json", "--top", "10")
    x = test.read((np.arange(1), None))
    with torch.no_grad(), autocast("bfloat16"):
        shares = model(x)[0].float().softmax(0)
    for name, share in json.loads(done.stdout)["classes"].items():
        assert share == pytest.approx(float(shares[int(name)]), rel=1e-6)
    assert cli("export", trained, tmp_path / "model.pt").exit_code == 0
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_a_folder_goes_on_in_its_precision_alone(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(trained, path)
    (path / "model.safetensors").unlink()
    done = cli("train", *SMALL[:-2], "--out", path)
    assert done.exit_code == 1
    assert "other settings (precision bfloat16 there, float32 here)" in text(done)
    assert cli("train", "--resume", path).exit_code == 0
    assert result(path) == result(trained)


def test_two_processes_train_in_it(tmp_path: Path) -> None:
    """The same bits whenever; only the first of them prints and writes."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for name in ("a", "b"):
        done = subprocess.run(
            [
                *(sys.executable, *torchrun, "-m", "rewire", "train"),
                *SMALL,
                "--out",
                tmp_path / name,
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert result(tmp_path / "a") == result(tmp_path / "b")
    assert Folder(tmp_path / "a").config().precision == "bfloat16"


# Reports and sweeps -------------------------------------------------------------------------------


def made(path: Path, speed: float, **given: Any) -> Run:
    config = vars(resolve({"dataset": "digits", **given}))
    end = {"accuracy": 0.5, "steps": speed, "seconds": config["batch_size"]}
    return Run(path, path.name, config, [], [], end, "finished", [], None)


def test_speeds_are_compared_with_the_fastest_dense_run(tmp_path: Path) -> None:
    dense = {"method": "dense"}
    found = groups.group(
        [
            made(tmp_path / "a", 30.0, precision="bfloat16"),
            made(tmp_path / "b", 15.0),
            made(tmp_path / "c", 3.0, **dense),
            made(tmp_path / "d", 5.0, precision="bfloat16", **dense),
        ]
    )
    assert sorted(faster(group, found) for group in found) == [0.6, 1.0, 3.0, 6.0]


def test_a_run_without_a_precision_is_of_the_group_of_float32(tmp_path: Path) -> None:
    for seed, name in enumerate(("old", "new")):
        config = resolve({"seed": seed}).to_toml()
        if name == "old":
            config = config.replace('precision = "float32"\n', "")
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(config)
        (tmp_path / name / "metrics.jsonl").touch()
    (group,) = groups.group(find([tmp_path]).runs)
    assert len(group.runs) == 2


def test_the_command_of_a_run_names_it() -> None:
    config = vars(resolve({"method": "set", "precision": "bfloat16"}))
    assert " --precision bfloat16 --seed 0" in command(config)
    assert "--precision" not in command(vars(resolve({"method": "set"})))


def test_a_sweep_in_it_has_names_and_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = EXPERIMENTS["table1"].runs(seeds=1, digits=True, precision="bfloat16")
    assert {run.settings["precision"] for run in runs} == {"bfloat16"}
    assert all(run.name.endswith("-bfloat16-seed0") for run in runs)
    options = ("table1", "--digits", "--scale", "0.02", "--seeds", "1", "--only", "gse,0.9")
    sweep = Path("sweeps", "table1-digits-scale0.02-bfloat16")
    done = cli("reproduce", *options, "--precision", "bfloat16")
    assert done.exit_code == 0, done.output
    assert "--precision bfloat16" in (sweep / "sweep.toml").read_text()
    folder = Folder(sweep / "runs" / "digits-mlp-gse-0.9-bfloat16-seed0")
    assert folder.config().precision == "bfloat16"
    done = cli("reproduce", *options, "--out", sweep)
    assert "holds a sweep with precision bfloat16, and this one has float32" in text(done)
    about = (sweep / "sweep.toml").read_text().replace('precision = "bfloat16"\n', "")
    (sweep / "sweep.toml").write_text(about)  # as they were before there was a choice
    done = cli("reproduce", *options, "--precision", "bfloat16", "--out", sweep)
    assert "holds a sweep with precision float32, and this one has bfloat16" in text(done)
    done = cli("reproduce", "flops", "--precision", "bfloat16")
    assert "flops trains nothing" in text(done)
