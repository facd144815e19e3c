"""Test table.csv, table.png and the printed table of a sweep, and the choice of the best trial."""

import csv
import sys

import numpy as np
import pytest
from image_sets import refusal
from PIL import Image

from mpidl.report import run_curves
from mpidl.sweeps import sweep_table


def row(trial, state="done", rate=0.1, **values):
    return (
        {"trial": trial, "learning_rate": rate}
        | dict.fromkeys(sweep_table.RESULTS)
        | {
            "state": state,
            **values,
        }
    )


def test_the_best_trial():
    """Trials are ranked by a score that all have: validation before test, accuracy before loss."""
    rows = [row(1, accuracy=0.9, loss=0.3), row(2, accuracy=0.8, loss=0.1)]
    assert sweep_table.best_of(rows)[0]["trial"] == 1 and sweep_table.score_of(rows) == "accuracy"
    rows += [row(3, accuracy=0.9, loss=0.2), row(4, accuracy=0.9, loss=0.2), row(5, "failed")]
    assert sweep_table.best_of(rows)[0]["trial"] == 3  # the lowest loss, then the first trial
    for figures, score in zip(rows[:4], (0.1, 0.3, 0.2, 0.1), strict=True):
        figures["validation_accuracy"] = score
    assert sweep_table.best_of(rows) == (rows[1], "validation_accuracy")
    losses = [row(1, loss=0.3), row(2, loss=0.1)]
    assert sweep_table.best_of(losses) == (losses[1], "loss")
    assert sweep_table.best_of([row(1, "failed"), row(2, "waiting")]) is None
    assert (
        sweep_table.best_of([row(1), row(2, loss=1.0)])[0]["trial"] == 2
    )  # NaN is written as None


def test_a_trial_of_nan_scores_does_not_change_the_ranking():
    """The scores of a NaN network are None in summary.json."""
    rows = [row(1), *(row(n, validation_accuracy=n / 9, validation_loss=n) for n in (2, 4, 3))]
    assert sweep_table.score_of(rows) == "validation_accuracy"
    assert sweep_table.best_of(rows)[0]["trial"] == 4
    summaries = [{"done": 1, **dict.fromkeys(sweep_table.SCORES)} for _ in range(3)]
    summaries[1]["validation_loss"], summaries[2]["validation_loss"] = 2.0, 1.0
    assert sweep_table.best_of(summaries, 1) == (summaries[2], "validation_loss")
    assert sweep_table.best_of(summaries[:1], 1) is None


def test_the_metric_of_a_search_ranks_and_is_shown(capsys):
    """It may differ from the score that would rank a sweep. A pruned trial is never the best."""
    scores = {"validation_accuracy": (0.9, 0.8, 0.7), "validation_loss": (0.3, 0.2, 0.1)}
    rows = [row(i, **{k: v[i - 1] for k, v in scores.items()}) for i in (1, 2, 3)]
    rows[2]["state"] = "pruned"
    assert sweep_table.best_of(rows) == (rows[0], "validation_accuracy")
    assert sweep_table.best_of(rows, score="validation_loss") == (rows[1], "validation_loss")
    assert sweep_table.shown_scores(rows) == ["validation_accuracy"]
    sweep_table.print_table(rows, [], "validation_loss")
    text = capsys.readouterr().out
    assert "0.3" in text and "0.9" not in text and "pruned" in text


def test_the_text_of_a_score():
    row = {"validation_loss": 0.25, "validation_accuracy": None}  # a trial that NaN has pruned
    assert sweep_table.describe_score(row, "validation_loss") == "validation loss 0.25"
    text = sweep_table.describe_score(row, "validation_accuracy")
    assert text == "validation accuracy not finite"


def test_csv(tmp_path):
    rows = [row(1, accuracy=0.1 + 0.2, loss=1e-9), row(2, "failed", error='of "a, b"')]
    sweep_table.write_csv(str(tmp_path), rows, ["learning_rate"])
    sweep_table.write_csv(str(tmp_path), rows, ["learning_rate"], writer=3)
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]
    with open(tmp_path / "table.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert list(first) == ["trial", "learning_rate", *sweep_table.RESULTS]
    assert (float(first["accuracy"]), float(first["loss"])) == (0.1 + 0.2, 1e-9)
    assert second["error"] == 'of "a, b"' and second["accuracy"] == ""
    text = refusal(sweep_table.write_csv, str(tmp_path / "nothing"), rows, [])
    assert "cannot be written" in text


def test_printed_table(capsys):
    rows = [
        row(1, accuracy=0.98765, loss=0.00123456, validation_accuracy=0.5, seconds=3723.4),
        row(2, "failed", rate=1e-5, error="a line"),
    ]
    rows[0]["validation_loss"] = 0.7
    sweep_table.print_table(rows, ["learning_rate", "solver"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == "trial rate solver state accuracy accuracy loss time".split()
    assert lines[3].split() == "1 0.1 done 0.5000 0.9877 0.001235 1:02:03".split()
    assert lines[4].split() == ["2", "1e-05", "failed"]


def test_a_narrow_terminal_cuts_no_value(capsys, monkeypatch):
    monkeypatch.setattr(sweep_table, "terminal_width", lambda stream: 80)
    scores = {"validation_accuracy": 0.5, "accuracy": 0.3333, "loss": 34.41, "seconds": 2.0}
    options = {"momentum": 0.805881, "batch_size": 71, "solver": "adam"}
    rows = [row(1, rate=0.000419587, **options, **scores)]
    names = ["learning_rate", *options]
    sweep_table.print_table(rows, names)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[3].split() == "1 0.0004196 0.8059 71 adam done 0.5000 0.3333 0:00:02".split()
    rows[0] |= {f"an_option_of_many_letters_{i}": "value" for i in range(5)}
    sweep_table.print_table(rows, [*names, *list(rows[0])[-5:]])
    text = capsys.readouterr().out
    assert "…" not in text and text.split()[-2:] == ["0.5000", "0:00:02"]


def test_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="table.png needs the extra `plots`")
    rows = [row(i, rate=10.0**-i, accuracy=i / 10, solver="ab"[i % 2], seed=1) for i in (1, 2, 3)]
    rows += [row(4, "failed", rate=None)]
    folder, varied = str(tmp_path), ["learning_rate", "solver", "seed"]
    assert not sweep_table.draw(folder, rows[3:], varied) and not list(tmp_path.iterdir())
    assert sweep_table.draw(folder, rows, varied)
    with Image.open(tmp_path / "table.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    for colour in (run_curves.TRAINING, run_curves.VALIDATION):
        assert tuple(bytes.fromhex(colour[1:])) in colours
    assert sweep_table.draw(folder, rows[:1], varied)  # no option varies
    rows[0]["learning_rate"] = None
    assert sweep_table.draw(folder, rows, varied)  # some trials use the default of the option
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not sweep_table.draw(folder, rows, varied)


def test_mean_and_spread_of_folds(tmp_path, capsys):
    """Means and standard deviations equal NumPy's, and failed folds do not count."""
    scores = [0.9, 0.8, 0.85, 0.7, 0.95, None]
    rows = [
        row(i + 1, "failed" if score is None else "done", rate=0.1 + i // 3, fold=f"{i % 3 + 1}/3")
        | {"validation_accuracy": score, "validation_loss": score and 1 - score}
        for i, score in enumerate(scores)
    ]
    summaries = sweep_table.fold_rows(rows, ["learning_rate", "fold"], 3)
    assert [summary["trials"] for summary in summaries] == ["1-3", "4-6"]
    assert [summary["done"] for summary in summaries] == [3, 2]
    for summary, values in zip(summaries, (scores[:3], scores[3:5]), strict=True):
        assert summary["validation_accuracy"] == pytest.approx(np.mean(values))
        assert summary["validation_accuracy_std"] == pytest.approx(np.std(values, ddof=1))
        assert summary["accuracy"] is None
    best, score = sweep_table.best_of(summaries, 3)
    assert (best["trials"], score) == ("1-3", "validation_accuracy")
    assert sweep_table.best_of(summaries[1:], 3) is None
    sweep_table.write_folds(str(tmp_path), summaries)
    with open(tmp_path / "folds.csv", newline="") as file:
        (first, _) = csv.DictReader(file)
    assert float(first["validation_accuracy_std"]) == summaries[0]["validation_accuracy_std"]
    assert first["learning_rate"] == "0.1" and "fold" not in first
    sweep_table.print_folds(summaries)
    assert "0.8500 ± 0.0500" in capsys.readouterr().out
    (single,) = sweep_table.fold_rows(rows[3:4] + rows[5:] * 2, ["learning_rate", "fold"], 3)
    assert single["validation_accuracy"] == 0.7 and single["validation_accuracy_std"] is None
