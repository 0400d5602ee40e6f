"""Loggers of rewirings: functions of a :class:`rewire.Rewiring`, for ``rewirer.callbacks``.

None of them imports its tool: each takes the run or writer that you have made already. A logger of your
own is any function; :func:`scalars` has the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rewire.methods.history import Rewiring

Log = Callable[[Rewiring], object]


def scalars(
    rewiring: Rewiring, prefix: str = "rewire/", *, layers: bool = True
) -> dict[str, float]:
    """The numbers of a rewiring by name, for any logger.

    Args:
        rewiring: what ``rewirer.step()`` returned or a callback received.
        prefix: of all names.
        layers: include those of each layer, such as ``rewire/turnover/fc1``.
    """
    found: dict[str, float] = {
        "connections": rewiring.active,
        "grown": rewiring.grown,
        "pruned": rewiring.pruned,
        "fraction": rewiring.fraction,
        "turnover": rewiring.turnover,
        "explored": rewiring.explored,
    }
    for name, layer in rewiring.layers.items() if layers else ():
        found[f"connections/{name}"] = layer.active
        found[f"turnover/{name}"] = layer.turnover
        found[f"explored/{name}"] = layer.explored
    return {prefix + name: float(value) for name, value in found.items()}


def to_tensorboard(writer: Any, *, layers: bool = True) -> Log:
    """Log to a ``torch.utils.tensorboard.SummaryWriter``.

    Example:
        >>> rewirer.callbacks.append(to_tensorboard(SummaryWriter("runs")))  # doctest: +SKIP
    """

    def log(rewiring: Rewiring) -> None:
        for name, value in scalars(rewiring, layers=layers).items():
            writer.add_scalar(name, value, rewiring.step)

    return log


def to_wandb(run: Any, *, layers: bool = True) -> Log:
    """Log to a Weights & Biases run, what ``wandb.init()`` returns.

    They have an axis of their own, ``rewire/step``: the steps of a run count calls of ``run.log``.
    """
    run.define_metric("rewire/step")
    run.define_metric("rewire/*", step_metric="rewire/step")

    def log(rewiring: Rewiring) -> None:
        run.log({**scalars(rewiring, layers=layers), "rewire/step": rewiring.step})

    return log


def to_mlflow(client: Any, run_id: str, *, layers: bool = True) -> Log:
    """Log to an MLflow run.

    Args:
        client: a ``mlflow.MlflowClient``, or the ``experiment`` of Lightning's ``MLFlowLogger``.
        run_id: ``mlflow.active_run().info.run_id``, or the ``run_id`` of that logger.
        layers: include the numbers of each layer.
    """

    def log(rewiring: Rewiring) -> None:
        for name, value in scalars(rewiring, layers=layers).items():
            client.log_metric(run_id, name, value, step=rewiring.step)

    return log
