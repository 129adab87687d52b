"""`nearkin search`: find the nearest indexed images of an image, an item or a vector."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from nearkin._common.files import NPZ_ERRORS
from nearkin._common.words import counted
from nearkin.cli._arguments import INDEX_FOLDER, Device, load_index, parse_target, require_path, show
from nearkin.errors import ConfigError, DataError, require_extra

if TYPE_CHECKING:
    from rich.text import Text

    from nearkin.deploy.index.index import Index
    from nearkin.deploy.index.search import SearchResult


@dataclass(frozen=True)
class SearchArgs:
    """Find the nearest indexed images for each query: an image, an indexed item or a vector.

    nearkin search photos.index new.jpg other.jpg -k 5 --sheet found.png

    nearkin search photos.index --item robin/0007.jpg

    nearkin search photos.index --duplicates
    """

    images: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()  # Query images.
    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 10  # Number of neighbours.
    item: tuple[str, ...] = ()  # Query by indexed items, given by their ids; an item is excluded from its own results.
    vector: tuple[Path, ...] = ()  # Query by vectors in .npy files, [D] or [N, D].
    sheet: Path | None = None  # Save queries and neighbours as a contact sheet (PNG).
    json: bool = False  # Print JSON instead of tables.
    duplicates: bool = False  # List pairs of near-duplicate items.
    min_similarity: float | None = None
    """For --duplicates: minimum cosine similarity of a listed pair; by default 0.99."""
    exact: bool = False  # Ignore the graph and the re-ranking of the index.
    rerank: str | None = None  # Re-rank by expansion, reciprocal or none; by default as set in the index.
    store: str | None = None  # Search in this vector store instead of the index folder.
    run: Path | None = None  # Run folder of the model, if it has moved since indexing.
    device: Device = "auto"


def run(argv: list[str]) -> None:
    folder, args = parse_target(SearchArgs, argv, "nearkin search DIR IMAGE...", INDEX_FOLDER)
    _check_flags(args)
    if args.images or args.sheet is not None:
        require_extra("stores" if args.store else "images", "PIL")
    index = load_index(folder, run=args.run, device=args.device, model=bool(args.images))
    if args.duplicates:
        show(*_duplicates(index, folder, args))
        return
    queries = _queries(index, args)
    results = _search(index, queries, args)
    found = list(zip(queries, results, strict=True))
    if args.sheet is not None:
        from nearkin.report.contact_sheet import SheetRow, contact_sheet

        rows = [SheetRow(q.image, Path(q.title).name, q.label, result.hits, result.known) for q, result in found]
        contact_sheet(rows, [[index.path_of(hit.id) for hit in result.hits] for result in results], args.sheet)
    if args.json:
        threshold = None if index.threshold is None else index.threshold.value
        values = {"index": folder, "items": len(index), "threshold": threshold}
        print(json.dumps({**values, "queries": [_as_json(index, *pair) for pair in found]}, indent=1))
        return
    for query, result in found:
        show(*_as_lines(index, query, result))
    if args.sheet is not None:
        print(f"sheet: {args.sheet}")


def _check_flags(args: SearchArgs) -> None:
    queries = args.images or args.item or args.vector
    if args.k < 1:
        raise ConfigError(f"-k: expected at least 1, got {args.k}.")
    if args.duplicates and (queries or args.store or args.sheet):
        raise ConfigError("--duplicates: compares items with each other and takes no query, --store or --sheet.")
    if args.min_similarity is not None and not args.duplicates:
        raise ConfigError("--min-similarity: only applies with --duplicates.")
    if args.store and (args.exact or args.rerank):
        raise ConfigError(f"--{'exact' if args.exact else 'rerank'}: does not apply to external stores.")
    if not queries and not args.duplicates:
        raise ConfigError("nearkin search: no query. Pass images, --item ID or --vector FILE.npy.")
    for path in (*args.images, *args.vector):
        require_path(path, "an image to search for" if path in args.images else "an .npy file")
        if path.is_dir():
            raise DataError(f"{path}: is a folder. Give image files, for example {path / '*.jpg'}.")


@dataclass(frozen=True)
class Query:
    """One query."""

    title: str  # shown above its results
    image: Path | None  # its file, or None for a vector
    vector: Any  # [D]
    label: Any = None  # its class, if known
    row: int | None = None  # its row, if it is an indexed item


def _queries(index: Index, args: SearchArgs) -> list[Query]:
    queries = [Query(str(path), path, index.vector_of(path), _label_of(index, path)) for path in args.images]
    for id in args.item:
        row = index.row_of(id)
        queries.append(Query(id, index.path_of(id), index.vectors[row], index.labels[row], row))
    for path in args.vector:
        vectors = _read_vectors(path)
        for n, vector in enumerate(vectors):
            title = str(path) if len(vectors) == 1 else f"{path}[{n}]"
            queries.append(Query(title, None, index.vector_of(vector)))
    return queries


def _label_of(index: Index, path: Path) -> Any:
    """Return the class of an image: that of the item it is, else its folder if that is an indexed class."""
    if index.root is not None:
        resolved = path.resolve()
        name = resolved.relative_to(index.root).as_posix() if resolved.is_relative_to(index.root) else str(resolved)
        if name in index:
            return index.labels[index.row_of(name)]
    folder = path.resolve().parent.name
    return folder if folder in set(index.labels) else None


def _search(index: Index, queries: list[Query], args: SearchArgs) -> list[SearchResult]:
    if args.rerank is not None:
        from nearkin.deploy.index.rerank import RERANKERS

        index.rerank = None if args.rerank == "none" else RERANKERS[args.rerank]()
    if args.store is None:
        return [index.answer(query.vector, args.k, exclude=query.row, exact=args.exact) for query in queries]
    if index.model_info is None:
        raise ConfigError("--store: the index does not record which model made its vectors.")
    from nearkin.deploy.index.search import SearchResult
    from nearkin.deploy.stores import open_store

    results = []
    with open_store(args.store, index.dim, index.model_info.fingerprint) as store:
        for query in queries:
            exclude = None if query.row is None else index.ids[query.row]
            hits = store.search(query.vector, args.k + (exclude is not None))
            hits = [hit for hit in hits if hit.id != exclude][: args.k]
            top = hits[0].similarity if hits else -1.0
            results.append(SearchResult(tuple(hits), top, index.is_known(top)))
    return results


def _read_vectors(path: Path) -> Any:
    import numpy as np

    try:
        with path.open("rb") as file:  # np.load itself does not close a file that proves broken
            array = np.load(file, allow_pickle=False)
    except NPZ_ERRORS as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise DataError(f"{path}: cannot read as an .npy file ({reason}).") from None
    if not isinstance(array, np.ndarray) or array.ndim not in (1, 2):
        raise DataError(f"{path}: expected one vector [D] or several [N, D].")
    return array[None] if array.ndim == 1 else array


def _as_lines(index: Index, query: Query, result: SearchResult) -> list[str | Text]:
    """Format a result in columns, without truncation, so that every id can be passed to --item."""
    from rich.cells import cell_len
    from rich.text import Text

    from nearkin.report.contact_sheet import printable

    title = query.title if query.label is None else f"{query.title}  ({query.label})"
    lines: list[str | Text] = [Text(printable(title), "bold")]
    if result.known is False and index.threshold is not None:
        lines.append(
            f"unknown: highest similarity {result.nearest:.4f}, threshold {index.threshold.value:.4f} "
            f"({index.threshold.false_accept:.2%} false accepts)"
        )
    if index.threshold is None and result.hits:
        lines.append("no threshold is set, so nothing is called unknown; nearkin index --calibrate sets one")
    labels = ["" if hit.label is None else printable(str(hit.label)) for hit in result.hits]
    width = max(map(cell_len, labels), default=0)
    for rank, (hit, label) in enumerate(zip(result.hits, labels, strict=True), start=1):
        padded = label + " " * (width - cell_len(label))
        colour = "" if None in (hit.label, query.label) else "green" if hit.label == query.label else "red"
        lines.append(Text.assemble(f"{rank:>4}  {hit.similarity:.4f}  ", (padded, colour), f"  {printable(hit.id)}"))
    empty = "no results: the index is empty" if query.row is None else "no results: the index has no other item"
    return lines if result.hits else [*lines, empty]


def _as_json(index: Index, query: Query, result: SearchResult) -> dict[str, Any]:
    hits = [
        {"id": hit.id, "label": hit.label, "similarity": hit.similarity, "path": str(index.path_of(hit.id))}
        for hit in result.hits
    ]
    answer = {"query": query.title, "label": query.label, "nearest": result.nearest, "known": result.known}
    return {**answer, "hits": hits}


def _duplicates(index: Index, folder: str, args: SearchArgs) -> list[str]:
    from nearkin.report.contact_sheet import printable

    min_similarity = 0.99 if args.min_similarity is None else args.min_similarity
    pairs, count = index.duplicates(min_similarity)
    if args.json:
        listed = [{"first": a, "second": b, "similarity": cosine} for a, b, cosine in pairs]
        values = {"index": folder, "min_similarity": min_similarity, "pairs": count, "listed": listed}
        return [json.dumps(values, indent=1)]
    lines = [f"{cosine:.6f}  {printable(a)}  {printable(b)}" for a, b, cosine in pairs]
    shown = f", {len(pairs):,} of them listed" if len(pairs) < count else ""
    found = f"{counted(count, 'pair')} with a cosine of at least {min_similarity:g}"
    return [*lines, f"{found} among {counted(len(index), 'item')}{shown}"]
