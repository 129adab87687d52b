"""Both decoders return Pillow's pixels for every type of image file; an unreadable file is named."""

import os
import sys
import threading
import zlib
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from helpers.paths import SHARED
from PIL import Image, ImageOps

from nearkin.data import reading
from nearkin.data.image_info import inspect_image
from nearkin.data.images import FileImages, file_digest
from nearkin.data.reading import read_image, read_size, square
from nearkin.errors import DataError


@pytest.fixture(params=["torchvision", "pillow"])
def decoder(request):
    """Reads JPEG files with torchvision, or everything with Pillow."""
    with without_torchvision() if request.param == "pillow" else nullcontext():
        yield


@contextmanager
def without_torchvision():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_torchvision_io", lambda: None)
        yield


def read_with_pillow(path, side: int) -> torch.Tensor:
    with without_torchvision():
        return read_image(path, side)


def scene(height=60, width=90, channels=3, seed=0) -> np.ndarray:
    """A smooth image with some texture, which JPEG preserves."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (6, 9, channels), np.uint8).squeeze())
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))


def planes(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def difference(a: torch.Tensor, b: torch.Tensor) -> int:
    assert a.shape == b.shape
    return int((a.int() - b.int()).abs().max())


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path, orientation, suffix, decoder):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"rotated.{suffix}"
    Image.fromarray(scene()).save(path, exif=exif)
    expected = planes(ImageOps.exif_transpose(Image.open(path)))
    assert difference(read_image(path, 500), expected) <= 1
    assert sorted(read_size(path)) == [60, 90]


def make_image(mode: str) -> tuple[Image.Image, Image.Image]:
    """An image in this mode, and its expected RGB version, computed with Pillow and numpy only."""
    colour, rng = Image.fromarray(scene()), np.random.default_rng(1)
    if mode in {"RGBA", "LA"}:
        image = colour.convert("RGBA")
        image.putalpha(Image.fromarray(rng.integers(0, 255, (60, 90), np.uint8)))
        image = image.convert(mode)
        white = Image.new("RGBA", image.size, "white")
        return image, Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    if mode == "I;16":
        values = rng.integers(0, 65536, (60, 90)).astype(np.uint16)
        return Image.fromarray(values), Image.fromarray((values // 256).astype(np.uint8)).convert("RGB")
    image = colour.convert(mode)
    return image, image.convert("RGB")


@pytest.mark.parametrize(
    ("mode", "suffix", "tolerance"),
    [
        ("RGB", "png", 0),
        ("RGB", "bmp", 0),
        ("L", "png", 0),
        ("1", "png", 0),
        ("P", "png", 0),
        ("P", "gif", 0),
        ("LA", "png", 1),
        ("RGBA", "png", 1),
        ("RGBA", "tiff", 1),
        ("I;16", "png", 0),
        ("I;16", "tiff", 0),
        ("CMYK", "tiff", 0),
        ("RGB", "jpg", 12),  # JPEG loses a little; that both decoders lose the same is tested below
        ("L", "jpg", 12),
        ("CMYK", "jpg", 16),
    ],
)
def test_every_mode_is_converted_to_rgb(tmp_path, mode, suffix, tolerance, decoder):
    image, expected = make_image(mode)
    path = tmp_path / f"image.{suffix}"
    image.save(path, **({"quality": 98, "subsampling": 0} if suffix == "jpg" else {}))
    assert difference(read_image(path, 500), planes(expected)) <= tolerance
    assert torch.equal(read_image(path, 500), read_with_pillow(path, 500))
    grey = read_image(path, 500, channels=1)
    assert difference(grey, torch.from_numpy(np.array(expected.convert("L")))[None]) <= max(tolerance, 1)


def test_a_transparent_palette_colour_becomes_white(tmp_path):
    image = Image.new("P", (20, 20), 1)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.paste(0, (5, 5, 10, 10))
    for name in ("p.png", "p.gif"):
        image.save(tmp_path / name, transparency=0)
        pixels = read_image(tmp_path / name, 50)
        assert pixels[:, 7, 7].tolist() == [255, 255, 255]
        assert pixels[:, 0, 0].tolist() == [0, 0, 255]


def test_a_pil_image_is_read_like_its_file(tmp_path):
    image, _ = make_image("RGBA")
    image.save(tmp_path / "a.png")
    assert torch.equal(read_image(image, 30), read_image(tmp_path / "a.png", 30))


@pytest.mark.parametrize(("height", "width"), [(120, 180), (180, 120), (100, 100)])
def test_resizing_is_antialiased_as_in_pillow(tmp_path, height, width):
    noise = np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)
    path = tmp_path / "noise.png"
    Image.fromarray(noise).save(path)
    whole = read_image(path, 40)
    assert min(whole.shape[1:]) == 40
    expected = planes(Image.fromarray(noise).resize((whole.shape[2], whole.shape[1]), Image.Resampling.BILINEAR))
    assert difference(whole, expected) <= 1
    top, left = (whole.shape[1] - 40) // 2, (whole.shape[2] - 40) // 2
    assert torch.equal(square(whole, 40), whole[:, top : top + 40, left : left + 40])


def test_a_small_image_is_enlarged_in_its_square_only(tmp_path):
    Image.fromarray(scene(20, 30)).save(tmp_path / "small.png")
    whole = read_image(tmp_path / "small.png", 64)
    assert whole.shape == (3, 20, 30)
    assert square(whole, 64).shape == (3, 64, 64)


def test_a_large_jpeg_decoded_at_reduced_size_looks_the_same(tmp_path, decoder):
    image = Image.fromarray(scene(800, 1200))
    image.save(tmp_path / "large.jpg", quality=95)
    whole = read_image(tmp_path / "large.jpg", 100)
    expected = planes(Image.open(tmp_path / "large.jpg").resize((150, 100), Image.Resampling.BILINEAR))
    assert difference(whole, expected) <= 4
    boxed = read_image(tmp_path / "large.jpg", 50, box=(200, 100, 400, 400))
    part = Image.open(tmp_path / "large.jpg").crop((200, 100, 600, 500)).resize((50, 50), Image.Resampling.BILINEAR)
    assert difference(boxed, planes(part)) <= 4


def test_images_are_cropped_to_boxes_first(tmp_path):
    pixels = scene()
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path)
    expected = torch.from_numpy(pixels[10:40, 20:60].copy()).permute(2, 0, 1)
    assert torch.equal(read_image(path, 500, box=(20, 10, 40, 30)), expected)
    assert read_image(path, 500, box=(-5, -5, 30, 25)).shape == (3, 20, 25)
    with pytest.raises(DataError, match=r"a\.png.*the box \(95, 0, 10, 10\) contains no pixel of the 90 x 60 image"):
        read_image(path, 500, box=(95, 0, 10, 10))


def test_a_panorama_is_center_cropped(tmp_path):
    Image.fromarray(scene(20, 400)).save(tmp_path / "long.png")
    assert read_image(tmp_path / "long.png", 500).shape == (3, 20, 80)
    assert reading.stored_shape(400, 20, 10) == tuple(read_image(tmp_path / "long.png", 10).shape[1:])


def test_the_bytes_of_a_file_are_read_like_the_file(tmp_path):
    for name in ("a.jpg", "a.png"):
        Image.fromarray(scene(600, 900)).save(tmp_path / name)
        for side in (40, 700):
            assert torch.equal(read_image((tmp_path / name).read_bytes(), side), read_image(tmp_path / name, side))
    with pytest.raises(DataError, match="image given as bytes: cannot be read"):
        read_image(b"words", 40)


def test_unreadable_files_are_named_with_the_reason(tmp_path, decoder):
    Image.fromarray(scene()).save(tmp_path / "whole.jpg")
    Image.fromarray(scene()).save(tmp_path / "whole.png")
    bad = {"no": None, "words.jpg": b"words", "empty.png": b""}
    for name in ("whole.jpg", "whole.png"):
        data = (tmp_path / name).read_bytes()
        bad |= {f"cut {share} {name}": data[: int(share * len(data))] for share in (0.02, 0.5, 0.9)}
    # Complete but damaged inside: torchvision 0.29 crashes the process on such a PNG.
    pixels = data.index(b"IDAT") + 6
    bad["inside.png"] = data[:pixels] + b"\xff" * 50 + data[pixels + 50 :]
    for name, data in bad.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError) as error:
            read_image(tmp_path / name, 32)
        assert str(error.value).startswith(f"{tmp_path / name}: cannot be read")
    Image.fromarray(np.zeros((4, 4), np.float32)).save(tmp_path / "f.tiff")
    with pytest.raises(DataError, match=r"f\.tiff.*float pixels have no defined range"):
        read_image(tmp_path / "f.tiff", 32)


def test_a_decompression_bomb_is_rejected_before_it_is_decoded(tmp_path):
    # The header of a 20,000 x 20,000 PNG: rejected before any pixel is decoded.
    Image.fromarray(scene()).save(tmp_path / "huge.png")
    data = bytearray((tmp_path / "huge.png").read_bytes())
    data[16:24] = (20_000).to_bytes(4) * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4)
    (tmp_path / "huge.png").write_bytes(data)
    with pytest.raises(DataError, match=r"huge\.png: cannot be read \(20,000 x 20,000 pixels, more than 179 million"):
        read_image(tmp_path / "huge.png", 32)


def png_of_size(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to have this size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4) + kind + content + zlib.crc32(kind + content).to_bytes(4)

    header = width.to_bytes(4) + height.to_bytes(4) + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_a_row_of_a_hundred_million_pixels_is_an_error_of_that_file(tmp_path):
    (tmp_path / "wide.png").write_bytes(png_of_size(100_000_000, 1))
    with pytest.raises(DataError, match=r"wide\.png: cannot be read \(100,000,000 x 1 pixels, a side of more than"):
        read_image(tmp_path / "wide.png", 32)


def test_out_of_memory_is_an_error_of_that_file(tmp_path, monkeypatch):
    Image.fromarray(scene()).save(tmp_path / "a.png")
    monkeypatch.setattr(reading, "_from_pillow", lambda image: bytearray(1 << 62))
    with pytest.raises(DataError, match=r"a\.png: cannot be read \(it does not fit into memory\)"):
        read_image(tmp_path / "a.png", 32)


@pytest.mark.skipif(os.name == "nt", reason="pipes and devices in the file system: POSIX only")
def test_pipes_and_devices_are_refused_at_once(tmp_path):
    """A pipe has no end until somebody writes to it, /dev/zero never."""
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    for name in ("pipe.jpg", "zero.jpg"):
        for read in (lambda path: read_image(path, 32), read_size, file_digest):
            with pytest.raises(DataError, match=rf"{name}: cannot be read \(not a regular file\)"):
                read(tmp_path / name)
        info = inspect_image(tmp_path / name)
        assert info.error == "unreadable"  # the link itself is fine
        assert info.reason == "not a regular file"


def test_only_formats_that_need_no_other_program_reach_pillow(tmp_path, monkeypatch):
    """For EPS Pillow starts gs, the first one on the PATH."""
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    Image.fromarray(scene()).save(tmp_path / "photo.eps")
    (tmp_path / "photo.eps").rename(tmp_path / "photo.jpg")
    with pytest.raises(DataError, match="unknown image format"):
        read_image(tmp_path / "photo.jpg", 32)
    assert inspect_image(tmp_path / "photo.jpg").reason == "a text file, not an image"
    assert not (tmp_path / "started").exists()


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    Image.fromarray(scene()).save(tmp_path / "a.png")
    monkeypatch.setattr(reading, "MAX_FILE_BYTES", 100)
    with pytest.raises(DataError, match=r"a\.png: cannot be read \(0\.0 GB, more than"):
        read_image(tmp_path / "a.png", 32)


def test_without_torchvision_pillow_decodes(tmp_path, monkeypatch):
    Image.fromarray(scene()).save(tmp_path / "a.jpg")
    both = read_image(tmp_path / "a.jpg", 32)
    monkeypatch.setitem(sys.modules, "torchvision.io", None)
    reading._torchvision_io.cache_clear()
    try:
        assert "torchvision" not in reading.decoder_name()
        assert torch.equal(read_image(tmp_path / "a.jpg", 32), both)
    finally:
        reading._torchvision_io.cache_clear()


def test_pixels_of_file_images_do_not_depend_on_threads(photo_folder):
    paths = sorted(photo_folder.rglob("*.png"))
    rows = np.array([5, 3, 100, 3, *range(40)])
    one, many = (FileImages(paths, 16, workers=workers).read(rows) for workers in (1, 4))
    assert one.shape == (44, 3, 16, 16)
    assert torch.equal(one, many)
    expected = planes(Image.open(paths[5]).resize((16, 16), Image.Resampling.BILINEAR))
    assert difference(one[0], expected) <= 1
    store = FileImages(paths, 16).take(np.array([7, 5]))
    assert len(store) == 2
    assert torch.equal(store.read(np.array([1])), one[:1])
    assert not [thread for thread in threading.enumerate() if "nearkin" in thread.name]


def test_boxes_stay_with_their_rows(photo_folder):
    paths = sorted(photo_folder.rglob("*.png"))[:4]
    boxes = np.array([[0, 0, 8, 8], [8, 8, 8, 8], [0, 8, 16, 16], [4, 4, 4, 4]], float)
    store = FileImages(paths, 64, boxes=boxes)
    assert [tuple(store.whole(row).shape[1:]) for row in range(4)] == [(8, 8), (8, 8), (16, 16), (4, 4)]
    assert store.take(np.array([3, 2])).whole(1).shape == (3, 16, 16)
    with pytest.raises(DataError, match=r"expected \[4, 4\]"):
        FileImages(paths, 64, boxes=boxes[:2])


def test_real_photos_are_the_same_with_both_decoders():
    paths = sorted((SHARED / "data/CUB_200_2011/images").glob("*/*.jpg"))[::400]
    if not paths:
        pytest.skip("the CUB photos are not available")
    for path in paths:
        assert difference(read_image(path, 128), read_with_pillow(path, 128)) <= 1
        width, height = read_size(path)
        with Image.open(path) as image:
            assert image.size == (width, height)
        assert reading.stored_shape(width, height, 100) == tuple(read_image(path, 100).shape[1:])


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_large_images_are_converted_in_strips(mode, monkeypatch):
    monkeypatch.setattr(reading, "_PIXELS_PER_STRIP", 100)  # three rows of 31 at a time
    values = np.random.default_rng(0).integers(0, 256, (50, 31, 4)).astype(np.uint8)
    image = Image.fromarray(values, "RGBA") if mode == "RGBA" else Image.fromarray(values[..., :3]).convert(mode)
    shown = np.asarray(image, np.float64).reshape(50, 31, -1)
    if mode == "RGBA":
        opaque = shown[..., 3:] / 255
        shown = np.round(shown[..., :3] * opaque + 255 * (1 - opaque))
    np.testing.assert_array_equal(
        reading.read_image(image, 64).permute(1, 2, 0).numpy(), np.broadcast_to(shown, (50, 31, 3))
    )
