"""Building public models: importing their libraries, and saying what to install."""

from __future__ import annotations

import importlib
from functools import cache
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rewire.bench.zoo import public
from rewire.bench.zoo.public import CLASSES, TIMM, TORCHVISION, VOCABULARY, Public


class MissingLibrary(ImportError):
    """A library that is not installed, or that cannot be imported."""


@cache
def problem(library: str) -> str | None:
    """Why a library cannot be used and what to do; None if it can."""
    try:
        _module(library)
    except ModuleNotFoundError as error:
        if error.name == library:
            return f"{library} is not installed; run: pip install {library}"
        return f"{library} cannot be imported: {error}"
    except Exception as error:  # a build that does not fit this torch raises anything
        return f"{library} is installed but cannot be imported: {type(error).__name__}: {error}"
    return None


def _module(library: str) -> ModuleType:
    return importlib.import_module("torchvision.models" if library == TORCHVISION else library)


def build(model: Public, size: int = 64, *, small: bool = False) -> nn.Module:
    """The dense model with random weights, for images of ``size`` x ``size``."""
    if (why := problem(model.library)) is not None:
        raise MissingLibrary(f"{model.name} is a model of {model.library}: {why}")
    options = {**model.options, **(model.small or {} if small else {})}
    if model.sized:
        options[model.sized] = (size, size) if model.sized == "input_size" else size
    name, library = model.kind or model.name, _module(model.library)
    if model.library == TIMM:
        if library.get_pretrained_cfg(name).fixed_input_size:
            options["img_size"] = size
        made = library.create_model(name, num_classes=CLASSES, **options)
    elif model.library == TORCHVISION:
        made = attrgetter(name)(library)(num_classes=CLASSES, **options)
    else:
        kind = getattr(library, name)
        made = kind(kind.config_class(**options))
    assert isinstance(made, nn.Module)
    return made


def inputs(
    model: Public, batch: int, size: int, tokens: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any] | Tensor:
    """Random inputs: ``batch`` images, or sequences of ``tokens``."""

    def sequence() -> Tensor:
        return torch.randint(3, VOCABULARY, (batch, tokens))  # 0 to 2 are special

    def images() -> Tensor:
        return torch.randn(batch, 3, size, size, dtype=dtype)

    if model.data == public.TOKENS:
        return sequence()
    if model.data == public.PAIRS:
        return {"input_ids": sequence(), "decoder_input_ids": sequence()}
    if model.data == public.CAPTIONED:
        return {"input_ids": sequence(), "pixel_values": images()}
    if model.data == public.VIDEO:
        return torch.randn(batch, 3, 8, size, size, dtype=dtype)
    if model.data == public.SOUND:
        return torch.randn(batch, 10 * tokens, dtype=dtype)
    if model.data == public.SPECTROGRAMS:
        return {
            "input_features": torch.randn(batch, 16, 128, dtype=dtype),
            "decoder_input_ids": sequence(),
        }
    return images()
