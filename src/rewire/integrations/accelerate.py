"""Rewiring in loops of Accelerate: steps that count, and checkpoints."""

from __future__ import annotations

from typing import Any

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(
        "rewire.integrations.accelerate needs Accelerate: pip install 'rewire[accelerate]'"
    ) from error

from rewire.integrations.common import refuse_handover
from rewire.methods.base import Rewirer
from rewire.methods.history import Rewiring


def prepare(accelerator: Accelerator, rewirer: Rewirer) -> PreparedRewirer:
    """A rewirer for a loop of Accelerate; ``save_state`` and ``load_state`` include it.

    Call its ``step()`` after ``optimizer.step()`` and before ``optimizer.zero_grad()``, as that of a
    learning-rate scheduler. Where gradients accumulate (``accelerator.accumulate``), and where a
    gradient scaler skips a step, it does nothing, as the optimizer does. One process only: for several see
    :class:`rewire.distributed.Parallel`.

    Example:
        >>> model = rewire.sparsify(MyModel(), 0.9)  # doctest: +SKIP
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
        >>> rewirer = rewire.GSE(model, optimizer, every=100, until=2000)  # doctest: +SKIP
        >>> rewirer = prepare(accelerator, rewirer)  # doctest: +SKIP
    """
    if accelerator.num_processes > 1:
        raise ValueError(
            f"this is one of {accelerator.num_processes} processes, whose gradient buckets cannot "
            "follow layers "
            "that change their number of connections: start one process, or write the loop with "
            "rewire.distributed.Parallel (docs/distributed.md) in the place of Accelerate"
        )
    prepared = PreparedRewirer(accelerator, refuse_handover(rewirer))
    accelerator.register_for_checkpointing(prepared)
    return prepared


class PreparedRewirer:
    """A rewirer that steps and is saved with an Accelerator; :func:`prepare` makes it.

    Attributes:
        rewirer: the rewirer itself, with its history.
    """

    def __init__(self, accelerator: Accelerator, rewirer: Rewirer) -> None:
        self._accelerator, self.rewirer = accelerator, rewirer

    def step(self) -> Rewiring | None:
        """Step the rewirer if the optimizer has stepped; returns the rewiring, or None."""
        done = self._accelerator.sync_gradients
        if not done or self._accelerator.optimizer_step_was_skipped:
            return None
        return self.rewirer.step()

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the rewirer."""
        return self.rewirer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.rewirer.load_state_dict(state)
