"""Export of trained models: dense state dicts, CSR matrices, ONNX."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rewire import files, saving
from rewire.nn.masked_layer import MaskedLayer
from rewire.nn.sparse import SparseLayer
from rewire.saving import Path_, dense_state_dict
from rewire.sparsify import densify

FORMATS = ("dense", "csr", "onnx", "safetensors")


def export(
    model: nn.Module,
    path: Path_,
    *,
    format: str | None = None,
    example: Tensor | tuple[Any, ...] | None = None,
    sparse_initializers: bool = False,
) -> None:
    """Export a model to a file that other programs read.

    ========== =============== ====================================================================
    format     file            holds
    ========== =============== ====================================================================
    dense      .pt, .pth,      :func:`rewire.dense_state_dict`: for PyTorch alone
               .safetensors
    csr        .safetensors    for each sparse layer ``NAME.weight.crow_indices``, ``.col_indices`` and
                               ``.values``, out x in, and all else as it is; see :func:`read_csr`
    onnx       .onnx           the model in evaluation mode with dense weights
    safetensors .safetensors   what :func:`rewire.save` writes, for :func:`rewire.load`
    ========== =============== ====================================================================

    Args:
        model: any model.
        path: the file.
        format: one of these; by default ONNX for ``.onnx``, else dense.
        example: for ONNX, an input or a tuple of inputs with two samples or more; the exported model
            takes any number.
        sparse_initializers: for ONNX, keep only the weights of connections in the file. onnxruntime
            reads that and makes them dense; OpenVINO does not read it.
    """
    path = Path(path)
    if format is None:
        format = "onnx" if path.suffix == ".onnx" else "dense"
    if format not in FORMATS:
        raise ValueError(f"there is no format {format!r}; choose one of {', '.join(FORMATS)}")
    endings = {"dense": (".pt", ".pth", ".safetensors"), "onnx": (".onnx",)}
    wanted = endings.get(format, (".safetensors",))
    if path.suffix not in wanted:
        *most, last = wanted
        told = f"{', '.join(most)} or {last}" if most else last
        raise ValueError(f"{path} must end in {told} for format={format!r}")
    if format == "onnx":
        _export_onnx(model, path, example, sparse_initializers)
    elif format == "safetensors":
        saving.save(model, path)
    elif format == "csr":
        tensors, sizes = _csr(model)
        _write(path, tensors, {"csr": json.dumps(sizes)})
    elif path.suffix == ".safetensors":
        _write(path, dense_state_dict(model))
    else:
        state = dense_state_dict(model)
        files.write(path, lambda hidden: torch.save(state, hidden))


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    from safetensors.torch import save_file

    whole = {name: value.contiguous().clone() for name, value in tensors.items()}
    files.write(path, lambda hidden: save_file(whole, hidden, metadata))


# CSR ----------------------------------------------------------------------------------------------

_PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "crow_indices": Tensor.crow_indices,
    "col_indices": Tensor.col_indices,
    "values": Tensor.values,
}


def _csr(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """All tensors of a file, and the size of each sparse matrix by name."""
    if any(isinstance(module, MaskedLayer) for module in model.modules()):
        raise ValueError('the model has masked layers, which are dense: give format="dense"')
    state, sizes = dict(model.state_dict()), {}
    for name, layer in model.named_modules():
        if isinstance(layer, SparseLayer):
            prefix = f"{name}." if name else ""
            for part in ("values", "indptr", "indices"):
                del state[prefix + part]
            with _no_warning():
                weight: Tensor = layer.to_sparse_csr()  # type: ignore[operator]
            state |= {f"{prefix}weight.{key}": get(weight) for key, get in _PARTS.items()}
            sizes[f"{prefix}weight"] = list(weight.shape)
    return state, sizes


def read_csr(path: Path_) -> dict[str, Tensor]:
    """The tensors of a file of ``format="csr"``; weights of sparse layers as ``torch.sparse_csr``
    tensors, those of convolutions as ``weight.flatten(1)``.

    It needs torch and safetensors alone, to be copied into other programs.
    """
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        sizes = json.loads((file.metadata() or {}).get("csr", "null"))
        if sizes is None:
            raise ValueError(f'{path} was not written by rewire.export(..., format="csr")')
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, size in sizes.items():
        parts = [state.pop(f"{name}.{part}") for part in _PARTS]
        with _no_warning():
            rows, columns, values = parts
            state[name] = torch.sparse_csr_tensor(
                rows, columns, values, size=size, check_invariants=True
            )
    return state


@contextmanager
def _no_warning() -> Iterator[None]:
    """Without torch's note that its CSR tensors are new."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support", UserWarning)
        yield


# ONNX ---------------------------------------------------------------------------------------------


def _export_onnx(model: nn.Module, path: Path, example: Any, sparse: bool) -> None:
    try:
        import onnx
        import onnxscript  # noqa: F401 (what torch writes ONNX with)
    except ImportError as error:
        raise ValueError("ONNX needs more packages: pip install 'rewire[onnx]'") from error
    if example is None:
        raise ValueError(
            "ONNX needs an example of the model's input: rewire.export(model, path, "
            "example=torch.randn(2, ...))"
        )
    inputs = example if isinstance(example, tuple) else (example,)
    dense = densify(copy.deepcopy(model)).eval()
    batch = tuple({0: "batch"} if isinstance(one, Tensor) else None for one in inputs)
    program = torch.onnx.export(dense, inputs, dynamo=True, dynamic_shapes=batch, verbose=False)
    assert program is not None
    proto = program.model_proto
    if sparse:
        _make_sparse(onnx, proto, _sparse_names(model))

    def fill(hidden: Path) -> None:
        hidden.write_bytes(proto.SerializeToString())

    files.write(path, fill)


def _sparse_names(model: nn.Module) -> set[str]:
    layers = (n for n, m in model.named_modules() if isinstance(m, SparseLayer | MaskedLayer))
    return {f"{name}.weight".lstrip(".") for name in layers}


def _make_sparse(onnx: Any, proto: Any, names: set[str]) -> None:
    """Keep only what is not zero of some initializers."""
    graph, numpy = proto.graph, onnx.numpy_helper
    dense = list(graph.initializer)
    del graph.initializer[:]
    for one in dense:
        if one.name not in names:
            graph.initializer.append(one)
            continue
        flat = numpy.to_array(one).reshape(-1)
        places = flat.nonzero()[0]
        values = numpy.from_array(flat[places], one.name)
        indices = numpy.from_array(places, f"{one.name}.indices")
        tensor = onnx.helper.make_sparse_tensor(values, indices, list(one.dims))
        graph.sparse_initializer.append(tensor)
