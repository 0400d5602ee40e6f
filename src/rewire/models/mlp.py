"""A multilayer perceptron."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from rewire.models._arguments import check_counts, check_width, scaled


def mlp(
    in_features: int = 784,
    hidden: Sequence[int] = (512, 512),
    num_classes: int = 10,
    width: float = 1.0,
) -> nn.Sequential:
    """A multilayer perceptron with ReLU that flattens its input first.

    Args:
        in_features: number of input values of one sample, 784 for a 28x28 image.
        hidden: sizes of the hidden layers, each times ``width``; may be empty.
        num_classes: number of outputs.
        width: multiplier of the hidden sizes.

    Example:
        >>> sum(p.numel() for p in mlp().parameters())
        669706
    """
    check_counts(in_features=in_features, num_classes=num_classes)
    check_counts(**{f"hidden[{i}]": size for i, size in enumerate(hidden)})
    check_width(width)
    sizes = [in_features, *(scaled(size, width) for size in hidden)]
    layers: list[nn.Module] = [nn.Flatten()]
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], num_classes))
