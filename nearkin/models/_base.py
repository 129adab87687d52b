"""The interface of all backbones: feature maps, and the pixel normalisation they expect."""

from dataclasses import dataclass

from torch import Tensor, nn

from nearkin.errors import ConfigError


@dataclass(frozen=True)
class PixelNorm:
    """Normalisation of input pixels: (x / 255 - mean) / std per channel."""

    mean: tuple[float, ...]  # mean of each channel
    std: tuple[float, ...]  # standard deviation of each channel
    bgr: bool = False  # whether the channels are in the order blue, green, red


IMAGENET_NORM = PixelNorm(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
INCEPTION_NORM = PixelNorm(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


class Backbone(nn.Module):
    """A feature extractor: images [B, C, H, W] in, feature maps [B, F, h, w] out."""

    num_features: int  # channels F of the feature maps
    # normalisation that the published weights expect; None: computed from the training images
    pixel_norm: PixelNorm | None = None
    default_image_size: int | None = None  # image size that the network was designed for, if it may accept no other
    always_frozen: frozenset[str] = frozenset()  # names of parameters that are never trained

    def forward_parts(self, images: Tensor) -> tuple[Tensor, ...]:
        """Compute the feature maps to pool: one, unless several networks stand side by side."""
        return (self(images),)

    def cut(self, stages: int) -> tuple[nn.Module, nn.Module]:
        """Split the network before its last stages into a stem and a tail, which share its layers."""
        raise ConfigError(
            f"model.freeze: stages needs a timm network that can be cut (EfficientNet, ResNet, ConvNeXt, ViT), "
            f"not {type(self).__name__}. Use backbone, or none."
        )

    def forward_levels(self, images: Tensor) -> dict[str, Tensor]:
        """Compute feature maps at three depths."""
        raise ConfigError(
            f"model.feature_levels: {type(self).__name__} has no feature maps at three depths. "
            "Use --model.feature_levels high."
        )
