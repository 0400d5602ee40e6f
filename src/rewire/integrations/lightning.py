"""Rewiring in Lightning: a callback that steps with the optimizer, and is saved in its checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(
        "rewire.integrations.lightning needs Lightning: pip install 'rewire[lightning]'"
    ) from error

from torch.optim import Optimizer

from rewire.integrations.common import Method, make_rewirer, optimizer_of
from rewire.integrations.logging import Log
from rewire.methods.base import Rewirer


class RewireCallback(Callback):  # type: ignore[misc]
    """Rewires the sparse layers of a LightningModule while it trains.

    It counts the optimizer's steps: accumulated batches are one, and steps that a gradient scaler skips are
    none. Its state is in every checkpoint, and ``trainer.fit(..., ckpt_path=...)`` resumes exactly. Without
    ``ckpt_path`` each ``fit`` begins anew, as its optimizers do.

    Call :func:`rewire.sparsify` in the module's constructor, or in ``configure_model``.

    Args:
        method: a rewirer's class such as :class:`rewire.GSE`, or a function of model and optimizer.
        part: the name of the submodule to rewire, where several optimizers train parts of the module (the
            two halves of a GAN, with a callback each); by default all of it.
        logs: called with every rewiring; see :mod:`rewire.integrations.logging`.
        settings: arguments for the method.

    Attributes:
        rewirer: of the current or last ``fit``, else None.

    Example:
        >>> callback = RewireCallback(rewire.GSE, every=1000, until=46_800)  # doctest: +SKIP
        >>> Trainer(callbacks=[callback]).fit(module)  # doctest: +SKIP
    """

    def __init__(
        self, method: Method, *, part: str = "", logs: Iterable[Log] = (), **settings: Any
    ) -> None:
        super().__init__()
        self.method, self.part, self.logs, self.settings = method, part, tuple(logs), settings
        self.rewirer: Rewirer | None = None
        self._saved: dict[str, Any] | None = None
        self._hook: Any = None

    @property
    def state_key(self) -> str:
        """The key of the callback's state in checkpoints."""
        return f"{type(self).__qualname__}:{self.part}" if self.part else type(self).__qualname__

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Discard the state that an earlier run loaded."""
        self._saved = None
        self._release()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Create the rewirer, now that the optimizers exist and the module's checkpoint is loaded."""
        if trainer.world_size > 1:
            raise ValueError(
                f"this trainer has {trainer.world_size} processes, whose strategy "
                f"({type(trainer.strategy).__name__}) "
                "cannot follow layers that change their number of connections: use Trainer(devices=1), or "
                "a loop of your own with rewire.distributed.Parallel (docs/distributed.md)"
            )
        model = pl_module.get_submodule(self.part)
        optimizer = optimizer_of(model, trainer.optimizers)
        self.rewirer = make_rewirer(self.method, model, optimizer, self.settings, self.logs)
        if self._saved is not None:
            self.rewirer.load_state_dict(self._saved)
        self._hook = optimizer.register_step_post_hook(self._step)

    def _step(self, optimizer: Optimizer, *arguments: Any) -> None:
        assert self.rewirer is not None
        self.rewirer.step()

    def state_dict(self) -> dict[str, Any]:
        """The rewirer's state; Lightning puts it into checkpoints."""
        return {} if self.rewirer is None else self.rewirer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until there is a rewirer."""
        self._saved = state_dict or None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the hook from the optimizer."""
        self._release()

    def _release(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
