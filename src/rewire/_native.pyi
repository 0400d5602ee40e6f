from typing import Any

f32: Any
f64: Any
Geometry: Any
Images: Any
Loops: Any
Pool: Any
Stream: Any
Thinning: Any

def supported() -> list[str]: ...
def current() -> str: ...
def use(name: str) -> None: ...
def shares_torch_threads() -> bool: ...
def empty_cache() -> int: ...
def first_bad_row(
    indptr: int, indices: int, rows: int, inputs: int, count: int, threads: int
) -> int: ...
def by_input(
    indptr: int,
    indices: int,
    in_channels: int,
    out_channels: int,
    taps: int,
    slots: int,
    outputs: int,
    order: int,
    threads: int,
) -> None: ...
def alias(weights: list[int], sizes: list[int], columns: list[int], threads: int) -> None: ...
def draw(
    stream: Any,
    draws: int,
    n_in: int,
    n_out: int,
    inputs: int,
    outputs: int,
    indptr: int,
    indices: int,
    to_indptr: int,
    to_indices: int,
    threads: int,
) -> int: ...
def complement(
    indptr: int,
    indices: int,
    n_in: int,
    n_out: int,
    to_indptr: int,
    to_indices: int,
    threads: int,
) -> None: ...
def replace(
    indptr: int,
    indices: int,
    pruned: int,
    subset_indptr: int,
    subset_indices: int,
    grown: int,
    n_out: int,
    to_indptr: int,
    to_indices: int,
    source: int,
    threads: int,
) -> None: ...
def mark(indptr: int, indices: int, chosen: int, n_in: int, n_out: int, bits: int) -> int: ...
def sketch(
    indptr: int, indices: int, chosen: int, n_in: int, n_out: int, registers: int
) -> None: ...
