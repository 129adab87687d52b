"""BN-Inception (GoogLeNet V2), the backbone of most metric learning papers, with the layer names of its public weights.

Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate Shift", 2015.
One table of widths builds the layers and runs them; docs/bn-inception.md lists the entries of a weights file.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nearkin.errors import DataError
from nearkin.models._base import Backbone, PixelNorm

# The public weights were trained on pixels from 0 to 255 in the order BGR, minus a mean per channel.
MEAN = (104.0, 117.0, 128.0)  # blue, green, red
STD = (1.0, 1.0, 1.0)

# Blocks after which the papers attach their low, middle and high embedding.
LEVELS = {"3c": "low", "4e": "mid", "5b": "high"}
MIN_IMAGE_SIZE = 7  # smaller images leave the pooling of the stem with empty maps

# A convolution with bias, always followed by batch normalisation (named `<name>_bn`) and ReLU:
# name, input channels, output channels, kernel size, stride.
Conv = tuple[str, int, int, int, int]
STEM: list[Conv] = [("conv1_7x7_s2", 3, 64, 7, 2), ("conv2_3x3_reduce", 64, 64, 1, 1), ("conv2_3x3", 64, 192, 3, 1)]
# Widths of the inception blocks. A block that halves the maps has no 1x1 branch and does not project its pooled input.
# fmt: off
BLOCKS = (
    # name inputs 1x1  reduce 3x3  reduce double  pooling  projection
    ("3a",  192,  64,   64,  64,    64,  96,   "average",   32),
    ("3b",  256,  64,   64,  96,    64,  96,   "average",   64),
    ("3c",  320,   0,  128, 160,    64,  96,   "halve",      0),
    ("4a",  576, 224,   64,  96,    96, 128,   "average",  128),
    ("4b",  576, 192,   96, 128,    96, 128,   "average",  128),
    ("4c",  576, 160,  128, 160,   128, 160,   "average",  128),
    ("4d",  608,  96,  128, 192,   160, 192,   "average",  128),
    ("4e",  608,   0,  128, 192,   192, 256,   "halve",      0),
    ("5a", 1056, 352,  192, 320,   160, 224,   "average",  128),
    ("5b", 1024, 352,  192, 320,   192, 224,   "maximum",  128),
)
# fmt: on


def _branches(
    block: str, inputs: int, single: int, reduce: int, triple: int, reduce2: int, double: int, pool: str, project: int
) -> list[list[Conv]]:
    """Return the parallel chains of a block in the order of their outputs; the last has the pooled input."""
    name, stride = f"inception_{block}", 2 if pool == "halve" else 1
    direct: list[list[Conv]] = [
        [(f"{name}_3x3_reduce", inputs, reduce, 1, 1), (f"{name}_3x3", reduce, triple, 3, stride)],
        [
            (f"{name}_double_3x3_reduce", inputs, reduce2, 1, 1),
            (f"{name}_double_3x3_1", reduce2, double, 3, 1),
            (f"{name}_double_3x3_2", double, double, 3, stride),
        ],
    ]
    if pool == "halve":
        return [*direct, []]
    return [[(f"{name}_1x1", inputs, single, 1, 1)], *direct, [(f"{name}_pool_proj", inputs, project, 1, 1)]]


class BNInception(Backbone):
    """BN-Inception with He initialisation: images [B, 3, H, W] to maps [B, 1024, h, w], 7 x 7 for images of 224 x 224.

    It has 10.3 million parameters.

    Example:
        >>> model = BNInception().eval()
        >>> list(model(torch.zeros(1, 3, 96, 96)).shape)
        [1, 1024, 3, 3]
    """

    num_features = 1024
    pixel_norm = PixelNorm(mean=tuple(m / 255 for m in MEAN), std=tuple(s / 255 for s in STD), bgr=True)

    def __init__(self) -> None:
        super().__init__()
        self.chains = {block[0]: _branches(*block) for block in BLOCKS}
        for chain in (STEM, *(chain for chains in self.chains.values() for chain in chains)):
            for name, inputs, outputs, size, stride in chain:
                # Batch normalisation cancels this bias in training, but the public weights have it.
                layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2)
                assert layer.bias is not None
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
                self.add_module(name, layer)
                self.add_module(f"{name}_bn", nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Return the last feature map of a batch of images."""
        return self.forward_levels(images)["high"]

    def forward_levels(self, images: Tensor) -> dict[str, Tensor]:
        """Compute the feature maps of the blocks 3c, 4e and 5b: the levels L, M and H of the ICE paper."""
        if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[2:]) < MIN_IMAGE_SIZE:
            raise DataError(
                f"bn_inception: expected colour images [B, 3, H, W] of at least "
                f"{MIN_IMAGE_SIZE} x {MIN_IMAGE_SIZE} pixels, got {list(images.shape)}."
            )
        maps = _max_pool(self._run(STEM[:1], images))
        maps = _max_pool(self._run(STEM[1:], maps))
        levels = {}
        for name, *_, pool, _ in BLOCKS:
            *direct, pooled = self.chains[name]
            outputs = [self._run(chain, maps) for chain in direct]
            maps = torch.cat([*outputs, self._run(pooled, POOLS[pool](maps))], dim=1)
            if name in LEVELS:
                levels[LEVELS[name]] = maps
        return levels

    def _run(self, chain: Sequence[Conv], maps: Tensor) -> Tensor:
        for name, *_ in chain:
            maps = F.relu(getattr(self, f"{name}_bn")(getattr(self, name)(maps)), inplace=True)
        return maps


def _max_pool(maps: Tensor) -> Tensor:
    return F.max_pool2d(maps, 3, stride=2, ceil_mode=True)


def _halve(maps: Tensor) -> Tensor:
    """Pool like `_max_pool`, but round odd sides up as the parallel convolutions do, so that any image size works."""
    odd_rows, odd_columns = maps.shape[2] % 2, maps.shape[3] % 2
    if odd_rows or odd_columns:
        # Zero padding cannot win: the input comes from a ReLU.
        maps = F.pad(maps, (0, odd_columns, 0, odd_rows))
    return _max_pool(maps)


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    # counts the zero padding, as the public network does
    "average": partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1),
    "maximum": partial(F.max_pool2d, kernel_size=3, stride=1, padding=1),
    "halve": _halve,
}
