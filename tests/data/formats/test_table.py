"""Test tables of image files: labels, label sets, targets, splits, and errors that name cells."""

import csv
import shutil

import numpy as np
import pytest
from image_sets import on_ranks, pixels_of, refusal, save

import mpidl as dl
from mpidl.data import (
    ImageFolder,
    ImageTable,
    PackedDatastore,
    open_data,
    open_test_data,
    open_validation_data,
)
from mpidl.data.formats import packing
from mpidl.data.formats.image_list import LabelSets

COUNT = 12


@pytest.fixture
def write(tmp_path):
    """A function that writes images and a CSV table, and returns the path of the table."""
    for i in range(COUNT):
        save(tmp_path / "photos" / f"{i:02}.png", pixels_of(i, 3, 6, 5))

    def write_table(columns, name="table.csv", encoding="utf-8", **options):
        with open(tmp_path / name, "w", newline="", encoding=encoding) as file:
            writer = csv.writer(file, **options)
            writer.writerow(["path", *columns])
            for i in range(COUNT):
                writer.writerow([f"photos/{i:02}.png", *(cells[i] for cells in columns.values())])
        return tmp_path / name

    return write_table


def column(*values):
    """Return COUNT cells that repeat the values."""
    return [values[i % len(values)] for i in range(COUNT)]


def test_labels(write, tmp_path):
    """Images are read as from a folder. Classes are sorted by bytes. Other columns are ignored."""
    names = column("rose", 'da"i,sy', "tulip\nred")
    path = write({"label": names, "note": column("a", "", "3")})
    store = ImageTable(path)
    assert store.classes == ['da"i,sy', "rose", "tulip\nred"]
    assert [store.classes[label] for label in store.labels] == names
    folder = ImageFolder(tmp_path / "photos", labelled=False)
    assert np.array_equal(store.read([5, 0, 0, 11]), folder.read([5, 0, 0, 11]))
    assert store.name(3) == str(tmp_path / "photos" / "03.png") == store.located(3)
    assert store.describe() == f"{path}: 12 images of 3x6x5 in 3 classes"


@pytest.mark.parametrize(
    "options",
    [{"encoding": "utf-8-sig"}, {"lineterminator": "\n"}, {"quoting": csv.QUOTE_ALL}],
    ids=str,
)
def test_tables_of_other_programs(write, options):
    names = column("häuser", "日本")
    store = ImageTable(write({"label": names}, **options))
    assert [store.classes[label] for label in store.labels] == names


def test_whole_numbers_are_sorted_by_value(write):
    store = ImageTable(write({"label": column("10", "9", "2")}))
    assert store.classes == ["2", "9", "10"] and store.labels[:3].tolist() == [2, 1, 0]


def test_zeros_and_ones_in_several_columns_are_classes(write):
    values = np.random.default_rng(0).integers(0, 2, (COUNT, 3))
    columns = dict(zip(["sea", "sand", "sun"], values.T.tolist(), strict=True))
    store = ImageTable(write(columns))
    assert store.classes == ["sea", "sand", "sun"] and store.labels is None
    assert store.targets_shape == (3,) and store.targets_dtype == np.float32
    targets = store.targets([4, 0, 11])
    assert targets.dtype == np.float32 and np.array_equal(targets, values[[4, 0, 11]])
    assert store.describe().endswith("12 images of 3x6x5 with targets of 3")


@pytest.mark.parametrize("mark", [";", "|", " "])
def test_several_labels_in_a_column(write, mark):
    """The targets are 1 for the classes that a cell names, and otherwise 0. Cells may be empty."""
    names = column(["sun", "sea"], [], ["sand"], ["sea", "sand", "sun"])
    path = write({"labels": [mark.join(cell) for cell in names]})
    store = ImageTable(path, separator=mark if mark == " " else None)
    assert store.classes == ["sand", "sea", "sun"]
    expected = [[float(name in cell) for name in store.classes] for cell in names]
    assert np.array_equal(store.targets(np.arange(COUNT)), expected)
    other = ImageTable(path, classes=["sun", "sea", "sand", "sky"], separator=mark)
    assert other.targets([0]).tolist() == [[1, 1, 0, 0]]


def test_numbers(write):
    numbers = np.random.default_rng(0).normal(size=(COUNT, 2)).astype(np.float32)
    store = ImageTable(write({"x": numbers[:, 0], "y": numbers[:, 1]}))
    assert np.array_equal(store.targets(np.arange(COUNT)), numbers) and store.classes == []
    single = ImageTable(write({"angle": numbers[:, 0]}))
    assert single.targets_shape == () and np.array_equal(single.targets([3, 1]), numbers[[3, 1], 0])
    binary = ImageTable(write({"alive": column(0, 1)}))
    assert binary.targets_shape == () and binary.classes == []
    fingerprints = {s.fingerprint() for s in (store, single, binary)}
    assert len(fingerprints) == 3
    assert ImageTable(write({"angle": numbers[:, 1]})).fingerprint() not in fingerprints


def test_splits(write):
    parts = column("train", "Train", "validation", "test")
    path = str(write({"split": parts, "label": column("a", "b", "c")}))
    train, test = open_data(path)
    validation = open_validation_data(path, classes=train.classes)
    rows = {"train": [0, 1, 4, 5, 8, 9], "validation": [2, 6, 10], "test": [3, 7, 11]}
    for part, store in (("train", train), ("validation", validation), ("test", test)):
        assert [int(store.name(i)[-6:-4]) for i in range(len(store))] == rows[part]
        assert store.classes == ["a", "b", "c"]
    assert test.describe().startswith(f"{path}, test: 3 images")
    words = {"--validation-data": validation, "--test-data": test, "--data": test}
    for option, expected in words.items():
        store = open_test_data(path, classes=train.classes, option=option)
        assert store.fingerprint() == expected.fingerprint()
    assert len(ImageTable(path, part=None)) == COUNT


def test_a_table_without_splits(write):
    path = str(write({"label": column("a", "b")}))
    train, test = open_data(path)
    assert len(train) == COUNT and test is None and open_validation_data(path) is None
    assert len(open_test_data(path, option="--validation-data")) == COUNT
    path = str(write({"label": column("a", "b"), "split": column("train")}))
    expected = f"{path}: expected rows with test in the column split, found train; a table without"
    for option in ("--data", "--test-data"):  # training rows are never test data
        assert refusal(open_test_data, path, option=option).startswith(expected)


def test_images_without_labels(write):
    path = write({})
    store = open_test_data(str(path), labelled=False)
    assert store.labels is None and store.targets_shape is None and store.unlabelled is None
    path = write({"label": column("a", "z")})
    store = ImageTable(path, classes=["a", "b"], labelled=False)
    assert store.labels is None and store.unlabelled.endswith("z is not one of the classes (a, b)")


def test_ranks_share_what_rank_0_reads(write):
    path = write({"label": column("a", "b")})
    stores = on_ranks(3, lambda world: ImageTable(path, world))
    assert len({store.fingerprint() for store in stores}) == 1
    texts = on_ranks(2, lambda world: ImageTable(path, world, "test"))
    assert all("expected a column split for test images" in str(error) for error in texts)


def test_preprocessing_packs_and_moved_tables(write, tmp_path):
    path = write({"labels": column("a;b", "b", "")})
    store, fit = ImageTable(path), dl.Preprocess(size=(4, 4), colour="gray")
    folder = ImageFolder(tmp_path / "photos", labelled=False, preprocess=fit)
    converted, _ = open_data(str(path), preprocess=fit)
    assert np.array_equal(converted.read([7, 2]), folder.read([7, 2]))
    assert dl.data.preprocessed(store, fit).fingerprint() == converted.fingerprint()
    packing.pack({"train": store}, tmp_path / "x.h5", images="encoded", shards=2)
    packed = PackedDatastore(tmp_path / "x.h5")
    assert packed.fingerprint() == store.fingerprint() and packed.classes == ["a", "b"]
    assert np.array_equal(packed.targets([2, 0]), store.targets([2, 0]))
    assert np.array_equal(packed.read([2, 0]), store.read([2, 0]))
    assert dl.data.preprocessed(packed, fit).fingerprint() == converted.fingerprint()
    (tmp_path / "moved").mkdir()
    shutil.copytree(tmp_path / "photos", tmp_path / "moved" / "photos")
    shutil.copy(path, tmp_path / "moved")
    assert ImageTable(tmp_path / "moved" / "table.csv").fingerprint() == store.fingerprint()


def test_absolute_paths(tmp_path):
    save(tmp_path / "far" / "a.png", pixels_of(0, 1, 4, 4))
    (tmp_path / "t.csv").write_text(f"label,path\nx,{tmp_path}/far/a.png\ny,far/../far/a.png\n")
    store = ImageTable(tmp_path / "t.csv")
    assert np.array_equal(*store.read([0, 1]))


GOOD = b"path,label\na.png,x\nb.png,y\n"
REFUSED = {
    "no column path": (
        b"file,label\na.png,x\n",
        ", line 1: expected a column path, found file",
    ),
    "a column twice": (b"path,a,a\nb.png,1,2\n", ", line 1: expected different column names, "),
    "a column without a name": (b"path,\na.png,x\n", "line 1: expected different column names"),
    "nothing": (b"", ": expected a header and rows, found none"),
    "a header alone": (b"path,label\n", ": expected a header and rows, found none"),
    "a short row": (GOOD + b"c.png\n", ", line 4: expected 2 cells, found 1"),
    "a long row": (GOOD + b"\nc.png,x,y\n", ", line 5: expected 2 cells, found 3"),
    "an open quote": (GOOD + b'"c.png,x\n', ", line 4: not a row of a CSV file: unexpected end"),
    "another encoding": (GOOD + b"c\xe9.png,x\n", ", line 4: expected UTF-8, found the byte 0xe9"),
    "a missing file": (
        b"path,label\nd/q.png,x\n",
        "line 2, column path: {}/d/q.png: no such file",
    ),
    "below a file": (b"path,label\na.png/b,x\n", "line 2, column path: {}/a.png/b: no such file"),
    "a folder": (
        b"path,label\n.,x\n",
        "column path: {}/.: expected a file, found a folder",
    ),
    "a URL": (b"path,label\ns3://b/a,x\n", "column path: expected a path relative to the table"),
    "no path": (b"path,label\n,x\n", "column path: expected the path of an image, found nothing"),
    "a zero byte": (b"path,label\na\0,x\n", "line 2"),
    "no label": (
        b"path,label\na.png,\n",
        ", line 2, column label: expected a class name",
    ),
    "no number": (
        b"path,age,size\na.png,1,2\nb.png,2,tall\n",
        ", line 3, column size: expected a number, found tall (without a column label or labels, ",
    ),
    "an empty number": (
        b"path,age\na.png,\n",
        "line 2, column age: expected a number, found not",
    ),
    "not finite": (
        b"path,age\na.png,1e39\n",
        "line 2, column age: expected a number, found 1e39",
    ),
    "NaN": (b"path,age\na.png,nan\n", ", line 2, column age: expected a number, found nan"),
    "two separators": (
        b"path,labels\na.png,x;y\nb.png,x|y\n",
        ", line 3, column labels: expected one separator, found ; and |",
    ),
    "an empty label": (
        b"path,labels\na.png,x;;y\n",
        ", line 2, column labels: expected a class name, found nothing",
    ),
    "no labels": (b"path,labels\na.png,\n", ", line 1, column labels: expected class names, found"),
    "a part": (
        b"path,label,split\na.png,x,tests\n",
        "line 2, column split: expected train, validation or test, found tests: did you mean test?",
    ),
    "no training": (
        b"path,label,split\na.png,x,test\n",
        ": expected rows with train in the column split, found test",
    ),
    "an unknown class": (
        b"path,label,split\na.png,x,train\nb.png,y,test\n",
        ", line 3, column label: y is not one of the classes (x)",
    ),
    "no columns": (
        b"path\na.png\n",
        "line 1: expected a column label, labels or columns of",
    ),
    "semicolons": (b"path;label\na.png;x\n", ", line 1: expected a column path, found path;label"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors_name_the_line_and_the_column(tmp_path, case):
    content, expected = REFUSED[case]
    for name in ("a.png", "b.png"):
        save(tmp_path / name, pixels_of(0, 1, 4, 4))
    (tmp_path / "t.csv").write_bytes(content)
    text = refusal(open_data, str(tmp_path / "t.csv"))
    assert text.startswith(f"{tmp_path}/t.csv") and expected.format(tmp_path) in text


def test_other_errors(tmp_path, write):
    path = write({"x": column(0, 1), "y": column(1, 0)})
    text = refusal(ImageTable, path, classes=["x", "z"])
    assert text == f"{path}, line 1: expected columns of the classes x, z, found x, y"
    text = refusal(ImageTable, path, part="tests")
    assert text == f'{path}: part must be "train" or "validation" or "test", got \'tests\''
    assert refusal(ImageTable, tmp_path / "no.csv") == f"{tmp_path}/no.csv: no such file"
    (tmp_path / "photos" / "01.png").write_bytes(b"x")
    store = ImageTable(path)
    text = "expected a PNG, JPEG, BMP or TIFF image, found another format or a damaged file"
    assert refusal(store.read, [1]) == f"{tmp_path}/photos/01.png: {text}"
    save(tmp_path / "photos" / "02.png", pixels_of(99, 3, 6, 5))
    assert "the file has changed since the run began" in refusal(store.read, [2])


def test_sets_of_labels_need_memory_for_the_names_alone():
    """Memory does not grow with images times classes, which can be large even for a small table."""
    count = 100_000
    sets = LabelSets(np.arange(count), np.arange(1, count + 1), count)
    rows = sets.rows(np.array([5, 99_999]))
    assert rows.shape == (2, count) and rows.sum() == 2 and rows[1, -1] == 1
