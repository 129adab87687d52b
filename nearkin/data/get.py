"""`nearkin data get`: download and unpack a benchmark."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin._common.files import atomic_file, remove_leftovers
from nearkin._common.progress import Reporter
from nearkin.data.download import Checksums, check_file, download
from nearkin.data.extract import extract, is_archive
from nearkin.errors import DataError

if TYPE_CHECKING:  # the registry imports torch, which --help must not wait for
    from nearkin.data.benchmarks import Archive, Benchmark


def get_dataset(
    name: str, root: Path, *, files: Sequence[Path] = (), sha256: str | None = None, reporter: Reporter | None = None
) -> str:
    """Download and unpack a benchmark, and check its counts. Returns one line about the result."""
    from nearkin.data.benchmarks import BENCHMARKS

    return get_benchmark(BENCHMARKS[name], root, files=files, sha256=sha256, reporter=reporter)


def get_benchmark(
    benchmark: Benchmark,
    root: Path,
    *,
    files: Sequence[Path] = (),
    sha256: str | None = None,
    reporter: Reporter | None = None,
) -> str:
    """Do the same as `get_dataset` for a `Benchmark` object. Returns one line about the result."""
    reporter = reporter or Reporter()
    reporter.info(f"{benchmark.title}: {benchmark.terms} ({benchmark.homepage})")
    if sha256 and len(benchmark.archives) > 1:
        raise DataError(
            f"--sha256: {benchmark.name} consists of {len(benchmark.archives)} files; one checksum is not enough."
        )
    local_files = _match_files(benchmark, files)
    try:
        _fetch_and_unpack(benchmark, local_files, root, sha256, reporter)
    except OSError as error:
        raise DataError(
            f"{root}: cannot be written ({error.strerror or error}).\nFree some space, or choose another --root."
        ) from None
    listing = benchmark.list(root)
    return f"{benchmark.name}: {len(listing):,} images of {benchmark.total.classes:,} classes in {listing.root}"


def _fetch_and_unpack(
    benchmark: Benchmark, local_files: dict[str, Path], root: Path, sha256: str | None, reporter: Reporter
) -> None:
    for archive in benchmark.archives:
        if (root / archive.creates).exists():  # unpacking is all or nothing, so what exists is complete
            continue
        checksums = Checksums(sha256 or archive.sha256, archive.md5)
        file = local_files.get(archive.name, root / archive.name)
        is_local = archive.name in local_files or file.is_file()
        if not is_local:
            _download(benchmark, archive, file, checksums, reporter)
        _unpack(archive, file, root, checksums, reporter)
        if not is_local:
            file.unlink()


def _match_files(benchmark: Benchmark, files: Sequence[Path]) -> dict[str, Path]:
    """Match files to archives: by name, or because there is only one."""
    if len(files) == 1 and len(benchmark.archives) == 1:
        return {benchmark.archives[0].name: files[0]}
    names = {archive.name for archive in benchmark.archives}
    for file in files:
        if file.name not in names:
            raise DataError(
                f"{file}: not a file of {benchmark.name}. Rename it to the one it is: {', '.join(sorted(names))}."
            )
    return {file.name: file for file in files}


def _download(benchmark: Benchmark, archive: Archive, file: Path, checksums: Checksums, reporter: Reporter) -> None:
    if not archive.urls:
        names = " ".join(a.name for a in benchmark.archives)
        raise DataError(
            f"{benchmark.name}: {archive.name} has no public download; request it at {benchmark.homepage}.\n"
            f"Then run: nearkin data get {benchmark.name} --root {file.parent} --from {names}"
        )
    download(archive.urls, file, checksums=checksums, reporter=reporter)


def _unpack(archive: Archive, file: Path, root: Path, checksums: Checksums, reporter: Reporter) -> None:
    """Verify an archive and unpack it, or copy it if it is a plain file."""
    digest = check_file(file, checksums)
    if checksums.sha256 is None:
        status = "its MD5 matches, so it is undamaged" if checksums.md5 else "no checksum is known for it"
        reporter.info(f"{file.name}: sha256 {digest}; {status}. Pass --sha256 to require this one.")
    target = root / archive.extract_to
    if is_archive(file):
        extract(file, target, reporter)
    elif Path(archive.name).suffix in (".tgz", ".zip"):
        raise DataError(f"{file}: not a tar or zip archive. Remove it and download it again.")
    else:
        target.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        with atomic_file(target / archive.name) as temporary:
            shutil.copyfile(file, temporary)
