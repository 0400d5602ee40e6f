"""VGG at a quarter of its width with batch norm, for 32x32 images.

Simonyan, Zisserman. Very Deep Convolutional Networks for Large-Scale Image Recognition. ICLR 2015.
"""

from torch import Tensor, nn

from rewire.models._arguments import check_counts, check_width, scaled

CHANNELS = (16, 32, 64, 128, 128)  # of the five stages, each followed by max pooling


class VGG(nn.Module):
    """Five stages of 3x3 convolutions, ``depths[i]`` of them in stage i, and three linear layers.

    The five poolings leave one pixel of a 32x32 image; other sizes do not fit the classifier.
    """

    def __init__(
        self, depths: tuple[int, int, int, int, int], num_classes: int, width: float
    ) -> None:
        super().__init__()
        features: list[nn.Module] = []
        n_in = 3
        for base, depth in zip(CHANNELS, depths, strict=True):
            n_out = scaled(base, width)
            for _ in range(depth):
                conv = nn.Conv2d(n_in, n_out, 3, padding=1)
                features += [conv, nn.BatchNorm2d(n_out), nn.ReLU()]
                n_in = n_out
            features.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*features)
        n_hidden = scaled(512, width)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(n_in, n_hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(n_hidden, n_hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(n_hidden, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits


def _vgg(depths: tuple[int, int, int, int, int], num_classes: int, width: float) -> VGG:
    check_counts(num_classes=num_classes)
    check_width(width)
    return VGG(depths, num_classes, width)


def vgg11(num_classes: int = 10, width: float = 1.0) -> VGG:
    """VGG-11 with a quarter of its channels, times ``width``."""
    return _vgg((1, 1, 2, 2, 2), num_classes, width)


def vgg13(num_classes: int = 10, width: float = 1.0) -> VGG:
    """VGG-13 with a quarter of its channels, times ``width``."""
    return _vgg((2, 2, 2, 2, 2), num_classes, width)


def vgg16(num_classes: int = 10, width: float = 1.0) -> VGG:
    """VGG-16 with a quarter of its channels, times ``width``.

    Example:
        >>> sum(p.numel() for p in vgg16().parameters())
        1256730
    """
    return _vgg((2, 2, 3, 3, 3), num_classes, width)


def vgg19(num_classes: int = 10, width: float = 1.0) -> VGG:
    """VGG-19 with a quarter of its channels, times ``width``."""
    return _vgg((2, 2, 4, 4, 4), num_classes, width)
