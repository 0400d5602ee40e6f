"""How many FLOPs the operators take, for ``torch.utils.flop_counter.FlopCounterMode``.

They are counted as torch counts those of a dense layer, times the layer's density: a multiplication and an
addition for each connection, sample and output position, the border of a padded image included.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from math import prod
from types import ModuleType
from typing import Any

import torch

_COUNTER = "torch.utils.flop_counter"
Shape = Sequence[int]


def _product(connections: Shape, output: Shape) -> int:
    return 2 * connections[0] * output[0] * prod(output[2:])


def _forward(x: Shape, values: Shape, *rest: Any, out_shape: Shape) -> int:
    return _product(values, out_shape)


def _backward(dy: Shape, x: Shape, values: Shape, *rest: Any, out_shape: Any) -> int:
    needs: list[bool] = rest[-1]  # of input, values, bias
    return sum(needs[:2]) * _product(values, dy)


def _gradient_at(dy: Shape, x: Shape, outputs: Shape, *rest: Any, out_shape: Shape) -> int:
    return _product(outputs, dy)


def _register(counter: Any) -> None:
    ops = torch.ops.rewire
    for formula, targets in (
        (_forward, [ops.linear, ops.conv2d]),
        (_backward, [ops.linear_backward, ops.conv2d_backward]),
        (_gradient_at, [ops.linear_gradient_at, ops.conv2d_gradient_at]),
    ):
        counter.register_flop_formula(targets)(formula)


class _WhenImported(MetaPathFinder):
    """Registers the formulas when the counter is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that registers the formulas once it has run."""
        if fullname != _COUNTER:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register(module)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Let FlopCounterMode count the operators, without importing it: it imports triton where that is
    installed, which takes longer than all of this package."""
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _WhenImported())
