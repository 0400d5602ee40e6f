"""The examples run, in small."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str | Path) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_own_loop_trains_stops_goes_on_saves_and_loads(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run("own_loop.py", "--epochs", "2", "--folder", whole)
    run("own_loop.py", "--epochs", "2", "--folder", parts, "--stop-after", "1")
    assert "going on after epoch 1" in run("own_loop.py", "--epochs", "2", "--folder", parts)
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
def test_the_others_run(name: str, arguments: list[str], part: str) -> None:
    assert part in run(name, *arguments)


def test_a_new_method_takes_few_lines() -> None:
    text = (EXAMPLES / "new_method.py").read_text()
    method = text[text.index("class Saliency") : text.index("def train")]
    assert len(method.strip().splitlines()) < 30
