"""The benchmark of training steps: engine on and off, profiles, memory. No speed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rewire import ops
from rewire.bench import memory, profiling, show, step, step_show
from rewire.bench.case import DENSE, OURS, Result
from rewire.cli import app
from rewire.engine import execute, planned

TINY = ["--rounds", "1", "--sparsity", "0.9", "--batch", "4"]


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_steps_are_measured_profiled_and_written(tmp_path: Path) -> None:
    file, picture = tmp_path / "step.json", tmp_path / "step.svg"
    arguments = ("--model", "mlp", "--profile", "--json", file, "--plot", picture)
    done = run("bench", "step", *TINY, *arguments)
    assert done.exit_code == 0, done.output
    assert "Where the time of our step goes: mlp, 90 % sparse" in done.output
    for precision in ("float32", "bfloat16"):
        assert f"Kernels that take most, engine on, {precision}: mlp, 90 % sparse" in done.output
    document = json.loads(file.read_text())
    (result,) = document["results"]
    assert (result["kind"], result["shape"], result["mode"]) == ("model", "mlp", "training step")
    assert (result["engine"], result["off_ms"], result["off_ratio"]) == ("on", None, None)
    profile = document["profile"]
    assert (profile["model"], profile["sparsity"], profile["batch"]) == ("mlp", 0.9, 4)
    ways = [(one["engine"], one["precision"]) for one in profile["engines"]]
    assert ways == [("on", "float32"), ("on", "bfloat16")]
    assert picture.read_text().count("<!-- vs. float32 dense -->") == 1


@pytest.mark.parametrize(
    ("engine", "headings", "absent"),
    [
        ("on", ["ours fp32", "ours bf16", "speed-up"], ["engine on", "engine off"]),
        ("off", ["engine off fp32", "engine off bf16", "speed-up"], ["ours", "engine on"]),
        ("both", ["on fp32", "off bf16", "which is", "speed-up on", "speed-up off"], ["ours"]),
    ],
)
def test_steps_run_with_the_engine_on_off_or_both(
    engine: str, headings: list[str], absent: list[str], tmp_path: Path
) -> None:
    file, picture = tmp_path / "step.json", tmp_path / "step.svg"
    arguments = ("--model", "mlp", "--engine", engine, "--json", file, "--plot", picture)
    done = run("bench", "step", *TINY, *arguments)
    assert done.exit_code == 0, done.output
    (row,) = [line for line in done.output.splitlines() if line.strip().startswith("model ")]
    assert all(heading in row for heading in headings)
    assert not any(heading in row for heading in absent)
    (result,) = [Result(**row) for row in json.loads(file.read_text())["results"]]
    assert result.engine == ("off" if engine == "off" else "on")
    assert result.dense_ms is not None
    assert result.ratio == pytest.approx(result.dense_ms / result.ours_ms)
    if engine == "both":
        assert result.off_ms is not None
        assert result.off_ratio == pytest.approx(result.dense_ms / result.off_ms)
        assert result.off_ms == min(result.off_by.values())
        assert set(result.off_by) == {"float32", "bfloat16"}
    else:
        assert (result.off_ms, result.off_ratio) == (None, None)
    legend = picture.read_text().count("<!-- mlp, engine off -->")
    assert legend == (engine != "on")


def test_means_are_of_either_engine() -> None:
    """One column for each, in the rows and in the geometric means."""
    results = [
        Result(
            *("model", name, 0.9, 4, "training step", 1.0, on, "float32"),
            ratio=on,
            off_ms=2.0,
            off_ratio=off,
            ratio_float32=on,
            ours_by={"float32": 1.0},
            off_by={"float32": 2.0},
        )
        for name, on, off in (("a", 2.0, 1.0), ("b", 8.0, 4.0))
    ]
    screen = show.console()
    with screen.capture() as captured:
        for table in show.tables(results):
            screen.print(table)
    lines = [" ".join(line.split()) for line in captured.get().splitlines()]
    assert "a 90 % 1.00 ms 2.00 ms fp32 2.00 ms fp32 2.00x 1.00x 2.00x" in lines
    assert "geometric mean 90 % 4.00x 2.00x 4.00x" in lines
    assert show.line(results[:1]) == "training step 2.00x, engine off 1.00x"


@pytest.mark.parametrize("name", list(step.WORKLOADS))
def test_every_model_takes_a_step(name: str) -> None:
    plan = step.Plan(models=(name,), sparsities=(0.98,), batch=2)
    (case,) = step.cases(plan)
    ((_, functions),) = case.groups()
    formats = ("", " channels-last") if name in ("vgg16", "resnet56") else ("",)
    precisions = ("float32", "bfloat16")
    assert list(functions) == [
        *((OURS, precision) for precision in precisions),
        *((DENSE, precision + how) for precision in precisions for how in formats),
    ]
    functions[OURS, "float32"]()
    functions[OURS, "bfloat16"]()


def test_steps_of_dense_models_are_what_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    formats: dict[str, tuple[bool, torch.dtype]] = {}
    last = torch.channels_last
    for variant in step.dense_variants(True):

        def look(module: Any, args: Any, output: torch.Tensor, variant: str = variant) -> None:
            (x,) = args
            both = (x, module.weight)
            formats[variant] = (
                all(t.is_contiguous(memory_format=last) for t in both),
                output.dtype,
            )

        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten())
        model[0].register_forward_hook(look)
        step.dense_step(model, torch.randn(2, 3, 5, 5), torch.tensor([0, 1]), variant)()
        assert model[0].weight.dtype == model[0].weight.grad.dtype == torch.float32
    assert formats == {
        "float32": (False, torch.float32),
        "float32 channels-last": (True, torch.float32),
        "bfloat16": (False, torch.bfloat16),
        "bfloat16 channels-last": (True, torch.bfloat16),
    }


def test_ours_runs_in_the_precision_that_is_asked_for() -> None:
    for precisions in (("float32",), ("bfloat16",)):
        plan = step.Plan(models=("mlp",), sparsities=(0.98,), batch=2, precisions=precisions)
        (case,) = step.cases(plan)
        ((_, functions),) = case.groups()
        assert [key for key in functions if key[0] == OURS] == [(OURS, precisions[0])]
        assert [key[1] for key in functions if key[0] == DENSE] == ["float32", "bfloat16"]


# Profiles -----------------------------------------------------------------------------------------

KINDS = ["kernels, forward", "kernels, backward", "torch operators", "recording", "autograd"]
KINDS += ["optimizer", "zero_grad + loss"]


@pytest.mark.parametrize("name", ["mlp", "gpt"])  # with a plan, and with layers by themselves
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_kinds_of_a_profile_are_the_whole_step(name: str, precision: str) -> None:
    how: Any = {"engines": ("on", "off"), "precisions": (precision,)}
    on, off = profiling.where_time_goes(name, 0.9, 8, **how, steps=2)
    assert (on.engine, off.engine) == ("on", "off")
    assert on.precision == off.precision == precision
    assert [kind.name for kind in on.kinds] == KINDS
    assert [kind.name for kind in off.kinds] == [*KINDS[:3], "Python, forward", *KINDS[4:]]
    for one in (on, off):
        assert sum(kind.share for kind in one.kinds) == pytest.approx(1)
        assert sum(kind.milliseconds for kind in one.kinds) == pytest.approx(one.step_ms)
        assert all(kind.milliseconds >= 0 for kind in one.kinds)
        times = [kernel.milliseconds for kernel in one.kernels]
        assert times == sorted(times, reverse=True)


@pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels")
def test_kernels_of_a_profile_are_the_steps_of_plans() -> None:
    """The counts of a step: three linear layers, of which the first needs no input gradient."""
    on, off = profiling.where_time_goes("mlp", 0.9, 64, engines=("on", "off"), steps=1)
    found = {(kernel.phase, kernel.name): kernel.calls for kernel in on.kernels}
    assert found["forward", "ConvForward"] == 3
    assert found["backward", "ConvBackward"] + found["backward", "WeightGradient"] == 3
    assert {phase for phase, _ in found} == {"forward", "backward"}
    found = {(kernel.phase, kernel.name): kernel.calls for kernel in off.kernels}
    assert found == {("forward", "LinearRows"): 3, ("backward", "LinearRowsBackward"): 3}


def test_a_profile_leaves_nothing_behind_and_changes_no_number() -> None:
    x, y = torch.randn(4, 784), torch.randint(10, (4,))
    model = step.converted(step.WORKLOADS["mlp"], 0.9, "on")
    before = planned._Pass.run
    expected = model(x)
    for one_by_one in (False, True):
        clock = profiling._Clock()
        with profiling._timed(clock, one_by_one):
            assert torch.equal(model(x), expected)
    assert planned._Pass.run is before
    for plan in execute._plans.values():
        assert not isinstance(plan._forward.plan, profiling._TimedPlan)
    parts = step.phases(model, x, y)
    assert list(parts) == ["zero_grad", "forward", "loss", "backward", "optimizer"]


# Memory -------------------------------------------------------------------------------------------


def test_memory_is_measured_in_processes_of_their_own(tmp_path: Path) -> None:
    """The dense step has at least its gradients and its momentum, which the sparse one is spared."""
    file = tmp_path / "step.json"
    arguments = ("--model", "mlp", "--engine", "both", "--memory", "--json", file)
    done = run("bench", "step", *TINY, *arguments)
    assert done.exit_code == 0, done.output
    assert "Memory of a training step" in done.output
    found = [memory.Memory(**row) for row in json.loads(file.read_text())["memory"]]
    precisions = ("float32", "bfloat16")
    assert {(one.model, one.batch) for one in found} == {("mlp", 4)}
    assert [(one.sparsity, one.engine, one.precision) for one in found] == [
        (sparsity, engine, precision)
        for sparsity, engine in ((0, None), (0.9, "on"), (0.9, "off"))
        for precision in precisions
    ]
    dense = 4e-6 * sum(p.numel() for p in step.WORKLOADS["mlp"].build().parameters())
    if Path("/proc/self/clear_refs").exists():
        assert all(0 < one.step_mb < one.peak_mb for one in found)
        assert all(one.step_mb > 2 * dense for one in found[:2])
        assert all(one.step_mb < 2 * dense for one in found[2:])


def dies(*_: Any) -> None:
    os._exit(1)


def test_a_process_that_is_killed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_measured", dies)
    message = r"the memory of mlp \(dense, float32\) at batch 4 was killed.*try a smaller batch"
    with pytest.raises(RuntimeError, match=message):
        memory.measure(step.Plan(models=("mlp",), sparsities=(0.9,), batch=4))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads what Linux has")
def test_a_peak_is_of_what_was_there_at_once() -> None:
    before = memory._forget_peak()
    torch.ones(25_000_000).sum()  # 100 MB, let go at once
    assert 90e6 < memory._peak() - before < 150e6
    if os.access("/proc/self/clear_refs", os.W_OK):
        memory._forget_peak()
        assert memory._peak() - before < 50e6


def test_memory_is_shown_beside_that_of_the_dense_model() -> None:
    sizes = {("a", 0.0, None): (900.4, 800), ("a", 0.9, "on"): (10, 6), ("a", 0.9, "off"): (20, 15)}
    found = [
        memory.Memory(*key[:2], 4, key[2], precision, size, 2000)
        for key, both in sizes.items()
        for precision, size in zip(("float32", "bfloat16"), both, strict=True)
    ]
    screen = show.console()
    with screen.capture() as captured:
        screen.print(step_show.memory_table(found))
    lines = [" ".join(line.split()) for line in captured.get().splitlines()]
    names = [
        f"{who}, {p}" for who in ("engine on", "engine off", "dense") for p in ("fp32", "bf16")
    ]
    assert " ".join(["model sparsity", *names]) in lines
    assert "a 90 % 10 MB 6 MB 20 MB 15 MB 900 MB 800 MB" in lines
