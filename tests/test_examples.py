"""The scripts in examples/ run, and do what they say."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
    second = run("compare_methods.py", *arguments, "--seeds", "2", "--method", "Static")
    assert "seed 0" not in second
    assert "seed 1, Static" in second
    runs = json.loads(file.read_text())["runs"]
    methods = ["Static", "SET", "GSE uniform", "GSE GraBo", "GSE GraEst"]
    assert [(r["method"], r["seed"]) for r in runs] == [*((m, 0) for m in methods), ("Static", 1)]
    with pytest.raises(SystemExit, match="other settings"):
        run("compare_methods.py", *arguments, "--lr", "1")
    with pytest.raises(SystemExit, match="--images must be between 128 and 1297"):
        run("compare_methods.py", "--images", "2000")
