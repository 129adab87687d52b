"""`Index`: vectors of pictures with their names and labels, to be searched, kept on the disk, and changed.

    index = nk.Index.build(model, paths, labels)
    index.save("birds.index")
    index = nk.Index.load("birds.index", model)
    for hit in index.search("photo.jpg", k=5):
        print(hit.similarity, hit.label, hit.id)

Search is exact, and ranks as `nk.score` does: the cosine of the stored float32 vectors, ties in the order of the rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nearkin.deploy.index import files
from nearkin.deploy.index.files import Manifest, ModelInfo, StoredFile
from nearkin.deploy.index.openset import Threshold, calibrate_items
from nearkin.deploy.index.provenance import Embeds, FileStamp, check_model, model_info
from nearkin.deploy.index.rerank import Chosen, Rerank, choose_rerank, from_dict, reranked, to_dict
from nearkin.deploy.index.search import (
    Floats,
    Graph,
    GraphFacts,
    Hit,
    Ints,
    Label,
    Vectors,
    as_array,
    check_k,
    check_vectors,
    inverse_lengths,
    near_pairs,
    nearest,
    without,
)
from nearkin.errors import ConfigError, DataError


@dataclass(frozen=True)
class SearchResult:
    """What a search found. nearest: the highest cosine of any item; known: whether it passes the threshold, if any."""

    hits: tuple[Hit, ...]
    nearest: float
    known: bool | None


class Index:
    """Items to search: row i is `ids[i]` with `labels[i]` and `vectors[i]`.

    threshold: below which similarity a query is unknown (nearkin.deploy.index.openset), where it was calibrated.
    rerank: how answers are put in a better order (nearkin.deploy.index.rerank), where validation classes asked for it.
    """

    graph: Graph | None
    _factors: Vectors | None

    def __init__(
        self,
        vectors: Any,
        ids: Sequence[str],
        labels: Sequence[Label] | None = None,
        *,
        model: Embeds | None = None,
        mark: ModelInfo | None = None,
        root: Path | None = None,
        stamps: Sequence[FileStamp | None] | None = None,
    ) -> None:
        """Ready vectors [N, D] of any origin; an array of float32 is kept as it is, not copied.

        mark: which model made them; taken from `model` where that is given.
        """
        rows = check_vectors(vectors, None, "vectors")
        self._set(rows, list(ids), _labels(labels, len(rows)), _stamps(stamps, len(rows)))
        self.root = root
        self.mark = model_info(model) if model is not None and mark is None else mark
        self._model = model
        self.threshold: Threshold | None = None
        self.rerank: Rerank | None = None
        self.store: str | None = None  # the engine that holds the same items (nearkin.deploy.stores)

    # --- making -------------------------------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        model: Embeds,
        images: Sequence[Any],
        labels: Sequence[Label] | None = None,
        *,
        ids: Sequence[str] | None = None,
        run: str | Path | None = None,
    ) -> Index:
        """Embed pictures (paths, PIL images or bytes [N, C, H, W]) and index them.

        labels: one per picture, None where it is not known. ids: their names; by default the paths as they are given.
        run: the folder that the model was loaded from, so that a later `Index.load` finds it by itself.
        """
        names = _ids(images, ids)
        mark = model_info(model, None if run is None else Path(run))
        vectors = _embedded(model, images, names)
        return cls(vectors, names, labels, model=model, mark=mark, root=Path.cwd())

    def add(self, images: Sequence[Any], labels: Sequence[Label] | None = None, *, ids: Any = None) -> None:
        """Embed further pictures and append them; an id that is there already is refused.

        ids: their names; by default the paths, relative to where the index was built if they are given as relative.
        """
        names = _ids(images, ids) if ids is not None else [self._id_of(path) for path in _ids(images, None)]
        self._refuse_known(names)
        self.add_vectors(_embedded(self.model(), images, names), names, labels)

    def add_vectors(self, vectors: Any, ids: Sequence[str], labels: Sequence[Label] | None = None) -> None:
        """Append ready vectors, of the same model."""
        self._refuse_known(ids)
        more = check_vectors(vectors, self.dim, "vectors")
        if len(more) != len(ids):
            raise DataError(f"ids: {len(ids)} names for {len(more)} vectors.")
        given, unknown = _labels(labels, len(more)), _stamps(None, len(more))
        everything = np.concatenate([self.vectors, more])
        self._set(everything, [*self.ids, *ids], [*self.labels, *given], [*self.stamps, *unknown])

    def remove(self, ids: Iterable[str]) -> None:
        """Take items out; one that is not there is refused."""
        gone = {self.row_of(id) for id in ([ids] if isinstance(ids, str) else ids)}
        rows = [row for row in range(len(self)) if row not in gone]
        kept = [self.ids[row] for row in rows], [self.labels[row] for row in rows], [self.stamps[row] for row in rows]
        self._set(np.asarray(self.vectors[rows]), *kept)

    def make_graph(self, *, recall: float = 0.99) -> GraphFacts:
        """Make a graph for approximate search (needs faiss); the recall it reached is measured and returned."""
        self.graph = Graph.build(self.vectors, recall=recall)
        return self.graph.facts

    def _set(self, vectors: Vectors, ids: list[str], labels: list[Label], stamps: list[FileStamp | None]) -> None:
        """Take these for the items, all or none. The graph is dropped; threshold and re-ranking stay."""
        if len(ids) != len(vectors):
            raise DataError(f"ids: {len(ids)} names for {len(vectors)} vectors.")
        other = next((id for id in ids if not isinstance(id, str)), None)
        if other is not None:
            raise DataError(f"ids: expected text, got {type(other).__name__} ({other!r}).")
        rows = {id: row for row, id in enumerate(ids)}
        if len(rows) != len(ids):
            twice = next(id for row, id in enumerate(ids) if rows[id] != row)
            raise DataError(f"ids: {twice!r} is given twice. Each item needs a name of its own.")
        kinds = {type(label) for label in labels} - {type(None)}
        if kinds not in (set(), {str}, {int}):
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise DataError(f"labels: expected text or whole numbers (and None), all of one kind; got {names}.")
        self.vectors, self.ids, self.labels, self.stamps, self._rows = vectors, ids, labels, stamps, rows
        self.graph, self._factors = None, None

    def _refuse_known(self, ids: Sequence[str]) -> None:
        known = next((id for id in ids if id in self._rows), None)
        if known is not None:
            raise DataError(f"ids: {known!r} is in the index already. Remove it first to replace it.")

    # --- asking -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, id: str) -> bool:
        return id in self._rows

    @property
    def dim(self) -> int:
        return int(self.vectors.shape[1])

    def row_of(self, id: str) -> int:
        if id not in self._rows:
            raise DataError(f"{id!r}: no such item in the index of {len(self):,}.")
        return self._rows[id]

    def path_of(self, id: str) -> Path:
        """The file of an item whose id is a path."""
        return Path(id) if self.root is None else self.root / id

    def _id_of(self, path: str) -> str:
        """The id by which `path_of` finds the file that this path names from the current folder."""
        if self.root is None or os.path.isabs(path) or self.root == Path.cwd():
            return path
        whole = Path(os.path.abspath(path))
        return str(whole.relative_to(self.root) if whole.is_relative_to(self.root) else whole)

    def search(self, query: Any, k: int = 10, *, exact: bool = False) -> list[Hit]:
        """The k nearest items of a picture (a path, a PIL image, bytes [C, H, W]) or of a vector [D], nearest first.

        With fewer than k items all are returned. exact: pass over the graph and the re-ranking, where there are any.
        """
        return list(self.answer(query, k, exact=exact).hits)

    def search_item(self, id: str, k: int = 10, *, exact: bool = False) -> list[Hit]:
        """The k nearest of the other items; the item itself is left out."""
        row = self.row_of(id)
        return list(self.answer(self.vectors[row], k, own=row, exact=exact).hits)

    def answer(self, query: Any, k: int = 10, *, own: int | None = None, exact: bool = False) -> SearchResult:
        """`search` less the item in row `own`, with whether the query is of a kind that is known here."""
        vector = self.vector_of(query)
        rows, cosines = self._nearest(vector, k, own, exact)
        top = float(cosines[0]) if len(cosines) else -1.0
        if self.rerank is not None and not exact:
            rows, cosines = reranked(vector, self.vectors, k, self.rerank, lambda q, n: self._nearest(q, n, own, exact))
        hits = tuple(
            Hit(self.ids[row], self.labels[row], cosine, row)
            for row, cosine in zip(rows.tolist(), cosines.tolist(), strict=True)
        )
        return SearchResult(hits, top, None if self.threshold is None else self.threshold.accepts(top))

    def search_many(self, queries: Any, k: int = 10) -> tuple[Ints, Floats]:
        """Rows and cosines, both [Q, min(k, N)], of the nearest items of many vectors [Q, D]; always exact."""
        return nearest(check_vectors(queries, self.dim, "queries"), self.vectors, k, self._inverse_lengths())

    def _nearest(self, query: Vectors, k: int, own: int | None, exact: bool) -> tuple[Ints, Floats]:
        check_k(k)
        wanted = k if own is None else k + 1
        if self.graph is not None and not exact:
            rows, cosines = self.graph.search(query, self.vectors, wanted)
        else:
            found = nearest(query[None], self.vectors, wanted, self._inverse_lengths())
            rows, cosines = found[0][0], found[1][0]
        if own is not None:
            rows, cosines = without(own, rows, cosines)
        return rows[:k], cosines[:k]

    def calibrate(self, false_accept: float = 0.01, *, trained: Iterable[Label] = ()) -> Threshold:
        """Set the threshold below which a query is unknown, from the labelled items themselves; see openset.py.

        trained: classes that the model was trained on. They are searched, but do not ask: a model knows them too well.
        Items without a label are searched too, and count as of another class than the one that asks.
        """
        self.threshold = calibrate_items(self.vectors, self.labels, self._judges(trained), false_accept)
        return self.threshold

    def choose_rerank(self, *, trained: Iterable[Label] = ()) -> Chosen:
        """Keep a way of re-ranking if it surely helps the labelled items find each other; see rerank.py."""
        chosen = choose_rerank(self.vectors, self.labels, queries=self._judges(trained).tolist())
        self.rerank = chosen.option
        return chosen

    def _judges(self, trained: Iterable[Label]) -> Ints:
        """The rows that may ask: those with a label, of classes that were not trained on."""
        seen = {*trained, None}
        return np.array([row for row, label in enumerate(self.labels) if label not in seen], np.int64)

    def duplicates(self, at_least: float = 0.99) -> tuple[list[tuple[str, str, float]], int]:
        """Pairs of items with at least this cosine, nearest first (10,000 at most), and how many there are."""
        pairs, count = near_pairs(self.vectors, at_least)
        return [(self.ids[i], self.ids[j], cosine) for i, j, cosine in pairs], count

    def vector_of(self, query: Any) -> Vectors:
        """A query as a vector [D]: given as one, or embedded by the model that made the index."""
        if isinstance(query, str | os.PathLike) or hasattr(query, "getbands"):  # a path, or a PIL image
            return self._one(self.model().embed([query]))
        given = as_array(query)
        if given.dtype == np.uint8 and given.ndim == 3:
            return self._one(self.model().embed(given[None]))
        if given.ndim != 1:
            raise DataError(f"query: expected a path, a PIL image or one vector [D]; got shape {list(given.shape)}.")
        return self._one(given[None])

    def _one(self, rows: Any) -> Vectors:
        # As a plain array: torch warns of memory that it may not write to, as mapped rows are.
        return np.array(check_vectors(rows, self.dim, "query")[0])

    def model(self) -> Embeds:
        """The model that made the vectors: the one given, or the one of the run folder that the index names."""
        if self._model is None:
            if self.mark is None or self.mark.run is None:
                raise ConfigError(
                    "index: it names no run folder to load its model from. Give one: Index.load(dir, model)."
                )
            from nearkin.models.embedder import load

            self.use(load(self.mark.run))
        assert self._model is not None
        return self._model

    def use(self, model: Embeds) -> None:
        """Search with this model, which must be the one that made the vectors."""
        check_model(self.mark, model.fingerprint(), "the index")
        self._model = model

    def _inverse_lengths(self) -> Vectors:
        if self._factors is None:
            self._factors = inverse_lengths(self.vectors)
        return self._factors

    # --- on the disk --------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write the index; whatever happens meanwhile, the folder holds the old state or the new one, whole."""
        path = Path(folder)
        with files.lock_index(path):
            self.write(path)

    def write(self, folder: Path) -> None:
        """`save` for who holds the folder already."""
        named = {
            "vectors": files.write_vectors(folder, (len(self), self.dim), [self.vectors]),
            "items": files.write_items(folder, _columns(self)),
        }
        if self.graph is not None:
            named["graph"] = files.write_file(folder, "hnsw", ".faiss", [self.graph.to_bytes()])
        files.commit(folder, self._manifest(named))

    def _manifest(self, named: dict[str, StoredFile]) -> Manifest:
        return Manifest(
            items=len(self),
            dim=self.dim,
            files=named,
            model=self.mark,
            root=None if self.root is None else str(self.root),
            threshold=None if self.threshold is None else asdict(self.threshold),
            rerank=None if self.rerank is None else to_dict(self.rerank),
            graph=None if self.graph is None else asdict(self.graph.facts),
            store=self.store,
        )

    @classmethod
    def load(cls, folder: str | Path, model: Embeds | None = None) -> Index:
        """Open an index; its vectors stay on the disk and are mapped. Damaged files are refused.

        model: what to embed queries with, refused when it is not the one that made the vectors. Without it the run
        folder that the index names is loaded when a picture is first searched for.
        """
        path = Path(folder)
        index = files.consistently(path, lambda manifest: cls._read(path, manifest))
        if model is not None:
            index.use(model)
        return index

    @classmethod
    def _read(cls, folder: Path, manifest: Manifest) -> Index:
        columns = files.read_items(folder, manifest)
        index = cls.__new__(cls)
        stamps = [FileStamp(*row) if row is not None else None for row in columns["stamps"]]
        index._set(files.read_vectors(folder, manifest), columns["ids"], columns["labels"], stamps)
        index.root = None if manifest.root is None else Path(manifest.root)
        index.mark, index._model = manifest.model, None
        index.threshold = None if manifest.threshold is None else Threshold.from_dict(manifest.threshold)
        index.rerank = None if manifest.rerank is None else from_dict(manifest.rerank)
        index.store = manifest.store
        if manifest.graph is not None:
            data = files.checked(folder, manifest.files["graph"]).read_bytes()
            index.graph = Graph(data, GraphFacts(**manifest.graph))
        return index


def _embedded(model: Embeds, images: Any, names: Sequence[str]) -> Vectors:
    vectors = check_vectors(model.embed(images), None, "the model's vectors")
    if len(vectors) != len(names):
        raise DataError(f"ids: {len(names)} names for {len(vectors)} pictures.")
    return vectors


def _ids(images: Sequence[Any], ids: Sequence[str] | None) -> list[str]:
    if ids is not None:
        return list(ids)
    if isinstance(images, str | os.PathLike):
        raise DataError(f"{images}: expected a list of pictures, got one path. Put it in a list.")
    if not all(isinstance(image, str | os.PathLike) for image in images):
        raise DataError("ids: pictures that are not files need names. Give ids=[...], one per picture.")
    return [os.fsdecode(image) for image in images]


def _labels(labels: Sequence[Label] | None, count: int) -> list[Label]:
    given: list[Label] = [None] * count if labels is None else _plain(labels)
    if len(given) != count:
        raise DataError(f"labels: {len(given)} labels for {count} items.")
    return given


def _plain(values: Any) -> list[Label]:
    """Labels as Python's own numbers and texts, from a list, an array or a tensor."""
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    return [value.item() if isinstance(value, np.generic) else value for value in values]


def _stamps(stamps: Sequence[FileStamp | None] | None, count: int) -> list[FileStamp | None]:
    assert stamps is None or len(stamps) == count
    return [None] * count if stamps is None else list(stamps)


def _columns(index: Index) -> dict[str, list[Any]]:
    stamps = [None if stamp is None else [stamp.size, stamp.mtime_ns, stamp.sha256] for stamp in index.stamps]
    return {"ids": index.ids, "labels": index.labels, "stamps": stamps}
