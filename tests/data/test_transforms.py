"""Augmentations: torchvision's arithmetic, the papers' numbers, and chance that depends on (seed, epoch, step) only."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from nearkin.data.images import ArrayImages
from nearkin.data.transforms import (
    AUGMENTS,
    CHANCES,
    chances,
    coloured,
    cut,
    eval_batches,
    middle_box,
    random_box,
    training_batches,
)
from nearkin.errors import UnknownNameError

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")

PAPERS = ["ice", "ce_cub", "ce_cars", "ce_sop", "ce_inshop", "thesis", "mpa"]


def picture(height=256, width=340, channels=3, seed=0) -> torch.Tensor:
    coarse = torch.randint(0, 256, (1, channels, 16, 20), generator=torch.Generator().manual_seed(seed)).float()
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 255)[0].to(torch.uint8)


def far(a: torch.Tensor, b: torch.Tensor) -> int:
    assert a.shape == b.shape
    return int((a.int() - b.int()).abs().max())


def chance(**chosen: float) -> list[float]:
    """Middle values, except those named c0, c1, ..."""
    values = [0.5] * CHANCES
    for name, value in chosen.items():
        values[int(name[1:])] = value
    return values


def test_a_crop_is_torchvisions_resized_crop():
    whole = picture()
    for box in [(0, 0, 256, 340), (10, 20, 100, 133), (200, 300, 30, 40)]:
        assert torch.equal(cut(whole, box, 224), F.resized_crop(whole, *box, [224, 224], antialias=True))


@pytest.mark.parametrize(("area", "ratio"), [((0.08, 1.0), (3 / 4, 4 / 3)), ((0.16, 1.0), (1.0, 1.0))])
@pytest.mark.parametrize(("height", "width"), [(256, 340), (256, 256), (600, 150)])
def test_random_boxes_are_distributed_as_torchvisions(height, width, area, ratio):
    drawn = chances(0, 0, 0, 3000).tolist()
    ours = np.array([random_box(height, width, row, area=area, ratio=ratio) for row in drawn], float)
    torch.manual_seed(0)
    whole = torch.empty(3, height, width)
    reference = v2.RandomResizedCrop(224, scale=area, ratio=ratio)
    theirs = [reference.make_params([whole]) for _ in range(3000)]
    theirs = np.array([[p["top"], p["left"], p["height"], p["width"]] for p in theirs], float)
    assert np.all(ours[:, :2] >= 0)
    assert np.all(ours[:, 0] + ours[:, 2] <= height)
    assert np.all(ours[:, 1] + ours[:, 3] <= width)
    for quantile in (0.1, 0.5, 0.9):
        assert np.abs(np.quantile(ours, quantile, 0) - np.quantile(theirs, quantile, 0)).max() < 0.06 * max(
            height, width
        )
    assert np.abs(ours.mean(0) - theirs.mean(0)).max() < 0.02 * max(height, width)


# c23 to c26 put the steps in order; c27, c28 and c29 at 1 or 0 choose the largest or smallest factor.
@pytest.mark.parametrize("end", [0.0, 1.0])
@pytest.mark.parametrize(
    ("index", "adjust"), [(27, F.adjust_brightness), (28, F.adjust_contrast), (29, F.adjust_saturation)]
)
def test_colours_change_as_in_torchvision(index, adjust, end):
    whole = picture()
    changed = coloured(whole, chance(**{f"c{index}": end}), strength=0.3)
    assert far(changed, adjust(whole, 0.7 + 0.6 * end)) <= 1  # torchvision rounds down
    both = coloured(whole, chance(c23=0.9, c24=0.1, c27=end, c28=1.0), strength=0.3)  # contrast before brightness
    assert far(both, F.adjust_brightness(F.adjust_contrast(whole, 1.3), 0.7 + 0.6 * end)) <= 3


def test_hue_turns_as_in_torchvision_and_grey_stays_grey():
    whole = picture()
    assert far(coloured(whole, chance(c30=1.0), strength=0.0, hue=0.1), F.adjust_hue(whole, 0.1)) <= 2
    grey = picture(channels=1)
    assert far(coloured(grey, chance(c27=1.0, c29=0.0), strength=0.3, hue=0.1), F.adjust_brightness(grey, 1.3)) <= 1


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize(("height", "width"), [(256, 340), (340, 256), (256, 256)])
def test_evaluation_sees_what_the_papers_see(name, height, width):
    shown = 227 if name == "ice" else 224
    whole = picture(height, width)
    augment = AUGMENTS[name]
    assert (augment.stored_side(shown), augment.input_side(256)) == (256, shown)
    seen = augment.view(whole, shown)
    if name in {"ce_cub", "ce_inshop", "thesis"}:
        assert torch.equal(seen, F.center_crop(whole, [shown, shown]))
    else:  # squeezed to 256 x 256 first; ours interpolates once where the papers' code does twice
        expected = F.center_crop(F.resize(whole, [256, 256], antialias=True), [shown, shown])
        assert (seen.int() - expected.int()).abs().float().mean() < 2


@pytest.mark.parametrize("name", [*PAPERS, "light", "none"])
def test_every_augmentation_gives_its_shape_and_stays_inside(name):
    augment = AUGMENTS[name]
    for side in (8, 64, 224):
        stored = augment.stored_side(side)
        assert augment.input_side(stored) == side
        assert augment.input_shape((3, stored, stored)) == (3, side, side)
    for height, width in [(64, 64), (64, 200), (200, 64), (9, 30)]:
        for row in [*chances(0, 0, 0, 20).tolist(), [0.0] * CHANCES, [1 - 1e-12] * CHANCES]:
            for channels in (1, 3):
                made = augment.train(picture(height, width, channels), row, 56)
                assert made.shape == (channels, 56, 56)
                assert made.dtype == torch.uint8
        assert augment.view(picture(height, width), 56).shape == (3, 56, 56)


def test_what_each_paper_crops():
    drawn = chances(3, 0, 0, 300).tolist()
    # Colour codes the place: red rises downwards, green to the right, so the crop's corners tell its box.
    down, right = torch.arange(256).view(-1, 1).expand(256, 256), torch.arange(256).view(1, -1).expand(256, 256)
    plain = torch.stack([down, right, torch.zeros(256, 256).long()]).to(torch.uint8)
    areas = {}
    for name in ("ice", "ce_sop", "thesis", "mpa"):
        side = 227 if name == "ice" else 224
        crops = torch.stack([AUGMENTS[name].train(plain, row, side) for row in drawn]).float()
        heights = crops[:, 0, -1, 0] - crops[:, 0, 0, 0]
        widths = (crops[:, 1, 0, -1] - crops[:, 1, 0, 0]).abs()
        areas[name] = (heights * widths / 256**2).numpy()
        assert 0.4 < (crops[:, 1, 0, -1] < crops[:, 1, 0, 0]).float().mean() < 0.6  # mirrored
    assert np.ptp(areas["ice"]) < 0.02
    assert areas["ice"].mean() == pytest.approx((227 / 256) ** 2, abs=0.01)
    assert areas["ce_sop"].min() > 0.14
    assert areas["thesis"].min() < 0.1
    assert areas["mpa"].min() < 0.1


def test_the_middle_of_a_squeezed_picture_is_a_share_of_both_sides():
    assert middle_box(256, 512, stored=256, shown=224, squeezed=False) == (16, 144, 224, 224)
    assert middle_box(256, 512, stored=256, shown=224, squeezed=True) == (16, 32, 224, 448)


def test_light_moves_by_an_eighth_at_most_and_mirrors():
    side = 32
    whole = picture(side, side)
    shifts = set()
    for row in chances(0, 0, 0, 200).tolist():
        made = AUGMENTS["light"].train(whole, row, side)
        base = whole.flip(-1) if row[22] < 0.5 else whole
        padded = np.pad(base.numpy(), ((0, 0), (4, 4), (4, 4)), mode="reflect")
        found = [
            (y, x)
            for y in range(9)
            for x in range(9)
            if np.array_equal(padded[:, y : y + side, x : x + side], made.numpy())
        ]
        assert len(found) == 1
        shifts |= set(found)
    assert len(shifts) > 60


def test_chance_depends_on_seed_epoch_and_step_alone():
    first = chances(1, 2, 3, 5)
    torch.manual_seed(9)
    assert torch.equal(first, chances(1, 2, 3, 5))
    assert first.shape == (5, CHANCES)
    assert ((first >= 0) & (first < 1)).all()
    others = [chances(0, 2, 3, 5), chances(1, 3, 3, 5), chances(1, 2, 4, 5)]
    assert not any(torch.equal(first, other) for other in others)
    before = torch.get_rng_state()
    chances(1, 2, 3, 5)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ["none", "light", "ce_cub"])
def test_batches_do_not_depend_on_threads_or_where_one_starts(name):
    store = ArrayImages(np.random.default_rng(0).integers(0, 255, (40, 3, 24, 24), np.uint8))
    plan = [np.arange(s, s + 10) for s in range(0, 40, 10)]
    made = [
        list(training_batches(store, plan, AUGMENTS[name], seed=1, epoch=2, workers=workers, start=start))
        for workers, start in [(1, 0), (3, 0), (2, 2)]
    ]
    assert len(made[0]) == 4
    assert torch.equal(torch.cat(made[0]), torch.cat(made[1]))
    assert torch.equal(torch.cat(made[0][2:]), torch.cat(made[2]))
    side = AUGMENTS[name].input_side(24)
    assert made[0][0].shape == (10, 3, side, side)
    [seen] = eval_batches(store, [np.array([4, 2])], AUGMENTS[name])
    assert torch.equal(seen, F.center_crop(store.pixels[[4, 2]], [side, side]))


def test_an_image_looks_the_same_on_whichever_rank():
    store = ArrayImages(np.random.default_rng(0).integers(0, 255, (40, 3, 24, 24), np.uint8))
    whole = [np.arange(s, s + 20) for s in (0, 20)]
    drawn = {"augment": AUGMENTS["ce_cub"], "seed": 1, "epoch": 2}
    alone = list(training_batches(store, whole, **drawn))
    ranks = [
        list(training_batches(store, [rows[share] for rows in whole], **drawn, first=share.start))
        for share in (slice(0, 7), slice(7, 13), slice(13, 20))
    ]
    for step, batch in enumerate(alone):
        assert torch.equal(torch.cat([rank[step] for rank in ranks]), batch)


@pytest.mark.parametrize("name", PAPERS)
def test_pictures_of_a_few_pixels_can_be_cut_too(name):
    augment = AUGMENTS[name]
    drawn = [chance(), *([edge] * CHANCES for edge in (0.0, 0.999)), *chances(0, 0, 0, 100).tolist()]
    for height, width in ((1, 1), (1, 4), (4, 1), (2, 2), (3, 3)):
        tiny = picture(height, width)
        assert augment.view(tiny, 8).shape == (3, 8, 8)
        for one in drawn:
            assert augment.train(tiny, one, 8).shape == (3, 8, 8)


def test_an_unknown_augmentation_is_named():
    with pytest.raises(UnknownNameError, match="Did you mean 'ce_cub'"):
        AUGMENTS["cecub"]
