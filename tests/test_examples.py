"""The scripts in examples/ run, and do what they say."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rewire import data
from rewire.methods import METHODS

EXAMPLES = Path(__file__).parent.parent / "examples"
Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script as the command line would and returns what it prints."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(script: str, *arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_digits_are_learnt(run: Run) -> None:
    output = run("digits.py", "--steps", "60")
    assert "mlp: 6,00" in output
    assert "step 60: loss" in output
    lines = [line for line in output.splitlines() if "test images right" in line]
    assert [line.split(":")[0] for line in lines] == ["mlp", "cnn"]
    assert all(float(line.split()[1].rstrip("%")) > 70 for line in lines)


def test_methods_are_compared_and_a_run_goes_on(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "digits.json"
    arguments = ("--data", "digits", "--images", "256", "--steps", "12", "--json", file)
    first = run("compare_methods.py", *arguments, "--seeds", "1")
    assert "| GSE GraEst |" in first
    second = run("compare_methods.py", *arguments, "--seeds", "2", "--method", "Static", "--layers")
    assert "| layer | Static | SET | GSE uniform | GSE GraBo | GSE GraEst |" in second
    assert "seed 0" not in second
    assert "seed 1, Static" in second
    runs = json.loads(file.read_text())["runs"]
    methods = ["Static", "SET", "GSE uniform", "GSE GraBo", "GSE GraEst"]
    assert [(r["method"], r["seed"]) for r in runs] == [*((m, 0) for m in methods), ("Static", 1)]
    assert all(sum(r["layers"].values()) == 6002 for r in runs)
    with pytest.raises(SystemExit, match="other settings"):
        run("compare_methods.py", *arguments, "--lr", "1")
    with pytest.raises(SystemExit, match="--images must be between 128 and 1297"):
        run("compare_methods.py", "--images", "2000")


DST = ["static", "rigl", "topkast", "set", "gse", "dsr", "deepr", "snfs"]


def rows_of(output: str) -> dict[str, list[str]]:
    """The cells of the table's lines, by method."""
    lines = (line.split("│") for line in output.splitlines() if line.startswith("│"))
    return {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in lines}


def test_all_methods_are_trained(run: Run) -> None:
    rows = rows_of(run("all_methods.py", "--steps", "10"))
    assert list(rows) == list(METHODS)
    for name, (accuracy, began, ended, *_) in rows.items():
        assert float(accuracy.rstrip("%")) > 0
        assert name not in (*DST, "dense") or began == ended
        assert name == "dense" or ended in ("6,001", "6,002")


@pytest.mark.slow
def test_all_methods_are_trained_on_cifar10(run: Run) -> None:
    if data.find("cifar10") is None:
        pytest.skip("there is no CIFAR-10 here: rewire data get cifar10")
    arguments = ("--dataset", "cifar10", "--model", "vgg16", "--images", "2560", "--steps", "20")
    rows = rows_of(run("all_methods.py", *arguments))
    assert list(rows) == list(METHODS)
    assert all(rows[name][1] == rows[name][2] for name in DST)


def test_an_own_loop_trains_stops_goes_on_saves_and_loads(run: Run, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run("own_loop.py", "--epochs", "2", "--folder", whole)
    run("own_loop.py", "--epochs", "2", "--folder", parts, "--stop-after", "1")
    assert "resuming after epoch 1" in run("own_loop.py", "--epochs", "2", "--folder", parts)
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
    assert "conv1.weight" in torch.load(parts / "dense.pt", weights_only=True)


@pytest.mark.parametrize(
    ("name", "arguments", "part"),
    [
        ("new_method.py", ["--epochs", "1", "--seeds", "1"], "Saliency  mean"),
        (
            "char_gpt.py",
            ["--steps", "20", "--width", "32", "--depth", "1", "--characters", "10"],
            "When in",
        ),
    ],
)
def test_the_others_run(run: Run, name: str, arguments: list[str], part: str) -> None:
    assert part in run(name, *arguments)


def test_a_new_method_takes_few_lines() -> None:
    text = (EXAMPLES / "new_method.py").read_text()
    method = text[text.index("class Saliency") : text.index("def train")]
    assert len(method.strip().splitlines()) < 30
