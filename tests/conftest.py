"""What all tests share.

Tests are small: two threads would mostly wait for each other where cores are busy. Tests about threads
set their own; ``OMP_NUM_THREADS`` overrules.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it; also for processes of tests

import torch

from rewire import ops
from rewire.data import places
from rewire.engine import execute
from rewire.ops import layout, products


def distinct_instruction_sets() -> list[str]:
    """All that differ in float32 and float64: pairs of bfloat16 are all that avx512_bf16 adds to avx512."""
    sets = ops.instruction_sets()
    return [s for s in sets if s != "avx512" or "avx512_bf16" not in sets] or ["reference"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that ask for ``isa`` with each of the instruction sets that differ for them."""
    if "isa" in metafunc.fixturenames:
        half = metafunc.module.__name__.startswith("test_bfloat16")
        every = ops.instruction_sets() if half else []
        metafunc.parametrize("isa", every or distinct_instruction_sets(), indirect=True)


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that the kernels are built for."""
    before = ops.instruction_set()
    if request.param != before:
        ops.use_instruction_set(request.param)
    yield request.param
    if ops.instruction_set() != before:
        ops.use_instruction_set(before)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads torch has, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def small_panels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Panels of four samples, so that small tests see what large models do."""
    monkeypatch.setattr(layout, "panel_width", lambda kernels: 4)
    execute._plans.clear()
    products._plan.cache_clear()
    yield
    execute._plans.clear()
    products._plan.cache_clear()


@pytest.fixture
def no_panels(small_panels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch fills panels."""
    monkeypatch.setattr(layout, "panel_width", lambda kernels: 1 << 20)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data of the user's own."""
    monkeypatch.delenv(places.VARIABLE, raising=False)
    monkeypatch.setattr(places, "cache", lambda: tmp_path / "cache")


@pytest.fixture
def same_random_numbers() -> None:
    """Those of torch, in every test."""
    torch.manual_seed(0)
