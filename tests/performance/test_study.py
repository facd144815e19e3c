"""Test the folder of a study: runs, rows, tables, figures and checks."""

import csv
import json
import sys

import numpy as np
import pytest

import mpidl as dl
from mpidl.performance import figures, report, results, study
from mpidl.ranks import thread_budget
from mpidl.ranks.failure import Signals

RATES = {1: 1000.0, 2: 1800.0, 4: 2800.0}
PARTS = {"compute": 0.5, "wait": 0.2, "sum": 0.1, "input": 0.05, "other": 0.15}


def write_run(run, rate, accuracy=0.9, log="", sha="00"):
    """Write the files of a finished run with three epochs at about `rate` images/s."""
    folder = run.plan.out / run.name
    folder.mkdir(parents=True)
    summary = {"accuracy": accuracy, "loss": 0.1, "threads": 1, "device": "cpu"}
    summary |= {"train_seconds": 9000 / rate, "images_per_second": 1.0, "weights_sha256": sha}
    (folder / "summary.json").write_text(json.dumps(summary))
    records = []
    for epoch in (1, 2, 3):
        seconds = epoch * 3000 / rate
        position = {"epoch": epoch, "iteration": 10 * epoch, "seconds": seconds}
        speed = rate / 3 if epoch == 1 else rate + epoch  # the first epoch fills a cache
        numbers = {"accuracy": 0.3 * epoch, "loss": 1.0, "images_per_second": speed}
        records.append({"kind": "epoch", **position, **numbers})
        times = {name: [2 * part, 2 * part] for name, part in PARTS.items()}
        records.append({"kind": "ranks", **position, **times})
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + '{"kind": "epo')  # a line being written
    (run.plan.out / f"{run.name}.log").write_text(log)


def add_curves(run, accuracies, seconds=0.5, validations=()):
    """Add records of iterations with these accuracies, and of validations, to a finished run."""
    records = [
        {"kind": "iteration", "iteration": i, "seconds": seconds * i, "accuracy": accuracy}
        for i, accuracy in enumerate(accuracies, 1)
    ]
    records += [
        {"kind": "validation", "iteration": i, "seconds": seconds * i, "accuracy": accuracy}
        for i, accuracy in validations
    ]
    with open(run.plan.out / run.name / "metrics.jsonl", "a") as file:
        file.write("\n" + "".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def plan(tmp_path):
    return study.Plan(tmp_path / "study", (1, 2, 4), ("--epochs", "3"), repeat=2)


@pytest.fixture
def content(plan):
    """Return the content of scaling.json for three numbers of ranks, the last oversubscribed."""
    for run in plan.runs():
        log = f"warning: ..., {thread_budget.SHARED_CORES}\n" if run.ranks == 4 else "fine\n"
        write_run(run, RATES[run.ranks] * (1.0 if run.turn == 1 else 1.1), log=log)
    rows = study.Study(plan, Signals()).rows()
    predicted = [
        {
            **{"ranks": n, "images_per_second": 1000.0 * n**0.8, "error": 0.1},
            **{"efficiency_error": 0.05, "efficiency": n**-0.2, "step_seconds": 1.0, **PARTS},
            "epoch_seconds": 1000 / n,
        }
        for n in (1, 2, 4, 8)
    ]
    fit = {
        **{"per_step_seconds": {"1": 1e-3}, "per_block_seconds": {"1": 2e-3}},
        **{"alpha_seconds": {"inside": 3e-6}, "beta_seconds_per_byte": {"inside": 1e-10}},
        **{"per_exchange_seconds": 5e-5, "hidden": 0.4, "fit_error": 0.01, "fold_error": 0.02},
        "coupling": 1.06,
    }
    stop = {"ranks": 4, "limit": 256, "reason": "the exchange of sums"}
    stop["options"] = {"--batch-size 256": 8, "--workers 2": None}
    prediction = {"rows": predicted, "stop": stop, "fit": fit, "link": None}
    return {
        **{"format": 1, "rows": rows, "prediction": prediction},
        "checks": results.check_predictions(rows, predicted),
    }


def test_runs_alternate_between_the_counts(plan):
    names = [run.name for run in plan.runs()]
    assert names == ["ranks-1", "ranks-2", "ranks-4", "ranks-1-2", "ranks-2-2", "ranks-4-2"]


def test_rows_are_medians_of_the_runs(content):
    first_row, two, four = content["rows"]
    # the median of the second and third epoch, then of the two runs
    assert first_row["images_per_second"] == pytest.approx(1000 * 1.05 + 2.5)
    assert (first_row["lowest"], first_row["highest"]) == pytest.approx((1002.5, 1102.5))
    assert two["speedup"] == pytest.approx(
        two["images_per_second"] / first_row["images_per_second"]
    )
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2) and first_row["efficiency"] == 1
    assert {name: two[name] for name in PARTS} == pytest.approx(PARTS)
    assert two["other"] == pytest.approx(0.15)
    assert two["curve"] == [[pytest.approx(3000 / 1800 * n), 0.3 * n] for n in (1, 2, 3)]
    assert [row["is_oversubscribed"] for row in content["rows"]] == [False, False, True]
    assert four["state"] == results.COMPLETE and four["runs"] == 2


def test_the_least_count_is_the_base(plan):
    rows = [{"ranks": n, "images_per_second": rate} for n, rate in ((2, 100.0), (8, 200.0))]
    results.add_efficiency(rows)
    assert [row["speedup"] for row in rows] == [2, 4]
    assert [row["efficiency"] for row in rows] == [1, 0.5]


def test_failed_and_missing_runs(plan):
    write_run(plan.runs()[0], 1000.0)
    rows = study.Study(plan, Signals(), {"ranks-2": "no memory"}).rows()
    assert [row["state"] for row in rows] == ["done", "failed", "waiting"]
    assert rows[1]["error"] == "no memory" and rows[1]["images_per_second"] is None
    lines = report.table_lines({"rows": rows, "prediction": None})
    assert "failed" in lines[2] and "waiting" in lines[3]
    assert "Failed: 2 ranks: no memory" in report.notes({"rows": rows, "prediction": None})


@pytest.mark.parametrize(
    ("speeds", "speed"), [([5.0], 5.0), ([1.0, 3.0], 2.0), ([1.0, 3.0, 5.0], 4.0)]
)
def test_speed_of_a_run(speeds, speed):
    lines = [{"kind": "epoch", "images_per_second": rate} for rate in speeds]
    assert results.speed_of([{"kind": "iteration", "seconds": 1.0}, *lines], {}) == speed


def test_speed_of_a_run_without_an_epoch():
    """Iterations take 2 s, and one validation of 10 s does not count."""
    times = [("iteration", 5), ("iteration", 7), ("validation", 7), ("iteration", 19)]
    records = [{"kind": kind, "seconds": s} for kind, s in [*times, ("iteration", 21)]]
    summary = {"images_per_second": 400 / 21, "train_seconds": 21, "iterations": 4}
    assert results.speed_of(records, summary) == pytest.approx(100 / 2)
    assert results.speed_of(records[:1], summary) is None


def test_a_run_without_times_of_ranks(plan):
    assert set(results.phases_of([{"kind": "epoch"}]).values()) == {None}
    assert results.curve_of([]) == ("training", [])


def test_accuracy_by_iteration_is_smoothed_and_short(plan):
    run, accuracies = plan.runs()[0], np.linspace(0, 1, 1200) ** 0.5
    write_run(run, 1000.0)
    add_curves(run, accuracies)
    expected = []
    for i in range(1200):  # the mean of all iterations so far, with weights that decay by 0.9
        weights = 0.9 ** np.arange(i, -1, -1.0)
        expected.append(np.sum(weights * accuracies[: i + 1]) / np.sum(weights))
    iterations, curve = np.array(results.read_run(run)["iteration_curve"]).T
    assert len(curve) == 300
    assert iterations == pytest.approx(np.arange(1, 1201.0).reshape(300, 4).mean(axis=1))
    assert curve == pytest.approx(np.reshape(expected, (300, 4)).mean(axis=1), rel=1e-12)


def test_time_to_an_accuracy(plan):
    """The time is of the first validation, or else of the smoothed accuracy of mini-batches."""
    for run in plan.runs():
        write_run(run, RATES[run.ranks])
    runs = plan.runs()
    for run, scale in ((runs[0], 1.0), (runs[3], 3.0)):
        validations = [(2, 0.5), (4, 0.9), (6, 0.8), (8, 0.95)]
        add_curves(run, [1.0] * 8, 0.5 * scale, validations)  # mini-batches do not count
    for run in (runs[1], runs[4]):
        add_curves(run, [0.0, 1.0, 1.0, 1.0])  # smoothed: 0, 0.526, 0.701, 0.788
    add_curves(runs[2], [1.0])  # the other run on four ranks does not reach it
    rows = study.Study(plan, Signals()).rows()

    def times(accuracy):
        results.add_time_to_accuracy(rows, accuracy)
        return [row["seconds_to_accuracy"] for row in rows]

    assert times(0.7) == [4.0, 1.5, None]  # medians of 2 s and 6 s, and of 1.5 s twice
    assert times(0.85) == [4.0, None, None]
    assert times(0.95) == [8.0, None, None]
    assert times(None) == [None] * 3
    content = {"rows": rows, "prediction": None, "accuracy": 0.7}
    assert times(0.7) and "time-to-accuracy" in figures.panels(content)
    lines = report.table_lines(content)
    assert "to 70 %" in lines[0] and "4 s" in lines[1] and "1.5 s" in lines[2]
    assert "never" in lines[3]
    for row in rows:
        row.pop("records")  # as in the files of an older version
    assert times(0.7) == [None] * 3 and "never" not in "".join(report.table_lines(content))
    del content["accuracy"]
    assert times(None) and "time-to-accuracy" not in figures.panels(content)
    assert "to 70 %" not in report.table_lines(content)[0]


def test_results_of_earlier_versions_have_no_times(content):
    for row in content["rows"]:
        del row["records"], row["iteration_curve"], row["other_load"]
    results.add_time_to_accuracy(content["rows"], 0.5)
    assert [row["seconds_to_accuracy"] for row in content["rows"]] == [None] * 3
    assert report.table_lines(content) and report.notes(content)


@pytest.mark.parametrize(("load", "is_named"), [(0.04, False), (0.43, True)])
def test_other_programs_are_named(plan, monkeypatch, load, is_named):
    """The log of a run keeps the load, and the table marks the run."""

    def execute(self, name, words, log):
        run = next(run for run in plan.runs() if run.name == name)
        write_run(run, RATES[run.ranks])
        return 0

    monkeypatch.setattr(study.Study, "execute", execute)
    monkeypatch.setattr(thread_budget.OtherLoad, "share", lambda self: load)
    plan.out.mkdir()
    for run in plan.runs()[:2]:
        assert study.Study(plan, Signals()).run(run) == results.COMPLETE
    rows = study.Study(plan, Signals()).rows()[:2]
    assert [row["other_load"] for row in rows] == [pytest.approx(load)] * 2
    content = {"rows": rows, "prediction": None}
    cells = [line.split()[0] for line in report.table_lines(content)[1:]]
    assert cells == (["1!", "2!"] if is_named else ["1", "2"])
    warning = "! warning: other programs used up to 43% of the cores' time in the runs on 1, 2 "
    assert any(line.startswith(warning) for line in report.notes(content)) == is_named


def test_checks_leave_out_shared_cores_and_one_rank(content):
    """Negative control: the oversubscribed run is far from its prediction, but does not count."""
    checks = {check["ranks"]: check for check in content["checks"]}
    assert [n for n, check in checks.items() if check["is_counted"]] == [2]
    assert checks[2]["difference"] == pytest.approx(1000 * 2**0.8 / (1800 * 1.05 + 2.5) - 1)
    lines = report.check_lines(content["checks"])
    assert lines[-1] == (
        "Largest difference between prediction and measurement: 8.0% of the speed, "
        "3.2% of the efficiency"
    )
    del content["rows"][0]  # without a run on one rank, efficiencies have another base
    checks = results.check_predictions(content["rows"], content["prediction"]["rows"])
    assert report.check_lines(checks)[-1].endswith("measurement: 8.0% of the speed")
    assert lines[0].endswith("(not counted: one rank)")
    assert lines[2].endswith("(not counted: more threads than cores)")


def test_table_and_notes(content):
    lines = report.table_lines(content)
    assert (
        lines[0].split()
        == (
            "ranks images/s speed-up efficiency time accuracy compute wait sum input predicted ± "
            "efficiency s/epoch"
        ).split()
    )
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "4*", "8"]
    assert [line.split()[-1] for line in lines[1:]] == ["1,000", "500", "250", "125"]
    assert len({len(line) for line in lines}) == 1
    notes = report.notes(content)
    assert "The same weights on 1, 2, 4 ranks" in notes
    assert "Network inside a node: alpha 3 µs, beta 10 GB/s" in notes
    assert "Ranks that train together: 1.06 x the time of these parts" in notes
    point = notes.index(
        "Scaling stops at 4 rank(s): twice as many would lose most time to the exchange of sums"
    )
    assert notes[point + 1 : point + 4] == [
        "  with --batch-size 256 it would stop at 8 ranks (other weights)",
        "  with --workers 2 it would stop beyond 256 ranks",
        "Check: 1 rank(s), predicted / measured - 1 = -5.0%, stated error ±10.0% "
        "(not counted: one rank)",
    ]


def test_different_weights_are_not_called_the_same(content):
    content["rows"][1]["weights_sha256"] = "other"
    assert not any("same weights" in line for line in report.notes(content))


def test_files(content, tmp_path):
    report.write(tmp_path, content)
    assert json.loads((tmp_path / report.JSON).read_text())["rows"][0]["ranks"] == 1
    with open(tmp_path / report.CSV, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["ranks"] for row in rows] == ["1", "2", "4", "8"]
    assert float(rows[1]["predicted_images_per_second"]) == pytest.approx(1000 * 2**0.8)
    assert float(rows[1]["predicted_epoch_seconds"]) == 500
    assert float(rows[1]["predicted_efficiency"]) == pytest.approx(2**-0.2)


@pytest.mark.slow("jobs")
def test_figures(content, tmp_path):
    names = figures.draw(tmp_path, content)
    stems = ("scaling", "accuracy", "speed", "efficiency", "time")
    assert names == [f"{stem}.{suffix}" for stem in stems for suffix in figures.SUFFIXES]
    for name in names:
        start = (tmp_path / name).read_bytes()[:4]
        assert start == (b"\x89PNG" if name.endswith("png") else b"%PDF")
    curves = {"iteration_curve": [[1, 0.5], [2, 0.75]], "records": [[[2.0, 0.75]]]}
    rows = [row | curves for row in content["rows"]]
    results.add_time_to_accuracy(rows, 0.5)
    names = figures.draw(tmp_path, {"rows": rows, "prediction": None, "accuracy": 0.5})
    assert {"accuracy-by-iteration.png", "time-to-accuracy.pdf"} <= set(names)
    assert figures.draw(tmp_path, {"rows": [], "prediction": None}) == []
    only = {"rows": [], "prediction": content["prediction"]}
    assert [name for name in figures.draw(tmp_path, only) if name.startswith("acc")] == []


def test_colours_differ_in_gray():
    """Adjacent parts of a bar must differ in brightness, so that a gray print can be read."""
    colours = [colour for colour, *_ in figures.PARTS.values()]
    red, green, blue = np.array(
        [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in colours]
    ).T
    brightness = 0.299 * red + 0.587 * green + 0.114 * blue
    assert (abs(np.diff(brightness)) > 25).all()


def test_another_study_is_not_replaced(plan):
    study.Study(plan, Signals()).start()
    study.Study(plan, Signals()).start()  # the same study continues
    write_run(plan.runs()[0], 1000.0)
    other = study.Plan(plan.out, (8,), ("--epochs", "4"))
    with pytest.raises(dl.UserError, match="study of other runs.*--epochs 3.*--overwrite"):
        study.Study(other, Signals()).start()
    assert plan.runs()[0].is_done()
    study.Study(other, Signals()).start(overwrite=True)
    assert not plan.runs()[0].is_done()


def test_only_folders_of_a_study_are_deleted(plan):
    """--overwrite must delete only runs, and only in a folder with a study."""
    results_of_others = plan.out / "ranks-2024-results"
    results_of_others.mkdir(parents=True)
    write_run(plan.runs()[0], 1000.0)
    study.Study(plan, Signals()).start(overwrite=True)
    assert plan.runs()[0].is_done()
    study.Study(plan, Signals()).start(overwrite=True)
    assert not plan.runs()[0].is_done() and not (plan.out / "ranks-1.log").exists()
    assert results_of_others.exists()


def test_runs_of_earlier_starts_stay_in_the_table(plan):
    """A later start with other numbers of ranks must keep the rows and the efficiency's base."""
    for run in plan.runs()[:3]:
        write_run(run, RATES[run.ranks])
    later = study.Study(study.Plan(plan.out, (8,), plan.words), Signals())
    write_run(later.plan.runs()[0], 4000.0)
    rows = later.rows()
    assert [(row["ranks"], row["state"]) for row in rows] == [(n, "done") for n in (1, 2, 4, 8)]
    assert rows[-1]["efficiency"] == pytest.approx(0.5, rel=0.01)


def test_a_continued_study_does_not_write_its_file_again(plan):
    """If a later start wrote the file, a full disk would leave an empty file."""
    study.Study(plan, Signals()).start()
    path = plan.out / study.FILE
    before = path.stat()
    study.Study(plan, Signals()).start()
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_options_that_one_number_of_ranks_refuses(plan, monkeypatch):
    """Exit code 2 must end the study only if no run has finished."""

    def refuse(self, name, words, log):
        log.write("mpidl: --gpus: expected 4 GPUs\n")
        return 2

    monkeypatch.setattr(study.Study, "execute", refuse)
    runs, (first, second, *_) = study.Study(plan, Signals()), plan.runs()
    runs.start()
    with pytest.raises(dl.UserError, match="expected 4 GPUs"):
        runs.run(first)
    write_run(first, 1000.0)
    assert runs.run(second) == results.FAILED
    assert runs.errors == {"ranks-2": "--gpus: expected 4 GPUs"}


def test_a_long_run_is_not_silent(plan, monkeypatch):
    monkeypatch.setattr(study, "SHOW_SECONDS", 0.0)
    monkeypatch.setattr(study, "POLL_SECONDS", 0.05)
    lines = []
    runs = study.Study(plan, Signals(), show=lines.append)
    runs.start()
    code = "import time; print('Epoch: 1', flush=True); time.sleep(2)"
    with open(plan.out / "a.log", "w") as log:
        assert runs.execute("ranks-1", [sys.executable, "-c", code], log) == 0
    assert "ranks-1: Epoch: 1" in lines
    assert lines[-1].startswith("ranks-1: running for 0:00:")


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_damaged_file_is_an_error(tmp_path, text):
    path = tmp_path / "scaling.json"
    path.write_text(text)
    with pytest.raises(dl.UserError, match="scaling.json: expected a JSON"):
        results.read_json(path)
