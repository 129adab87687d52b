"""Extraction is all or nothing; malicious archives are rejected."""

import os
import stat

import pytest
from helpers.archives import left_over, make_tar, make_zip

from nearkin.data.get import extract
from nearkin.errors import DataError


def test_tar_and_zip_are_unpacked(tmp_path, quiet):
    first = make_tar(
        tmp_path / "a.tgz",
        ("top", b"", "folder"),
        ("./top/ü 1.txt", b"one", "file"),
        ("top/deep/2.txt", b"two", "file"),
        ("top/link.txt", "deep/2.txt", "link"),
        ("top/hard.txt", "top/deep/2.txt", "hard"),
    )
    assert extract(first, tmp_path / "out", quiet) == [tmp_path / "out" / "top"]
    assert (tmp_path / "out/top/ü 1.txt").read_bytes() == b"one"
    assert (tmp_path / "out/top/link.txt").read_bytes() == (tmp_path / "out/top/hard.txt").read_bytes() == b"two"
    second = make_zip(tmp_path / "b.zip", ("z/", b"", 0), ("z/1.txt", b"one", 0o100644))
    extract(second, tmp_path / "out", quiet)
    assert (tmp_path / "out/z/1.txt").read_bytes() == b"one"
    assert left_over(tmp_path / "out") == ["top", "z"]
    with pytest.raises(DataError, match="already exists"):
        extract(second, tmp_path / "out", quiet)


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (("../evil", b"x", "file"), "outside the target folder"),
        (("a/../../evil", b"x", "file"), "outside the target folder"),
        (("/evil", b"x", "file"), "outside the target folder"),
        (("C:/evil", b"x", "file"), "outside the target folder"),
        (("..\\evil", b"x", "file"), "outside the target folder"),
        (("link", "/etc/passwd", "link"), "a link to outside"),
        (("link", "../evil", "link"), "a link to outside"),
        (("a/link", "../../evil", "link"), "a link to outside"),
        (("hard", "../evil", "hard"), "a link to outside"),
        (("device", "", "device"), "a device or pipe"),
        (("pipe", "", "pipe"), "a device or pipe"),
    ],
)
def test_malicious_tar_archives_are_rejected(tmp_path, quiet, member, message):
    archive = make_tar(tmp_path / "a.tar", ("good.txt", b"good", "file"), member)
    with pytest.raises(DataError, match=message):
        extract(archive, tmp_path / "out" / "here", quiet)
    assert left_over(tmp_path) == ["a.tar"]


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (("../evil", b"x", 0), "outside the target folder"),
        (("/evil", b"x", 0), "outside the target folder"),
        (("link", b"../evil", stat.S_IFLNK | 0o777), "a link, device or pipe"),
        (("device", b"", stat.S_IFCHR | 0o600), "a link, device or pipe"),
    ],
)
def test_malicious_zip_archives_are_rejected(tmp_path, quiet, member, message):
    with pytest.raises(DataError, match=message):
        extract(make_zip(tmp_path / "a.zip", ("good.txt", b"good", 0), member), tmp_path / "out", quiet)
    assert left_over(tmp_path) == ["a.zip"]


def test_a_chain_of_links_cannot_lead_outside(tmp_path, quiet):
    """By name each link stays inside, but the last would be created further up, from where its target is outside."""
    archive = make_tar(
        tmp_path / "a.tar",
        ("top/d", b"", "folder"),
        ("top/x", "d/..", "link"),
        ("top/x/x/x/x/l", "../../../../../secret", "link"),
    )
    with pytest.raises(DataError, match="'top/x', a link to outside the target or not to a file"):
        extract(archive, tmp_path / "out", quiet)
    assert left_over(tmp_path) == ["a.tar"]


def test_nothing_is_written_through_a_link(tmp_path, quiet):
    archive = make_tar(tmp_path / "a.tar", ("d/e", b"", "folder"), ("x", "d", "link"), ("x/e/file", b"x", "file"))
    with pytest.raises(DataError, match="'x', a link to outside the target or not to a file"):
        extract(archive, tmp_path / "out", quiet)
    assert left_over(tmp_path) == ["a.tar"]


def test_a_link_becomes_a_copy_and_a_loop_of_links_is_rejected(tmp_path, quiet):
    archive = make_tar(
        tmp_path / "a.tar", ("file", b"one", "file"), ("link", "file", "link"), ("again", "link", "link")
    )
    extract(archive, tmp_path / "out", quiet)
    for name in ("link", "again"):
        assert not (tmp_path / "out" / name).is_symlink()
        assert (tmp_path / "out" / name).read_bytes() == b"one"
    loop = make_tar(tmp_path / "b.tar", ("x", "y", "link"), ("y", "x", "link"))
    with pytest.raises(DataError, match="'x', a link to outside"):
        extract(loop, tmp_path / "out", quiet)


def test_damaged_archives_leave_nothing_behind(tmp_path, quiet):
    noise = os.urandom(200_000)
    whole = make_tar(tmp_path / "a.tgz", ("top/1.bin", noise, "file"), ("top/2.bin", noise, "file")).read_bytes()
    (tmp_path / "cut.tgz").write_bytes(whole[:250_000])
    packed = bytearray(make_zip(tmp_path / "b.zip", ("top/1.bin", noise, 0)).read_bytes())
    packed[1000] ^= 255
    (tmp_path / "flipped.zip").write_bytes(packed)
    (tmp_path / "words.tgz").write_text("words")
    make_tar(tmp_path / "empty.tar")
    make_tar(tmp_path / "twice.tar", ("1", b"x", "file"), ("1", b"y", "file"))
    (tmp_path / "out").mkdir()
    for name in ("cut.tgz", "flipped.zip", "words.tgz", "empty.tar", "twice.tar"):
        with pytest.raises(DataError, match=name):
            extract(tmp_path / name, tmp_path / "out", quiet)
        assert left_over(tmp_path / "out") == []


def test_too_little_space_is_reported_in_advance(tmp_path, quiet, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))
    archive = make_tar(tmp_path / "a.tar", ("1", b"123456", "file"))
    with pytest.raises(DataError, match="Free some space or choose another --root"):
        extract(archive, tmp_path / "out", quiet)
