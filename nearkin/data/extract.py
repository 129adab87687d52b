"""Safe extraction of untrusted tar and zip archives: all or nothing, and never outside the target folder."""

import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from nearkin._common.files import remove_leftovers, temporary_path
from nearkin._common.progress import Reporter
from nearkin.errors import DataError

# Path in the archive, size, and a function that opens the file; None for a folder.
_Member = tuple[PurePosixPath, int, Callable[[], IO[bytes] | None] | None]


class _UnsafeError(Exception):
    """The archive contains what no genuine one does."""


def extract(archive: Path, target: Path, reporter: Reporter) -> list[Path]:
    """Unpack an archive: all members are checked before the first byte is written, and nothing is ever overwritten."""
    try:
        with zipfile.ZipFile(archive) if zipfile.is_zipfile(archive) else tarfile.open(archive) as file:
            members = list(_zip_members(file) if isinstance(file, zipfile.ZipFile) else _tar_members(file))
            return _write(members, archive, target, reporter)
    except _UnsafeError as error:
        raise DataError(f"{archive}: contains {error}; nothing was unpacked. Do not trust this file.") from None
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise DataError(
            f"{archive}: not a complete tar or zip archive ({error}); nothing was unpacked. Download it again."
        ) from None


def _tar_members(tar: tarfile.TarFile) -> Iterator[_Member]:
    for info in tar.getmembers():
        path = _safe_path(info.name)
        if info.issym() or info.islnk():
            try:
                inside = tar.extractfile(info) is not None
            except (KeyError, RecursionError):
                inside = False
            if not inside:
                raise _UnsafeError(f"'{info.name}', a link to outside the target or not to a file")
        elif not info.isfile() and not info.isdir():
            raise _UnsafeError(f"'{info.name}', a device or pipe")
        yield path, info.size, None if info.isdir() else partial(tar.extractfile, info)


def _zip_members(file: zipfile.ZipFile) -> Iterator[_Member]:
    for info in file.infolist():
        path = _safe_path(info.filename)
        if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _UnsafeError(f"'{info.filename}', a link, device or pipe")
        yield path, info.file_size, None if info.is_dir() else partial(file.open, info)


def _safe_path(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or name[1:2] == ":":  # C: is a drive
        raise _UnsafeError(f"'{name}', which is outside the target folder")
    return path


def _write(members: list[_Member], archive: Path, target: Path, reporter: Reporter) -> list[Path]:
    tops = sorted({path.parts[0] for path, _, _ in members if path.parts})
    if not tops:
        raise DataError(f"{archive}: the archive is empty.")
    target.mkdir(parents=True, exist_ok=True)
    for top in tops:
        if os.path.lexists(target / top):
            raise DataError(f"{target / top}: already exists. Move it away, then unpack {archive.name} again.")
    remove_leftovers(target)
    size, free = sum(size for _, size, _ in members), shutil.disk_usage(target).free
    if size > free:
        raise DataError(
            f"{archive}: needs {size / 1e9:.1f} GB, but {target} has {free / 1e9:.1f} GB free. "
            f"Free some space or choose another --root."
        )
    with (
        temporary_path(target / ".unpacking") as staging,
        reporter.track(f"unpacking {archive.name}", len(members), unit="file") as bar,
    ):
        for path, _, open_member in members:
            file = staging / path
            (file if open_member is None else file.parent).mkdir(parents=True, exist_ok=True)
            if open_member is not None:
                if file.exists():
                    raise tarfile.TarError(f"'{path}' occurs twice")
                source = open_member()
                assert source is not None
                with source, open(file, "xb") as out:
                    shutil.copyfileobj(source, out, 2**20)
            bar.advance()
        for top in tops:
            (staging / top).rename(target / top)
    return [target / top for top in tops]
