"""Test mpidl.sweep: weights that match single runs, failed trials, stops and resumes."""

import csv
import os
import re
import shutil
import signal

import jobs
import launcher
import pool
import pytest
import tomli_w
from launcher import finish, mpirun
from limits import wait_until

from mpidl.report import stop_file

SLOW = pytest.mark.slow("jobs")
RATES, SEEDS = [0.01, 0.1], [0, 1]
LIMITS = {"batch_size": 50, "max_iterations": 6, "epochs": 2}


@pytest.fixture
def write(pictures, tmp_path):
    """Return a function that writes a sweep file and returns the file's path."""

    def write_tables(train=None, **tables):
        common = {"network": jobs.SMALL, "data": str(pictures), "threads": 1, **LIMITS}
        path = tmp_path / "rates.toml"
        path.write_text(tomli_w.dumps({"train": common | (train or {}), **tables}))
        return path

    return write_tables


def sweep(ranks, file, out, *options, check=0):
    return pool.run(ranks, "-m", "mpidl.sweep", file, "--out", out, *options, check=check)


def table(out):
    with open(out / "table.csv", newline="") as file:
        return list(csv.DictReader(file))


def states(out):
    return [row["state"] for row in table(out)]


def files(folder):
    """Return {path: time of last change} of all files in a folder."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_the_trials_are_trainings_alone(write, pictures, tmp_path):
    """Trials on groups of one rank or of all ranks give the weights of single runs.

    If a complete sweep is started again, the files of its trials do not change.
    """
    file = write(grid={"learning_rate": RATES, "seed": SEEDS})
    first, second, single = tmp_path / "first", tmp_path / "second", tmp_path / "single"
    result = sweep(3, file, first)
    lines = jobs.output_lines(result)
    assert f"Sweep: {file}, 4 trials" in lines and "Ranks: 3, 3 group(s) of 1" in lines
    assert sum("done: accuracy" in line for line in lines) == 4
    assert f"Table: {first / 'table.csv'}" in lines
    sweep(2, file, second, "--ranks-per-model", 2)
    hashes = [jobs.weights_hash(first / f"trial-00{i}") for i in (1, 2, 3, 4)]
    assert len(set(hashes)) == 4
    options = ["--learning-rate", 0.1, "--seed", 0, "--max-iterations", 6, "--epochs", 2]
    assert jobs.trained_hash(None, pictures, single, *options) == hashes[2]
    rows = table(first)
    for out in (first, second):
        assert [row["weights_sha256"] for row in table(out)] == hashes
        assert jobs.rehash(out / "trial-003" / "model.h5") == hashes[2]
        assert "Epoch: 1, Loss: " in (out / "trial-003" / "console.log").read_text()
    columns = ["trial", "learning_rate", "seed", "state", "accuracy", "loss"]
    assert list(rows[0])[:6] == columns
    assert [(float(row["learning_rate"]), int(row["seed"])) for row in rows] == [
        (rate, seed) for rate in RATES for seed in SEEDS
    ]
    summary = jobs.summary(first / "trial-002")
    assert (rows[1]["accuracy"], rows[1]["loss"]) == (
        str(summary["accuracy"]),
        str(summary["loss"]),
    )
    best = max(rows, key=lambda row: (float(row["accuracy"]), -float(row["loss"])))
    assert any(f"Best: {first}/trial-00{best['trial']}, accuracy " in line for line in lines)

    before = files(first / "trial-001")
    result = sweep(2, file, first)
    assert "Before: 4 done; 0 to train" in result.stdout
    assert files(first / "trial-001") == before
    assert sorted(os.listdir(first)) == ["table.csv", *(f"trial-00{i}" for i in (1, 2, 3, 4))]


def test_a_changed_file_is_refused(write, tmp_path):
    out = tmp_path / "out"
    sweep(None, write(grid={"seed": [0, 1]}), out)
    file = write(grid={"seed": [0, 2]})
    line = jobs.refusal(sweep(None, file, out, check=2))
    assert line.startswith(f"{file}: trial-002 has begun with other options: seed was 1, is 2; ")
    # Options that affect only the speed may change.
    sweep(None, write({"threads": 2, "timeout": 50}, grid={"seed": [0, 1]}), out)


def test_trials_that_fail(write, tmp_path):
    """If a trial fails, on one rank or on all ranks, at the start or later, other trials train."""
    out = tmp_path / "out"
    networks = [
        jobs.network("breaks_on_odd_ranks"),
        jobs.network("one_output"),
        jobs.network("exits"),
        jobs.SMALL,
        jobs.SMALL,
    ]
    trials = [{"network": network} for network in networks]
    trials[3]["learning_rate"] = 1e30
    file = write(trial=trials)
    result = sweep(2, file, out, "--ranks-per-model", 2, check=1)
    assert states(out) == ["failed"] * 4 + ["done"]
    errors = [row["error"] for row in table(out)]
    assert errors[0] == "ArithmeticError: this network breaks on odd ranks"
    assert "expected 3 outputs" in errors[1] and errors[2] == "SystemExit: enough"
    assert errors[3].startswith("the loss is ")
    for i, error in enumerate(errors[:4]):
        assert f"trial-00{i + 1} failed: {error}" in result.stdout
        assert f"Failed: trial-00{i + 1}: {error}" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr
    log = (out / "trial-001" / "console.log").read_text()
    assert log.count("Traceback") == 1 and "ArithmeticError" in log

    before = files(out / "trial-005")
    result = sweep(2, file, out, check=1)
    assert "Before: 1 done, 4 failed; 0 to train" in result.stdout
    assert states(out) == ["failed"] * 4 + ["done"]
    for trial in trials[:4]:
        trial |= {"network": jobs.SMALL, "learning_rate": 0.02}
    file = write(trial=trials)
    line = jobs.refusal(sweep(2, file, out, check=2))
    assert "has begun with other options: network" in line and line.endswith("or --retry-failed")
    result = sweep(2, file, out, "--retry-failed")
    assert states(out) == ["done"] * 5 and files(out / "trial-005") == before
    assert len({row["weights_sha256"] for row in table(out)}) == 2


def test_single_trials_and_the_table(write, pictures, tmp_path):
    """Trials can be run one by one, like tasks of a job array, and --table writes the table."""
    out = tmp_path / "out"
    file = write(grid={"epochs": [1, 2, 3], "loss": ["crossentropy"]})
    result = sweep(2, file, out, "--trial", 2)
    assert "trial-002 starts: epochs 2, loss crossentropy" in result.stdout
    assert os.listdir(out) == ["trial-002"]
    result = sweep(None, file, out, "--table")
    assert states(out) == ["waiting", "done", "waiting"]
    rows = table(out)
    assert [row["epochs_option"] for row in rows] == ["1", "2", "3"]
    assert {row["loss_option"] for row in rows} == {"crossentropy"}
    assert rows[1]["epochs"] == "1" and float(rows[1]["loss"]) > 0 and not rows[0]["epochs"]
    assert f"Best: {out / 'trial-002'}, accuracy " in result.stdout
    for trial, text in (("4", "--trial 4: expected at most 3, the number of trials in "),):
        assert jobs.refusal(sweep(None, file, out, "--trial", trial, check=2)).startswith(text)
    line = jobs.refusal(sweep(None, file, tmp_path / "none", "--table", check=2))
    assert line.endswith("expected the folder of a sweep, found none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--ranks-per-model", 3],
            "--ranks-per-model 3: expected a divisor of the number of ranks, 2: 1, 2",
        ),
        (["--trial", 1, "--table"], "--trial and --table: expected at most one of them"),
        (["--table", "--retry-failed"], "--table and --retry-failed: expected at most one of"),
        (["--out", "s3://bucket/x"], "--out s3://bucket/x: expected a folder on a file system"),
        (["--out", "/proc/none"], "--out /proc/none: cannot be created: "),
    ],
)
def test_options_that_are_refused(write, tmp_path, options, message):
    result = sweep(2, write(grid={"seed": [0]}), tmp_path / "out", *options, check=2)
    assert message in jobs.refusal(result)


@SLOW
def test_a_trial_whose_upload_fails_has_failed(write, tmp_path):
    """A trial fails if its upload fails, and a retry does not repeat the training.

    Each trial has a different URL.
    """
    pytest.importorskip("s3fs", reason="pip install 'mpidl[s3]'")
    out, closed = tmp_path / "out", "http://127.0.0.1:9"
    common = {"upload": "s3://bucket/x/", "endpoint_url": closed, "retry_seconds": 0.1}
    file = write(common, grid={"seed": [0]})
    for options in ([], ["--retry-failed"]):
        result = sweep(None, file, out, *options, check=1)
        assert "trial-001 failed: --upload: s3://bucket/x/trial-001/model.h5: " in result.stdout
        assert states(out) == ["failed"]
    assert "Resumed after iteration 6, " in (out / "trial-001" / "console.log").read_text()


@pytest.mark.slow("jobs")
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("SIGUSR1", 1),
        pytest.param("SIGTERM", "mpirun", marks=SLOW),
        pytest.param("SIGINT", "mpirun", marks=SLOW),
    ],
)
def test_a_signal_stops_all_groups(write, pictures, tmp_path, name, target):
    """A signal stops the trials of both groups with checkpoints, from which they can be resumed.

    In this test, a single group resumes the trials, which give the weights of uninterrupted runs.
    """
    out = tmp_path / "out"
    endless = {"epochs": 10**6, "max_iterations": "none", "timeout": 50}
    file = write(endless, grid={"seed": [0, 1, 2]})
    words = ["-m", "mpidl.sweep", file, "--out", out]
    metrics = [out / f"trial-00{i}" / "metrics.jsonl" for i in (1, 2)]
    with launcher.start(2, *words, env=jobs.without_plots()) as job:
        wait_until(lambda: all(path.exists() and path.stat().st_size > 2000 for path in metrics))
        pid = job.pid if target == "mpirun" else job.rank_pids()[target]
        os.kill(pid, signal.Signals[name])
        result = finish(job)
    assert result.returncode == jobs.STOPPED, result.stderr
    assert jobs.error_lines(result) == []
    assert states(out) == ["stopped", "stopped", "waiting"]
    text = r"SIG\w+: 2 trial\(s\) stopped with a checkpoint, 1 not trained; to continue, run the "
    assert re.fullmatch(text + "same command again", result.stdout.splitlines()[-1])

    # A resumed run cannot have fewer iterations, so use the limit of the longer run.
    end = max(jobs.iterations(out / f"trial-00{i}")[-1] for i in (1, 2)) + 3
    for path in out.glob("*/trial.json"):  # as if the sweep file had always had this limit
        path.unlink()
    result = sweep(
        2,
        write({**endless, "max_iterations": end}, grid={"seed": [0, 1, 2]}),
        out,
        "--ranks-per-model",
        2,
    )
    assert states(out) == ["done"] * 3
    options = ["--seed", 1, "--max-iterations", end, "--epochs", 10**6]
    expected = jobs.trained_hash(None, pictures, tmp_path / "single", *options)
    assert jobs.weights_hash(out / "trial-002") == expected
    assert jobs.iterations(out / "trial-002") == list(range(1, end + 1))


@SLOW
def test_a_stop_file_stops_one_trial(write, tmp_path):
    """A stop file stops one trial, and the exit code shows that the sweep is incomplete."""
    out = tmp_path / "out"
    file = write({"epochs": 10**6, "max_iterations": "none", "timeout": 50}, grid={"seed": [0]})
    words = ["-m", "mpidl.sweep", file, "--out", out]
    metrics = out / "trial-001" / "metrics.jsonl"
    with launcher.start(1, *words, env=jobs.without_plots()) as job:
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 2000)
        stop_file.request(out / "trial-001", stop_file.NOW)
        result = finish(job)
    assert result.returncode == jobs.STOPPED, result.stderr
    assert states(out) == ["stopped"]
    assert result.stdout.splitlines()[-1].startswith("stop file: 1 trial(s) stopped with a ")


@pytest.mark.slow("jobs")
def test_a_killed_sweep_continues(write, pictures, tmp_path):
    """After SIGKILL, a trial resumes from its checkpoint, and leftover files are ignored."""
    out = tmp_path / "out"
    train = {"epochs": 60, "max_iterations": "none", "checkpoint_every": 5}
    file = write(train, grid={"seed": [0, 1]})
    with launcher.start(
        2, "-m", "mpidl.sweep", file, "--out", out, env=jobs.without_plots()
    ) as job:
        wait_until(lambda: (out / "trial-001" / "checkpoint-previous.h5").exists())
        pids = job.rank_pids()
        os.kill(pids[0], signal.SIGKILL)
        finish(job)
    result = sweep(2, file, out)
    assert "trial-001 continues: seed 0" in result.stdout
    assert states(out) == ["done", "done"]
    expected = jobs.trained_hash(None, pictures, tmp_path / "single", "--epochs", 60)
    assert table(out)[0]["weights_sha256"] == expected


@pytest.mark.slow("jobs")
def test_a_rank_that_does_not_come_back_ends_the_job(write, tmp_path):
    """If a rank does not return from a failed trial, the job ends, and the failure is recorded.

    The same command can therefore train the other trials.
    """
    out = tmp_path / "out"
    networks = [jobs.network("hangs_on_even_ranks"), jobs.SMALL]
    file = write({"timeout": 3}, trial=[{"network": network} for network in networks])
    words = ["-m", "mpidl.sweep", file, "--out", out, "--ranks-per-model", 2]
    result = mpirun(2, *words, env=jobs.without_plots())
    assert result.returncode == 1
    text = "this network is not built on odd ranks"
    assert f"mpidl: rank 1 failed: {text}" in result.stderr
    result = sweep(2, *words[2:3], out, "--ranks-per-model", 2, check=1)
    assert states(out) == ["failed", "done"]
    assert table(out)[0]["error"] == f"ArithmeticError: {text}"
    shutil.rmtree(out)


SEARCH = {
    "count": 5,
    "metric": "validation_accuracy",
    "parallel": 3,
    "startup": 2,
    "pruner": "median",
    "learning_rate": {"log_uniform": [1e-3, 1.0]},
    "batch_size": {"integers": [30, 60], "step": 30},
}
VALIDATED = {"validation_fraction": 0.3, "validation_frequency": 1}


@pytest.fixture
def write_search(write):
    """Return a function that writes the file of a search, with other values of its keys."""
    pytest.importorskip("optuna", reason="pip install 'mpidl[search]'")
    return lambda train=None, **keys: write(train, search=SEARCH | keys)


def results(out):
    """Return the rows of the table without times."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in table(out)]


def test_a_search_has_the_same_trials_on_any_number_of_groups(write_search, tmp_path):
    """So are their results, the pruned trials and the best trial."""
    file = write_search(VALIDATED)
    first, second = tmp_path / "first", tmp_path / "second"
    result = sweep(3, file, first)
    lines = jobs.output_lines(result)
    assert "Search: tpe for the highest validation accuracy, parallel 3, pruner median" in lines
    expected = results(first)
    assert {row["state"] for row in expected} == {"done", "pruned"}
    assert len({row["learning_rate"] for row in expected}) == 5
    pruned = next(row for row in expected if row["state"] == "pruned")
    text = f"trial-00{pruned['trial']} pruned: validation accuracy "
    assert any(text in line for line in lines) and int(pruned["iterations"]) < 6
    best = max(
        (row for row in expected if row["state"] == "done"),
        key=lambda row: (float(row["validation_accuracy"]), -float(row["validation_loss"])),
    )
    assert any(f"Best: {first}/trial-00{best['trial']}, validation acc" in line for line in lines)
    sweep(3, file, second, "--ranks-per-model", 3)
    assert results(second) == expected


@SLOW
def test_a_search_of_single_trials_that_is_started_again(write_search, tmp_path):
    """Single trials, such as tasks of a job array, and trials that are lost, are the same."""
    file = write_search(VALIDATED)
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    sweep(2, file, uninterrupted)
    sweep(2, file, parts, "--trial", 1)
    line = jobs.refusal(sweep(2, file, parts, "--trial", 5, check=2))
    assert line.endswith(
        "--trial 5: expected that the trials before it have ended, up to trial 2, found trial-002, "
        "which has not"
    )
    sweep(3, file, parts)
    assert results(parts) == results(uninterrupted)
    shutil.rmtree(parts / "trial-004")
    (parts / "trial-005" / "trial.json").unlink()
    sweep(None, file, parts)
    assert results(parts) == results(uninterrupted)
    file = write_search(VALIDATED, parallel=2)
    assert "parallel was 3, is 2" in jobs.refusal(sweep(None, file, parts, check=2))


def test_a_search_without_its_metric_fails_at_once(write_search, tmp_path):
    out = tmp_path / "out"
    sweep(2, write_search(count=2), out, check=1)
    assert states(out) == ["failed"] * 2
    assert table(out)[1]["error"].startswith(
        "[search] metric validation_accuracy: expected validation images (validation_data, "
    )


@SLOW
@pytest.mark.parametrize("pruner", ["median", "asha"])
def test_a_search_that_is_stopped_continues_as_if_it_had_not_been(write_search, tmp_path, pruner):
    """A signal stops trials between validations. The rest of the search is the same."""
    long = {**VALIDATED, "epochs": 40, "max_iterations": "none", "validation_frequency": 5}
    file, uninterrupted, parts = (
        write_search(long, count=9, pruner=pruner),
        tmp_path / "whole",
        tmp_path / "parts",
    )
    sweep(1, file, uninterrupted)
    words = ["-m", "mpidl.sweep", file, "--out", parts]
    with launcher.start(3, *words, env=jobs.without_plots()) as job:
        metrics = parts / "trial-004" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 500)
        os.kill(job.rank_pids()[1], signal.SIGUSR1)
        result = finish(job)
    assert result.returncode == jobs.STOPPED, result.stderr
    assert "stopped" in states(parts) and "waiting" in states(parts)
    sweep(2, file, parts)
    assert results(parts) == results(uninterrupted)
    assert "pruned" in states(uninterrupted)


@SLOW
def test_a_trial_that_is_stopped_holds_up_those_that_know_it(write_search, tmp_path):
    """After a stop file, trials that know the stopped trial are not trained, and the sweep ends."""
    out = tmp_path / "out"
    endless = {**VALIDATED, "epochs": 10**6, "max_iterations": "none", "validation_frequency": 500}
    file = write_search(endless, count=4, parallel=2, pruner="none")
    words = ["-m", "mpidl.sweep", file, "--out", out]
    with launcher.start(2, *words, env=jobs.without_plots()) as job:
        for i in (1, 2):
            metrics = out / f"trial-00{i}" / "metrics.jsonl"
            wait_until(lambda path=metrics: path.exists() and path.stat().st_size > 2000)
            stop_file.request(out / f"trial-00{i}", stop_file.NOW)
        result = finish(job)
    assert result.returncode == jobs.STOPPED, result.stderr
    assert states(out) == ["stopped", "stopped", "waiting", "waiting"]
    assert "trial-003 not trained: trial-001 has not ended" in result.stdout


@SLOW
def test_folds_are_trainings_alone_with_a_table_of_means(write, pictures, tmp_path):
    """Each fold is a trial with the weights of a run with --fold, and folds.csv has the means."""
    out, single = tmp_path / "folds", tmp_path / "single"
    file = write()
    file.write_text("folds = 3\n" + file.read_text() + "[grid]\nlearning_rate = [0.01, 0.1]\n")
    result = sweep(3, file, out)
    lines = jobs.output_lines(result)
    assert "Mean over 3 folds ± standard deviation:" in lines
    rows = table(out)
    assert [row["fold"] for row in rows] == ["1/3", "2/3", "3/3"] * 2
    scores = [float(row["validation_accuracy"]) for row in rows]
    with open(out / "folds.csv", newline="") as text:
        means = list(csv.DictReader(text))
    for mean, first in zip(means, (0, 3), strict=True):
        group = scores[first : first + 3]
        assert float(mean["validation_accuracy"]) == pytest.approx(sum(group) / 3)
        assert mean["done"] == "3"
    best = max(means, key=lambda row: float(row["validation_accuracy"]))
    assert any(line.startswith(f"Best: trials {best['trials']}, mean valid") for line in lines)
    words = ["--learning-rate", 0.1, "--fold", "2/3", "--max-iterations", 6, "--epochs", 2]
    assert jobs.trained_hash(2, pictures, single, *words) == rows[4]["weights_sha256"]
    shutil.rmtree(out / "trial-002")
    sweep(2, file, out, "--trial", 2)  # like a task of a job array
    assert jobs.weights_hash(out / "trial-002") == rows[1]["weights_sha256"]
