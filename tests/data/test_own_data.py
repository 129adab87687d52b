"""Data of the user as a table: every form, its labels and parts, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from nearkin._common.progress import Reporter
from nearkin.config import DataConfig
from nearkin.data import as_table, load, make_split
from nearkin.data.reading import read_image, square
from nearkin.errors import DataError

CONFIG = DataConfig(source="own", image_size=16)


def pixels(index: int, height: int = 20, width: int = 24) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 256, (height, width, 3), np.uint8)


class Photos(Dataset):
    """Eight classes of three images; `broken` items raise."""

    def __init__(self, form="pil", broken=(), names=None) -> None:
        self.form, self.broken, self.reads = form, set(broken), 0
        if names:
            self.classes = names

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int):
        self.reads += 1
        if index in self.broken:
            raise OSError("the disk is gone")
        array = pixels(index)
        forms = {
            "pil": lambda: Image.fromarray(array),
            "hwc": lambda: array,
            "chw": lambda: torch.from_numpy(array).permute(2, 0, 1),
            "float": lambda: torch.from_numpy(array).permute(2, 0, 1) / 255,
        }
        return forms[self.form](), index // 3


@pytest.mark.parametrize("form", ["pil", "hwc", "chw"])
def test_images_are_resized_as_files_are(form, tmp_path):
    table = as_table(Photos(form), CONFIG)
    Image.fromarray(pixels(5)).save(tmp_path / "5.png")
    expected = square(read_image(tmp_path / "5.png", 16), 16)
    assert torch.equal(table.images.read(np.array([5]))[0], expected)
    assert table.images.shape == (3, 16, 16)
    assert table.labels.tolist() == [i // 3 for i in range(24)]
    assert table.class_names == tuple("01234567")
    assert table.source == "own"


def test_the_fingerprint_is_of_the_content():
    tables = [as_table(Photos(form), CONFIG) for form in ("pil", "hwc", "chw")]
    assert len({table.fingerprint for table in tables}) == 1
    assert as_table(Photos(), replace(CONFIG, image_size=32)).fingerprint == tables[0].fingerprint  # not of its size
    fewer = as_table(Subset(Photos(), range(21)), CONFIG)
    renamed = as_table(Photos(names=[f"bird {c}" for c in range(8)]), CONFIG)
    assert len({tables[0].fingerprint, fewer.fingerprint, renamed.fingerprint}) == 3
    items = [Photos()[i] for i in range(24)]
    items[3] = (Image.fromarray(pixels(99)), items[3][1])
    assert as_table(items, CONFIG).fingerprint != tables[0].fingerprint


def test_a_dataset_is_read_once():
    data = Photos()
    table = as_table(data, CONFIG)
    reads = data.reads
    table.images.read(np.arange(24))
    split, _ = make_split(table, CONFIG)
    split.train.images.read(np.arange(len(split.train)))
    assert reads == data.reads == 25  # the first item twice, to see what it is


def test_the_original_image_is_the_one_of_the_dataset():
    table = as_table(Photos(broken=[0]), replace(CONFIG, skip_broken=True))
    assert np.array_equal(np.asarray(table.images.original(4)), pixels(5))
    assert np.array_equal(np.asarray(table.take(np.array([7, 4])).images.original(1)), pixels(5))
    assert np.array_equal(np.asarray(as_table(Photos("chw"), CONFIG).images.original(4)), pixels(4))


def test_class_names_of_a_torchvision_dataset_and_of_its_subset():
    names = [f"bird {c}" for c in range(8)]
    assert as_table(Photos(names=names), CONFIG).class_names == tuple(names)
    subset = as_table(Subset(Photos(names=names), [6, 7, 0, 1]), CONFIG)
    assert [subset.class_names[label] for label in subset.labels] == ["bird 2", "bird 2", "bird 0", "bird 0"]


@pytest.mark.parametrize("labels", [["a", "b"], [2, 10], torch.tensor([2, 10]), np.array([2.0, 10.0])])
def test_labels_of_any_type(labels):
    items = [(Image.fromarray(pixels(i)), labels[i % 2]) for i in range(4)]
    table = as_table(items, CONFIG)
    names = ["a", "b"] if isinstance(labels, list) and labels[0] == "a" else ["2", "10"]
    assert list(table.class_names) == names
    assert table.labels.tolist() == [0, 1, 0, 1]


def test_splits_are_by_class_and_the_test_is_sealed():
    table = as_table(Photos(), CONFIG)
    split, holdout = make_split(table, CONFIG)
    test = holdout.open()
    assert not set(split.train.class_names) & set(split.val.class_names)
    assert not set(test.class_names) & {*split.train.class_names, *split.val.class_names}
    assert len(split.train) + len(split.val) + holdout.num_images == 24


def test_grey_images():
    items = [(pixels(i)[..., 0], i % 2) for i in range(4)]
    assert as_table(items, CONFIG).images.shape == (3, 16, 16)
    grey = as_table(items, CONFIG, channels=1)
    assert grey.images.shape == (1, 16, 16)
    assert as_table([(array[None], label) for array, label in items], CONFIG).fingerprint == grey.fingerprint


def test_dicts_and_chosen_columns():
    items = [{"image": pixels(i), "label": i % 2} for i in range(4)]
    renamed = [{"img": item["image"], "fine": item["label"]} for item in items]
    chosen = replace(CONFIG, path_column="img", label_column="fine")
    assert as_table(renamed, chosen).fingerprint == as_table(items, CONFIG).fingerprint
    with pytest.raises(DataError, match=r"no column named 'path'. Columns: img, fine"):
        as_table(renamed, CONFIG)


@pytest.fixture
def files(tmp_path):
    for i in range(6):
        Image.fromarray(pixels(i)).save(tmp_path / f"{i}.png")
    return [(tmp_path / f"{i}.png", f"class {i // 2}") for i in range(6)]


def test_a_list_of_files_is_read_as_a_csv_file_is(files, tmp_path):
    table = as_table(files, CONFIG)
    rows = [f"{path.name},{label}" for path, label in files]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *rows]))
    expected = load(DataConfig(source="table", root=tmp_path / "list.csv", image_size=16))
    assert table.fingerprint == expected.fingerprint
    assert torch.equal(table.images.read(np.arange(6)), expected.images.read(np.arange(6)))
    assert [path.name for path in table.paths] == [f"{i}.png" for i in range(6)]
    assert np.array_equal(np.asarray(table.images.original(5)), pixels(5))


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames(library, files):
    frames = pytest.importorskip(library)
    parts = ["train"] * 2 + ["test"] * 4
    columns = {"file_name": [str(path) for path, _ in files], "class": [label for _, label in files], "split": parts}
    table = as_table(frames.DataFrame(columns), CONFIG)
    assert table.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert table.part.tolist() == parts
    missing = {**columns, "class": [*columns["class"][:5], None]}
    with pytest.raises(DataError, match="data: row 5 has no label"):
        as_table(frames.DataFrame(missing), CONFIG)
    with pytest.raises(DataError, match=r"no column named 'label'. Columns: file_name, split"):
        as_table(frames.DataFrame({name: columns[name] for name in ("file_name", "split")}), CONFIG)


def test_a_frame_of_images():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"image": [Image.fromarray(pixels(i)) for i in range(24)], "label": np.arange(24) // 3})
    assert as_table(frame, CONFIG).fingerprint == as_table(Photos(), CONFIG).fingerprint
    arrays = pandas.DataFrame({"image": [pixels(i) for i in range(24)], "label": np.arange(24) // 3})
    assert as_table(arrays, CONFIG).fingerprint == as_table(Photos(), CONFIG).fingerprint


def test_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets")
    names = ["robin", "wren"]
    features = datasets.Features(
        {"id": datasets.Value("int64"), "picture": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    )
    rows = {"id": list(range(4)), "picture": [Image.fromarray(pixels(i)) for i in range(4)], "label": [0, 1, 0, 1]}
    data = datasets.Dataset.from_dict(rows, features=features)
    table = as_table(data, CONFIG)
    assert table.class_names == ("robin", "wren")
    assert table.labels.tolist() == [0, 1, 0, 1]
    plain = as_table([(pixels(i), names[i % 2]) for i in range(4)], CONFIG)
    assert table.fingerprint == plain.fingerprint
    with pytest.raises(DataError, match=r"got a dict of train, test. Pass one of its datasets"):
        as_table(datasets.DatasetDict({"train": data, "test": data}), CONFIG)
    with pytest.raises(DataError, match="IterableDataset has no length"):
        as_table(data.to_iterable_dataset(), CONFIG)


def test_arrays():
    images = np.stack([pixels(i) for i in range(24)])
    labels = np.arange(24) // 3
    expected = as_table(Photos(), CONFIG)
    assert as_table((images, labels), CONFIG).fingerprint == expected.fingerprint
    assert as_table((torch.from_numpy(images), labels.tolist()), CONFIG).fingerprint == expected.fingerprint
    features = np.random.default_rng(0).normal(size=(24, 5))
    table = as_table((features, labels))
    assert np.array_equal(table.features, features.astype(np.float32))
    assert (
        as_table(TensorDataset(torch.from_numpy(features), torch.from_numpy(labels))).fingerprint == table.fingerprint
    )
    ids = np.arange(96).reshape(24, 4)
    tokens = as_table((ids, labels))
    assert tokens.features is None
    assert not tokens.images.is_pixels
    assert tokens.images.read(np.array([1])).tolist() == [[4, 5, 6, 7]]
    with pytest.raises(DataError, match="data: 3 labels for 24 items"):
        as_table((features, [1, 2, 3]))


def test_columns_of_files_or_features_and_labels(files):
    paths, labels = [path for path, _ in files], [label for _, label in files]
    assert as_table((paths, labels), CONFIG).fingerprint == as_table(files, CONFIG).fingerprint
    features = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    expected = as_table((features, labels))
    assert as_table((features.tolist(), labels)).fingerprint == expected.fingerprint
    assert as_table((files[0], files[2], files[1]), CONFIG, min_classes=1).labels.tolist() == [0, 1, 0]
    pandas = pytest.importorskip("pandas")
    rows = [5, 3, 1, 0, 2, 4]
    frame = pandas.DataFrame(features, index=rows)
    assert as_table((frame, pandas.Series(labels, index=rows))).fingerprint == expected.fingerprint


def test_read_only_and_reversed_arrays():
    reversed_items = [(np.asarray(Image.fromarray(pixels(i)))[::-1], i % 2) for i in range(4)]
    expected = as_table([(pixels(i)[::-1].copy(), i % 2) for i in range(4)], CONFIG)
    assert as_table(reversed_items, CONFIG).fingerprint == expected.fingerprint


def test_a_table_is_returned_as_it_is():
    table = as_table(Photos(), CONFIG)
    assert as_table(table, DataConfig()) is table


def test_parts_that_share_their_classes_are_merged(files):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(files, columns=["path", "label"])
    frame["part"] = ["train", "test"] * 3
    table = as_table(frame, CONFIG)
    assert table.part is None
    assert "these parts were merged" in table.notes[0]


def test_a_subset_of_the_classes():
    table = as_table(Photos(), replace(CONFIG, max_classes=3, max_per_class=2))
    assert (table.num_classes, len(table)) == (3, 6)


class Stream(IterableDataset):
    def __iter__(self):
        yield from Photos()

    def __len__(self) -> int:
        return 24


class NoLength(Dataset):
    def __getitem__(self, index):
        return Photos()[index]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (list, "data: empty. Pass a dataset with at least two classes"),
        (lambda: Subset(Photos(), [0, 1]), r"data: found 1 class \('0'\), need at least 2"),
        (lambda: Subset(Photos(), [0, 3, 6]), "data: every class has a single item, so no query has a correct answer"),
        (lambda: [(pixels(0), 1), (pixels(1), None)], r"data: item 1 has no label \(None\). Give it one"),
        (lambda: [(pixels(0), 1), (pixels(1), float("nan"))], r"data: item 1 has no label \(nan\)"),
        (lambda: [(pixels(0), "a"), (pixels(1), "")], r"data: item 1 has no label \(''\)"),
        (lambda: Photos(names=["a", "b"]), r"data: item 6 has no label \(2\)"),
        (lambda: [(pixels(0), [1, 2])], r"data: item 0 has the label \[1, 2\], expected an integer or a string"),
        (lambda: [(pixels(0), 0.5)], "data: item 0 has the label 0.5, expected"),
        (lambda: [pixels(0), pixels(1)], r"data: item 0 is a ndarray, expected \(image, label\)"),
        (lambda: Stream(), "data: Stream has no length and no access by index.*Pass a map-style dataset"),
        (lambda: iter(Photos()), "has no length and no access by index"),
        (lambda: NoLength(), "data: NoLength has no length"),
        (lambda: DataLoader(Photos()), "data: DataLoader has no length.*Pass its .dataset"),
        (lambda: "photos", "data: got the path photos. Set it in the recipe"),
        (lambda: [("gone.png", "a"), ("lost.png", "b")], "data: 2 of 2 listed files do not exist, first gone.png"),
        (lambda: (np.full((4, 3), np.nan), [0, 0, 1, 1]), "data: item 0 contains NaN or infinity"),
        (lambda: [(np.zeros(3), 0), (np.zeros(4), 0)], r"data: item 1 differs from the first one: float32 \[3\] and"),
        (lambda: [(np.zeros(3), 0), (pixels(0), 0)], "data: item 1 differs from the first one"),
    ],
)
def test_what_is_refused(data, message):
    with pytest.raises(DataError, match=f"(?s){message}"):
        as_table(data(), CONFIG)


def test_broken_items_are_named_by_their_index():
    message = "2 items of 24 cannot be read:\n  item 4: cannot be read .OSError: the disk is gone.\n  item 9"
    with pytest.raises(DataError, match=message):
        as_table(Photos(broken=[4, 9]), CONFIG)
    table = as_table(Photos(broken=[4, 9]), replace(CONFIG, skip_broken=True))
    assert len(table) == 22
    assert table.notes == ("2 items could not be read and were skipped",)
    with pytest.raises(DataError, match=r"item 0: cannot be read .uint8 of shape \[5, 6, 7\], expected an image"):
        as_table([(np.zeros((5, 6, 7), np.uint8), 0), (pixels(0), 1)], CONFIG)


def test_a_dataset_of_paths_that_fails():
    class Paths(Photos):
        def __getitem__(self, index):
            return "a.png", super().__getitem__(index)[1]

    with pytest.raises(DataError, match=r"data: item 4 cannot be read .OSError: the disk is gone"):
        as_table(Paths(broken=[4]), CONFIG)


def test_the_limit_of_the_memory():
    small = replace(CONFIG, max_cache_gb=16 * 16 * 3 * 10 / 1e9)
    with pytest.raises(DataError, match=r"more than .* GB in memory after 9 items"):  # of 16 x 19 pixels
        as_table(Photos(), small)


def test_what_is_read_is_reported(capsys):
    as_table(Photos(), CONFIG, reporter=Reporter())
    assert "data: own, 24 items of 8 classes, 0.0 MB in memory" in capsys.readouterr().err


def test_one_class_is_enough_for_an_index():
    assert len(as_table(Subset(Photos(), [0]), CONFIG, min_classes=1)) == 1


def test_the_source_own_cannot_be_loaded():
    with pytest.raises(DataError, match=r"data.source: own means data that were passed in Python.*\n.*data=\.\.\."):
        load(CONFIG)
