"""Reading the pickled dictionaries of CIFAR without running what a pickle may ask for.

A pickle is a program. This reader knows only the instructions that dictionaries, lists, numbers,
strings and byte arrays need, and the few names by which NumPy arrays are built; even those are stand-ins
that make an array of bytes and check what they are given. Anything else is refused before it runs.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

OPCODES = """
    PROTO STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1
    STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES
    EMPTY_DICT DICT SETITEM SETITEMS EMPTY_LIST LIST APPEND APPENDS
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET
    GLOBAL REDUCE BUILD
""".split()  # noqa: SIM905
TUPLES = 1000  # in all: Python hashes those that hold each other on the stack of C
MEMO = 1 << 20  # entries; a higher index would make the reader allocate a table of that size


class _Dtype:
    """``numpy.dtype("u1")`` and no other."""

    __slots__ = ()

    def __init__(self, code: object, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"it holds an array of type {code!r}, not of bytes")

    def __setstate__(self, state: object) -> None:
        pass  # byte order and the like, which bytes do not have


class _Array:
    """An array that is about to be filled."""

    __slots__ = ("value",)
    value: NDArray[np.uint8]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, shape, dtype, fortran, content = state
        if not (
            isinstance(dtype, _Dtype)
            and isinstance(content, bytes)
            and all(isinstance(size, int) and size >= 0 for size in shape)
            and math.prod(shape) == len(content)
        ):
            raise pickle.UnpicklingError("an array's shape, type and content do not fit together")
        order: Any = "F" if fortran else "C"
        self.value = np.frombuffer(content, np.uint8).reshape(shape, order=order)


def _encode(text: object, codec: object) -> bytes:
    """What Python 3 writes for bytes, so that Python 2 can read it."""
    if not isinstance(text, str) or codec not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"it asks for the encoding {codec!r}")
    return text.encode("latin1")


class _Reader(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        # Made anew for every reader: a pickle can set attributes of what it has got hold of.
        array: Callable[..., Any] = lambda *_: _Array()  # noqa: E731
        self.names: dict[tuple[str, str], Callable[..., Any]] = {
            ("numpy.core.multiarray", "_reconstruct"): array,
            ("numpy._core.multiarray", "_reconstruct"): array,
            ("numpy", "ndarray"): lambda *_: None,
            ("numpy", "dtype"): lambda *arguments: _Dtype(*arguments),
            ("_codecs", "encode"): lambda *arguments: _encode(*arguments),
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.names:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed")
        return self.names[module, name]


def loads(content: bytes) -> dict[bytes, Any]:
    """The dictionary in a pickle; its arrays are of bytes.

    Raises:
        pickle.UnpicklingError: if there is no such dictionary, or more than that.
    """
    tuples = 0
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name not in OPCODES:
                raise pickle.UnpicklingError(f"it holds {opcode.name}, which is not allowed")
            tuples += opcode.name.startswith("TUPLE")
            if tuples > TUPLES:
                raise pickle.UnpicklingError(f"it holds more than {TUPLES} tuples")
            if opcode.name in ("PUT", "LONG_BINPUT") and not 0 <= (argument or 0) < MEMO:
                raise pickle.UnpicklingError(f"it asks for a table of {argument} entries")
        result = _Reader(content).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # what a reader of broken pickles raises has no common class
        raise pickle.UnpicklingError(f"it is no whole pickle ({error})") from error
    if not isinstance(result, dict):
        raise pickle.UnpicklingError("it holds no dictionary")
    return {
        key: getattr(value, "value", None) if isinstance(value, _Array) else value
        for key, value in result.items()
    }
