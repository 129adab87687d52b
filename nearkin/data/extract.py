"""Safe extraction of untrusted tar and zip archives: all or nothing, and never outside the target folder."""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

from nearkin._common.files import remove_leftovers, temporary_path
from nearkin._common.progress import Reporter
from nearkin.errors import DataError


@dataclass(frozen=True)
class _Member:
    name: str
    type: Literal["file", "folder", "link", "other"]
    size: int
    link_target: str
    entry: Any


def is_archive(path: Path) -> bool:
    """Return whether a file is a tar or zip archive."""
    return zipfile.is_zipfile(path) or tarfile.is_tarfile(path)


def extract(archive: Path, target: Path, reporter: Reporter) -> list[Path]:
    """Unpack an archive.

    All names are checked before the first byte is written: absolute names, "..", links to the outside and devices are
    rejected. Files are written to a temporary folder and moved once all are complete; nothing is ever overwritten.
    """
    with _open_archive(archive) as (members, open_entry):
        for member in members:
            _check_member(member, archive)
        tops = sorted({_path_parts(m.name)[0] for m in members if _path_parts(m.name)})
        if not tops:
            raise DataError(f"{archive}: the archive is empty.")
        target.mkdir(parents=True, exist_ok=True)
        for top in tops:
            if os.path.lexists(target / top):
                raise DataError(f"{target / top}: already exists. Move it away, then unpack {archive.name} again.")
        remove_leftovers(target)
        _check_space(archive, target, sum(m.size for m in members))
        try:
            with temporary_path(target.resolve() / ".unpacking") as staging:
                staging.mkdir(mode=0o700)
                with reporter.track(f"unpacking {archive.name}", len(members), unit="file") as bar:
                    for member in members:
                        _write(member, staging, open_entry)
                        bar.advance()
                for top in tops:
                    (staging / top).rename(target / top)
        except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
            raise DataError(f"{archive}: is damaged ({error}); nothing was unpacked. Download it again.") from None
        except OSError as error:
            raise DataError(f"{archive}: cannot be unpacked into {target} ({error}).") from None
    return [target / top for top in tops]


@contextmanager
def _open_archive(archive: Path) -> Iterator[tuple[list[_Member], Any]]:
    """The members of a tar or zip, and a function that opens one for reading."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zip_file:
                yield [_zip_member(zip_file, info) for info in zip_file.infolist()], zip_file.open
            return
        with tarfile.open(archive) as tar:
            yield [_tar_member(info) for info in tar.getmembers()], tar.extractfile
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(f"{archive}: not a complete tar or zip archive ({error}). Download it again.") from None
    except FileNotFoundError:
        raise DataError(f"{archive}: no such file.") from None


def _tar_member(info: tarfile.TarInfo) -> _Member:
    type_: Literal["file", "folder", "link", "other"] = "other"
    if info.isfile():
        type_ = "file"
    elif info.isdir():
        type_ = "folder"
    elif info.issym() or info.islnk():
        type_ = "link"
    # A hard link's target is relative to the top of the archive, a symbolic link's to the link itself.
    base = PurePosixPath(info.name).parent if info.issym() else PurePosixPath()
    link_target = str(base / info.linkname) if type_ == "link" else ""
    return _Member(info.name, type_, info.size if type_ == "file" else 0, link_target, info)


def _zip_member(zip_file: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    mode = info.external_attr >> 16
    if stat.S_ISLNK(mode):
        link_target = zip_file.read(info).decode("utf-8", "replace") if info.file_size < 4096 else "/"
        return _Member(info.filename, "link", 0, str(PurePosixPath(info.filename).parent / link_target), info)
    type_: Literal["file", "folder", "other"] = "folder" if info.is_dir() else "file"
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        type_ = "other"
    return _Member(info.filename, type_, info.file_size if type_ == "file" else 0, "", info)


def _check_member(member: _Member, archive: Path) -> None:
    prefix = f"{archive}: contains '{member.name}'"
    if _escapes(member.name):
        raise DataError(f"{prefix}, which is outside the target folder; nothing was unpacked. Do not trust this file.")
    if member.type == "link" and _escapes(member.link_target):
        raise DataError(f"{prefix}, a link to outside the target; nothing was unpacked. Do not trust this file.")
    if member.type == "other":
        raise DataError(f"{prefix}, a device or pipe; nothing was unpacked. Do not trust this file.")


def _escapes(name: str) -> bool:
    """Whether a name, resolved step by step, ever leaves the folder that it is unpacked to."""
    if name.startswith(("/", "\\")) or "\\" in name or "\0" in name or PurePosixPath(name).is_absolute():
        return True
    if len(name) > 1 and name[1] == ":":  # a drive, C:
        return True
    depth = 0
    for step in name.split("/"):
        depth += -1 if step == ".." else step not in ("", ".")
        if depth < 0:
            return True
    return False


def _path_parts(name: str) -> list[str]:
    return [step for step in name.split("/") if step not in ("", ".")]


def _write(member: _Member, staging: Path, open_entry: Any) -> None:
    steps = _path_parts(member.name)
    if not steps or ".." in steps:
        if steps:  # a/../b stays inside, but no genuine archive contains it
            raise tarfile.TarError(f"'{member.name}' contains '..'")
        return
    path = staging.joinpath(*steps)
    # An earlier member may have put a link where a folder should be. What is written through it lands elsewhere than
    # its name was checked for, where even a link that stays inside by its name may lead out.
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent.resolve() != path.parent:
        raise tarfile.TarError(f"'{member.name}' is behind a link")
    if member.type == "folder":
        path.mkdir(exist_ok=True)
        return
    if os.path.lexists(path):
        raise tarfile.TarError(f"'{member.name}' occurs twice")
    if member.type == "link":
        link_target = staging.joinpath(*_path_parts(os.path.normpath(member.link_target)))
        os.symlink(os.path.relpath(link_target, path.parent), path)
        return
    source: IO[bytes] = open_entry(member.entry)
    with source, open(path, "xb") as out:
        shutil.copyfileobj(source, out, 2**20)
    if path.stat().st_size != member.size:
        raise EOFError(f"'{member.name}' is truncated")


def _check_space(archive: Path, target: Path, size: int) -> None:
    free = shutil.disk_usage(target).free
    if size > free:
        raise DataError(
            f"{archive}: needs {size / 1e9:.1f} GB, but {target} has {free / 1e9:.1f} GB free. "
            f"Free some space or choose another --root."
        )
