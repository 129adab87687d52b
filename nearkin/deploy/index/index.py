"""`Index`: image embeddings with ids and labels that can be searched, updated and saved.

Search is exact and ranks as `nk.score` does: by cosine similarity of the float32 vectors, ties in row order.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from nearkin.config._parsing import from_dict
from nearkin.deploy.index import items, search, storage
from nearkin.deploy.index.graph import GraphStats, HNSWGraph
from nearkin.deploy.index.items import EmbeddingModel, FileStamp, ModelInfo
from nearkin.deploy.index.openset import Threshold, calibrate_items
from nearkin.deploy.index.rerank import RERANKERS, Rerank, RerankChoice, apply_rerank, choose_rerank, rerank_name
from nearkin.deploy.index.search import Floats, Hit, Ints, Label, SearchResult, Vectors
from nearkin.errors import ConfigError, DataError, UserError


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
        threshold: Similarity below which a query is unknown, if calibrated.
        rerank: How results are re-ranked, if a method was chosen.
        graph: Graph for approximate search, if one was built.
        store: Name of the external store that holds the same items, if any.

    Example:
        >>> index = Index([[1.0, 0.0], [0.0, 1.0]], ["a.jpg", "b.jpg"], ["robin", "wren"])
        >>> index.search([0.1, 0.9], k=1)[0].label
        'wren'
    """

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
        rows = search.check_vectors(vectors, None, "vectors")
        self._set_items(rows, list(ids), items.as_labels(labels, len(rows)), list(stamps or [None] * len(rows)))
        self.root, self._model = root, model
        self.model_info = items.get_model_info(model) if model is not None and model_info is None else model_info
        self.threshold: Threshold | None = None
        self.rerank: Rerank | None = None
        self.store: str | None = None

    @classmethod
    def build(
        cls,
        model: EmbeddingModel | None,
        images: Any,
        labels: Sequence[Label] | None = None,
        *,
        ids: Sequence[str] | None = None,
        run: str | Path | None = None,
        embed: EmbeddingModel | None = None,
    ) -> Self:
        """Embed images and index them, or index vectors.

        Args:
            model: Embeds the images; None if these are vectors [N, D] already.
            images: Paths, PIL images, or uint8 [N, C, H, W]; or data of your own with labels, as
                `nearkin.data.as_table` takes them.
            labels: Class per image, None where unknown.
            ids: Item names; by default the paths as given, or the numbers of the rows of vectors and of your own data.
            run: The run folder of the model, so that `Index.load` can load the model from there.
            embed: For vectors: the model that embeds image queries, such as `Embedder.wrap(function, ...)`.

        Returns:
            The index.
        """
        if model is None:
            vectors = search.check_vectors(images, None, "vectors")
            return cls(vectors, ids or [str(row) for row in range(len(vectors))], labels, model=embed)
        if labelled := items.read_labelled(model, images):
            if labels is not None:
                raise DataError("labels: the data have labels already. Pass one or the other.")
            images, labels, numbered = labelled
            ids = ids or numbered
        names = items.ids_of(images) if ids is None else list(ids)
        vectors = items.embed_images(model, images, names)
        return cls(vectors, names, labels, model=model, model_info=items.get_model_info(model, run), root=Path.cwd())

    def add(self, images: Sequence[Any], labels: Sequence[Label] | None = None, *, ids: Any = None) -> None:
        """Embed images and append them; ids are by default their paths, relative to the folder of the index."""
        names = list(ids) if ids is not None else [items.relative_id(path, self.root) for path in items.ids_of(images)]
        self._check_new_ids(names)
        self.add_vectors(items.embed_images(self.model(), images, names), names, labels)

    def add_vectors(self, vectors: Any, ids: Sequence[str], labels: Sequence[Label] | None = None) -> None:
        """Append precomputed vectors [n, D] of the same model, with new ids and a label (or None) for each."""
        self._check_new_ids(ids)
        new = search.check_vectors(vectors, self.dim, "vectors")
        items.check_count("ids", len(ids), "vector", len(new))
        self._set_items(
            np.concatenate([self.vectors, new]),
            [*self.ids, *ids],
            [*self.labels, *items.as_labels(labels, len(new))],
            [*self.stamps, *[None] * len(new)],
        )

    def remove(self, ids: Iterable[str]) -> None:
        """Remove existing items by name; a single string is one name."""
        removed = {self.row_of(id) for id in ([ids] if isinstance(ids, str) else ids)}
        rows = [row for row in range(len(self)) if row not in removed]
        self._set_items(
            np.asarray(self.vectors[rows]),
            [self.ids[row] for row in rows],
            [self.labels[row] for row in rows],
            [self.stamps[row] for row in rows],
        )

    def _set_items(self, vectors: Vectors, ids: list[str], labels: list[Label], stamps: list[FileStamp | None]) -> None:
        """Replace all items, or raise and change nothing. Drops the graph; keeps threshold and re-ranking."""
        rows = items.row_by_id(ids, labels, len(vectors))
        self.vectors, self.ids, self.labels, self.stamps, self._rows = vectors, ids, labels, stamps, rows
        self.graph: HNSWGraph | None = None
        self._inv_norms: Vectors | None = None

    def _check_new_ids(self, ids: Sequence[str]) -> None:
        existing = next((id for id in ids if id in self._rows), None)
        if existing is not None:
            raise DataError(f"ids: {existing!r} is already in the index. Remove it first to replace it.")

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
        """Find the nearest other items of an item, nearest first; `exact` as for `search`."""
        row = self.row_of(id)
        return list(self.answer(self.vectors[row], k, exclude=row, exact=exact).hits)

    def answer(self, query: Any, k: int = 10, *, exclude: int | None = None, exact: bool = False) -> SearchResult:
        """Search as `search` does, without the row `exclude`, and tell whether the query's class is known."""
        vector = self.vector_of(query)
        nearest = partial(self._nearest, exclude=exclude, exact=exact)
        rows, cosines = nearest(vector, k)
        top = float(cosines[0]) if len(cosines) else -1.0
        if self.rerank is not None and not exact:
            rows, cosines = apply_rerank(vector, self.vectors, k, self.rerank, nearest)
        hits = tuple(
            Hit(self.ids[row], self.labels[row], cosine, row)
            for row, cosine in zip(rows.tolist(), cosines.tolist(), strict=True)
        )
        return SearchResult(hits, top, self.is_known(top))

    def is_known(self, similarity: float) -> bool | None:
        """Return whether a query whose nearest item has this cosine is known; None if the index is not calibrated."""
        return None if self.threshold is None else self.threshold.accepts(similarity)

    def search_many(self, queries: Any, k: int = 10) -> tuple[Ints, Floats]:
        """Find the nearest items of vectors [Q, D], always exactly. Returns rows and cosines, both [Q, min(k, N)]."""
        if self._inv_norms is None:
            self._inv_norms = search.inverse_norms(self.vectors)
        return search.nearest(search.check_vectors(queries, self.dim, "queries"), self.vectors, k, self._inv_norms)

    def _nearest(self, query: Vectors, k: int, exclude: int | None, exact: bool) -> tuple[Ints, Floats]:
        search.check_k(k)
        fetch = k if exclude is None else k + 1
        if self.graph is not None and not exact:
            rows, cosines = self.graph.search(query, self.vectors, fetch)
        else:
            [rows], [cosines] = self.search_many(query[None], fetch)
        if exclude is not None:
            rows, cosines = search.exclude_row(exclude, rows, cosines)
        return rows[:k], cosines[:k]

    def vector_of(self, query: Any) -> Vectors:
        """Convert a query to a vector [D], embedding it if it is an image."""
        if isinstance(query, str | os.PathLike) or hasattr(query, "getbands"):  # a path or a PIL image
            query = self.model().embed([query])[0]
        else:
            query = search.as_array(query)
            if query.dtype == np.uint8 and query.ndim == 3:
                query = self.model().embed(query[None])[0]
            if query.ndim != 1:
                shape = list(query.shape)
                raise DataError(f"query: expected a path, a PIL image or one vector [D]; got shape {shape}.")
        # Copied, because torch warns about read-only memory such as memory-mapped rows.
        return np.array(search.check_vectors(query[None], self.dim, "query")[0])

    def duplicates(self, min_similarity: float = 0.99) -> tuple[list[tuple[str, str, float]], int]:
        """Find pairs (id, id, cosine), most similar first (at most 10,000), and the number of all pairs found."""
        pairs, count = search.near_pairs(self.vectors, min_similarity)
        return [(self.ids[i], self.ids[j], cosine) for i, j, cosine in pairs], count

    def build_graph(self, *, recall: float = 0.99) -> GraphStats:
        """Build an HNSW graph for approximate search with a target recall@10 (needs faiss), and measure its recall."""
        self.graph = HNSWGraph.build(self.vectors, recall=recall)
        return self.graph.stats

    def calibrate(self, false_accept: float = 0.01, *, trained: Iterable[Label] = ()) -> Threshold:
        """Set the threshold below which a query is unknown, with the labelled items as queries (see openset.py).

        Args:
            false_accept: Target false-accept rate.
            trained: Classes the model was trained on, and fits too well: they are searched but not used as queries.

        Returns:
            The threshold and its rates.
        """
        self.threshold = calibrate_items(self.vectors, self.labels, self._query_rows(trained), false_accept)
        return self.threshold

    def choose_rerank(self, *, trained: Iterable[Label] = ()) -> RerankChoice:
        """Select a re-ranking method if one significantly helps the labelled items of classes not in `trained`."""
        choice = choose_rerank(self.vectors, self.labels, queries=self._query_rows(trained).tolist())
        self.rerank = choice.option
        return choice

    def _query_rows(self, trained: Iterable[Label]) -> Ints:
        """Return the rows with a label of a class that was not trained on."""
        excluded = {*trained, None}
        return np.array([row for row, label in enumerate(self.labels) if label not in excluded], np.int64)

    def model(self) -> EmbeddingModel:
        """Return the model that made the vectors, loaded from its run folder if it was not given."""
        if self._model is None:
            if self.model_info is None or self.model_info.run is None:
                raise ConfigError("index: has no run folder to load its model from. Pass it: Index.load(dir, model).")
            from nearkin.models.saved import load

            self.set_model(load(self.model_info.run))
        assert self._model is not None
        return self._model

    def set_model(self, model: EmbeddingModel) -> None:
        """Set the model that embeds queries, which must be the one that made the vectors."""
        items.check_model(self.model_info, model.fingerprint(), "index")
        self._model = model

    def save(self, folder: str | Path) -> None:
        """Write the index atomically into a folder, created if needed: a failure leaves the previous state intact."""
        with storage.lock_index(Path(folder)):
            self.write(Path(folder))

    def write(self, folder: Path) -> None:
        """Write the index into a folder that the caller has locked with `storage.lock_index`."""
        with storage.write_errors(folder):
            files = {"vectors": storage.write_vectors(folder, self.vectors)}
            if self.graph is not None:
                files["hnsw"] = storage.write_file(folder, "hnsw", self.graph.to_bytes())
            state = {
                "files": files,
                "model": self.model_info and asdict(self.model_info),
                "root": self.root and str(self.root),
                "threshold": self.threshold and asdict(self.threshold),
                "rerank": self.rerank and [rerank_name(self.rerank), asdict(self.rerank)],
                "graph": self.graph and asdict(self.graph.stats),
                "store": self.store,
                "ids": self.ids,
                "labels": self.labels,
                "stamps": self.stamps,
            }
            storage.commit(folder, state)

    @classmethod
    def load(cls, folder: str | Path, model: EmbeddingModel | None = None) -> Self:
        """Open an index, its vectors memory-mapped; without `model`, its run folder gives the model when needed."""
        path = Path(folder)
        index = storage.read_consistent(path, lambda state: cls._read(path, state))
        if model is not None:
            index.set_model(model)
        return index

    @classmethod
    def _read(cls, folder: Path, state: storage.State) -> Self:
        index = cls.__new__(cls)  # without checking the vectors again
        vectors = storage.read_vectors(folder, state)
        graph = storage.find_file(folder, state, "hnsw").read_bytes() if state.get("graph") else None
        index._model = None
        try:
            stamps = [stamp and FileStamp(*stamp) for stamp in state["stamps"]]
            index._set_items(vectors, state["ids"], items.as_labels(state["labels"], len(vectors)), stamps)
            items.check_count("stamps", len(stamps), "item", len(vectors))
            index.model_info = state["model"] and from_dict(ModelInfo, state["model"], "model.")
            index.root = state["root"] and Path(state["root"])
            index.threshold = state["threshold"] and from_dict(Threshold, state["threshold"], "threshold.")
            index.rerank = state["rerank"] and from_dict(RERANKERS[state["rerank"][0]], state["rerank"][1], "rerank.")
            index.store = state["store"]
            if graph is not None:
                index.graph = HNSWGraph(graph, from_dict(GraphStats, state["graph"], "graph."))
        except (UserError, LookupError, TypeError, ValueError, AttributeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{folder}: not a valid index ({reason}). Index again into another folder.") from None
        return index
