"""Archives to unpack, well-meant or not."""

import io
import tarfile
import zipfile
from pathlib import Path


def make_tar(path: Path, *members: tuple[str, bytes | str, str]) -> Path:
    """Members (name, content or link target, kind)."""
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as tar:
        for name, content, kind in members:
            info = tarfile.TarInfo(name)
            info.type = {
                "file": tarfile.REGTYPE,
                "folder": tarfile.DIRTYPE,
                "link": tarfile.SYMTYPE,
                "hard": tarfile.LNKTYPE,
                "device": tarfile.CHRTYPE,
                "pipe": tarfile.FIFOTYPE,
            }[kind]
            if isinstance(content, str):
                info.linkname = content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def make_zip(path: Path, *members: tuple[str, bytes, int]) -> Path:
    """Members (name, content, mode)."""
    with zipfile.ZipFile(path, "w") as packed:
        for name, content, mode in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            packed.writestr(info, content)
    return path


def left_over(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())
