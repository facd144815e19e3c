"""Test `python -m mpidl.report`: the page about runs, and folders that are not runs."""

import html.parser
import json
import re

import numpy as np
import pytest
from image_sets import refusal

import mpidl as dl
from mpidl.report import Metrics, run_files
from mpidl.report.page import command as report

EVIL = '<script>alert("1")</script>'


def write_run(folder, learning_rate=0.01, finished=True, classes=3, ranks=()):
    folder.mkdir(parents=True)
    with Metrics(folder / "metrics.jsonl") as records:
        for i in range(1, 9):
            numbers = 2.0 / i, learning_rate, 100.0, 0.5 * i, i / 10
            records.record("iteration", 1 + (i - 1) // 4, i, *numbers)
            if i % 4 == 0:
                records.record("epoch", i // 4, i, *numbers)
                records.record("validation", i // 4, i, *numbers, metrics={"f1": i / 10})
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in ranks)
    options = (
        f'[options]\nlearning_rate = {learning_rate}\nseed = 7\n[run]\ndata = "{"<b>&amp;"}"\n'
    )
    sources = '[sources]\nlearning_rate = "command line"\nseed = "default"\n'
    (folder / "options.toml").write_text(options + sources + '[versions]\nnumpy = "2.0"\n')
    if finished:
        summary = {"accuracy": 0.75, "loss": 0.5, "ranks": 2, "threads": 1, "device": "cpu"}
        summary |= {"epochs": 2, "train_seconds": 4.0, "weights_sha256": "ab" * 32}
        (folder / "summary.json").write_text(json.dumps(summary | {"stopped": None}))
        counts = np.arange(classes**2).reshape(classes, classes)
        names = [EVIL, *(f"class {i}" for i in range(1, classes))]
        dl.Confusion(counts, tuple(names)).save(folder / "confusion.csv")
    return folder


class Page(html.parser.HTMLParser):
    """The elements, texts and tables of a page, read by Python's HTML parser."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts, self.rows = [], [], [], []
        self.is_cell = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.is_cell = True

    def handle_endtag(self, tag):
        self.is_cell &= tag not in ("td", "th")

    def handle_data(self, data):
        self.texts.append(data)
        if self.is_cell:
            self.rows[-1][-1] += data.strip()

    def row(self, head):
        return next(row[1:] for row in self.rows if row[:1] == [head])


def page_of(path, *runs):
    assert report.main([*map(str, runs), "--html", str(path)]) == 0
    return Page(path.read_text())


def test_a_page_about_one_run(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    page = page_of(tmp_path / "run.html", run)
    assert page.row("accuracy") == ["0.7500"] and page.row("weights_sha256") == ["ab" * 32]
    assert page.row("learning_rate") == ["0.01", "command line"]
    assert page.row("seed") == ["7", "default"] and page.row("data")[0] == "<b>&amp;"
    assert page.row(EVIL) == ["0", "1", "2"] and page.row("class 2") == ["6", "7", "8"]
    assert page.row("2") == ["cpu", "1"] and page.row("numpy") == ["2.0"]
    assert page.tags.count("svg") == 5 and page.tags.count("circle") == 2 * 2 + 2 * 2 + 8 + 2 + 2
    assert "Validation: f1" in page.texts
    assert "0.7500" in capsys.readouterr().out


def test_a_page_loads_nothing_and_runs_nothing(tmp_path):
    page = page_of(tmp_path / "a.html", write_run(tmp_path / EVIL.replace("/", "")))
    assert not {"script", "link", "img", "iframe", "object", "a"} & set(page.tags)
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert EVIL in "".join(page.texts)  # the name is text, not HTML
    text = (tmp_path / "a.html").read_text()
    assert re.findall(r"https?:|url\(|@import", text) == []


def test_a_comparison_of_runs(tmp_path):
    runs = [write_run(tmp_path / "a" / name, rate) for name, rate in (("x", 0.1), ("y", 0.2))]
    runs.append(write_run(tmp_path / "b" / "x", 0.2, finished=False))
    page = page_of(tmp_path / "runs.html", *runs)
    assert page.row("run")[:3] == ["state", "accuracy", "loss"]
    assert page.row("b/x")[:3] == ["in training", "", ""]
    assert page.row("a/y")[:3] == ["finished", "0.7500", "0.5000"]
    assert page.row("learning_rate") == ["0.1", "0.2", "0.2"]
    text = (tmp_path / "runs.html").read_text()
    highlighted = re.findall(r'<tr class="differs"><th>(\w+)', text)
    assert highlighted == ["learning_rate"]


def test_the_shares_of_each_rank(tmp_path):
    record = {"kind": "ranks", "epoch": 1, "iteration": 4, "input": [0, 0.5]}
    record |= {"compute": [1.5, 1.0], "wait": [0.25, 0], "sum": [0.25, 0.25], "device": ["a", EVIL]}
    record |= {"other": [0, 0.25], "memory": [2**20, 2**21]}
    broken = [record | {"wait": [1]}, record | {"sum": "much"}, record | {"device": ["a"]}]
    run = write_run(tmp_path / "run", ranks=[record, *broken, record])
    page = page_of(tmp_path / "run.html", run)
    assert page.row("0") == ["a", "1 MiB", "0.0%", "75.0%", "12.5%", "12.5%", "0.0%"]
    assert page.row("1") == [EVIL, "2 MiB", "25.0%", "50.0%", "0.0%", "12.5%", "12.5%"]


def test_many_classes_are_a_list_of_confusions(tmp_path):
    page = page_of(tmp_path / "run.html", write_run(tmp_path / "run", classes=40))
    rows = [row for row in page.rows if len(row) == 3 and row[0] == "class 39"]
    assert rows[0] == ["class 39", "class 38", str(40 * 39 + 38)]


def test_a_sweep_stands_for_its_trials(tmp_path):
    for i in (1, 2):
        write_run(tmp_path / "sweep" / f"trial-00{i}", learning_rate=i)
    page = page_of(tmp_path / "sweep.html", tmp_path / "sweep")
    assert page.row("learning_rate") == ["1", "2"] and page.row("trial-002")


def test_results_from_before_a_resume_are_left_out(tmp_path):
    run = write_run(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    for iterations, state in ((8, "finished"), (7, "in training")):
        (run / "summary.json").write_text(json.dumps(summary | {"iterations": iterations}))
        page = page_of(tmp_path / "run.html", run)
        assert page.row("state") == [state]
        assert ("accuracy" in [cells[0] for cells in page.rows]) == (iterations == 8)


def test_a_run_that_is_being_written(tmp_path):
    """A run without a record, or with an incomplete line, has an empty chart."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    assert "Loss: no numbers yet" in page_of(tmp_path / "a.html", run).texts
    (run / "metrics.jsonl").write_text('{"kind": "iteration", "epoch": 1, "iter')
    assert "Loss: no numbers yet" in page_of(tmp_path / "a.html", run).texts


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("summary.json", "{", "summary.json: expected JSON, found Expecting property name"),
        ("summary.json", "[1]", "summary.json: expected a JSON object, found list"),
        ("options.toml", "=", "options.toml: not a TOML file"),
        ("confusion.csv", "a,b\nc,d,e\n", "confusion.csv: expected a row and a column of counts"),
        ("confusion.csv", ",x,r\nx,0.5,r\np,p,p\n", "confusion.csv: expected a row and a column"),
        ("metrics.jsonl", None, "expected the folder of a run, found no metrics.jsonl in it"),
    ],
)
def test_a_damaged_run_is_one_line(tmp_path, file, content, text):
    run = write_run(tmp_path / "run")
    if content is None:
        (run / file).unlink()
    else:
        (run / file).write_text(content)
    message = refusal(report.main, [str(run)])
    assert text in message and message.startswith(str(run)) and "\n" not in message


@pytest.mark.parametrize(
    ("summary", "row"),
    [
        ({"train_seconds": "x"}, ["training time", "0:00:04"]),
        ({"accuracy": "n/a", "loss": True}, None),
        ({"accuracy": 10**400, "loss": float("nan")}, None),
        ({"device": "\ud800", "weights_sha256": "\ud800"}, ["weights_sha256", "\\ud800"]),
        ({"stopped": ["SIGTERM"], "ranks": {}}, ["state", "finished"]),
    ],
)
def test_results_of_a_wrong_type_are_left_out(tmp_path, summary, row):
    """Results of a wrong type are ignored, even in a table with a complete run."""
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    results = json.loads((runs[0] / "summary.json").read_text())
    (runs[0] / "summary.json").write_text(json.dumps(results | summary))
    page_of(tmp_path / "both.html", *runs)
    page = page_of(tmp_path / "one.html", runs[0])
    if row is None:
        assert not {"accuracy", "loss"} & {cells[0] for cells in page.rows}
    else:
        assert page.row(row[0]) == row[1:]


def test_records_with_unusual_numbers(tmp_path):
    large, nan = 10**400, float("nan")
    ranks = {"kind": "ranks", "epoch": 2, "iteration": 8, "device": ["\ud800"]}
    ranks |= {name: [0.5] for name in run_files.TIMES} | {"memory": [large]}
    broken = [ranks | {"wait": [value]} for value in (large, nan, True)]
    iteration = {"kind": "iteration", "epoch": 2, "iteration": 8, "loss": large, "seconds": large}
    run = write_run(tmp_path / "run", ranks=[ranks, *broken, iteration])
    page = page_of(tmp_path / "run.html", run)
    assert page.row("0") == ["\\ud800", "", *["20.0%"] * 5]


def test_the_path_of_the_metrics_stands_for_their_run(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    page = page_of(tmp_path / "a.html", run / "metrics.jsonl")
    assert page.row("accuracy") == ["0.7500"] and "Run run" in page.texts
    monkeypatch.chdir(run)
    assert page_of(tmp_path / "b.html", "metrics.jsonl").row("accuracy") == ["0.7500"]


def test_wrong_arguments_are_one_line(tmp_path):
    run = str(write_run(tmp_path / "run"))
    for words, text in (
        ([str(tmp_path / "none")], "none: expected the folder of a run, found nothing there"),
        ([], "the following arguments are required: RUN"),
        ([run, "--html", "a.pdf"], "--html a.pdf: the page is written as .html"),
        ([run, "--html", f"{run}/no/a.html"], "a.html: cannot be written: No such file"),
        ([run, "--htm", "a.html"], "unknown option --htm: did you mean --html?"),
    ):
        assert text in refusal(report.main, words)


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ({"state": "finished"}, "finished"),
        ({"state": "finished", "stopped": "SIGUSR1"}, "stopped: SIGUSR1"),
        ({"state": "failed", "error": "a.png: not an image"}, "failed: a.png: not an image"),
        ({"state": "running"}, "in training"),
    ],
)
def test_the_state_of_a_run_without_results(tmp_path, end, state):
    run = write_run(tmp_path / "run", finished=False)
    (run / "status.json").write_text(json.dumps(end))
    assert run_files.read(str(run)).state == state
