"""Convolutional parts: images [B, C, H, W] in, feature maps [B, F, h, w] out. Each names its `num_features`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from nearkin.registry import Registry

# backbone(in_channels, width) -> module with .num_features
BACKBONES: Registry[Callable[[int, int], Backbone]] = Registry("backbone")


class Backbone(nn.Module):
    """A feature extractor with a known number of output channels."""

    num_features: int


class SmallConv(Backbone):
    """Five convolutions for images of about 32 to 96 pixels: 160,000 parameters at width 24.

    The first convolution halves the image, because at full size it alone would cost as much as all the others.
    """

    def __init__(self, in_channels: int, width: int) -> None:
        super().__init__()
        self.num_features = 4 * width
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, width, 5, stride=2, padding=2, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            *_double_convolution(width, 2 * width),
            nn.MaxPool2d(2),
            *_double_convolution(2 * width, 4 * width),
            nn.MaxPool2d(2),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)  # type: ignore[no-any-return]


def _double_convolution(inputs: int, outputs: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [
            nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return layers


BACKBONES.add("small_conv", SmallConv)
