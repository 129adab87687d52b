"""The commands `nearkin index` and `nearkin search`: parse, call, print."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkin.arguments import leading, parse, show
from nearkin.errors import ConfigError, DataError, need

if TYPE_CHECKING:  # the flags bring tyro and the others torch, which help must not wait for
    from nearkin.deploy.flags import IndexArgs, SearchArgs
    from nearkin.deploy.index import Answer, Index
    from nearkin.deploy.trained import Trained
    from nearkin.models.embedder import Embedder
    from nearkin.progress import Reporter

INDEX, SEARCH = "nearkin index RUN FOLDER|CSV -o DIR", "nearkin search DIR IMAGE..."

ESTIMATED = """\
estimated from each asking image with its own class taken out of the index: the chance that an image of a class that is
missing here passes as known, if missing classes are like those that asked and are photographed alike"""


def index(argv: list[str]) -> None:
    from nearkin.deploy.flags import IndexArgs

    run_folder, rest = leading(argv, "a run folder", INDEX, IndexArgs)
    source, flags = leading(rest, "a folder of images or a .csv file", INDEX, IndexArgs)
    args = parse(IndexArgs, flags, INDEX)
    if args.batch_size < 1:
        raise ConfigError(f"--batch-size: expected at least 1, got {args.batch_size}.")
    from nearkin.deploy.building import find_images, update
    from nearkin.deploy.files import writing
    from nearkin.deploy.sheet import printable
    from nearkin.deploy.stores import open_store
    from nearkin.deploy.trained import Trained, trained_on
    from nearkin.progress import Reporter
    from nearkin.runs import Run

    run, reporter = Run(run_folder), Reporter(quiet=args.quiet)
    if run.recipe.data.boxes and not args.already_cut:
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
    trained = trained_on(run, reporter) if judged else Trained()
    with writing(args.out):
        store = open_store(args.store, _dim(model), model.fingerprint()) if args.store else None
        made, done = update(
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
    from nearkin.deploy.openset import check_rate

    if args.false_accept is not None and not args.calibrate:
        raise ConfigError("--false-accept: is for --calibrate, which is not given.")
    if args.false_accept is not None:
        check_rate(args.false_accept, "--false-accept")
    if args.hnsw and items >= args.hnsw_from:
        need("faiss", extra="graph")


def _finish(made: Index, trained: Trained, args: IndexArgs, reporter: Reporter) -> Iterator[str]:
    """What is worked out once the items are there; each is in the index before it is said."""
    from nearkin.deploy.flags import FALSE_ACCEPT

    seen = trained.labels_in(made)
    unlabelled = made.labels.count(None)
    if seen:
        yield f"{len(seen):,} indexed classes were trained on: they are searched, but do not ask"
    if unlabelled and (args.calibrate or args.choose_rerank):
        yield f"{unlabelled:,} items without a label are searched and count as of other classes"
    if args.calibrate:
        reporter.say("calibrating")
        rate = FALSE_ACCEPT if args.false_accept is None else args.false_accept
        threshold = made.calibrate(rate, trained=seen)
        made.write(args.out)
        yield f"{threshold}\n{ESTIMATED}"
    if args.choose_rerank:
        reporter.say("trying ways of re-ranking")
        chosen = made.choose_rerank(trained=seen)
        made.write(args.out)
        yield str(chosen)
    if args.hnsw and len(made) < args.hnsw_from:
        yield f"graph: none; {len(made):,} items are fewer than {args.hnsw_from:,} and searched exactly"
    elif args.hnsw and made.graph is not None and made.graph.facts.unlike is not None:
        yield f"graph: kept, {made.graph.facts}"
    elif args.hnsw:
        reporter.say("making the graph")
        facts = made.make_graph()
        made.write(args.out)
        yield f"graph: {facts}"


def search(argv: list[str]) -> None:
    from nearkin.deploy.flags import SearchArgs

    folder, flags = leading(argv, "the folder of an index", SEARCH, SearchArgs)
    args = parse(SearchArgs, flags, SEARCH)
    if args.k < 1:
        raise ConfigError(f"-k: expected at least 1, got {args.k}.")
    if args.duplicates:
        if args.images or args.item or args.vector or args.store or args.sheet:
            raise ConfigError("--duplicates: compares the items with each other; give it no query, store or sheet.")
        print(*_duplicates(folder, args), sep="\n")
        return
    if args.at_least is not None:
        raise ConfigError("--at-least: is for --duplicates, which is not given.")
    if args.exact and args.store:
        raise ConfigError("--exact: is for the vectors in the folder; how a store searches is its own affair.")
    if not (args.images or args.item or args.vector):
        raise ConfigError("nearkin search: give images, --item ID or --vector FILE.npy to search for.")
    from nearkin.deploy.index import Index

    opened = Index.load(folder)
    if args.images:
        opened.use(load_model(args.run or run_of(opened), args.device))
    _set_rerank(opened, args)
    queries = _queries(opened, args)
    answers = _ask(opened, queries, args)
    if args.sheet is not None:
        _draw(opened, queries, answers, args.sheet)
    if args.json:
        print(json.dumps(_as_json(opened, folder, queries, answers, args), indent=1))
        return
    from rich.text import Text

    for query, answer in zip(queries, answers, strict=True):
        show(*(Text.from_markup(line) for line in _as_lines(opened, query, answer)))
    if args.sheet is not None:
        print(f"sheet: {args.sheet}")


# --- queries and answers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Query:
    """One question. own: the row of the item that asks; label: its class where it is known."""

    title: str
    picture: Path | None
    vector: Any
    label: Any = None
    own: int | None = None


def _queries(opened: Index, args: SearchArgs) -> list[Query]:
    queries = []
    for path in args.images:
        label = label_of(opened, path)
        queries.append(Query(str(path), path, opened.vector_of(path), label))
    for id in args.item:
        row = opened.row_of(id)
        queries.append(Query(id, opened.path_of(id), opened.vectors[row], opened.labels[row], row))
    for path in args.vector:
        rows = _read_vectors(path)
        for n, vector in enumerate(rows):
            name = str(path) if len(rows) == 1 else f"{path}[{n}]"
            queries.append(Query(name, None, opened.vector_of(vector)))
    return queries


def label_of(opened: Index, path: Path) -> Any:
    """The class of a query image: that of the item that it is, or of a class named like its folder; else None."""
    if opened.root is not None:
        resolved = path.resolve()
        name = str(resolved.relative_to(opened.root)) if resolved.is_relative_to(opened.root) else str(resolved)
        if name in opened:
            return opened.labels[opened.row_of(name)]
    folder = path.resolve().parent.name
    return folder if folder in set(opened.labels) else None


def _ask(opened: Index, queries: list[Query], args: SearchArgs) -> list[Answer]:
    if args.store is None:
        return [opened.answer(query.vector, args.k, own=query.own, exact=args.exact) for query in queries]
    if opened.mark is None:
        raise ConfigError("--store: the index does not say which model made its vectors.")
    from nearkin.deploy.index import Answer
    from nearkin.deploy.stores import open_store

    store = open_store(args.store, opened.dim, opened.mark.fingerprint)
    answers = []
    for query in queries:
        own = None if query.own is None else opened.ids[query.own]
        found = [hit for hit in store.search(query.vector, args.k + (own is not None)) if hit.id != own][: args.k]
        top = found[0].similarity if found else -1.0
        known = None if opened.threshold is None else opened.threshold.accepts(top)
        answers.append(Answer(tuple(found), top, known))
    return answers


def _set_rerank(opened: Index, args: SearchArgs) -> None:
    from nearkin.deploy.rerank import by_name

    if args.rerank is not None:
        if args.store is not None:
            raise ConfigError("--rerank: works on the vectors in the folder, not through a store.")
        opened.rerank = None if args.rerank == "none" else by_name(args.rerank)()


def _read_vectors(path: Path) -> Any:
    from zipfile import BadZipFile

    import numpy as np

    try:
        given = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise DataError(f"{path}: cannot be read as an .npy file ({reason}).") from None
    if not isinstance(given, np.ndarray) or given.ndim not in (1, 2):
        raise DataError(f"{path}: expected one vector [D] or several [N, D].")
    return given[None] if given.ndim == 1 else given


def load_model(run: str | Path, device: str) -> Embedder:
    """The model of a run on the device that was asked for."""
    from nearkin.building import choose_device
    from nearkin.models.embedder import load

    return load(run).to(choose_device(device))


def _dim(model: Embedder) -> int:
    return int(model.embed([]).shape[1])


def run_of(opened: Index) -> str:
    """The run folder whose model made the index, or how to name another place."""
    if opened.mark is None or opened.mark.run is None:
        raise ConfigError("the index names no run folder. Give it with --run RUN.")
    if not Path(opened.mark.run).exists():
        raise ConfigError(f"{opened.mark.run}: the run of this index is not there. Give its place with --run RUN.")
    return opened.mark.run


# --- showing ---------------------------------------------------------------------------------------------------------


def _as_lines(opened: Index, query: Query, answer: Answer) -> list[str]:
    """An answer as lines in columns, in full: what is cut off could not be given to --item."""
    from rich.cells import cell_len
    from rich.markup import escape

    from nearkin.deploy.sheet import printable

    title = query.title if query.label is None else f"{query.title}  ({query.label})"
    lines = [f"[bold]{escape(printable(title))}[/bold]"]
    if answer.known is False and opened.threshold is not None:
        lines.append(
            f"unknown: the nearest is at {answer.nearest:.4f}, known is above {opened.threshold.value:.4f} "
            f"({opened.threshold.false_accept:.2%} false accepts)"
        )
    labels = ["" if hit.label is None else printable(str(hit.label)) for hit in answer.hits]
    width = max([cell_len(label) for label in labels], default=0)
    for place, (hit, label) in enumerate(zip(answer.hits, labels, strict=True), start=1):
        shown = escape(label) + " " * (width - cell_len(label))
        if hit.label is not None and query.label is not None:
            shown = f"[{'green' if hit.label == query.label else 'red'}]{shown}[/]"
        lines.append(f"{place:>4}  {hit.similarity:.4f}  {shown}  {escape(printable(hit.id))}")
    nothing = "nothing: the index is empty" if query.own is None else "nothing else: it is the only item"
    return lines if answer.hits else [*lines, nothing]


def _as_json(
    opened: Index, folder: str, queries: list[Query], answers: list[Answer], args: SearchArgs
) -> dict[str, Any]:
    return {
        "index": folder,
        "items": len(opened),
        "threshold": None if opened.threshold is None else opened.threshold.value,
        "queries": [
            {
                "query": query.title,
                "label": query.label,
                "nearest": answer.nearest,
                "known": answer.known,
                "hits": [
                    {
                        "id": hit.id,
                        "label": hit.label,
                        "similarity": hit.similarity,
                        "path": str(opened.path_of(hit.id)),
                    }
                    for hit in answer.hits
                ],
            }
            for query, answer in zip(queries, answers, strict=True)
        ],
    }


def _draw(opened: Index, queries: list[Query], answers: list[Answer], out: Path) -> None:
    from nearkin.deploy.sheet import SheetRow, contact_sheet

    rows = [
        SheetRow(query.picture, Path(query.title).name, query.label, answer.hits, answer.known)
        for query, answer in zip(queries, answers, strict=True)
    ]
    contact_sheet(rows, [[opened.path_of(hit.id) for hit in answer.hits] for answer in answers], out)


def _duplicates(folder: str, args: SearchArgs) -> list[str]:
    from nearkin.deploy.flags import AT_LEAST
    from nearkin.deploy.index import Index
    from nearkin.deploy.sheet import printable

    opened = Index.load(folder)
    least = AT_LEAST if args.at_least is None else args.at_least
    pairs, count = opened.duplicates(least)
    if args.json:
        listed = [{"first": a, "second": b, "similarity": cosine} for a, b, cosine in pairs]
        return [json.dumps({"index": folder, "at_least": least, "pairs": count, "listed": listed}, indent=1)]
    lines = [f"{cosine:.6f}  {printable(a)}  {printable(b)}" for a, b, cosine in pairs]
    more = f", {len(pairs):,} of them listed" if len(pairs) < count else ""
    return [*lines, f"{count:,} pairs with a cosine of at least {least:g} among {len(opened):,} items{more}"]
