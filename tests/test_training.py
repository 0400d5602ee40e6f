"""Runs: their config, schedule and loop, and that interrupted ones end as others do."""

import json
import math
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import rewire
from rewire import data, flops
from rewire.data.splits import Dataset, Images
from rewire.training import checkpoint, methods
from rewire.training.config import Config, differences, read, resolve
from rewire.training.folder import Folder, RunError
from rewire.training.interrupts import Interrupted, Interrupts
from rewire.training.interval import Interval
from rewire.training.job import Job, load_data
from rewire.training.loop import Trainer
from rewire.training.methods import METHODS
from rewire.training.progress import Lines, Progress, Screen

# Configs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dataset": "cifar10", "model": "vit", "method": "dense"},
        {"dataset": "imagenet", "crop": "plain", "image_size": 96},
        {"dataset": 'a "b"\\ö', "keep_dense": ["a.*", "b"], "drops": []},
        {"method": "deepr", "lr": 1e-17, "sparsity": 0.1 + 0.2},
    ],
)
def test_a_config_comes_back_from_its_file(given: dict[str, Any], tmp_path: Path) -> None:
    config = resolve(given)
    (tmp_path / "c.toml").write_text(config.to_toml(), encoding="utf-8")
    again = resolve(read(tmp_path / "c.toml"))
    assert again == config
    assert differences(again, config) == ""
    assert again.label == config.label


def test_a_file_can_be_used_with_another_method(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(resolve({"fraction": 0.3}).to_toml())
    config = resolve({**read(path, "set"), "method": "set"})
    assert (config.fraction, config.subset) == (0.3, None)
    assert resolve({**read(path, "dense"), "method": "dense"}).every is None


def test_the_recipe_is_the_papers() -> None:
    cifar = resolve({"dataset": "cifar10", "model": "resnet56"})
    assert (cifar.lr, cifar.momentum, cifar.weight_decay, cifar.batch_size) == (0.1, 0.9, 1e-4, 128)
    assert (cifar.epochs, cifar.drops, cifar.drop_factor) == (200, (80, 120), 0.1)
    assert (cifar.every, cifar.until, cifar.fraction, cifar.subset) == (1000, 120, 0.2, 1)
    assert (cifar.distribution, cifar.scope, cifar.warmup) == ("uniform", "global", 0)
    assert resolve({"dataset": "cifar100", "model": "vit"}).lr == 0.01
    imagenet = resolve({"dataset": "imagenet"})
    assert (imagenet.model, imagenet.epochs, imagenet.warmup) == ("resnet50", 100, 5)
    assert (imagenet.drops, imagenet.until, imagenet.subset) == ((30, 60, 90), 60, 2)
    assert (imagenet.sparsity, imagenet.label_smoothing) == (0.9, 0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sparsty": 0.9}, "did you mean sparsity?"),
        ({"xyz": 1}, "there are: dataset"),
        ({"sparsity": 95.0}, "0.95 is 95 %"),
        ({"sparsity": "0.9"}, "sparsity must be a number"),
        ({"epochs": True}, "epochs must be a number"),
        ({"batch_size": 1.5}, "batch_size must be a whole number"),
        ({"drops": 80}, "drops must be a list of numbers"),
        ({"drops": [120, 80]}, "in order"),
        ({"keep_dense": "a"}, "keep_dense must be a list of words"),
        ({"method": "adam"}, "there is no method 'adam'; choose one of dense, lottery"),
        ({"model": "gpt"}, "there is no model 'gpt'"),
        ({"method": "set", "subset": 2}, "set has no subset"),
        ({"method": "dense", "every": 2}, "dense has no every"),
        ({"lr": 0}, "lr must be a number above 0"),
        ({"scale": float("inf")}, "scale must be"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"fraction": 1.0}, "fraction must be"),
        ({"distribution": "normal"}, "no distribution 'normal'"),
        ({"storage": "dense"}, "no storage 'dense'"),
        ({"method": "topkast", "storage": "sparse"}, "topkast has no storage"),
        ({"method": "lottery", "sparsity": 0.9, "rounds": [0, 0.5]}, "end with the sparsity 0.9"),
        ({"method": "lottery", "sparsity": 0.5, "rounds": [0, 0.7, 0.5]}, "rounds must ascend"),
    ],
)
def test_bad_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        resolve(given)


# Schedules ----------------------------------------------------------------------------------------


def test_scale_multiplies_all_and_extend_all_but_every() -> None:
    given = {"dataset": "cifar10", "warmup": 5}
    plain = resolve(given).schedule(390)
    assert (plain.steps, plain.drops, plain.every, plain.until) == (
        78000,
        (31200, 46800),
        1000,
        46800,
    )
    scaled = resolve({**given, "scale": 0.1}).schedule(390)
    assert (scaled.steps, scaled.drops, scaled.every, scaled.until) == (
        7800,
        (3120, 4680),
        100,
        4680,
    )
    assert (scaled.epochs, scaled.warmup) == (20, 195)
    longer = resolve({**given, "extend": 1.5}).schedule(390)
    assert (longer.steps, longer.drops, longer.every) == (117000, (46800, 70200), 1000)
    assert longer.until == 70200
    odd = resolve({**given, "scale": 0.0123}).schedule(390)
    assert (odd.steps, odd.drops, odd.every, odd.until) == (959, (384, 576), 12, 576)
    assert odd.epochs == 3


def test_the_rate_rises_and_drops() -> None:
    schedule = resolve({"dataset": "imagenet", "every": 10}).schedule(10)
    rates = [schedule.rate(step) for step in (0, 24, 49, 50, 299, 300, 600, 900, 999)]
    expected = [0.002, 0.05, 0.1, 0.1, 0.1, 0.01, 0.001, 0.0001, 0.0001]
    assert rates == pytest.approx(expected)


def test_rewirings_must_fit_into_the_run() -> None:
    with pytest.raises(ValueError, match=r"after 1000 steps, but the last may be after 240"):
        resolve({"dataset": "cifar10"}).schedule(2)
    resolve({"dataset": "cifar10", "method": "static"}).schedule(2)


# Runs ---------------------------------------------------------------------------------------------

SMALL = {"width": 0.06, "sparsity": 0.8, "batch_size": 128, "epochs": 2.5, "drops": [1, 2]}


class Stopper(Progress):
    """Asks for a stop after some steps, each once."""

    def __init__(self, interrupts: Interrupts, points: set[int]) -> None:
        self.interrupts, self.points = interrupts, points
        self.notes: list[str] = []

    def step(self, trainer: Trainer) -> None:
        if trainer.step in self.points:
            self.points.discard(trainer.step)
            self.interrupts.received = signal.SIGTERM

    def note(self, text: str) -> None:
        self.notes.append(text)


def run(job: Job, path: Path, stops: set[int] | None = None, every: int = 1000) -> list[str]:
    """Train, going on after each stop; what was noted on the way."""
    points, notes = set(stops or ()), []
    while True:
        interrupts = Interrupts()
        stopper = Stopper(interrupts, points)
        try:
            with Folder(path) as folder:
                folder.claim(job.config)
                Trainer(job, folder, stopper, interrupts, every=Interval(steps=every)).run()
            return [*notes, *stopper.notes]
        except Interrupted:
            notes += stopper.notes


def result(path: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """The final model, and the metrics without times."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds", None)
    return (path / "model.safetensors").read_bytes(), lines


def job_of(**given: Any) -> Job:
    if "until" in METHODS[given.get("method", "gse")].options:
        given = {"until": 2, **given}
    config = resolve({**SMALL, **given})
    return Job(config, load_data(config))


RUNS: dict[str, dict[str, Any]] = {
    "gse": {"every": 5},
    "graest": {"every": 5, "distribution": "graest", "scope": "layer"},
    "gse masked": {"every": 5, "storage": "masked"},
    "set": {"method": "set", "every": 5},
    "rigl": {"method": "rigl", "every": 5},
    "snfs": {"method": "snfs", "every": 5},
    "dsr": {"method": "dsr", "every": 5},
    "deepr": {"method": "deepr"},
    "topkast": {"method": "topkast", "every": 5},
    "gradual": {"method": "gradual", "every": 5},
    "gradual masked": {"method": "gradual", "every": 5, "storage": "masked"},
    "snip": {"method": "snip"},
    "grasp": {"method": "grasp", "scope": "layer"},
    "synflow": {"method": "synflow"},
    "static": {"method": "static", "optimizer": "adam"},
    "dense": {"method": "dense", "warmup": 0.5, "label_smoothing": 0.1},
}


def test_all_methods_but_the_lottery_are_among_these_runs() -> None:
    assert {given.get("method", "gse") for given in RUNS.values()} == {*METHODS} - {"lottery"}


@pytest.mark.parametrize("name", RUNS)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    job = job_of(**RUNS[name])
    assert (job.schedule.steps, job.schedule.steps_per_epoch) == (25, 10)
    run(job, tmp_path / "whole")
    # Around rewirings (5, 10, ...), around the ends of epochs (10, 20), and at the end.
    notes = run(job, tmp_path / "parts", {1, 4, 5, 6, 9, 10, 11, 20, 24, 25}, every=3)
    assert len([note for note in notes if note.startswith("Resuming")]) == 10
    assert result(tmp_path / "parts") == result(tmp_path / "whole")


def images(count: int = 96) -> Dataset:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (count, 3, 32, 32), np.uint8)
    labels = torch.from_numpy(random.integers(0, 3, count))
    split = Images(pixels, labels, (0.5,) * 3, (0.2,) * 3, pad=4, flip=True)
    return Dataset("images", split, replace(split, pad=0, flip=False), ("a", "b", "c"))


CONVOLUTIONAL: dict[str, dict[str, Any]] = {
    "gse": {"every": 2, "until": 2, "distribution": "grabo"},
    "set masked": {"every": 2, "until": 2, "storage": "masked"},
    "topkast": {"every": 2, "until": 2},
    "gradual": {"every": 1, "until": 1},
    "snip": {},
    "dense": {},
}


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_so_does_one_with_dropout_and_batch_norm(name: str, tmp_path: Path) -> None:
    given = {"dataset": "cifar10", "model": "vgg11", "width": 0.25, "batch_size": 32, "epochs": 2}
    given |= {"method": name.split()[0], "drops": [1], "lr": 0.01, **CONVOLUTIONAL[name]}
    job = Job(resolve(given), images())
    run(job, tmp_path / "whole")
    run(job, tmp_path / "parts", {1, 2, 3, 5})
    assert result(tmp_path / "parts") == result(tmp_path / "whole")


def test_a_run_can_stop_at_every_step(tmp_path: Path) -> None:
    job = job_of(every=3)
    run(job, tmp_path / "whole")
    run(job, tmp_path / "parts", set(range(1, 26)))
    assert result(tmp_path / "parts") == result(tmp_path / "whole")


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_stop_in_an_evaluation_is_made_up_for(epoch: int, tmp_path: Path) -> None:
    job = job_of(every=5)
    run(job, tmp_path / "whole")

    class Test(data.Loader):
        seen = 0

        def __iter__(self) -> Iterator[Any]:
            type(self).seen += 1
            for batch in super().__iter__():
                if type(self).seen == epoch:
                    interrupts.received = signal.SIGINT
                yield batch

    interrupts = Interrupts()
    with Folder(tmp_path / "parts") as folder:
        folder.claim(job.config)
        trainer = Trainer(job, folder, interrupts=interrupts)
        trainer.test = Test(job.dataset.test, 128, train=False)
        with pytest.raises(Interrupted):
            trainer.run()
        assert trainer.step == (10 if epoch == 1 else 25)
    run(job, tmp_path / "parts")
    assert result(tmp_path / "parts") == result(tmp_path / "whole")


@pytest.mark.parametrize("stop", [7, 12])
def test_a_killed_run_goes_on_from_its_last_checkpoint(stop: int, tmp_path: Path) -> None:
    job = job_of(every=5)
    run(job, tmp_path / "whole")

    class Killed(Progress):
        def step(self, trainer: Trainer) -> None:
            if trainer.step == stop:
                trainer.folder.flush()  # type: ignore[union-attr]
                raise MemoryError

    with Folder(tmp_path / "parts") as folder:
        folder.claim(job.config)
        with pytest.raises(MemoryError):
            Trainer(job, folder, Killed(), every=Interval(steps=5)).run()
    # As if it had been killed while it wrote lines and a checkpoint that never became whole.
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"event": "rewi')
    (tmp_path / "parts" / "checkpoints" / ".tmp-1-step-00000012").mkdir()
    notes = run(job, tmp_path / "parts")
    assert notes == [f"Resuming after step {stop // 5 * 5} of 25."]
    assert result(tmp_path / "parts") == result(tmp_path / "whole")
    assert (
        sorted(p.name[:5] for p in (tmp_path / "parts" / "checkpoints").iterdir()) == ["step-"] * 2
    )


def test_a_run_that_was_killed_before_its_end_was_written_is_finished(tmp_path: Path) -> None:
    job = job_of(every=5)
    run(job, tmp_path / "run", every=1)
    before = result(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    run(job, tmp_path / "run")
    assert result(tmp_path / "run") == before


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    job = job_of(every=5)
    run(job, tmp_path / "whole")
    interrupts = Interrupts()
    with Folder(tmp_path / "parts") as folder:
        folder.claim(job.config)
        stopper = Stopper(interrupts, {17})
        with pytest.raises(Interrupted) as stop:
            Trainer(job, folder, stopper, interrupts, every=Interval(steps=4)).run()
    assert (stop.value.signal, stop.value.step) == (signal.SIGTERM, 17)
    newest = checkpoint.found(tmp_path / "parts" / "checkpoints")[0]
    assert newest.name == "step-00000017"
    (newest / "tensors.safetensors").write_bytes(b"")
    notes = run(job, tmp_path / "parts")
    assert "step-00000017" in notes[0]
    assert "resuming from step-0000001" in notes[0]
    assert result(tmp_path / "parts") == result(tmp_path / "whole")


def test_where_no_checkpoint_is_whole_nothing_is_lost_and_the_way_out_is_said(
    tmp_path: Path,
) -> None:
    job, interrupts = job_of(every=5), Interrupts()
    with Folder(tmp_path / "run") as folder:
        folder.claim(job.config)
        stopper = Stopper(interrupts, {17})
        with pytest.raises(Interrupted):
            Trainer(job, folder, stopper, interrupts, every=Interval(steps=4)).run()
    kept = checkpoint.found(tmp_path / "run" / "checkpoints")
    for one in kept:
        (one / "tensors.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match=r"start over with .*--out .*--overwrite"):
        run(job, tmp_path / "run")
    assert checkpoint.found(tmp_path / "run" / "checkpoints") == kept


def test_nothing_but_the_result_is_needed_when_nothing_is_written() -> None:
    summary = Trainer(job_of(every=5)).run()
    assert summary["steps"] == 25
    assert 0 < summary["accuracy"] <= 1
    assert summary["connections"] < summary["weights"]


def test_metrics_tell_of_epochs_and_rewirings(tmp_path: Path) -> None:
    job = job_of(every=5)
    run(job, tmp_path / "run")
    lines = list(Folder(tmp_path / "run").read())
    events = [(line["event"], line.get("step")) for line in lines]
    rewirings = [("rewiring", 5), ("rewiring", 10)]
    assert events[:3] == [*rewirings, ("epoch", 10)]
    assert events[3:] == [
        ("rewiring", 15),
        ("rewiring", 20),
        ("epoch", 20),
        ("epoch", 25),
        ("end", None),
    ]
    assert lines[2].keys() >= {"train_loss", "train_accuracy", "test_loss", "test_accuracy", "lr"}
    assert lines[0]["grown"] == lines[0]["pruned"] > 0
    assert lines[-1]["accuracy"] == lines[-2]["test_accuracy"]
    assert lines[-1]["best"] == max(
        line["test_accuracy"] for line in lines if line["event"] == "epoch"
    )


def test_a_loss_that_is_no_number_is_null_in_the_metrics(tmp_path: Path) -> None:
    job = job_of(method="static", lr=1e30)
    with Folder(tmp_path / "run") as folder:
        folder.claim(job.config)
        Trainer(job, folder, through_nan=True).run()
    lines = list(Folder(tmp_path / "run").read())
    assert lines[1]["train_loss"] is None


def test_always_sparse_runs_never_hold_a_dense_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    job = job_of(width=1, every=5, sparsity=0.9)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and not found.is_meta:
                assert found.numel() < 512 * 512, func
            return found

    with Watch():
        Trainer(job).run()


# Folders ------------------------------------------------------------------------------------------


def test_folders_of_other_runs_are_refused(tmp_path: Path) -> None:
    job = job_of(every=5)
    run(job, tmp_path / "run")
    with pytest.raises(RunError, match=r"holds this run, finished: see `rewire eval"):
        run(job, tmp_path / "run")
    with pytest.raises(RunError, match=r"lr 0.1 there, 0.2 here.*--out.*--overwrite"):
        run(job_of(every=5, lr=0.2), tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(RunError, match="not empty and holds no run"):
        run(job, tmp_path / "other")
    with Folder(tmp_path / "run") as folder:
        assert not folder.claim(job_of(every=5, lr=0.2).config, overwrite=True)
        assert not folder.finished
        assert not folder.checkpoints.exists()


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with (
        Folder(tmp_path),
        pytest.raises(RunError, match="another process is training"),
        Folder(tmp_path),
    ):
        pass
    with Folder(tmp_path):
        pass


# Methods that need more than a rewirer ----------------------------------------------------------------


def layers_of(model: nn.Module) -> list[rewire.ConnectedLayer]:
    return [m for m in model.modules() if isinstance(m, rewire.ConnectedLayer)]


def test_pruning_sees_ten_images_of_every_class() -> None:
    job = job_of(method="snip", batch_size=32)
    batches = job.batches(10)
    assert [len(y) for _, y in batches] == [32, 32, 32, 4]
    labels = torch.cat([y for _, y in batches])
    assert labels.tolist() == 10 * list(range(10))
    assert batches[0][0].shape == (32, 1, 8, 8)
    again = replace(job, config=replace(job.config, seed=1)).batches(10)
    assert not torch.equal(batches[0][0], again[0][0])


def test_gradual_becomes_sparse_in_the_run(tmp_path: Path) -> None:
    job = job_of(method="gradual", every=5)
    trainer = Trainer(job)
    trainer.run()
    assert all(isinstance(layer, rewire.SparseLayer) for layer in layers_of(trainer.model))
    densities = [r.active / r.possible for r in cast(rewire.Gradual, trainer.rewirer).history]
    assert densities == sorted(densities, reverse=True)
    assert trainer.density == densities[-1] == pytest.approx(0.2, abs=1e-3)


LOTTERY = {"method": "lottery", "rounds": [0, 0.5, 0.8]}


def test_a_lottery_gives_every_sparsity_on_its_way(tmp_path: Path) -> None:
    job = job_of(**LOTTERY)
    run(job, tmp_path)
    lines = result(tmp_path)[1]
    assert [line["event"] for line in lines] == ["round", "round", "round", "end"]
    assert [line["sparsity"] for line in lines[:3]] == [0, 0.5, 0.8]
    assert lines[3]["training_flops"] == sum(line["training_flops"] for line in lines[:3])
    before: rewire.Connections | None = None
    for number, share in enumerate((1.0, 0.5, 0.2)):
        model = rewire.load(tmp_path / f"round-{number}" / "model.safetensors")
        found = layers_of(model)
        if number:
            total = sum(layer.n_in * layer.n_out for layer in found)
            assert sum(layer.count for layer in found) == math.ceil(share * total - 1e-6)
            now = found[0].connections
            assert before is None or bool(torch.isin(now.keys(), before.keys()).all())
            before = now
    final = rewire.load(tmp_path / "model.safetensors").state_dict()
    assert all(torch.equal(tensor, final[key]) for key, tensor in model.state_dict().items())


def test_a_lottery_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    job = job_of(**LOTTERY)
    run(job, tmp_path / "whole")
    # The first round stops at the first of these, and so on: every round is interrupted.
    notes = run(job, tmp_path / "parts", {4, 10, 19, 25}, every=3)
    assert len([note for note in notes if note.startswith("Resuming")]) == 4
    assert result(tmp_path / "parts") == result(tmp_path / "whole")
    for number in range(3):
        mine, theirs = (tmp_path / name / f"round-{number}" for name in ("parts", "whole"))
        assert result(mine) == result(theirs)


def test_a_finished_round_is_not_trained_again(tmp_path: Path) -> None:
    job = job_of(**LOTTERY)
    run(job, tmp_path / "whole")
    run(job, tmp_path / "parts")
    (tmp_path / "parts" / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "parts" / "round-2")
    times = [
        (tmp_path / "parts" / f"round-{n}" / "model.safetensors").stat().st_mtime_ns for n in (0, 1)
    ]
    run(job, tmp_path / "parts")
    assert times == [
        (tmp_path / "parts" / f"round-{n}" / "model.safetensors").stat().st_mtime_ns for n in (0, 1)
    ]
    assert result(tmp_path / "parts") == result(tmp_path / "whole")
    config = Folder(tmp_path / "parts" / "round-1").config()
    with pytest.raises(ValueError, match="one round of a sequence"):
        Trainer(replace(job, config=config)).run()


@pytest.mark.parametrize("method", ["gse", "set", "rigl", "snfs", "dsr", "deepr"])
def test_masked_storage_comes_to_the_same_connections(method: str) -> None:
    """In float32 too, over a run this short; float64 and longer runs are in test_masked.py."""
    found = []
    for storage in ("sparse", "masked"):
        given = {} if method == "deepr" else {"every": 5}
        trainer = Trainer(job_of(method=method, storage=storage, lr=0.01, **given))
        trainer.run()
        found.append([layer.connections.keys() for layer in layers_of(trainer.model)])
        kind = rewire.MaskedLayer if storage == "masked" else rewire.SparseLayer
        assert all(isinstance(layer, kind) for layer in layers_of(trainer.model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# Odds and ends --------------------------------------------------------------------------------------


def test_flops_are_those_of_the_layers() -> None:
    model = rewire.models.build("vgg16")
    dense = flops.count(model, (3, 32, 32))
    assert dense.sparse == dense.dense
    assert flops.dense(dense) == 3 * dense.dense
    sparse = flops.count(rewire.sparsify(model, sparsity=0.95), (3, 32, 32))
    assert sparse.dense == dense.dense
    assert sparse.layers["features.0"].positions == 1024
    assert sparse.layers["features.0"].of(232) == 2 * 1024 * 232
    assert flops.static(sparse) == 3 * sparse.sparse
    assert sparse.subset(1e9) == sparse.dense


@pytest.mark.parametrize(("sparsity", "saving"), [(0.95, 2.43), (0.99, 13.26)])
def test_flops_of_resnet50_are_the_papers(sparsity: float, saving: float) -> None:
    with torch.device("meta"):
        model = rewire.models.build("resnet50")
    found = flops.count(rewire.sparsify(model, sparsity, keep_dense="linear"), (3, 224, 224))
    assert found.dense == pytest.approx(8.18e9, rel=1e-3)
    gse = flops.guided(found, 100, found.subset(1.0))
    rigl = flops.guided(found, 100, found.dense)
    assert 100 * (rigl - gse) / gse == pytest.approx(saving, abs=0.005)


@pytest.mark.parametrize(
    ("text", "interval"),
    [("7", Interval(steps=7)), ("30s", Interval(seconds=30)), ("1.5h", Interval(seconds=5400))],
)
def test_intervals_are_steps_or_times(text: str, interval: Interval) -> None:
    assert Interval.parse(text) == interval


@pytest.mark.parametrize("text", ["", "0", "-1", "m", "0s", "1.5", "10 m"])
def test_other_intervals_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="neither a number of steps nor a time"):
        Interval.parse(text)


def test_models_that_cannot_take_the_images_are_refused() -> None:
    config = resolve({"dataset": "digits", "model": "vgg16"})
    with pytest.raises(
        ValueError, match="takes images in colour, but those of digits are grey 8x8"
    ):
        Job(config, data.load("digits"))
    with pytest.raises(ValueError, match="less than one batch of 5000"):
        Job(resolve({"batch_size": 5000}), data.load("digits"))


def test_signals_are_noted_once_and_handlers_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.received == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) is before
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_lines_tell_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(job_of(every=5), progress=Lines()).run()
    told = capsys.readouterr().out
    for part in ("mlp on digits by gse", "epoch 3/3", "best", "images/s", "rewired", "of dense"):
        assert part in told


def test_a_screen_tells_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    class Shown(Screen):
        seen = ""

        def step(self, trainer: Trainer) -> None:
            with self._console.capture() as capture:
                self._console.print(self._render())
            self.seen = capture.get()

    shown = Shown()
    Trainer(job_of(every=5), progress=shown).run()
    for part in ("epoch 3/3", "100%", "loss", "images/s", "density", "rewired", "best", "left"):
        assert part in shown.seen
    told = capsys.readouterr().out
    assert "mlp on digits by gse" in told
    assert "connections of each pixel before" in told


@pytest.mark.slow
def test_the_digits_recipe_is_worth_looking_at() -> None:
    accuracies = {}
    for method in ("gse", "static", "dense"):
        config = resolve({"method": method})
        accuracies[method] = Trainer(Job(config, load_data(config))).run()["accuracy"]
    assert accuracies["static"] < accuracies["gse"] < accuracies["dense"] + 0.01
    assert accuracies["gse"] > 0.92


def test_every_method_has_what_the_help_and_the_config_need() -> None:
    for name, method in METHODS.items():
        assert method.about
        assert set(method.options) <= set(methods.OPTIONS)
        config: Config = resolve({"method": name})
        for option in methods.OPTIONS:
            assert option in method.options or getattr(config, option) is None
