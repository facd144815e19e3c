"""Test mpidl.scaling: real runs, stops, failures, and the probe with its prediction."""

import json
import signal

import jobs
import launcher
import numpy as np
import pytest
from launcher import finish
from limits import wait_until

SLOW = pytest.mark.slow("jobs")


def words_of(pictures, out, *options, network="small"):
    options = ["--batch-size", 50, "--threads", 1, "--plots", "none", *options]
    return jobs.command("scaling", *options, network=jobs.network(network), data=pictures, out=out)


def study(pictures, out, *options, network="small", check=0):
    words = words_of(pictures, out, *options, network=network)
    return launcher.mpirun(None, *words, env=jobs.without_plots(), check=check)


def content(out):
    return json.loads((out / "scaling.json").read_text())


@SLOW
def test_the_runs_are_trainings_by_hand(pictures, tmp_path):
    out = tmp_path / "study"
    lines = study(pictures, out, "--ranks", "1,2", "--epochs", 1).stdout.splitlines()
    assert lines[0] == "Study: strong scaling on 1, 2 ranks, 1 thread(s) each"
    assert "The same weights on 1, 2 ranks" in lines
    rows = content(out)["rows"]
    assert [(row["ranks"], row["state"], row["threads"]) for row in rows] == [
        *((1, "done", 1), (2, "done", 1))
    ]
    assert rows[0]["efficiency"] == 1 and rows[1]["images_per_second"] > 0
    summary = json.loads((out / "ranks-2" / "summary.json").read_text())
    assert summary["ranks"] == 2 and summary["weights_sha256"] == rows[0]["weights_sha256"]
    parts = [rows[1][name] for name in ("compute", "wait", "sum", "input", "other")]
    assert sum(parts) == pytest.approx(1) and min(parts) >= 0 and parts[0] > 0


@SLOW
@pytest.mark.timeout(180)
def test_a_study_grows(pictures, tmp_path):
    """If a command is repeated, no run is repeated, and more numbers of ranks can be added.

    All runs have the same number of threads per rank.
    """
    out = tmp_path / "study"
    options = ("--epochs", 1, "--plots", "none", "--batch-size", 50)

    def start(*ranks):
        words = jobs.command(
            "scaling", *ranks, *options, network=jobs.network("small"), data=pictures, out=out
        )
        return launcher.mpirun(None, *words, env=jobs.without_plots(), check=0)

    start("--ranks", 1)
    times = {path: path.stat().st_mtime_ns for path in out.glob("ranks-*/summary.json")}
    result = start("--ranks", "1,2")
    assert "Before: 1 of 2 runs; 1 to do" in result.stdout
    assert len(times) == 1
    assert {path: path.stat().st_mtime_ns for path in times} == times
    start("--ranks", "2")
    rows = content(out)["rows"]
    assert [(row["ranks"], row["state"]) for row in rows] == [(1, "done"), (2, "done")]
    assert rows[0]["threads"] == rows[1]["threads"]


@SLOW
@pytest.mark.timeout(240)
def test_a_stopped_study_resumes_its_run(pictures, tmp_path):
    """USR1 stops the study with a checkpoint of its run, and the same command continues it."""
    out = tmp_path / "study"
    options = ("--ranks", 2, "--max-iterations", 200, "--epochs", 10**6)
    words = words_of(pictures, out, *options)
    with launcher.start(None, *words, env=jobs.without_plots()) as job:
        log = out / "ranks-2.log"
        wait_until(lambda: log.exists() and "Results" in log.read_text())
        job.send_signal(signal.SIGUSR1)
        result = finish(job)
    assert result.returncode == jobs.STOPPED, result.stderr
    assert "to continue, run the same command again" in result.stdout.splitlines()[-1]
    assert content(out)["rows"][0]["state"] == "stopped"
    second = launcher.mpirun(None, *words, env=jobs.without_plots(), check=0)
    assert "ranks-2: starts" in second.stdout
    assert "Resumed after iteration" in (out / "ranks-2.log").read_text()
    assert jobs.iterations(out / "ranks-2") == list(range(1, 201))


@SLOW
@pytest.mark.timeout(240)
def test_a_failed_run_does_not_end_the_study(pictures, tmp_path):
    out = tmp_path / "study"
    options = ("--ranks", "1,2", "--epochs", 1)
    result = study(pictures, out, *options, network="raises_on_rank_1", check=1)
    states = [row["state"] for row in content(out)["rows"]]
    assert states == ["done", "failed"]
    assert "Failed: 2 ranks:" in result.stdout and "Traceback" not in result.stderr
    result = study(pictures, out, *options, network="raises_on_rank_1", check=1)
    assert "Before: 1 of 2 runs; 1 to do" in result.stdout


@SLOW
def test_bad_options_of_train(pictures, tmp_path):
    options = ("--ranks", "1", "--worker-load", "1,2")
    result = study(pictures, tmp_path / "study", *options, check=2)
    assert jobs.error_lines(result) == [
        "mpidl: --worker-load 1,2: expected a number for each of 1 rank(s), found 2"
    ]


@SLOW
@pytest.mark.timeout(240)
def test_weak_scaling(pictures, tmp_path):
    out = tmp_path / "study"
    result = study(pictures, out, "--ranks", "1,2", "--weak", "--max-iterations", 1)
    assert result.stdout.startswith("Study: weak scaling on 1, 2 ranks")
    assert "mini-batches of 100 on 2 rank(s)" in (out / "ranks-2.log").read_text()


@SLOW
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("network", "extra"),
    [
        ("small", ("--timeline", 5, "--validation-fraction", 0.1, "--validation-patience", 2)),
        ("varied", ("--partial-minibatch", "discard", "--output-network", "best-validation")),
        ("small", ("--batch-size", 150)),  # only one full mini-batch per epoch
    ],
)
def test_a_prediction(pictures, tmp_path, network, extra):
    """A short probe of 2 ranks predicts finite times, which --table prints again."""
    out = tmp_path / "study"
    options = ("--probe-ranks", 2, "--probe-seconds", 1, *extra)
    if "best-validation" in extra:
        options += ("--validation-data", pictures)
    result = study(pictures, out, "--predict", "1,2,5", *options, network=network)
    prediction = content(out)["prediction"]
    assert [row["ranks"] for row in prediction["rows"]] == [1, 2, 5]
    for row in prediction["rows"]:
        parts = [row[name] for name in ("compute", "wait", "sum", "input")]
        assert sum(parts) == pytest.approx(row["step_seconds"]) and min(parts) >= -1e-12
        assert row["images_per_second"] > 0 and row["error"] > 0
    record = content(out)["probe"]
    assert record["images"] == (171 if "--timeline" in extra else 189)
    assert bool(record["coupled"]) == (150 not in extra)
    predicted = prediction["rows"][1]["step_seconds"]
    if record["coupled"]:  # for the number of ranks in the probe, the time is measured
        assert predicted == pytest.approx(np.median(record["coupled"]))
    assert "Network inside a node: alpha" in result.stdout
    second = launcher.mpirun(
        None, "-m", "mpidl.scaling", "--table", "--out", out, env=jobs.without_plots(), check=0
    )
    assert second.stdout.splitlines()[0] == result.stdout.partition("\n\n")[2].splitlines()[0]
    later_study = study(pictures, out, "--predict", "1,8", *options, network=network)
    assert "Probe: as in scaling.json" in later_study.stdout
    assert content(out)["probe"] == record


@SLOW
@pytest.mark.timeout(240)
def test_a_stopped_probe(pictures, tmp_path):
    """USR1 ends a probe without a traceback, and says that the same command continues it."""
    out = tmp_path / "study"
    options = ("--predict", "1,2", "--probe-ranks", 2, "--probe-seconds", 600)
    with launcher.start(None, *words_of(pictures, out, *options), env=jobs.without_plots()) as job:
        log = out / "probe.log"
        wait_until(lambda: log.exists() and "round 1" in log.read_text())
        job.send_signal(signal.SIGUSR1)
        result = finish(job)
    assert result.returncode == jobs.STOPPED, result.stderr
    assert "SIGUSR1: to continue, run the same command again" in result.stdout
    assert "Traceback" not in result.stderr + log.read_text()


@SLOW
def test_a_probe_of_one_rank_is_refused(pictures, tmp_path):
    options = ("--predict", "1", "--probe-ranks", 1, "--probe-seconds", 1)
    result = study(pictures, tmp_path / "study", *options, check=2)
    (line,) = jobs.error_lines(result)
    assert line.startswith("mpidl: --predict: expected at least 2 ranks")
