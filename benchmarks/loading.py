"""Loading speed in images per second, from files to training batches: nearkin against torchvision in one run.

    python benchmarks/loading.py --root photos/ --count 2000 --out docs/benchmarks-loading.md

The baseline is plain torchvision: ImageFolder, the paper's transforms from transforms.v2 on tensors, and a DataLoader
with as many worker processes as nearkin has threads. Both yield uint8 batches [B, 3, 224, 224] in random order. Each
gets a warm-up pass; passes alternate and the median is reported. "Cold" is an epoch of nearkin that decodes every file,
"cached" one that reads the cache file; building the cache is timed separately.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from nearkin._common.progress import Reporter
from nearkin.data.cache import open_images
from nearkin.data.images import FileImages, Images
from nearkin.data.loading import available_cores, map_in_threads
from nearkin.data.reading import decoder_name, read_size
from nearkin.data.transforms import AUGMENTS, training_batches

BATCH = 128
AUGMENTATIONS = {
    # The papers' augmentations, with torchvision's transforms.
    "thesis": [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()],
    "ce_cub": [
        v2.Resize(256, antialias=True),
        v2.RandomResizedCrop(224, scale=(0.16, 1.0), antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(0.25, 0.25, 0.25),
    ],
}


def main() -> None:
    args = parse_args()
    rows = measure(args)
    text = format_page(args, rows)
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of class folders")
    parser.add_argument("--count", type=int, default=2000, help="number of images to use, evenly spread")
    parser.add_argument(
        "--workers", type=int, default=available_cores(), help="processes of the baseline, threads of nearkin"
    )
    parser.add_argument("--repeats", type=int, default=3, help="passes of each; the median is reported")
    parser.add_argument(
        "--enlarge", type=float, default=0.0, help="also measure copies of the files upscaled by this factor"
    )
    parser.add_argument("--out", type=Path, help="write the page to this file")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="nearkin-loading-") as temporary:
        roots = [args.root]
        if args.enlarge:
            roots.append(upscale(args.root, Path(temporary) / "enlarged", args.count, args.enlarge))
        for root in roots:
            for name in AUGMENTATIONS:
                rows.append(measure_one(root, name, args, Path(temporary) / f"cache {root.name} {name}"))
    return rows


def measure_one(root: Path, name: str, args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Speeds of one folder with one augmentation, in images per second."""
    transform = v2.Compose([v2.ToImage(), *AUGMENTATIONS[name]])
    dataset = ImageFolder(str(root), transform)
    chosen = spread_evenly(len(dataset), args.count)
    loader = DataLoader(
        Subset(dataset, chosen.tolist()), BATCH, shuffle=True, num_workers=args.workers, persistent_workers=True
    )
    augment = AUGMENTS[name]
    files = FileImages([dataset.samples[i][0] for i in chosen], augment.stored_side(224), workers=args.workers)
    start = time.perf_counter()
    cached = open_images(files, folder=folder, reporter=Reporter(quiet=True)).images
    build_seconds = time.perf_counter() - start
    cache_bytes = sum(path.stat().st_size for path in folder.glob("*.pixels"))

    def nearkin_batches(images: Images) -> Iterable[torch.Tensor]:
        order = np.random.default_rng(0).permutation(len(chosen))
        plan = [order[s : s + BATCH] for s in range(0, len(order), BATCH)]
        return training_batches(images, plan, augment, seed=0, epoch=0, workers=args.workers)

    speeds = compare(
        {
            "baseline": lambda: (images for images, _ in loader),
            "cold": lambda: nearkin_batches(files),
            "cached": lambda: nearkin_batches(cached),
        },
        len(chosen),
        args.repeats,
    )
    start = time.perf_counter()
    for _ in map_in_threads(files.whole, range(len(files)), workers=args.workers):
        pass
    decode_seconds = time.perf_counter() - start
    sample = files.paths[:: max(1, len(files) // 50)]
    width, height = np.median([read_size(path) for path in sample], axis=0)
    return {
        "files": f"{len(chosen):,} of {width:.0f} x {height:.0f}",
        "augment": name,
        **speeds,
        "build": len(chosen) / build_seconds,
        "decode": len(chosen) / decode_seconds,
        "cache_mb": cache_bytes / 1e6,
    }


def compare(
    loaders: dict[str, Callable[[], Iterable[torch.Tensor]]], num_images: int, repeats: int
) -> dict[str, float]:
    """Median speed of each loader in images per second; passes alternate."""
    seconds: dict[str, list[float]] = {name: [] for name in loaders}
    for repeat in range(repeats + 1):
        for name, batches in loaders.items():
            start = time.perf_counter()
            assert sum(len(batch) for batch in batches()) == num_images
            if repeat:  # the first pass of each starts processes and fills the disk cache
                seconds[name].append(time.perf_counter() - start)
    return {name: num_images / statistics.median(times) for name, times in seconds.items()}


def spread_evenly(total: int, count: int) -> np.ndarray:
    return np.linspace(0, total - 1, min(count, total)).astype(int)


def upscale(root: Path, target: Path, count: int, factor: float) -> Path:
    """Write upscaled copies of the files, for originals that are smaller than the published ones."""
    from PIL import Image

    dataset = ImageFolder(str(root))
    for i in spread_evenly(len(dataset), count):
        path = Path(dataset.samples[i][0])
        copy = target / path.parent.name / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            size = (round(image.width * factor), round(image.height * factor))
            image.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(copy, quality=92)
    return target


def format_page(args: argparse.Namespace, rows: list[dict[str, object]]) -> str:
    lines = [
        "# Loading speed against torchvision",
        "",
        f"Images per second on {available_cores()} cores, {args.workers} threads of nearkin against {args.workers} "
        f"worker processes of a DataLoader; torch {torch.__version__}, {decoder_name()}. "
        f"Median of {args.repeats} passes.",
        "",
        "| files (median size) | augmentation | torchvision | nearkin cold | ratio | nearkin cached | ratio | cache |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        baseline, cold, cached = (float(row[k]) for k in ("baseline", "cold", "cached"))  # type: ignore[arg-type]
        lines.append(
            f"| {row['files']} | {row['augment']} | {baseline:,.0f} | {cold:,.0f} | **{cold / baseline:.2f}** "
            f"| {cached:,.0f} | **{cached / baseline:.2f}** | {row['cache_mb']:,.0f} MB |"
        )
    lines += [
        "",
        "Cold loading compared with decoding alone, and the speed of building the cache:",
        "",
        "| files | augmentation | decoding and resizing only | cold, relative to that | building the cache |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        share = float(row["cold"]) / float(row["decode"])  # type: ignore[arg-type]
        lines.append(
            f"| {row['files']} | {row['augment']} | {row['decode']:,.0f}/s | {share:.0%} | {row['build']:,.0f}/s |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
