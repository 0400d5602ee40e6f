"""The plain vision transformer.

Beyer, Zhai, Kolesnikov. Better plain ViT baselines for ImageNet-1k. 2022.
"""

import torch
from torch import Tensor, nn

from rewire.models._arguments import check_counts, check_width, scaled
from rewire.models.transformer import Block

DEPTH = 4
HEAD_SIZE = 64


def positions(grid: int, dim: int, like: Tensor) -> Tensor:
    """Sine and cosine of each patch's column and row at ``dim/4`` frequencies: (grid*grid, dim).

    The result has the device and dtype of ``like``; ``dim`` must be a multiple of 4.
    """
    quarter = dim // 4
    steps = torch.arange(quarter, device=like.device, dtype=torch.float32)
    frequencies = 10_000.0 ** (-steps / max(1, quarter - 1))
    places = torch.arange(grid, device=like.device, dtype=torch.float32)
    angles = torch.outer(places, frequencies)  # (grid, dim/4)
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)  # (grid, dim/2)
    columns = waves.expand(grid, -1, -1)  # (row, column, dim/2)
    rows = waves.unsqueeze(1).expand(-1, grid, -1)
    return torch.cat([columns, rows], dim=2).flatten(0, 1).to(like.dtype)


class ViT(nn.Module):
    """Patches, transformer blocks, the mean over patches, a linear head."""

    def __init__(
        self, num_classes: int, dim: int, heads: int, mlp_dim: int, image_size: int, patch_size: int
    ) -> None:
        super().__init__()
        self.image_size = image_size
        self.patch_size = patch_size
        self.grid = image_size // patch_size
        self.dim = dim
        patch_dim = 3 * patch_size**2
        self.patch_embedding = nn.Sequential(
            nn.LayerNorm(patch_dim), nn.Linear(patch_dim, dim), nn.LayerNorm(dim)
        )
        self.blocks = nn.Sequential(
            *(Block(dim, heads, HEAD_SIZE, mlp_dim, bias=False, causal=False) for _ in range(DEPTH))
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        if tuple(images.shape[1:]) != (3, self.image_size, self.image_size):
            raise ValueError(
                f"expected images of shape (batch, 3, {self.image_size}, {self.image_size}), "
                f"got {tuple(images.shape)}: build the model with the image_size of your data"
            )
        x: Tensor = self.patch_embedding(self._patches(images))
        # Computed, not stored: a buffer would be lost when the model is built on "meta".
        x = x + positions(self.grid, self.dim, like=x)
        x = self.blocks(x)
        logits: Tensor = self.head(self.norm(x.mean(dim=1)))
        return logits

    def _patches(self, images: Tensor) -> Tensor:
        size, grid = self.patch_size, self.grid
        x = images.reshape(-1, 3, grid, size, grid, size)
        x = x.permute(0, 2, 4, 3, 5, 1)  # (batch, row, column, y, x, channel)
        return x.reshape(-1, grid * grid, size * size * 3)


def vit(
    num_classes: int = 10, width: float = 1.0, image_size: int = 32, patch_size: int = 4
) -> ViT:
    """A simple ViT of depth 4 with dimension 512, 6 heads of size 64 and perceptrons of 256.

    Args:
        num_classes: number of outputs.
        width: multiplier of the dimension (kept a multiple of 4, which the positions need), of
            the number of heads and of the perceptrons' size.
        image_size: height and width of the images, a multiple of ``patch_size``.
        patch_size: height and width of a patch.

    Example:
        >>> sum(p.numel() for p in vit().parameters())
        4237930
    """
    check_counts(num_classes=num_classes, image_size=image_size, patch_size=patch_size)
    check_width(width)
    if image_size % patch_size:
        raise ValueError(
            f"image_size must be a multiple of patch_size, got {image_size} and {patch_size}"
        )
    return ViT(
        num_classes,
        dim=4 * scaled(128, width),
        heads=scaled(6, width),
        mlp_dim=scaled(256, width),
        image_size=image_size,
        patch_size=patch_size,
    )
