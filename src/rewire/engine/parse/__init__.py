"""Torch functions as nodes: how arguments are parsed, and which shapes come out.

A handler takes the arguments of its torch function. It answers NotImplemented for all that the engine does
not do, wrong arguments included: the region is run then, and torch says what is wrong. Handlers are in a
module for each family of operations, which lists them by torch function.
"""

from __future__ import annotations

from rewire.engine.lazy import HANDLERS
from rewire.engine.parse import (
    attention,
    elementwise,
    images,
    norms,
    precision,
    resampling,
    shapes,
    tokens,
)

for _family in (attention, elementwise, images, norms, precision, resampling, shapes, tokens):
    HANDLERS |= _family.FUNCTIONS
