"""What `nearkin index` and `nearkin search` take."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

FALSE_ACCEPT, AT_LEAST = 0.01, 0.99
HNSW_FROM = 200_000  # items from which a graph is worth its memory; fewer are searched exactly in a blink


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
