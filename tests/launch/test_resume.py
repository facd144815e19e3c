"""A run that was stopped ends with the bytes of one that was not, on any number of ranks."""

import shutil
import signal

import pytest
import small
from launcher import finish, start

STOPPED = 75


@pytest.fixture(scope="module")
def whole(pictures, tmp_path_factory):
    """The folder of a run of two epochs (8 iterations) that nothing stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    small.train(1, pictures, out, "--epochs", 2)
    return out


@pytest.fixture(scope="module")
def halted(pictures, tmp_path_factory):
    """The folder of a run that 2 ranks left after 6 of its iterations, in the second epoch.

    Its checkpoints are of iterations 6 and 5.
    """
    out = tmp_path_factory.mktemp("halted") / "run"
    limits = ["--epochs", 2, "--max-iterations", 6, "--checkpoint-every", 5]
    small.train(2, pictures, out, *limits)
    assert small.summary(out)["iterations"] == 6
    return out


@pytest.fixture
def copy(halted, tmp_path):
    """A copy of that folder, to go on in."""
    return shutil.copytree(halted, tmp_path / "run")


def assert_the_same_end(whole, out):
    expected, found = small.summary(whole), small.summary(out)
    for name in ("weights_sha256", "accuracy", "loss", "iterations", "epochs"):
        assert found[name] == expected[name], name
    assert small.rehash(out / "model.h5") == expected["weights_sha256"]
    assert small.iterations(out) == list(range(1, 2 * small.ITERATIONS + 1))


@pytest.mark.parametrize("ranks", [1, 3])
def test_on_other_ranks(copy, whole, ranks):
    result = small.resume(ranks, copy, "--max-iterations", "none")
    assert "Resumed after iteration 6, in epoch 2" in result.stdout
    assert_the_same_end(whole, copy)
    assert small.summary(copy)["ranks"] == ranks


def test_a_torn_checkpoint_is_passed_over(copy, whole):
    path = copy / "checkpoint.h5"
    path.write_bytes(path.read_bytes()[:-1000])
    result = small.resume(2, copy, "--max-iterations", "none")
    (warning,) = small.own_lines(result)
    assert warning.startswith(f"warning: {path}: ")
    assert warning.endswith("going on from checkpoint-previous.h5")
    assert "Resumed after iteration 5, in epoch 2" in result.stdout
    assert_the_same_end(whole, copy)


def test_two_torn_checkpoints(copy):
    for name in ("checkpoint.h5", "checkpoint-previous.h5"):
        (copy / name).write_bytes(b"torn")
    result = small.resume(None, copy, check=2)
    (line,) = small.own_lines(result)
    assert line.startswith(f"mpidl: --resume {copy}: no checkpoint can be loaded: ")


def test_more_epochs_and_another_folder(pictures, whole, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    small.train(2, pictures, first, "--epochs", 1)
    result = small.resume(1, first)
    assert "Resumed after iteration 4, the end of epoch 1; a larger --epochs" in result.stdout
    small.resume(1, first, "--epochs", 2, "--out", second)
    assert_the_same_end(whole, second)
    assert small.iterations(first) == [1, 2, 3, 4]


def test_after_a_signal(pictures, tmp_path):
    """The place where it stops is chance; both runs are ended five iterations behind it."""
    out, reference = tmp_path / "stopped", tmp_path / "reference"
    words = small.command("train", "--epochs", 10**6, "--batch-size", 50, data=pictures, out=out)
    with start(2, *words, env=small.without_plots()) as job:
        for line in job.stdout:
            if line.startswith("Epoch: 2,"):
                break
        job.send_signal(signal.SIGUSR1)
        result = finish(job)
    assert result.returncode == STOPPED
    end = small.iterations(out)[-1] + 5
    small.resume(3, out, "--max-iterations", end)
    small.train(1, pictures, reference, "--epochs", 10**6, "--max-iterations", end)
    assert small.summary(out)["weights_sha256"] == small.summary(reference)["weights_sha256"]
    assert small.iterations(out) == list(range(1, end + 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", 1], "--seed was 0, is 1"),
        (["--batch-size", 49], "--batch-size was 50, is 49"),
        (["--epochs", 1], "--epochs was 2, is 1 (it may only increase)"),
        (["--network", "digits"], "--network: layer conv1 differs in"),
    ],
)
def test_what_must_not_change(halted, options, message):
    before = {path.name: path.read_bytes() for path in halted.iterdir()}
    (line,) = small.own_lines(small.resume(None, halted, *options, check=2))
    assert line.startswith("mpidl: --resume: ") and message in line
    assert {path.name: path.read_bytes() for path in halted.iterdir()} == before


def test_other_images(halted, tmp_path):
    other = small.draw(tmp_path / "other", per_class=69)
    (line,) = small.own_lines(small.resume(None, halted, "--data", other, check=2))
    assert "--data: the images are not those of the run" in line
