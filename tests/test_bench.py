"""The benchmark and its command line: what it measures, shows, writes and refuses. No speed."""

import gc
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import rewire
from rewire import ops
from rewire.bench import (
    layers,
    limits,
    machine,
    peers,
    show,
    timing,
    workloads,
)
from rewire.bench.case import (
    CSR,
    DENSE,
    FORWARD,
    LIMIT,
    OURS,
    STEP,
    TRAINING,
    Case,
    Functions,
    Result,
)
from rewire.bench.timing import Timing, interleaved, ratios
from rewire.cli import app
from rewire.engine import execute
from rewire.ops import native

TINY = ["--rounds", "1", "--sparsity", "0.9", "--batch", "4"]


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# The command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [[], ["bench"], ["bench", "layers"], ["bench", "step"]])
def test_help_shows_an_example_or_the_commands(command: list[str]) -> None:
    done = run(*command, "--help")
    assert done.exit_code == 0
    assert "Example: rewire" in done.output or "Commands" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layers", "--sparsity", "1.0"], "'1.0' is no sparsity"),
        (["layers", "--sparsity", "0.9,half"], "'half' is no sparsity"),
        (["layers", "--sparsity", "nan"], "'nan' is no sparsity"),
        (["layers", "--width", "0"], "'0' is no width"),
        (["layers", "--width", "8", "--only", "conv"], "no width"),
        (["layers", "--only", "pooling"], "pooling"),
        (["layers", "--rounds", "0"], "--rounds"),
        (["layers", "--batch", "0"], "--batch"),
        (["layers", "--threads", "0"], "--threads"),
        (["layers", "--json", "."], "is a directory"),
        (["layers", "--json", "nowhere/a.json"], "no directory"),
        (["layers", "--plot", "a.txt"], "no picture"),
        (["layers", "--precision", "half"], "'half' is not one of 'float32', 'bfloat16', 'both'"),
        (["step", "--model", "vgg17"], "'vgg17'"),
        (["step", "--sparsity", "-1"], "no sparsity"),
        (["step", "--width", "8"], "--width"),
        (["step", "--engine", "fast"], "'fast' is not one of 'on', 'off', 'both'"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str) -> None:
    done = run("bench", *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_layers_are_measured_shown_and_written(tmp_path: Path) -> None:
    file, picture = tmp_path / "layers.json", tmp_path / "layers.png"
    threads = torch.get_num_threads()
    done = run(
        *("bench", "layers", "--quick", *TINY, "--width", "32", "--width", "16,32"),
        *("--threads", "1", "--json", file, "--plot", picture),
    )
    assert done.exit_code == 0, done.output
    assert torch.get_num_threads() == threads
    for text in ("Four linear layers", "3x3 convolutions", "geometric mean", "tiny layer", "90 %"):
        assert text in done.output
    document = json.loads(file.read_text())
    assert document["benchmark"] == "layers"
    assert document["machine"]["threads"] == 1
    assert set(document["machine"]) >= {"cpu", "torch", "rewire", "instruction_set"}
    assert set(document["peers"]) == {"SparseProp", "sparselab"}
    assert set(document["overhead_us"]) == {"op", "layer", "nn.Linear"}
    results = [Result(**row) for row in document["results"]]
    found = [(r.kind, r.shape, r.mode, r.batch) for r in results]
    both = ("forward+backward", "forward")
    assert found == [
        *(("linear chain", width, mode, 4) for width in ("32", "16") for mode in both),
        *(("drop-in chain", width, mode, 4) for width in ("32", "16") for mode in both),
        *(("linear layer", width, mode, 4) for width in ("32", "16") for mode in both),
        *(("conv chain", "64x8x8", mode, 4) for mode in both),
        *(("linear chain", width, "inference", 1) for width in ("32", "16")),
        ("conv chain", "64x8x8", "inference", 1),
    ]
    for result in results:
        assert result.sparsity == 0.9
        assert result.dense_ms is not None
        assert result.ratio == pytest.approx(result.dense_ms / result.ours_ms)
        assert set(result.ours_by) == {"float32", "bfloat16"}
        assert result.ours_ms == min(result.ours_by.values()) == result.ours_by[result.best_ours]
        formats = ("", " channels-last") if result.kind.startswith("conv") else ("",)
        assert set(result.dense_by) == {p + f for p in ("float32", "bfloat16") for f in formats}
        assert result.best_dense is not None
        assert result.dense_ms == min(result.dense_by.values())
        assert result.dense_ms == result.dense_by[result.best_dense]
        single = min(ms for name, ms in result.dense_by.items() if name.startswith("float32"))
        assert result.float32_ms == single
        assert result.ratio_float32 == pytest.approx(single / result.ours_ms)
        is_linear = result.kind.startswith("linear")
        assert (result.csr_ms is not None) == (is_linear and result.mode != TRAINING)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(tmp_path.iterdir()) == [file, picture]  # nothing temporary is left


def test_an_interrupted_run_shows_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(self: Case, rounds: int, **_: Any) -> list[Result]:
        if self.kind != "linear chain":
            raise KeyboardInterrupt
        return [Result(self.kind, self.shape, self.sparsity, self.batch, FORWARD, 1.0, 2.0)]

    monkeypatch.setattr(Case, "run", measure)
    done = run("bench", "layers", "--quick", "--json", tmp_path / "layers.json")
    assert done.exit_code == 130
    assert "Four linear layers" in done.output
    assert "Interrupted" in done.output
    assert not list(tmp_path.iterdir())


# Timing -------------------------------------------------------------------------------------------


def test_functions_take_turns_while_nothing_is_collected() -> None:
    calls: list[str] = []
    collecting: list[bool] = []

    def function(name: str) -> None:
        calls.append(name)
        collecting.append(gc.isenabled())

    shares: list[float] = []
    functions = {name: (lambda name=name: function(name)) for name in "abc"}
    timings = interleaved(functions, 4, sample=0, tick=shares.append)
    # Each of them twice: after itself, as in training. None always follows the same one.
    pairs = ["".join(calls[-24:][i : i + 2]) for i in range(0, 24, 2)]
    rounds = ["".join(pairs[i : i + 3]) for i in range(0, 12, 3)]
    assert all(sorted(pairs[i : i + 3]) == ["aa", "bb", "cc"] for i in range(0, 12, 3))
    assert len({after for one in rounds for after in (one[1:3], one[3:5])}) > 3
    assert not any(collecting)
    assert gc.isenabled()
    assert shares == [0.25, 0.5, 0.75, 1]
    assert [(len(t.samples), t.inner) for t in timings.values()] == [(4, 1)] * 3


def test_short_functions_fill_a_sample_and_patience_ends() -> None:
    (found,) = interleaved({"a": lambda: None}, 9, sample=1e-4, patience=0).values()
    assert found.inner > 10
    assert len(found.samples) == 5
    assert 0 < found.median < 1e-4


def test_ratios_are_to_the_baseline() -> None:
    timings = {"a": Timing((2.0, 1.0, 9.0), 1), "b": Timing((8.0,), 1)}
    assert ratios(timings, "a") == {"a": 1, "b": 4}
    with pytest.raises(ValueError, match="no timing 'c'"):
        ratios(timings, "c")
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        interleaved({}, 0)


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with timing.threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


# What is measured ---------------------------------------------------------------------------------


def test_the_convolutions_are_those_of_the_models() -> None:
    assert [str(shape) for shape in layers.conv_shapes()] == [
        *("3->16x32x32", "16x32x32", "16->32x16x16", "32x16x16", "32->64x8x8", "64x8x8"),
        *("64->128x4x4", "128x4x4", "128x2x2", "16->32x32x32 /2", "32->64x16x16 /2"),
    ]


def test_the_fastest_variant_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {(OURS, "float32"): 3e-3, (OURS, "bfloat16"): 1e-3, (CSR, ""): 2e-3}
    seconds |= {("peer", "x"): 6e-3, ("peer", "y"): 7e-3}
    dense = {"float32": 16.0, "float32 channels-last": 8.0, "bfloat16": 4.0}
    seconds |= {(DENSE, variant): 1e-3 * ms for variant, ms in dense.items()}
    monkeypatch.setattr(
        "rewire.bench.case.interleaved",
        lambda functions, rounds, **_: {key: Timing((seconds[key],), 1) for key in functions},
    )

    def groups() -> Iterator[tuple[str, Functions]]:
        yield FORWARD, {key: (lambda: None) for key in seconds}

    (result,) = Case("linear layer", "8", 0.5, 2, (FORWARD,), groups).run(1)
    expected = Result("linear layer", "8", 0.5, 2, FORWARD, 1, 4, "bfloat16", 2, {"peer": 6}, 4)
    assert result == replace(
        expected,
        float32_ms=8,
        ratio_float32=8,
        best_ours="bfloat16",
        ours_by={"float32": 3, "bfloat16": 1},
        dense_by=dense,
    )


def test_tables_show_both_precisions_and_which_are_best() -> None:
    """Ours beside each other, the fastest dense variant by name, and ratios of the best of ours."""
    known = {"dense_by": {"float32 channels-last": 6.0, "bfloat16": 4.0}, "float32_ms": 6.0}
    made = Result("model", "a", 0.9, 4, STEP, 1.0, 4.0, "bfloat16", ratio=4.0, ratio_float32=6.0)
    results = [
        replace(made, **known, best_ours="bfloat16", ours_by={"float32": 2.0, "bfloat16": 1.0}),
        replace(made, **known, shape="b", ratio=9.0, ratio_float32=24.0, ours_by={"float32": 1.0}),
    ]
    heads = {
        2: "model sparsity ours fp32 ours bf16 best dense which is speed-up vs fp32",
        1: "model sparsity ours bf16 dense which is speed-up vs fp32",
    }
    rows = {
        2: "a 90 % 2.00 ms 1.00 ms bf16 4.00 ms bf16 4.00x 6.00x",
        1: "a 90 % 1.00 ms 4.00 ms bf16 4.00x 6.00x",
    }
    for columns in (1, 2):
        shown = results if columns == 2 else [replace(results[0], ours_by={"bfloat16": 1.0})]
        screen = show.console()
        with screen.capture() as captured:
            for table in show.tables(shown):
                screen.print(table)
        lines = [" ".join(line.split()) for line in captured.get().splitlines()]
        assert heads[columns] in lines
        assert rows[columns] in lines
        if columns == 2:
            assert "geometric mean 90 % 6.00x 12.0x" in lines
            assert "b 90 % 1.00 ms fp32 4.00 ms bf16 9.00x 24.0x" in lines


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_layers_run_in_the_precision_that_is_asked_for(precision: str) -> None:
    """Training under autocast, the rest as models in it; dense in both all the same."""
    how = workloads.How(2, (precision,), 1)
    shape = workloads.ConvShape(4, 4, 4)
    every = [
        *(build(8, 0.5, how) for build in (workloads.linear_chain, workloads.drop_in_chain)),
        *(build(8, 0.5, how) for build in (workloads.linear_layer, workloads.linear_inference)),
        *(build(shape, 0.5, how) for build in (workloads.convolution, workloads.conv_inference)),
    ]
    seen: set[tuple[str, torch.dtype]] = set()

    def look(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d | rewire.SparseLayer):
            seen.add(("ours" if isinstance(module, rewire.SparseLayer) else "dense", output.dtype))

    for groups in every:
        for mode, functions in groups:
            assert [key[1] for key in functions if key[0] == OURS] == [precision]
            for (who, variant), function in functions.items():
                if who in (OURS, DENSE):
                    seen.clear()
                    hook = nn.modules.module.register_module_forward_hook(look)
                    function()
                    hook.remove()
                    dtype = getattr(torch, variant.split()[0])
                    assert seen == {(who, dtype)}, (mode, who, variant)


def test_a_dense_model_that_does_not_fit_is_left_out() -> None:
    plan = layers.Plan(widths=(16,), sparsities=(0.5,), batch=2, parts=("linear",), max_memory=0)
    results = [result for case in layers.cases(plan) for result in case.run(1)]
    assert len(results) == 4 + 2 * 2  # with the drop-in chains
    assert all(result.dense_ms is None and result.ratio is None for result in results)
    screen = show.console()
    with screen.capture() as captured:
        for table in show.tables(results):
            screen.print(table)
    assert "does not fit" in captured.get()


def recorded(functions: Functions) -> bool:
    """Whether ours is recorded."""
    runs: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        run = execute.run
        patch.setattr(execute, "run", lambda *args: [runs.append(1), run(*args)][1])
        functions[OURS, "float32"]()
    return bool(runs)


@pytest.mark.skipif(not ops.available(), reason="plans need the compiled kernels")
def test_chains_run_on_the_engine_and_drop_in_chains_without() -> None:
    shape = workloads.ConvShape(4, 4, 4)
    how = workloads.How(2, limit=1)
    for groups in (workloads.linear_chain(8, 0.5, how), workloads.convolution(shape, 0.5, how)):
        assert [recorded(functions) for _, functions in groups] == [True, True]
    # Recording one sample takes longer than computing it.
    for groups in (
        workloads.linear_inference(8, 0.5, how),
        workloads.conv_inference(shape, 0.5, how),
    ):
        assert [recorded(functions) for _, functions in groups] == [False]
    found = list(workloads.drop_in_chain(8, 0.5, how))
    assert [mode for mode, _ in found] == [TRAINING, FORWARD]
    for _, functions in found:
        assert list(functions) == [(w, p) for w in (OURS, DENSE) for p in ("float32", "bfloat16")]
        assert not recorded(functions)


def test_drop_in_chains_are_few_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    drop_in: list[tuple[str, float]] = []

    def measure(self: Case, rounds: int, **_: Any) -> list[Result]:
        if self.kind == "drop-in chain":
            drop_in.append((self.shape, self.sparsity))
        return []

    monkeypatch.setattr(Case, "run", measure)
    few = [("1024", 0.98), ("1024", 0.99)]
    for arguments, expected in (
        ([], few),
        (["--quick"], few[:1]),
        (["--width", "8,16", "--sparsity", "0.5"], [("8", 0.5), ("16", 0.5)]),
        (["--width", "8"], [("8", 0.98), ("8", 0.99)]),
        (["--only", "conv"], []),
    ):
        drop_in.clear()
        assert run("bench", "layers", *arguments).exit_code == 0
        assert drop_in == expected


def test_every_convolution_can_be_measured() -> None:
    plan = layers.Plan(convs=layers.conv_shapes(), sparsities=(0.99,), batch=2, parts=("conv",))
    for case in layers.cases(plan):
        for mode, functions in case.groups():
            assert mode in case.modes
            for precision in ("float32", "bfloat16"):
                assert (OURS, precision) in functions
                for how in ("", " channels-last"):
                    assert (DENSE, precision + how) in functions


def test_what_computes_something_else_is_not_compared() -> None:
    with pytest.raises(RuntimeError, match="dense and rewire disagree"):
        workloads._check("dense", nn.Linear(4, 4), torch.ones(2, 4), like=nn.Linear(4, 4))


def test_peers_take_part_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    dense_twin = SimpleNamespace(from_dense=lambda layer, **_: layer)  # a library of dense layers
    library = SimpleNamespace(SparseLinear=dense_twin, SparseConv2d=dense_twin)
    monkeypatch.setattr(
        peers, "_load", lambda peer: library if peer == peers.SPARSEPROP else "not installed"
    )
    assert peers.status()[peers.SPARSELAB] == "not installed"
    how = workloads.How(2, limit=1)
    ((_, linear), _) = workloads.linear_layer(8, 0.5, how)
    assert (peers.SPARSEPROP, "") in linear
    ((_, chain), _) = workloads.convolution(workloads.ConvShape(4, 4, 4), 0.5, how)
    assert {(peers.SPARSEPROP, "over batch"), (peers.SPARSEPROP, "over width")} <= set(chain)
    ((_, strided), _) = workloads.convolution(workloads.ConvShape(4, 8, 4, 2), 0.5, how)
    assert (peers.SPARSEPROP, "over width") not in strided


def test_a_missing_library_is_named() -> None:
    peers._load.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(peers._MODULES, peers.SPARSEPROP, "rewire_no_such_library")
            patch.setitem(peers._MODULES, peers.SPARSELAB, "rewire.no_such_module")
            found = peers.status()
    finally:
        peers._load.cache_clear()
    assert found[peers.SPARSEPROP] == "not installed"
    assert found[peers.SPARSELAB].startswith("cannot be imported")


def test_overhead_is_of_one_call() -> None:
    found = layers.overhead(rounds=1)
    assert all(0 < cost < 1e5 for cost in found.values())


# What is written ----------------------------------------------------------------------------------


def test_a_file_is_written_in_full_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    machine.save(file, {"a": 1})
    with pytest.raises(TypeError):
        machine.save(file, {"a": object()})
    assert json.loads(file.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [file]


def test_a_busy_machine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.getloadavg", lambda: (1.9, 9.0, 9.0))
    assert machine.busy() is None
    monkeypatch.setattr("os.getloadavg", lambda: (3.14, 0.0, 0.0))
    assert "busy (load 3.1)" in (machine.busy() or "")


def test_geometric_means() -> None:
    assert show.geometric_mean([]) is None
    assert math.isclose(show.geometric_mean([1.0, 4.0, 16.0]) or 0, 4)


@pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels")
def test_what_layers_cannot_do_without_is_timed_beside_them() -> None:
    """The layers' connections, activations and gradients; nothing where a panel would be half empty."""
    batch = 2 * int(native.module().f32.panel())
    conv = rewire.SparseConv2d(4, 6, 3, padding=1, stride=2, sparsity=0.5)
    chain = [rewire.SparseLinear(9, 8, sparsity=0.5), rewire.SparseLinear(8, 9, sparsity=0.5)]
    given: list[tuple[list[Any], tuple[int, ...]]] = [([conv], (4, 7, 7)), (chain, (9,))]
    for following, shape in given:
        found = limits.functions(following, torch.randn(batch, *shape))
        assert list(found) == [(LIMIT, part) for part in ("connections", "activations", "autograd")]
        for function in found.values():
            function()
        assert limits.functions(following, torch.randn(batch - 1, *shape)) == {}


def test_a_limit_is_the_longer_of_two_parts_and_a_third() -> None:
    parts = ("connections", "activations", "autograd")
    functions: Functions = {(OURS, ""): lambda: None}
    functions |= {(LIMIT, part): lambda: None for part in parts}
    case = Case("linear layer", "8", 0.5, 1, ("forward",), lambda: iter([("forward", functions)]))
    (result,) = case.run(3)
    connections, activations, autograd = (result.limits[part] for part in parts)
    assert result.least_ms == max(connections, activations) + autograd


def test_a_peer_that_fails_is_left_out() -> None:
    calls = []

    def fails() -> None:
        calls.append(1)
        if len(calls) > 2:
            raise IndexError("its cache holds another layer")

    functions = {(OURS, ""): lambda: None, (peers.SPARSELAB, ""): fails}
    case = Case("linear layer", "8", 0.5, 1, ("forward",), lambda: iter([("forward", functions)]))
    with pytest.warns(UserWarning, match="sparselab is left out here, it failed: IndexError"):
        (result,) = case.run(3)
    assert result.peers == {}
