"""``torch.compile`` for models whose connections change."""

from __future__ import annotations

from typing import Any

from torch import nn


def compile(model: nn.Module, **options: Any) -> Any:
    """``torch.compile`` that does not compile again at every rewiring.

    torch takes the sizes of parameters and buffers for constants, and those of sparse layers are how many
    connections they have. This sets the two options of torch's compiler that say so
    (``force_parameter_static_shapes`` and ``force_nn_module_property_static_shapes``) to False, for the
    whole process: after the first rewiring the model is compiled once more, for any number of connections.

    Guided methods (GSE, RigL, SNFS) look at gradients in steps that end with a rewiring. In those steps
    their layers are not part of the compiled graph, which ``fullgraph=True`` does not allow.

    The engine does not run in compiled models: see ``docs/performance.md`` for what is faster.

    Args:
        model: has sparse layers.
        options: for ``torch.compile``.

    Example:
        >>> compiled = compile(model, fullgraph=True)  # doctest: +SKIP
    """
    import torch._dynamo  # slow: not before it is wanted

    torch._dynamo.config.force_parameter_static_shapes = False
    torch._dynamo.config.force_nn_module_property_static_shapes = False
    return torch.compile(model, **options)
