"""Files from when the values of sparse layers were 1-D, a parameter of shape (n,) and not (n, 1).

``old_files`` was written by that code: runs of ``rewire train`` stopped after step 8 of 15 (``sgd``,
``adamw``) and their models at the end (``*.safetensors``), and a loop of one's own after 3 of 6 steps with
the model that it ended with (``own.pt``). Folders called by a version were written by that: ``run``
stopped after step 8 of 15, and ``done`` is the same run at its end. They must be readable for ever.
"""

import copy
import itertools
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import rewire
from rewire import SparseConv2d, SparseLayer, SparseLinear
from rewire.optim import reshape_old_state
from rewire.report.write import write
from rewire.training import checkpoint, inference
from rewire.training.folder import Folder
from rewire.training.job import Job, load_data
from test_training import job_of, result, run

OLD = Path(__file__).parent / "old_files"


def own() -> nn.Module:
    layers = (nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    return nn.Sequential(*layers).double()


def assert_holds(model: nn.Module, tensors: dict[str, Tensor], **tolerance: float) -> None:
    """The model has these tensors, values with a second dimension."""
    state = model.state_dict()
    assert state.keys() == tensors.keys()
    for name, old in tensors.items():
        if name.endswith("values"):
            assert old.dim() == 1
            old = old[:, None]
        torch.testing.assert_close(state[name], old, **(tolerance or {"rtol": 0, "atol": 0}))


def aged(state: Any) -> Any:
    """The same with all columns as 1-D tensors: parameters and the optimizer's state of them."""
    if isinstance(state, Tensor):
        column = state.dim() == 2 and state.shape[1] == 1
        return state.flatten() if column else state
    if isinstance(state, dict):
        return {key: aged(value) for key, value in state.items()}
    return state


# Models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_model_files_of_known_models(name: str) -> None:
    model = rewire.load(OLD / f"{name}.safetensors")
    assert_holds(model, load_file(OLD / f"{name}.safetensors"))


@pytest.mark.parametrize("sparse", [True, False])
def test_model_files_of_own_models(sparse: bool) -> None:
    given = rewire.sparsify(own(), sparsity=0.5) if sparse else own()
    model = rewire.load(OLD / "own.safetensors", given)
    assert_holds(model, load_file(OLD / "own.safetensors"))
    assert all(p.is_leaf and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("count", [29, 7, 0, 1])
def test_state_dicts(count: int, assign: bool) -> None:
    layer, other = SparseLinear(8, 9, connections=count), SparseLinear(8, 9, connections=3)
    state = aged(layer.state_dict(keep_vars=True))
    assert state["values"].shape == (count,)
    before = dict(state)
    parameter = other.values
    other.load_state_dict(state, assign=assign)
    assert all(state[key] is before[key] for key in before)
    assert (other.values is parameter) != assign
    assert isinstance(other.values, nn.Parameter)
    assert other.values.is_leaf
    assert other.values.shape == (count, 1)
    x = torch.randn(4, 8)
    assert torch.equal(other(x), layer(x))


def test_pickled_layers() -> None:
    layer = SparseConv2d(3, 4, 3, sparsity=0.5)
    old = copy.deepcopy(layer)
    old.values.data = old.values.data.flatten()
    tied = pickle.loads(pickle.dumps(nn.ModuleList([old, old])))
    assert tied[0].values is tied[1].values
    assert torch.equal(tied[0].values, layer.values)


# Runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_runs_go_on(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    shutil.copytree(OLD / name, path)
    config = Folder(path).config()
    notes = run(Job(config, load_data(config)), path)
    assert notes[-1] == "Resuming after step 8 of 15."
    # The last bits are those of the machine and of torch.
    expected = load_file(OLD / f"{name}.safetensors")
    assert_holds(rewire.load(path / "model.safetensors"), expected, rtol=1e-4, atol=1e-5)


RELEASES = sorted(path.name for path in OLD.iterdir() if path.name[0].isdigit())


@pytest.mark.parametrize("release", RELEASES)
def test_runs_of_each_release_go_on(release: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(OLD / release / "run", path)
    config = Folder(path).config()
    notes = run(Job(config, load_data(config)), path)
    assert notes[-1] == "Resuming after step 8 of 15."
    assert not any("metrics" in note for note in notes)
    expected = load_file(OLD / release / "done" / "model.safetensors")
    found = load_file(path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("release", RELEASES)
def test_finished_runs_of_each_release_are_read(release: str, tmp_path: Path) -> None:
    path = OLD / release / "done"
    *_, end = Folder(path).read()
    tested = inference.evaluate(path, torch.device("cpu"))
    assert tested.accuracy == pytest.approx(end["accuracy"], abs=0.01)
    page = write([path], tmp_path / "report.html")
    assert [run.status for run in page.runs] == ["finished"]


@pytest.mark.parametrize(
    "given",
    [
        {"every": 5},
        {"method": "deepr"},
        {"method": "snfs", "every": 5, "optimizer": "adamw"},
        {"method": "gradual", "every": 5},
        {"method": "snip"},
        {"method": "static", "optimizer": "adam"},
    ],
    ids=lambda given: str(given.get("method", "gse")),
)
def test_runs_end_with_the_same_bits(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(**given)
    run(job, tmp_path / "new")
    loaded = age_checkpoints(monkeypatch)
    run(job, tmp_path / "old", {4, 11, 23})
    assert loaded == ["step-00000004", "step-00000011", "step-00000023"]
    assert result(tmp_path / "old") == result(tmp_path / "new")


def test_a_lottery_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(method="lottery", rounds=[0, 0.5], sparsity=0.5)
    run(job, tmp_path / "new", every=7)
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    for name in ("model.safetensors", "round-1/model.safetensors"):
        (tmp_path / "old" / name).unlink()
    newest, before = checkpoint.found(tmp_path / "old" / "round-1" / "checkpoints")
    shutil.rmtree(newest)
    loaded = age_checkpoints(monkeypatch)
    run(job, tmp_path / "old")
    assert loaded == [before.name]
    for folder in (".", "round-1"):
        assert result(tmp_path / "old" / folder) == result(tmp_path / "new" / folder)


def age_checkpoints(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Checkpoints are loaded as if they were old from now on; the names of those that are."""
    load, loaded = checkpoint.load, list[str]()

    def load_aged(path: Path) -> Any:
        loaded.append(path.name)
        state = load(path)
        return state | {part: aged(state[part]) for part in ("model", "optimizer")}

    monkeypatch.setattr(checkpoint, "load", load_aged)
    return loaded


# Loops of one's own -------------------------------------------------------------------------------


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rewirer: Any, steps: range) -> None:
    for i in steps:
        x = torch.arange(i, i + 256, dtype=torch.float64).square().sin().view(8, 2, 4, 4)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(8) % 5).backward()
        optimizer.step()
        rewirer.step()


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, **options)


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["model", "optimizer", "rewirer"])), ids="-".join
)
@pytest.mark.parametrize("mode", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_loops_go_on(order: tuple[str, ...], mode: dict[str, bool]) -> None:
    saved = torch.load(OLD / "own.pt", weights_only=True)
    model = rewire.sparsify(own(), sparsity=0.5)
    optimizer = adamw(model, **mode)
    parts = {"model": model, "optimizer": optimizer}
    parts["rewirer"] = rewire.GSE(model, optimizer, every=5, until=10)
    for name in order:
        parts[name].load_state_dict(saved[name])
    layers = [module for module in model.modules() if isinstance(module, SparseLayer)]
    for layer in layers:
        assert optimizer.state[layer.values]["exp_avg"].shape == (layer.count, 1)
    assert optimizer.state[layers[0].bias]["exp_avg"].dim() == 1  # type: ignore[index]
    train(model, optimizer, parts["rewirer"], range(3, 6))
    assert_holds(model, saved["end"], rtol=1e-10, atol=1e-12)


def test_an_optimizer_that_was_loaded_before_there_was_a_rewirer() -> None:
    saved = torch.load(OLD / "own.pt", weights_only=True)
    model = rewire.sparsify(own(), sparsity=0.5)
    model.load_state_dict(saved["model"])
    optimizer = adamw(model)
    optimizer.load_state_dict(saved["optimizer"])
    rewirer = rewire.GSE(model, optimizer, every=5, until=10)
    rewirer.load_state_dict(saved["rewirer"])
    train(model, optimizer, rewirer, range(3, 6))
    assert_holds(model, saved["end"], rtol=1e-10, atol=1e-12)


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an optimizer by name only, without hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)


def test_wrapped_optimizers_go_on_too() -> None:
    saved = torch.load(OLD / "own.pt", weights_only=True)
    model = rewire.sparsify(own(), sparsity=0.5)
    optimizer = Wrapper(adamw(model))
    rewirer = rewire.GSE(model, optimizer, every=5, until=10)
    for name, part in {"model": model, "optimizer": optimizer, "rewirer": rewirer}.items():
        part.load_state_dict(saved[name])  # type: ignore[attr-defined]
    train(model, optimizer, rewirer, range(3, 6))
    assert_holds(model, saved["end"], rtol=1e-10, atol=1e-12)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "Rprop": {},
    "ASGD": {},
}


@pytest.mark.parametrize("mode", ["foreach", "for loop", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_a_rewirer_old_state_raises_or_is_taken_as_it_is(name: str, mode: str) -> None:
    """Never are (n,) and (n, 1) broadcast to (n, n) by any optimizer of torch."""
    kind = getattr(torch.optim, name)
    options = {**OPTIMIZERS[name], "lr": 0.01, "foreach": mode == "foreach"}
    if mode == "fused":
        options["fused"] = True
        if name not in ("SGD", "Adam", "AdamW", "Adagrad"):
            pytest.skip("has no fused implementation")

    def step(layer: SparseLinear, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        layer(torch.linspace(-1, 1, 24).view(3, 8)).square().sum().backward()
        optimizer.step()
        return layer.values.detach().clone()

    layer = SparseLinear(8, 9, connections=20)
    optimizer = kind(layer.parameters(), **options)
    step(layer, optimizer)
    start, state = copy.deepcopy((layer.state_dict(), optimizer.state_dict()))
    expected = step(layer, optimizer)

    layer.load_state_dict(start)
    old = kind(layer.parameters(), **options)
    old.load_state_dict(aged(copy.deepcopy(state)))
    if mode == "fused":
        assert torch.equal(step(layer, old), expected)
    else:
        with pytest.raises(RuntimeError, match=r"doesn't match the broadcast shape \[20, 20\]"):
            step(layer, old)

    layer.load_state_dict(start)
    old = kind(layer.parameters(), **options)
    old.load_state_dict(aged(copy.deepcopy(state)))
    reshape_old_state(old, layer.parameters())
    assert torch.equal(step(layer, old), expected)


def test_averages_of_weights() -> None:
    model = rewire.sparsify(own(), sparsity=0.5, seed=1)
    ema = rewire.EMA(model, decay=0.5)
    ema.update()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    ema.update()
    loaded = rewire.EMA(rewire.sparsify(own(), sparsity=0.6, seed=2), decay=0.5)
    loaded.load_state_dict(aged(ema.state_dict()))
    state = loaded.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in ema.state_dict().items())
    for layer, other in zip(ema.module.modules(), model.modules(), strict=True):
        if isinstance(layer, SparseLayer):
            torch.testing.assert_close(layer.values, other.values * 0.75)  # (1 + 2) / 2 of 2
