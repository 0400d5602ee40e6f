"""Models in ONNX, run by onnxruntime and OpenVINO."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rewire

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.filterwarnings("ignore")


class Two(nn.Module):
    """Two inputs, one of which is a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.down(self.up(x).relu()) * mask  # type: ignore[no-any-return]


def cnn() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 36, 40), nn.ReLU(), nn.Linear(40, 5))


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


MODELS: dict[str, Any] = {
    "cnn": (cnn, [(3, 6, 6)]),
    "transformer": (transformer, [(4, 16)]),
    "two inputs": (Two, [(6,), (2,)]),
}


def sparse(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    make, shapes = MODELS[name]
    model = rewire.sparsify(make(), 0.8).eval()

    def inputs(batch: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(batch, *shape) for shape in shapes)

    return model, inputs


@pytest.mark.parametrize("sparse_initializers", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_gives_the_same(name: str, sparse_initializers: bool, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model, inputs = sparse(name)
    path = tmp_path / "model.onnx"
    rewire.export(model, path, example=inputs(2), sparse_initializers=sparse_initializers)
    onnx.checker.check_model(onnx.load(path))
    session = runtime.InferenceSession(path)
    for batch in (2, 5):
        given = inputs(batch)
        names = [one.name for one in session.get_inputs()]
        fed = {n: x.numpy() for n, x in zip(names, given, strict=True)}
        (found,) = session.run(None, fed)
        np.testing.assert_allclose(found, model(*given).detach().numpy(), atol=1e-5)
    assert any(isinstance(module, rewire.SparseLayer) for module in model.modules())


def test_sparse_initializers_hold_connections_alone(tmp_path: Path) -> None:
    model, inputs = sparse("cnn")
    sizes = []
    for kind in (False, True):
        path = tmp_path / f"{kind}.onnx"
        rewire.export(model, path, example=inputs(2), sparse_initializers=kind)
        sizes.append(path.stat().st_size)
    assert sizes[1] < 0.7 * sizes[0]
    graph = onnx.load(tmp_path / "True.onnx").graph
    layers = {n: m for n, m in model.named_modules() if isinstance(m, rewire.SparseLayer)}
    counts = {one.values.name: one.values.dims[0] for one in graph.sparse_initializer}
    assert counts["4.weight"] == layers["4"].count
    assert counts.keys() <= {f"{name}.weight" for name in layers}


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_openvino_with_sparse_weights(rate: float, tmp_path: Path) -> None:
    """Its option says from which share of zeros on weights are stored without them."""
    openvino = pytest.importorskip("openvino")
    model, inputs = sparse("cnn")
    rewire.export(model, tmp_path / "model.onnx", example=inputs(2))
    options = {
        "INFERENCE_PRECISION_HINT": "f32",
        "CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE": rate,
    }
    compiled = openvino.Core().compile_model(tmp_path / "model.onnx", "CPU", options)
    x = inputs(3)[0]
    np.testing.assert_allclose(compiled(x.numpy())[0], model(x).detach().numpy(), atol=1e-5)


def test_openvino_reads_no_sparse_initializers(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    model, inputs = sparse("cnn")
    rewire.export(model, tmp_path / "model.onnx", example=inputs(2), sparse_initializers=True)
    with pytest.raises(RuntimeError, match="Input tensor isn't found"):
        openvino.Core().compile_model(tmp_path / "model.onnx", "CPU")


def test_masked_models_and_dense_ones(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    masked = rewire.sparsify(cnn(), 0.8, storage="masked").eval()
    for model in (masked, rewire.densify(copy.deepcopy(masked))):
        x = torch.randn(4, 3, 6, 6)
        rewire.export(model, tmp_path / "model.onnx", example=x, sparse_initializers=True)
        session = runtime.InferenceSession(tmp_path / "model.onnx")
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(found, model(x).detach().numpy(), atol=1e-5)


def test_the_command_line_exports_runs(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    from typer.testing import CliRunner

    from rewire.cli import app

    folder, path = str(tmp_path / "run"), str(tmp_path / "run.onnx")
    arguments = ["train", "--out", folder, "--epochs", "1", "--method", "static", "--width", "0.1"]
    for command in (arguments, ["export", folder, path, "--sparse-initializers"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    model = rewire.load(tmp_path / "run" / "model.safetensors").eval()
    session, x = runtime.InferenceSession(path), torch.randn(4, 1, 8, 8)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(found, model(x).detach().numpy(), atol=1e-5)
