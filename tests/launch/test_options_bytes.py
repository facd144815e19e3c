"""Options that decide from step to step, and the bytes they end with: on any ranks, and resumed."""

import json
import shutil

import pytest
import small

# all that is decided while training: rates, clipping, which network is the best, when to end
DECIDING = [
    *("--solver", "adam", "--learning-rate", 0.1, "--learn-rate-schedule", "cosine"),
    *("--warmup-iterations", 2, "--gradient-threshold", 0.3),
    *("--gradient-threshold-method", "global-l2norm", "--validation-data", "test"),
    *("--validation-frequency", 3, "--validation-patience", 2),
    *("--output-network", "best-validation", "--epochs", 8, "--threads", 1),
]
KEYS = ("kind", "epoch", "iteration", "loss", "accuracy", "learning_rate")


def records(out):
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [tuple(record[key] for key in KEYS) for record in lines]


@pytest.fixture(scope="module")
def runs(pictures, tmp_path_factory):
    """{ranks: folder of its results}."""
    base = tmp_path_factory.mktemp("deciding")
    for ranks in (1, 2, 3):
        small.train(ranks, pictures, base / str(ranks), *DECIDING)
    return {ranks: base / str(ranks) for ranks in (1, 2, 3)}


def test_the_same_bytes_on_any_ranks(runs):
    small.assert_same({n: small.summary(out)["weights_sha256"] for n, out in runs.items()})
    assert records(runs[1]) == records(runs[2]) == records(runs[3])
    rates = [r[-1] for r in records(runs[1]) if r[0] == "iteration"]
    assert rates[:3] == pytest.approx([0.01, 0.055, 0.1]) and rates[-1] < rates[2]


@pytest.mark.parametrize("ranks", [1, 3])
def test_stopped_in_an_epoch_and_resumed_on_other_ranks(runs, pictures, tmp_path, ranks):
    """Its moving means, the step count, the schedule, the best network and the patience go on."""
    out = tmp_path / "halted"
    small.train(2, pictures, out, *DECIDING, "--max-iterations", 7)
    assert small.summary(out)["iterations"] == 7
    small.resume(ranks, out, "--max-iterations", "none", "--threads", 1)
    expected, found = small.summary(runs[1]), small.summary(out)
    for name in ("weights_sha256", "accuracy", "loss", "iterations", "epochs"):
        assert found[name] == expected[name], name
    # (the run that was halted validated at its end, too)
    assert [r for r in records(out) if r[2] != 7] == [r for r in records(runs[1]) if r[2] != 7]


SOLVERS = {
    "adamw": [
        *("--solver", "adamw", "--learning-rate", 0.05, "--l2", 0.5, "--epsilon", 0.01),
        *("--learn-rate-schedule", "cosine", "--gradient-threshold", 0.3),
    ],
    "nesterov": [
        *("--nesterov", "on", "--learning-rate", 0.05, "--l2", 0.01),
        *("--learn-rate-schedule", "cosine", "--gradient-threshold", 0.3),
    ],
}


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_solver_makes_the_same_bytes_on_any_ranks_and_resumed(pictures, tmp_path, solver):
    words = [*SOLVERS[solver], "--epochs", 3, "--threads", 1]
    for ranks in (1, 3):
        small.train(ranks, pictures, tmp_path / str(ranks), *words)
    halted = tmp_path / "halted"
    small.train(3, pictures, halted, *words, "--max-iterations", 4)
    assert small.summary(halted)["iterations"] == 4
    small.resume(2, halted, "--max-iterations", "none", "--threads", 1)
    folders = {1: tmp_path / "1", 3: tmp_path / "3", "2, resumed": halted}
    small.assert_same({n: small.summary(out)["weights_sha256"] for n, out in folders.items()})


def test_patience_ends_it_and_the_result_is_the_best_network(runs, pictures, tmp_path):
    """After iteration 6 the loss is not below its least twice."""
    found = [(r[3], r[2]) for r in records(runs[1]) if r[0] == "validation"]
    assert [iteration for _, iteration in found] == [3, 6, 9, 12] and min(found)[1] == 6
    assert small.summary(runs[1])["iterations"] == 12
    out = tmp_path / "best"
    small.train(1, pictures, out, *DECIDING, "--max-iterations", 6)
    assert small.summary(out)["weights_sha256"] == small.summary(runs[1])["weights_sha256"]


def test_loads_make_no_difference(pictures, tmp_path):
    hashes = {}
    for ranks, load in ((1, "1"), (3, "0,1,2"), (3, "measured")):
        out = tmp_path / load
        words = ("--epochs", 3, "--threads", 1, "--worker-load", load)
        small.train(ranks, pictures, out, *words)
        hashes[load] = small.summary(out)["weights_sha256"]
    small.assert_same(hashes)


def test_negative_control_partitions(pictures, tmp_path):
    hashes = {}
    for ranks in (1, 3):
        out = tmp_path / str(ranks)
        words = ("--max-iterations", 2, "--sampling", "partition")
        result = small.train(ranks, pictures, out, *words)
        assert "note: --sampling partition: the images are partitioned among" in result.stdout
        hashes[ranks] = small.summary(out)["weights_sha256"]
    with pytest.raises(AssertionError, match="depend on the ranks"):
        small.assert_same(hashes)


def test_what_a_resume_may_not_change(runs, tmp_path):
    out = shutil.copytree(runs[1], tmp_path / "run")
    for words, message in (
        (["--solver", "sgdm"], "--solver was adam, is sgdm"),
        (["--solver", "adamw"], "--solver was adam, is adamw"),
        (["--nesterov", "on"], "--nesterov was off, is on"),
        (["--epochs", 9], "--epochs was 8, is 9, where --learn-rate-schedule cosine ends"),
        (["--gradient-threshold", "inf"], "--gradient-threshold was 0.3, is inf"),
        (["--validation-patience", 1], "--validation-patience was 2, is 1 (it may only increase)"),
    ):
        (line,) = small.own_lines(small.resume(None, out, *words, check=2))
        assert message in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--worker-load", "1,1"], "--worker-load 1,1: expected a number for each of 1 rank(s)"),
        (
            ["--validation-data", "test", "--validation-fraction", 0.1],
            "--validation-data test and --validation-fraction 0.1: expected one of them",
        ),
        (["--output-network", "best-validation"], "expected images to validate on"),
        (["--validation-patience", 2], "--validation-patience 2: expected images to validate on"),
        (["--validation-frequency", 2], "--validation-frequency 2: expected images to validate on"),
        (["--random-crop", 30], "--random-crop 30x30: expected at most the size of the images"),
        (["--centre-crop", 30], "centre crop 30x30 (--centre-crop, or crop= in Python): expected"),
        (["--validation-data", "s3://a/b"], "--validation-data s3://a/b: S3 is not supported yet"),
        (["--preview", "a.gif"], "--preview a.gif: the picture is written as .png"),
        (["--validation-data", "nowhere"], "--validation-data nowhere: "),
        (["--learn-rate-schedul", "cosine"], "did you mean --learn-rate-schedule?"),
    ],
)
def test_what_cannot_be_used(pictures, tmp_path, words, message):
    out = tmp_path / "run"
    (line,) = small.own_lines(small.train(None, pictures, out, *words, check=2))
    assert line.startswith("mpidl: ") and message in line
    assert not out.exists() or not list(out.glob("*.h5"))
