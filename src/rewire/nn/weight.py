"""The weight of a sparse layer, for code that expects a dense layer's: its shape, and products with it.

Public models read ``layer.weight`` for its dtype, device or shape, or multiply with it past the layer's
forward (``F.linear(x, layer.weight, bias)``). Both work without a dense weight
(:mod:`rewire.nn.weight_functions`); everything else raises (:mod:`rewire.nn.weight_errors`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from rewire.engine import lazy, private
from rewire.nn.weight_errors import WRITE, refuse, writes

if TYPE_CHECKING:
    from rewire.nn.sparse import SparseLayer

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""By torch function: answers with the result, or NotImplemented where only a dense weight will do. Takes
the function's own arguments."""


class Weight:
    """A view of a sparse layer's weight: it changes with the layer, and holds no numbers.

    ``shape``, ``dtype`` and ``device`` are those of the dense layer's weight, so that a convolution has
    four dimensions. ``layout`` is ``torch.sparse_csr``; :meth:`to_sparse_csr` is a 2-D tensor, for a
    convolution that of ``weight.flatten(1)``, since torch has no CSR tensor with more sparse dimensions.

    Args:
        layer: the layer.
        values: in place of the layer's, for a weight of another type or without a gradient.
        turned: whether this is the transpose.
    """

    _layer: SparseLayer
    _values: Tensor | None
    _turned: bool

    def __init__(
        self, layer: SparseLayer, values: Tensor | None = None, turned: bool = False
    ) -> None:
        self._layer, self._values, self._turned = layer, values, turned

    def _own(self) -> Tensor:
        """The numbers that the weight is a view of."""
        return self._layer.values if self._values is None else self._values

    def _with(self, values: Tensor | None, turned: bool) -> Weight:
        return type(self)(self._layer, values, turned)

    # What code asks for

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense weight."""
        shape = self._layer.weight_shape
        return torch.Size(shape[::-1] if self._turned else shape)

    @property
    def dtype(self) -> torch.dtype:
        """The same as of ``layer.values``."""
        return self._own().dtype

    @property
    def device(self) -> torch.device:
        """The same as of ``layer.values``."""
        return self._own().device

    @property
    def layout(self) -> torch.layout:
        """``torch.sparse_csr``."""
        return torch.sparse_csr

    is_sparse_csr = True
    is_sparse = False

    @property
    def _is_hf_initialized(self) -> bool:
        """What initialisation in transformers asks of a tensor: whether it was loaded."""
        return bool(getattr(self._own(), "_is_hf_initialized", False))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._layer.weight_shape)

    @property
    def requires_grad(self) -> bool:
        """Whether the values do; setting it freezes or trains the layer's values."""
        return self._own().requires_grad

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    @property
    def grad(self) -> NoReturn:
        """Raises: the gradient is ``layer.values.grad``."""
        refuse(self, "grad", "has no gradient of its own: that of the layer is layer.values.grad")

    @grad.setter
    def grad(self, gradient: Any) -> None:
        refuse(self, "grad", "has no gradient of its own: that of the layer is layer.values.grad")

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one size of it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self._layer.weight_shape)

    def numel(self) -> int:
        """Number of elements of the dense weight."""
        return self.shape.numel()

    ndimension, nelement = dim, numel

    def __len__(self) -> int:
        return self.shape[0]

    def is_floating_point(self) -> bool:
        """Always True."""
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        """Whether the values are."""
        return self.dtype.is_complex

    def element_size(self) -> int:
        """Bytes of an element."""
        return self._own().element_size()

    def get_device(self) -> int:
        """Number of the device, -1 for the CPU."""
        return self._own().get_device()

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        """True: there are no strides."""
        return True

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        shape = "x".join(map(str, self.shape))
        return (
            f"SparseWeight({shape}, {self._layer.count:,} connections, dtype={self.dtype}, "
            f"device={str(self.device)!r}, requires_grad={self.requires_grad})"
        )

    def __format__(self, spec: str) -> str:
        return repr(self)

    # The same numbers

    def t(self) -> Weight:
        """The transpose."""
        if self.ndim != 2:
            refuse(self, "t")
        return self._with(self._values, not self._turned)

    @property
    def T(self) -> Weight:
        """The transpose."""
        return self.t()

    mT = T

    def transpose(self, dim0: Any, dim1: Any) -> Weight:
        """The transpose, or the weight itself."""
        if self.ndim != 2 or {dim0, dim1} - {0, 1, -1, -2}:
            refuse(self, "transpose")
        return self._with(self._values, self._turned ^ (dim0 % 2 != dim1 % 2))

    def detach(self) -> Weight:
        """The same without a gradient to the values."""
        return self._with(self._own().detach(), self._turned)

    @property
    def data(self) -> Weight:
        """The same without a gradient to the values; it cannot be set."""
        return self.detach()

    @data.setter
    def data(self, data: Any) -> None:
        refuse(self, "data", WRITE)

    def to(self, *args: Any, **kwargs: Any) -> Weight:
        """The weight in another dtype. The device is that of the layer."""
        own = self._own()
        given = (*args, *kwargs.values())
        if any(isinstance(one, Weight) for one in given):
            args = tuple(one._own() if isinstance(one, Weight) else one for one in args)
            kwargs = {
                k: one._own() if isinstance(one, Weight) else one for k, one in kwargs.items()
            }
        values = own.to(*args, **kwargs)
        if values.device != own.device:
            refuse(self, "to", "stays on the device of its layer: move the layer instead")
        return self if values is own else self._with(values, self._turned)

    def type(self, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The name of the type, or the weight in another dtype."""
        if dtype is None:
            return self._own().type()
        if not isinstance(dtype, torch.dtype):
            refuse(self, "type")
        return self.to(dtype)

    def type_as(self, other: Tensor) -> Weight:
        """The weight in the dtype of another tensor."""
        return self.to(other.dtype)

    def float(self) -> Weight:
        """The weight in float32."""
        return self.to(torch.float32)

    def double(self) -> Weight:
        """The weight in float64."""
        return self.to(torch.float64)

    def half(self) -> Weight:
        """The weight in float16."""
        return self.to(torch.float16)

    def bfloat16(self) -> Weight:
        """The weight in bfloat16."""
        return self.to(torch.bfloat16)

    def contiguous(self, *args: Any, **kwargs: Any) -> Weight:
        """The weight itself."""
        return self

    def clone(self, *args: Any, **kwargs: Any) -> Weight:
        """The weight with the numbers that it has now."""
        return self._with(self._own().clone(), self._turned)

    # Numbers

    def to_sparse_csr(self) -> Tensor:
        """A 2-D sparse CSR copy, without a gradient; see the class."""
        csr: Tensor = self._filled().to_sparse_csr()
        return csr.t().to_sparse_csr() if self._turned else csr

    def crow_indices(self) -> Tensor:
        """The same as of :meth:`to_sparse_csr`."""
        return self.to_sparse_csr().crow_indices()

    def col_indices(self) -> Tensor:
        """The same as of :meth:`to_sparse_csr`."""
        return self.to_sparse_csr().col_indices()

    def values(self) -> Tensor:
        """The same as of :meth:`to_sparse_csr`."""
        return torch.Tensor.values(self.to_sparse_csr())

    def to_dense(self) -> Tensor:
        """A dense tensor, with a gradient to the values: the memory and time of a dense layer."""
        layer, values = self._layer, self._own().flatten()
        count = values.numel()
        numbers = torch.arange(1, count + 1, dtype=torch.float64, device=values.device)
        numbered: Tensor = self._with(numbers, False)._filled().to_dense().weight.detach().flatten()
        places = numbered.nonzero().flatten()
        order = numbered[places].long() - 1  # which value is there
        flat = values.new_zeros(numbered.shape).index_put((places,), values[order])
        dense = flat.view(layer.weight_shape)
        return dense.t() if self._turned else dense

    def _filled(self) -> Any:
        return self._layer if self._values is None else like(self, None)

    # Changes

    def requires_grad_(self, requires_grad: bool = True) -> Weight:
        """Freeze or train the values of the layer."""
        if self._values is not None and requires_grad is not self._values.requires_grad:
            refuse(self, "requires_grad_", "is a copy here and no parameter: use layer.values")
        self._own().requires_grad_(requires_grad)
        return self

    def mul_(self, other: Any) -> Weight:
        """Scale the values of the layer by a number."""
        self._scale(other, "mul_", Tensor.mul_)
        return self

    def div_(self, other: Any) -> Weight:
        """Divide the values of the layer by a number."""
        self._scale(other, "div_", Tensor.div_)
        return self

    __imul__, __itruediv__ = mul_, div_

    def _scale(self, other: Any, name: str, change: Callable[[Tensor, Any], Tensor]) -> None:
        if isinstance(other, Weight) or (isinstance(other, Tensor) and other.dim() > 0):
            refuse(self, name, WRITE)
        values = self._own()
        change(values, other)

    # Products

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = FUNCTIONS.get(func)
        if function is not None and not (kwargs and "out" in kwargs):
            result = function(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        weight = next(weights_in((args, kwargs or {})), None)
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__
        refuse(weight, name, WRITE if writes(func, weight, args, kwargs or {}) else None)


class SparseWeight(Weight, torch.Tensor):  # type: ignore[misc,override]
    """The weight of a sparse layer: see :class:`Weight`. A tensor without memory of its own."""

    def __init__(self, *args: Any) -> None:
        pass

    def __new__(
        cls, layer: SparseLayer, values: Tensor | None = None, turned: bool = False
    ) -> SparseWeight:
        own = layer.values if values is None else values
        shape = layer.weight_shape
        new: SparseWeight = private.make_wrapper(
            cls,
            shape[::-1] if turned else shape,
            dtype=own.dtype,
            device=own.device,
            requires_grad=own.requires_grad,
        )
        Weight.__init__(new, layer, values, turned)
        if own.requires_grad:  # C++ code alone sees that this tensor does
            with private.without_functions():  # what register_hook does, in a fraction of the time
                new._backward_hooks = {0: functools.partial(_lost, layer)}
        return new

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        refuse(next(weights_in((args, kwargs or {})), None), str(func))


def weight_of(layer: SparseLayer, turned: bool = False) -> Any:
    """The weight of a layer. Compiled code, which cannot make tensors of this kind, sees no tensor."""
    kind = Weight if torch.compiler.is_compiling() else SparseWeight
    return kind(layer, None, turned)


def _lost(layer: SparseLayer, gradient: Tensor) -> NoReturn:
    refuse(
        SparseWeight(layer),
        "backward",
        "was given to C++ code (an autograd.Function, say), which has computed a dense gradient for it",
    )


def like(weight: Weight, bias: Tensor | None) -> SparseLayer:
    """A layer that shares all with the weight's but its values and bias."""
    layer = weight._layer
    new = object.__new__(type(layer))
    new.__dict__.update(layer.__dict__)
    values = weight._own()
    new.__dict__["_parameters"] = {"values": values, "bias": lazy.ordinary(bias)}
    if weight._values is not None and not values.requires_grad:
        new.__dict__.pop("probe", None)  # no gradient of the layer passes here
    return new


def weights_in(value: Any) -> Any:
    """The sparse weights in the arguments of a torch function."""
    if isinstance(value, Weight):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from weights_in(part)
    elif isinstance(value, dict):
        yield from weights_in(list(value.values()))


lazy.OTHERS.add(SparseWeight)
