"""Options of the data give the same bytes on any ranks, threads and workers, also resumed."""

import jobs
import pytest

SLOW = pytest.mark.slow("jobs")
BALANCED = ["--sampling", "balanced", "--shuffle", "every-epoch", "--translate", 1]
FOLD = ["--fold", "2/3", "--validation-frequency", 2, "--output-network", "best-validation"]


def hashes(data, folder, words, network=jobs.SMALL):
    """Return {ranks: hash of the weights} of a run on one rank, and of one that is resumed.

    The second run halts on 3 ranks with 2 workers, and ends on 2 ranks with 2 threads each.
    """
    words = ["--epochs", 2, *words]
    one, halted = folder / "1", folder / "halted"
    jobs.train(1, data, one, *words, "--threads", 1, network=network)
    jobs.train(
        *(3, data, halted, *words, "--threads", 1, "--workers", 2, "--max-iterations", 3),
        network=network,
    )
    assert jobs.summary(halted)["iterations"] == 3 < jobs.summary(one)["iterations"]
    jobs.resume(2, halted, "--max-iterations", "none", "--threads", 2, "--workers", 3)
    return {1: jobs.weights_hash(one), "3, then 2": jobs.weights_hash(halted)}


def assert_other_weights(data, folder, words, expected):
    """Negative control: without the option, the weights are others."""
    out = folder / "control"
    jobs.train(2, data, out, "--epochs", 2, "--threads", 1, *words)
    assert jobs.weights_hash(out) != expected


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    """A folder of 70, 25 and 4 images in three classes."""
    folder = jobs.draw_images(tmp_path_factory.mktemp("unequal") / "shapes")
    for name, count in (("box", 25), ("dot", 4)):
        for path in sorted((folder / name).iterdir())[count:]:
            path.unlink()
    return folder


def test_balanced_sampling(unequal, tmp_path):
    results = hashes(unequal, tmp_path, BALANCED)
    jobs.assert_same_weights(results)
    # 89 training images, 30 draws of each class: an epoch has 2 mini-batches of 50 and 40 images
    assert jobs.summary(tmp_path / "1")["iterations"] == 4
    assert_other_weights(unequal, tmp_path, BALANCED[2:], results[1])


@SLOW
def test_folds(pictures, tmp_path):
    results = hashes(pictures, tmp_path, FOLD)
    jobs.assert_same_weights(results)
    line = jobs.refusal(jobs.resume(1, tmp_path / "halted", "--fold", "1/3", check=2))
    assert "--fold was 2/3, is 1/3" in line
    assert_other_weights(pictures, tmp_path, ["--fold", "1/3", *FOLD[2:]], results[1])


REFUSED = {
    "balanced, never": (
        ["--sampling", "balanced", "--shuffle", "never"],
        "--sampling balanced and --shuffle never: expected a random order",
    ),
    "two validations": (
        ["--fold", "1/3", "--validation-data", "test"],
        "--validation-data test and --fold 1/3: expected at most one of them",
    ),
    "fold": (["--fold", "4/3"], "--fold 4/3: expected I/K with 1 <= I <= K and at least 2 folds"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(pictures, tmp_path, case):
    words, text = REFUSED[case]
    assert text in jobs.refusal(jobs.train(None, pictures, tmp_path / "run", *words, check=2))
