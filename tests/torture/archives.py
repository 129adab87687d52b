"""Hostile and damaged archives: nothing is written outside the target folder, and all or nothing inside it."""

from __future__ import annotations

import random
import shutil
import stat
from pathlib import Path

from helpers.archives import make_tar, make_zip

from torture.mutations import mutate, outcomes, summarize
from torture.table import Row

GOOD = ("good/1.txt", b"good", "file")
TAR_MEMBERS = (
    *[
        (name, b"evil", "file")
        for name in ("../evil", "a/../../evil", "/evil", "C:/evil", "..\\evil", "./../evil", "..")
    ],
    *[("good/link", target, kind) for target in ("/etc/passwd", "../../evil", "..", "") for kind in ("link", "hard")],
    *[("good/x", "", kind) for kind in ("device", "pipe")],
    *[
        ("good/1.txt", b"twice", "file"),
        ("good/1.txt/below", b"a file as folder", "file"),
        ("x" * 300, b"long", "file"),
    ],
    *[("nul\0byte", b"x", "file"), ("good", b"folder as file", "file"), ("sur\udcffrogate", b"x", "file")],
)
ZIP_MEMBERS = (
    *[(name, b"evil", 0) for name in ("../evil", "/evil", "C:/evil", "a/../../evil", "..\\evil")],
    *[("good/x", b"../../evil", kind | 0o777) for kind in (stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO, stat.S_IFSOCK)],
    *[("good/1.txt", b"twice", 0), ("good/1.txt/below", b"x", 0), ("x" * 300, b"long", 0), ("good", b"x", 0)],
)


def attack_extraction(folder: Path, damaged: int, seed: int) -> list[Row]:
    """Unpack hostile archives, and `damaged` archives."""
    hostile = []
    for number, member in enumerate(TAR_MEMBERS):
        hostile.append(make_tar(folder / f"{number}.tar", GOOD, member).read_bytes())
    for number, entry in enumerate(ZIP_MEMBERS):
        hostile.append(make_zip(folder / f"{number}.zip", ("good/1.txt", b"good", 0), entry).read_bytes())
    hostile.append(make_tar(folder / "first.tar", ("good", "/etc", "link"), GOOD).read_bytes())
    rng = random.Random(seed)
    whole = [
        make_tar(
            folder / "a.tar", GOOD, ("good/2.txt", b"2" * 3000, "file"), ("good/link", "1.txt", "link")
        ).read_bytes(),
        make_tar(folder / "a.tgz", GOOD, ("good/2.txt", b"2" * 3000, "file")).read_bytes(),
        make_zip(folder / "a.zip", ("good/1.txt", b"good", 0), ("good/2.txt", b"2" * 3000, 0)).read_bytes(),
    ]
    cases = [mutate(whole[number % len(whole)], rng) for number in range(damaged)]

    def unpack(data: bytes) -> str:
        return _unpack(folder / "arena", data)

    return [
        summarize("hostile tar and zip archives", list(outcomes(unpack, hostile))),
        summarize("damaged tar and zip archives", list(outcomes(unpack, cases))),
    ]


def _unpack(arena: Path, data: bytes) -> str:
    from nearkin._common.progress import Reporter
    from nearkin.data.get import extract
    from nearkin.errors import UserError

    shutil.rmtree(arena, ignore_errors=True)
    (arena / "out").mkdir(parents=True)
    (arena / "archive").write_bytes(data)
    rejected = ""
    try:
        extract(arena / "archive", arena / "out", Reporter(quiet=True))
    except UserError as error:
        rejected = f"rejected: {error}"
    except OSError as error:  # as the command line does
        rejected = f"rejected: {error}"
        if not error.strerror:
            raise
    outside = {path.name for path in arena.iterdir()} != {"archive", "out"}
    special = any(path.is_symlink() or not (path.is_file() or path.is_dir()) for path in (arena / "out").rglob("*"))
    if outside or special or (rejected and any((arena / "out").iterdir())):
        return "unnoticed"
    return rejected or "read"
