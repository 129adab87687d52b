"""`Index`: image embeddings with ids and labels that can be searched, updated and saved.

    index = nk.Index.build(model, paths, labels)
    index.save("birds.index")
    index = nk.Index.load("birds.index", model)
    for hit in index.search("photo.jpg", k=5):
        print(hit.similarity, hit.label, hit.id)

Search is exact and ranks as `nk.score` does: by cosine similarity of the float32 vectors, ties in row order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nearkin.deploy.index import files
from nearkin.deploy.index._items import (
    as_labels,
    check_label_types,
    embed_images,
    ids_of,
    row_by_id,
    stamps_to_json,
)
from nearkin.deploy.index.graph import GraphStats, HNSWGraph
from nearkin.deploy.index.manifest import Manifest, ModelInfo, StoredFile
from nearkin.deploy.index.openset import Threshold, calibrate_items
from nearkin.deploy.index.provenance import EmbeddingModel, FileStamp, check_model, get_model_info
from nearkin.deploy.index.rerank import Rerank, RerankChoice, apply_rerank, choose_rerank, from_dict, to_dict
from nearkin.deploy.index.search import (
    Floats,
    Hit,
    Ints,
    Label,
    Vectors,
    as_array,
    check_k,
    check_vectors,
    exclude_row,
    inverse_norms,
    near_pairs,
    nearest,
)
from nearkin.errors import ConfigError, DataError


@dataclass(frozen=True)
class SearchResult:
    """The result of one query.

    Attributes:
        hits: The nearest items, nearest first.
        nearest: Highest cosine of any item, before re-ranking; -1 if there is none.
        known: Whether `nearest` exceeds the threshold; None if the index is not calibrated.
    """

    hits: tuple[Hit, ...]
    nearest: float
    known: bool | None


class Index:
    """A searchable set of vectors: row i is `ids[i]` with `labels[i]` and `vectors[i]`.

    Args:
        vectors: Precomputed vectors [N, D] of any origin. A float32 array is not copied.
        ids: A unique name per item.
        labels: Class per item, None where unknown.
        model: Embeds image queries.
        model_info: The model that made the vectors; by default `model`.
        root: The folder that ids are relative to, if they are paths.
        stamps: File stamps per item, used by `nearkin index` to detect changed files.

    Attributes:
        threshold: Similarity below which a query is unknown, if calibrated (see openset.py).
        rerank: How results are re-ranked, if a method was chosen (see rerank.py).
        graph: Graph for approximate search, if one was built (see graph.py).
        store: Name of the external store that holds the same items, if any (see stores.py).
    """

    graph: HNSWGraph | None
    _inv_norms: Vectors | None

    def __init__(
        self,
        vectors: Any,
        ids: Sequence[str],
        labels: Sequence[Label] | None = None,
        *,
        model: EmbeddingModel | None = None,
        model_info: ModelInfo | None = None,
        root: Path | None = None,
        stamps: Sequence[FileStamp | None] | None = None,
    ) -> None:
        rows = check_vectors(vectors, None, "vectors")
        assert stamps is None or len(stamps) == len(rows)
        self._set_items(rows, list(ids), as_labels(labels, len(rows)), list(stamps or [None] * len(rows)))
        self.root = root
        self.model_info = get_model_info(model) if model is not None and model_info is None else model_info
        self._model = model
        self.threshold: Threshold | None = None
        self.rerank: Rerank | None = None
        self.store: str | None = None

    # --- building ----------------------------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        model: EmbeddingModel,
        images: Sequence[Any],
        labels: Sequence[Label] | None = None,
        *,
        ids: Sequence[str] | None = None,
        run: str | Path | None = None,
    ) -> Index:
        """Embed images and index them.

        Args:
            model: Embeds the images.
            images: Paths, PIL images, or uint8 [N, C, H, W].
            labels: Class per image, None where unknown.
            ids: Item names; by default the paths as given.
            run: The run folder of the model, so that `Index.load` can load the model from there.

        Returns:
            The index.
        """
        names = ids_of(images, ids)
        model_info = get_model_info(model, None if run is None else Path(run))
        vectors = embed_images(model, images, names)
        return cls(vectors, names, labels, model=model, model_info=model_info, root=Path.cwd())

    def add(self, images: Sequence[Any], labels: Sequence[Label] | None = None, *, ids: Any = None) -> None:
        """Embed images and append them.

        Args:
            images: As for `build`.
            labels: Class per image, None where unknown.
            ids: Item names, which must be new; by default the paths (relative paths are converted to be relative to the
                folder in which the index was built).
        """
        names = ids_of(images, ids) if ids is not None else [self._relative_id(path) for path in ids_of(images, None)]
        self._check_new_ids(names)
        self.add_vectors(embed_images(self.model(), images, names), names, labels)

    def add_vectors(self, vectors: Any, ids: Sequence[str], labels: Sequence[Label] | None = None) -> None:
        """Append precomputed vectors of the same model.

        Args:
            vectors: [n, D].
            ids: Item names, which must be new.
            labels: Class per item, None where unknown.
        """
        self._check_new_ids(ids)
        new = check_vectors(vectors, self.dim, "vectors")
        if len(new) != len(ids):
            raise DataError(f"ids: expected one per vector, got {len(ids)} for {len(new)}.")
        self._set_items(
            np.concatenate([self.vectors, new]),
            [*self.ids, *ids],
            [*self.labels, *as_labels(labels, len(new))],
            [*self.stamps, *[None] * len(new)],
        )

    def remove(self, ids: Iterable[str]) -> None:
        """Remove items.

        Args:
            ids: Item names, all of which must exist; a single string is one name.
        """
        removed = {self.row_of(id) for id in ([ids] if isinstance(ids, str) else ids)}
        rows = [row for row in range(len(self)) if row not in removed]
        self._set_items(
            np.asarray(self.vectors[rows]),
            [self.ids[row] for row in rows],
            [self.labels[row] for row in rows],
            [self.stamps[row] for row in rows],
        )

    def build_graph(self, *, recall: float = 0.99) -> GraphStats:
        """Build an HNSW graph for approximate search (needs faiss).

        Args:
            recall: Target recall@10.

        Returns:
            Its parameters and measured recall.
        """
        self.graph = HNSWGraph.build(self.vectors, recall=recall)
        return self.graph.stats

    def _set_items(self, vectors: Vectors, ids: list[str], labels: list[Label], stamps: list[FileStamp | None]) -> None:
        """Replace all items, or raise and change nothing. Drops the graph; keeps threshold and re-ranking."""
        rows = row_by_id(ids, len(vectors))
        check_label_types(labels)
        self.vectors, self.ids, self.labels, self.stamps, self._rows = vectors, ids, labels, stamps, rows
        self.graph, self._inv_norms = None, None

    def _check_new_ids(self, ids: Sequence[str]) -> None:
        existing = next((id for id in ids if id in self._rows), None)
        if existing is not None:
            raise DataError(f"ids: {existing!r} is already in the index. Remove it first to replace it.")

    # --- searching ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, id: str) -> bool:
        return id in self._rows

    @property
    def dim(self) -> int:
        """Number of dimensions per vector."""
        return int(self.vectors.shape[1])

    def row_of(self, id: str) -> int:
        """Return the row of an item."""
        if id not in self._rows:
            raise DataError(f"{id!r}: no such item in the index ({len(self):,} items).")
        return self._rows[id]

    def path_of(self, id: str) -> Path:
        """Return the file of an item whose id is a path."""
        return Path(id) if self.root is None else self.root / id

    def _relative_id(self, path: str) -> str:
        """Return the id for which `path_of` gives this path, which may be relative to the current folder."""
        if self.root is None or os.path.isabs(path) or self.root == Path.cwd():
            return path
        absolute = Path(os.path.abspath(path))
        return absolute.relative_to(self.root).as_posix() if absolute.is_relative_to(self.root) else str(absolute)

    def search(self, query: Any, k: int = 10, *, exact: bool = False) -> list[Hit]:
        """Find the nearest items of an image or vector.

        Args:
            query: A path, a PIL image, uint8 [C, H, W], or a vector [D].
            k: Number of neighbours; all items if there are fewer.
            exact: Ignore the graph and the re-ranking, if any.

        Returns:
            The nearest items, nearest first.
        """
        return list(self.answer(query, k, exact=exact).hits)

    def search_item(self, id: str, k: int = 10, *, exact: bool = False) -> list[Hit]:
        """Find the nearest other items of an item.

        Args:
            id: The item, which is excluded from the result.
            k: Number of neighbours; all other items if there are fewer.
            exact: Ignore the graph and the re-ranking, if any.

        Returns:
            The nearest items, nearest first.
        """
        row = self.row_of(id)
        return list(self.answer(self.vectors[row], k, exclude=row, exact=exact).hits)

    def answer(self, query: Any, k: int = 10, *, exclude: int | None = None, exact: bool = False) -> SearchResult:
        """Search as `search` does, and tell whether the query's class is known.

        Args:
            query: A path, a PIL image, uint8 [C, H, W], or a vector [D].
            k: Number of neighbours.
            exclude: Row of an item to leave out.
            exact: Ignore the graph and the re-ranking, if any.

        Returns:
            Hits, highest similarity, and whether it exceeds the threshold.
        """
        vector = self.vector_of(query)
        rows, cosines = self._nearest(vector, k, exclude, exact)
        top = float(cosines[0]) if len(cosines) else -1.0
        if self.rerank is not None and not exact:
            rows, cosines = apply_rerank(
                vector, self.vectors, k, self.rerank, lambda q, n: self._nearest(q, n, exclude, exact)
            )
        hits = tuple(
            Hit(self.ids[row], self.labels[row], cosine, row)
            for row, cosine in zip(rows.tolist(), cosines.tolist(), strict=True)
        )
        return SearchResult(hits, top, None if self.threshold is None else self.threshold.accepts(top))

    def search_many(self, queries: Any, k: int = 10) -> tuple[Ints, Floats]:
        """Find the nearest items of many vectors; always exact.

        Args:
            queries: [Q, D].
            k: Number of neighbours.

        Returns:
            Rows and cosines, both [Q, min(k, N)], nearest first.
        """
        return nearest(check_vectors(queries, self.dim, "queries"), self.vectors, k, self._inverse_norms())

    def _nearest(self, query: Vectors, k: int, exclude: int | None, exact: bool) -> tuple[Ints, Floats]:
        check_k(k)
        fetch = k if exclude is None else k + 1
        if self.graph is not None and not exact:
            rows, cosines = self.graph.search(query, self.vectors, fetch)
        else:
            result = nearest(query[None], self.vectors, fetch, self._inverse_norms())
            rows, cosines = result[0][0], result[1][0]
        if exclude is not None:
            rows, cosines = exclude_row(exclude, rows, cosines)
        return rows[:k], cosines[:k]

    def calibrate(self, false_accept: float = 0.01, *, trained: Iterable[Label] = ()) -> Threshold:
        """Set the threshold below which a query is unknown, with the labelled items as queries (see openset.py).

        Args:
            false_accept: Target false-accept rate.
            trained: Classes the model was trained on. They are searched but not used as queries, since the model fits
                them too well. Items without a label are searched too, and count as another class than any query.

        Returns:
            The threshold and its rates.
        """
        self.threshold = calibrate_items(self.vectors, self.labels, self._query_rows(trained), false_accept)
        return self.threshold

    def choose_rerank(self, *, trained: Iterable[Label] = ()) -> RerankChoice:
        """Select a re-ranking method if one significantly helps the labelled items (see rerank.py).

        Args:
            trained: Classes the model was trained on, not used as queries.

        Returns:
            The selected method and the gain of each.
        """
        choice = choose_rerank(self.vectors, self.labels, queries=self._query_rows(trained).tolist())
        self.rerank = choice.option
        return choice

    def _query_rows(self, trained: Iterable[Label]) -> Ints:
        """Return the rows with a label of a class that was not trained on."""
        excluded = {*trained, None}
        return np.array([row for row, label in enumerate(self.labels) if label not in excluded], np.int64)

    def duplicates(self, min_similarity: float = 0.99) -> tuple[list[tuple[str, str, float]], int]:
        """Find pairs of near-duplicate items.

        Args:
            min_similarity: Lowest cosine of a pair.

        Returns:
            Pairs (id, id, cosine), most similar first (at most 10,000), and the number of all pairs found.
        """
        pairs, count = near_pairs(self.vectors, min_similarity)
        return [(self.ids[i], self.ids[j], cosine) for i, j, cosine in pairs], count

    def vector_of(self, query: Any) -> Vectors:
        """Convert a query to a vector [D], embedding it if it is an image."""
        if isinstance(query, str | os.PathLike) or hasattr(query, "getbands"):  # a path or a PIL image
            return self._query_vector(self.model().embed([query]))
        array = as_array(query)
        if array.dtype == np.uint8 and array.ndim == 3:
            return self._query_vector(self.model().embed(array[None]))
        if array.ndim != 1:
            raise DataError(f"query: expected a path, a PIL image or one vector [D]; got shape {list(array.shape)}.")
        return self._query_vector(array[None])

    def _query_vector(self, rows: Any) -> Vectors:
        # Copied, because torch warns about read-only memory such as memory-mapped rows.
        return np.array(check_vectors(rows, self.dim, "query")[0])

    def model(self) -> EmbeddingModel:
        """Return the model that made the vectors, loaded from its run folder if it was not given."""
        if self._model is None:
            if self.model_info is None or self.model_info.run is None:
                raise ConfigError("index: has no run folder to load its model from. Pass it: Index.load(dir, model).")
            from nearkin.models.embedder import load

            self.set_model(load(self.model_info.run))
        assert self._model is not None
        return self._model

    def set_model(self, model: EmbeddingModel) -> None:
        """Set the model that embeds queries, which must be the one that made the vectors."""
        check_model(self.model_info, model.fingerprint(), "index")
        self._model = model

    def _inverse_norms(self) -> Vectors:
        if self._inv_norms is None:
            self._inv_norms = inverse_norms(self.vectors)
        return self._inv_norms

    # --- saving and loading ------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write the index atomically: a failure leaves the previous state intact.

        Args:
            folder: Created if needed.
        """
        path = Path(folder)
        with files.lock_index(path):
            self.write(path)

    def write(self, folder: Path) -> None:
        """Write the index into a folder that the caller has locked with `files.lock_index`."""
        stored = {
            "vectors": files.write_vectors(folder, (len(self), self.dim), [self.vectors]),
            "items": files.write_items(
                folder, {"ids": self.ids, "labels": self.labels, "stamps": stamps_to_json(self.stamps)}
            ),
        }
        if self.graph is not None:
            stored["graph"] = files.write_file(folder, "hnsw", ".faiss", [self.graph.to_bytes()])
        files.commit(folder, self._manifest(stored))

    def _manifest(self, stored: dict[str, StoredFile]) -> Manifest:
        return Manifest(
            items=len(self),
            dim=self.dim,
            files=stored,
            model=self.model_info,
            root=None if self.root is None else str(self.root),
            threshold=None if self.threshold is None else asdict(self.threshold),
            rerank=None if self.rerank is None else to_dict(self.rerank),
            graph=None if self.graph is None else asdict(self.graph.stats),
            store=self.store,
        )

    @classmethod
    def load(cls, folder: str | Path, model: EmbeddingModel | None = None) -> Index:
        """Open an index. Its vectors are memory-mapped; damaged files raise `DataError`.

        Args:
            folder: The index.
            model: Embeds image queries; must be the model that made the vectors. By default it is loaded from the run
                folder recorded in the index when an image is first searched for.

        Returns:
            The index.
        """
        path = Path(folder)
        index = files.read_consistent(path, lambda manifest: cls._read(path, manifest))
        if model is not None:
            index.set_model(model)
        return index

    @classmethod
    def _read(cls, folder: Path, manifest: Manifest) -> Index:
        columns = files.read_items(folder, manifest)
        index = cls.__new__(cls)
        stamps = [FileStamp(*row) if row is not None else None for row in columns["stamps"]]
        index._set_items(files.read_vectors(folder, manifest), columns["ids"], columns["labels"], stamps)
        index.root = None if manifest.root is None else Path(manifest.root)
        index.model_info, index._model = manifest.model, None
        index.threshold = None if manifest.threshold is None else Threshold.from_dict(manifest.threshold)
        index.rerank = None if manifest.rerank is None else from_dict(manifest.rerank)
        index.store = manifest.store
        if manifest.graph is not None:
            data = files.verify_file(folder, manifest.files["graph"]).read_bytes()
            index.graph = HNSWGraph(data, GraphStats(**manifest.graph))
        return index
