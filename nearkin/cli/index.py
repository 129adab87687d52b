"""`nearkin index`: embed images with a run's model and make them searchable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from nearkin._common.progress import Reporter
from nearkin._common.words import agreeing, counted
from nearkin.cli._arguments import Device, Quiet, command_line, leading, load_model, parse_target
from nearkin.errors import ConfigError, require_extra

if TYPE_CHECKING:
    from nearkin.deploy.index.index import Index
    from nearkin.deploy.index.sources import TrainingClasses

INDEX = "nearkin index RUN FOLDER|CSV -o DIR"
CALIBRATION_NOTE = """\
estimated by removing the class of each query from the index: how often an image of a class missing from the index is
called known, provided that missing classes resemble the query classes and are photographed under similar conditions"""


@dataclass(frozen=True)
class Columns:
    """Columns of a table."""

    path_column: str | None = None  # Column with the image path; by default path, file_name or similar.
    label_column: str | None = None  # Column with the class; by default label, class or similar.


@dataclass(frozen=True)
class IndexArgs:
    """Embed images with a trained model and save the vectors for search.

    nearkin index runs/<key> photos/ -o photos.index   (photos/CLASS/IMAGE.jpg, or images without classes)

    nearkin index runs/<key> photos.csv -o photos.index --prune --calibrate

    Run it again to embed only new and changed images; an interrupted run resumes.
    """

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])]  # Folder of the index.
    prune: bool = False  # Remove items whose files are gone or no longer listed.
    already_cropped: bool = False
    """For a run trained on images cropped to bounding boxes: state that these images are already cropped."""
    calibrate: bool = False
    """Set the similarity below which a query is unknown, using indexed classes that were not trained on."""
    false_accept_rate: float | None = None
    """For --calibrate: target false-accept rate (unknown queries accepted as known); by default 0.01."""
    choose_rerank: bool = False
    """Enable re-ranking if it significantly helps on indexed classes that were not trained on."""
    assume_unseen: bool = False  # Assume that no indexed class was trained on, if the run's data are not available.
    hnsw: bool = False  # Build an HNSW graph for approximate search (needs faiss) and print its measured recall.
    hnsw_min_items: int = 200_000
    """For --hnsw: minimum number of items for a graph; smaller indexes are searched exactly."""
    store: str | None = None
    """Also write to this vector store: qdrant://HOST:PORT/COLLECTION or pgvector://HOST/DB?table=NAME."""
    batch_size: int = 128  # Images embedded at a time; an interruption loses at most one batch.
    device: Device = "auto"
    quiet: Quiet = False
    data: Columns = field(default_factory=Columns)


def run(argv: list[str]) -> None:
    run_folder, rest = leading(IndexArgs, argv, INDEX, "a run folder")
    source, args = parse_target(IndexArgs, rest, INDEX, "a folder of images or a .csv file")
    if args.batch_size < 1:
        raise ConfigError(f"--batch-size: expected at least 1, got {args.batch_size}.")
    require_extra("stores" if args.store else "images", "PIL")
    from nearkin.training.run import Run

    run, reporter = Run(run_folder), Reporter(quiet=args.quiet)  # before torch is imported
    from nearkin.deploy.index.builder import update_index
    from nearkin.deploy.index.sources import TrainingClasses, find_images, training_classes
    from nearkin.deploy.index.storage import lock_index
    from nearkin.deploy.stores import open_store
    from nearkin.report.contact_sheet import printable

    if run.recipe.data.crop_to_boxes and not args.already_cropped:
        raise ConfigError(
            f"{run.path}: trained on images cropped to boxes, and nearkin index does not crop.\n"
            "Crop the images yourself, queries included, and pass --already-cropped."
        )
    model = load_model(run.path, args.device)
    if model.backbone is None:
        raise ConfigError(
            f"{run.path}: takes precomputed features, not images. Index its vectors in Python: nk.Index(...)."
        )
    images = find_images(Path(source), path_column=args.data.path_column, label_column=args.data.label_column)
    _check_flags(args, len(images.labels))
    needs_unseen = (args.calibrate or args.choose_rerank) and not args.assume_unseen
    trained = training_classes(run, reporter) if needs_unseen else TrainingClasses()
    with (
        lock_index(args.out),
        open_store(args.store, model.dim, model.fingerprint()) if args.store else nullcontext() as store,
    ):
        index, summary = update_index(
            model,
            images,
            args.out,
            run=run.path,
            prune=args.prune,
            batch_size=args.batch_size,
            store=store,
            reporter=reporter,
        )
        num_classes = len({label for label in index.labels if label is not None})
        classes = f" of {counted(num_classes, 'class')}" if num_classes else " without labels"
        print(*map(printable, summary.lines()), sep="\n")
        print(f"index: {counted(len(index), 'item')}{classes}, {index.dim} dimensions, in {args.out}")
        for line in _tune_search(index, trained, args, reporter):
            print(line, flush=True)
    if not args.quiet and not args.store:
        print(printable(f"search: {command_line('search', str(args.out))} IMAGE"))
        print(printable(f"serve:  {command_line('serve', str(args.out))}"))


def _check_flags(args: IndexArgs, items: int) -> None:
    """Reject what `_tune_search` could not do, before hours of embedding."""
    from nearkin.deploy.index.openset import check_rate

    if args.false_accept_rate is not None and not args.calibrate:
        raise ConfigError("--false-accept-rate: only applies with --calibrate.")
    if args.false_accept_rate is not None:
        check_rate(args.false_accept_rate, "--false-accept-rate")
    if args.hnsw and items >= args.hnsw_min_items:
        require_extra("stores", "faiss")


def _tune_search(index: Index, trained: TrainingClasses, args: IndexArgs, reporter: Reporter) -> Iterator[str]:
    """Set threshold, re-ranking and graph as requested; each is saved before its line is printed."""
    seen = trained.labels_in(index)
    unlabelled = index.labels.count(None)
    if seen:
        yield f"{agreeing(len(seen), 'indexed classes were trained on')}: searched, but not used as queries"
    if unlabelled and (args.calibrate or args.choose_rerank):
        yield f"{counted(unlabelled, 'item')} without a label: searched, and counted as other classes"
    if args.calibrate:
        reporter.info("calibrating")
        rate = 0.01 if args.false_accept_rate is None else args.false_accept_rate
        before, threshold = index.threshold, index.calibrate(rate, trained=seen)
        if args.false_accept_rate is None and threshold.true_accept < 0.5:
            index.threshold = before  # a search that calls most known images unknown must be wanted
            yield f"{threshold}\n  not set, as most known images would be unknown: name the rate to accept that"
        else:
            index.write(args.out)
            yield f"{threshold}\n{CALIBRATION_NOTE}"
    if args.choose_rerank:
        reporter.info("evaluating re-ranking methods")
        choice = index.choose_rerank(trained=seen)
        index.write(args.out)
        yield str(choice)
    if args.hnsw and len(index) < args.hnsw_min_items:
        few = agreeing(len(index), "items are")
        yield f"graph: not built; {few} fewer than {args.hnsw_min_items:,} and searched exactly"
    elif args.hnsw and index.graph is not None:
        yield f"graph: up to date, {index.graph.stats}"
    elif args.hnsw:
        reporter.info("building the graph")
        stats = index.build_graph()
        index.write(args.out)
        yield f"graph: {stats}"
