"""Files for others."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import rewire
from rewire.exporting import read_csr


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), nn.ConvTranspose2d(6, 3, 2)]
    return rewire.sparsify(nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, 5)), 0.7).eval()


def test_csr_matrices_are_the_weights(tmp_path: Path) -> None:
    sparse = model()
    rewire.export(sparse, tmp_path / "a.safetensors", format="csr")
    state = read_csr(tmp_path / "a.safetensors")
    dense = rewire.dense_state_dict(sparse)
    assert state.keys() == dense.keys()
    for name, expected in dense.items():
        found = state[name]
        if expected.dim() >= 2:
            assert found.layout == torch.sparse_csr
            assert found.values().numel() == sparse.get_submodule(name[0]).count
            found = found.to_dense().view(expected.shape)
        assert torch.equal(found, expected), name


def test_safetensors_is_what_rewire_loads(tmp_path: Path) -> None:
    sparse = model()
    rewire.export(sparse, tmp_path / "a.safetensors", format="safetensors")
    loaded = rewire.load(tmp_path / "a.safetensors", model())
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(loaded.eval()(x), sparse(x))


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("a.bin", None, r"must end in \.pt, \.pth or \.safetensors for format='dense'"),
        ("a.pt", "csr", r"must end in \.safetensors for format='csr'"),
        ("a.pt", "onnx", r"must end in \.onnx"),
        ("a.pt", "gguf", "there is no format 'gguf'; choose one of dense, csr, onnx, safetensors"),
    ],
)
def test_wrong_names_and_formats(name: str, format: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        rewire.export(model(), tmp_path / name, format=format)
    assert not list(tmp_path.iterdir())


def test_masked_layers_have_no_csr(tmp_path: Path) -> None:
    masked = rewire.sparsify(nn.Sequential(nn.Linear(6, 3)), 0.5, storage="masked")
    with pytest.raises(ValueError, match=r'masked layers.*format="dense"'):
        rewire.export(masked, tmp_path / "a.safetensors", format="csr")
    rewire.export(masked, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"was not written by rewire\.export"):
        read_csr(tmp_path / "a.safetensors")


def test_without_onnx_the_remedy_is_named(tmp_path: Path) -> None:
    program = f"""
import sys
sys.modules["onnx"] = None  # as if it were not installed
import torch, rewire
rewire.export(torch.nn.Linear(2, 2), {str(tmp_path / "a.onnx")!r}, example=torch.zeros(2, 2))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'rewire[onnx]'" in done.stderr
