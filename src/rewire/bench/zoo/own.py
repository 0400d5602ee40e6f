"""Which public models Rewire defines itself."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from rewire.bench.zoo import own_images, own_sequences

OWN: dict[str, Callable[[int], nn.Module]] = {  # of the size of the images
    "resnet18": own_images.resnet18,
    "densenet121": own_images.densenet121,
    "mobilenet_v2": own_images.mobilenet_v2,
    "efficientnet_b0": own_images.efficientnet_b0,
    "convnext_tiny": own_images.convnext_tiny,
    "squeezenet1_1": own_images.squeezenet1_1,
    "regnet_y_400mf": own_images.regnet_y_400mf,
    "vit_tiny_patch16_224": own_sequences.ViT,
    "mixer_s16_224": own_sequences.Mixer,
    "resnet26d": own_images.resnet26d,
    "bert": lambda size: own_sequences.Bert(),
    "llama": lambda size: own_sequences.Llama(),
}
