"""Model files, configs, pickles and settings that claim or hold what they should not."""

from __future__ import annotations

import copy
import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import rewire
from rewire import SparseConv2d, SparseLinear, communication, distributed, saving
from rewire.cli import app
from rewire.data import unpickle
from rewire.training.config import resolve
from rewire.training.folder import Folder, RunError

# Models that are not what their file says


def claiming(path: Path, build: Any, sparse: list[str], **tensors: torch.Tensor) -> Path:
    about = {
        "format": "rewire model 1",
        "sparse": sparse,
        "masked": [],
        "build": build,
        "notes": {},
    }
    save_file(tensors or {"a": torch.zeros(2)}, path, {"rewire": json.dumps(about)})
    return path


@pytest.mark.parametrize(
    ("build", "sparse", "problem"),
    [
        (["mlp", {"width": 1e9}], [], "cannot be made"),
        (["mlp", {"width": 30_000.0}], [], "nothing for 1.weight"),
        (["mlp", {"width": 1e6}], ["1", "3", "5"], "nothing for 1.weight"),
        (["vit", {"width": 1000.0}], [], "nothing for"),
        (["mlp", {"depth": 3}], [], "cannot be made"),
        (["mlp", 3], [], "cannot be made"),
        (["mlp"], [], "cannot be made"),
        (["other", {}], [], "cannot be made"),
    ],
)
def test_claims_of_a_width_take_no_memory(
    build: Any, sparse: list[str], problem: str, tmp_path: Path
) -> None:
    path = claiming(tmp_path / "small.safetensors", build, sparse)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=rf"small\.safetensors.*{problem}"):
        rewire.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


@pytest.mark.parametrize("storage", ["sparse", "masked"])
def test_sound_files_are_loaded_without_an_instance(storage: str, tmp_path: Path) -> None:
    small = {"mlp": {"width": 0.1}, "resnet20": {"width": 0.25}, "vit": {"width": 0.125}}
    small |= {"gpt": {"vocabulary": 9, "width": 8, "heads": 2, "depth": 2}}
    for name, options in small.items():
        dense = rewire.models.build(name, **options)
        model = rewire.sparsify(dense, sparsity=0.5, weights="keep", storage=storage)
        rewire.save(model, tmp_path / "model.safetensors")
        found = rewire.load(tmp_path / "model.safetensors").state_dict()
        expected = model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("layer", [SparseLinear, SparseConv2d])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.bool])
@pytest.mark.parametrize("name", ["values", "bias"])
def test_numbers_that_would_be_cut_off(name: str, dtype: torch.dtype, layer: Any) -> None:
    one = (
        SparseLinear(8, 4, connections=10)
        if layer is SparseLinear
        else SparseConv2d(2, 3, 3, sparsity=0.5)
    )
    state = one.state_dict()
    before = {key: tensor.clone() for key, tensor in state.items()}
    with pytest.raises(RuntimeError, match=f"{name} is {dtype}"):
        one.load_state_dict({**state, name: state[name].to(dtype)})
    assert all(torch.equal(tensor, before[key]) for key, tensor in one.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
def test_values_that_would_be_cut_off(dtype: torch.dtype) -> None:
    layer = SparseLinear(8, 4, connections=10)
    with pytest.raises(ValueError, match=str(dtype)):
        layer.set_connections(layer.connections, torch.ones(10, dtype=dtype))


def test_other_floats_are_converted() -> None:
    layer = SparseLinear(8, 4, connections=10)
    state = {
        key: t.double() if t.is_floating_point() else t for key, t in layer.state_dict().items()
    }
    layer.load_state_dict(state)
    assert layer.values.dtype == torch.float32


def test_integers_in_a_model_file(tmp_path: Path) -> None:
    model = rewire.sparsify(rewire.models.build("mlp"), sparsity=0.99)
    rewire.save(model, tmp_path / "model.safetensors")
    about = saving._about(tmp_path / "model.safetensors")
    del about["sha256"]
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["1.values"] = tensors["1.values"].int()
    save_file(tensors, tmp_path / "odd.safetensors", {"rewire": json.dumps(about)})
    with pytest.raises(RuntimeError, match=r"values is torch\.int32"):
        rewire.load(tmp_path / "odd.safetensors")


# Pickles


def test_tuples_in_tuples_in_a_pickle() -> None:
    """Hashing them, as keys, went as deep on the stack as they are nested."""
    nested = b"\x80\x02}(" + b")" + b"\x85" * 3_000_000 + b"K\x01u."
    with pytest.raises(pickle.UnpicklingError, match="1000 tuples"):
        unpickle.loads(nested)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy, copy.copy])
@pytest.mark.parametrize("method", [rewire.GSE, rewire.SET, rewire.SNFS])
def test_rewirers_say_how_they_are_copied(method: Any, copied: Callable[[Any], Any]) -> None:
    model = SparseLinear(8, 4, connections=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rewirer = method(model, optimizer, every=1, until=8)
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        copied(rewirer)
    twin = copy.deepcopy(model)
    other = method(twin, torch.optim.SGD(twin.parameters(), lr=0.1), every=1, until=8)
    other.load_state_dict(rewirer.state_dict())


# Settings


@pytest.mark.parametrize(
    "given",
    [
        {"epochs": 10**400},
        {"drops": [10**400]},
        {"lr": 1e300},
        {"optimizer": "adam", "lr": 1e38},
        {"weight_decay": 1e300},
        {"lr": 1.0, "drop_factor": 1e20, "drops": [1, 2]},
        {"drop_factor": 1e308},
        {"width": 1e308},
        {"width": 1e7},
    ],
)
def test_numbers_beyond_single_precision(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be a|at most|single precision"):
        resolve({"dataset": "digits", **given})


def test_no_memory_for_images_is_an_error_in_words(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('method = "static"\npad = 200000\n')
    command = ["train", "--config", str(path), "--out", str(tmp_path / "run"), "--quiet"]
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, before[1]))
    try:
        result = CliRunner().invoke(app, command)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert result.exit_code == 1
    assert "not enough memory" in result.output
    assert isinstance(result.exception, SystemExit)


# Runs


@pytest.fixture(scope="module")
def lottery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "lottery"
    options = ["--method", "lottery", "--rounds", "0,0.5", "--sparsity", "0.5", "--quiet"]
    command = ["train", *options, "--epochs", "0.5", "--drops", "0.5", "--out", str(path)]
    assert CliRunner().invoke(app, command).exit_code == 0
    return path


@pytest.mark.parametrize("text", ["", "{", '{"event": "epoch"}\n', "[]\n"])
def test_a_round_without_its_end(text: str, lottery: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(lottery, run)
    (run / "model.safetensors").unlink()
    (run / "round-0" / "metrics.jsonl").write_text(text)
    command = ["train", "--resume", str(run), "--quiet"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "round-0/metrics.jsonl is damaged" in result.output
    shutil.rmtree(run / "round-0")
    assert CliRunner().invoke(app, command).exit_code == 0
    model = "model.safetensors"
    assert (run / model).read_bytes() == (lottery / model).read_bytes()


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_metrics_that_are_not_where_they_were(how: str, tmp_path: Path) -> None:
    with Folder(tmp_path / "run") as folder:
        folder.open_metrics(0)
        folder.write({"event": "epoch"})
        folder.flush()
        if how == "removed":
            shutil.rmtree(folder.path)
        elif how == "moved":
            folder.path.rename(tmp_path / "other")
        else:
            folder.metrics.unlink()
            folder.metrics.write_text("")
        with pytest.raises(RunError, match="removed, moved or replaced"):
            folder.flush()


def test_what_cannot_be_removed_is_named(tmp_path: Path) -> None:
    from rewire import files

    if os.geteuid() == 0:
        pytest.skip("root removes everything")
    folder = tmp_path / "run"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").touch()
    (folder / "inner").chmod(0o500)
    with pytest.raises(OSError, match="Permission") as error:
        files.remove(folder)
    assert error.value.filename == str(folder)


# Processes that wait for each other


def test_the_timeout_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert distributed._timeout(None) == timedelta(seconds=180)
    monkeypatch.setenv("REWIRE_TIMEOUT", "7.5")
    assert distributed._timeout(None) == timedelta(seconds=7.5)
    assert distributed._timeout(3) == timedelta(seconds=3)
    for text in ("soon", "0", "-3", "nan"):
        monkeypatch.setenv("REWIRE_TIMEOUT", text)
        with pytest.raises(ValueError, match="number of seconds"):
            distributed._timeout(None)


class Late:
    def wait(self) -> None:
        raise RuntimeError("Timed out waiting 3000ms for recv operation to complete")


def test_a_message_that_does_not_come_says_what_to_do() -> None:
    with pytest.raises(TimeoutError, match="REWIRE_TIMEOUT"):
        communication.finish(Late())


def test_a_barrier_without_other_processes() -> None:
    assert not dist.is_initialized()
    distributed.barrier(patience=1.0)
    distributed.barrier()


def test_models_that_are_given_need_no_claims(tmp_path: Path) -> None:
    model = rewire.sparsify(nn.Sequential(nn.Linear(8, 4)), sparsity=0.5)
    rewire.save(model, tmp_path / "own.safetensors")
    found = rewire.load(tmp_path / "own.safetensors", nn.Sequential(nn.Linear(8, 4)))
    assert torch.equal(found[0].values, model[0].values)  # type: ignore[index, union-attr]
