"""Data sets on disk: reading, refusing what is hostile or damaged, finding."""

import gzip
import os
import pickle
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_files import idx, pack, pixels, write_cifar, write_fashion
from rewire import data
from rewire.data import DataError, Images, cifar, fashion, places, sources, unpickle
from rewire.data.cifar import CIFAR10, CIFAR100, Cifar

pytestmark = pytest.mark.usefixtures("nowhere")


SHARED = Path(__file__).parents[2] / "shared" / "data"
REAL = os.environ.get(places.VARIABLE)  # before the tests change it

# Pickles ------------------------------------------------------------------------------------------


def python2_pickle(data: bytes, shape: tuple[int, int], labels: list[int]) -> bytes:
    """As in the official archives: protocol 2, Python 2 strings, NumPy's old module names."""

    def string(text: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(text)) + text

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x03(cnumpy\nndarray\nq\x04"
        + b"K\x00\x85U\x01bt"
        + b"R(K\x01"
        + number(shape[0])
        + number(shape[1])
        + b"\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
        + b"K\x00tb\x89"
        + string(data)
        + b"tb"
    )
    listed = b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}q\x01(U\x06labels" + listed + b"U\x04data" + array + b"u."


def test_pickles_of_python_2_are_read() -> None:
    content = python2_pickle(bytes(range(6)), (2, 3), [7, 300])
    assert pickle.loads(content, encoding="bytes")[b"labels"] == [7, 300]  # it is a real pickle
    read = unpickle.loads(content)
    assert read[b"labels"] == [7, 300]
    assert read[b"data"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_arrays_in_column_order_are_read() -> None:
    array = np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    read = unpickle.loads(pickle.dumps({b"data": array}, protocol=2))
    assert np.array_equal(read[b"data"], array)


class Call:
    """Pickles as a call of anything."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def hostile(tmp_path: Path) -> dict[str, tuple[bytes, str]]:
    """Pickles, and why they are refused."""
    mark = tmp_path / "ran"
    touch = f"touch {mark}"
    array = pickle.dumps({b"data": np.zeros(4, np.uint8)}, protocol=2)
    assert array.count(b"K\x04\x85") == 1  # its shape

    def dumps(value: object, protocol: int = 2) -> bytes:
        return pickle.dumps({b"data": value}, protocol=protocol)

    return {
        "os.system": (dumps(Call(os.system, touch)), r"asks for \w+.system"),
        "eval": (dumps(Call(eval, f"open({str(mark)!r}, 'w')")), "asks for __builtin__.eval"),
        "getattr": (b"cbuiltins\ngetattr\n.", "asks for builtins.getattr"),
        "numpy.load": (dumps(Call(np.load, str(mark))), "asks for numpy.load"),
        "nested name": (b"\x80\x04\x8c\x05numpy\x8c\x07ndarray\x93.", "holds STACK_GLOBAL"),
        "instance": (b"(S'" + touch.encode() + b"'\nios\nsystem\n.", "holds INST"),
        "object": (b"(cos\nsystem\nS'" + touch.encode() + b"'\no.", "holds OBJ"),
        "new object": (b"\x80\x02cpathlib\nPath\n)\x81.", "holds NEWOBJ"),
        "persistent": (b"Pos\n.", "holds PERSID"),
        "extension": (b"\x82\x01.", "holds EXT1"),
        "new protocol": (dumps(bytearray(5), protocol=5), "holds FRAME"),
        "codec": (b"c_codecs\nencode\n(Vx\nVrot13\ntR.", "asks for the encoding 'rot13'"),
        "object array": (dumps(np.array([1, "x"], dtype=object)), "not of bytes"),
        "large numbers": (dumps(np.arange(3)), "not of bytes"),
        "shape": (array.replace(b"K\x04\x85", b"K\x09\x85"), "do not fit together"),
        "negative": (array.replace(b"K\x04\x85", b"J\xfc\xff\xff\xff\x85"), "do not fit together"),
        "memory": (b"\x80\x02}r\xff\xff\xff\x7f.", "a table of 2147483647 entries"),
        "memory in text": (b"}p2147483647\n.", "a table of 2147483647 entries"),
        "attributes": (
            b"\x80\x02cnumpy\ndtype\nN}X\x08\0\0\0__call__K\x01s\x86b.",
            "no dictionary",
        ),
        "unfilled": (b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\n)Rs.", "not hold"),
        "no dictionary": (pickle.dumps([1, 2], protocol=2), "no dictionary"),
        "nothing": (b"", "no whole pickle"),
        "text": (b"<html>404</html>", "no whole pickle"),
        "half": (array[:-20], "no whole pickle"),
    }


@pytest.mark.parametrize("attack", hostile(Path("unused")))
def test_hostile_pickles_are_refused(tmp_path: Path, attack: str) -> None:
    folder = write_cifar(CIFAR10, tmp_path)
    content, why = hostile(tmp_path)[attack]
    (folder / "data_batch_2").write_bytes(content)
    with pytest.raises(DataError, match=rf"cifar10 in .* is damaged: .*{why}"):
        data.load("cifar10", tmp_path)
    assert not (tmp_path / "ran").exists()
    CIFAR10.read(write_cifar(CIFAR10, tmp_path / "other"))  # nothing of the reader was changed


def test_the_hostile_pickles_are_hostile(tmp_path: Path) -> None:
    pickle.loads(hostile(tmp_path)["os.system"][0])
    assert (tmp_path / "ran").exists()


# CIFAR --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CIFAR10, CIFAR100])
@pytest.mark.parametrize("form", ["folder", "the folder itself", "archive", "the archive itself"])
def test_cifar_is_read_from_folder_and_archive(tmp_path: Path, kind: Cifar, form: str) -> None:
    root = folder = write_cifar(kind, tmp_path / "a")
    if form == "folder":
        root = folder.parent
    elif "archive" in form:
        (tmp_path / "b").mkdir()
        archive = pack(kind, folder, tmp_path / "b" / kind.archive)
        root = archive if form == "the archive itself" else archive.parent
    loaded = data.load(kind.name, root)
    assert loaded.shape == (3, 32, 32)
    assert loaded.classes == tuple(f"class {i}" for i in range(10))
    assert isinstance(loaded.train, Images)
    assert isinstance(loaded.test, Images)
    n = len(kind.train)
    assert len(loaded.train) == 4 * n
    expected = np.concatenate([pixels(4, seed) for seed in range(n)]).reshape(-1, 3, 32, 32)
    assert np.array_equal(loaded.train.images, expected)
    assert loaded.train.labels.tolist() == [i + seed for seed in range(n) for i in range(4)]
    assert np.array_equal(loaded.test.images, pixels(4, n).reshape(-1, 3, 32, 32))
    assert (loaded.train.pad, loaded.train.flip) == (4, True)
    assert loaded.test.draws == 0
    assert loaded.train.mean == loaded.test.mean == kind.mean


def rewrite(folder: Path, **changes: Any) -> None:
    content = {b"data": pixels(4, 0), b"labels": [0, 1, 2, 3]}
    content |= {key.encode(): value for key, value in changes.items()}
    (folder / "data_batch_1").write_bytes(pickle.dumps(content, protocol=2))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda f: (f / "test_batch").unlink(), "there is no test_batch"),
        (lambda f: rewrite(f, data=pixels(3, 0)), "19 images and 20 labels"),
        (lambda f: rewrite(f, labels=[0, 1, 2, 10]), "outside the 10 classes"),
        (lambda f: rewrite(f, labels=[0, 1, 2, -1]), "outside the 10 classes"),
        (lambda f: rewrite(f, labels=[0, 1, 2, b"x"]), "not hold what it should"),
        (lambda f: rewrite(f, labels=7), "not hold what it should"),
        (lambda f: rewrite(f, data=np.zeros((4, 100), np.uint8)), "not hold what it should"),
        (lambda f: rewrite(f, data=[1, 2]), "not hold what it should"),
        (lambda f: (f / "batches.meta").write_bytes(pickle.dumps({}, 2)), "label_names"),
    ],
)
def test_damaged_cifar(tmp_path: Path, change: Callable[[Path], None], why: str) -> None:
    folder = write_cifar(CIFAR10, tmp_path)
    change(folder)
    with pytest.raises(DataError, match=why) as caught:
        data.load("cifar10", tmp_path)
    assert str(folder) in str(caught.value)
    assert "rewire data get cifar10" in str(caught.value)


@pytest.mark.parametrize("damage", ["half", "one pixel", "no end", "other", "empty"])
def test_damaged_archives(tmp_path: Path, damage: str) -> None:
    folder = write_cifar(CIFAR10, tmp_path / "a")
    images = np.full((4, 3072), 7, np.uint8)
    rewrite(folder, data=images)
    with tarfile.open(tmp_path / CIFAR10.archive, "w:gz", compresslevel=0) as tar:
        tar.add(folder, CIFAR10.folder)  # not compressed: only the checksum can tell
    content = (tmp_path / CIFAR10.archive).read_bytes()
    assert content.count(bytes(images[0, :100])) > 0
    damaged = {
        "half": content[: len(content) // 2],
        "one pixel": content.replace(bytes(images[0, :100]), bytes(99) + b"\7", 1),
        "no end": content[:-8],
        "other": b"<html>404</html>",
        "empty": b"",
    }
    assert len(data.load("cifar10", tmp_path).train) == 20
    (tmp_path / CIFAR10.archive).write_bytes(damaged[damage])
    with pytest.raises(DataError, match="is damaged"):
        data.load("cifar10", tmp_path)


def test_a_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "MAX_BYTES", 1000)
    folder = write_cifar(CIFAR10, tmp_path / "a")
    for path in (folder, pack(CIFAR10, folder, tmp_path / "archive.tar.gz")):
        with pytest.raises(DataError, match="far more than it should"):
            data.load("cifar10", path)


@pytest.mark.slow
def test_real_cifar10(tmp_path: Path) -> None:
    if REAL is None and not (SHARED / "unpack").is_file():
        pytest.skip("the real images are not here: name their folder in REWIRE_DATA")
    if REAL is None:
        subprocess.run([sys.executable, SHARED / "unpack", tmp_path], check=True)
    real = data.load("cifar10", tmp_path if REAL is None else Path(REAL))
    assert (len(real.train), len(real.test)) == (50_000, 10_000)
    assert real.classes[:3] == ("airplane", "automobile", "bird")
    for part in (real.train, real.test):
        assert (part.labels.bincount() == len(part) // 10).all()
    x = real.train.read((np.arange(50_000), None))
    assert x.mean((0, 2, 3)).abs().max() < 0.005
    assert (x.std((0, 2, 3)) - 1).abs().max() < 0.005
    train, _ = real.loaders(128)
    assert len(train) == 390


# Where data is looked for -------------------------------------------------------------------------


def test_the_root_then_the_variable_then_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = write_cifar(CIFAR10, tmp_path / "cache")
    assert data.find("cifar10") == cached
    named = write_cifar(CIFAR10, tmp_path / "named")
    monkeypatch.setenv(places.VARIABLE, str(tmp_path / "named"))
    assert data.find("cifar10") == named
    monkeypatch.setenv(places.VARIABLE, str(tmp_path / "empty"))
    assert data.find("cifar10") == cached
    root = write_cifar(CIFAR10, tmp_path / "root")
    assert data.find("cifar10", tmp_path / "root") == root
    assert data.find("cifar10", tmp_path / "empty") is None


@pytest.mark.parametrize("name", sources.SOURCES)
def test_missing_data_says_where_it_was_looked_for_and_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sources.SOURCES, name, replace(sources.SOURCES[name], system=()))
    monkeypatch.setenv(places.VARIABLE, str(tmp_path / "named"))
    with pytest.raises(DataError) as caught:
        data.load(name)
    message = str(caught.value)
    assert str(tmp_path / "named") in message
    assert str(tmp_path / "cache") in message
    assert f"rewire data get {name}" in message or "image-net.org" in message


def test_unknown_names_and_options_that_do_not_apply() -> None:
    with pytest.raises(ValueError, match="choose one of digits, cifar10"):
        data.load("cifar11")
    for name in ("digits", "cifar10"):
        with pytest.raises(ValueError, match="leave out size and crop"):
            data.load(name, size=64, crop="plain")


# Fashion-MNIST ------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("folder", fashion.FOLDERS)
def test_fashion_mnist(tmp_path: Path, packed: bool, folder: str) -> None:
    arrays = write_fashion(tmp_path / "root" / folder, packed)
    loaded = data.load("fashion-mnist", tmp_path / "root")
    assert loaded.shape == (1, 28, 28)
    assert loaded.num_classes == 10
    for part, prefix in ((loaded.train, "train"), (loaded.test, "t10k")):
        assert isinstance(part, Images)
        assert np.array_equal(part.images[:, 0], arrays[f"{prefix}-images-idx3-ubyte"])
        assert part.labels.tolist() == arrays[f"{prefix}-labels-idx1-ubyte"].tolist()


def test_fashion_mnist_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = replace(sources.SOURCES["fashion-mnist"], system=(tmp_path / "system",))
    monkeypatch.setitem(sources.SOURCES, "fashion-mnist", source)
    write_fashion(tmp_path / "system" / "fashion-mnist")
    assert data.find("fashion-mnist") == tmp_path / "system" / "fashion-mnist"
    assert data.find("fashion-mnist", tmp_path) is None


IMAGES = np.zeros((20, 28, 28))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train-images-idx3-ubyte", b""),
        ("train-images-idx3-ubyte", idx(IMAGES)[:7]),
        ("train-images-idx3-ubyte", idx(IMAGES)[:-1]),
        ("train-images-idx3-ubyte", idx(IMAGES) + b"x"),
        ("train-images-idx3-ubyte", idx(IMAGES[0])),
        ("train-images-idx3-ubyte", idx(IMAGES[:19])),
        ("train-images-idx3-ubyte", b"\0\0\x0d\x03" + idx(IMAGES)[4:]),
        ("train-images-idx3-ubyte", struct.pack(">4B3I", 0, 0, 8, 3, 2**31, 2**31, 2**31)),
        ("train-images-idx3-ubyte.gz", gzip.compress(idx(IMAGES), mtime=0)[:-20]),
        ("train-images-idx3-ubyte.gz", b"<html>404</html>"),
        ("t10k-labels-idx1-ubyte", idx(np.arange(10) + 1)),
    ],
)
def test_damaged_fashion_mnist(tmp_path: Path, name: str, content: bytes) -> None:
    write_fashion(tmp_path / "fashion-mnist", packed=name.endswith(".gz"))
    (tmp_path / "fashion-mnist" / name).write_bytes(content)
    with pytest.raises(DataError, match=r"fashion-mnist in .* is damaged"):
        data.load("fashion-mnist", tmp_path)


def test_fashion_mnist_with_a_file_missing(tmp_path: Path) -> None:
    write_fashion(tmp_path / "fashion-mnist")
    (tmp_path / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="there is no t10k-labels-idx1-ubyte"):
        data.load("fashion-mnist", tmp_path)
