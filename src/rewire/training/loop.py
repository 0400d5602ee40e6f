"""The training loop: steps, epochs, checkpoints, and what is reported about them."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import rewire
from rewire import flops, optim, saving
from rewire.data import Loader
from rewire.methods import Rewiring
from rewire.methods.beforehand import Beforehand
from rewire.nn.sparse import SparseLayer
from rewire.training import checkpoint, methods, rounds
from rewire.training.folder import Folder, RunError
from rewire.training.interrupts import Interrupted, Interrupts
from rewire.training.interval import Interval
from rewire.training.job import Job
from rewire.training.methods import Steps
from rewire.training.processes import Processes
from rewire.training.progress import Progress
from rewire.training.spent import Spent

_SHARE = 20  # checkpoints at the end of an epoch take at most one part in so many of the time


class Trainer:
    """A run, from its first step or from a checkpoint to its end.

    All that the coming steps depend on is in :meth:`state_dict`; randomness is a function of the seed,
    the step and the process.

    Args:
        job: what to train.
        folder: where to write; None to write nothing.
        progress: receives what happens.
        interrupts: who says when to stop.
        processes: those that train together.
        every: how often to write checkpoints, besides the ends of epochs.
        through_nan: continue when the loss or the weights are not finite any more.

    Attributes:
        step: steps done.
        model, optimizer, rewirer: as they are now.
        best, best_epoch: the highest test accuracy so far, and when.
        seconds: time spent, over all sittings.
        rewiring: the last one in this sitting.
    """

    model: nn.Module
    optimizer: Optimizer
    rewirer: Steps

    def __init__(
        self,
        job: Job,
        folder: Folder | None = None,
        progress: Progress | None = None,
        interrupts: Interrupts | None = None,
        processes: Processes | None = None,
        every: Interval | None = None,
        through_nan: bool = False,
    ) -> None:
        self.job, self.schedule, self.folder = job, job.schedule, folder
        self.progress = progress or Progress()
        self.interrupts = interrupts or Interrupts()
        self.processes = processes or Processes()
        self.every = every or Interval(seconds=300)
        self.through_nan = through_nan
        config = job.config
        self.train, self.test = job.dataset.loaders(
            config.batch_size,
            seed=config.seed,
            rank=self.processes.rank,
            world=self.processes.world,
        )
        self.step = self.evaluated = self.best_epoch = 0
        self.best, self.seconds = 0.0, 0.0
        self.rewiring: Rewiring | None = None
        self.sums = torch.zeros(3, dtype=torch.float64)  # loss, hits, images of this epoch
        self._clock = self._saved = time.perf_counter()
        self._saved_step, self._saving = 0, 0.0

    # Start ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the model, or resume from the newest checkpoint."""
        if self.job.method.kind == "rounds" and self.job.ticket is None:
            raise ValueError(
                "this is one round of a sequence: resume the run in the folder that holds it"
            )
        loaded = None if self.folder is None else self.folder.load()
        if loaded is None:
            self._take(methods.start(self.job))
            position = 0
            self._save_start()
        else:
            for problem in loaded.damaged:
                self.progress.note(f"{problem}: resuming from {loaded.path.name} instead")
            assert self.folder is not None
            self.folder.check_config(self.job.config, loaded.path, loaded.state.get("config"))
            position = self._continue(loaded)
            self.progress.note(f"Resuming after step {self.step:,} of {self.schedule.steps:,}.")
        if self.folder is not None and self.processes.main:
            self.folder.open_metrics(position)
        self._clock = self._saved = time.perf_counter()
        self._saved_step = self.step

    def _continue(self, loaded: checkpoint.Loaded) -> int:
        """Take a checkpoint; how many bytes of metrics to go on from.

        Raises:
            RunError: if it is whole, but not what a run like this one has written.
        """
        try:
            self.load_state_dict(loaded.state)
            self._compare(loaded.state["machine"])
            return self._restored(loaded.state)
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise RunError(
                f"{loaded.path} does not hold the state of such a run ({type(error).__name__}: {error}): "
                "remove it to resume from an older one, or start over with --overwrite"
            ) from error

    def _restored(self, state: Mapping[str, Any]) -> int:
        """How many bytes of metrics to resume from; they are made anew if they are not as they were."""
        position: int = state["metrics"]
        if self.folder is None or not self.processes.main:
            return position
        known = [_rewiring(r) for r in getattr(self.rewirer, "history", ())]
        if state["last"] is not None:
            known.append(state["last"])
        if self.folder.restore(position, state.get("metrics_sha256"), known):
            return position
        self.progress.note(
            f"{self.folder.metrics} is not as it was when {self.folder.checkpoints} was written: it was "
            "made anew from what can be read and from the checkpoint; lines of epochs may be missing"
        )
        return self.folder.metrics.stat().st_size

    def _save_start(self) -> None:
        """Write the first connections, for pictures of what becomes of them."""
        sparse = any(isinstance(module, SparseLayer) for module in self.model.modules())
        if sparse and self.folder is not None and self.processes.main:
            saving.save_connections(self.model, self.folder.start, notes=self.job.notes())

    def _take(self, model: nn.Module) -> None:
        self.model = model.train()
        self.optimizer = self.job.optimizer(model)
        self.rewirer = methods.rewirer(self.job, model, self.optimizer)
        self.processes.start(model)
        self.density = rewire.summary(model, show=False).density
        self.spent = Spent(self.job, model)

    # The loop -------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end and return its summary.

        Raises:
            Interrupted: if a signal came; a checkpoint is written.
        """
        if self.job.config.rounds:
            return rounds.run(self)
        try:
            self.begin()
            self.progress.begin(self)
            while self.step < self.schedule.steps:
                self._epoch()
                self._evaluate()
            self._evaluate()  # if it was interrupted in the last one
            return self._finish()
        finally:
            self.progress.close()

    def _epoch(self) -> None:
        """The rest of an epoch, or of the run."""
        ended = self.evaluated < self.step and self.step % self.schedule.steps_per_epoch == 0
        if ended and self.train.batch == 0:  # it was interrupted in the evaluation
            return
        self.model.train()
        for x, y in self.train:
            self._step(x.to(self.job.device), y.to(self.job.device))
            self.progress.step(self)
            self._pause()
            if self.step == self.schedule.steps:
                return

    def _step(self, x: Tensor, y: Tensor) -> None:
        self._seed()
        rate = self.schedule.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        rewiring = self._rewire_before()
        self.optimizer.zero_grad()
        if rewirer := self._waiting:  # the rewiring takes the place of the step
            outputs: list[Tensor] = []
            rewiring = rewirer.rewire(self._losses([(x, y)], outputs))
            output = outputs[0]
            with self.job.autocast():
                loss = self._loss(output, y)
        else:
            output, loss = self._forward(x, y)
            loss.backward()
            self.optimizer.step()
        self.rewiring = self.rewirer.step() or rewiring
        self.step += 1
        self.spent.step(self.step, self.rewiring)
        with torch.no_grad():
            self.sums += _counts(loss, output, y)
        if self.rewiring is not None:
            self.density = self.rewiring.active / self.rewiring.possible
            self._tell(_rewiring(self.rewiring))

    def _loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, label_smoothing=self.job.config.label_smoothing)

    def _forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The model's output and its loss; raises if that is not finite."""
        with self.job.autocast():
            output = self.model(x)
            loss = self._loss(output, y)
        if not self.through_nan and not math.isfinite(loss.item()):
            raise Diverged(self._diverged(x, loss))
        return output, loss

    @property
    def _waiting(self) -> Beforehand | None:
        """The rewirer, if it is to rewire before the coming step."""
        rewirer = self.rewirer
        return rewirer if isinstance(rewirer, Beforehand) and rewirer.waits else None

    def _rewire_before(self) -> Rewiring | None:
        """Rewire before the step, on other batches, if it is time and there are such."""
        rewirer = self._waiting
        if rewirer is None or self.job.config.instead_of_step:
            return None
        where = self.processes.rank, self.processes.world
        rewiring = rewirer.rewire(self._losses(self.job.growth_batches(self.step, *where)))
        self._seed()
        return rewiring

    def _losses(
        self, batches: Iterable[tuple[Tensor, Tensor]], outputs: list[Tensor] | None = None
    ) -> Iterator[Tensor]:
        """Of the batches that a rewiring looks at; adds the model's outputs to ``outputs``."""
        for x, y in batches:
            output, loss = self._forward(x, y)
            if outputs is not None:
                outputs.append(output.detach())
            yield loss

    def _diverged(self, x: Tensor, loss: Tensor) -> str:
        """What to tell of a loss that is not finite; the step's update is not done."""
        with self.job.autocast():
            where = first_not_finite(self.model, x)
        return f"the loss of step {self.step + 1:,} is {loss.item()}: {where}. {self._advice}"

    @property
    def _advice(self) -> str:
        """What to do about a run that diverges."""
        advice = "Lower the learning rate, or continue with --through-nan."
        if self.folder is None or not checkpoint.found(self.folder.checkpoints):
            return advice
        return f"{advice} The last checkpoint is kept in {self.folder.checkpoints}."

    def _check_weights(self) -> None:
        """Raise if the last update has left weights that are not finite; its loss was."""
        name = None if self.through_nan else not_finite(self.model)
        if name is not None:
            raise Diverged(
                f"after the update of step {self.step:,} {name} is not finite any more. {self._advice}"
            )

    def _seed(self) -> None:
        """Set torch's global generators, for dropout and the like."""
        key = f"{self.job.config.seed}:{self.step}:{self.processes.rank}".encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "little")
        torch.default_generator.manual_seed(seed)
        if self.job.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _evaluate(self) -> None:
        """Test after an epoch, and write its line."""
        if self.evaluated == self.step:
            return
        self.processes.sync()
        loss, accuracy = evaluate(self.model, self.test, self.job, self._check, self.processes)
        sums = self.processes.total(self.sums).tolist()
        images = max(1.0, sums[2])
        epoch = -(-self.step // self.schedule.steps_per_epoch)
        if accuracy > self.best or self.evaluated == 0:
            self.best, self.best_epoch = accuracy, epoch
        self._tick()
        self._tell(
            {
                "event": "epoch",
                "epoch": epoch,
                "step": self.step,
                "train_loss": sums[0] / images,
                "train_accuracy": sums[1] / images,
                "test_loss": loss,
                "test_accuracy": accuracy,
                "best": self.best,
                "lr": self.schedule.rate(self.step - 1),
                "density": self.density,
                "seconds": round(self.seconds, 3),
            }
        )
        self.evaluated = self.step
        self.sums.zero_()
        if self.folder is not None and self.processes.main:
            self.folder.flush()
        if time.perf_counter() - self._saved >= _SHARE * self._saving:
            self.save()

    def _finish(self) -> dict[str, Any]:
        self._check_weights()
        counted = self.spent.forward
        held = rewire.summary(self.model, show=False)
        last = self.last
        summary = {
            "event": "end",
            "accuracy": last["test_accuracy"],
            "loss": last["test_loss"],
            "best": self.best,
            "best_epoch": self.best_epoch,
            "steps": self.step,
            "connections": held.connections or sum(row.connections for row in held.layers),
            "weights": sum(
                row.weights for row in held.layers if row.sparse or not held.connections
            ),
            "flops": counted.sparse,
            "dense_flops": counted.dense,
            "training_flops": self.spent.mean(self.step),
            "dense_training_flops": flops.dense(counted),
            "seconds": round(self.seconds, 3),
        }
        self._tell(summary)
        if self.folder is not None and self.processes.main:
            self.folder.flush(sync=True)
            saving.save(self.model, self.folder.model, notes=self.job.notes())
        return summary

    # Telling and saving ---------------------------------------------------------------------------

    def _tell(self, entry: dict[str, Any]) -> None:
        if entry["event"] == "epoch":
            self.last = entry
        if self.folder is not None and self.processes.main:
            self.folder.write(entry)
        self.progress.line(entry)

    def _tick(self) -> None:
        now = time.perf_counter()
        self.seconds += now - self._clock
        self._clock = now

    def _pause(self) -> None:
        """Between two steps: stop if asked to, write a checkpoint if it is time."""
        self._check()
        steps, seconds = self.step - self._saved_step, time.perf_counter() - self._saved
        if self.every.over(steps, seconds):
            self.save()

    def _check(self) -> None:
        received = self.interrupts.received
        if self.processes.any(received is not None):
            self.save()
            raise Interrupted(received or 15, self.step)

    def save(self) -> None:
        """Write a checkpoint, if there is something new.

        Raises:
            Diverged: if weights are not finite any more: the last checkpoint is better than that.
        """
        self._check_weights()
        begun = time.perf_counter()
        if self.folder is not None and self.processes.main:
            written: dict[str, Any] = {"metrics": self.folder.flush(sync=True)}
            written |= {"metrics_sha256": self.folder.digest(), "config": asdict(self.job.config)}
            self.folder.save(self.step, self.state_dict() | written)
        self._saved = time.perf_counter()
        self._saved_step, self._saving = self.step, self._saved - begun

    def state_dict(self) -> dict[str, Any]:
        """All that the coming steps depend on, and what has been so far."""
        self._tick()
        return {
            "step": self.step,
            "evaluated": self.evaluated,
            "sums": self.sums.clone(),
            "last": getattr(self, "last", None),
            "best": self.best,
            "best_epoch": self.best_epoch,
            "seconds": self.seconds,
            "data": self.train.state_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rewirer": self.rewirer.state_dict(),
            "spent": self.spent.total,
            "machine": machine(self.job.device, self.processes.world),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name in ("step", "evaluated", "best", "best_epoch", "seconds"):
            setattr(self, name, state[name])
        self.sums = state["sums"].clone()
        if state["last"] is not None:
            self.last = state["last"]
        self.train.load_state_dict(state["data"])
        model = shell(self.job, state)
        self._take(model)
        self.optimizer.load_state_dict(state["optimizer"])
        optim.reshape_old_state(self.optimizer, self.model.parameters())
        self.rewirer.load_state_dict(state["rewirer"])
        self.spent = Spent(self.job, self.model)
        self.spent.total = state.get("spent", 0.0)
        if (
            "spent" not in state
        ):  # from before it was summed up: as if connections had been where they are
            for step in range(1, self.step + 1):
                self.spent.step(step, None)

    def _compare(self, then: Mapping[str, Any]) -> None:
        now = machine(self.job.device, self.processes.world)
        for name, value in then.items():
            if name in now and now[name] != value:
                self.progress.note(
                    f"{name} was {value} so far and is {now[name]} now: the result may differ slightly "
                    "from that of an uninterrupted run"
                )


class Diverged(RuntimeError):
    """The loss is no finite number any more."""


def not_finite(model: nn.Module) -> str | None:
    """The name of the first parameter with a number that is not finite."""
    parameters = model.named_parameters()
    return next((name for name, p in parameters if not bool(p.detach().isfinite().all())), None)


def first_not_finite(model: nn.Module, x: Tensor) -> str:
    """Where numbers stop being finite: the first such parameter, else the first such output of a layer."""
    if (name := not_finite(model)) is not None:
        return f"{name} is not finite any more"
    found: list[str] = []

    def look(name: str, output: Any) -> None:
        if isinstance(output, Tensor) and not bool(output.isfinite().all()):
            found.append(name)

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: look(name, output))
        for name, module in model.named_modules()
        if not any(module.children())
    ]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return f"the first output that is not finite is that of {found[0]}" if found else "it overflows"


def shell(job: Job, state: Mapping[str, Any]) -> nn.Module:
    """The model in the state of a Trainer."""
    model = methods.shell(job, state)
    model.load_state_dict(state["model"])
    return model


def evaluate(
    model: nn.Module,
    loader: Loader,
    job: Job,
    check: Any = lambda: None,
    processes: Processes | None = None,
) -> tuple[float, float]:
    """Mean loss and accuracy over all batches, in the run's precision; ``check`` is called between them."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            y = y.to(job.device)
            with job.autocast():
                logits = model(x.to(job.device))
                loss = F.cross_entropy(logits, y)
            sums += _counts(loss, logits, y)
            check()
    total, hits, images = (processes or Processes()).total(sums).tolist()
    return total / images, hits / images


def _counts(loss: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Loss, hits and images of a batch."""
    hits = (logits.argmax(1) == labels).sum()
    images = torch.tensor(len(labels), device=loss.device)
    return torch.stack([loss.double() * len(labels), hits.double(), images.double()]).cpu()


def _rewiring(r: Rewiring) -> dict[str, Any]:
    """Its line; layers are in it if connections moved between them."""
    moved = any(layer.grown != layer.pruned for layer in r.layers.values())
    layers = {"layers": {name: layer.active for name, layer in r.layers.items()}} if moved else {}
    return {
        "event": "rewiring",
        "step": r.step,
        "fraction": r.fraction,
        "active": r.active,
        "grown": r.grown,
        "pruned": r.pruned,
        "subset": r.subset,
        "turnover": r.turnover,
        "explored": r.explored,
        **layers,
    }


def machine(device: torch.device, processes: int) -> dict[str, Any]:
    """What results depend on in their last bits."""
    return {
        "rewire": rewire.__version__,
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "processes": processes,
    }
