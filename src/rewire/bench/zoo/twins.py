"""Comparing a sparse model with its densified twin: outputs, gradients, running statistics.

``rewire.densify`` is linear in the parameters. So it also takes a model whose parameters are gradients, or
ones where there are connections, to the names and shapes of the twin, whatever kinds of layers there are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import rewire
from rewire.precision import BFLOAT16, FLOAT32, autocast

# Attributes that hold the probability of something random in torch, torchvision, timm and transformers.
_PROBABILITIES = (
    *("p", "dropout", "drop_prob", "drop_path", "drop_rate", "attn_drop", "attention_dropout"),
    *("attention_probs_dropout_prob", "dropout_p", "dropout_prob", "dropout_rate", "layerdrop"),
    *(
        "activation_dropout",
        "stochastic_depth_prob",
        "attn_pdrop",
        "hidden_dropout",
        "drop_path_prob",
    ),
    *("attn_dropout", "attn_drop_prob", "resid_dropout", "summary_last_dropout"),
)


class Inexact(RuntimeError):
    """A model whose outputs are not the same twice."""


@dataclass(frozen=True)
class Difference:
    """The largest difference between a model and another with the same weights.

    Attributes:
        outputs: norm of the difference of each output, relative to the norm of the output.
        gradients: the same for each gradient; where its norm is next to nothing beside the largest of the
            whole model, as it is in front of a batch norm, relative to a share of this.
        statistics: of buffers, in the same way.
        worst: the name of what differs most.
    """

    outputs: float
    gradients: float
    statistics: float
    worst: str

    @property
    def largest(self) -> float:
        """Of all."""
        return max(self.outputs, self.gradients, self.statistics)


@dataclass(frozen=True)
class Answer:
    """What one forward and backward pass of a model gives, by name, and in which precision."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    statistics: dict[str, Tensor]
    precision: str = FLOAT32


def without_randomness(model: nn.Module) -> nn.Module:
    """The model, changed in place, with every probability of dropout and stochastic depth at 0."""
    owners: list[Any] = [*model.modules()]
    owners += [module.config for module in model.modules() if hasattr(module, "config")]
    for owner in owners:
        for name in _PROBABILITIES:
            if type(vars(owner).get(name)) is float:
                setattr(owner, name, 0.0)
    return model


def twin_of(model: nn.Module) -> nn.Module:
    """A dense copy of a sparse model, with the same weights."""
    return rewire.densify(copy.deepcopy(model))


def outputs_of(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """What a model returns for a tensor or keyword arguments: all tensors that have a gradient, by name.

    Random numbers that the model draws itself, for a mask for example, are the same each time.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        value = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    return dict(_tensors(value))


def answer(model: nn.Module, inputs: Any, precision: str = FLOAT32) -> Answer:
    """Outputs, gradients of a fixed random sum of them, and buffers, all as the twin names them.

    With ``precision`` bfloat16 outputs are computed under autocast.
    """
    model.zero_grad()
    with autocast(precision):
        outputs = outputs_of(model, inputs)
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros((), dtype=torch.float64)
    for output in outputs.values():
        factor = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        loss = loss + (output.double() * factor).mean()
    loss.backward()
    gradients = rewire.densify(_with_gradients(model))
    return Answer(
        {name: output.detach() for name, output in outputs.items()},
        {name: gradient.detach() for name, gradient in gradients.named_parameters()},
        {name: buffer for name, buffer in gradients.named_buffers() if buffer.is_floating_point()},
        precision,
    )


def compare(model: nn.Module, inputs: Any, *, training: bool = True) -> Difference:
    """How much a sparse model differs from its densified twin, in either mode.

    The model is not changed but for running statistics and gradients. ``Inexact`` is raised if the twin
    itself gives two answers: see :func:`without_randomness`.
    """
    active, twin = connections(model.train()), twin_of(model).train(training)
    model.train(training)
    again = outputs_of(copy.deepcopy(twin), inputs)
    right = answer(twin, inputs)
    for name, output in right.outputs.items():
        if not torch.equal(output, again[name].detach()):
            raise Inexact(f"{name} of the dense twin is not the same twice")
    return difference(answer(model, inputs), right, active)


def connections(model: nn.Module) -> dict[str, Tensor]:
    """Where the twin of a sparse model has connections; everywhere in what is not sparse."""
    ones = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in ones.parameters():
            parameter.fill_(1.0)
    return {name: p.detach() != 0 for name, p in rewire.densify(ones).named_parameters()}


def difference(found: Answer, right: Answer, active: Mapping[str, Tensor]) -> Difference:
    """How much one answer differs from another, where there are connections."""
    masked, found_masked = (
        {name: gradient * active[name] for name, gradient in answer.gradients.items()}
        for answer in (right, found)
    )
    parts: dict[str, dict[str, float]] = {
        "outputs": _differences(found.outputs, right.outputs, 0.0, found.precision),
        "gradients": _differences(found_masked, masked, _largest(masked), found.precision),
        "statistics": _differences(
            found.statistics, right.statistics, _largest(right.statistics), found.precision
        ),
    }
    every = {name: value for part in parts.values() for name, value in part.items()}
    tops = {part: max(values.values(), default=0.0) for part, values in parts.items()}
    return Difference(**tops, worst=max(every, key=lambda name: every[name], default=""))


def _largest(tensors: Mapping[str, Tensor]) -> float:
    return max((float(t.double().norm()) for t in tensors.values()), default=0.0)


def _differences(
    found: Mapping[str, Tensor], right: Mapping[str, Tensor], whole: float, precision: str
) -> dict[str, float]:
    if found.keys() != right.keys():
        names = ", ".join(sorted(found.keys() ^ right.keys()))
        raise RuntimeError(f"the model and its twin have not the same tensors: {names}")
    result = {}
    for name, mine in found.items():
        theirs = right[name].double()
        if mine.shape != theirs.shape:
            raise RuntimeError(f"{name} is {tuple(mine.shape)}, of the twin {tuple(theirs.shape)}")
        if not mine.numel():
            continue
        dtype = torch.bfloat16 if precision == BFLOAT16 else mine.dtype
        scale = float(theirs.norm()) + torch.finfo(dtype).eps ** (1 / 3) * whole
        gap = float((mine.double() - theirs).norm())
        result[name] = gap / scale if scale else gap
    return {n: v if v == v else float("inf") for n, v in result.items()}  # not a number is no match


def _with_gradients(model: nn.Module) -> nn.Module:
    """A copy whose parameters are the gradients of this one."""
    training = model.training
    result = copy.deepcopy(
        model.train()
    )  # models empty caches with gradients, which cannot be copied
    model.train(training)
    with torch.no_grad():
        for parameter, of in zip(result.parameters(), model.parameters(), strict=True):
            parameter.zero_() if of.grad is None else parameter.copy_(of.grad)
    return result


def _tensors(value: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """The real tensors with gradients in what a model returns."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.requires_grad:
            yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors(part, f"{name}.{key}")
    elif isinstance(value, tuple | list):
        for index, part in enumerate(value):
            yield from _tensors(part, f"{name}[{index}]")
