"""Test confusion matrices: counts, text, tables, pictures, and HTML for notebooks."""

import csv
import html
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from image_sets import refusal
from PIL import Image

import mpidl as dl
from mpidl.evaluation.class_metrics import ClassMetrics
from mpidl.evaluation.confusion import Confusion


def small_matrix():
    return dl.confusion_matrix([0, 0, 0, 1, 1, 3], [0, 0, 1, 1, 0, 1], ["cat", "dog", "elk", "fox"])


def test_counts_recall_precision_and_text():
    matrix = small_matrix()
    assert matrix.counts.tolist() == [[2, 1, 0, 0], [1, 1, 0, 0], [0] * 4, [0, 1, 0, 0]]
    assert matrix.accuracy == 0.5
    np.testing.assert_array_equal(matrix.recall, [2 / 3, 1 / 2, np.nan, 0])
    np.testing.assert_array_equal(matrix.precision, [2 / 3, 1 / 3, np.nan, np.nan])
    assert matrix.most_confused(2) == [("cat", "dog", 1), ("dog", "cat", 1)]
    assert str(matrix).splitlines() == [
        "true \\ predicted     cat     dog  elk  fox  recall",
        "cat                    2       1    0    0  0.6667",
        "dog                    1       1    0    0  0.5000",
        "elk                    0       0    0    0",
        "fox                    0       1    0    0  0.0000",
        "precision         0.6667  0.3333            0.5000",
    ]


class Table(HTMLParser):
    """Parser of a document's only table. A row is a list of (tag, style, text)."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.stack = [], []
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag, attributes):
        self.stack.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append([tag, dict(attributes).get("style"), ""])

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, text):
        if self.stack[-1:] in (["th"], ["td"]):
            self.rows[-1][-1][2] += text


def test_a_confusion_matrix_in_a_notebook():
    """Cells must have the escaped text, and counts must be shaded by their share of the row."""
    matrix = dl.confusion_matrix([0, 0, 0, 1], [0, 0, 1, 1], ["<b>cat", "dog & co"])
    text = matrix._repr_html_()
    assert "<b>" not in text
    rows = Table(text).rows
    assert [[cell for *_, cell in row] for row in rows] == [
        [str(cell) for cell in row] for row in matrix.rows()
    ]
    tags = [[tag for tag, *_ in row] for row in rows]
    assert tags == [["th"] * 4, *[["th", "td", "td", "td"]] * 3]
    styles = [[style for _, style, _ in row] for row in rows]
    assert styles[0] == styles[3] == [None] * 4 and styles[1][0] is styles[1][3] is None
    alphas = [re.search(r", ([0-9.]+)\)", style)[1] for row in styles[1:3] for style in row[1:3]]
    assert alphas == ["0.53", "0.27", "0.00", "0.80"]


def test_many_classes_are_summarized():
    labels = np.arange(50)
    matrix = dl.confusion_matrix(labels, np.where(labels == 7, 9, labels))
    heading = "50 classes, accuracy 0.9800; most confused:"
    lines = [heading, "class  taken for  times", "7              9      1"]
    assert str(matrix).splitlines() == lines
    html = matrix._repr_html_()
    assert html.startswith(f"<p>{heading}</p>")
    cells = [[cell for *_, cell in row] for row in Table(html).rows]
    assert cells == [["class", "taken for", "times"], ["7", "9", "1"]]


def test_labels_of_any_shape():
    """An image may have several labels, for example one per pixel."""
    labels = np.arange(24).reshape(2, 3, 4) % 3
    assert dl.confusion_matrix(labels, labels).counts.tolist() == np.diag([8] * 3).tolist()


def test_a_table_without_some_predictions_has_no_fractions(tmp_path):
    """The accuracy of the images with scores would hide that others have NaN scores."""
    matrix = Confusion(np.array([[3, 1], [0, 4]]), ("a", "b"), is_complete=False)
    assert np.isnan([matrix.accuracy, matrix.balanced_accuracy]).all()
    for fractions in (matrix.recall, matrix.precision, matrix.f1, matrix.iou):
        assert np.isnan(fractions).all()
    matrix.save(tmp_path / "confusion.csv")
    rows = (tmp_path / "confusion.csv").read_text().splitlines()
    assert rows == ["true \\ predicted,a,b,recall", "a,3,1,", "b,0,4,", "precision,,,"]


def test_a_confusion_matrix_is_saved_as_csv(tmp_path):
    small_matrix().save(tmp_path / "a.csv")
    with open(tmp_path / "a.csv", newline="") as file:
        assert list(csv.reader(file)) == [[str(c) for c in row] for row in small_matrix().rows()]
    for name in ("a.txt", "a"):
        text = refusal(small_matrix().save, tmp_path / name)
        assert "is written as .csv or .png, found " in text
    text = refusal(small_matrix().save, tmp_path / "none" / "a.csv")
    assert "cannot be written: No such file or directory" in text


@pytest.mark.parametrize(
    "classes", [2, *(pytest.param(n, marks=pytest.mark.slow("jobs")) for n in (40, 100))]
)
def test_a_confusion_matrix_is_saved_as_a_picture(classes, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    labels = np.arange(3 * classes) % classes
    matrix = dl.confusion_matrix(labels, labels[::-1])
    matrix.save(tmp_path / "a.png")
    if classes == 2:
        matrix.save(tmp_path / "b.PNG")
        assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.PNG").read_bytes()
    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG" and min(image.size) > 400
        assert len(image.convert("L").getcolors(256)) > 2


def test_the_title_of_a_picture_counts_labels(monkeypatch, tmp_path):
    """The picture must count labels, not images, because an image may have several labels."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.axes import Axes

    titles = []
    monkeypatch.setattr(Axes, "set_title", lambda self, text, **style: titles.append(text))
    labels = np.arange(2 * 8 * 8).reshape(2, 8, 8) % 4
    dl.confusion_matrix(labels, labels).save(tmp_path / "a.png")
    assert titles == ["accuracy 1.0000 on 128 labels"]


@pytest.mark.parametrize(
    "labels, predicted, classes, text",
    [
        ([0, 1], [0], None, "integer arrays of one shape"),
        ([0, 3], [0, 1], ["a", "b"], "from 0 to 1, found 3"),
        ([0, -1], [0, 1], None, "found -1"),
    ],
)
def test_labels_are_checked(labels, predicted, classes, text):
    assert text in refusal(dl.confusion_matrix, labels, predicted, classes)


CONTROL = ("a\nb", "\x1b[31mred", "tab\there", "nul\x00", "right\u202eleft", "byte \udcff")
ESCAPED = (r"a\nb", r"\x1b[31mred", r"tab\there", r"nul\x00", r"right\u202eleft", r"byte \xff")


@pytest.mark.parametrize(
    ("classes", "printed"),
    [(CONTROL, ESCAPED), (names := ("é", "猫", "a b", "x,y", 'q"', "0"), names)],
    ids=["escaped", "other names are unchanged"],
)
def test_control_characters_in_class_names_are_escaped(tmp_path, classes, printed):
    """Names may come from folders and files: a terminal or a table must not interpret them."""
    matrix = dl.confusion_matrix([0, 1, 2, 3, 4, 5, 0], [1, 1, 2, 3, 4, 5, 2], classes)
    metrics = ClassMetrics({"f1": 0.5}, {"f1": np.ones(6)}, classes)
    assert matrix.classes == metrics.classes == classes
    assert matrix.most_confused()[0][:2] == classes[:2]
    pairs = dl.Confusion(np.eye(24, k=1, dtype=np.int64), classes * 4)  # only pairs are printed
    for table in (matrix, metrics, pairs):
        text, html_text = str(table), table._repr_html_()
        assert all(line.isprintable() for line in (text + html_text).split("\n"))
        assert all(name in text and html.escape(name) in html_text for name in printed)
    for table in (matrix, metrics):
        table.save(tmp_path / "table.csv")
        with open(tmp_path / "table.csv", newline="", encoding="utf-8") as file:
            content = file.read()
        assert all(line.isprintable() for line in content.split("\n"))
        first = [row[0] for row in csv.reader(content.splitlines())]
        assert first[1:7] == list(printed)
