"""How fast a sparse layer could be if nothing but memory took time: the roofline of the benchmark.

A product reads, for every connection and every position of the output, one row of the batch; no order
of work avoids that, because two connections of an output unit share nothing. Those reads come from the
cache that holds what a task works on: panels of 32 samples of all input units, for a convolution of the
rows of the image that its kernel covers. Besides, each pass reads and writes whole tensors of
activations, which come from wherever all of them together have room. The time is that of the larger of
the two, at the rates this machine has for reading pieces from so much memory.
"""

from __future__ import annotations

from functools import cache

import torch

from rewire.bench.workloads import ConvShape
from rewire.ops import native

_ELEMENT, _PANEL = 4, 32
_TAPS, _SPAN = 9, 3  # of the convolutions: taps, and rows of the image under them


def linear(width: int, sparsity: float, batch: int, layers: int) -> float | None:
    """Seconds of forward and backward through ``layers`` equal linear layers."""
    connections = (1 - sparsity) * width * width
    return _seconds(layers, connections * batch, width, width * batch, width * batch)


def convolution(shape: ConvShape, sparsity: float, batch: int, layers: int) -> float | None:
    """Seconds of forward and backward through ``layers`` equal convolutions."""
    connections = (1 - sparsity) * _TAPS * shape.n_in * shape.n_out
    out = (shape.image // shape.stride) ** 2 * batch
    window = shape.n_in * min(_SPAN, shape.image) * shape.image
    return _seconds(
        *(layers, connections * out, window, shape.n_in * shape.image**2 * batch),
        shape.n_out * out,
    )


def _seconds(layers: int, reads: float, window: int, inputs: int, outputs: int) -> float | None:
    """``reads``: elements that one product takes in; ``window``: units of what a task works on."""
    near = rate(window * _PANEL * _ELEMENT)
    kept = (inputs + layers * outputs) + (
        inputs + outputs
    )  # activations, and gradients on their way
    far = rate(kept * _ELEMENT // torch.get_num_threads())
    if near is None or far is None:
        return None
    products = 2 * reads * _ELEMENT / near  # both gradients come from one reading
    # What is written is read into the cache first. Forward: x, y; backward: dy, x, dx.
    moved = (inputs + 2 * outputs) + (outputs + inputs + 2 * inputs)
    return layers * max(products, moved * _ELEMENT / far)


def rate(bytes_: int) -> float | None:
    """Bytes per second that all threads read from so many bytes each, to the next power of two."""
    return _rate(1 << max(14, (bytes_ - 1).bit_length()), torch.get_num_threads())


@cache
def _rate(bytes_: int, threads: int) -> float | None:
    return native.read_rate(bytes_)
