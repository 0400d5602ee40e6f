"""Lottery tickets by iterative magnitude pruning."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from rewire import files
from rewire.methods.pruning import Layers, best, layers_of, make_sparse
from rewire.nn.kinds import masked_kind
from rewire.nn.sparse import SparseLayer

SPARSITIES = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98)
_FILE = "lottery.pt"


class Ticket(NamedTuple):
    """A model to train, rewound to its initial weights."""

    round: int
    sparsity: float
    model: nn.Module


class Lottery:
    """Lottery tickets: train, prune the smallest weights, rewind the others, and again.

    Every round trains a model to the end; one sequence gives every sparsity on its way. The first, dense
    round trains the model as it is; all others train truly sparse layers. Between rounds weights are
    compared over the whole model, and everything else (biases, norms) is rewound too.

    Iterating gives the tickets: train each before the next is asked for. What has been completed is in
    :meth:`state_dict`, and in ``directory`` if there is one, from which the next driver resumes.

    Args:
        model: the dense model with its initial weights; it is copied.
        sparsities: of the rounds, ascending.
        keep_dense: names or globs of layers, or names of modules that hold them, to leave alone.
        directory: where to keep what has been completed.

    Example:
        >>> lottery = Lottery(nn.Sequential(nn.Linear(20, 10)), sparsities=(0, 0.5, 0.9))
        >>> for ticket in lottery:
        ...     # here it is trained
        ...     print(ticket.sparsity, sum(p.numel() for p in ticket.model.parameters()))
        0.0 210
        0.5 110
        0.9 30

    Reference: Frankle and Carbin, *The lottery ticket hypothesis: finding sparse, trainable neural
    networks*, 2018.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sparsities: Sequence[float] = SPARSITIES,
        keep_dense: str | Iterable[str] = (),
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        sparsities = tuple(float(s) for s in sparsities)
        ascending = all(a < b for a, b in pairwise(sparsities))
        if not sparsities or sparsities[0] != 0 or not ascending or not sparsities[-1] < 1:
            raise ValueError(
                "sparsities must begin with 0, the dense round, and ascend to below 1, got "
                f"{list(sparsities)}"
            )
        self.sparsities = sparsities
        self._initial, layers = layers_of(copy.deepcopy(model), keep_dense)
        self._names = list(layers)
        self._masks: dict[str, Tensor] = {}
        self._file = None if directory is None else Path(directory) / _FILE
        self.round, self.results = 0, list[Any]()
        if self._file is not None and self._file.exists():
            self.load_state_dict(torch.load(self._file, map_location="cpu", weights_only=True))
        else:
            self.model = self._rewound()
            self._save()

    @property
    def done(self) -> bool:
        """Whether all rounds are completed."""
        return self.round == len(self.sparsities)

    @property
    def ticket(self) -> Ticket:
        """The model to train now."""
        if self.done:
            raise RuntimeError("all rounds are completed")
        return Ticket(self.round, self.sparsities[self.round], self.model)

    def __iter__(self) -> Iterator[Ticket]:
        while not self.done:
            ticket = self.ticket
            yield ticket
            if self.round == ticket.round:
                self.advance()

    def advance(self, result: Any = None) -> None:
        """Complete a round: prune what it has trained, and rewind the rest for the next.

        Args:
            result: of the round, kept in ``results``: numbers, strings, tensors, lists and dicts of them.
        """
        if self.done:
            raise RuntimeError("all rounds are completed")
        self.results.append(result)
        self.round += 1
        if not self.done:
            scores = {f"{n}.weight".lstrip("."): self._magnitudes(n) for n in self._names}
            self._masks = best(scores, 1 - self.sparsities[self.round])
            self.model = self._rewound()
        self._save()

    def run(self, train: Callable[[Ticket], Any]) -> dict[float, Any]:
        """Train all rounds that are left.

        Args:
            train: trains a ticket's model to the end, and returns what to keep of it.

        Returns:
            What it has returned for each sparsity, earlier runs included.
        """
        while not self.done:
            self.advance(train(self.ticket))
        return dict(zip(self.sparsities, self.results, strict=True))

    def _magnitudes(self, name: str) -> Tensor:
        """Of the weights of a layer after training, -1 where there is none any more."""
        layer = self.model.get_submodule(name)
        if not isinstance(layer, SparseLayer):
            assert isinstance(layer.weight, Tensor)
            return layer.weight.detach().abs()
        kind: Any = masked_kind(layer)
        twin = kind.from_sparse(layer)
        magnitudes: Tensor = twin.weight.detach().abs().masked_fill(~twin.mask, -1.0)
        return magnitudes

    def _rewound(self) -> nn.Module:
        """The initial model, with sparse layers once there is something to leave out."""
        model = copy.deepcopy(self._initial)
        if not self._masks:
            return model
        layers = {name: model.get_submodule(name) for name in self._names}
        return make_sparse(model, cast(Layers, layers), self._masks)

    # Checkpoints ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The rounds that are completed; not what the present one has trained so far."""
        return {
            "round": self.round,
            "sparsities": list(self.sparsities),
            "results": list(self.results),
            "initial": self._initial.state_dict(),
            "masks": dict(self._masks),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned: the next ticket is the same again."""
        if tuple(state["sparsities"]) != self.sparsities:
            raise ValueError(
                f"the state is that of rounds at {state['sparsities']}, not {list(self.sparsities)}"
            )
        self._initial.load_state_dict(state["initial"])
        self._masks = {name: mask.clone() for name, mask in state["masks"].items()}
        self.round, self.results = state["round"], list(state["results"])
        self.model = self._rewound()

    def _save(self) -> None:
        """Write the file, whole or not at all."""
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        files.write(self._file, lambda hidden: torch.save(self.state_dict(), hidden))
