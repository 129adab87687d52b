"""What every backbone is: a module that gives feature maps and says how it wants its pixels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from nearkin.errors import ConfigError


@dataclass(frozen=True)
class Pixels:
    """How a network wants its pixels: (x / 255 - mean) / std per channel, channels as RGB or BGR."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    bgr: bool = False


IMAGENET = Pixels(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
HALF = Pixels(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


class Backbone(nn.Module):
    """A feature extractor. `num_features` are the channels of its maps; `pixels` is None where the data decide."""

    num_features: int
    pixels: Pixels | None = None
    usual_side: int | None = None  # of the images it was made for, where it may take no other

    def stages(self, images: Tensor) -> dict[str, Tensor]:
        """Feature maps at three depths: "low", "mid" and "high". The last is what `forward` gives."""
        raise ConfigError(
            f"model.feature_levels: {type(self).__name__} has no taps at three depths. Use --model.feature_levels high."
        )
