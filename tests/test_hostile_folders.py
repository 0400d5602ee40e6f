"""Run folders that were killed, damaged or mixed up: nothing is lost, and what is wrong is said."""

from __future__ import annotations

import json
import math
import random
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import rewire
from rewire import files, saving
from rewire.cli import app
from rewire.report.write import write as write_report
from rewire.training import checkpoint, inference
from rewire.training.config import resolve
from rewire.training.folder import Folder, RunError, plain
from rewire.training.interrupts import Interrupts
from rewire.training.interval import Interval
from rewire.training.job import Job, load_data
from rewire.training.loop import Diverged, Trainer
from rewire.training.progress import Progress
from rewire.training.schedule import Schedule

SMALL = {"dataset": "digits", "epochs": 2, "until": 1, "every": 20, "drops": [1]}


def job_of(**given: Any) -> Job:
    config = resolve({**SMALL, **given})
    return Job(config, load_data(config))


def train(job: Job, path: Path, every: int = 15, **options: Any) -> Trainer:
    with Folder(path) as folder:
        folder.claim(job.config)
        trainer = Trainer(job, folder, every=Interval(steps=every), **options)
        trainer.run()
    return trainer


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "done"
    train(job_of(), path)
    return path


@pytest.fixture
def stopped(done: Path, tmp_path: Path) -> Path:
    """The run before its model was written."""
    path = tmp_path / "run"
    shutil.copytree(done, path)
    (path / "model.safetensors").unlink()
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


# Temporary files


def test_reading_a_folder_leaves_what_a_writer_is_writing(stopped: Path) -> None:
    hidden = stopped / "checkpoints" / f"{files.HIDDEN}1-step-99999999"
    hidden.mkdir()
    inference.load(stopped)
    assert hidden.exists()
    with Folder(stopped) as folder:
        folder.load()
    assert not hidden.exists()


def test_a_reader_beside_the_one_who_has_the_lock_sweeps_nothing(stopped: Path) -> None:
    hidden = stopped / "checkpoints" / f"{files.HIDDEN}1-step-99999999"
    with Folder(stopped):
        hidden.mkdir()
        Folder(stopped).load()
        assert hidden.exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_while_the_config_was_first_written(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / f"{files.HIDDEN}7-config.toml").write_text("dataset = ")
    with Folder(tmp_path) as folder:
        assert folder.claim(job_of().config, overwrite=overwrite) is False
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_a_kill_while_a_sweep_was_first_written(tmp_path: Path) -> None:
    from rewire.reproduce.sweep import About, Sweep

    (tmp_path / f"{files.HIDDEN}7-sweep.toml").write_text("exp")
    about = About("table1", "rewire reproduce", 1.0, 1, False)
    Sweep(tmp_path, about).claim()
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]
    Sweep(tmp_path, about).claim()


def test_overwriting_keeps_a_config_until_all_else_is_gone(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stopped / "round-0").mkdir()
    for killed_at in range(7):
        calls = iter(range(100))

        def remove(path: Path, calls: Any = calls, last: int = killed_at) -> None:
            if next(calls) == last:
                raise KeyboardInterrupt
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

        monkeypatch.setattr(files, "remove", remove)
        with pytest.raises(KeyboardInterrupt), Folder(stopped) as folder:
            folder.claim(job_of(seed=1).config, overwrite=True)
        monkeypatch.undo()
        assert Folder(stopped).exists
    with Folder(stopped) as folder:
        folder.claim(job_of(seed=1).config, overwrite=True)
    assert [path.name for path in stopped.iterdir()] == ["config.toml"]


# Runs tied together


def test_an_edited_config_is_refused_with_what_differs(stopped: Path) -> None:
    config = stopped / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.1\n", "lr = 0.2\n"))
    with pytest.raises(RunError, match=r"lr 0\.1 there, 0\.2 here"):
        train(job_of(lr=0.2), stopped)
    with pytest.raises(RunError, match=r"lr 0\.1 there"):
        inference.load(stopped)


def test_the_model_of_another_run_is_refused(done: Path, tmp_path: Path) -> None:
    """Or of this one, with an edited config."""
    run = tmp_path / "run"
    shutil.copytree(done, run)
    inference.load(run)
    config = run / "config.toml"
    config.write_text(config.read_text().replace("seed = 0\n", "seed = 1\n"))
    with pytest.raises(RunError, match=r"model\.safetensors was written .*seed 0 there, 1 here"):
        inference.load(run)
    config.unlink()
    inference.load(run)  # a model alone


def test_every_flip_in_a_model_is_noticed(done: Path, tmp_path: Path) -> None:
    whole = (done / "model.safetensors").read_bytes()
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "model.safetensors"
    for _ in range(150):
        damaged = bytearray(whole)
        at = int(torch.randint(len(whole), (), generator=generator))
        damaged[at] ^= 1 << int(torch.randint(8, (), generator=generator))
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            rewire.load(path)


def test_a_model_without_a_checksum_is_an_older_one(done: Path, tmp_path: Path) -> None:
    about = saving._about(done / "model.safetensors")
    del about["sha256"]
    old = tmp_path / "old.safetensors"
    save_file(load_file(done / "model.safetensors"), old, {"rewire": json.dumps(about)})
    rewire.load(old)


@pytest.mark.parametrize("about", ["{", "[]", "3", '{"format": "rewire model 1"}'])
def test_odd_metadata(about: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    save_file({"a": torch.zeros(2)}, path, {"rewire": about})
    with pytest.raises(ValueError, match=r"odd\.safetensors"):
        rewire.load(path)


@pytest.mark.parametrize("damage", ["gone", "half", "line", "other"])
def test_metrics_are_made_anew_from_the_checkpoint(damage: str, done: Path, stopped: Path) -> None:
    metrics = stopped / "metrics.jsonl"
    text = metrics.read_bytes()
    rows = text.splitlines(keepends=True)
    rewirings = [row for row in lines_of(done) if row["event"] == "rewiring"]
    if damage == "gone":
        metrics.unlink()
    elif damage == "half":
        metrics.write_bytes(text[: len(text) // 2])
    elif damage == "line":
        metrics.write_bytes(b"".join([rows[0], b"{]\n", *rows[1:]]))
    else:
        metrics.write_bytes(text.replace(b'"turnover"', b'"turnoveR"'))
    notes: list[str] = []

    class Noted(rewire.training.progress.Progress):  # type: ignore[name-defined, misc]
        def note(self, text: str) -> None:
            notes.append(text)

    train(job_of(), stopped, progress=Noted())
    assert any("metrics.jsonl is not as it was" in note for note in notes)
    found = lines_of(stopped)
    assert [row for row in found if row["event"] == "rewiring"] == rewirings
    assert found[-1] == lines_of(done)[-1]
    expected = 2 if damage in ("line", "other") else 1
    assert len([row for row in found if row["event"] == "epoch"]) >= expected
    assert (stopped / "model.safetensors").read_bytes() == (done / "model.safetensors").read_bytes()


# Foreseeable errors


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "step-00000001"])
def test_a_file_that_cannot_be_written_is_named(name: str, tmp_path: Path) -> None:
    model = rewire.sparsify(torch.nn.Sequential(torch.nn.Linear(500, 500)), sparsity=0.5)

    def write() -> None:
        if name == "m.pt":
            rewire.export(model, tmp_path / name)
        elif name == "step-00000001":
            checkpoint.save(tmp_path, 1, model.state_dict())
        else:
            saving.save(model, tmp_path / name)

    with at_most(100_000), pytest.raises(OSError, match=name):
        write()
    assert list(tmp_path.iterdir()) == []
    write()


def test_metrics_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with Folder(tmp_path) as folder:
        folder.open_metrics(0)
        with at_most(1000), pytest.raises(OSError, match=r"metrics\.jsonl"):
            folder.write({"event": "x" * 100_000})


def test_numbers_beyond_any_schedule() -> None:
    for given in ({"epochs": 1e308}, {"epochs": 1e300, "extend": 1e300}, {"scale": 1e300}):
        with pytest.raises(ValueError, match="steps"):
            Schedule.of(resolve({**SMALL, **given}), 56)


def test_data_without_a_root(stopped: Path) -> None:
    (stopped / "data.toml").write_text("rot = 3\n")
    result = CliRunner().invoke(app, ["eval", str(stopped)])
    assert result.exit_code == 1
    assert "data.toml" in result.output
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.toml", "start.safetensors", "model.safetensors"]
)
@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff\xfe\x00", b"[]\n", b'{"a": 1e999}\n', b"\x00" * 999, b"a = " + b"[" * 99999),
        *(b"[" * 99999 + b"\n", b'{"event": [], "step": 1}\n'),
    ],
)
def test_a_damaged_run_does_not_stop_a_report(
    name: str, content: bytes, done: Path, tmp_path: Path
) -> None:
    shutil.copytree(done, tmp_path / "whole")
    shutil.copytree(done, tmp_path / "damaged")
    (tmp_path / "damaged" / name).write_bytes(content)
    found = write_report([tmp_path], tmp_path / "report.html")
    assert "whole" in {run.name for run in found.runs}
    assert (tmp_path / "report.html").stat().st_size > 1000


@pytest.mark.parametrize(("name", "then"), [("processes", 4), ("threads", 1000)])
def test_another_machine_is_noted(name: str, then: int, done: Path, stopped: Path) -> None:
    newest = checkpoint.found(stopped / "checkpoints")[0]
    state = checkpoint.load(newest)
    now = state["machine"][name]
    state["machine"][name] = then
    checkpoint.save(newest.parent, state["step"], state)
    notes: list[str] = []

    class Noting(Progress):
        def note(self, text: str) -> None:
            notes.append(text)

    train(job_of(), stopped, progress=Noting())
    assert any(note.startswith(f"{name} was {then} so far and is {now} now") for note in notes)
    assert (stopped / "model.safetensors").read_bytes() == (done / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("best"),
        lambda state: state["model"].update({"3.indptr": "text"}),
        lambda state: state["model"].update({"1.values": state["model"]["1.values"][:-1]}),
        lambda state: state["optimizer"].pop("param_groups"),
        lambda state: state["rewirer"].update(t="text"),
        lambda state: state.update(machine=[]),
        lambda state: state.update(metrics="text"),
    ],
)
def test_a_checkpoint_that_holds_something_else(change: Any, stopped: Path) -> None:
    """Whole, with checksums that fit."""
    for path in checkpoint.found(stopped / "checkpoints"):
        state = checkpoint.load(path)
        change(state)
        checkpoint.save(path.parent, state["step"], state)
    result = CliRunner().invoke(app, ["train", "--resume", str(stopped), "--quiet"])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    assert "does not hold the state of such a run" in result.output


@pytest.mark.parametrize("content", ["[" * 99999, "9" * 9999, "null", "{}", "[1]"])
def test_manifests_that_say_nothing(content: str, stopped: Path) -> None:
    for path in checkpoint.found(stopped / "checkpoints"):
        (path / "manifest.json").write_text(content)
    result = CliRunner().invoke(app, ["train", "--resume", str(stopped), "--quiet"])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    assert "no checkpoint can be used" in result.output


# Divergence


def test_a_loss_that_is_not_finite_ends_the_run_before_the_update(tmp_path: Path) -> None:
    job = job_of(method="static", lr=1e30, until=None, every=None)
    for every, kept in ((10**6, False), (1, True)):
        with pytest.raises(Diverged, match=r"loss of step \d+ is (nan|inf).*not finite") as error:
            train(job, tmp_path / "run", every=every)
        assert ("checkpoints" in str(error.value)) is kept
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_lines_of_json_have_null_for_what_is_not_finite() -> None:
    entry = {"a": math.nan, "b": {"c": -math.inf, "d": [1.0, math.inf, (2, math.nan)]}}
    assert plain(entry) == {"a": None, "b": {"c": None, "d": [1.0, None, [2, None]]}}


@pytest.mark.parametrize("more", [0, 10], ids=["last step", "earlier"])
def test_an_update_that_is_not_finite_is_not_saved(more: int, tmp_path: Path) -> None:
    """A loss is finite, and its update is not: at the last step, or with a checkpoint after every one."""
    steps = job_of().schedule.steps_per_epoch
    config = {"epochs": 1 + (1 + more) / steps, "drops": (1.0,), "lr": 1e-8, "drop_factor": 1e45}
    job = job_of(method="static", until=None, every=None, weight_decay=1e4, **config)
    folder = tmp_path / "run"
    every = 1 if more else 10**6
    with pytest.raises(Diverged, match=rf"after the update of step {steps + 1} .* is not finite"):
        train(job, folder, every=every)
    assert not (folder / "model.safetensors").exists()
    model, what = inference.load(folder)
    assert f"step-{steps:08}" in what
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    train(job, folder, every=every, through_nan=True)
    assert (folder / "model.safetensors").exists()


def test_the_command_line_says_so_and_fails(tmp_path: Path) -> None:
    options = ["--epochs", "1", "--method", "static", "--lr", "1e30", "--json"]
    command = ["train", *options, "--drops", "1", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "the loss of step" in result.output
    again = CliRunner().invoke(app, [*command, "--through-nan", "--overwrite"])
    assert again.exit_code == 0, again.output
    for line in again.stdout.splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
    tested = CliRunner().invoke(app, ["eval", str(tmp_path / "run"), "--json"])
    json.loads(tested.stdout, parse_constant=lambda name: pytest.fail(name))


def test_a_run_whose_folder_was_removed_ends_loudly(tmp_path: Path) -> None:
    job = job_of()

    class Remover(Progress):
        def step(self, trainer: Trainer) -> None:
            if trainer.step == 10:
                shutil.rmtree(tmp_path / "run")

    with pytest.raises((RunError, OSError), match=r"metrics\.jsonl|run"):
        train(job, tmp_path / "run", progress=Remover(), interrupts=Interrupts())


# Damaged bytes


def damaged(content: bytes, how: str, draw: random.Random) -> bytes:
    """The content with a bit flipped, without its end, with something in its place, or with more."""
    at = draw.randrange(len(content))
    if how == "flipped":
        return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]
    if how == "cut":
        return content[:at]
    if how == "zeros":
        return content[:at] + bytes(len(content) - at)
    return content + draw.randbytes(9)


DAMAGES = ["flipped", "cut", "zeros", "longer"]


def goes_on(run: Path) -> Any:
    return CliRunner().invoke(app, ["train", "--resume", str(run), "--quiet"])


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize(
    "name", ["manifest.json", "tensors.safetensors", "metrics.jsonl", "start.safetensors"]
)
def test_damage_that_costs_nothing(
    name: str, how: str, done: Path, stopped: Path, tmp_path: Path
) -> None:
    """There is an older checkpoint, metrics are made anew, and no training needs its start."""
    draw = random.Random(name + how)
    newest, *_ = checkpoint.found(stopped / "checkpoints")
    path = (newest if newest / name in newest.iterdir() else stopped) / name
    path.write_bytes(damaged(path.read_bytes(), how, draw))
    result = goes_on(stopped)
    assert result.exit_code == 0, result.output
    assert (stopped / "model.safetensors").read_bytes() == (done / "model.safetensors").read_bytes()


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_config_is_refused_by_name(how: str, stopped: Path) -> None:
    """As unreadable, or as other settings than the checkpoint's; it may also say the same as before."""
    config, draw = stopped / "config.toml", random.Random(how)
    whole, settings = config.read_bytes(), Folder(stopped).config()
    refused = 0
    for _ in range(60):
        config.write_bytes(damaged(whole, how, draw))
        with suppress(RunError):
            if Folder(stopped).config() == settings:
                continue
        with pytest.raises(RunError, match=r"config\.toml"):
            inference.load(stopped)
        refused += 1
    assert refused > 30
