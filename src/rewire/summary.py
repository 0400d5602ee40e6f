"""A table of a model's layers: connections, density and memory, against dense."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rewire.leftover import shortened
from rewire.nn.attention import SparseMultiheadAttention
from rewire.nn.layer import ConnectedLayer
from rewire.nn.shape import ConvShape
from rewire.nn.sparse import SparseLayer
from rewire.slow import is_slow

_HEADER = ("layer", "kind", "shape", "connections", "density", "memory", "dense memory")
_LEFT = 3  # so many columns are text, the others numbers


@dataclass(frozen=True)
class LayerSummary:
    """One layer that holds a weight matrix.

    Attributes:
        name: dotted name in the model, empty for the model itself.
        kind: name of the class.
        shape: of the weight, as torch has it when dense: (out, in, ...).
        sparse: whether it is one of our layers, sparse or masked.
        connections: weights that exist.
        weights: weights of the dense layer.
        memory: bytes of parameters and buffers now, with the indices of a sparse layer.
        dense_memory: bytes of the dense layer.
        slow: whether a sparse layer is likely to be slower than its dense form; see :mod:`rewire.slow`.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    sparse: bool
    connections: int
    weights: int
    memory: int
    dense_memory: int
    slow: bool = False

    @property
    def density(self) -> float:
        """Fraction of the weights that exist."""
        return self.connections / max(1, self.weights)


@dataclass(frozen=True, repr=False)
class Summary:
    """What :func:`summary` found; ``str()`` is the table.

    Attributes:
        layers: those that hold a weight matrix, in the order of the model.
        parameters: of the whole model, now.
        dense_parameters: of the whole model, if all its layers were dense.
        memory: bytes of all parameters and buffers now; tied ones count once.
        dense_memory: bytes if all layers were dense.
        other_memory: bytes, of the above, of modules that hold no weight matrix, such as norms.
    """

    layers: tuple[LayerSummary, ...]
    parameters: int
    dense_parameters: int
    memory: int
    dense_memory: int
    other_memory: int

    @property
    def connections(self) -> int:
        """Connections of all sparse layers."""
        return sum(layer.connections for layer in self.layers if layer.sparse)

    @property
    def density(self) -> float:
        """Density of all sparse layers together; 1 if there are none."""
        weights = sum(layer.weights for layer in self.layers if layer.sparse)
        return self.connections / weights if weights else 1.0

    def __repr__(self) -> str:
        sparse = sum(layer.sparse for layer in self.layers)
        return (
            f"Summary({sparse} sparse of {len(self.layers)} layers, "
            f"{self.connections:,} connections, density {_percent(self.density)}, "
            f"{_bytes(self.memory)} against {_bytes(self.dense_memory)} dense)"
        )

    def __str__(self) -> str:
        rows = [_HEADER, *(_cells(layer) for layer in self.layers)]
        if self.other_memory:
            rows.append(("all else", "", "", "", "", *[_bytes(self.other_memory)] * 2))
        total = (_bytes(self.memory), _bytes(self.dense_memory))
        count, density = "-", "dense"
        if any(layer.sparse for layer in self.layers):
            count, density = f"{self.connections:,}", _percent(self.density)
        rows.append(("total", "", "", count, density, *total))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(_padded(row, widths)).rstrip() for row in rows]
        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        last = f"parameters: {self.parameters:,} against {self.dense_parameters:,} dense"
        slow = [layer.name or "(model)" for layer in self.layers if layer.slow]
        note = [f"likely slower than dense at their density: {shortened(slow, 8)}"] if slow else []
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], last, *note])


def summary(model: nn.Module, *, show: bool = True) -> Summary:
    """Print a table of the model's layers, and return what it says.

    Every layer that holds a weight matrix has a row; sparse ones with their number of connections
    and density. Memory is that of the parameters and buffers as they are now, the indices of a
    sparse layer included; the dense memory is what the same layer takes as a torch layer. Norms
    and the like are one row, ``all else``. The total's connections and density are those of the
    sparse layers. A last line names sparse layers that are likely to be slower than dense ones at their
    density; ``rewire.sparsify(..., skip="slow")`` or ``keep_dense=`` keeps them dense.

    Args:
        model: a model or a layer.
        show: whether to print the table; without, ``str()`` of the result is the same text.

    Example:
        >>> import rewire
        >>> model = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))
        >>> found = summary(rewire.sparsify(model, sparsity=0.95, keep_dense="2"))
        layer  kind          shape    connections  density    memory  dense memory
        --------------------------------------------------------------------------
        0      SparseLinear  300x784       11,760      5 %  193.7 kB      942.0 kB
        2      Linear        10x300             -    dense   12.0 kB       12.0 kB
        --------------------------------------------------------------------------
        total                              11,760      5 %  205.7 kB      954.0 kB
        parameters: 15,070 against 238,510 dense
        >>> found.layers[0].density
        0.05
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    layers: list[LayerSummary] = []
    others: dict[Tensor, None] = {}  # an ordered set
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        row = _layer(name, module, _memory(own))
        if row is not None:
            layers.append(row)
        else:
            others.update(dict.fromkeys(own))
    parameters = sum(tensor.numel() for tensor in _known(model.parameters()))
    ours = (module for module in model.modules() if isinstance(module, ConnectedLayer))
    absent = sum(module.domain.size - module.parameter.numel() for module in ours)
    memory = _memory([*model.parameters(), *model.buffers()])
    result = Summary(
        layers=tuple(layers),
        parameters=parameters,
        dense_parameters=parameters + absent,
        memory=memory,
        dense_memory=memory + sum(row.dense_memory - row.memory for row in layers),
        other_memory=_memory(others),
    )
    if show:
        print(result)
    return result


def _layer(name: str, module: nn.Module, memory: int) -> LayerSummary | None:
    """The row of a module, or None if it holds no weight matrix itself."""
    kind = type(module).__name__
    if isinstance(module, ConnectedLayer):
        shape: tuple[int, ...] = (module.n_out, module.n_in)
        if isinstance(module, ConvShape):
            shape = module.weight_shape
        connections, weights = module.count, module.domain.size
        dense = weights * module.parameter.element_size()
        dense += _memory([] if module.bias is None else [module.bias])
        slow = isinstance(module, SparseLayer) and is_slow(module, module.density)
        return LayerSummary(name, kind, shape, True, connections, weights, memory, dense, slow)
    matrices = [p for p in _known(module.parameters(recurse=False)) if p.dim() > 1]
    if not matrices or isinstance(module, SparseMultiheadAttention):
        return None
    weights = sum(matrix.numel() for matrix in matrices)
    shape = tuple(matrices[0].shape)
    return LayerSummary(name, kind, shape, False, weights, weights, memory, memory)


def _known(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Without those of lazy modules, whose size is not known yet."""
    return [tensor for tensor in tensors if not is_lazy(tensor)]


def _memory(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _known(tensors))


def _cells(layer: LayerSummary) -> tuple[str, ...]:
    shape = "x".join(map(str, layer.shape))
    count = f"{layer.connections:,}" if layer.sparse else "-"
    density = _percent(layer.density) if layer.sparse else "dense"
    memory = (_bytes(layer.memory), _bytes(layer.dense_memory))
    return (layer.name or "(model)", layer.kind, shape, count, density, *memory)


def _padded(row: tuple[str, ...], widths: list[int]) -> list[str]:
    return [
        cell.ljust(width) if index < _LEFT else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g} %"


def _bytes(count: float) -> str:
    """Bytes with a decimal unit.

    >>> _bytes(235_200)
    '235.2 kB'
    """
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"
