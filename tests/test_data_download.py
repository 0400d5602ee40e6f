"""Downloading data sets, and the command line for them."""

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from data_files import pack, write_cifar, write_fashion
from rewire import data
from rewire.cli import app
from rewire.data import DataError, cifar, fashion, places, sources
from rewire.data.cifar import CIFAR10

pytestmark = pytest.mark.usefixtures("nowhere")


def command(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# Downloads ----------------------------------------------------------------------------------------


class Server(SimpleHTTPRequestHandler):
    asked: list[str]

    def log_message(self, *_: object) -> None:
        self.asked.append(self.path)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[str]]]:
    """A folder that the data sets are downloaded from, and what was asked for."""
    folder = tmp_path / "server"
    folder.mkdir()
    monkeypatch.setattr(Server, "asked", [], raising=False)
    handler = partial(Server, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.02,))
        thread.start()
        home = f"http://127.0.0.1:{http.server_port}"
        monkeypatch.setattr(cifar, "HOME", home)
        monkeypatch.setattr(fashion, "URL", home)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield folder, Server.asked
        http.shutdown()
        thread.join()


def serve_cifar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve a small archive, and take its checksum for the official one."""
    archive = pack(CIFAR10, write_cifar(CIFAR10, folder.parent / "a"), folder / CIFAR10.archive)
    kind = replace(CIFAR10, md5=hashlib.md5(archive.read_bytes()).hexdigest())
    source = replace(sources.SOURCES["cifar10"], download=kind.download)
    monkeypatch.setitem(sources.SOURCES, "cifar10", source)


def test_download_once(
    tmp_path: Path, server: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = server
    serve_cifar(folder, monkeypatch)
    root = tmp_path / "root"
    done = command("data", "get", "cifar10", "--root", root)
    assert done.exit_code == 0
    assert str(root / CIFAR10.folder) in done.output
    assert [path.name for path in root.iterdir()] == [CIFAR10.folder]
    assert len(data.load("cifar10", root).train) == 20
    assert command("data", "get", "cifar10", "--root", root).exit_code == 0
    assert len(data.load("cifar10", root, download=True).train) == 20
    assert asked == [f"/{CIFAR10.archive}"]


def test_get_repairs_what_is_damaged(
    tmp_path: Path, server: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_cifar(server[0], monkeypatch)
    damaged = write_cifar(CIFAR10, tmp_path / "root")
    (damaged / "test_batch").unlink()
    data.get("cifar10", tmp_path / "root")
    assert len(data.load("cifar10", tmp_path / "root").test) == 4


def test_a_wrong_checksum_is_refused(tmp_path: Path, server: tuple[Path, list[str]]) -> None:
    pack(CIFAR10, write_cifar(CIFAR10, tmp_path / "a"), server[0] / CIFAR10.archive)
    root = tmp_path / "root"
    done = command("data", "get", "cifar10", "--root", root)
    assert done.exit_code == 1
    assert "wrong checksum" in done.output
    assert list(root.iterdir()) == []
    with pytest.raises(DataError, match="wrong checksum"):
        data.load("cifar10", root, download=True)


def test_what_is_not_on_the_server(tmp_path: Path, server: tuple[Path, list[str]]) -> None:
    with pytest.raises(DataError, match=r"could not be downloaded: 404"):
        data.get("cifar100", tmp_path / "root")


def test_a_root_that_cannot_be_written(tmp_path: Path, server: tuple[Path, list[str]]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="could not be written"):
        data.get("fashion-mnist", tmp_path / "file" / "root")


def test_fashion_mnist_is_downloaded(
    tmp_path: Path, server: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = server
    write_fashion(folder / "f")
    for path in (folder / "f").iterdir():
        path.rename(folder / path.name)
        md5 = hashlib.md5((folder / path.name).read_bytes()).hexdigest()
        monkeypatch.setitem(fashion.FILES, path.stem, md5)
    source = replace(sources.SOURCES["fashion-mnist"], system=())
    monkeypatch.setitem(sources.SOURCES, "fashion-mnist", source)
    monkeypatch.setenv(places.VARIABLE, str(tmp_path / "named"))
    loaded = data.load("fashion-mnist", download=True)
    assert len(loaded.train) == 20
    assert data.find("fashion-mnist") == tmp_path / "named" / "fashion-mnist"
    assert len(asked) == 4


# The command line ---------------------------------------------------------------------------------


def test_list_shows_what_there_is(tmp_path: Path) -> None:
    write_cifar(CIFAR10, tmp_path)
    done = command("data", "list", "--root", tmp_path)
    assert done.exit_code == 0
    for name in data.NAMES:
        assert name in done.output
    assert CIFAR10.folder in done.output.replace("\n", "").replace(" ", "")
    assert "to be downloaded" in done.output
    assert "to be asked for" in done.output


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("digits", 0, "comes with the package"),
        ("imagenet", 1, "image-net.org"),
        ("cifar11", 2, "there is no data set"),
    ],
)
def test_get_what_is_not_downloaded(tmp_path: Path, name: str, code: int, message: str) -> None:
    done = command("data", "get", name, "--root", tmp_path)
    assert done.exit_code == code
    assert message in done.output


@pytest.mark.parametrize("arguments", [["data"], ["data", "list"], ["data", "get"]])
def test_help(arguments: list[str]) -> None:
    done = command(*arguments, "--help")
    assert done.exit_code == 0
    assert "Example: rewire" in done.output or "Commands" in done.output


def test_torch_is_given_labels_it_can_use(tmp_path: Path) -> None:
    write_cifar(CIFAR10, tmp_path)
    train, test = data.load("cifar10", tmp_path).loaders(4)
    for x, y in (*train, *test):
        loss = torch.nn.functional.cross_entropy(x.flatten(1)[:, :10], y)
        assert loss.isfinite()
