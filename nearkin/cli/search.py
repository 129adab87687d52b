"""`nearkin search`: the nearest indexed images of an image, an item or a vector."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from nearkin.cli._arguments import leading, parse, show
from nearkin.cli._models import load_model, run_of
from nearkin.errors import ConfigError, DataError

if TYPE_CHECKING:
    from nearkin.deploy.index.index import Index, SearchResult

SEARCH = "nearkin search DIR IMAGE..."
AT_LEAST = 0.99


@dataclass(frozen=True)
class SearchArgs:
    """Find the nearest indexed images of each given image, of a stored item, or of a vector.

    nearkin search photos.index new.jpg other.jpg -k 5 --sheet found.png

    nearkin search photos.index --item robin/0007.jpg

    nearkin search photos.index --duplicates
    """

    images: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Images to search for."""
    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 10
    """How many neighbours."""
    item: tuple[str, ...] = ()
    """Search by stored items, given by their ids; an item does not find itself."""
    vector: tuple[Path, ...] = ()
    """Search by vectors in .npy files, [D] or [N, D]."""
    sheet: Path | None = None
    """Draw queries and neighbours as a PNG file."""
    json: bool = False
    """Print JSON instead of tables."""
    duplicates: bool = False
    """List pairs of items that are nearly the same."""
    at_least: float | None = None
    """For --duplicates: the cosine from which a pair is listed; 0.99 unless given."""
    exact: bool = False
    """Pass over the graph and the re-ranking, where the index has any."""
    rerank: str | None = None
    """Re-rank by expansion or reciprocal, or none; by default as the index was told to."""
    store: str | None = None
    """Ask this engine instead of the vectors in the folder."""
    run: Path | None = None
    """The run folder of the model, where it is not at the place that the index names."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto: a GPU where there is one."""


def run(argv: list[str]) -> None:
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
    from nearkin.deploy.index.index import Index

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


def _ask(opened: Index, queries: list[Query], args: SearchArgs) -> list[SearchResult]:
    if args.store is None:
        return [opened.answer(query.vector, args.k, own=query.own, exact=args.exact) for query in queries]
    if opened.mark is None:
        raise ConfigError("--store: the index does not say which model made its vectors.")
    from nearkin.deploy.index.index import SearchResult
    from nearkin.deploy.stores import open_store

    store = open_store(args.store, opened.dim, opened.mark.fingerprint)
    answers = []
    for query in queries:
        own = None if query.own is None else opened.ids[query.own]
        found = [hit for hit in store.search(query.vector, args.k + (own is not None)) if hit.id != own][: args.k]
        top = found[0].similarity if found else -1.0
        known = None if opened.threshold is None else opened.threshold.accepts(top)
        answers.append(SearchResult(tuple(found), top, known))
    return answers


def _set_rerank(opened: Index, args: SearchArgs) -> None:
    from nearkin.deploy.index.rerank import find_reranker

    if args.rerank is not None:
        if args.store is not None:
            raise ConfigError("--rerank: works on the vectors in the folder, not through a store.")
        opened.rerank = None if args.rerank == "none" else find_reranker(args.rerank)()


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


def _as_lines(opened: Index, query: Query, answer: SearchResult) -> list[str]:
    """An answer as lines in columns, in full: what is cut off could not be given to --item."""
    from rich.cells import cell_len
    from rich.markup import escape

    from nearkin.report.contact_sheet import printable

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
    opened: Index, folder: str, queries: list[Query], answers: list[SearchResult], args: SearchArgs
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


def _draw(opened: Index, queries: list[Query], answers: list[SearchResult], out: Path) -> None:
    from nearkin.report.contact_sheet import SheetRow, contact_sheet

    rows = [
        SheetRow(query.picture, Path(query.title).name, query.label, answer.hits, answer.known)
        for query, answer in zip(queries, answers, strict=True)
    ]
    contact_sheet(rows, [[opened.path_of(hit.id) for hit in answer.hits] for answer in answers], out)


def _duplicates(folder: str, args: SearchArgs) -> list[str]:
    from nearkin.deploy.index.index import Index
    from nearkin.report.contact_sheet import printable

    opened = Index.load(folder)
    least = AT_LEAST if args.at_least is None else args.at_least
    pairs, count = opened.duplicates(least)
    if args.json:
        listed = [{"first": a, "second": b, "similarity": cosine} for a, b, cosine in pairs]
        return [json.dumps({"index": folder, "at_least": least, "pairs": count, "listed": listed}, indent=1)]
    lines = [f"{cosine:.6f}  {printable(a)}  {printable(b)}" for a, b, cosine in pairs]
    more = f", {len(pairs):,} of them listed" if len(pairs) < count else ""
    return [*lines, f"{count:,} pairs with a cosine of at least {least:g} among {len(opened):,} items{more}"]
