"""Arguments of the extension that lie: refused before anything is read or written through them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import preload
import rewire
from rewire import Connections, ops
from rewire.ops import native
from rewire.ops.sampling import Stream

pytestmark = pytest.mark.skipif(not ops.instruction_sets(), reason="no compiled kernels")


@pytest.mark.parametrize(
    ("shape", "strides", "problem"),
    [
        ((2**62, 4), (4, 1), "too large"),
        ((2**31, 2**31, 2), (1, 1, 1), "too large"),
        ((4, 4), (5, 1), "strides"),
        ((4, 4), (2**62, 1), "strides"),
        ((4,), (-1,), "strides"),
        ((4, 5), (1,), "as many"),
    ],
)
def test_memory_of_shapes_that_do_not_fit(shape: Any, strides: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        native.module().f32.empty(shape, strides)


@pytest.mark.parametrize(
    ("shape", "strides"), [((), ()), ((0, 3), (9, 9)), ((3, 1), (1, 77)), ((4, 5), (1, 4))]
)
def test_memory_of_other_shapes(shape: Any, strides: Any) -> None:
    found = native.from_capsule(native.module().f64.empty(shape, strides))
    assert tuple(found.shape) == shape
    assert found.dtype == torch.float64
    found.fill_(3)
    assert float(found.sum()) == 3 * found.numel()


@pytest.mark.parametrize(
    "sizes",
    [
        (0, 1.0, 4, 2, 1),
        (5, -1.0, 4, 2, 1),
        (5, float("nan"), 4, 2, 1),
        (5, 1e12, 4, 2, 1),
        (5, 1.0, -4, 2, 1),
        (5, 1.0, 4, 5, 1),
        (5, 1.0, 4, 2, 0),
        (2**40, 1.0, 4, 2, 1),
    ],
)
def test_loops_of_absurd_sizes(sizes: Any) -> None:
    with pytest.raises(ValueError, match="Loops"):
        native.module().Loops(*sizes)


@pytest.mark.parametrize("alias", [-1, 16, 2**31 - 1])
@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_tables_that_point_elsewhere(side: str, alias: int) -> None:
    table = torch.zeros((16, 2), dtype=torch.int32)
    table[7, 1] = alias
    indptr = torch.zeros(17, dtype=torch.int32)
    given = {"inputs": None, "outputs": None, side: table}
    with pytest.raises(ValueError, match=side):
        native.module().draw(
            **given,
            stream=native.module().Stream(0, 0, 0, 0),
            draws=100,
            n_in=16,
            n_out=16,
            groups=1,
            indptr=indptr,
            indices=indptr[:0],
            to_indptr=indptr.clone(),
            to_indices=torch.empty(100, dtype=torch.int32),
            threads=1,
        )


def test_negative_weights_to_draw_with() -> None:
    active = Connections.random(30, 20, 100)
    weights = torch.ones(30), torch.ones(20)
    weights[1][3] = -0.5
    with pytest.raises(ValueError, match=r"-0\.5"):
        rewire.sampling.draw(active, 1.0, Stream(0, 0, 0, 0), weights)


def repeat(indices: Tensor) -> None:
    indices.numpy()[:] = indices.numpy()[0]


def fall(indices: Tensor) -> None:
    indices.numpy()[:] = indices.numpy()[::-1].copy()


USES: list[Callable[[Connections], Any]] = [
    rewire.sampling.inactive,
    lambda c: rewire.sampling.draw(c, 2.0, Stream(0, 0, 0, 0)),
    lambda c: rewire.sampling.choose(c, 50, Stream(0, 0, 0, 0)),
    lambda c: rewire.SparseLinear(c.n_in, c.n_out, connections=c),
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("change", [repeat, fall])
def test_connections_that_do_not_ascend_any_more(
    change: Callable[[Tensor], None], use: Callable[[Connections], Any]
) -> None:
    """Inputs that occur twice leave more of the others than there is room for."""
    active = Connections.random(2000, 1, 1900)
    change(active.indices)
    with pytest.raises(ValueError, match="ascend"):
        use(active)


NO_MEMORY = """
import torch, rewire
torch.set_num_threads(2)
layer = rewire.SparseLinear(4096, 4096, connections=200_000)
x = torch.randn(3000, 4096)
stream = rewire.ops.sampling.Stream(0, 0, 0, 0)
errors = 0
for use in (lambda: layer(x), lambda: rewire.sampling.draw(layer.connections, 40.0, stream)):
    try:
        use()
    except MemoryError:
        errors += 1
torch.set_num_threads(1)
layer(x)  # all is as it was
print(errors, flush=True)
"""


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer allocates")
def test_no_memory_in_another_thread_is_an_error_of_this_one(tmp_path: Path) -> None:
    library = preload.compiled(Path(__file__).with_name("memory_fails.c"), tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY],
        env=preload.environment(library),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2
