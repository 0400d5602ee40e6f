"""``rewire train``, ``eval``, ``predict`` and ``export`` as a user calls them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import rewire
from rewire.cli import app
from rewire.training import checkpoint
from rewire.training.config import NAMES, resolve

SMALL = [
    *("--width", "0.06", "--sparsity", "0.8", "--batch-size", "128", "--epochs", "2"),
    *("--drops", "1", "--until", "2", "--every", "5"),
]


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def text(done: Any) -> str:
    return " ".join(done.output.replace("│", " ").split())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    done = run("train", *SMALL, "--epochs", "6", "--out", path)
    assert done.exit_code == 0, done.output
    return path


# Training -----------------------------------------------------------------------------------------


def test_a_run_leaves_its_folder(trained: Path) -> None:
    names = sorted(os.listdir(trained))
    assert names == [
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "model.safetensors",
        "start.safetensors",
    ]
    assert 'dataset = "digits"' in (trained / "config.toml").read_text()
    assert isinstance(rewire.load(trained / "model.safetensors")[1], rewire.SparseLinear)


def test_it_tells_how_it_went(tmp_path: Path) -> None:
    done = run("train", *SMALL, "--out", tmp_path / "run")
    for part in ("mlp on digits by gse", "epoch 2/2", "test accuracy", "connections", "of dense"):
        assert part in done.stdout
    assert done.stderr == ""


def test_a_lottery_tells_of_its_rounds(tmp_path: Path) -> None:
    arguments = ("--method", "lottery", *SMALL[:10], "--rounds", "0,0.5,0.8", "--out", tmp_path)
    done = run("train", *arguments, "--json")
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["event"] for line in lines] == [*(["epoch", "epoch", "round"] * 3), "end"]
    assert [line["sparsity"] for line in lines if line["event"] == "round"] == [0, 0.5, 0.8]
    assert run("eval", tmp_path / "round-1").exit_code == 0
    told = run("train", *arguments, "--overwrite")
    assert told.exit_code == 0, told.output
    assert told.stdout.count("mlp on digits by lottery") == 3
    done = run("train", "--resume", tmp_path / "round-0")
    assert "is finished" in text(done)


@pytest.mark.parametrize("method", ["gse", "rigl"])
def test_masks_can_stand_in_for_sparse_layers(method: str, tmp_path: Path) -> None:
    done = run(
        "train", *SMALL, "--method", method, "--storage", "masked", "--out", tmp_path / "run"
    )
    assert done.exit_code == 0, done.output
    model = rewire.load(tmp_path / "run" / "model.safetensors")
    assert isinstance(model[1], rewire.MaskedLinear)
    assert run("eval", tmp_path / "run").exit_code == 0


def test_quiet_tells_nothing(tmp_path: Path) -> None:
    done = run("train", *SMALL, "--quiet", "--out", tmp_path / "run")
    assert (done.exit_code, done.output) == (0, "")


def test_json_is_the_metrics(tmp_path: Path) -> None:
    done = run("train", *SMALL, "--json", "--out", tmp_path / "run")
    assert done.stdout == (tmp_path / "run" / "metrics.jsonl").read_text()
    events = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert events == ["rewiring", "rewiring", "epoch", "rewiring", "rewiring", "epoch", "end"]


def test_the_default_folder_has_a_name_from_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for method in (["--method", "static"], ["--method", "static", "--seed", "1"]):
        options = SMALL[: SMALL.index("--until")]
        assert run("train", *options, *method).exit_code == 0
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert [name[:-7] for name in names] == [
        "digits-mlp-static-0.8-seed0",
        "digits-mlp-static-0.8-seed1",
    ]


def test_a_file_and_the_command_line_together(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("width = 0.06\nepochs = 9\nevery = 5\nuntil = 1\nbatch_size = 128\n")
    done = run("train", "--config", path, "--epochs", "1", "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    config = (tmp_path / "run" / "config.toml").read_text()
    assert "epochs = 1.0\n" in config
    assert "width = 0.06\n" in config
    path.write_text("widht = 1")
    assert "did you mean width?" in text(run("train", "--config", path))
    path.write_text("width =")
    assert "is no TOML file" in text(run("train", "--config", path))


def test_the_same_command_again_says_that_it_is_finished(trained: Path) -> None:
    done = run("train", *SMALL, "--epochs", "6", "--out", trained)
    assert done.exit_code == 1
    assert "finished: see `rewire eval" in text(done)
    assert "finished" in text(run("train", "--resume", trained))
    other = run("train", *SMALL, "--lr", "0.2", "--out", trained)
    assert "lr 0.1 there, 0.2 here" in text(other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sparsity", "95"], "0.95 is 95 %"),
        (["--method", "magic"], "no method 'magic'; choose one of dense"),
        (["--model", "vgg16"], "vgg16 takes images in colour"),
        (["--dataset", "mnist"], "there is no data set 'mnist'"),
        (["--drops", "a"], "'a' must be epochs"),
        (["--device", "quantum"], "the device 'quantum' cannot be used"),
        (["--checkpoint-every", "often"], "neither a number of steps nor a time"),
        (["--config", "nowhere.toml"], "nowhere.toml: No such file"),
        (["--resume", "nowhere"], "nowhere holds no run"),
        (["--resume", "nowhere", "--lr", "1", "--out", "x"], "leave out --lr, --out"),
        (["--method", "set", "--subset", "2"], "set has no subset"),
        (["--image-size", "9"], "have one size"),
        (["--every", "9999"], "lower every"),
    ],
)
def test_mistakes_are_explained(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("train", *arguments)
    assert done.exit_code in (1, 2)
    assert message in text(done)
    assert not (tmp_path / "runs").exists()


def test_missing_data_says_how_to_get_it(tmp_path: Path) -> None:
    done = run("train", "--dataset", "cifar10", "--root", tmp_path)
    assert done.exit_code == 1
    assert "rewire data get cifar10" in done.output


def test_tensorboard_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    done = run("train", *SMALL, "--tensorboard", "--out", tmp_path / "run")
    assert done.exit_code == 1
    assert "pip install 'rewire[tensorboard]'" in text(done)


def test_tensorboard_gets_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (folder, purge_step) == (str(tmp_path / "run" / "tensorboard"), 1)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, step))

        def close(self) -> None:
            written.append(("closed", 0))

    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    done = run("train", *SMALL, "--tensorboard", "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert ("epoch/test_accuracy", 10) in written
    assert ("rewiring/turnover", 5) in written
    assert written[-1] == ("closed", 0)


def test_every_setting_is_an_option() -> None:
    shown = run("train", "--help").output
    for name in NAMES:
        assert f"--{name.replace('_', '-')}" in shown


@pytest.mark.parametrize("command", ["train", "eval", "predict", "export"])
def test_help_shows_an_example(command: str) -> None:
    assert f"Example: rewire {command}" in run(command, "--help").output


# Signals ------------------------------------------------------------------------------------------


LONGER = [
    *("--width", "0.5", "--epochs", "15", "--drops", "5", "--until", "10", "--every", "30"),
    *("--checkpoint-every", "20"),
]


def newest(folder: Path) -> int:
    found = checkpoint.found(folder / "checkpoints")
    return int(found[0].name[5:]) if found else 0


def lines(path: Path) -> list[dict[str, Any]]:
    found = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


def test_signals_and_kills_do_not_change_the_result(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run("train", *LONGER, "--out", whole).exit_code == 0
    command = [sys.executable, "-m", "rewire", "train", *LONGER, "--out", str(parts)]
    command += ["--threads", str(torch.get_num_threads())]
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        before = newest(parts)
        process = subprocess.Popen(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        while newest(parts) <= before and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
        if number == signal.SIGKILL:
            assert process.returncode == -number
        else:
            assert process.returncode == 128 + number, error
            assert f"Stopped by {number.name} after step" in error
            assert f"rewire train --resume {parts}" in error
    done = run("train", "--resume", parts)
    assert done.exit_code == 0
    assert "Resuming after step" in done.stderr
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert lines(parts) == lines(whole)


def test_the_folder_of_the_data_is_remembered(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 2)):
        for name in ("a", "b"):
            folder = tmp_path / "images" / "imagenet" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = noise.integers(256, size=(12, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.JPEG")
    path, root, moved = tmp_path / "run", tmp_path / "images", tmp_path / "elsewhere"
    small = (
        "--dataset",
        "imagenet",
        "--model",
        "mlp",
        "--image-size",
        "8",
        "--batch-size",
        "8",
        "--workers",
        "0",
    )
    done = run(
        "train",
        *small,
        *SMALL[:4],
        "--method",
        "static",
        "--epochs",
        "1",
        "--root",
        root,
        "--out",
        path,
    )
    assert done.exit_code == 0, done.output
    assert run("eval", path).exit_code == 0
    root.rename(moved)
    done = run("eval", path)
    assert done.exit_code == 1
    assert str(root) in text(done)
    for again in (("--root", moved), ()):
        (path / "model.safetensors").unlink()  # as if it had not come to its end
        assert run("train", "--resume", path, *again).exit_code == 0
        assert (path / "model.safetensors").exists()
    assert run("eval", path).exit_code == 0


# Using what was trained ---------------------------------------------------------------------------


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """Same connections, and the same weights but for rounding; only one of them prints and writes."""
    together, alone = tmp_path / "together", tmp_path / "alone"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "rewire", "train", *SMALL, "--out", str(together)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy") == 1
    assert run("train", *SMALL, "--out", alone).exit_code == 0
    mine, other = (rewire.load(path / "model.safetensors") for path in (together, alone))
    for name, tensor in mine.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name], rtol=1e-3, atol=1e-3)
    sets = [[entry.get("grown") for entry in lines(path)] for path in (together, alone)]
    assert sets[0] == sets[1]


def test_eval_repeats_the_last_test(trained: Path) -> None:
    last = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    found = json.loads(run("eval", trained, "--json").stdout)
    assert found["accuracy"] == last["accuracy"]
    assert found["loss"] == pytest.approx(last["loss"])
    assert found["images"] == 500
    shown = run("eval", trained).stdout
    assert "of 500 test images of digits right" in shown
    assert "lowest" in shown


def test_eval_of_an_unfinished_run(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    assert "(unfinished)" in run("eval", tmp_path / "run").stdout
    assert "is not finished" in text(run("predict", tmp_path / "run", "a.png"))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert "no checkpoint yet" in text(run("eval", tmp_path / "run"))
    assert "holds no run" in text(run("eval", tmp_path))


def test_predict_says_what_is_in_images(trained: Path, tmp_path: Path) -> None:
    test = rewire.data.load("digits").test
    paths = []
    for i in range(20):
        pixels = np.asarray(test.images[i, 0])  # type: ignore[attr-defined]
        paths.append(tmp_path / f"{i}.png")
        Image.fromarray(pixels).save(paths[-1])
    done = run("predict", trained, *paths, "--json", "--top", "2")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(len(entry["classes"]) == 2 for entry in found)
    guesses = [int(next(iter(entry["classes"]))) for entry in found]
    model = rewire.load(trained / "model.safetensors").eval()
    with torch.no_grad():
        expected = model(test.read((np.arange(20), None))).argmax(1).tolist()
    assert guesses == expected
    assert "0.png: " in run("predict", trained, paths[0]).stdout
    assert "nothing.png" in text(run("predict", trained, tmp_path / "nothing.png"))


def test_export_is_a_dense_state_dict(trained: Path, tmp_path: Path) -> None:
    done = run("export", trained, tmp_path / "dense.pt")
    assert done.exit_code == 0, done.output
    state = torch.load(tmp_path / "dense.pt", weights_only=True)
    plain = rewire.models.mlp(64, width=0.06)
    plain.load_state_dict(state)
    assert "must end in" in text(run("export", trained, tmp_path / "dense.bin"))


def test_export_in_other_formats(trained: Path, tmp_path: Path) -> None:
    from rewire.exporting import read_csr

    done = run("export", trained, tmp_path / "csr.safetensors", "--format", "csr")
    assert done.exit_code == 0, done.output
    weights = [w for w in read_csr(tmp_path / "csr.safetensors").values() if w.dim() == 2]
    model = rewire.load(trained / "model.safetensors")
    assert sum(w.values().numel() for w in weights) == rewire.summary(model).connections
    run("export", trained, tmp_path / "sparse.safetensors", "--format", "safetensors")
    rewire.load(tmp_path / "sparse.safetensors", model)
    assert "choose one of dense, csr" in text(
        run("export", trained, tmp_path / "a.pt", "--format", "gguf")
    )


@pytest.mark.parametrize("name", ["nowhere/a.pt", "nowhere/a.safetensors", "folder.pt"])
def test_an_export_that_cannot_be_written_says_so(name: str, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.pt").mkdir()
    done = run("export", trained, tmp_path / name)
    assert done.exit_code == 1
    assert f"{tmp_path / name} cannot be written" in text(done)
    assert "Errno" not in text(done)
    assert os.listdir(tmp_path) == ["folder.pt"]


def test_the_digits_recipe_is_what_the_help_says() -> None:
    config = resolve({})
    assert (config.model, config.sparsity, config.epochs, config.batch_size) == (
        "mlp",
        0.98,
        50,
        32,
    )
    assert (config.every, config.until, config.drops, config.pad) == (50, 30, (20, 30), 1)
