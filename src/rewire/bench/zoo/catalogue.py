"""All public models that are known by name, and sets of them."""

from __future__ import annotations

import difflib

from rewire.bench.zoo.language import LANGUAGE
from rewire.bench.zoo.public import TIMM, TORCHVISION, Public
from rewire.bench.zoo.vision import VISION

PUBLIC: dict[str, Public] = {model.name: model for model in (*VISION, *LANGUAGE)}

FIRST = (
    *("resnet18", "densenet121", "mobilenet_v2", "efficientnet_b0", "convnext_tiny"),
    *("squeezenet1_1", "regnet_y_400mf", "vit_tiny_patch16_224", "mixer_s16_224", "resnet26d"),
    *("bert", "llama"),
)
SECOND = (
    *("resnet50", "vgg11_bn", "mobilenet_v3_large", "efficientnet_v2_s", "shufflenet_v2_x1_0"),
    *("resnext50_32x4d", "deit_small_patch16_224", "swin_tiny_patch4_window7_224", "repvgg_a0"),
    *("seresnet50", "gpt2", "t5"),
)
SETS: dict[str, tuple[str, ...]] = {"first": FIRST, "second": SECOND}


def find(name: str) -> tuple[Public, ...]:
    """The models of a set, or the one of this name: ``resnet18``, or ``timm/NAME`` for any model of timm.

    >>> [model.library for model in find("resnet18") + find("timm/resnet10t")]
    ['torchvision', 'timm']
    >>> len(find("second"))
    12
    """
    if name in SETS:
        return tuple(PUBLIC[one] for one in SETS[name])
    if name in PUBLIC:
        return (PUBLIC[name],)
    library, _, rest = name.partition("/")
    if rest and library in (TIMM, TORCHVISION):
        return (Public(rest, library),)
    near = difflib.get_close_matches(name, [*PUBLIC, *SETS], 3)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(
        f"there is no model or set {name!r}; {meant}Sets are {' and '.join(SETS)}, --list shows all "
        "names, and timm/NAME or torchvision/NAME is any model for images of these libraries"
    )
