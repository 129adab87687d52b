"""BN-Inception (GoogLeNet V2), the network of most metric learning papers, under the names of its public weights.

Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate Shift", 2015.
One table of widths makes the layers and drives them; docs/bn-inception.md lists what a file of weights must hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nearkin.errors import DataError
from nearkin.models._base import Backbone

# What the public weights were trained on: bytes as they are (no division by 255), blue first, less a mean per channel.
MEAN = (104.0, 117.0, 128.0)  # of blue, green, red
STD = (1.0, 1.0, 1.0)

# After these blocks the papers attach their low, middle and high embedding.
STAGES = {"3c": "low", "4e": "mid", "5b": "high"}

SMALLEST_SIDE = 7  # below it a pooling of the stem has nothing left to pool


class Convolution(NamedTuple):
    """A convolution with bias; batch normalisation (named `<name>_bn`) and ReLU always follow."""

    name: str
    inputs: int
    outputs: int
    kernel: int
    stride: int = 1


class Block(NamedTuple):
    """Widths of one inception block. No 1x1 and no projection: it halves the map and lets its pooled input through."""

    name: str
    inputs: int
    single: int  # 1x1
    reduce: int  # 1x1 before
    triple: int  # the 3x3
    double_reduce: int  # 1x1 before
    double: int  # two 3x3
    pool: str
    project: int  # 1x1 after the pooling

    def branches(self) -> list[list[Convolution]]:
        """Chains of convolutions side by side, in the order in which their results are joined.

        The last chain works on the pooled input, and is empty where that goes through as it is.
        """
        stride = 2 if self.pool == "halve" else 1
        chains = [
            [Convolution("1x1", self.inputs, self.single, 1)],
            [
                Convolution("3x3_reduce", self.inputs, self.reduce, 1),
                Convolution("3x3", self.reduce, self.triple, 3, stride),
            ],
            [
                Convolution("double_3x3_reduce", self.inputs, self.double_reduce, 1),
                Convolution("double_3x3_1", self.double_reduce, self.double, 3),
                Convolution("double_3x3_2", self.double, self.double, 3, stride),
            ],
            [Convolution("pool_proj", self.inputs, self.project, 1)],
        ]
        if stride == 2:
            chains = [*chains[1:3], []]
        return [[c._replace(name=f"inception_{self.name}_{c.name}") for c in chain] for chain in chains]

    @property
    def outputs(self) -> int:
        return sum(chain[-1].outputs if chain else self.inputs for chain in self.branches())


STEM = (
    Convolution("conv1_7x7_s2", 3, 64, 7, stride=2),
    Convolution("conv2_3x3_reduce", 64, 64, 1),
    Convolution("conv2_3x3", 64, 192, 3),
)
# fmt: off
BLOCKS = (
    #    name  inputs 1x1  reduce 3x3  reduce double  pooling    projection
    Block("3a",  192,  64,   64,  64,    64,  96,   "average",   32),
    Block("3b",  256,  64,   64,  96,    64,  96,   "average",   64),
    Block("3c",  320,   0,  128, 160,    64,  96,   "halve",      0),
    Block("4a",  576, 224,   64,  96,    96, 128,   "average",  128),
    Block("4b",  576, 192,   96, 128,    96, 128,   "average",  128),
    Block("4c",  576, 160,  128, 160,   128, 160,   "average",  128),
    Block("4d",  608,  96,  128, 192,   160, 192,   "average",  128),
    Block("4e",  608,   0,  128, 192,   192, 256,   "halve",      0),
    Block("5a", 1056, 352,  192, 320,   160, 224,   "average",  128),
    Block("5b", 1024, 352,  192, 320,   192, 224,   "maximum",  128),
)
# fmt: on


class BNInception(Backbone):
    """Images [B, 3, H, W] in, maps [B, 1024, h, w] out: 7 x 7 of 224 x 224. 10.3 million parameters.

    Made without weights it starts from He's initialisation.

    >>> model = BNInception().eval()
    >>> list(model(torch.zeros(1, 3, 96, 96)).shape)
    [1, 1024, 3, 3]
    """

    num_features = BLOCKS[-1].outputs

    def __init__(self) -> None:
        super().__init__()
        for c in convolutions():
            # A bias before a batch normalisation changes nothing in training; the public weights have it nevertheless.
            layer = nn.Conv2d(c.inputs, c.outputs, c.kernel, c.stride, padding=c.kernel // 2)
            assert layer.bias is not None
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
            self.add_module(c.name, layer)
            self.add_module(f"{c.name}_bn", nn.BatchNorm2d(c.outputs))

    def forward(self, images: Tensor) -> Tensor:
        return self.stages(images)["high"]

    def stages(self, images: Tensor) -> dict[str, Tensor]:
        """Maps at three depths, of 224 x 224 images: low [B, 576, 14, 14], mid [B, 1056, 7, 7], high [B, 1024, 7, 7].

        These are the taps L, M and H of the ICE paper: the outputs of the blocks 3c, 4e and 5b.
        """
        if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[2:]) < SMALLEST_SIDE:
            raise DataError(
                f"bn_inception: expected colour images [B, 3, H, W] of {SMALLEST_SIDE} pixels a side or more, "
                f"got {list(images.shape)}."
            )
        first, *second = STEM
        maps = _shrink(self._chain([first], images))
        maps = _shrink(self._chain(second, maps))
        taken = {}
        for block in BLOCKS:
            *direct, pooled = block.branches()
            parts = [self._chain(chain, maps) for chain in direct]
            maps = torch.cat([*parts, self._chain(pooled, POOLS[block.pool](maps))], dim=1)
            if block.name in STAGES:
                taken[STAGES[block.name]] = maps
        return taken

    def _chain(self, chain: list[Convolution], maps: Tensor) -> Tensor:
        for c in chain:
            convolve, normalise = getattr(self, c.name), getattr(self, f"{c.name}_bn")
            maps = F.relu(normalise(convolve(maps)), inplace=True)
        return maps


def convolutions() -> Iterator[Convolution]:
    """All 69 of them, in the order of the public file."""
    yield from STEM
    for block in BLOCKS:
        for chain in block.branches():
            yield from chain


def _shrink(maps: Tensor) -> Tensor:
    return F.max_pool2d(maps, 3, stride=2, ceil_mode=True)


def _halve(maps: Tensor) -> Tensor:
    """Pool as `_shrink` does, but round an odd side up, as the convolutions beside it do: so any image size works."""
    odd_rows, odd_columns = maps.shape[2] % 2, maps.shape[3] % 2
    if odd_rows or odd_columns:
        # Zeros never win, since what comes here has been through a ReLU.
        maps = F.pad(maps, (0, odd_columns, 0, odd_rows))
    return _shrink(maps)


def _average(maps: Tensor) -> Tensor:
    return F.avg_pool2d(maps, 3, stride=1, padding=1)  # zeros beyond the edge count, as in the public network


def _maximum(maps: Tensor) -> Tensor:
    return F.max_pool2d(maps, 3, stride=1, padding=1)


POOLS: dict[str, Callable[[Tensor], Tensor]] = {"average": _average, "maximum": _maximum, "halve": _halve}
