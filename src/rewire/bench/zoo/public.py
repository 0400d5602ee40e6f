"""Public models by name: in which library they are, how they are built, and what they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TORCHVISION, TIMM, TRANSFORMERS = "torchvision", "timm", "transformers"
LIBRARIES = (TORCHVISION, TIMM, TRANSFORMERS)

# What a model takes.
IMAGES, VIDEO, TOKENS = "images", "video", "tokens"
PAIRS = "pairs of sequences"  # an encoder's and a decoder's
CAPTIONED = "images with text"
SOUND, SPECTROGRAMS = "sound", "spectrograms"

VOCABULARY = 1000
CLASSES = 10


@dataclass(frozen=True)
class Public:
    """A model that anybody can build by name, with random weights.

    Attributes:
        name: its name here, which is the library's if that has one.
        library: one of ``LIBRARIES``.
        kind: the function or class of the library that builds it; empty if that is ``name``.
        data: what it takes.
        options: keyword arguments, or fields of its configuration (transformers), beside the defaults.
        small: more of these, which make it small for tests; None if nothing does.
        size: height and width of images, in tests.
        sized: the option that takes the size of the images, if it has one; timm's own are known to timm.
    """

    name: str
    library: str
    kind: str = ""
    data: str = IMAGES
    options: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] | None = field(default_factory=dict)
    size: int = 64
    sized: str = ""


def torchvision(name: str, **fields: Any) -> Public:
    return Public(name, TORCHVISION, **fields)


def timm(name: str, size: int = 64, **small: Any) -> Public:
    """A model of timm and what makes it small."""
    return Public(name, TIMM, small=small, size=size)
