"""Data of the user as a `Table`: torch datasets, lists of files, data frames, arrays and Hugging Face datasets.

Files are read through the cache, as those of a folder. Everything else is read once: images are stored in memory as
uint8, shrunk as files are, within `max_cache_gb`; other tensors unchanged.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from nearkin._common.progress import Reporter
from nearkin._common.words import agreeing, counted
from nearkin.config.recipe import DataConfig
from nearkin.data.images import ArrayImages, Images, MemoryImages, NoImages, as_tensor
from nearkin.data.listing import encode_labels, find_columns, is_missing, list_columns, parse_parts, text_columns
from nearkin.data.reading import read_image, read_pixels, reason_of, to_pillow
from nearkin.data.sources import OWN, fingerprint, open_listing, refuse_missing, restrict_listing, restrict_table
from nearkin.data.splits import check_parts
from nearkin.data.table import Table
from nearkin.data.transforms import AUGMENTS
from nearkin.errors import DataError


def as_table(
    data: Any,
    config: DataConfig | None = None,
    *,
    channels: int = 3,
    min_classes: int = 2,
    reporter: Reporter | None = None,
) -> Table:
    """Read data of the user.

    Args:
        data: A map-style torch dataset or a list of (image, label), where an image is a PIL image, uint8 [C, H, W] or
            [H, W, C], a path, or a tensor of another type for a module of your own; a tuple (arrays [N, ...], labels)
            or (list, labels); a pandas or polars frame with the columns of our CSV files; a Hugging Face dataset; or a
            `Table`.
        config: Image size, names of columns, limits, as in the data section of a recipe.
        channels: 3 for colour images, 1 for grey ones.
        min_classes: Classes that are needed; with 1, classes may also have a single item.
        reporter: Reports what is read; by default nothing does.

    Returns:
        All items, not yet split. Their fingerprint is of their content.

    Raises:
        DataError: If the data are empty, unlabelled, of one class, or cannot be read.
    """
    if isinstance(data, Table):
        return data
    config, reporter = config or DataConfig(source=OWN), reporter or Reporter(quiet=True)
    items = _items_of(data, config)
    if not items.count:
        raise DataError("data: empty. Pass a dataset with at least two classes of two items.")
    if items.columns is None and not _lists_files(items):
        table = _read_items(items, config, channels, reporter)
        _check_classes(table.labels, table.class_names, min_classes)
        check_parts(table := restrict_table(table, config, reporter), config)
        return table
    columns = items.columns or _path_columns(items)
    paths = [Path(path) for path in columns["path"]]
    listing = list_columns(columns, paths, OWN, Path.cwd(), "data", fewest=1).without_missing()
    refuse_missing(listing, config, "data", "the working directory")
    _check_classes(listing.labels, listing.class_names, min_classes)
    return open_listing(restrict_listing(listing, config), config, reporter, channels=channels)


def _check_classes(labels: NDArray[np.int64], names: Sequence[str], min_classes: int) -> None:
    if len(names) < min_classes:
        raise DataError(f"data: found {counted(len(names), 'class')} ('{names[0]}'), need at least {min_classes}.")
    if min_classes > 1 and np.bincount(labels).max() == 1:
        raise DataError(
            "data: every class has a single item, so no query has a correct answer.\n"
            "Provide classes with at least two items; a few singleton classes are allowed."
        )


@dataclass(frozen=True)
class _Items:
    count: int
    get: Callable[[int], tuple[Any, Any]]  # value and label of an item; may raise any exception
    class_names: Sequence[str] | None = None  # names of integer labels
    part: Sequence[Any] | None = None
    columns: dict[str, list[str]] | None = None  # of a frame that lists files


def _items_of(data: Any, config: DataConfig) -> _Items:
    chosen = {"path": config.path_column, "label": config.label_column}
    if isinstance(data, str | os.PathLike):
        raise DataError(f"data: got the path {data}. Set it in the recipe: data.source and data.root.")
    if isinstance(data, dict):
        raise DataError(f"data: got a dict of {', '.join(map(str, data))}. Pass one of its datasets.")
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        fix = "its .dataset" if hasattr(data, "dataset") else "a map-style dataset, or list(data) if it fits in memory"
        raise DataError(
            f"data: {type(data).__name__} has no length and no access by index, which splits by class and balanced "
            f"batches need. Pass {fix}."
        )
    if is_pair_of_columns(data):
        values, labels = data[0], data[1].tolist() if hasattr(data[1], "tolist") else list(data[1])
        is_list_of_items = isinstance(values, list) and not any(isinstance(value, list) for value in values[:1])
        values = values if is_list_of_items or isinstance(values, Tensor) else np.asarray(values)
        if len(values) != len(labels):
            raise DataError(f"data: {len(labels):,} labels for {len(values):,} items. Pass one for each.")
        return _Items(len(values), lambda i: (values[i], labels[i]))
    is_dataset = isinstance(data, Dataset)
    if hasattr(data, "column_names") and not is_dataset:  # of Hugging Face
        images = [name for name in data.column_names if type(data.features[name]).__name__ == "Image"]
        names = find_columns(data.column_names, {**chosen, "path": chosen["path"] or next(iter(images), None)}, "data")
        labels, part = list(data[names["label"]]), data[names["part"]] if "part" in names else None
        class_names = getattr(data.features[names["label"]], "names", None)
        return _Items(len(data), lambda i: (data[i][names["path"]], labels[i]), class_names, part)
    if hasattr(data, "columns") and not is_dataset:  # of pandas or polars
        table = {str(name): data[name].to_list() for name in data.columns}
        names = find_columns(table, chosen, "data")
        values, labels, part = table[names["path"]], table[names["label"]], table.get(names.get("part", ""))
        lists_files = all(isinstance(value, str | os.PathLike) or is_missing(value) for value in values)
        rows = [str(row) for row in range(len(data))]
        columns = text_columns(table, chosen, "data", rows) if lists_files else None
        return _Items(len(data), lambda i: (values[i], labels[i]), part=part, columns=columns)

    def get(index: int) -> tuple[Any, Any]:
        item = data[index]
        if isinstance(item, dict):
            names = find_columns(item, chosen, f"data: item {index}")
            return item[names["path"]], item[names["label"]]
        if not isinstance(item, tuple | list) or len(item) < 2:
            raise DataError(f"data: item {index} is a {type(item).__name__}, expected (image, label).")
        return item[0], item[1]

    classes = getattr(getattr(data, "dataset", data), "classes", None)  # torchvision's, also in a Subset
    return _Items(len(data), get, classes if classes and len(set(classes)) == len(classes) else None)


def is_pair_of_columns(data: Any) -> bool:
    """Return whether data are a tuple of items and labels, and not two pairs of an item and its label."""
    return isinstance(data, tuple) and len(data) == 2 and (isinstance(data[0], list) or hasattr(data[0], "ndim"))


def _lists_files(items: _Items) -> bool:
    try:
        return isinstance(items.get(0)[0], str | os.PathLike)
    except DataError:
        raise
    except Exception:  # reported with its index later
        return False


def _path_columns(items: _Items) -> dict[str, list[str]]:
    columns: dict[str, list[str]] = {"path": [], "label": []}
    for index in range(items.count):
        try:
            path, label = items.get(index)
        except Exception as error:  # the dataset may raise any exception
            reason = f"{type(error).__name__}: {reason_of(error)}"
            raise DataError(f"data: item {index} cannot be read ({reason}).") from None
        columns["path"].append(str(path))
        columns["label"].append(_label_name(label, items.class_names, index))
    return columns | ({} if items.part is None else {"part": [str(part) for part in items.part]})


def _label_name(label: Any, class_names: Sequence[str] | None, index: int) -> str:
    count = label.numel() if isinstance(label, Tensor) else np.size(label)
    value = label.item() if hasattr(label, "item") and count == 1 else label
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int) and not is_missing(value):
        raise DataError(f"data: item {index} has the label {repr(value)[:60]}, expected an integer or a string.")
    unnamed = class_names is not None and isinstance(value, int) and not 0 <= value < len(class_names)
    if is_missing(value) or value == "" or unnamed:
        raise DataError(f"data: item {index} has no label ({value!r}). Give it one, or leave the item out.")
    return class_names[value] if class_names is not None and isinstance(value, int) else str(value)


def _read_items(items: _Items, config: DataConfig, channels: int, reporter: Reporter) -> Table:
    """Read all items once: images as uint8 that are shrunk as files are, other tensors as they are."""
    side = AUGMENTS[config.augment].stored_side(config.image_size)
    stored: list[Tensor] = []
    kept, names, digests, broken, size = list[int](), list[str](), list[bytes](), list[str](), 0
    with reporter.track("reading the data", items.count, unit="item") as bar:
        for index in range(items.count):
            bar.advance()
            try:
                value, label = items.get(index)
                content = _content(value)
            except Exception as error:  # the dataset may raise any exception
                error_type = "" if isinstance(error, DataError) else f"{type(error).__name__}: "
                broken.append(f"item {index}: cannot be read ({error_type}{reason_of(error)})")
                continue
            names.append(_label_name(label, items.class_names, index))
            kept.append(index)
            digests.append(hashlib.sha256(repr((content.dtype, content.shape)).encode() + _bytes(content)).digest())
            is_image = content.dtype == torch.uint8
            stored.append(read_image(content, side, channels=channels).contiguous() if is_image else content)
            if is_image != (stored[0].dtype == torch.uint8) or (not is_image and content.shape != stored[0].shape):
                shapes = " and ".join(f"{str(t.dtype)[6:]} {list(t.shape)}" for t in (stored[0], content))
                raise DataError(f"data: item {index} differs from the first one: {shapes}. Make them equal.")
            if not is_image and not content.isfinite().all():
                raise DataError(f"data: item {index} contains NaN or infinity. Fix it, or leave it out.")
            size += stored[-1].nbytes
            if size > 1e9 * config.max_cache_gb:
                raise DataError(
                    f"data: more than {config.max_cache_gb:g} GB in memory after {counted(index + 1, 'item')}.\n"
                    "Pass files as (path, label), lower --data.image-size, or raise --data.max-cache-gb."
                )
    if broken and (not config.skip_broken or not stored):
        reasons = "\n".join(f"  {reason}" for reason in broken[:3])
        raise DataError(
            f"data: {agreeing(len(broken), 'items')} of {items.count:,} cannot be read:\n{reasons}\n"
            "Fix or remove them, or skip them with --data.skip-broken."
        )
    labels, class_names = encode_labels(names)
    part = None if items.part is None else parse_parts([str(items.part[i]) for i in kept], "data")
    counts = f"{counted(len(kept), 'item')} of {counted(len(class_names), 'class')}"
    reporter.info(f"data: own, {counts}, {size / 1e6:,.1f} MB in memory")

    def original(row: int) -> Any:
        value = items.get(kept[row])[0]
        return value if hasattr(value, "getbands") else to_pillow(_content(value))

    images: Images = NoImages("data", len(kept))
    features = None
    if stored[0].dtype == torch.uint8:
        images = MemoryImages(stored, side, original)
    elif stored[0].ndim == 1 and stored[0].is_floating_point():
        features = torch.stack(stored).numpy()
    else:
        images = ArrayImages(torch.stack(stored).numpy())
    return Table(
        source=OWN,
        labels=labels,
        class_names=class_names,
        images=images,
        fingerprint=fingerprint(digests, labels, class_names, part),
        part=part,
        features=features,
        notes=(agreeing(len(broken), "items could not be read and were skipped"),) if broken else (),
    )


def _content(value: Any) -> Tensor:
    """Return the pixels uint8 [1 or 3, h, w] of an image, or another tensor as float32 or int64."""
    if not hasattr(value, "ndim") or hasattr(value, "getbands"):
        return read_pixels(value)
    tensor = as_tensor(value).cpu()
    if tensor.dtype != torch.uint8:
        return tensor.float() if tensor.is_floating_point() else tensor.long()
    if tensor.ndim == 2:
        return tensor[None]
    if tensor.ndim != 3 or not {1, 3} & {tensor.shape[0], tensor.shape[2]}:
        raise DataError(f"uint8 of shape {list(tensor.shape)}, expected an image [C, H, W] or [H, W, C]")
    # Both are possible for an image of 1 or 3 pixels: NumPy's order is [H, W, C], torch's [C, H, W].
    last = tensor.shape[2] in (1, 3) and (tensor.shape[0] not in (1, 3) or isinstance(value, np.ndarray))
    return tensor.permute(2, 0, 1) if last else tensor


def _bytes(content: Tensor) -> bytes:
    return content.contiguous().numpy().tobytes()
