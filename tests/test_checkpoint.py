"""Checkpoints and model files: exact, whole or not there, and nothing in them that can run."""

import json
import math
import os
import stat
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rewire
from rewire import files, models
from rewire.saving import read_notes
from rewire.training import checkpoint, json_codec, toml
from rewire.training.checkpoint import CheckpointError

# Nested values ------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, to the last bit."""
    if isinstance(a, Tensor):
        equal = isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return equal and repr(a.flatten().tolist()) == repr(b.flatten().tolist())
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        keys = zip(a, b, strict=False)
        return len(a) == len(b) and all(same(k, m) and same(a[k], b[m]) for k, m in keys)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return a.hex() == b.hex()
    return bool(a == b)


def through_json(value: Any) -> Any:
    encoded, tensors = json_codec.encode(value)
    return json_codec.decode(json.loads(json.dumps(encoded, allow_nan=False)), tensors)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
NESTED = st.recursive(
    SCALARS | st.builds(torch.tensor, st.lists(st.integers(-9, 9))),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(KEYS, inner)
        | st.lists(inner).map(tuple)
    ),
    max_leaves=20,
)


@given(NESTED)
@settings(max_examples=150, deadline=None)
def test_nested_values_come_back_exactly(value: Any) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    "value",
    [
        {"dict": {"tensor": "x"}},
        {"tensor": {"float": 1.5}},
        {"tuple": [1], "float": "x"},
        {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "a.b'": torch.ones(2)},
        [math.inf, -math.inf, -0.0, 1.0, 1, 5e-324, True],
        {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3).t()}},
        torch.tensor([1.0, math.nan]),
        {"types": [torch.zeros(2, dtype=t) for t in (torch.bool, torch.uint8, torch.bfloat16)]},
        {"empty": torch.empty(0, 3), "nothing": {}, "none": [], "also": ()},
    ],
)
def test_odd_values_come_back_exactly(value: Any) -> None:
    assert same(through_json(value), value)


def test_an_ordered_dict_comes_back_as_a_dict_in_its_order() -> None:
    assert list(through_json(OrderedDict(b=1, a=2)).items()) == [("b", 1), ("a", 2)]


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(TypeError, match=r"optimizer\.0\.hook is a function"):
        json_codec.encode({"optimizer": [{"hook": lambda: None}]})
    with pytest.raises(TypeError, match=r"a is a tensor that cannot be saved"):
        json_codec.encode({"a": torch.eye(2).to_sparse()})


def test_tensors_are_copies() -> None:
    values = torch.zeros(3)
    _, tensors = json_codec.encode([values, values[1:]])
    values += 1
    assert not any(tensor.any() for tensor in tensors.values())


# Folders ------------------------------------------------------------------------------------------

STATE = {"step": 3, "values": torch.arange(4.0), "more": (1, None, math.inf)}


def test_a_checkpoint_comes_back_and_two_are_kept(tmp_path: Path) -> None:
    assert checkpoint.load_newest(tmp_path) is None
    for step in (3, 20, 100_000_000):
        checkpoint.save(tmp_path, step, {**STATE, "step": step})
    names = [path.name for path in checkpoint.found(tmp_path)]
    assert names == ["step-100000000", "step-00000020"]
    loaded = checkpoint.load_newest(tmp_path)
    assert loaded is not None
    assert same(loaded.state, {**STATE, "step": 100_000_000})
    assert loaded.damaged == ()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit in the tensors": lambda path: flip(path / "tensors.safetensors"),
    "a flipped bit in the manifest": lambda path: flip(path / "manifest.json"),
    "cut tensors": lambda path: os.truncate(path / "tensors.safetensors", 40),
    "a cut manifest": lambda path: os.truncate(path / "manifest.json", 40),
    "no tensors": lambda path: (path / "tensors.safetensors").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "an empty manifest": lambda path: (path / "manifest.json").write_text(""),
    "another manifest": lambda path: (path / "manifest.json").write_text("[1]"),
    "other JSON": lambda path: (path / "manifest.json").write_text('{"body": {}, "sha256": ""}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(damage: str, tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {**STATE, "step": step})
    DAMAGES[damage](tmp_path / "step-00000002")
    loaded = checkpoint.load_newest(tmp_path)
    assert loaded is not None
    assert loaded.state["step"] == 1
    assert len(loaded.damaged) == 1
    assert "step-00000002" in loaded.damaged[0]
    DAMAGES[damage](tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="no checkpoint can be used"):
        checkpoint.load_newest(tmp_path)


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"a": 1})
    checkpoint.save(tmp_path, 1, {"a": 2})
    loaded = checkpoint.load_newest(tmp_path)
    assert loaded is not None
    assert loaded.state == {"a": 2}


def test_nothing_is_left_of_a_write_that_fails(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"a": 1})
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path, 2, {"a": object()})
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_files_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        rewire.save(nn.Linear(2, 2), tmp_path / "model.safetensors")
        checkpoint.save(tmp_path, 1, {"a": torch.ones(2)})
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in made} == {
        "model.safetensors",
        "tensors.safetensors",
        "manifest.json",
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o640}


def test_what_a_killed_process_left_is_swept_away(tmp_path: Path) -> None:
    (tmp_path / f"{files.HIDDEN}123-step-00000007").mkdir()
    (tmp_path / f"{files.HIDDEN}123-model").write_text("half")
    assert checkpoint.found(tmp_path) == []
    files.sweep(tmp_path)
    assert os.listdir(tmp_path) == []


# Models alone -------------------------------------------------------------------------------------


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 8 * 8, 10)
        self.last = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.head(self.norm(self.conv(x)).relu().flatten(1)))
        return out


def equal_models(a: nn.Module, b: nn.Module) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[k], other[k]) for k in mine)


@pytest.mark.parametrize("sparse", [True, False])
def test_a_built_model_is_loaded_by_its_file_alone(sparse: bool, tmp_path: Path) -> None:
    model = models.build("vgg11", num_classes=3, width=0.25)
    if sparse:
        model = rewire.sparsify(model, sparsity=0.8)
    rewire.save(model, tmp_path / "model.safetensors", notes={"classes": ["a", "ö"]})
    loaded = rewire.load(tmp_path / "model.safetensors")
    assert equal_models(loaded, model)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded.eval()(x), model.eval()(x))
    assert read_notes(tmp_path / "model.safetensors") == {"classes": ["a", "ö"]}
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("into", ["dense", "sparse", "meta"])
def test_an_own_model_is_loaded_into_an_instance(into: str, tmp_path: Path) -> None:
    model = rewire.sparsify(Own(), sparsity=0.7, keep_dense="last")
    path = tmp_path / "own.safetensors"
    rewire.save(model, path)
    with pytest.raises(ValueError, match=r"give an instance of it"):
        rewire.load(path)
    with torch.device("meta" if into == "meta" else "cpu"):
        shell: nn.Module = Own()
    if into == "sparse":
        shell = rewire.sparsify(shell, sparsity=0.9, keep_dense="last", seed=7)
    loaded = rewire.load(path, shell)
    assert loaded is shell
    assert equal_models(loaded, model)
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("weights", ["fresh", "dense"])
def test_masked_models_come_back(weights: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    how: dict[str, Any] = {"storage": "masked", "weights": weights, "keep_dense": "last"}
    model = rewire.sparsify(Own(), sparsity=0.7, **how)
    rewire.save(model, path)
    for shell in (Own(), rewire.sparsify(Own(), sparsity=0.2, storage="masked", keep_dense="last")):
        loaded = rewire.load(path, shell)
        assert loaded is shell
        assert equal_models(loaded, model)
        found = [m for m in loaded.modules() if isinstance(m, rewire.ConnectedLayer)]
        assert found
        assert all(isinstance(layer, rewire.MaskedLayer) for layer in found)
        x = torch.randn(2, 1, 8, 8)
        assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_a_model_of_another_class_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    rewire.save(rewire.sparsify(Own(), sparsity=0.7), path)
    other = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"does not fit the given Sequential: give an instance"):
        rewire.load(path, other)
    assert type(other[0]) is nn.Linear


def test_files_that_are_no_models_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(FileNotFoundError, match="no file"):
        rewire.load(path)
    path.write_bytes(b"\x80\x04not a model")
    with pytest.raises(ValueError, match="no safetensors file, or damaged"):
        rewire.load(path)
    rewire.export(Own(), path)
    with pytest.raises(ValueError, match=r"not written by rewire\.save"):
        rewire.load(path, Own())


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_an_export_is_an_ordinary_state_dict(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = rewire.sparsify(Own(), sparsity=0.7).eval()
    rewire.export(model, tmp_path / name)
    path = tmp_path / name
    state = torch.load(path, weights_only=True) if path.suffix == ".pt" else load_file(path)
    plain = Own().eval()
    plain.load_state_dict(state)
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(plain(x), model(x))
    assert any(isinstance(module, rewire.SparseLayer) for module in model.modules())
    with pytest.raises(ValueError, match=r"must end in \.pt"):
        rewire.export(model, tmp_path / "a.bin")


# TOML ---------------------------------------------------------------------------------------------

VALUES = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), VALUES | TEXT | st.lists(TEXT)))
@settings(max_examples=150, deadline=None)
def test_toml_comes_back_exactly(table: dict[str, Any]) -> None:
    assert same(toml.tomllib.loads(toml.dumps(table)), table)
