"""What the tests of data sets on disk share: small ones in the official layouts."""

import gzip
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from rewire.data.cifar import Cifar


def pixels(n: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (n, 3072), dtype=np.uint8)


def write_cifar(kind: Cifar, place: Path, n: int = 4, protocol: int = 2) -> Path:
    """A small data set in the official layout, the way Python 3 writes it."""
    folder = place / kind.folder
    folder.mkdir(parents=True)

    def write(name: str, content: dict[bytes, Any]) -> None:
        (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))

    for seed, name in enumerate((*kind.train, *kind.test)):
        write(name, {b"data": pixels(n, seed), kind.labels: [i + seed for i in range(n)]})
    write(kind.meta, {kind.label_names: [f"class {i}".encode() for i in range(10)]})
    return folder


def pack(kind: Cifar, folder: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, kind.folder)
    return archive


def idx(array: np.ndarray[Any, Any]) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_fashion(folder: Path, packed: bool = True) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for prefix, n in (("train", 20), ("t10k", 10)):
        arrays[f"{prefix}-images-idx3-ubyte"] = rng.integers(0, 256, (n, 28, 28))
        arrays[f"{prefix}-labels-idx1-ubyte"] = np.arange(n) % 10
    for name, array in arrays.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return arrays
