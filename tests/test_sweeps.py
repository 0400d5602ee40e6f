"""Sweeps that are stopped, killed, or have runs that fail; and on a Ray cluster."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rewire.reproduce.engines import Local
from rewire.reproduce.process import Process
from rewire.reproduce.sweep import About, Sweep
from rewire.training.folder import Folder
from sweeps import do, metrics, run, runs, when

# Failures -----------------------------------------------------------------------------------------


def test_a_failed_run_is_told_and_does_not_stop_the_others(tmp_path: Path) -> None:
    bad, other, good = (f"digits-mlp-{name}-0.9-seed0" for name in ("set", "static", "gse"))
    out = tmp_path / "out"
    Sweep(out, About("table1", "", 0.02, 1, digits=True)).claim()
    (out / "runs" / bad).mkdir(parents=True)
    (out / "runs" / bad / "junk").write_text("")
    do(runs("table1", "static", "0.9", scale=0.03)[0], out)
    options = ("--digits", "--seeds", "1", "--scale", "0.02", "--only", "set,gse,static,0.9")
    done = run("table1", *options, "--out", out, "--workers", "2")
    assert done.exit_code == 1
    assert Folder(out / "runs" / good).finished
    assert "2 of 3 runs failed" in done.stderr
    assert f"{bad}: {out / 'runs' / bad} is not empty and holds no run" in done.stderr
    assert "RunError" in (out / "logs" / f"{bad}.txt").read_text()
    assert f"{other}: its folder holds a run with other settings (scale 0.03 there" in done.stderr


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told(tmp_path: Path) -> None:
    (one,) = runs("table1", "static", "0.9", scale=50)
    sweep = Sweep(tmp_path, About("table1", "", 1.0, 1))
    process = Process(sweep.task(one, one.config(), None, 1))
    events = process.events()
    assert next(events)["event"] == "begin"
    process.kill()
    *_, last = events
    assert last["event"] == "failed"
    assert "ended by SIGKILL: perhaps there was not enough memory" in last["message"]


# Interruption -------------------------------------------------------------------------------------

STOPPED = ("table1", "--digits", "--seeds", "1", "--scale", "0.2", "--only", "gse,0.98")
NAME = "digits-mlp-gse-0.98-seed0"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    path = tmp_path_factory.mktemp("whole")
    (one,) = runs("table1", "gse", "0.98", scale=0.2)
    do(one, path)
    return path / "runs" / NAME


def same(a: Path, b: Path) -> bool:
    models = [(folder / "model.safetensors").read_bytes() for folder in (a, b)]
    return metrics(a) == metrics(b) and models[0] == models[1]


def test_a_sweep_that_is_stopped_goes_on_to_the_same_numbers(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "runs" / NAME
    stop = lambda: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    with when(folder / "metrics.jsonl", '"epoch": 1', stop):
        done = run(*STOPPED, "--out", tmp_path / "out")
    assert done.exit_code == 130
    assert "stopped after step" in done.stdout
    assert "Resume with the same command:\n  rewire reproduce table1 --scale 0.2" in done.stderr
    assert folder.exists()
    assert not Folder(folder).finished
    again = run(*STOPPED, "--out", tmp_path / "out")
    assert again.exit_code == 0, again.output
    assert "1 run: 1 to resume" in again.stdout
    assert "Resuming after step" in again.stdout
    assert same(folder, whole)


@pytest.mark.slow
def test_a_sweep_that_is_killed_leaves_no_worker_and_goes_on(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "runs" / NAME
    command = [sys.executable, "-m", "rewire", "reproduce", *STOPPED, "--out", tmp_path / "out"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    with when(folder / "metrics.jsonl", '"epoch": 1', process.kill):
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Resuming after step" in again.stdout
    assert same(folder, whole)


def test_nothing_begins_after_a_stop(tmp_path: Path) -> None:
    ones = runs("table1", "static", scale=50)
    sweep = Sweep(tmp_path, About("table1", "", 1.0, 1))
    engine = Local(1)
    engine.start([sweep.task(one, one.config(), None, 1) for one in ones])
    told = list[tuple[str, str]]()
    while engine.busy:
        told += [(name, event["event"]) for name, event in engine.poll(0.1)]
        if (ones[0].name, "begin") in told:
            engine.stop()
    assert {name for name, _ in told} == {ones[0].name}
    assert told[-1] == (ones[0].name, "stopped")


# Ray ----------------------------------------------------------------------------------------------


def test_ray_is_asked_for_by_name() -> None:
    try:
        import ray  # noqa: F401
    except ImportError:
        done = run("table1", "--digits", "--engine", "ray")
        assert done.exit_code == 1
        assert "pip install 'rewire[ray]'" in done.output
    else:
        pytest.skip("ray is installed")


def test_a_ray_cluster_comes_to_the_same_numbers(whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    folder = tmp_path / "out" / "runs" / NAME
    command = [sys.executable, "-m", "rewire", "reproduce", *STOPPED, "--engine", "ray"]
    command += ["--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with when(folder / "metrics.jsonl", '"epoch": 1', lambda: process.send_signal(signal.SIGINT)):
        out, _ = process.communicate()
    assert process.returncode == 130, out
    assert "stopped after step" in out
    assert not Folder(folder).finished
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Resuming after step" in again.stdout
    assert same(folder, whole)
