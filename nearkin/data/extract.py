"""`extract`: unpack a tar or zip archive that nobody vouches for. All of it or nothing, and nothing outside."""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

from nearkin._common.progress import Reporter
from nearkin.errors import DataError


@dataclass(frozen=True)
class _Member:
    name: str
    kind: Literal["file", "folder", "link", "other"]
    size: int
    leads_to: str  # of a link
    entry: Any


def is_archive(path: Path) -> bool:
    return zipfile.is_zipfile(path) or tarfile.is_tarfile(path)


def extract(archive: Path, target: Path, reporter: Reporter) -> list[Path]:
    """Unpack into `target` and return what was added at its top level.

    Every name is judged before the first byte is written: absolute names, "..", links that lead out and devices are
    refused. The files are written to a folder aside and moved when all are there; what exists is never overwritten.
    """
    with _opened(archive) as (members, read):
        for member in members:
            _judge(member, archive)
        tops = sorted({_parts(m.name)[0] for m in members if _parts(m.name)})
        if not tops:
            raise DataError(f"{archive}: is an empty archive.")
        target.mkdir(parents=True, exist_ok=True)
        for top in tops:
            if os.path.lexists(target / top):
                raise DataError(f"{target / top}: is there already. Move it away, then unpack {archive.name} again.")
        _check_space(archive, target, sum(m.size for m in members))
        aside = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=target)).resolve()
        try:
            with reporter.track(f"unpacking {archive.name}", len(members), unit="file") as bar:
                for member in members:
                    _write(member, aside, read)
                    bar.advance()
            for top in tops:
                (aside / top).rename(target / top)
        except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
            raise DataError(f"{archive}: is damaged ({error}); nothing was unpacked. Fetch it again.") from None
        except OSError as error:
            raise DataError(f"{archive}: cannot be unpacked into {target} ({error}).") from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return [target / top for top in tops]


@contextmanager
def _opened(archive: Path) -> Iterator[tuple[list[_Member], Any]]:
    """The members of a tar or zip, and a function that opens one for reading."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                yield [_of_zip(packed, info) for info in packed.infolist()], packed.open
            return
        with tarfile.open(archive) as tar:
            yield [_of_tar(info) for info in tar.getmembers()], tar.extractfile
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DataError(f"{archive}: is not a whole tar or zip archive ({error}). Fetch it again.") from None
    except FileNotFoundError:
        raise DataError(f"{archive}: no such file.") from None


def _of_tar(info: tarfile.TarInfo) -> _Member:
    kind: Literal["file", "folder", "link", "other"] = "other"
    if info.isfile():
        kind = "file"
    elif info.isdir():
        kind = "folder"
    elif info.issym() or info.islnk():
        kind = "link"
    # A hard link's target counts from the top of the archive, a symbolic link's from the link itself.
    above = PurePosixPath(info.name).parent if info.issym() else PurePosixPath()
    leads_to = str(above / info.linkname) if kind == "link" else ""
    return _Member(info.name, kind, info.size if kind == "file" else 0, leads_to, info)


def _of_zip(packed: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    mode = info.external_attr >> 16
    if stat.S_ISLNK(mode):
        leads_to = packed.read(info).decode("utf-8", "replace") if info.file_size < 4096 else "/"
        return _Member(info.filename, "link", 0, str(PurePosixPath(info.filename).parent / leads_to), info)
    kind: Literal["file", "folder", "other"] = "folder" if info.is_dir() else "file"
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        kind = "other"
    return _Member(info.filename, kind, info.file_size if kind == "file" else 0, "", info)


def _judge(member: _Member, archive: Path) -> None:
    where = f"{archive}: holds '{member.name}'"
    if _leaves(member.name):
        raise DataError(f"{where}, which lies outside the target folder; nothing was unpacked. Do not trust this file.")
    if member.kind == "link" and _leaves(member.leads_to):
        raise DataError(f"{where}, a link that leads outside the target; nothing was unpacked. Do not trust this file.")
    if member.kind == "other":
        raise DataError(f"{where}, a device or pipe; nothing was unpacked. Do not trust this file.")


def _leaves(name: str) -> bool:
    """Whether a name, resolved step by step, ever leaves the folder it is unpacked in."""
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


def _parts(name: str) -> list[str]:
    return [step for step in name.split("/") if step not in ("", ".")]


def _write(member: _Member, aside: Path, read: Any) -> None:
    steps = _parts(member.name)
    if not steps or ".." in steps:
        if steps:  # a/../b stays inside, and no honest archive says so
            raise tarfile.TarError(f"'{member.name}' goes up")
        return
    place = aside.joinpath(*steps)
    # An earlier link may stand where a folder should. What is written through it lands elsewhere than its name was
    # judged by, where even a link that stays inside by its name may lead out.
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.parent.resolve() != place.parent:
        raise tarfile.TarError(f"'{member.name}' lies behind a link")
    if member.kind == "folder":
        place.mkdir(exist_ok=True)
        return
    if os.path.lexists(place):
        raise tarfile.TarError(f"'{member.name}' occurs twice")
    if member.kind == "link":
        goal = aside.joinpath(*_parts(os.path.normpath(member.leads_to)))
        os.symlink(os.path.relpath(goal, place.parent), place)
        return
    source: IO[bytes] = read(member.entry)
    with source, open(place, "xb") as out:
        shutil.copyfileobj(source, out, 2**20)
    if place.stat().st_size != member.size:
        raise EOFError(f"'{member.name}' ends early")


def _check_space(archive: Path, target: Path, size: int) -> None:
    free = shutil.disk_usage(target).free
    if size > free:
        raise DataError(
            f"{archive}: unpacks to {size / 1e9:.1f} GB, {target} has {free / 1e9:.1f} GB free. "
            f"Make room or give another --root."
        )
