"""Augmentations by name: those of the papers and our own, as functions of an image and a row of uniform draws.

The draws depend only on (seed, epoch, step): resuming, threads and the cache change nothing. A crop is a box in the
stored image, resized in one interpolation even where a paper first squashes the image, which only moves the box.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nearkin._common.registry import Registry
from nearkin.config.recipe import Recipe
from nearkin.data.images import ArrayImages, Images, PreparedImages, Rows
from nearkin.data.loading import empty_batch, prefetch
from nearkin.data.reading import resize, square
from nearkin.data.table import Table
from nearkin.errors import import_extra

Draws = Sequence[float]  # uniform random numbers in [0, 1) of one image
NUM_DRAWS = 32  # 0-19 crop attempts, 20-21 crop position, 22 flip, 23-26 order of the color jitter, 27-30 its factors
_CROP_ATTEMPTS = 10  # as in torchvision; then the largest centered box that fits
_SQUASH_SIZE = 256  # side of the square in which boxes of squashed images are drawn
_CHUNK_SIZE = 8  # images per task of a thread

CropBox = tuple[int, int, int, int]  # top, left, height, width
Range = tuple[float, float]
Task = Callable[[], Tensor]


@dataclass(frozen=True)
class Augment:
    paper: str  # whose recipe it is
    resize_size: int  # shorter side at which images are stored for an input of `crop_size` (often 256)
    crop_size: int  # input size in the paper (often 224)
    train: Callable[[Tensor, Draws, int], Tensor]  # training transform: (image, draws, side) -> [C, side, side]
    evaluate: Callable[[Tensor, int], Tensor]  # evaluation transform: (image, side) -> [C, side, side]

    def stored_side(self, side: int) -> int:
        """Return the shorter side at which to store images for a model input of `side`."""
        return -(-side * self.resize_size // self.crop_size)

    def input_side(self, stored: int) -> int:
        return stored * self.crop_size // self.resize_size

    def input_shape(self, stored: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the (channels, height, width) of the model input for images stored in this shape."""
        side = self.input_side(stored[1])
        return stored if self.evaluates_center_square else (stored[0], side, side)

    @property
    def evaluates_center_square(self) -> bool:
        """Whether evaluation uses the center square, which `Images.read` returns directly."""
        return self.evaluate is square


AUGMENTS: Registry[Augment] = Registry("augmentation")


def resized_crop(image: Tensor, box: CropBox, side: int) -> Tensor:
    """Crop an image and resize the crop: torchvision's resized_crop. Returns uint8 [C, side, side]."""
    top, left, height, width = box
    return resize(image[:, top : top + height, left : left + width], side, side)


def random_crop_box(height: int, width: int, draws: Draws, *, scale: Range, ratio: Range) -> CropBox:
    """Draw the box of torchvision's RandomResizedCrop."""
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for attempt in range(_CROP_ATTEMPTS):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[2 * attempt])
        aspect = math.exp(low + (high - low) * draws[2 * attempt + 1])
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int((height - h + 1) * draws[20]), int((width - w + 1) * draws[21]), h, w
    h, w = height, width
    if width / height < ratio[0]:
        h = min(height, round(width / ratio[0]))
    elif width / height > ratio[1]:
        w = min(width, round(height * ratio[1]))
    return (height - h) // 2, (width - w) // 2, h, w


def center_crop_box(height: int, width: int, *, resize_size: int, crop_size: int, squash: bool) -> CropBox:
    """Compute the box of resize-then-center-crop in an image of any size. Returns top, left, height, width."""
    if squash:
        margin = round((resize_size - crop_size) / 2)
        return unsquash_box((margin, margin, crop_size, crop_size), resize_size, height, width)
    side = round(min(height, width) * crop_size / resize_size)
    return round((height - side) / 2), round((width - side) / 2), side, side


def unsquash_box(box: CropBox, square_side: int, height: int, width: int) -> CropBox:
    """Map a box in an image squashed to a square back to the image itself."""
    top, left, h, w = box
    first_row = min(round(top * height / square_side), height - 1)
    first_column = min(round(left * width / square_side), width - 1)
    last_row, last_column = round((top + h) * height / square_side), round((left + w) * width / square_side)
    return first_row, first_column, max(1, last_row - first_row), max(1, last_column - first_column)


def random_hflip(image: Tensor, draws: Draws) -> Tensor:
    return image.flip(-1) if draws[22] < 0.5 else image


def color_jitter(image: Tensor, draws: Draws, *, strength: float, hue: float = 0.0) -> Tensor:
    """torchvision's ColorJitter, in float and rounded once; torchvision rounds down after each step."""
    pixels = image.float()
    brightness, contrast, saturation = (1 + strength * (2 * draws[27 + i] - 1) for i in range(3))
    for step in sorted(range(4), key=lambda i: draws[23 + i]):
        if step == 0:
            pixels = pixels.mul_(brightness).clamp_(0, 255)
        elif step == 1:
            mean = _to_grayscale(pixels).mean()
            pixels = pixels.mul_(contrast).add_(mean, alpha=1 - contrast).clamp_(0, 255)
        elif step == 2 and len(pixels) == 3:
            gray = _to_grayscale(pixels)
            pixels = pixels.mul_(saturation).add_(gray, alpha=1 - saturation).clamp_(0, 255)
        elif step == 3 and hue and len(pixels) == 3:
            adjust_hue = import_extra("torchvision.transforms.v2.functional", extra="images").adjust_hue
            pixels = adjust_hue(pixels.div_(255), hue * (2 * draws[30] - 1)).mul_(255)
    return pixels.round_().to(torch.uint8)


def _to_grayscale(pixels: Tensor) -> Tensor:
    if len(pixels) == 1:
        return pixels
    return (0.2989 * pixels[0]).add_(pixels[1], alpha=0.587).add_(pixels[2], alpha=0.114)


def random_resized_crop(
    image: Tensor,
    draws: Draws,
    side: int,
    *,
    scale: Range = (0.08, 1.0),
    ratio: Range = (3 / 4, 4 / 3),
    squash: bool = False,
    jitter: float = 0.0,
    hue: float = 0.0,
) -> Tensor:
    """Random resized crop, flip and color jitter. With `squash` the box is drawn in the image squashed to a square."""
    height, width = image.shape[1:]
    if squash:
        box = random_crop_box(_SQUASH_SIZE, _SQUASH_SIZE, draws, scale=scale, ratio=ratio)
        box = unsquash_box(box, _SQUASH_SIZE, height, width)
    else:
        box = random_crop_box(height, width, draws, scale=scale, ratio=ratio)
    result = random_hflip(resized_crop(image, box, side), draws)
    return color_jitter(result, draws, strength=jitter, hue=hue) if jitter or hue else result


def random_crop(image: Tensor, draws: Draws, side: int, *, resize_size: int, crop_size: int) -> Tensor:
    height, width = image.shape[1:]
    top, left = (int((resize_size - crop_size + 1) * draws[i]) for i in (20, 21))
    box = unsquash_box((top, left, crop_size, crop_size), resize_size, height, width)
    return random_hflip(resized_crop(image, box, side), draws)


def center_crop(image: Tensor, side: int, *, resize_size: int, crop_size: int, squash: bool) -> Tensor:
    """Resize and center crop for evaluation, in one interpolation. Returns uint8 [C, side, side]."""
    box = center_crop_box(*image.shape[1:], resize_size=resize_size, crop_size=crop_size, squash=squash)
    return resized_crop(image, box, side)


def no_augmentation(image: Tensor, draws: Draws, side: int) -> Tensor:
    return square(image, side)


def random_shift(image: Tensor, draws: Draws, side: int, *, max_shift: float = 1 / 8) -> Tensor:
    """Random shift of the center square with reflected edges, and random horizontal flip."""
    pixels = random_hflip(square(image, side), draws)
    reach = int(max_shift * side)
    dy, dx = (int((2 * reach + 1) * draws[i]) - reach for i in (20, 21))
    return pixels[:, _reflected_indices(side, dy)][:, :, _reflected_indices(side, dx)]


def _reflected_indices(side: int, shift: int) -> Tensor:
    indices = (torch.arange(side) + shift).abs()
    return torch.where(indices < side, indices, 2 * (side - 1) - indices)


def _add(name: str, paper: str, train: Callable[..., Tensor], *, crop_size: int = 224, squash: bool = False) -> None:
    evaluate = partial(center_crop, resize_size=256, crop_size=crop_size, squash=squash)
    AUGMENTS.add(name, Augment(paper, 256, crop_size, train, evaluate))


AUGMENTS.add("none", Augment("no augmentation: the center square", 1, 1, no_augmentation, square))
AUGMENTS.add("light", Augment("ours, for small images: shift by up to 1/8, flip", 1, 1, random_shift, square))
# Song et al. 2016 and those who follow them squash images to 256 x 256 before they crop.
_ICE = "Wang et al. 2019, Instance Cross Entropy"
_add("ice", _ICE, partial(random_crop, resize_size=256, crop_size=227), crop_size=227, squash=True)
_CE, _ce_crop = "Boudiaf et al. 2020, cross-entropy", partial(random_resized_crop, scale=(0.16, 1.0))
_add("ce_cub", _CE, partial(_ce_crop, jitter=0.25))
_add("ce_cars", _CE, partial(_ce_crop, ratio=(1.0, 1.0), squash=True, jitter=0.3, hue=0.1), squash=True)
_add("ce_sop", _CE, partial(_ce_crop, squash=True), squash=True)
# Their published code does not resize In-Shop, whose images are 256 x 256 already.
_add("ce_inshop", _CE, _ce_crop)
_add("thesis", "Proxy-Anchor's code and the thesis after it", random_resized_crop)
_add("mpa", "Multi-Proxy Anchor", random_resized_crop, squash=True)


def random_draws(seed: int, epoch: int, step: int, count: int) -> Tensor:
    """Draw the random numbers of one batch; the same on every machine for the same arguments."""
    [state] = np.random.SeedSequence((seed, epoch, step)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state) >> 1)  # manual_seed takes 63 bits everywhere
    return torch.rand(count, NUM_DRAWS, generator=generator, dtype=torch.float64)


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
    """Yield the augmented batches plan[start:] of an epoch; `first` is this rank's first row in the global batch."""
    if augment.train is no_augmentation:
        return eval_batches(images, plan[start:], augment, workers=workers)
    side = augment.input_side(images.shape[1])

    def transforms(step: int) -> Callable[[int, Tensor], Tensor]:
        draws = random_draws(seed, epoch, step, first + len(plan[step]))[first:].tolist()
        return lambda i, image: augment.train(image, draws[i], side)

    jobs = (_batch_tasks(images, plan[step], transforms(step), side) for step in range(start, len(plan)))
    return prefetch(jobs, workers=workers)


def eval_batches(images: Images, plan: Iterable[Rows], augment: Augment, *, workers: int = 0) -> Iterator[Tensor]:
    """Yield batches with the evaluation transform, prefetched in threads."""
    if isinstance(images, PreparedImages):
        inputs = ([partial(images.inputs, rows)] for rows in plan)
        return (job() for [job] in inputs) if images.workers == 1 else prefetch(inputs, workers=workers)
    if augment.evaluates_center_square and isinstance(images, ArrayImages):
        return map(images.read, plan)
    side = augment.input_side(images.shape[1])
    jobs = (_batch_tasks(images, rows, lambda i, image: augment.evaluate(image, side), side) for rows in plan)
    return prefetch(jobs, workers=workers)


def _batch_tasks(images: Images, rows: Rows, transform: Callable[[int, Tensor], Tensor], side: int) -> list[Task]:
    """Split one batch into tasks for several threads; each fills its own rows of one tensor and returns it."""
    batch = empty_batch(len(rows), images.shape[0], side, side)

    def fill(indices: range) -> Tensor:
        for index in indices:
            batch[index] = transform(index, images.whole(int(rows[index])))
        return batch

    return [partial(fill, range(s, min(s + _CHUNK_SIZE, len(rows)))) for s in range(0, len(rows), _CHUNK_SIZE)]


def training_inputs(
    table: Table,
    plan: Sequence[Rows],
    recipe: Recipe,
    *,
    epoch: int,
    start: int = 0,
    first: int = 0,
    batch_size: int | None = None,
) -> Iterator[Tensor]:
    """Yield the batches plan[start:] of an epoch; those of a rank begin at row `first` of `batch_size` global ones."""
    if table.features is None:
        order = {"seed": recipe.seed, "epoch": epoch, "start": start, "first": first}
        augment = AUGMENTS[recipe.data.augment]
        yield from training_batches(table.images, plan, augment, workers=recipe.data.num_workers, **order)
        return
    # Features are mixed with others of their class and with Gaussian noise as the recipe says.
    features, labels = torch.from_numpy(table.features), table.labels
    noise, mix = recipe.train.feature_noise, recipe.train.feature_mix
    std = features.std(dim=0) if noise else torch.empty(0)
    by_class = np.argsort(labels, kind="stable")
    class_sizes = np.bincount(labels, minlength=table.num_classes)
    class_starts = np.cumsum(class_sizes) - class_sizes
    for step in range(start, len(plan)):
        rows = plan[step]
        batch = features[torch.from_numpy(rows)]
        # Drawn for the global batch, so that an image does not depend on the number of ranks.
        rng = np.random.default_rng((recipe.seed, epoch, step, 0))
        size, share = batch_size or len(rows), slice(first, first + len(rows))
        if (
            recipe.model.freeze == "stages" and recipe.model.views == 2
        ):  # a row has the feature maps of the image and of its mirror image
            views = torch.from_numpy(rng.integers(2, size=size)[share])
            batch = batch.view(len(batch), 2, -1)[torch.arange(len(batch)), views]
        if mix:
            classes = labels[rows]
            within_class = (rng.random(size)[share] * class_sizes[classes]).astype(np.int64)
            partners = by_class[class_starts[classes] + within_class]
            weight = torch.from_numpy(rng.random((size, 1))[share] * mix).float()
            batch = batch.lerp(features[torch.from_numpy(partners)], weight)
        if noise:
            draws = rng.standard_normal((size, batch.shape[1]))[share]
            batch = batch + noise * std * torch.from_numpy(draws).float()
        yield batch
