"""`nearkin data get`: a benchmark from its archives, on the disk or on the net; and the list of what there is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin._common.progress import Reporter
from nearkin.data.download import Checksums, check_file, download
from nearkin.data.extract import extract, is_archive
from nearkin.errors import DataError

if TYPE_CHECKING:  # the registry brings torch with it, which help must not wait for
    from nearkin.data.benchmarks import Archive, Benchmark


def get_dataset(
    name: str, root: Path, *, given: Sequence[Path] = (), sha256: str | None = None, reporter: Reporter | None = None
) -> str:
    """Bring a benchmark to `root`, check its counts, and say in one line what is there."""
    from nearkin.data.benchmarks import BENCHMARKS

    return get_benchmark(BENCHMARKS[name], root, given=given, sha256=sha256, reporter=reporter)


def get_benchmark(
    benchmark: Benchmark,
    root: Path,
    *,
    given: Sequence[Path] = (),
    sha256: str | None = None,
    reporter: Reporter | None = None,
) -> str:
    reporter = reporter or Reporter()
    reporter.info(f"{benchmark.title}: {benchmark.terms} ({benchmark.page})")
    if sha256 and len(benchmark.archives) > 1:
        raise DataError(
            f"--sha256: {benchmark.name} is made of {len(benchmark.archives)} files, one checksum cannot do."
        )
    files = _match(benchmark, given)
    try:
        _gather(benchmark, files, root, sha256, reporter)
    except OSError as error:
        raise DataError(
            f"{root}: cannot be written ({error.strerror or error}).\nMake room, or give another --root."
        ) from None
    listing = benchmark.list(root)
    return f"{benchmark.name}: {len(listing):,} images of {benchmark.total.classes:,} classes in {listing.root}"


def _gather(benchmark: Benchmark, files: dict[str, Path], root: Path, sha256: str | None, reporter: Reporter) -> None:
    """Fetch and unpack what is not there yet."""
    for archive in benchmark.archives:
        if (root / archive.makes).exists():  # unpacking is all or nothing, so what is there is whole
            continue
        wanted = Checksums(sha256 or archive.sha256, archive.md5)
        file = files.get(archive.name, root / archive.name)
        given_or_there = archive.name in files or file.is_file()
        if not given_or_there:
            _fetch(benchmark, archive, file, wanted, reporter)
        _place(archive, file, root, wanted, reporter)
        if not given_or_there:
            file.unlink()  # it was fetched for this


def _match(benchmark: Benchmark, given: Sequence[Path]) -> dict[str, Path]:
    """Which archive each given file is: by its name, or because there is only one."""
    if len(given) == 1 and len(benchmark.archives) == 1:
        return {benchmark.archives[0].name: given[0]}
    known = {archive.name for archive in benchmark.archives}
    for file in given:
        if file.name not in known:
            raise DataError(f"{file}: {benchmark.name} is made of {', '.join(sorted(known))}. Rename it to what it is.")
    return {file.name: file for file in given}


def _fetch(benchmark: Benchmark, archive: Archive, file: Path, wanted: Checksums, reporter: Reporter) -> None:
    if not archive.urls:
        names = " ".join(a.name for a in benchmark.archives)
        raise DataError(
            f"{benchmark.name}: {archive.name} cannot be downloaded by a program; ask for it at {benchmark.page}.\n"
            f"Then: nearkin data get {benchmark.name} --root {file.parent} --from {names}"
        )
    download(archive.urls, file, checksums=wanted, reporter=reporter)


def _place(archive: Archive, file: Path, root: Path, wanted: Checksums, reporter: Reporter) -> None:
    """Unpack a checked archive where it belongs, or copy a plain file there."""
    digest = check_file(file, wanted)
    if wanted.sha256 is None:
        found = "its MD5 is the known one, which shows it is undamaged" if wanted.md5 else "no checksum of it is known"
        reporter.info(f"{file.name}: sha256 {digest}; {found}. Pass --sha256 to insist on this one.")
    target = root / archive.into
    if is_archive(file):
        extract(file, target, reporter)
    elif Path(archive.name).suffix in (".tgz", ".zip"):
        raise DataError(f"{file}: is not a tar or zip archive. Remove it and fetch it again.")
    else:
        target.mkdir(parents=True, exist_ok=True)
        aside = target / f".{archive.name}.{os.getpid()}"
        shutil.copyfile(file, aside)
        aside.replace(target / archive.name)
