"""The compiled kernels, if they are there: loading them, choosing loops, threads and memory."""

from __future__ import annotations

import os
import types
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rewire._native import _Kernels

try:
    import rewire._native as _module
except ImportError as error:  # built without a compiler, or for another machine
    _module = None  # type: ignore[assignment]
    warnings.warn(
        f"rewire runs without its compiled kernels ({error}): the plain PyTorch reference is used, "
        "which is correct but slow. Reinstall with a C++17 compiler to get them.",
        RuntimeWarning,
        stacklevel=2,
    )

extension = _module  # with its types; only for the ops, where it is `available()`


class PerformanceWarning(UserWarning):
    """Something is right but much slower than it could be."""


from_capsule: Callable[[Any], Tensor] = (
    torch._C._from_dlpack
)  # torch.from_dlpack looks at more first
KERNEL_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_LARGE = 1 << 16  # bytes from which kept memory is worth its bookkeeping


def available() -> bool:
    """Whether the compiled kernels are loaded."""
    return _module is not None


def instruction_sets() -> list[str]:
    """Instruction sets that this machine can run, best first; empty without compiled kernels."""
    return [] if _module is None else list(_module.supported())


def instruction_set() -> str:
    """The instruction set in use: "avx512_bf16", "avx512", "avx2", "generic", or without kernels
    "reference"."""
    return "reference" if _module is None else str(_module.current())


def use_instruction_set(name: str) -> None:
    """Choose the kernels' instruction set; REWIRE_ISA in the environment does the same at import."""
    if name not in instruction_sets():
        raise ValueError(
            f"instruction set {name!r} is not one of {instruction_sets()} that this machine has"
        )
    assert _module is not None
    _module.use(name)


def empty_cache() -> int:
    """Give memory that is kept for the next results back to the system; returns the bytes."""
    return 0 if _module is None else int(_module.empty_cache())


def module() -> Any:
    """The extension itself; only for the ops, which have checked that it is there."""
    assert _module is not None
    return _module


def kernels(x: Tensor) -> _Kernels | None:
    """The kernels for the device and type of ``x``, or None where the reference has to do."""
    return kernels_of(x.dtype) if x.is_cpu else None


def kernels_of(dtype: torch.dtype) -> _Kernels | None:
    """The kernels for tensors of a type on the CPU."""
    if _module is None:
        return None
    if dtype == torch.float32:
        return _module.f32
    if dtype == torch.float64:
        return _module.f64
    return getattr(_module, "bf16", None) if dtype == torch.bfloat16 else None


@cache
def warn_of_reference(dtype: torch.dtype) -> None:
    """Warn, once in a process, that a type has no kernels on the CPU."""
    name = str(dtype).removeprefix("torch.")
    warnings.warn(
        f"sparse layers have CPU kernels for float32, bfloat16 and float64; in {name} they run on the "
        "plain PyTorch reference, many times slower than dense layers. Use model.bfloat16(), or keep the "
        "parameters in float32 (model.float()) and call the model inside "
        'torch.autocast("cpu", torch.bfloat16)',
        PerformanceWarning,
        stacklevel=2,
    )


def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor of a type that has kernels; a large one in memory that an earlier result has
    left."""
    bytes_ = dtype.itemsize
    for n in shape:
        bytes_ *= n
    if bytes_ < _LARGE:
        return torch.empty_strided(shape, strides, dtype=dtype)
    kernels = kernels_of(dtype)
    assert kernels is not None
    return from_capsule(kernels.empty(shape, strides))


def integers(count: int) -> Tensor:
    """An uninitialised int32 vector, a large one in such memory, too: kernels read it from all over."""
    if _module is None or 4 * count < _LARGE:
        return torch.empty(count, dtype=torch.int32)
    return from_capsule(_module.f32.empty((count,), (1,))).view(torch.int32)


def threads() -> int:
    """How many threads a kernel may use."""
    return torch.get_num_threads()


def run_step(kernels: Any, step: Any, tensors: Sequence[Tensor], seeds: Sequence[int] = ()) -> None:
    """Run one step over tensors, which its operands number."""
    plan = kernels.Plan([step], [module().External() for _ in tensors], 0)
    addresses, elements = [t.data_ptr() for t in tensors], [t.numel() for t in tensors]
    plan.run(0, 1, addresses, elements, 0, 0, [], list(seeds), threads())


_wanted = os.environ.get("REWIRE_ISA")
if _wanted and isinstance(_module, types.ModuleType):
    use_instruction_set(_wanted)
