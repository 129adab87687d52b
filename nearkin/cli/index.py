"""`nearkin index`: make images searchable by a run's model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from nearkin.cli._arguments import leading, parse
from nearkin.cli._models import load_model
from nearkin.errors import ConfigError, import_extra

if TYPE_CHECKING:
    from nearkin._common.progress import Reporter
    from nearkin.deploy.index.index import Index
    from nearkin.deploy.index.trained import TrainingClasses
    from nearkin.models.embedder import Embedder

INDEX = "nearkin index RUN FOLDER|CSV -o DIR"
FALSE_ACCEPT = 0.01
HNSW_FROM = 200_000  # items from which a graph is worth its memory; fewer are searched exactly in a blink

ESTIMATED = """\
estimated from each asking image with its own class taken out of the index: the chance that an image of a class that is
missing here passes as known, if missing classes are like those that asked and are photographed alike"""


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are read."""

    path_column: str | None = None
    """Column that holds the path of the image; by default path, file_name or the like."""
    label_column: str | None = None
    """Column that holds the class; by default label, class or the like."""


@dataclass(frozen=True)
class IndexArgs:
    """Embed images with a trained model and keep the vectors, ready to be searched.

    nearkin index runs/<key> photos/ -o photos.index   (photos/CLASS/IMAGE.jpg, or images without classes)

    nearkin index runs/<key> photos.csv -o photos.index --prune --calibrate

    Run again, it embeds only what is new or has changed; killed, it goes on where it stopped.
    """

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The folder of the index."""
    prune: bool = False
    """Remove items whose files are gone (or no longer listed)."""
    already_cut: bool = False
    """For a run that was trained on images cut to boxes: these images are cut already."""
    calibrate: bool = False
    """Set the similarity below which a query is called unknown, from indexed classes that were not trained on."""
    false_accept: float | None = None
    """For --calibrate: the share of queries of unknown classes that may pass as known; 0.01 unless given."""
    choose_rerank: bool = False
    """Keep a way of re-ranking for searches if indexed classes that were not trained on gain by it."""
    assume_unseen: bool = False
    """Take it that none of the indexed classes was trained on, where the run's data cannot be looked at."""
    hnsw: bool = False
    """Make a graph for approximate search (needs faiss) and print its measured recall."""
    hnsw_from: int = HNSW_FROM
    """For --hnsw: the number of items from which it is made; fewer are searched exactly."""
    store: str | None = None
    """Write to this engine as well: qdrant://HOST:PORT/COLLECTION or pgvector://HOST/DB?table=NAME."""
    batch_size: int = 128
    """Images embedded at a time; a killed run loses at most so many."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: a GPU where there is one."""
    quiet: bool = False
    """Print the summary only."""
    data: Columns = field(default_factory=Columns)


def run(argv: list[str]) -> None:
    run_folder, rest = leading(argv, "a run folder", INDEX, IndexArgs)
    source, flags = leading(rest, "a folder of images or a .csv file", INDEX, IndexArgs)
    args = parse(IndexArgs, flags, INDEX)
    if args.batch_size < 1:
        raise ConfigError(f"--batch-size: expected at least 1, got {args.batch_size}.")
    from nearkin._common.progress import Reporter
    from nearkin.deploy.index.builder import find_images, update_index
    from nearkin.deploy.index.files import lock_index
    from nearkin.deploy.index.trained import TrainingClasses, training_classes
    from nearkin.deploy.stores import open_store
    from nearkin.report.contact_sheet import printable
    from nearkin.training.run import Run

    run, reporter = Run(run_folder), Reporter(quiet=args.quiet)
    if run.recipe.data.crop_to_boxes and not args.already_cut:
        raise ConfigError(
            f"{run.path}: was trained on images cut to boxes, which the index cannot cut.\n"
            "Cut them first, those you will search for too, and say --already-cut."
        )
    model = load_model(run.path, args.device)
    if model.backbone is None:
        raise ConfigError(
            f"{run.path}: takes ready features, not pictures. Index its vectors in Python: nk.Index(...)."
        )
    found = find_images(Path(source), path_column=args.data.path_column, label_column=args.data.label_column)
    _check_steps(args, len(found.labels))
    judged = (args.calibrate or args.choose_rerank) and not args.assume_unseen
    trained = training_classes(run, reporter) if judged else TrainingClasses()
    with lock_index(args.out):
        store = open_store(args.store, _dim(model), model.fingerprint()) if args.store else None
        made, done = update_index(
            model,
            found,
            args.out,
            run=run.path,
            prune=args.prune,
            batch=args.batch_size,
            store=store,
            reporter=reporter,
        )
        classes = len({label for label in made.labels if label is not None})
        kinds = f" of {classes:,} classes" if classes else " without labels"
        print(*map(printable, done.lines()), sep="\n")
        print(f"index: {len(made):,} items{kinds}, {made.dim} numbers each, in {args.out}")
        for line in _finish(made, trained, args, reporter):
            print(line, flush=True)


def _check_steps(args: IndexArgs, items: int) -> None:
    """Refuse what `_finish` could not do, before hours of embedding."""
    from nearkin.deploy.index.openset import check_rate

    if args.false_accept is not None and not args.calibrate:
        raise ConfigError("--false-accept: is for --calibrate, which is not given.")
    if args.false_accept is not None:
        check_rate(args.false_accept, "--false-accept")
    if args.hnsw and items >= args.hnsw_from:
        import_extra("faiss", extra="graph")


def _finish(made: Index, trained: TrainingClasses, args: IndexArgs, reporter: Reporter) -> Iterator[str]:
    """What is worked out once the items are there; each is in the index before it is said."""
    seen = trained.labels_in(made)
    unlabelled = made.labels.count(None)
    if seen:
        yield f"{len(seen):,} indexed classes were trained on: they are searched, but do not ask"
    if unlabelled and (args.calibrate or args.choose_rerank):
        yield f"{unlabelled:,} items without a label are searched and count as of other classes"
    if args.calibrate:
        reporter.info("calibrating")
        rate = FALSE_ACCEPT if args.false_accept is None else args.false_accept
        threshold = made.calibrate(rate, trained=seen)
        made.write(args.out)
        yield f"{threshold}\n{ESTIMATED}"
    if args.choose_rerank:
        reporter.info("trying ways of re-ranking")
        chosen = made.choose_rerank(trained=seen)
        made.write(args.out)
        yield str(chosen)
    if args.hnsw and len(made) < args.hnsw_from:
        yield f"graph: none; {len(made):,} items are fewer than {args.hnsw_from:,} and searched exactly"
    elif args.hnsw and made.graph is not None and made.graph.facts.unlike is not None:
        yield f"graph: kept, {made.graph.facts}"
    elif args.hnsw:
        reporter.info("making the graph")
        facts = made.make_graph()
        made.write(args.out)
        yield f"graph: {facts}"


def _dim(model: Embedder) -> int:
    return int(model.embed([]).shape[1])
