"""The benchmarks of public models and of shapes: what they measure, show, write and refuse. No speed."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import rewire
from rewire import ops
from rewire.bench import shapes, shapes_show, show, timing
from rewire.bench.timing import Timing
from rewire.bench.zoo import catalogue, libraries, measure, own, step, twins
from rewire.bench.zoo import show as zoo_show
from rewire.bench.zoo.public import TORCHVISION, Public
from rewire.cli import app


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])


def text(done: Any) -> str:
    return " ".join(done.output.replace("│", " ").split())


class Tiny(nn.Module):
    """A small model with an activation that the engine does not know, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.erf(x)
        return self.head(self.drop(x.mean((2, 3))))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model ``tiny`` and one that fails, by our own definitions."""

    def fails(size: int) -> nn.Module:
        raise RuntimeError("cannot be built\nat all")

    for name, make in (("tiny", lambda size: Tiny()), ("fails", fails)):
        monkeypatch.setitem(own.OWN, name, make)
        monkeypatch.setitem(catalogue.PUBLIC, name, Public(name, TORCHVISION))


# Public models ------------------------------------------------------------------------------------


def zoo(*arguments: str | Path) -> Any:
    return run("zoo", "--own", "--rounds", "1", "--batch", "4", "--size", "8", *arguments)


def test_a_model_is_checked_explained_timed_and_written(tiny: None, tmp_path: Path) -> None:
    file = tmp_path / "zoo.json"
    threads = torch.get_num_threads()
    done = zoo("--models", "tiny", "--sparsity", "0.5,0.8", "--threads", "1", "--json", file)
    assert done.exit_code == 0, done.output
    assert torch.get_num_threads() == threads
    for expected in ("1/2 tiny, 50 % sparse: ours", "geometric mean", "80 %", "own definition"):
        assert expected in text(done)
    document = json.loads(file.read_text())
    assert (document["benchmark"], document["size"]) == ("zoo", 8)
    assert document["machine"]["threads"] == 1
    for result, sparsity in zip(document["results"], (0.5, 0.8), strict=True):
        assert (result["model"], result["sparsity"], result["batch"]) == ("tiny", sparsity, 4)
        names = [p + f for p in ("float32", "bfloat16") for f in ("", " channels-last")]
        assert list(result["dense_ms"]) == names
        fastest = min(result["dense_ms"], key=result["dense_ms"].get)
        assert result["best"] == fastest
        ratio = result["dense_ms"][fastest] / result["ours_ms"]
        assert result["ratio_best"] == pytest.approx(ratio)
        assert result["ratio_float32"] >= result["ratio_best"]
        assert list(result["ours_by"]) == ["float32", "bfloat16"]
        assert result["ours_ms"] == min(result["ours_by"].values())
        assert result["ours_ms"] == result["ours_by"][result["best_ours"]]
        assert 0 < result["check"]["bfloat16"] < 0.5
        assert 0 < result["check"]["dense_bfloat16"] < 0.5
        assert result["float32"].startswith("float32")
        assert result["check"]["float64"] < 1e-9
        assert 0 < result["check"]["float32"] < 1e-4
        assert 0 < result["check"]["dense_float32"] < 1e-4
        assert result["layers"] >= 2
        assert result["error"] == ""


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_ours_runs_in_the_precision_that_is_asked_for(
    precision: str, tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[torch.dtype] = set()
    made = measure.training_step

    def look(model: nn.Module, x: Any, *args: Any, **more: Any) -> Any:
        model.register_forward_hook(lambda module, given, output: seen.add(output.dtype))
        return made(model, x, *args, **more)

    monkeypatch.setattr(measure, "training_step", look)
    file = tmp_path / "zoo.json"
    done = zoo("--models", "tiny", "--sparsity", "0.5", "--precision", precision, "--json", file)
    assert done.exit_code == 0, done.output
    assert seen == {getattr(torch, precision)}
    (result,) = json.loads(file.read_text())["results"]
    assert list(result["ours_by"]) == [result["best_ours"]] == [precision]
    assert len(result["dense_ms"]) == 4
    assert (result["check"]["bfloat16"] is None) == (precision == "float32")
    assert f"in {precision}, best float32" in text(done)


@pytest.mark.skipif(not ops.available(), reason="only kernels are recorded")
def test_what_stops_the_engine_is_shown_with_its_line(tiny: None) -> None:
    done = zoo("--models", "tiny", "--no-check")
    found = text(done)
    assert "What the engine could not take in" in found
    assert "stopped 1x: torch.erf is not known to the engine" in found
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, code in enumerate(lines, 1) if "= torch.erf(" in code)
    assert f"test_bench_zoo.py:{line} in the model itself" in found


@pytest.mark.skipif(not ops.available(), reason="only kernels are recorded")
def test_own_definitions_have_lines() -> None:
    model, _ = step.converted(own.OWN["squeezenet1_1"](64), 0.5)
    found = rewire.explain(model, torch.randn(2, 3, 64, 64))
    files = {step.place.file for region in found.regions for step in region.forward}
    assert any(file.endswith("own_images.py") for file in files)


def test_a_model_that_fails_is_named_and_the_others_are_measured(tiny: None) -> None:
    done = zoo("--models", "fails,tiny")
    assert done.exit_code == 1
    found = text(done)
    assert "1/2 fails, 95 % sparse: failed: RuntimeError: cannot be built at all" in found
    assert "2/2 tiny, 95 % sparse: ours" in found
    assert "Models that failed fails, 95 %: RuntimeError: cannot be built at all" in found


def test_wrong_numbers_are_a_failure(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = measure.Check(1e-3, 1e-3, 1e-7, "head.weight")
    monkeypatch.setattr(measure, "check", lambda model, x, precisions: wrong)
    done = zoo("--models", "tiny")
    assert done.exit_code == 1
    assert "DIFFERS from its densified twin" in text(done)
    assert "tiny, 95 %: most in head.weight" in text(done)


def test_what_is_rounding() -> None:
    good = measure.Check(1e-12, 2e-6, 1e-6, "")
    assert good.equal
    assert not dataclasses.replace(good, float64=1e-6).equal
    assert dataclasses.replace(good, float32=1e-2).equal
    assert not dataclasses.replace(good, float32=0.2).equal
    half = dataclasses.replace(good, bfloat16=0.3, dense_bfloat16=0.1)
    assert half.equal
    assert not dataclasses.replace(half, bfloat16=float("inf")).equal
    assert not dataclasses.replace(half, dense_bfloat16=0.01).equal
    assert dataclasses.replace(good, float32=0.2, dense_float32=0.04).equal


def test_unknown_models_are_refused_with_what_is_near() -> None:
    done = run("zoo", "--models", "resnet81")
    assert done.exit_code == 2
    assert "there is no model or set 'resnet81'; did you mean resnet18" in text(done)


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(library: str) -> str:
        raise ModuleNotFoundError(f"No module named {library!r}", name=library)

    libraries.problem.cache_clear()
    monkeypatch.setattr(libraries, "_module", missing)
    try:
        done = run("zoo", "--models", "resnet18,swin_t")
        assert measure.source(catalogue.PUBLIC["resnet18"], own=False) == "own definition"
        listed = run("zoo", "--list")
    finally:
        libraries.problem.cache_clear()
    assert done.exit_code == 2
    message = "swin_t is a model of torchvision: torchvision is not installed; run: pip install torchvision"
    assert message in text(done)
    assert listed.exit_code == 0
    assert "timm (timm is not installed; run: pip install timm):" in text(listed)
    assert "The set second:" in text(listed)


def test_a_library_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(library: str) -> str:
        raise RuntimeError("operator torchvision::nms does not exist")

    libraries.problem.cache_clear()
    monkeypatch.setattr(libraries, "_module", broken)
    try:
        why = libraries.problem(TORCHVISION)
    finally:
        libraries.problem.cache_clear()
    assert why is not None
    assert "installed but cannot be imported: RuntimeError: operator torchvision::nms" in why


def test_any_name_of_a_library_and_sets_are_found() -> None:
    assert [one.name for one in catalogue.find("first")] == list(catalogue.FIRST)
    (one,) = catalogue.find("timm/resnet10t")
    assert (one.name, one.library) == ("resnet10t", "timm")
    with pytest.raises(ValueError, match="no model or set 'transformers/x'"):
        catalogue.find("transformers/x")


def test_an_interrupted_run_shows_what_it_has(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = measure.measure

    def once(model: Public, *arguments: Any, **more: Any) -> measure.Measured:
        if model.name != "tiny":
            raise KeyboardInterrupt
        return measured(model, *arguments, **more)

    monkeypatch.setattr(measure, "measure", once)
    done = zoo("--models", "tiny,fails", "--no-check", "--json", tmp_path / "zoo.json")
    assert done.exit_code == 130
    assert "geometric mean" in text(done)
    assert not list(tmp_path.iterdir())


def test_a_step_learns_from_logits_of_any_shape() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 5)
    for shape in ((3,), (4, 3)):
        size = 3 if len(shape) == 1 else 12
        model = nn.Sequential(nn.Linear(5, size), nn.Unflatten(1, shape))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        step.training_step(model, x, "bfloat16" if len(shape) == 1 else "float32")()
        for old, new in zip(before, model.parameters(), strict=True):
            assert not torch.equal(old, new)
    with pytest.raises(TypeError, match="without logits"):
        step.training_step(nn.Sequential(nn.Linear(5, 3), nn.Flatten(0)), x)()


def test_dense_is_tried_in_every_precision_and_layout() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.randn(2, 3, 8, 8)
    formats: dict[str, bool] = {}
    seen = step.training_step

    def look(twin: nn.Module, its_x: torch.Tensor, precision: str, *, fused: bool) -> Any:
        last = torch.channels_last
        formats[precision] = formats.get(precision, False) or (
            its_x.is_contiguous(memory_format=last)
            and next(twin.parameters()).is_contiguous(memory_format=last)
        )
        assert next(twin.parameters()) is not model[0].weight
        return seen(twin, its_x, precision, fused=fused)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "training_step", look)
        found = step.dense_steps(model, x, "images", compiled=False, fused=True)
    assert formats == {"float32": True, "bfloat16": True}
    assert list(found) == [
        *("float32", "float32 channels-last", "bfloat16", "bfloat16 channels-last")
    ]
    for function in found.values():
        function()
    tokens = step.dense_steps(model, x, "tokens", compiled=True, fused=False)
    assert list(tokens) == ["float32", "float32 compiled", "bfloat16", "bfloat16 compiled"]


def test_a_compiled_step_that_fails_is_left_out(
    tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(model: nn.Module) -> nn.Module:
        def fails(*args: Any) -> None:
            raise RuntimeError("no C++ compiler")

        model.register_forward_pre_hook(fails)
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    done = zoo("--models", "tiny", "--no-check", "--compile")
    assert done.exit_code == 0
    expected = "tiny: dense float32 compiled is left out, it failed: RuntimeError: no C++ compiler"
    assert expected in text(done)


def test_the_check_sees_a_wrong_gradient(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, _ = step.converted(Tiny(), 0.5)
    x = torch.randn(4, 3, 8, 8)
    assert measure.check(model, x).equal
    gradients = twins._with_gradients

    def doubled(of: nn.Module) -> nn.Module:
        found = gradients(of)
        if type(of.get_submodule("head")) is not nn.Linear:
            with torch.no_grad():
                found.get_submodule("head").bias.mul_(1.01)  # type: ignore[union-attr, operator]
        return found

    monkeypatch.setattr(twins, "_with_gradients", doubled)
    found = measure.check(model, x)
    assert not found.equal
    assert found.worst == "head.bias"


# Shapes -------------------------------------------------------------------------------------------


def test_shapes_are_measured_shown_and_written(tmp_path: Path) -> None:
    file, picture = tmp_path / "shapes.json", tmp_path / "shapes.png"
    done = run(
        *("shapes", "--rounds", "1", "--batches", "2,1", "--sizes", "4,5", "--at", "2"),
        *("--size", "4", "--threads", "1", "--json", file, "--plot", picture),
    )
    assert done.exit_code == 0, done.output
    document = json.loads(file.read_text())
    points = [shapes.Point(**row) for row in document["results"]]
    assert [(p.model, p.varied, p.batch, p.size) for p in points] == [
        *(("linear", "batch", 1, 0), ("linear", "batch", 2, 0)),
        *((m, *rest) for m in ("conv", "convnet") for rest in (
            ("batch", 1, 4), ("batch", 2, 4), ("size", 2, 4), ("size", 2, 5)
        )),
    ]  # fmt: skip
    for point in points:
        assert point.ratio == pytest.approx(point.dense / point.ours)
    assert "convnet, batch 2: nanoseconds per sample and pixel" in text(done)
    assert "of more than 1.3x in ours between neighbours" in text(done)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("mode", [shapes.TRAINING, shapes.FORWARD])
@pytest.mark.parametrize("model", shapes.MODELS)
def test_every_shape_runs(model: str, mode: str) -> None:
    size = 0 if model == "linear" else 4
    sweep = shapes.Sweep(model, "batch", ((1, size), (3, size)))
    points = shapes.measure(sweep, shapes.Plan(mode=mode), 1)
    assert [point.batch for point in points] == [1, 3]
    assert all(point.ours > 0 and point.dense > 0 for point in points)


def test_jumps_are_of_time_per_sample_or_per_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    # The time of a call. For ours 65 samples take twice as long as 64.
    seconds = {1: 10.0, 63: 6.3, 64: 6.4, 65: 13.0}

    def interleaved(functions: Any, rounds: int, **_: Any) -> dict[Any, Timing]:
        times = {}
        for who, batch, size in functions:
            late = who == "dense" and batch == 65
            times[who, batch, size] = Timing((6.5 if late else seconds[batch],), 1)
        return times

    monkeypatch.setattr(shapes, "interleaved", interleaved)
    batches = tuple((batch, 0) for batch in seconds)
    points = shapes.measure(shapes.Sweep("linear", "batch", batches), shapes.Plan(), 1)
    assert [point.ours for point in points] == pytest.approx([1e7, 1e5, 1e5, 2e5])
    assert [point.jump for point in points] == pytest.approx([1, 0.01, 1, 2])
    assert [point.more for point in points] == pytest.approx([1, 63, 64 / 63, 65 / 64])
    assert [point.kind for point in points] == ["", shapes.FALL, "", shapes.RISE]
    found = shapes_show.flagged(points)
    assert found.startswith("2 jumps of more than 1.3x")
    assert "linear, batch 65: 2.00x of the time at the batch before (dense 1.00x)" in found

    seconds = {1: 5.0, 63: 6.3, 64: 4.0, 65: 4.0}
    points = shapes.measure(shapes.Sweep("linear", "batch", batches), shapes.Plan(), 1)
    assert [point.kind for point in points] == ["", shapes.SPREAD, shapes.FALL, ""]
    assert shapes_show.flagged(points).startswith("1 jump of more than 1.3x")

    seconds = {4: 2.0}
    sizes = shapes.Sweep("conv", "size", ((4, 2), (4, 4)))
    points = shapes.measure(sizes, shapes.Plan(), 1)
    assert [point.ours for point in points] == pytest.approx([2e9 / 16, 2e9 / 64])
    assert [point.more for point in points] == [1, 4]


def test_large_batches_of_large_images_are_left_out_by_default() -> None:
    plan = shapes.Plan(models=("conv",), batches=())
    largest = {sweep.shapes[0][0]: sweep.shapes[-1][1] for sweep in shapes.sweeps(plan)}
    assert largest == {4: 224, 64: 64}
    every = dataclasses.replace(plan, most=float("inf"))
    assert all(sweep.shapes[-1][1] == 224 for sweep in shapes.sweeps(every))


def test_default_shapes_have_near_neighbours() -> None:
    plan = shapes.Plan()
    assert (plan.batches[0], plan.batches[-1], plan.sizes[0], plan.sizes[-1]) == (1, 512, 4, 224)
    for values in (plan.batches, plan.sizes):
        assert list(values) == sorted(set(values))
        assert all(b <= 1.26 * a for a, b in itertools.pairwise(values) if a >= 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["shapes", "--model", "rnn"],
            "there is no model 'rnn'; choose from linear, conv, convnet",
        ),
        (["shapes", "--batches", "0"], "'0' is no number of at least 1"),
        (["shapes", "--sizes", "8,x"], "'x' is no number of at least 1"),
        (["shapes", "--plot", "a.txt"], "no picture"),
        (["zoo", "--sparsity", "2"], "'2' is no sparsity"),
        (["zoo", "--json", "nowhere/a.json"], "no directory"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in text(done)


@pytest.mark.parametrize("command", ["zoo", "shapes"])
def test_help_shows_an_example(command: str) -> None:
    done = run(command, "--help")
    assert done.exit_code == 0
    assert "Example: rewire bench" in text(done)


def test_an_empty_table_can_be_shown() -> None:
    screen = show.console()
    with screen.capture():
        for table in zoo_show.tables([], measure.Plan(())):
            screen.print(table)
        screen.print(shapes_show.flagged([]))
    assert timing.ratios({"a": Timing((1.0,), 1)}, "a") == {"a": 1.0}
