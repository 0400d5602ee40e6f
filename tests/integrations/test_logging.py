"""Rewirings in TensorBoard, Weights & Biases and MLflow, read back from what these have written."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rewire
from rewire.integrations.logging import Log, scalars, to_mlflow, to_tensorboard, to_wandb


def train(log: Log, steps: int = 6) -> rewire.Rewirer:
    torch.manual_seed(0)
    model = rewire.sparsify(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), 0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rewirer = rewire.GSE(model, optimizer, every=2, until=100)
    rewirer.callbacks.append(log)
    for _ in range(steps):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        rewirer.step()
    return rewirer


def test_callbacks_get_every_rewiring_once() -> None:
    seen: list[rewire.Rewiring] = []
    rewirer = train(seen.append)
    assert seen == list(rewirer.history)
    assert [r.step for r in seen] == [2, 4, 6]


def test_callbacks_get_rewirings_by_other_batches() -> None:
    model = rewire.sparsify(nn.Linear(8, 8), 0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rewirer = rewire.GSE(model, optimizer, every=1, until=9, growth_batches=1)
    seen: list[rewire.Rewiring] = []
    rewirer.callbacks.append(seen.append)
    assert rewirer.waits
    rewirer.rewire(model(torch.randn(2, 8)).square().sum() for _ in range(1))
    rewirer.step()
    assert seen == list(rewirer.history)
    assert len(seen) == 1


def test_scalars() -> None:
    rewiring = train(lambda _: None).history[-1]
    found = scalars(rewiring)
    assert found["rewire/connections"] == rewiring.active
    assert found["rewire/turnover"] == rewiring.turnover
    assert found["rewire/turnover/0"] == rewiring.layers["0"].turnover
    assert found["rewire/connections/2"] == rewiring.layers["2"].active
    assert len(scalars(rewiring, "", layers=False)) == 6
    assert all(type(value) is float for value in found.values())


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        rewirer = train(to_tensorboard(writer))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = [(e.step, e.value) for e in events.Scalars("rewire/turnover")]
    expected = [(r.step, pytest.approx(r.turnover)) for r in rewirer.history]
    assert found == expected


def records(data: bytes) -> Iterator[bytes]:
    """Those of a file of offline runs, which is a log of LevelDB after seven bytes."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        length, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""
        if 32768 - place % 32768 < 7:  # a block's end
            place += 32768 - place % 32768


@pytest.mark.filterwarnings("ignore")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path)) as run:
        rewirer = train(to_wandb(run))
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found: list[dict[str, Any]] = []
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    expected = [(r.step, r.turnover) for r in rewirer.history]
    assert [(row["rewire/step"], row["rewire/turnover"]) for row in found] == expected


@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")  # mlflow-skinny comes without its stores
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/runs.db")
    run_id = client.create_run(client.create_experiment("one")).info.run_id
    rewirer = train(to_mlflow(client, run_id))
    found = [(m.step, m.value) for m in client.get_metric_history(run_id, "rewire/turnover")]
    assert found == [(r.step, r.turnover) for r in rewirer.history]
    assert client.get_metric_history(run_id, "rewire/turnover/0")
