"""Augmentations: torchvision's arithmetic, the papers' numbers, random draws from (seed, epoch, step) only."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from nearkin.data.images import ArrayImages
from nearkin.data.transforms import (
    AUGMENTS,
    NUM_DRAWS,
    center_crop_box,
    color_jitter,
    eval_batches,
    random_crop_box,
    random_draws,
    resized_crop,
    training_batches,
)
from nearkin.errors import UnknownNameError

PAPERS = ["ice", "ce_cub", "ce_cars", "ce_sop", "ce_inshop", "thesis", "mpa"]


def make_image(height=256, width=340, channels=3, seed=0) -> torch.Tensor:
    coarse = torch.randint(0, 256, (1, channels, 16, 20), generator=torch.Generator().manual_seed(seed)).float()
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 255)[0].to(torch.uint8)


def max_difference(a: torch.Tensor, b: torch.Tensor) -> int:
    assert a.shape == b.shape
    return int((a.int() - b.int()).abs().max())


def draws(**chosen: float) -> list[float]:
    """0.5 everywhere, except at the indices named d0, d1, ..."""
    values = [0.5] * NUM_DRAWS
    for name, value in chosen.items():
        values[int(name[1:])] = value
    return values


def test_resized_crop_matches_torchvision():
    whole = make_image()
    for box in [(0, 0, 256, 340), (10, 20, 100, 133), (200, 300, 30, 40)]:
        ours, theirs = resized_crop(whole, box, 224), F.resized_crop(whole, *box, [224, 224], antialias=True)
        # Where torchvision has no uint8 kernel for the processor, it resizes in float32 and rounds once.
        assert max_difference(ours, theirs) <= 1
        top, left, height, width = box
        pixels = Image.fromarray(whole.permute(1, 2, 0).contiguous().numpy())
        pillow = pixels.crop((left, top, left + width, top + height)).resize((224, 224), Image.Resampling.BILINEAR)
        assert (ours != torch.from_numpy(np.array(pillow)).permute(2, 0, 1)).float().mean() < 0.002


@pytest.mark.parametrize(("scale", "ratio"), [((0.08, 1.0), (3 / 4, 4 / 3)), ((0.16, 1.0), (1.0, 1.0))])
@pytest.mark.parametrize(("height", "width"), [(256, 340), (256, 256), (600, 150)])
def test_random_crop_boxes_are_distributed_as_in_torchvision(height, width, scale, ratio):
    rows = random_draws(0, 0, 0, 3000).tolist()
    boxes = np.array([random_crop_box(height, width, row, scale=scale, ratio=ratio) for row in rows], float)
    torch.manual_seed(0)
    whole = torch.empty(3, height, width)
    reference = v2.RandomResizedCrop(224, scale=scale, ratio=ratio)
    params = [reference.make_params([whole]) for _ in range(3000)]
    expected = np.array([[p["top"], p["left"], p["height"], p["width"]] for p in params], float)
    assert np.all(boxes[:, :2] >= 0)
    assert np.all(boxes[:, 0] + boxes[:, 2] <= height)
    assert np.all(boxes[:, 1] + boxes[:, 3] <= width)
    for quantile in (0.1, 0.5, 0.9):
        assert np.abs(np.quantile(boxes, quantile, 0) - np.quantile(expected, quantile, 0)).max() < 0.06 * max(
            height, width
        )
    assert np.abs(boxes.mean(0) - expected.mean(0)).max() < 0.02 * max(height, width)


# d23 to d26 determine the order of the steps; 1 or 0 in d27, d28 and d29 is the largest or smallest factor.
@pytest.mark.parametrize("end", [0.0, 1.0])
@pytest.mark.parametrize(
    ("index", "adjust"), [(27, F.adjust_brightness), (28, F.adjust_contrast), (29, F.adjust_saturation)]
)
def test_color_jitter_matches_torchvision(index, adjust, end):
    whole = make_image()
    changed = color_jitter(whole, draws(**{f"d{index}": end}), strength=0.3)
    assert max_difference(changed, adjust(whole, 0.7 + 0.6 * end)) <= 1  # torchvision rounds down
    both = color_jitter(whole, draws(d23=0.9, d24=0.1, d27=end, d28=1.0), strength=0.3)  # contrast before brightness
    assert max_difference(both, F.adjust_brightness(F.adjust_contrast(whole, 1.3), 0.7 + 0.6 * end)) <= 3


def test_hue_jitter_matches_torchvision_and_grey_stays_grey():
    whole = make_image()
    assert max_difference(color_jitter(whole, draws(d30=1.0), strength=0.0, hue=0.1), F.adjust_hue(whole, 0.1)) <= 2
    grey = make_image(channels=1)
    assert (
        max_difference(
            color_jitter(grey, draws(d27=1.0, d29=0.0), strength=0.3, hue=0.1), F.adjust_brightness(grey, 1.3)
        )
        <= 1
    )


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize(("height", "width"), [(256, 340), (340, 256), (256, 256)])
def test_evaluation_crops_match_the_papers(name, height, width):
    shown = 227 if name == "ice" else 224
    whole = make_image(height, width)
    augment = AUGMENTS[name]
    assert (augment.stored_side(shown), augment.input_side(256)) == (256, shown)
    seen = augment.evaluate(whole, shown)
    if name in {"ce_cub", "ce_inshop", "thesis"}:
        assert torch.equal(seen, F.center_crop(whole, [shown, shown]))
    else:  # squashed to 256 x 256 first; ours interpolates once, the papers' code twice
        expected = F.center_crop(F.resize(whole, [256, 256], antialias=True), [shown, shown])
        assert (seen.int() - expected.int()).abs().float().mean() < 2


@pytest.mark.parametrize("name", [*PAPERS, "light", "none"])
def test_every_augmentation_returns_its_shape_for_any_image(name):
    augment = AUGMENTS[name]
    for side in (8, 64, 224):
        stored = augment.stored_side(side)
        assert augment.input_side(stored) == side
        assert augment.input_shape((3, stored, stored)) == (3, side, side)
    for height, width in [(64, 64), (64, 200), (200, 64), (9, 30)]:
        for row in [*random_draws(0, 0, 0, 20).tolist(), [0.0] * NUM_DRAWS, [1 - 1e-12] * NUM_DRAWS]:
            for channels in (1, 3):
                result = augment.train(make_image(height, width, channels), row, 56)
                assert result.shape == (channels, 56, 56)
                assert result.dtype == torch.uint8
        assert augment.evaluate(make_image(height, width), 56).shape == (3, 56, 56)


def test_crop_areas_of_each_paper():
    rows = random_draws(3, 0, 0, 300).tolist()
    # Pixels encode their position: red the row, green the column, so the crop's corners reveal its box.
    down, right = torch.arange(256).view(-1, 1).expand(256, 256), torch.arange(256).view(1, -1).expand(256, 256)
    gradient = torch.stack([down, right, torch.zeros(256, 256).long()]).to(torch.uint8)
    areas = {}
    for name in ("ice", "ce_sop", "thesis", "mpa"):
        side = 227 if name == "ice" else 224
        crops = torch.stack([AUGMENTS[name].train(gradient, row, side) for row in rows]).float()
        heights = crops[:, 0, -1, 0] - crops[:, 0, 0, 0]
        widths = (crops[:, 1, 0, -1] - crops[:, 1, 0, 0]).abs()
        areas[name] = (heights * widths / 256**2).numpy()
        assert 0.4 < (crops[:, 1, 0, -1] < crops[:, 1, 0, 0]).float().mean() < 0.6  # flipped
    assert np.ptp(areas["ice"]) < 0.02
    assert areas["ice"].mean() == pytest.approx((227 / 256) ** 2, abs=0.01)
    assert areas["ce_sop"].min() > 0.14
    assert areas["thesis"].min() < 0.1
    assert areas["mpa"].min() < 0.1


def test_center_crop_of_a_squashed_image_scales_with_both_sides():
    assert center_crop_box(256, 512, resize_size=256, crop_size=224, squash=False) == (16, 144, 224, 224)
    assert center_crop_box(256, 512, resize_size=256, crop_size=224, squash=True) == (16, 32, 224, 448)


def test_light_shifts_by_at_most_an_eighth_and_flips():
    side = 32
    whole = make_image(side, side)
    shifts = set()
    for row in random_draws(0, 0, 0, 200).tolist():
        result = AUGMENTS["light"].train(whole, row, side)
        base = whole.flip(-1) if row[22] < 0.5 else whole
        padded = np.pad(base.numpy(), ((0, 0), (4, 4), (4, 4)), mode="reflect")
        matches = [
            (y, x)
            for y in range(9)
            for x in range(9)
            if np.array_equal(padded[:, y : y + side, x : x + side], result.numpy())
        ]
        assert len(matches) == 1
        shifts |= set(matches)
    assert len(shifts) > 60


def test_random_draws_depend_only_on_seed_epoch_and_step():
    first = random_draws(1, 2, 3, 5)
    torch.manual_seed(9)
    assert torch.equal(first, random_draws(1, 2, 3, 5))
    assert first.shape == (5, NUM_DRAWS)
    assert ((first >= 0) & (first < 1)).all()
    others = [random_draws(0, 2, 3, 5), random_draws(1, 3, 3, 5), random_draws(1, 2, 4, 5)]
    assert not any(torch.equal(first, other) for other in others)
    before = torch.get_rng_state()
    random_draws(1, 2, 3, 5)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ["none", "light", "ce_cub"])
def test_batches_do_not_depend_on_threads_or_the_start(name):
    store = ArrayImages(np.random.default_rng(0).integers(0, 255, (40, 3, 24, 24), np.uint8))
    plan = [np.arange(s, s + 10) for s in range(0, 40, 10)]
    batches = [
        list(training_batches(store, plan, AUGMENTS[name], seed=1, epoch=2, workers=workers, start=start))
        for workers, start in [(1, 0), (3, 0), (2, 2)]
    ]
    assert len(batches[0]) == 4
    assert torch.equal(torch.cat(batches[0]), torch.cat(batches[1]))
    assert torch.equal(torch.cat(batches[0][2:]), torch.cat(batches[2]))
    side = AUGMENTS[name].input_side(24)
    assert batches[0][0].shape == (10, 3, side, side)
    [seen] = eval_batches(store, [np.array([4, 2])], AUGMENTS[name])
    assert torch.equal(seen, F.center_crop(store.pixels[[4, 2]], [side, side]))


def test_an_image_is_augmented_the_same_way_on_every_rank():
    store = ArrayImages(np.random.default_rng(0).integers(0, 255, (40, 3, 24, 24), np.uint8))
    whole = [np.arange(s, s + 20) for s in (0, 20)]
    kwargs = {"augment": AUGMENTS["ce_cub"], "seed": 1, "epoch": 2}
    single = list(training_batches(store, whole, **kwargs))
    ranks = [
        list(training_batches(store, [rows[share] for rows in whole], **kwargs, first=share.start))
        for share in (slice(0, 7), slice(7, 13), slice(13, 20))
    ]
    for step, batch in enumerate(single):
        assert torch.equal(torch.cat([rank[step] for rank in ranks]), batch)


@pytest.mark.parametrize("name", PAPERS)
def test_images_of_a_few_pixels_can_be_cropped(name):
    augment = AUGMENTS[name]
    rows = [draws(), *([edge] * NUM_DRAWS for edge in (0.0, 0.999)), *random_draws(0, 0, 0, 100).tolist()]
    for height, width in ((1, 1), (1, 4), (4, 1), (2, 2), (3, 3)):
        tiny = make_image(height, width)
        assert augment.evaluate(tiny, 8).shape == (3, 8, 8)
        for row in rows:
            assert augment.train(tiny, row, 8).shape == (3, 8, 8)


def test_an_unknown_augmentation_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'ce_cub'"):
        AUGMENTS["cecub"]
