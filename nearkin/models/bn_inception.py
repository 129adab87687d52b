"""BN-Inception (GoogLeNet V2), the backbone of most metric learning papers, with the layer names of its public weights.

Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate Shift", 2015.
One table of widths builds the layers and runs them; docs/bn-inception.md lists the entries of a weights file.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

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


class ConvSpec(NamedTuple):
    """A convolution with bias, always followed by batch normalisation (named `<name>_bn`) and ReLU."""

    name: str
    in_channels: int
    out_channels: int
    kernel_size: int
    stride: int = 1


class BlockSpec(NamedTuple):
    """Widths of one inception block. With pool "halve" it has no 1x1 branch and does not project its pooled input."""

    name: str
    in_channels: int
    single: int  # 1x1
    reduce: int  # 1x1 before
    triple: int  # the 3x3
    double_reduce: int  # 1x1 before
    double: int  # two 3x3
    pool: str
    project: int  # 1x1 after the pooling

    def branches(self) -> list[list[ConvSpec]]:
        """Return the parallel chains of convolutions in the order of their outputs; the last has the pooled input."""
        stride = 2 if self.pool == "halve" else 1
        chains = [
            [ConvSpec("1x1", self.in_channels, self.single, 1)],
            [
                ConvSpec("3x3_reduce", self.in_channels, self.reduce, 1),
                ConvSpec("3x3", self.reduce, self.triple, 3, stride),
            ],
            [
                ConvSpec("double_3x3_reduce", self.in_channels, self.double_reduce, 1),
                ConvSpec("double_3x3_1", self.double_reduce, self.double, 3),
                ConvSpec("double_3x3_2", self.double, self.double, 3, stride),
            ],
            [ConvSpec("pool_proj", self.in_channels, self.project, 1)],
        ]
        if stride == 2:
            chains = [*chains[1:3], []]
        return [[c._replace(name=f"inception_{self.name}_{c.name}") for c in chain] for chain in chains]


STEM = (
    ConvSpec("conv1_7x7_s2", 3, 64, 7, stride=2),
    ConvSpec("conv2_3x3_reduce", 64, 64, 1),
    ConvSpec("conv2_3x3", 64, 192, 3),
)
# fmt: off
BLOCKS = (
    #        name  inputs 1x1  reduce 3x3  reduce double  pooling    projection
    BlockSpec("3a",  192,  64,   64,  64,    64,  96,   "average",   32),
    BlockSpec("3b",  256,  64,   64,  96,    64,  96,   "average",   64),
    BlockSpec("3c",  320,   0,  128, 160,    64,  96,   "halve",      0),
    BlockSpec("4a",  576, 224,   64,  96,    96, 128,   "average",  128),
    BlockSpec("4b",  576, 192,   96, 128,    96, 128,   "average",  128),
    BlockSpec("4c",  576, 160,  128, 160,   128, 160,   "average",  128),
    BlockSpec("4d",  608,  96,  128, 192,   160, 192,   "average",  128),
    BlockSpec("4e",  608,   0,  128, 192,   192, 256,   "halve",      0),
    BlockSpec("5a", 1056, 352,  192, 320,   160, 224,   "average",  128),
    BlockSpec("5b", 1024, 352,  192, 320,   192, 224,   "maximum",  128),
)
# fmt: on


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
        for spec in convolutions():
            # Batch normalisation cancels this bias in training, but the public weights have it.
            layer = nn.Conv2d(
                spec.in_channels, spec.out_channels, spec.kernel_size, spec.stride, padding=spec.kernel_size // 2
            )
            assert layer.bias is not None
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
            self.add_module(spec.name, layer)
            self.add_module(f"{spec.name}_bn", nn.BatchNorm2d(spec.out_channels))

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
        for block in BLOCKS:
            *direct, pooled = block.branches()
            outputs = [self._run(chain, maps) for chain in direct]
            maps = torch.cat([*outputs, self._run(pooled, POOLS[block.pool](maps))], dim=1)
            if block.name in LEVELS:
                levels[LEVELS[block.name]] = maps
        return levels

    def _run(self, chain: Sequence[ConvSpec], maps: Tensor) -> Tensor:
        for spec in chain:
            conv, bn = getattr(self, spec.name), getattr(self, f"{spec.name}_bn")
            maps = F.relu(bn(conv(maps)), inplace=True)
        return maps


def convolutions() -> Iterator[ConvSpec]:
    """Yield all 69 convolutions, in the order of the public weights."""
    yield from STEM
    for block in BLOCKS:
        for chain in block.branches():
            yield from chain


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
