"""When gradients leave: how much of them travels while the backward pass still computes.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m rewire.bench.overlap

Trains VGG-16 in several processes: with its layers one by one, with the engine as one function of autograd,
and with the chain of functions that it is where processes cooperate (:mod:`rewire.engine.links`). What is
shown are shares of the time from the start of a backward pass to its last gradient, medians over steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import rewire
from rewire import distributed
from rewire.bench.step import WORKLOADS
from rewire.engine import links, use_engine
from rewire.engine.planned import Backward

MODES = ("layer by layer", "one function", "chain")


@dataclass
class Pass:
    """One backward pass, in seconds since its start.

    Attributes:
        sent: time and bytes of each message with gradients.
        segments: when the engine began segments of backward steps.
        end: when the last gradient was there.
    """

    sent: list[tuple[float, int]] = field(default_factory=list)
    segments: list[float] = field(default_factory=list)
    end: float = 0.0


@contextmanager
def recorded(parameters: list[nn.Parameter]) -> Iterator[Pass]:
    """What happens in a backward pass inside, which is the only one."""
    found, start = Pass(), perf_counter()
    send, take = dist.all_reduce, Backward.take

    def sending(tensor: Tensor, *args: Any, **how: Any) -> Any:
        found.sent.append((perf_counter() - start, tensor.numel() * tensor.element_size()))
        return send(tensor, *args, **how)

    def taking(self: Backward, *args: Any) -> Any:
        found.segments.append(perf_counter() - start)
        return take(self, *args)

    def arrived(parameter: Tensor) -> None:
        found.end = perf_counter() - start

    handles = [p.register_post_accumulate_grad_hook(arrived) for p in parameters]
    try:
        with patch.object(dist, "all_reduce", sending), patch.object(Backward, "take", taking):
            yield found
    finally:
        for handle in handles:
            handle.remove()


def measure(model: nn.Module, x: Tensor, y: Tensor, mode: str, steps: int) -> list[Pass]:
    """Some steps of a model that is parallel, in one of the modes."""
    use_engine(model, mode != "layer by layer")
    found = []
    with patch.object(links, "wanted", lambda: mode == "chain"):
        for _ in range(steps + 2):
            model.zero_grad()
            loss = F.cross_entropy(model(x), y)
            dist.barrier()
            with recorded(list(model.parameters())) as one:
                loss.backward()
            found.append(one)
    return found[2:]


def describe(passes: list[Pass]) -> str:
    """The messages of passes, of which each sends the same."""
    shares = [median(p.sent[i][0] / p.end for p in passes) for i in range(len(passes[0].sent))]
    sizes = [size / 1e6 for _, size in passes[0].sent]
    sent = ", ".join(
        f"{size:.2f} MB at {share:.0%}" for size, share in zip(sizes, shares, strict=True)
    )
    if not passes[0].segments:
        return sent
    began = median(p.segments[-1] / p.end for p in passes)
    early = [size for size, share in zip(sizes, shares, strict=True) if share < began]
    return (
        f"{sent}; {len(early)} of {len(sizes)} messages, {sum(early):.2f} of {sum(sizes):.2f} MB, left "
        f"before the last of {len(passes[0].segments)} segments began (at {began:.0%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=WORKLOADS, default="vgg16")
    parser.add_argument("--sparsity", type=float, default=0.95)
    parser.add_argument("--batch", type=int, default=128, help="samples of each process")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    distributed.setup("cpu")
    if distributed.world() == 1:
        parser.error("start several processes: torchrun --nproc-per-node 2 -m rewire.bench.overlap")
    torch.manual_seed(0)
    workload = WORKLOADS[options.model]
    model = rewire.sparsify(
        workload.build(), sparsity=options.sparsity, assignment=workload.assignment
    )
    distributed.Parallel(model)
    x, y = workload.data(options.batch)
    for mode in MODES:
        passes = measure(model, x, y, mode, options.steps)
        if distributed.is_main():
            print(f"{mode}: {describe(passes)}", flush=True)
    distributed.teardown()


if __name__ == "__main__":
    main()
