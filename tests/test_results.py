"""Copies of runs as text (``rewire report --archive``), and tables of results (``--markdown``)."""

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rewire import files
from rewire.cli import app
from rewire.report import runs
from rewire.report.groups import group
from rewire.training import checkpoint, toml
from test_report import SMALL, report, run, text, write_run

TEXTS = {"about.toml", "config.toml", "metrics.jsonl"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run that is finished, with two threads, and one that was stopped."""
    top = tmp_path_factory.mktemp("runs")
    given = [*SMALL, "--method", "gse", "--sparsity", "0.8", "--until", "3", "--every", "5"]
    given += ["--checkpoint-every", "5"]
    done = run("train", *given, "--threads", "2", "--out", top / "whole")
    assert done.exit_code == 0, done.output
    shutil.copytree(top / "whole", top / "stopped")
    (top / "stopped" / "model.safetensors").unlink()
    lines = (top / "whole" / "metrics.jsonl").read_text().splitlines(keepends=True)
    cut = "".join(lines[:-2]) + lines[-2][:30]  # a line that is being written
    (top / "stopped" / "metrics.jsonl").write_text(cut)
    return top


def archive(*arguments: str | Path) -> Any:
    done = run("report", *arguments)
    assert done.exit_code == 0, done.output
    return text(done)


def tree(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


# Copies -------------------------------------------------------------------------------------------


def test_a_copy_is_the_text_of_a_finished_run(trained: Path, tmp_path: Path) -> None:
    said = archive(trained, "--archive", tmp_path / "results")
    assert "1 copied, 0 up to date, 1 left out" in said
    assert "Not copied: stopped (unfinished)" in said
    assert set(tree(tmp_path / "results")) == {f"whole/{name}" for name in TEXTS}
    for name in ("config.toml", "metrics.jsonl"):
        copy = tmp_path / "results" / "whole" / name
        assert copy.read_bytes() == (trained / "whole" / name).read_bytes()
    about = toml.read(tmp_path / "results" / "whole" / "about.toml")
    assert about["model_sha256"] == files.sha256(trained / "whole" / "model.safetensors")
    assert (about["threads"], about["processes"]) == (2, 1)
    assert set(about) == {"rewire", "torch", "threads", "processes", "device", "model_sha256"}


def test_a_copy_is_made_again_only_where_something_has_changed(
    trained: Path, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    archive(trained, "--archive", results)
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*")}
    first = tree(results)
    assert "0 copied, 1 up to date" in archive(trained, "--archive", results)
    assert {path: path.stat().st_mtime_ns for path in results.rglob("*")} == before
    archive(trained, "--archive", tmp_path / "other")
    assert tree(tmp_path / "other") == first
    archive(results, "--archive", tmp_path / "third")  # a copy of a copy
    assert tree(tmp_path / "third") == first
    archive(tmp_path, trained, "--archive", results)  # copies are not copied into themselves
    assert "whole" in os.listdir(results)
    assert not (results / "results").exists()


def test_an_unfinished_run_is_copied_if_asked_for_and_goes_on(
    trained: Path, tmp_path: Path
) -> None:
    results, run_ = tmp_path / "results", tmp_path / "runs" / "mine"
    shutil.copytree(trained / "stopped", run_)
    assert "0 copied, 0 up to date, 1 left out" in archive(run_, "--archive", results)
    assert not results.exists()
    archive(run_, "--archive", results, "--unfinished")
    copied = (results / "mine" / "metrics.jsonl").read_text()
    assert copied.endswith("\n")
    assert (run_ / "metrics.jsonl").read_text().startswith(copied)
    page = report(results, out=tmp_path / "report.html")
    assert "run: 1 unfinished" in page
    assert "--resume" not in page  # there is nothing to go on with
    for name in ("metrics.jsonl", "model.safetensors"):
        shutil.copy(trained / "whole" / name, run_ / name)
    assert "1 copied, 0 up to date, 0 left out" in archive(run_, "--archive", results)
    assert "run: 1 finished" in report(results, out=tmp_path / "report.html")
    assert "model_sha256" in (results / "mine" / "about.toml").read_text()


def test_nothing_goes_on_in_a_copy(trained: Path, tmp_path: Path) -> None:
    archive(trained, "--archive", tmp_path / "results")
    copy = tmp_path / "results" / "whole"
    before = tree(copy)
    for given in (["--resume", copy], ["--config", copy / "config.toml", "--out", copy]):
        done = run("train", *given, "--quiet")
        assert done.exit_code == 1, done.output
        assert "a copy of a run without its weights" in text(done)
    assert tree(copy) == before


def test_a_result_is_not_replaced_by_another(tmp_path: Path) -> None:
    there, results = tmp_path / "runs" / "a", tmp_path / "results"
    write_run(there, 0.85, sparsity=0.98)
    archive(there, "--archive", results)
    before = tree(results)
    metrics = there / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"accuracy": 0.85', '"accuracy": 0.86'))
    done = run("report", there, "--archive", results)
    assert done.exit_code == 1
    assert "holds a copy of this run, finished, with other results" in text(done)
    config = there / "config.toml"
    config.write_text(config.read_text().replace("seed = 0", "seed = 1"))
    done = run("report", there, "--archive", results)
    assert done.exit_code == 1
    assert "holds a copy of a run with other settings" in text(done)
    assert tree(results) == before


def test_the_same_result_in_another_time_is_the_same(tmp_path: Path) -> None:
    there, results = tmp_path / "a", tmp_path / "results"
    write_run(there, 0.85)
    archive(there, "--archive", results)
    metrics = there / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"seconds": 3', '"seconds": 4'))
    assert "1 copied" in archive(there, "--archive", results)
    assert '"seconds": 4' in (results / "a" / "metrics.jsonl").read_text()


def test_damaged_runs_are_left_out_and_names_must_differ(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name / "same", 0.5, seed=1 if name == "two" else 0)
    done = run("report", tmp_path / "one", tmp_path / "two", "--archive", tmp_path / "results")
    assert done.exit_code == 1
    assert "would both be copied to" in text(done)
    assert not (tmp_path / "results").exists()
    with (tmp_path / "one" / "same" / "metrics.jsonl").open("a") as file:
        file.write("{\n")
    more = ("--archive", tmp_path / "results", "--unfinished")
    assert "Not copied: same (damaged)" in archive(tmp_path / "one", *more)


def test_only_a_copy_is_made_unless_more_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a", 0.5)
    archive("runs", "--archive", "results")
    assert sorted(os.listdir(tmp_path)) == ["results", "runs"]
    archive("results", "--markdown", "results.md")
    assert sorted(os.listdir(tmp_path)) == ["results", "results.md", "runs"]
    archive("runs", "--archive", "results", "--out", "page.html")
    assert "page.html" in os.listdir(tmp_path)
    done = run("report", "runs", "--unfinished")
    assert done.exit_code == 2
    assert "--archive" in text(done)


def test_sweeps_and_sequences_are_copied_whole(tmp_path: Path) -> None:
    sweep = tmp_path / "sweeps" / "table1"
    write_run(sweep / "runs" / "gse", 0.6, sparsity=0.98)
    whole = write_run(sweep / "runs" / "lottery", 0.7, method="static", named="lottery")
    with (whole / "config.toml").open("a") as config:
        config.write("rounds = [0.0, 0.98]\n")
    for index, sparsity in enumerate((0.0, 0.98)):
        path = write_run(whole / f"round-{index}", 0.7, method="static", sparsity=sparsity)
        settings = (path / "config.toml").read_text().replace("static", "lottery")
        (path / "config.toml").write_text(settings + "rounds = []\n")
    about = {"experiment": "table1", "command": "rewire reproduce table1", "scale": 1.0}
    (sweep / "sweep.toml").write_text(toml.dumps(about))
    page = report(sweep, out=tmp_path / "page.html")
    for top, prefix in ((sweep, "table1/"), (tmp_path / "sweeps", "table1/")):
        results = tmp_path / f"results-{top.name}"
        archive(top, "--archive", results)
        names = ("runs/gse", *(f"runs/lottery{rest}" for rest in ("", "/round-0", "/round-1")))
        expected = {f"{prefix}{name}/{file}" for name in names for file in TEXTS}
        assert set(tree(results)) == {*expected, f"{prefix}sweep.toml"}
        copied = report(results / "table1", out=tmp_path / "copy.html")
        assert re.findall("<h[23]>.*?</", copied) == re.findall("<h[23]>.*?</", page)
        assert "runs: 3 finished" in copied
    (whole / "model.safetensors").unlink()  # it is in its last round
    (whole / "checkpoints").mkdir()
    archive(sweep, "--archive", tmp_path / "fewer")
    assert os.listdir(tmp_path / "fewer" / "table1" / "runs") == ["gse"]


def test_commands_of_sweeps_lose_places_of_the_machine(tmp_path: Path) -> None:
    sweep = tmp_path / "flops"
    sweep.mkdir()
    plain = "rewire reproduce flops --scale 0.1"
    command = plain.replace(" --scale", " --root /data --out 'my sweeps/it' --scale")
    (sweep / "sweep.toml").write_text(toml.dumps({"experiment": "flops", "command": command}))
    (sweep / "results.json").write_text(json.dumps({"command": command, "records": []}))
    archive(sweep, "--archive", tmp_path / "results")
    copy = tmp_path / "results" / "flops"
    assert toml.read(copy / "sweep.toml")["command"] == plain
    assert json.loads((copy / "results.json").read_text())["command"] == plain


# Text alone ---------------------------------------------------------------------------------------


def test_config_and_metrics_alone_make_a_page_without_complaints(
    trained: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "results" / "whole"
    copy.mkdir(parents=True)
    for name in ("config.toml", "metrics.jsonl"):
        shutil.copy(trained / "whole" / name, copy / name)
    (copy / "data.toml").write_text('root = "elsewhere"\n')
    done = CliRunner().invoke(app, ["report", str(copy), "-o", str(tmp_path / "report.html")])
    assert done.exit_code == 0
    assert done.stderr == ""
    shown = (tmp_path / "report.html").read_text()
    assert "run: 1 finished" in shown
    assert "Not finished" not in shown
    assert "Turnover" in shown
    assert "Connections before and after" not in shown
    assert "core-hours" in shown  # a column, without a number
    assert math.isnan(runs.find([copy]).runs[0].core_hours)


def test_a_run_that_ended_before_its_model_was_written_is_not_finished(
    trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained / "whole", tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    shown = report(tmp_path, out=tmp_path / "report.html")
    assert "run: 1 unfinished" in shown
    assert "rewire train --resume" in shown


def test_core_hours_are_seconds_times_threads(trained: Path, tmp_path: Path) -> None:
    archive(trained, "--archive", tmp_path / "results")
    for top in (trained / "whole", tmp_path / "results"):
        (one,) = runs.find([top]).runs
        assert one.core_hours == pytest.approx(one.seconds * 2 / 3600)
        assert group([one])[0].core_hours == one.core_hours
        assert runs.total([one, one], "core_hours") == one.core_hours
    assert "core-hours</span>" in report(tmp_path / "results", out=tmp_path / "report.html")


def test_a_checkpoint_is_peeked_into_without_its_tensors(trained: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(trained / "whole" / "checkpoints", checkpoints)
    for path in checkpoints.glob("*/tensors.safetensors"):
        path.unlink()
    newest, older = checkpoint.found(checkpoints)
    said = checkpoint.peek(checkpoints, "machine")
    assert said["threads"] == 2
    (newest / "manifest.json").write_text("{")
    assert checkpoint.peek(checkpoints, "machine") == said
    (older / "manifest.json").write_text('{"body": {"state": []}}')
    assert checkpoint.peek(checkpoints, "machine") is None
    assert checkpoint.peek(tmp_path / "nowhere", "machine") is None


# Tables -------------------------------------------------------------------------------------------


def timed(path: Path, accuracy: float, hours: float, threads: int = 1, **given: Any) -> None:
    """A copy of a run that took so long."""
    write_run(path, accuracy, **given)
    (path / "model.safetensors").unlink()
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["seconds"] = 3600 * hours
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    machine = {"rewire": "0.1.0", "torch": "2.13.0", "threads": threads, "processes": 1}
    (path / "about.toml").write_text(toml.dumps(machine))


def test_tables_of_results(tmp_path: Path) -> None:
    results = tmp_path / "results"
    for seed, (accuracy, hours) in enumerate(((0.85, 0.5), (0.86, 0.6), (0.87, 0.7))):
        timed(results / f"gse-{seed}", accuracy, hours, 2, sparsity=0.98, seed=seed)
    timed(results / "short", 0.7, 0.1, sparsity=0.98, scale=0.1)
    timed(results / "wide", 0.8, 0.1, sparsity=0.98, subset=2.0, distribution="grabo")
    timed(results / "dense", 0.885, 2, method="dense")
    timed(results / "longer", 0.45, 1, dataset="cifar100", model="vit", sparsity=0.98, extend=1.5)
    write_run(results / "stopped", 0.5, sparsity=0.9)
    (results / "stopped" / "model.safetensors").unlink()
    (results / "stopped" / "metrics.jsonl").write_text('{"event": "epoch", "epoch": 1}\n')
    page = tmp_path / "results.md"
    page.write_text(
        "# Ours\n\nWords.\n\n<!-- rewire report: begin -->\nold\n<!-- rewire report: end -->\n\nMore.\n"
    )
    archive(results, "--markdown", page)
    written = page.read_text()
    assert written.startswith("# Ours\n\nWords.\n\n<!-- rewire report: begin -->\n")
    assert written.endswith("<!-- rewire report: end -->\n\nMore.\n")
    assert "old" not in written
    assert (
        "Made with rewire 0.1.0, torch 2.13.0, 1 thread(s); rewire 0.1.0, torch 2.13.0, 2 thread(s)."
        in written
    )
    rows = [line for line in written.splitlines() if line.startswith("|")]
    minus, dash = "\N{MINUS SIGN}", "\N{EN DASH}"
    vgg = "| VGG-16 | CIFAR-10 | "
    assert rows[2:] == [
        f"{vgg}{dash} | Dense | 0 | 88.50 | 89.0 | {minus}0.5 | 2 h 0 min | 2.00 |",
        f"{vgg}98 % | GSE | 0, 1, 2 | 86.00 ± 1.00 | 85.1 | +0.9 | 36 min 0 s | 3.60 |",
        f"{vgg}98 % | GSE, scale 0.1 | 0 | 70.00 | 85.1 | {dash} | 6 min 0 s | 0.10 |",
        f"{vgg}98 % | GSE, subset 2, distribution GraBo | 0 | 80.00 | {dash} | {dash} | 6 min 0 s | 0.10 |",
        "| ViT | CIFAR-100 | 98 % | GSE, extend 1.5 | 0 | 45.00 | 45.3 ± 1.1 | "
        f"{minus}0.3 | 1 h 0 min | 1.00 |",
    ]
    archive(results, "--markdown", page)
    assert page.read_text() == written


def test_tables_go_into_a_new_file_and_not_into_any_other(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", 0.5)
    archive(tmp_path / "runs", "--markdown", tmp_path / "docs" / "new.md")
    assert (tmp_path / "docs" / "new.md").read_text().startswith("# Results\n\n<!-- rewire")
    (tmp_path / "mine.md").write_text("Mine.\n")
    done = run("report", tmp_path / "runs", "--markdown", tmp_path / "mine.md")
    assert done.exit_code == 1
    assert "mine.md has no place for tables" in text(done)
    assert (tmp_path / "mine.md").read_text() == "Mine.\n"


def test_sweeps_have_tables_of_their_own(tmp_path: Path) -> None:
    sweep = tmp_path / "subset"
    for subset in (0.5, 1.0, 100.0):
        timed(sweep / "runs" / f"gamma{subset:g}", 0.8, 1, sparsity=0.98, subset=subset)
    about = {"experiment": "subset", "command": "rewire reproduce subset"}
    (sweep / "sweep.toml").write_text(toml.dumps(about))
    archive(tmp_path, "--markdown", tmp_path / "results.md")
    written = (tmp_path / "results.md").read_text()
    assert "### Size of the subset\n\n`rewire reproduce subset`\n\n| model |" in written
    assert re.findall(r"\| (GSE.*?) \|", written) == ["GSE", "GSE, subset 0.5", "GSE, subset 100"]


# What the repository publishes --------------------------------------------------------------------

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="no results are published yet")
def test_the_page_of_results_is_made_from_the_published_runs(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    shutil.copy(ROOT / "docs" / "results.md", page)
    archive(ROOT / "results", "--markdown", page)
    assert page.read_text() == (ROOT / "docs" / "results.md").read_text()


@pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="no results are published yet")
def test_published_runs_are_text_without_places_of_this_machine() -> None:
    for name, content in tree(ROOT / "results").items():
        assert name.endswith((".toml", ".jsonl", ".json")), name
        assert len(content) < 1_000_000, name
        assert re.search(rb"\"/(home|root|srv|tmp|work)/", content) is None, name
