"""Plain PyTorch models, the paper's and a few more; ``rewire.sparsify`` makes them sparse."""

from collections.abc import Callable
from typing import Any

from torch import nn

from rewire.models.gpt import gpt
from rewire.models.mlp import mlp
from rewire.models.resnet import resnet20, resnet32, resnet50, resnet56, resnet110
from rewire.models.vgg import vgg11, vgg13, vgg16, vgg19
from rewire.models.vit import vit

__all__ = [
    "MODELS",
    "build",
    "built_with",
    "for_images",
    "gpt",
    "mlp",
    "resnet20",
    "resnet32",
    "resnet50",
    "resnet56",
    "resnet110",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
    "vit",
]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "resnet20": resnet20,
    "resnet32": resnet32,
    "resnet56": resnet56,
    "resnet110": resnet110,
    "resnet50": resnet50,
    "vgg11": vgg11,
    "vgg13": vgg13,
    "vgg16": vgg16,
    "vgg19": vgg19,
    "vit": vit,
    "gpt": gpt,
}

_RECORD = "_built_with"


def build(name: str, **kwargs: Any) -> nn.Module:
    """The model called ``name`` in ``MODELS``, built with its own keyword arguments.

    Example:
        >>> build("resnet20", num_classes=100).linear
        Linear(in_features=64, out_features=100, bias=True)
    """
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}; choose one of {', '.join(MODELS)}")
    model = MODELS[name](**kwargs)
    model.__dict__[_RECORD] = (name, kwargs)
    return model


def for_images(
    name: str, shape: tuple[int, int, int], num_classes: int, width: float = 1.0
) -> nn.Module:
    """The model called ``name``, for images of a shape (channels, height, width).

    Example:
        >>> for_images("mlp", (1, 8, 8), 10)[1].in_features
        64
    """
    channels, height, across = shape
    arguments: dict[str, Any] = {"num_classes": num_classes}
    if name == "mlp":
        arguments["in_features"] = channels * height * across
    elif name == "vit":
        arguments["image_size"] = height
    return build(name, width=width, **arguments)


def built_with(model: nn.Module) -> tuple[str, dict[str, Any]] | None:
    """The arguments of the :func:`build` that made a model; None if it was made in another way."""
    record: tuple[str, dict[str, Any]] | None = model.__dict__.get(_RECORD)
    return record
