"""What the processes of a data-parallel run say to each other, and the single process that says nothing.

Methods talk to :class:`Alone`; in a model that :class:`rewire.distributed.Parallel` has taken, a
:class:`Group` stands in its place.
"""

from __future__ import annotations

import gc
import hashlib
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rewire.ops.sharding import fsdp_classes, has_fsdp, is_sharded

END = -1  # the place of a process whose backward pass is over


class Alone:
    """One process: nothing to exchange.

    Attributes:
        rank, world: this process and the number of them.
        traffic: bytes of the messages so far.
    """

    rank = 0
    world = 1
    traffic = 0

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every process; as many on each."""
        return [list(numbers)]

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each tensor, summed over processes; shapes and types are the same on each."""
        return tensors

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of process ``source``; shapes and types are the same on each."""
        return tensor

    def meet(self, place: int, samples: int) -> list[int]:
        """How many samples each process has; raises unless all are at the same place, which is the
        number of a layer or END. So processes that run different layers do not wait for each other."""
        rows = self.gather([place, samples])
        places = [row[0] for row in rows]
        if len({*places}) > 1:
            where = ", ".join("done" if p == END else f"at sparse layer {p}" for p in places)
            raise RuntimeError(
                "the processes went different ways in the backward pass of a step that ends with a "
                f"rewiring (ranks 0 to {self.world - 1} are {where}): run the same sparse layers in the "
                "same order on each, or draw uniformly"
            )
        return [row[1] for row in rows]

    def agree(self, hashes: Mapping[str, int], problem: str) -> None:
        """Raise, on every process, if they have not the same hashes by name."""
        if self.world == 1:
            return
        sizes = [row[0] for row in self.gather([len(hashes)])]
        if len({*sizes}) > 1:
            raise RuntimeError(f"{problem}: there are {', '.join(map(str, sizes))} on the ranks")
        rows = self.gather(list(hashes.values()))
        for i, name in enumerate(hashes):
            others = [rank for rank, row in enumerate(rows) if row[i] != rows[0][i]]
            if others:
                ranks = ", ".join(map(str, others))
                raise RuntimeError(f"{problem}: {name} differs on rank {ranks} from rank 0")


_finished: deque[Any] = deque(maxlen=4)
# Which of its messages gloo has for a timeout depends on which of its threads is first.
_TIMEOUT = re.compile("timed out|timeout", re.IGNORECASE)


@contextmanager
def answers() -> Iterator[None]:
    """Let errors of waiting for another process say so.

    Raises:
        TimeoutError: if another process does not answer.
        ConnectionError: if there is none any more.
    """
    try:
        yield
    except RuntimeError as error:
        if _TIMEOUT.search(str(error)):
            raise TimeoutError(
                "another process has not answered in time: it hangs, was stopped, or is at work on "
                "something else. If it only takes that long, give more seconds (timeout=, or "
                f"REWIRE_TIMEOUT in the environment). {error}"
            ) from error
        raise ConnectionError(
            f"another process has ended, or sent something else: {error}"
        ) from error


def finish(message: Any) -> None:
    """Wait for a message that was sent with ``async_op=True``, and keep it for a while.

    Whoever drops it last frees its tensors. A thread of gloo that does so while the interpreter ends
    cannot have the interpreter's lock any more, and aborts the process.
    """
    with answers():
        message.wait()
    _finished.append(message)


class Group(Alone):
    """One of several processes, over ``torch.distributed``; nccl is untested."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        cuda = dist.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else None

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        rows = [torch.empty_like(mine) for _ in range(self.world)]
        finish(dist.all_gather(rows, mine, group=self.group, async_op=True))
        self._count(mine)
        return [row.tolist() for row in rows]

    def sum(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = list(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # one message for each
            mine = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            flat = torch.cat([self._here(tensors[i]).flatten() for i in mine])
            finish(dist.all_reduce(flat, group=self.group, async_op=True))
            self._count(flat)
            parts = flat.split([tensors[i].numel() for i in mine])
            for i, part in zip(mine, parts, strict=True):
                results[i] = part.view(tensors[i].shape).to(tensors[i].device)
        return tuple(results)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        sent = self._here(tensor.detach()).contiguous().clone()
        finish(dist.broadcast(sent, group_src=source, group=self.group, async_op=True))
        self._count(sent)
        return sent.to(tensor.device)

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor if self.device is None else tensor.to(self.device)

    def _count(self, sent: Tensor) -> None:
        self.traffic += sent.numel() * sent.element_size()


_groups: WeakKeyDictionary[nn.Module, Alone] = WeakKeyDictionary()


def join(model: nn.Module, group: Alone) -> None:
    """Let everything that works on this model or its parts talk to ``group``."""
    if any(module in _groups for module in model.modules()):
        raise RuntimeError("the model, or a part of it, has been made parallel already")
    for module in model.modules():
        _groups[module] = group


def group_of(layers: Iterable[nn.Module]) -> Alone:
    """Whom these layers share their training with."""
    groups = {id(group): group for group in map(_groups.get, layers)}
    if len(groups) > 1:
        raise RuntimeError(
            "some layers of the model are parallel and others are not: give the whole model to "
            "rewire.distributed.Parallel, or each rewirer a model of its own"
        )
    (group,) = groups.values()
    if group is not None:
        return group
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"this is one of {dist.get_world_size()} processes, but the model is not parallel: its "
            "gradients are not averaged and the processes' connections would drift apart. Call "
            "rewire.distributed.Parallel(model) after rewire.sparsify (with a group of this process "
            "alone, if each trains a model of its own)"
        )
    return Alone()


def refuse_wrapped(model: nn.Module) -> None:
    """Raise a ValueError if torch's DDP or FSDP averages gradients of this model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    wrapper = _wrapper(model)
    if wrapper is not None:
        raise ValueError(
            f"the model is wrapped in torch's {wrapper}, whose gradient buckets and shards cannot follow "
            "layers that change their number of connections; take the wrapper off and call "
            "rewire.distributed.Parallel(model) instead"
        )


def _wrapper(model: nn.Module) -> str | None:
    """What torch has wrapped the model, a part of it or what holds it in, if anything."""
    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel"
    if has_fsdp(model) or any(map(is_sharded, model.parameters())):
        return "FullyShardedDataParallel"
    if not dist.is_available() or not dist.is_initialized():
        return None
    if _holder(model) is not None:  # or was it only not yet collected?
        gc.collect()
    return _holder(model)


def _holder(model: nn.Module) -> str | None:
    """The same, if it is a module that holds the model's parameters."""
    mine = {id(parameter) for parameter in model.parameters()}
    wanted = (DistributedDataParallel, *fsdp_classes())
    kinds: dict[type, bool] = {}  # isinstance() is slow for a class with a metaclass
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in kinds:
            kinds[kind] = any(base in kind.__mro__ for base in wanted)
        if kinds[kind] and any(id(parameter) in mine for parameter in _held_by(thing)):
            ddp = DistributedDataParallel in kind.__mro__
            return "DistributedDataParallel" if ddp else "FullyShardedDataParallel"
    return None


def _held_by(wrapper: nn.Module) -> Iterator[Tensor]:
    """Its parameters; none of one whose constructor has failed, and which still lies around."""
    for module in nn.Module.modules(wrapper) if "_modules" in vars(wrapper) else ():
        yield from (p for p in vars(module)["_parameters"].values() if p is not None)


def fingerprint(*tensors: Tensor) -> int:
    """A 63-bit hash of the tensors' contents."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        state.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return int.from_bytes(state.digest(), "little") >> 1


def text_hash(text: str) -> int:
    """A 63-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
