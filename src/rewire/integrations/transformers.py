"""Rewiring in the Trainer of transformers, and sparse models in ``save_pretrained`` and
``from_pretrained``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

try:
    from transformers import PreTrainedModel, TrainerCallback
except ImportError as error:
    raise ImportError(
        "rewire.integrations.transformers needs transformers: pip install 'rewire[transformers]'"
    ) from error

import torch

from rewire import files
from rewire.communication import fingerprint
from rewire.integrations.common import Method, make_rewirer, optimizer_of
from rewire.integrations.logging import Log
from rewire.integrations.pretrained import RewireConfig, RewireQuantizer, attach
from rewire.methods.base import Rewirer
from rewire.nn.layer import ConnectedLayer
from rewire.nn.sparse import SparseLayer

__all__ = ["RewireCallback", "RewireConfig", "RewireQuantizer", "attach"]

FILE = "rewirer.pt"


class RewireCallback(TrainerCallback):  # type: ignore[misc]
    """Rewires the sparse layers of a model while a ``Trainer`` trains it.

    It counts the optimizer's steps: accumulated batches are one, and steps that a gradient scaler skips are
    none. Every checkpoint of the Trainer has the rewirer's state in ``rewirer.pt``, and
    ``trainer.train(resume_from_checkpoint=...)`` resumes exactly. Models of transformers are prepared for
    ``save_pretrained``; see :func:`attach`.

    Args:
        method: a rewirer's class such as :class:`rewire.GSE`, or a function of model and optimizer.
        resume_from: the folder of the checkpoint that ``train`` resumes from, if it is not
            ``output_dir/checkpoint-STEP``.
        logs: called with every rewiring; see :mod:`rewire.integrations.logging`.
        settings: arguments for the method.

    Attributes:
        rewirer: of the current or last call of ``train``, else None.

    Example:
        >>> model = rewire.sparsify(model, 0.9, weights="keep")  # doctest: +SKIP
        >>> callback = RewireCallback(rewire.GSE, every=100, until=2000)  # doctest: +SKIP
        >>> Trainer(model, args, train_dataset=data, callbacks=[callback]).train()  # doctest: +SKIP
    """

    def __init__(
        self,
        method: Method,
        *,
        resume_from: str | Path | None = None,
        logs: Iterable[Log] = (),
        **settings: Any,
    ) -> None:
        self.method, self.settings, self.logs = method, settings, tuple(logs)
        self.resume_from = resume_from
        self.rewirer: Rewirer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Create the rewirer, and load its state if the Trainer resumes."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if args.world_size > 1:
            raise ValueError(
                f"this Trainer has {args.world_size} processes, whose gradient buckets cannot "
                "follow layers that "
                "change their number of connections: start one process, or write a loop with "
                "rewire.distributed.Parallel (docs/distributed.md)"
            )
        self.rewirer = make_rewirer(
            self.method, model, optimizer_of(model, [optimizer]), self.settings, self.logs
        )
        if state.global_step > 0:
            self.rewirer.load_state_dict(self._saved(args, state, model))
        if isinstance(model, PreTrainedModel) and _only_sparse(model):
            attach(model)

    def _saved(self, args: Any, state: Any, model: Any) -> Any:
        """The state in the checkpoint that the Trainer has loaded."""
        folder = Path(self.resume_from or Path(args.output_dir) / f"checkpoint-{state.global_step}")
        remedy = "give RewireCallback(resume_from=...) the folder that train() resumes from"
        if not (folder / FILE).is_file():
            raise FileNotFoundError(
                f"the Trainer resumes, but there is no {folder / FILE}: {remedy}"
            )
        saved = torch.load(folder / FILE, weights_only=True)
        if saved["step"] != state.global_step:
            raise ValueError(
                f"{folder / FILE} is of step {saved['step']}, and the Trainer resumes from step "
                f"{state.global_step}: {remedy}"
            )
        if saved["connections"] != _connections_of(model):
            raise ValueError(
                f"{folder / FILE} belongs to a run with other connections than the model that the Trainer "
                f"has loaded: {remedy}"
            )
        return saved["rewirer"]

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Step the rewirer, unless a gradient scaler has skipped the optimizer's step."""
        assert self.rewirer is not None
        if not getattr(kwargs["optimizer"], "step_was_skipped", False):
            self.rewirer.step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the rewirer's state in the checkpoint's folder."""
        assert self.rewirer is not None
        if state.is_world_process_zero and not args.save_only_model:
            content = {
                "step": state.global_step,
                "connections": _connections_of(kwargs["model"]),
                "rewirer": self.rewirer.state_dict(),
            }
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            files.write(folder / FILE, lambda hidden: torch.save(content, hidden))


def _only_sparse(model: torch.nn.Module) -> bool:
    """Whether its layers have the storage that ``from_pretrained`` can load."""
    layers = [module for module in model.modules() if isinstance(module, ConnectedLayer)]
    return all(isinstance(layer, SparseLayer) for layer in layers)


def _connections_of(model: torch.nn.Module) -> int:
    """A hash of all connections and weights, to tell one checkpoint from another."""
    layers = (module for module in model.modules() if isinstance(module, SparseLayer))
    return fingerprint(*(part for m in layers for part in (m.indptr, m.indices, m.values)))
