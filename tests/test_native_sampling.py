"""What the extension says to arguments of sampling and indexing that do not fit together."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rewire
from rewire import ops
from rewire.ops import native

pytestmark = pytest.mark.skipif(not ops.available(), reason="needs the compiled kernels")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def room(count: int) -> Tensor:
    return torch.full((count,), -7, dtype=torch.int32)


def mask(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def stream() -> Any:
    return native.extension.Stream(seed=1, purpose=2, step=3, layer=4) if ops.available() else None


# A layer of 3 inputs and 2 outputs with connections (0, 1), (0, 2), (1, 0), by output and input.


def first_bad_row() -> dict[str, Any]:
    return {"indptr": ints(0, 2, 3), "indices": ints(1, 2, 0), "n_in": 3, "threads": 1}


def by_input() -> dict[str, Any]:
    return {
        "indptr": ints(0, 2, 3),
        "indices": ints(1, 2, 0),
        "in_channels": 3,
        "taps": 1,
        "slots": room(4),
        "outputs": room(3),
        "order": room(3),
        "threads": 1,
    }


def alias() -> dict[str, Any]:
    return {
        "weights": [torch.ones(3).double(), torch.ones(2).double()],
        "tables": [room(6), room(4)],
        "threads": 1,
    }


def draw() -> dict[str, Any]:
    return {
        "stream": stream(),
        "draws": 5,
        "n_in": 3,
        "n_out": 2,
        "inputs": None,
        "outputs": None,
        "groups": 1,
        "indptr": ints(0, 2, 3),
        "indices": ints(1, 2, 0),
        "to_indptr": room(3),
        "to_indices": room(5),
        "threads": 1,
    }


def complement() -> dict[str, Any]:
    return {
        "indptr": ints(0, 2, 3),
        "indices": ints(1, 2, 0),
        "n_in": 3,
        "n_out": 2,
        "to_indptr": room(3),
        "to_indices": room(3),
        "threads": 1,
    }


def replace() -> dict[str, Any]:
    return {
        "indptr": ints(0, 2, 3),
        "indices": ints(1, 2, 0),
        "pruned": mask(1, 0, 0),
        "subset_indptr": ints(0, 1, 2),
        "subset_indices": ints(0, 2),
        "grown": mask(0, 1),
        "to_indptr": room(3),
        "to_indices": room(3),
        "source": room(3),
        "threads": 1,
    }


def mark() -> dict[str, Any]:
    return {
        "indptr": ints(0, 2, 3),
        "indices": ints(1, 2, 0),
        "chosen": None,
        "n_in": 3,
        "n_out": 2,
        "bits": torch.zeros(1, dtype=torch.uint8),
    }


def sketch() -> dict[str, Any]:
    arguments = mark() | {"registers": torch.zeros(4096, dtype=torch.uint8)}
    del arguments["bits"]
    return arguments


def select() -> dict[str, Any]:
    scores = torch.tensor([3.0, 1.0, 2.0])
    return {
        "scores": scores,
        "count": 1,
        "largest": True,
        "chosen": mask(0, 0, 0),
        "threads": 1,
    }


def follow() -> dict[str, Any]:
    return {
        "x": torch.tensor([1.0, 2.0]),
        "source": ints(1, -1, 0),
        "fresh": 0.5,
        "out": torch.zeros(3),
        "threads": 1,
    }


def unit_sums() -> dict[str, Any]:
    return {
        "x": torch.arange(6.0).view(2, 3),
        "signs": torch.tensor([1.0, -1.0, 1.0]),
        "sums": torch.zeros(2),
        "threads": 1,
    }


def signs() -> dict[str, Any]:
    return {
        "stream": stream(),
        "first": 0,
        "samples": 3,
        "positions": 2,
        "out": torch.zeros(2, 3),
        "threads": 1,
    }


COMMON = [first_bad_row, by_input, alias, draw, complement, replace, mark, sketch]
OF_A_TYPE = [select, follow, unit_sums, signs]


def call(function: Any, **changes: Any) -> Any:
    """The function of the extension with these arguments, some of them changed."""
    name = function.__name__
    space = native.extension if function in COMMON else native.extension.f32
    return getattr(space, name)(**(function() | changes))


@pytest.mark.parametrize("function", COMMON + OF_A_TYPE, ids=lambda f: f.__name__)
def test_arguments_that_fit(function: Any) -> None:
    call(function)


def test_results() -> None:
    arguments = replace()
    native.extension.replace(**arguments)
    assert arguments["to_indptr"].tolist() == [0, 1, 3]
    assert arguments["to_indices"].tolist() == [2, 0, 2]
    assert arguments["source"].tolist() == [1, 2, -1]
    assert call(mark, chosen=mask(1, 0, 1)) == 2
    assert call(first_bad_row) == -1
    assert call(first_bad_row, n_in=2) == 0
    assert call(draw, draws=0, to_indices=room(0)) == 0


ENDS = "must rise from 0 to the number of indices, 3, but goes from"
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (first_bad_row, {"indptr": room(0)}, "indptr has 0 elements, expected at least 1"),
    (by_input, {"indptr": room(0)}, "indptr has 0 elements, expected at least 1"),
    (by_input, {"indptr": ints(0, 2, 2)}, f"indptr {ENDS} 0 to 2"),
    (by_input, {"indptr": ints(1, 2, 3)}, f"indptr {ENDS} 1 to 3"),
    (by_input, {"in_channels": -1}, "in_channels is -1, expected at least 0"),
    (by_input, {"taps": 0}, "taps is 0, expected at least 1"),
    (by_input, {"taps": 2**31}, "taps is 2147483648, expected at most 2147483647"),
    (by_input, {"taps": 2}, "slots has 4 elements, expected in_channels * taps + 1 = 7"),
    (by_input, {"outputs": room(2)}, "outputs has 2 elements, expected connections = 3"),
    (by_input, {"order": room(4)}, "order has 4 elements, expected connections = 3"),
    (alias, {"tables": [room(6)]}, "got 2 weights and 1 tables"),
    (alias, {"tables": [room(6), room(3)]}, "tables[1] has 3 elements, expected 2 * units = 4"),
    (
        alias,
        {"weights": [torch.ones(3).double(), torch.ones(2)]},
        "weights[1] must be of torch.float64, got torch.float32",
    ),
    (draw, {"draws": -1}, "draws is -1, expected at least 0"),
    (draw, {"draws": 2**31}, "draws is 2147483648, expected at most 2147483647"),
    (draw, {"n_in": 0}, "n_in is 0, expected at least 1"),
    (draw, {"n_out": 0}, "n_out is 0, expected at least 1"),
    (draw, {"inputs": room(5)}, "inputs has 5 elements, expected 2 * n_in * groups = 6"),
    (draw, {"outputs": room(6)}, "outputs has 6 elements, expected 2 * n_out = 4"),
    (draw, {"groups": 0}, "groups is 0, expected at least 1"),
    (draw, {"groups": 3}, "n_out is 2, expected a multiple of 3 groups"),
    (
        draw,
        {"groups": 2, "inputs": room(6)},
        "inputs has 6 elements, expected 2 * n_in * groups = 12",
    ),
    (draw, {"n_out": 3}, "indptr has 3 elements, expected n_out + 1 = 4"),
    (draw, {"indices": ints(1, 2)}, f"indptr {ENDS.replace('3', '2')} 0 to 3"),
    (draw, {"to_indptr": room(2)}, "to_indptr has 2 elements, expected n_out + 1 = 3"),
    (draw, {"to_indices": room(4)}, "to_indices has 4 elements, expected draws = 5"),
    (complement, {"n_in": -1}, "n_in is -1, expected at least 0"),
    (complement, {"n_out": 2**40}, "n_out is 1099511627776, expected at most 2147483647"),
    (complement, {"n_out": 1}, "indptr has 3 elements, expected n_out + 1 = 2"),
    (complement, {"to_indptr": room(4)}, "to_indptr has 4 elements, expected n_out + 1 = 3"),
    (
        complement,
        {"n_in": 4},
        "to_indices has 3 elements, expected n_in * n_out - connections = 5",
    ),
    (replace, {"pruned": mask(1, 0)}, "pruned has 2 elements, expected connections = 3"),
    (
        replace,
        {"grown": mask(1, 0, 0)},
        "grown has 3 elements, expected connections of the subset = 2",
    ),
    (
        replace,
        {"subset_indptr": ints(0, 2)},
        "subset_indptr has 2 elements, expected n_out + 1 = 3",
    ),
    (
        replace,
        {"subset_indices": ints(0)},
        "subset_indptr must rise from 0 to the number of subset_indices, 1, but goes from 0 to 2",
    ),
    (replace, {"to_indptr": room(2)}, "to_indptr has 2 elements, expected n_out + 1 = 3"),
    (replace, {"source": room(2)}, "source has 2 elements, expected elements of to_indices = 3"),
    (
        replace,
        {"pruned": mask(0, 0, 0)},
        "to_indices has 3 elements, expected connections kept and grown = 4",
    ),
    (mark, {"chosen": mask(1, 0)}, "chosen has 2 elements, expected connections = 3"),
    (mark, {"n_out": 1}, "indptr has 3 elements, expected n_out + 1 = 2"),
    (
        mark,
        {"n_in": 5},
        "bits has 1 elements, expected n_in * n_out / 8, rounded up, = 2",
    ),
    (sketch, {"chosen": mask(1, 0, 1, 1)}, "chosen has 4 elements, expected connections = 3"),
    (
        sketch,
        {"registers": torch.zeros(9, dtype=torch.uint8)},
        "registers has 9 elements, expected registers of a sketch = 4096",
    ),
    (select, {"chosen": mask(0, 0)}, "chosen has 2 elements, expected scores = 3"),
    (select, {"count": 4}, "count is 4, expected 0 to 3"),
    (select, {"count": -1}, "count is -1, expected 0 to 3"),
    (follow, {"out": torch.zeros(2)}, "out has 2 elements, expected elements of source = 3"),
    (
        unit_sums,
        {"sums": torch.zeros(4)},
        "x has 6 elements, expected a multiple of those of sums, 4",
    ),
    (
        unit_sums,
        {"sums": torch.zeros(0)},
        "x has 6 elements, expected a multiple of those of sums, 0",
    ),
    (
        unit_sums,
        {"signs": torch.ones(2)},
        "signs has 2 elements, expected elements of x / elements of sums = 3",
    ),
    (signs, {"first": -1}, "first is -1, expected at least 0"),
    (signs, {"samples": -1}, "samples is -1, expected at least 0"),
    (signs, {"positions": 3}, "out has 6 elements, expected samples * positions = 9"),
]


@pytest.mark.parametrize(("function", "changes", "problem"), WRONG)
def test_arguments_that_do_not_fit(function: Any, changes: dict[str, Any], problem: str) -> None:
    arguments = function() | changes
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, Tensor)}
    message = f"{function.__name__}: {problem}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call(function, **arguments)
    if "kept and grown" in problem:  # which is counted there
        del before["to_indptr"]
    for name, tensor in before.items():
        assert torch.equal(arguments[name], tensor), name


DTYPES = {
    "weights": torch.float64,
    "x": torch.float32,
    "scores": torch.float32,
    "signs": torch.float32,
    "sums": torch.float32,
    "out": torch.float32,
    "pruned": torch.bool,
    "grown": torch.bool,
    "chosen": torch.bool,
    "bits": torch.uint8,
    "registers": torch.uint8,
}
TENSORS = [
    pytest.param(function, name, id=f"{function.__name__}-{name}")
    for function in COMMON + OF_A_TYPE
    for name, value in function().items()
    if isinstance(value, Tensor) or name in ("inputs", "outputs", "chosen")
]


@pytest.mark.parametrize(("function", "name"), TENSORS)
def test_every_tensor_is_looked_at(function: Any, name: str) -> None:
    right, start = DTYPES.get(name, torch.int32), f"{function.__name__}: {name}"
    given = function()[name]
    given = torch.zeros(6, dtype=right) if given is None else given

    def refused(tensor: Any, problem: str, error: type[Exception] = ValueError) -> None:
        with pytest.raises(error, match=f"^{re.escape(f'{start} {problem}')}$"):
            call(function, **{name: tensor})

    refused(given.long(), f"must be of {right}, got torch.int64")
    other = torch.float64 if right == torch.float32 else torch.float32
    refused(given.to(other), f"must be of {right}, got {other}")
    refused(given.to("meta"), "must be on the CPU, got device meta")
    strided = torch.zeros(7, 2, dtype=right)[:, 0]
    refused(strided, "must be contiguous, got shape [7] and strides [2]")
    refused(given.tolist(), "must be a torch.Tensor, got list", TypeError)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_type_has_functions_of_its_own(dtype: torch.dtype) -> None:
    own = native.kernels(torch.empty(0, dtype=dtype))
    other = torch.float64 if dtype == torch.float32 else torch.float32
    assert own is not None
    scores = torch.tensor([3.0, 1.0, 2.0], dtype=other)
    message = f"select: scores must be of {dtype}, got {other}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        own.select(scores=scores, count=1, largest=True, chosen=mask(0, 0, 0), threads=1)


def test_arguments_have_names_and_must_be_there() -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        native.extension.first_bad_row(*first_bad_row().values())
    arguments = draw()
    del arguments["inputs"]
    with pytest.raises(TypeError, match="incompatible function arguments"):
        native.extension.draw(**arguments)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        call(first_bad_row, indptr=None)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        call(draw, draws=2**63)


def test_parameters_and_tensors_with_a_gradient_are_read() -> None:
    """Their data, without a copy."""
    x = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    arguments = follow() | {"x": x}
    native.extension.f32.follow(**arguments)
    assert arguments["out"].tolist() == [2.0, 0.5, 1.0]


def test_the_stubs_are_those_of_the_extension() -> None:
    stub = Path(rewire.__file__).with_name("_native.pyi").read_text(encoding="utf-8")
    body = ast.parse(stub).body
    (kernels,) = (c for c in body if isinstance(c, ast.ClassDef) and c.name == "_Kernels")
    for functions, space, where in (
        (COMMON, native.extension, body),
        (OF_A_TYPE, native.extension.f32, kernels.body),
        (OF_A_TYPE, native.extension.f64, kernels.body),
    ):
        stubs = {f.name: f for f in where if isinstance(f, ast.FunctionDef)}
        for function in functions:
            name = function.__name__
            typed = ", ".join(
                f"{a.arg}: {ast.unparse(a.annotation)}"  # type: ignore[arg-type]
                for a in stubs[name].args.kwonlyargs
            )
            result = ast.unparse(stubs[name].returns)  # type: ignore[arg-type]
            (overload,) = getattr(space, name).__nb_signature__
            signature = re.sub(
                r"\b(torch|rewire\._native|_native|collections\.abc)\.", "", overload[0]
            )
            assert signature == f"def {name}(*, {typed}) -> {result}"
