"""What happens to a picture between its file and the model, by name: the papers' augmentations and our own.

An `Augment` names four things: the side at which pictures are stored for an input of a given side, how a training
picture is cut and coloured, how a picture is seen at evaluation, and whose recipe it is. Both functions take one stored
picture, uint8 [C, h, w] with its own proportions, and give uint8 [C, side, side].

Chance enters as a row of numbers in [0, 1) per picture, drawn from (seed, epoch, step) alone. So a resumed run, another
number of threads or a cache changes nothing, and each function is a plain function that can be tested on its own.

A crop is a box in the stored picture that is scaled to the input in one go, also where a paper first squeezes the
picture to a square: squeezing only moves the box. The picture is interpolated once, not twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nearkin._common.registry import Registry
from nearkin.data.images import Images, Rows, whole_of
from nearkin.data.loading import empty_batch, prefetch
from nearkin.data.reading import scale, square
from nearkin.errors import import_extra

RandomChoice = Sequence[float]
CHANCES = 32  # numbers per picture; who uses which: 0-19 crop tries, 20-21 place, 22 mirror, 23-26 order, 27-30 colour
_TRIES = 10  # boxes that a random crop tries before it takes the largest that fits, as in torchvision


@dataclass(frozen=True)
class Augment:
    """One way from stored pictures to model inputs. `stored` pixels of shorter side serve an input of `shown`."""

    paper: str
    stored: int
    shown: int
    train: Callable[[Tensor, RandomChoice, int], Tensor]
    view: Callable[[Tensor, int], Tensor]

    def stored_side(self, side: int) -> int:
        """At which shorter side to store pictures for a model input of `side`."""
        return -(-side * self.stored // self.shown)

    def input_side(self, stored: int) -> int:
        """The model input that pictures stored at this side serve; undoes `stored_side`."""
        return stored * self.shown // self.stored

    def input_shape(self, stored: tuple[int, int, int]) -> tuple[int, int, int]:
        """The model input for images stored in this shape."""
        if self.plain:
            return stored
        side = self.input_side(stored[1])
        return stored[0], side, side

    @property
    def plain(self) -> bool:
        """Whether evaluation sees the middle square, which every store gives at once."""
        return self.view is square


AUGMENTS: Registry[Augment] = Registry("augmentation")


# --- pieces ----------------------------------------------------------------------------------------------------------


def cut(picture: Tensor, box: tuple[int, int, int, int], side: int) -> Tensor:
    """The box (top, left, height, width) of a picture, scaled to [C, side, side]."""
    top, left, height, width = box
    return scale(picture[:, top : top + height, left : left + width], side, side)


def random_box(
    height: int, width: int, chance: RandomChoice, *, area: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """A box of random area (as a share), proportions and place: torchvision's RandomResizedCrop.

    >>> random_box(100, 200, [0.0] * 32, area=(0.25, 1.0), ratio=(1.0, 1.0))
    (0, 0, 71, 71)
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for attempt in range(_TRIES):
        size = height * width * (area[0] + (area[1] - area[0]) * chance[2 * attempt])
        aspect = math.exp(low + (high - low) * chance[2 * attempt + 1])
        w, h = round(math.sqrt(size * aspect)), round(math.sqrt(size / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int((height - h + 1) * chance[20]), int((width - w + 1) * chance[21]), h, w
    h, w = height, width
    if width / height < ratio[0]:
        h = min(height, round(width / ratio[0]))
    elif width / height > ratio[1]:
        w = min(width, round(height * ratio[1]))
    return (height - h) // 2, (width - w) // 2, h, w


def middle_box(height: int, width: int, *, stored: int, shown: int, squeezed: bool) -> tuple[int, int, int, int]:
    """The middle part at evaluation: `shown` of `stored` pixels of the shorter side, or of each side if squeezed."""
    if squeezed:
        margin = round((stored - shown) / 2)
        return unsqueezed((margin, margin, shown, shown), stored, height, width)
    side = round(min(height, width) * shown / stored)
    return round((height - side) / 2), round((width - side) / 2), side, side


def unsqueezed(box: tuple[int, int, int, int], square_side: int, height: int, width: int) -> tuple[int, int, int, int]:
    """A box in the picture squeezed to square_side x square_side, as the same part of the picture itself.

    It holds at least one pixel, also of a picture so small that the box would be rounded to its edge.
    """
    top, left, h, w = box
    first_row = min(round(top * height / square_side), height - 1)
    first_column = min(round(left * width / square_side), width - 1)
    last_row, last_column = round((top + h) * height / square_side), round((left + w) * width / square_side)
    return first_row, first_column, max(1, last_row - first_row), max(1, last_column - first_column)


def mirrored(picture: Tensor, chance: RandomChoice) -> Tensor:
    return picture.flip(-1) if chance[22] < 0.5 else picture


def coloured(picture: Tensor, chance: RandomChoice, *, strength: float, hue: float = 0.0) -> Tensor:
    """Brightness, contrast, saturation (and hue) each changed by up to `strength`, in random order: ColorJitter.

    Computed in float and rounded once, where torchvision rounds down after each of them.
    """
    pixels = picture.float()
    brighter, starker, fuller = (1 + strength * (2 * chance[27 + i] - 1) for i in range(3))
    for step in sorted(range(4), key=lambda i: chance[23 + i]):
        if step == 0:
            pixels = pixels.mul_(brighter).clamp_(0, 255)
        elif step == 1:
            mean = _grey(pixels).mean()
            pixels = pixels.mul_(starker).add_(mean, alpha=1 - starker).clamp_(0, 255)
        elif step == 2 and len(pixels) == 3:
            grey = _grey(pixels)
            pixels = pixels.mul_(fuller).add_(grey, alpha=1 - fuller).clamp_(0, 255)
        elif step == 3 and hue and len(pixels) == 3:
            adjust_hue = import_extra("torchvision.transforms.v2.functional", extra="vision").adjust_hue
            pixels = adjust_hue(pixels.div_(255), hue * (2 * chance[30] - 1)).mul_(255)
    return pixels.round_().to(torch.uint8)


def _grey(pixels: Tensor) -> Tensor:
    if len(pixels) == 1:
        return pixels
    return (0.2989 * pixels[0]).add_(pixels[1], alpha=0.587).add_(pixels[2], alpha=0.114)


# --- whole ways ------------------------------------------------------------------------------------------------------


def resized_crop(
    picture: Tensor,
    chance: RandomChoice,
    side: int,
    *,
    area: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    squeezed: bool = False,
    jitter: float = 0.0,
    hue: float = 0.0,
) -> Tensor:
    """A random part at random size, scaled to the input, mirrored half of the time, perhaps with changed colours.

    squeezed: the box is drawn in the picture squeezed to a square, and its proportions are those it has there.
    """
    height, width = picture.shape[1:]
    if squeezed:
        top, left, h, w = random_box(256, 256, chance, area=area, ratio=ratio)
        box = unsqueezed((top, left, h, w), 256, height, width)
    else:
        box = random_box(height, width, chance, area=area, ratio=ratio)
    result = mirrored(cut(picture, box, side), chance)
    return coloured(result, chance, strength=jitter, hue=hue) if jitter or hue else result


def fixed_crop(picture: Tensor, chance: RandomChoice, side: int, *, stored: int, shown: int) -> Tensor:
    """A window of `shown` of `stored` pixels at a random place in the squeezed picture, mirrored half of the time."""
    height, width = picture.shape[1:]
    top, left = (int((stored - shown + 1) * chance[i]) for i in (20, 21))
    return mirrored(cut(picture, unsqueezed((top, left, shown, shown), stored, height, width), side), chance)


def middle(picture: Tensor, side: int, *, stored: int, shown: int, squeezed: bool) -> Tensor:
    """What evaluation sees: the middle part."""
    height, width = picture.shape[1:]
    return cut(picture, middle_box(height, width, stored=stored, shown=shown, squeezed=squeezed), side)


def unchanged(picture: Tensor, chance: RandomChoice, side: int) -> Tensor:
    return square(picture, side)


def shifted(picture: Tensor, chance: RandomChoice, side: int, *, most: float = 1 / 8) -> Tensor:
    """The middle square moved by up to an eighth of its side, its edge mirrored outwards, and mirrored by half."""
    pixels = mirrored(square(picture, side), chance)
    reach = int(most * side)
    down, right = (int((2 * reach + 1) * chance[i]) - reach for i in (20, 21))
    return pixels[:, _reflected(side, down)][:, :, _reflected(side, right)]


def _reflected(side: int, by: int) -> Tensor:
    places = (torch.arange(side) + by).abs()
    return torch.where(places < side, places, 2 * (side - 1) - places)


def _add(name: str, paper: str, *, stored: int, shown: int, train: Callable[..., Tensor], squeezed: bool) -> None:
    view = partial(middle, stored=stored, shown=shown, squeezed=squeezed)
    AUGMENTS.add(name, Augment(paper, stored, shown, train, view))


AUGMENTS.add("none", Augment("the middle square, always the same", 1, 1, unchanged, square))
AUGMENTS.add("light", Augment("ours, for small images: shift by up to 1/8, mirror", 1, 1, shifted, square))
# Song et al. 2016 and those who follow them squeeze to 256 x 256 before they crop.
_add(
    "ice",
    "Wang et al. 2019, Instance Cross Entropy",
    stored=256,
    shown=227,
    train=partial(fixed_crop, stored=256, shown=227),
    squeezed=True,
)
_CE = "Boudiaf et al. 2020, cross-entropy"
_add(
    "ce_cub",
    _CE,
    stored=256,
    shown=224,
    train=partial(resized_crop, area=(0.16, 1.0), jitter=0.25),
    squeezed=False,
)
_add(
    "ce_cars",
    _CE,
    stored=256,
    shown=224,
    train=partial(resized_crop, area=(0.16, 1.0), ratio=(1.0, 1.0), squeezed=True, jitter=0.3, hue=0.1),
    squeezed=True,
)
_add(
    "ce_sop",
    _CE,
    stored=256,
    shown=224,
    train=partial(resized_crop, area=(0.16, 1.0), squeezed=True),
    squeezed=True,
)
# Its published code does not resize In-Shop, whose pictures are 256 x 256 already.
_add("ce_inshop", _CE, stored=256, shown=224, train=partial(resized_crop, area=(0.16, 1.0)), squeezed=False)
_add("thesis", "Proxy-Anchor's code and the thesis after it", stored=256, shown=224, train=resized_crop, squeezed=False)
_add("mpa", "Multi-Proxy Anchor", stored=256, shown=224, train=resized_crop, squeezed=True)


# --- batches ---------------------------------------------------------------------------------------------------------


def chances(seed: int, epoch: int, step: int, count: int) -> Tensor:
    """The random numbers of one batch, [count, CHANCES]; the same for the same arguments on every machine."""
    [state] = np.random.SeedSequence((seed, epoch, step)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state) >> 1)  # manual_seed takes 63 bits everywhere
    return torch.rand(count, CHANCES, generator=generator, dtype=torch.float64)


def training_batches(
    images: Images,
    plan: Sequence[Rows],
    augment: Augment,
    *,
    seed: int,
    epoch: int,
    start: int = 0,
    workers: int = 0,
    first: int = 0,
) -> Iterator[Tensor]:
    """The batches plan[start:] of an epoch, augmented, uint8 [B, C, side, side], made ahead of their use.

    first: of several processes, the place of this rank's first row in the whole batch (`sampler.share.start`), so that
    an image looks the same whichever rank reads it.
    """
    if augment.train is unchanged:
        yield from eval_batches(images, plan[start:], augment, workers=workers)
        return
    side = augment.input_side(images.shape[1])

    def batch(step: int, rows: Rows) -> list[Callable[[], Tensor]]:
        drawn = chances(seed, epoch, step, first + len(rows))[first:].tolist()
        return _pieces(lambda i: augment.train(whole_of(images, int(rows[i])), drawn[i], side), rows, images, side)

    yield from prefetch((batch(step, plan[step]) for step in range(start, len(plan))), workers=workers)


def eval_batches(images: Images, plan: Iterable[Rows], augment: Augment, *, workers: int = 0) -> Iterator[Tensor]:
    """Batches as evaluation sees them, uint8 [B, C, side, side], made ahead of their use."""
    if augment.plain and not hasattr(images, "whole"):  # in memory already
        yield from (images.read(rows) for rows in plan)
        return
    side = augment.input_side(images.shape[1])

    def batch(rows: Rows) -> list[Callable[[], Tensor]]:
        return _pieces(lambda i: augment.view(whole_of(images, int(rows[i])), side), rows, images, side)

    yield from prefetch((batch(rows) for rows in plan), workers=workers)


def _pieces(make: Callable[[int], Tensor], rows: Rows, images: Images, side: int) -> list[Callable[[], Tensor]]:
    """The work of one batch in pieces for several threads; each fills its own rows of one tensor and returns it."""
    batch = empty_batch(len(rows), images.shape[0], side, side)

    def fill(places: range) -> Tensor:
        for place in places:
            batch[place] = make(place)
        return batch

    per_piece = 8
    return [partial(fill, range(s, min(s + per_piece, len(rows)))) for s in range(0, len(rows), per_piece)]
