"""The interface of all backbones: feature maps, and the pixel normalisation they expect."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from nearkin.errors import ConfigError


@dataclass(frozen=True)
class PixelNorm:
    """Normalisation of input pixels: (x / 255 - mean) / std per channel.

    Attributes:
        mean: Mean of each channel.
        std: Standard deviation of each channel.
        bgr: Whether the channels are in the order blue, green, red.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    bgr: bool = False


IMAGENET_NORM = PixelNorm(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
INCEPTION_NORM = PixelNorm(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


class Backbone(nn.Module):
    """A feature extractor: images [B, C, H, W] in, feature maps [B, F, h, w] out.

    Attributes:
        num_features: Channels F of the feature maps.
        pixel_norm: Normalisation that the published weights expect; None: computed from the training images.
        default_image_size: Image size that the network was designed for, if it may accept no other.
    """

    num_features: int
    pixel_norm: PixelNorm | None = None
    default_image_size: int | None = None

    def forward_levels(self, images: Tensor) -> dict[str, Tensor]:
        """Compute feature maps at three depths.

        Args:
            images: Normalised images [B, C, H, W].

        Returns:
            Maps by level: "low", "mid" and "high". The last is the output of `forward`.
        """
        raise ConfigError(
            f"model.feature_levels: {type(self).__name__} has no feature maps at three depths. "
            "Use --model.feature_levels high."
        )
