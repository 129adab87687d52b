"""Images per second from files to training batches: nearkin, cold and cached, against torchvision in the same run.

    python benchmarks/loading.py --root photos/ --count 2000 --out docs/benchmarks-loading.md

The peer is what one writes with torchvision: ImageFolder, the paper's transforms from transforms.v2 on tensors, and a
DataLoader with as many worker processes as we have threads. Both give uint8 batches [B, 3, 224, 224] in random order;
both are given one pass to warm up the disk's cache; passes alternate and the median of each is shown. "Cold" is an
epoch of ours that decodes every file, "cached" one from the cache file; building the cache is timed on its own.
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
from nearkin.data.images import FileImages
from nearkin.data.loading import available_cores, map_in_threads
from nearkin.data.reading import decoder_name, read_size
from nearkin.data.transforms import AUGMENTS, training_batches

BATCH = 128
AUGMENTATIONS = {
    # As the papers' code has them, in torchvision's own terms.
    "thesis": [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()],
    "ce_cub": [
        v2.Resize(256, antialias=True),
        v2.RandomResizedCrop(224, scale=(0.16, 1.0), antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(0.25, 0.25, 0.25),
    ],
}


def main() -> None:
    args = parse()
    rows = measure(args)
    text = page(args, rows)
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of class folders")
    parser.add_argument("--count", type=int, default=2000, help="how many of its images to use, evenly spread")
    parser.add_argument("--workers", type=int, default=available_cores(), help="processes of the peer, threads of ours")
    parser.add_argument("--repeats", type=int, default=3, help="passes of each; their median is shown")
    parser.add_argument("--enlarge", type=float, default=0.0, help="also measure copies of the files scaled by this")
    parser.add_argument("--out", type=Path, help="write the page here")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="nearkin-loading-") as aside:
        roots = [args.root]
        if args.enlarge:
            roots.append(enlarged(args.root, Path(aside) / "enlarged", args.count, args.enlarge))
        for root in roots:
            for name in AUGMENTATIONS:
                rows.append(measure_one(root, name, args, Path(aside) / f"cache {root.name} {name}"))
    return rows


def measure_one(root: Path, name: str, args: argparse.Namespace, folder: Path) -> dict[str, object]:
    transform = v2.Compose([v2.ToImage(), *AUGMENTATIONS[name]])
    dataset = ImageFolder(str(root), transform)
    chosen = np.linspace(0, len(dataset) - 1, min(args.count, len(dataset))).astype(int)
    peer = DataLoader(
        Subset(dataset, chosen.tolist()), BATCH, shuffle=True, num_workers=args.workers, persistent_workers=True
    )
    augment = AUGMENTS[name]
    files = FileImages([dataset.samples[i][0] for i in chosen], augment.stored_side(224), workers=args.workers)
    began = time.perf_counter()
    stored = open_images(files, folder=folder, reporter=Reporter(quiet=True)).images
    building = time.perf_counter() - began
    cache_bytes = sum(path.stat().st_size for path in folder.glob("*.pixels"))

    def ours(images: object) -> Iterable[torch.Tensor]:
        order = np.random.default_rng(0).permutation(len(chosen))
        plan = [order[s : s + BATCH] for s in range(0, len(order), BATCH)]
        return training_batches(images, plan, augment, seed=0, epoch=0, workers=args.workers)  # type: ignore[arg-type]

    ways: dict[str, Callable[[], Iterable[torch.Tensor]]] = {
        "peer": lambda: (images for images, _ in peer),
        "cold": lambda: ours(files),
        "cached": lambda: ours(stored),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(args.repeats + 1):
        for way, batches in ways.items():
            began = time.perf_counter()
            seen = sum(len(batch) for batch in batches())
            assert seen == len(chosen)
            if repeat:  # the first pass of each starts processes and fills the disk's cache
                taken[way].append(time.perf_counter() - began)
    speed = {way: len(chosen) / statistics.median(times) for way, times in taken.items()}
    paths = files.paths
    began = time.perf_counter()
    for _ in map_in_threads(lambda row: files.whole(row), range(len(paths)), workers=args.workers):
        pass
    decode = len(chosen) / (time.perf_counter() - began)
    width, height = np.median([read_size(path) for path in paths[:: max(1, len(paths) // 50)]], axis=0)
    return {
        "files": f"{len(chosen):,} of {width:.0f} x {height:.0f}",
        "augment": name,
        **speed,
        "building": len(chosen) / building,
        "decode": decode,
        "cache_mb": cache_bytes / 1e6,
    }


def enlarged(root: Path, target: Path, count: int, factor: float) -> Path:
    """Copies of the chosen files scaled up, where the originals at hand are smaller than the published ones."""
    from PIL import Image

    dataset = ImageFolder(str(root))
    for i in np.linspace(0, len(dataset) - 1, min(count, len(dataset))).astype(int):
        path = Path(dataset.samples[i][0])
        to = target / path.parent.name / path.name
        to.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            size = (round(image.width * factor), round(image.height * factor))
            image.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(to, quality=92)
    return target


def page(args: argparse.Namespace, rows: list[dict[str, object]]) -> str:
    lines = [
        "# Loading images: measured against torchvision",
        "",
        f"Images per second on {available_cores()} cores, {args.workers} threads of ours against {args.workers} worker "
        f"processes of a DataLoader; torch {torch.__version__}, {decoder_name()}. Median of {args.repeats} passes.",
        "",
        "| files (median size) | augmentation | torchvision | ours, cold | ratio | ours, cached | ratio | cache |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peer, cold, cached = (float(row[way]) for way in ("peer", "cold", "cached"))  # type: ignore[arg-type]
        lines.append(
            f"| {row['files']} | {row['augment']} | {peer:,.0f} | {cold:,.0f} | **{cold / peer:.2f}** "
            f"| {cached:,.0f} | **{cached / peer:.2f}** | {row['cache_mb']:,.0f} MB |"
        )
    lines += [
        "",
        "How near cold reading is to decoding alone, and what building the cache costs:",
        "",
        "| files | augmentation | decoding and scaling only | cold, of that | building the cache |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        share = float(row["cold"]) / float(row["decode"])  # type: ignore[arg-type]
        lines.append(
            f"| {row['files']} | {row['augment']} | {row['decode']:,.0f}/s | {share:.0%} | {row['building']:,.0f}/s |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
