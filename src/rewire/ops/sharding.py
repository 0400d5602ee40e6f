"""Parameters that torch shards over processes: FSDP and DTensor.

Both are looked up where they are imported already: who does not use them does not wait for them.
"""

from __future__ import annotations

import sys

from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``, of which this process may hold a part."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def fsdp_classes() -> tuple[type, ...]:
    """The classes of modules that FSDP wraps or has taken over, if there can be any."""
    module = sys.modules.get("torch.distributed.fsdp")
    return () if module is None else (module.FSDPModule, module.FullyShardedDataParallel)


def has_fsdp(model: nn.Module) -> bool:
    """Whether FSDP shards the parameters of a model or of a part of it: they have memory only while
    that part runs."""
    classes = fsdp_classes()
    return bool(classes) and any(isinstance(part, classes) for part in model.modules())


def refuse_sharded(values: Tensor) -> None:
    """Raise if a layer's values are sharded: kernels read memory, which a ``DTensor`` has none of."""
    if is_sharded(values):
        raise RuntimeError(
            "the values of a sparse layer are sharded over processes (a DTensor) where it runs, but have "
            "to be whole: with fully_shard, call the module that was sharded and not a part of it; there "
            "is no tensor parallelism for sparse layers. rewire.distributed.Parallel(model) trains a model "
            "that is whole in every process"
        )
