"""Test that options which depend on earlier results give the same bytes on any number of ranks.

A resumed run must also give the same bytes.
"""

import shutil

import jobs
import pytest

SLOW = pytest.mark.slow("jobs")
# Options that make decisions during a run: rates, clipping, the best network and an early end.
DECIDING = [
    *("--solver", "adam", "--learning-rate", 0.1, "--learn-rate-schedule", "cosine"),
    *("--warmup-iterations", 2, "--gradient-threshold", 0.3),
    *("--gradient-threshold-method", "global-l2norm", "--validation-data", "test"),
    *("--validation-frequency", 3, "--validation-patience", 2),
    *("--output-network", "best-validation", "--epochs", 8, "--threads", 1),
]
KEYS = ("kind", "epoch", "iteration", "loss", "accuracy", "learning_rate")


def records(out):
    return [tuple(record[key] for key in KEYS) for record in jobs.metrics(out)]


@pytest.fixture(scope="module")
def runs(pictures, tmp_path_factory):
    """Train on 1 and on 3 ranks; return {ranks: output folder}."""
    base = tmp_path_factory.mktemp("deciding")
    for ranks in (1, 3):
        jobs.train(ranks, pictures, base / str(ranks), *DECIDING)
    return {ranks: base / str(ranks) for ranks in (1, 3)}


def test_the_same_bytes_on_any_ranks(runs):
    jobs.assert_same_weights({n: jobs.weights_hash(out) for n, out in runs.items()})
    assert records(runs[1]) == records(runs[3])
    rates = [r[-1] for r in records(runs[1]) if r[0] == "iteration"]
    assert rates[:3] == pytest.approx([0.01, 0.055, 0.1]) and rates[-1] < rates[2]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=SLOW), 2])
def test_stopped_in_an_epoch_and_resumed_on_other_ranks(runs, pictures, tmp_path, ranks):
    """A run that is resumed on other ranks restores moving means, step count and schedule.

    The best network and the patience are also restored.
    """
    out = tmp_path / "halted"
    jobs.train(3, pictures, out, *DECIDING, "--max-iterations", 7)
    assert jobs.summary(out)["iterations"] == 7
    jobs.resume(ranks, out, "--max-iterations", "none", "--threads", 1)
    jobs.assert_same_end(runs[1], out)
    # The stopped run also validates at its end, after iteration 7.
    assert [r for r in records(out) if r[2] != 7] == [r for r in records(runs[1]) if r[2] != 7]


@SLOW  # test_trainer.py trains without the last mini-batch
def test_a_discarded_mini_batch(pictures, tmp_path):
    """Without the last mini-batch, the bytes are the same on any number of ranks and if resumed.

    Each epoch of 189 images has 3 mini-batches of 50. The run is resumed in epoch 2.
    """
    words, halted = (
        ["--partial-minibatch", "discard", "--epochs", 2, "--threads", 1],
        tmp_path / "3",
    )
    expected = jobs.trained_hash(1, pictures, tmp_path / "1", *words)
    assert jobs.summary(tmp_path / "1")["iterations"] == 6
    jobs.train(3, pictures, halted, *words, "--max-iterations", 4)
    jobs.resume(1, halted, "--max-iterations", "none", "--threads", 1)
    assert (
        jobs.weights_hash(halted)
        == expected
        != jobs.trained_hash(1, pictures, tmp_path / "all", *words[2:])
    )
    line = jobs.refusal(jobs.resume(1, halted, "--partial-minibatch", "return", check=2))
    assert "--partial-minibatch was discard, is return" in line


SOLVERS = {
    "label rules": ["--class-weights", "balanced", "--label-smoothing", 0.1],
    "adamw": [
        *("--solver", "adamw", "--learning-rate", 0.05, "--l2", 0.5, "--epsilon", 0.01),
        *("--learn-rate-schedule", "cosine", "--gradient-threshold", 0.3),
    ],
    "lars": [
        *("--solver", "lars", "--trust-coefficient", 0.01, "--linear-scaling", 25, "--l2", 0.01),
        *("--learn-rate-schedule", "polynomial", "--gradient-threshold", 0.3),
    ],
    "lamb": [
        *("--solver", "lamb", "--learning-rate", 0.02, "--l2", 0.1, "--decay-exclude", "none"),
    ],
    "ema": [
        *("--average", "ema", "--average-decay", 0.9, "--learning-rate", 0.05),
        *("--validation-data", "test", "--validation-frequency", 3),
    ],
    "swa": [
        *("--average", "swa", "--average-start", 1, "--average-every", 2),
        *("--validation-data", "test", "--output-network", "best-validation"),
    ],
    "accumulate": ["--accumulate", 3, "--flip", "x"],
    "nesterov": [
        *("--nesterov", "on", "--learning-rate", 0.05, "--l2", 0.01),
        *("--learn-rate-schedule", "cosine", "--gradient-threshold", 0.3),
    ],
}


@SLOW  # the fixture `runs` tests Adam
@pytest.mark.parametrize("solver", SOLVERS)
def test_options_give_the_same_bytes_on_any_ranks_and_resumed(pictures, tmp_path, solver):
    words, halted = [*SOLVERS[solver], "--epochs", 2, "--threads", 1], tmp_path / "halted"
    expected = jobs.trained_hash(1, pictures, tmp_path / "1", *words)
    jobs.train(3, pictures, halted, *words, "--max-iterations", 5)
    assert jobs.summary(halted)["iterations"] == 5
    jobs.resume(2, halted, "--max-iterations", "none", "--threads", 1)
    jobs.assert_same_weights({1: expected, "3, then 2": jobs.weights_hash(halted)})


def test_patience_ends_the_run_and_the_result_is_the_best_network(runs, pictures, tmp_path):
    """The run ends after two validations without improvement, and returns the best network.

    The validation after iteration 15 has the lowest loss.
    """
    validations = [(r[3], r[2]) for r in records(runs[1]) if r[0] == "validation"]
    assert [iteration for _, iteration in validations] == [*range(3, 22, 3)]
    assert min(validations)[1] == 15 and jobs.summary(runs[1])["iterations"] == 21
    best = jobs.trained_hash(1, pictures, tmp_path / "best", *DECIDING, "--max-iterations", 15)
    assert best == jobs.weights_hash(runs[1])


@pytest.mark.slow("jobs")
def test_the_load_does_not_change_the_weights(pictures, tmp_path):
    words = ("--epochs", 1, "--threads", 1, "--worker-load")
    hashes = {
        load: jobs.trained_hash(ranks, pictures, tmp_path / load, *words, load)
        for ranks, load in ((1, "1"), (3, "0,1,2"), (3, "measured"))
    }
    jobs.assert_same_weights(hashes)


def test_negative_control_partitions(pictures, tmp_path):
    hashes = {}
    for ranks in (1, 3):
        out = tmp_path / str(ranks)
        words = ("--max-iterations", 2, "--sampling", "partition")
        result = jobs.train(ranks, pictures, out, *words)
        assert "note: --sampling partition: the images are partitioned among" in result.stdout
        hashes[ranks] = jobs.weights_hash(out)
    with pytest.raises(AssertionError, match="depend on the ranks"):
        jobs.assert_same_weights(hashes)


def test_options_that_a_resumed_run_cannot_change(runs, tmp_path):
    out = shutil.copytree(runs[1], tmp_path / "run")
    for words, message in (
        (["--solver", "sgdm"], "--solver was adam, is sgdm"),
        (["--solver", "adamw"], "--solver was adam, is adamw"),
        (["--nesterov", "on"], "--nesterov was off, is on"),
        (
            ["--epochs", 9],
            "--epochs was 8, is 9; it cannot increase with --learn-rate-schedule cosine",
        ),
        (["--gradient-threshold", "inf"], "--gradient-threshold was 0.3, is inf"),
        (["--validation-patience", 1], "--validation-patience was 2, is 1 (it may only increase)"),
    ):
        assert message in jobs.refusal(jobs.resume(None, out, *words, check=2))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--worker-load", "1,1"], "--worker-load 1,1: expected a number for each of 1 rank(s)"),
        (
            ["--validation-data", "test", "--validation-fraction", 0.1],
            "--validation-data test and --validation-fraction 0.1: expected at most one of them",
        ),
        (["--output-network", "best-validation"], "expected validation images"),
        (["--validation-patience", 2], "--validation-patience 2: expected validation images"),
        (["--validation-frequency", 2], "--validation-frequency 2: expected validation images"),
        (["--validation-data", "s3://me:secret@a/b"], "URL without user name and password"),
        (["--preview", "a.gif"], "--preview a.gif: the picture is written as .png"),
        (["--validation-data", "nowhere"], "--validation-data nowhere: "),
        (["--learn-rate-schedul", "cosine"], "did you mean --learn-rate-schedule?"),
    ],
)
def test_unusable_options_are_refused(pictures, tmp_path, words, message):
    out = tmp_path / "run"
    assert message in jobs.refusal(jobs.train(None, pictures, out, *words, check=2))
    assert not out.exists() or not list(out.glob("*.h5"))
