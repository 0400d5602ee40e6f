"""``rewire bench rewiring``: what it measures, shows and writes, and that its RigL is ours. No speed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rewire import GSE, Rewirer, RigL
from rewire.bench import rewiring, rewiring_show
from rewire.bench.rewiring import Cost
from rewire.cli import app

METHODS = ["uniform", "grabo", "graest", "RigL"]


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["bench", "rewiring", *map(str, arguments)])


def cost(width: int, method: str, milliseconds: float) -> Cost:
    return Cost(width, 10 * width, 128, method, milliseconds, 2 * milliseconds, 0.5, 0.0005)


def test_rewirings_are_measured_shown_and_written(tmp_path: Path) -> None:
    file, picture = tmp_path / "rewiring.json", tmp_path / "rewiring.png"
    done = run(
        *("--quick", "--width", "1500,20", "--width", "40", "--batch", "4", "--rounds", "1"),
        *("--dense-limit", "40", "--threads", "1", "--json", file, "--plot", picture),
    )
    assert done.exit_code == 0, done.output
    for text in ("One rewiring", "GSE grabo", "Growth exponent, 20 to ", "million draws at 1,500"):
        assert text in done.output
    assert "RigL was left out at 1,500 units" in done.output
    document = json.loads(file.read_text())
    assert document["benchmark"] == "rewiring"
    costs = [Cost(**row) for row in document["results"]]
    assert [(c.width, c.method) for c in costs] == [
        *((width, method) for width in (20, 40) for method in METHODS),
        *((1500, method) for method in METHODS[:-1]),
    ]
    for each in costs:
        assert (each.connections, each.batch) == (10 * each.width, 4)
        assert each.step_ms > 0
        assert each.steps == pytest.approx(each.rewiring_ms / each.step_ms)
        assert each.share == pytest.approx(each.steps / (1000 + each.steps))
    assert set(document["million_draws_ms"]["1500"]) == set(METHODS[:-1])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", [["--width", "0"], ["--rounds", "0"], ["--json", "no/a.json"]])
def test_bad_options_are_refused(option: list[str]) -> None:
    assert run(*option).exit_code == 2


def test_an_interrupted_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(width: int, *_: Any, **__: Any) -> list[Cost]:
        if width > 20:
            raise KeyboardInterrupt
        return [cost(width, "uniform", 1.0)]

    monkeypatch.setattr(rewiring, "measure", measure)
    done = run("--width", "20,40", "--json", tmp_path / "rewiring.json")
    assert done.exit_code == 130
    assert "GSE uniform" in done.output
    assert not list(tmp_path.iterdir())


def test_each_method_rewires_the_layer_once_for_each_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rewirers: list[Rewirer] = []
    timed = rewiring.Training.cost

    def spy(self: rewiring.Training, rewirer: Rewirer) -> tuple[float, float]:
        rewirers.append(rewirer)
        before = self.layer.connections.keys()
        found = timed(self, rewirer)
        assert not torch.equal(self.layer.connections.keys(), before)
        assert self.layer.probe is None
        return found

    monkeypatch.setattr(rewiring.Training, "cost", spy)
    rewiring.measure(10_000, rewiring.Plan(batch=2, dense_limit=0), rounds=2)
    uniform, grabo, graest = rewirers[:3]
    assert rewirers == [uniform, grabo, graest, uniform, grabo, graest, grabo, graest, uniform]
    assert [r.step for r in uniform.history] == [3, 6, 9]
    assert all(r.turnover == pytest.approx(0.2, rel=1e-3) for r in uniform.history)


def test_the_rigl_that_is_timed_is_the_one_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Rewirer] = []
    cost = rewiring.Training.cost

    def spy(self: rewiring.Training, rewirer: Rewirer) -> tuple[float, float]:
        timed.append(rewirer)
        return cost(self, rewirer)

    monkeypatch.setattr(rewiring.Training, "cost", spy)
    rewiring.measure(30, rewiring.Plan(batch=2), rounds=1)
    assert [type(rewirer) for rewirer in timed[:4]] == [GSE, GSE, GSE, RigL]


def test_growth_is_fitted_below_and_above() -> None:
    widths = (1_000, 10_000, 100_000, 1_000_000)
    costs = [cost(width, "uniform", width**1.5 if width < 1e5 else 1e7 * width) for width in widths]
    found = {(g.what, g.first, g.last): g.exponent for g in rewiring.growth(costs)}
    assert found["uniform", 100_000, 1_000_000] == pytest.approx(1)
    assert found["training step", 100_000, 1_000_000] == pytest.approx(1)
    assert found["uniform", 1_000, 100_000] > 1.5
    assert rewiring.growth(costs[:1]) == []
    assert rewiring.growth([cost(10, "uniform", -1.0), cost(20, "uniform", 1.0)]) == []
    assert math.isclose(rewiring.exponent([(1, 1), (2, 8), (4, 64)]), 3)


def test_a_picture_of_nothing(tmp_path: Path) -> None:
    rewiring_show.save_plot(tmp_path / "a.svg", [], "nothing")
    assert "svg" in (tmp_path / "a.svg").read_text()
