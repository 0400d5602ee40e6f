"""Data-parallel training of sparse models over ``torch.distributed``.

Two lines make a loop parallel; the rest of it stays, and so does a run of one process::

    rewire.distributed.setup()  # from torchrun's environment
    parallel = rewire.distributed.Parallel(model)  # after rewire.sparsify

Rewirings change the length of a layer's values, which torch's DDP buckets cannot follow, so gradients
are averaged here. gloo on the CPU; nccl on GPUs is untested.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rewire import communication
from rewire.communication import END, Alone, Group, answers, finish
from rewire.nn.layer import ConnectedLayer
from rewire.nn.sparse import SparseLayer

TIMEOUT = 180.0  # seconds, unless the environment says other ones in REWIRE_TIMEOUT
PATIENCE = 24 * 3600.0  # seconds, for what only one process does, such as a download

# Processes ----------------------------------------------------------------------------------------


def setup(
    device: torch.device | str | None = None, *, timeout: float | None = None
) -> torch.device:
    """Join the processes that ``torchrun`` has started; without it, or if done already, nothing.

    Args:
        device: what to train on; by default this process's GPU if there are any, else the CPU.
        timeout: seconds after which waiting for another process is an error; by default those of the
            environment variable ``REWIRE_TIMEOUT``, or 180.

    Returns:
        The device to train on: ``cpu``, or ``cuda`` with the number of this process on its machine.
    """
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if kind.type == "cuda" and kind.index is None:
        kind = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(kind)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        backend = "nccl" if kind.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_timeout(timeout))
    return kind


def _timeout(seconds: float | None) -> timedelta:
    if seconds is None:
        text = os.environ.get("REWIRE_TIMEOUT", str(TIMEOUT))
        try:
            seconds = float(text)
        except ValueError:
            raise ValueError(f"REWIRE_TIMEOUT must be a number of seconds, got {text!r}") from None
    if not 0 < seconds < 1e9:
        raise ValueError(f"the timeout must be a number of seconds above 0, got {seconds}")
    return timedelta(seconds=seconds)


def teardown() -> None:
    """Leave the other processes, at the end of a program."""
    if _initialized():
        dist.destroy_process_group()


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """The rank of this process; 0 if there is only one."""
    return dist.get_rank() if _initialized() else 0


def world() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _initialized() else 1


def is_main() -> bool:
    """Whether this is process 0, which prints and writes files."""
    return rank() == 0


def barrier(*, patience: float | None = None) -> None:
    """Wait for the other processes, for ``patience`` seconds instead of the usual timeout."""
    if not _initialized():
        return
    if patience is not None and dist.get_backend() == "gloo":
        with answers():
            dist.monitored_barrier(timeout=timedelta(seconds=patience))
    else:
        finish(dist.barrier(async_op=True))


def total(*numbers: float | Tensor) -> tuple[float, ...]:
    """Each number, summed over processes, in float64.

    Example:
        >>> loss, correct, samples = total(12.5, 90, 100)
        >>> loss / samples, correct / samples
        (0.125, 0.9)
    """
    values = [float(number) for number in numbers]
    if world() == 1:
        return tuple(values)
    assert dist.group.WORLD is not None
    (sums,) = Group(dist.group.WORLD).sum(torch.tensor(values, dtype=torch.float64))
    return tuple(sums.tolist())


def average(*numbers: float | Tensor) -> tuple[float, ...]:
    """The mean of each number over processes, in float64."""
    return tuple(number / world() for number in total(*numbers))


# Gradients ----------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """What one process has sent to be averaged.

    Attributes:
        averages: how often gradients were averaged.
        gradients: bytes of them.
        dense: bytes that the gradients of the same model with dense layers would have had.
        other: bytes of all else: unit statistics, gradients at S, checks.
    """

    averages: int = 0
    gradients: int = 0
    dense: int = 0
    other: int = 0

    def __str__(self) -> str:
        return (
            f"{self.gradients / 1e6:.2f} MB of gradients in {self.averages} averages, "
            f"{self.gradients / max(1, self.dense):.2%} of dense; {self.other / 1e6:.2f} MB for rewiring"
        )


class _Bucket:
    """Parameters whose gradients travel in one message."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices
        self.clear()

    def clear(self) -> None:
        self.fired = 0
        self.sent: list[int] = []
        self.flat: Tensor | None = None
        self.work: dist.Work | None = None


class Parallel:
    """Makes a model one of several equal ones that train on shares of each batch.

    Parameters, buffers and connections become those of rank 0. From then on the gradients of all
    processes are averaged in every backward pass: messages leave as soon as their gradients are there, and
    when ``backward()`` returns, all ``.grad`` are averages, also where a process had none. Call the model
    and the optimizer as before. Rewirers of the model see the whole batch: they take their statistics
    and gradients over all processes and check that all come to the same connections.

    Every process must run the same number of backward passes. Each counts the same in the average
    whatever its number of samples, as in torch's DDP. For a single process nothing changes.

    Args:
        model: after :func:`rewire.sparsify`, the same on all processes but for what it holds. Not in a
            DistributedDataParallel.
        group: the processes that share the model; all by default.
        bucket_bytes: about how much gradient travels in one message; by default an eighth of all,
            but between 64 KB and 1 MB: the first leave while most of the backward pass is still to come.
        timeout: seconds after which waiting for another process is an error, as for :func:`setup`.

    Attributes:
        rank, world: of this process, and how many there are.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> parallel = Parallel(model)  # in one process, or under torchrun
        >>> parallel.world
        1
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int | None = None,
        timeout: float | None = None,
    ) -> None:
        communication.refuse_wrapped(model)
        self._model = weakref.ref(model)
        self._group, self._gradients = _groups(group, timeout)
        self.rank, self.world = self._group.rank, self._group.world
        named = dict(model.named_parameters())
        self._parameters = list(named.values())
        self._names = list(named)
        self._layers = [m for m in model.modules() if isinstance(m, ConnectedLayer)]
        self._traffic = Traffic()
        self._syncing, self._running, self._next = True, False, 0
        self._touched: set[int] = set()  # parameters with gradients that are not averaged
        if self.world > 1:
            _check_alike(model, self._group)
            _copy_topology(self._layers, self._group)
            self._copy([*self._parameters, *_buffers(model)])
        communication.join(model, self._group)
        self._buckets = self._plan(bucket_bytes)
        self._bucket_of = {i: b for b in self._buckets for i in b.indices}
        if self.world > 1:
            for index, parameter in enumerate(self._parameters):
                _hook(parameter, self._hook_of(index))
            guard = register_optimizer_step_pre_hook(_guard(weakref.ref(self)))
            weakref.finalize(self, guard.remove)

    @property
    def traffic(self) -> Traffic:
        """The bytes sent so far."""
        return Traffic(
            self._traffic.averages,
            self._traffic.gradients,
            self._traffic.dense,
            self._group.traffic,
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only accumulate; the next one outside, or :meth:`average`, averages
        the sums. An optimizer's step before that raises."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def average(self) -> None:
        """Average what backward passes in :meth:`no_sync` have accumulated, on all processes."""
        if self.world > 1:
            self._finish()

    def sync_buffers(self) -> None:
        """Give all processes the buffers of rank 0 (running statistics of batch norms), which were
        measured on its share of the batches; to be called before all of them evaluate."""
        model = self._model()
        if self.world > 1 and model is not None:
            self._copy(_buffers(model))

    # Sending ----------------------------------------------------------------------------------

    def _plan(self, limit: int | None) -> list[_Bucket]:
        """Neighbours of one type and device, last layers first: their gradients are there first."""
        if limit is None:
            total = sum(p.numel() * p.element_size() for p in self._parameters)
            limit = min(max(total // 8, 1 << 16), 1 << 20)
        buckets: list[_Bucket] = []
        size, kind = 0, None
        for index in reversed(range(len(self._parameters))):
            parameter = self._parameters[index]
            mine = (parameter.dtype, parameter.device)
            if not buckets or kind != mine or size >= limit:
                buckets.append(_Bucket([]))
                size, kind = 0, mine
            buckets[-1].indices.append(index)
            size += parameter.numel() * parameter.element_size()
        return buckets

    def _hook_of(self, index: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ValueError(
                    f"{self._names[index]} has a gradient of layout {parameter.grad.layout}, which is not "
                    "averaged over processes: ask for dense gradients (sparse=False)"
                )
            self._touched.add(index)
            if self._syncing:
                self._arrived(index)

        return hook

    def _arrived(self, index: int) -> None:
        if not self._running:
            self._running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        bucket = self._bucket_of[index]
        if bucket.work is not None:
            raise RuntimeError(
                f"{self._names[index]} got a second gradient in one backward pass after the first was "
                "sent: checkpoint activations with use_reentrant=False"
            )
        bucket.fired += 1
        while self._next < len(self._buckets):  # in order, so that it is the same on each process
            bucket = self._buckets[self._next]
            if bucket.fired < sum(self._parameters[i].requires_grad for i in bucket.indices):
                break
            self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        """The gradients, and for each whether it is new here."""
        self._next += 1
        bucket.sent = [i for i in bucket.indices if self._parameters[i].requires_grad]
        if not bucket.sent:
            return
        parameters = [self._parameters[i] for i in bucket.sent]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        new = [
            float(i in self._touched and p.grad is not None)
            for i, p in zip(bucket.sent, parameters, strict=True)
        ]
        flags = grads[0].new_tensor(new)
        bucket.flat = torch.cat([*(grad.reshape(-1) for grad in grads), flags])
        bucket.work = dist.all_reduce(bucket.flat, group=self._gradients, async_op=True)
        self._traffic.gradients += bucket.flat.numel() * bucket.flat.element_size()

    def _finish(self) -> None:
        """Send what is left, wait for all, and put the averages into place."""
        try:
            if any(layer.probe is not None for layer in self._layers):
                self._group.meet(END, 0)
            for bucket in self._buckets[self._next :]:
                self._send(bucket)
            for bucket in self._buckets:
                self._receive(bucket)
            self._touched.clear()
            self._count()
        finally:
            for bucket in self._buckets:
                bucket.clear()
            self._running, self._next = False, 0

    @torch.no_grad()
    def _receive(self, bucket: _Bucket) -> None:
        if bucket.work is None or bucket.flat is None:
            return
        try:
            finish(bucket.work)
        except (TimeoutError, ConnectionError) as error:
            raise type(error)(
                f"averaging gradients over {self.world} processes failed on rank {self.rank}: another "
                f"process has ended, hangs, or runs another number of backward passes. {error}"
            ) from error
        parameters = [self._parameters[i] for i in bucket.sent]
        *parts, flags = bucket.flat.split([*(p.numel() for p in parameters), len(parameters)])
        for parameter, part, new in zip(parameters, parts, flags.tolist(), strict=True):
            if new and parameter.grad is None:
                parameter.grad = part.div(self.world).view_as(parameter)
            elif new:
                parameter.grad.copy_(part.div_(self.world).view_as(parameter))  # type: ignore[union-attr]

    def _count(self) -> None:
        sizes = [(p.numel(), p.element_size()) for p in self._parameters if p.requires_grad]
        for layer in self._layers:
            weights = layer.parameter
            if weights.requires_grad:
                missing = layer.domain.size - weights.numel()
                sizes.append((missing, weights.element_size()))
        self._traffic.averages += 1
        self._traffic.dense += sum(count * size for count, size in sizes)

    def _copy(self, tensors: list[Tensor]) -> None:
        """Those of rank 0."""
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(self._group.broadcast(tensor, 0))

    def _check_step(self, optimizer: Optimizer) -> None:
        """Nothing may be done with gradients that are not averaged."""
        if not self._touched:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        open_ = [i for i in self._touched if self._parameters[i].grad is not None]
        names = [self._names[i] for i in sorted(open_) if id(self._parameters[i]) in held]
        if names:
            raise RuntimeError(
                f"the gradients of {', '.join(names[:3])}{', ...' * (len(names) > 3)} are not averaged "
                "over processes: run the last backward() before a step outside no_sync(), or call "
                "average() (or zero_grad(), if that backward() failed)"
            )


def _groups(group: dist.ProcessGroup | None, timeout: float | None) -> tuple[Alone, Any]:
    """Two of them, so that what layers say in a backward pass does not mix with gradients."""
    if not _initialized() or dist.get_world_size(group) == 1:
        return Alone(), None
    ranks = None if group is None else dist.get_process_group_ranks(group)
    two = [
        dist.new_group(
            ranks,
            timeout=_timeout(timeout),
            backend=dist.get_backend(group),
            use_local_synchronization=ranks is not None,
        )
        for _ in range(2)
    ]
    return Group(two[0]), two[1]


def _check_alike(model: nn.Module, group: Alone) -> None:
    values = {id(m.values) for m in model.modules() if isinstance(m, SparseLayer)}

    def about(tensor: Tensor) -> str:
        shape = "values" if id(tensor) in values else str(tuple(tensor.shape))
        return f"{shape} {tensor.dtype} {tensor.requires_grad}"

    tensors = [*model.named_parameters(), *((n, m) for n, m in model.named_buffers())]
    sparse = {n: m for n, m in model.named_modules() if isinstance(m, SparseLayer)}
    skipped = {id(buffer) for layer in sparse.values() for buffer in layer.buffers()}
    texts = {name: f"{name} {about(t)}" for name, t in tensors if id(t) not in skipped}
    texts |= {f"layer {n}": f"{n} {m.domain} {m.taps}" for n, m in sparse.items()}
    hashes = {name: communication.text_hash(text) for name, text in texts.items()}
    group.agree(hashes, "the processes have different models")


def _copy_topology(layers: list[ConnectedLayer], group: Alone) -> None:
    """Rank 0's connections; the values keep their length's room only. Masks are copied as buffers are."""
    for layer in layers:
        if not isinstance(layer, SparseLayer):
            continue
        count = group.gather([layer.values.numel()])[0][0]
        indptr = group.broadcast(layer.indptr, 0)
        mine = layer.indices if group.rank == 0 else layer.indices.new_empty(count)
        indices = group.broadcast(mine, 0)
        if group.rank != 0:
            connections = layer.domain.of(indptr, indices)
            layer.set_connections(connections, layer.values.new_zeros(count))


def _buffers(model: nn.Module) -> list[Tensor]:
    """All but the connections of sparse layers."""
    layers = (module for module in model.modules() if isinstance(module, SparseLayer))
    skipped = {id(buffer) for layer in layers for buffer in layer.buffers()}
    return [buffer for buffer in model.buffers() if id(buffer) not in skipped]


def _hook(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Also of a parameter that is frozen now."""
    wanted = parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(wanted)


def _guard(parallel: weakref.ref[Parallel]) -> Callable[[Optimizer, Any, Any], None]:
    def guard(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        alive = parallel()
        if alive is not None:
            alive._check_step(optimizer)

    return guard
