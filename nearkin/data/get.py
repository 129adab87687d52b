"""`nearkin data get`: download and unpack a benchmark."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from nearkin._common.files import atomic_file
from nearkin._common.progress import Reporter
from nearkin.data.benchmarks import Archive, Benchmark
from nearkin.data.download import Checksums, digest, download
from nearkin.data.extract import extract
from nearkin.errors import DataError


def get_benchmark(
    benchmark: Benchmark, root: Path, *, files: Sequence[Path] = (), sha256: str | None = None, reporter: Reporter
) -> str:
    """Download and unpack a benchmark, and check its counts. Returns one line about the result."""
    reporter.info(f"{benchmark.title}: {benchmark.terms} ({benchmark.homepage})")
    if sha256 and len(benchmark.archives) > 1:
        raise DataError(
            f"--sha256: {benchmark.name} consists of {len(benchmark.archives)} files; one checksum is not enough."
        )
    local_files = _match_files(benchmark, files)
    try:
        for archive in benchmark.archives:
            if (root / archive.creates).exists():  # unpacking is all or nothing, so what exists is complete
                continue
            checksums = Checksums(sha256 or archive.sha256, archive.md5)
            file = local_files.get(archive.name, root / archive.name)
            is_local = archive.name in local_files or file.is_file()
            if not is_local:
                _check_public(benchmark, archive, root)
                download(archive.urls, file, checksums=checksums, reporter=reporter)
            _check_file(file, checksums, reporter)
            _unpack(archive, file, root / archive.extract_to, reporter)
            if not is_local:
                file.unlink()
    except OSError as error:
        raise DataError(
            f"{root}: cannot be written ({error.strerror or error}).\nFree some space, or choose another --root."
        ) from None
    listing = benchmark.list(root)
    return f"{benchmark.name}: {len(listing):,} images of {benchmark.total.classes:,} classes in {listing.root}"


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


def _check_public(benchmark: Benchmark, archive: Archive, root: Path) -> None:
    if not archive.urls:
        names = " ".join(a.name for a in benchmark.archives)
        raise DataError(
            f"{benchmark.name}: {archive.name} has no public download; request it at {benchmark.homepage}.\n"
            f"Then run: nearkin data get {benchmark.name} --root {root} --from {names}"
        )


def _check_file(file: Path, checksums: Checksums, reporter: Reporter) -> None:
    try:
        mismatch = checksums.mismatch(file)
        sha256 = digest(file, "sha256")
    except OSError as error:
        raise DataError(f"{file}: cannot be opened ({error.strerror}).") from None
    if mismatch:
        raise DataError(
            f"{file}: {mismatch}.\nIt is damaged or a different file: remove it and download it again, or pass another "
            f"with --from FILE."
        )
    if checksums.sha256 is None:
        status = "its MD5 matches, so it is undamaged" if checksums.md5 else "no checksum is known for it"
        reporter.info(f"{file.name}: sha256 {sha256}; {status}. Pass --sha256 to require this one.")


def _unpack(archive: Archive, file: Path, target: Path, reporter: Reporter) -> None:
    if Path(archive.name).suffix in (".tgz", ".zip"):
        extract(file, target, reporter)
        return
    target.mkdir(parents=True, exist_ok=True)
    with atomic_file(target / archive.name) as temporary:
        shutil.copyfile(file, temporary)
