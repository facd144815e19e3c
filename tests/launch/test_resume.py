"""Test that a resumed run ends with an uninterrupted run's bytes, on any number of ranks."""

import shutil
from pathlib import Path

import jobs
import pytest

from mpidl import numerics
from mpidl.training.files import model_file


@pytest.fixture(scope="module")
def uninterrupted(pictures, tmp_path_factory):
    """Return the folder of an uninterrupted run of two epochs (8 iterations)."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    jobs.train(1, pictures, out, "--epochs", 2)
    return out


@pytest.fixture(scope="module")
def halted(pictures, tmp_path_factory):
    """Return the folder of a run on 2 ranks that stopped in the second epoch.

    The run's two checkpoints are from iterations 6 and 5.
    """
    out = tmp_path_factory.mktemp("halted") / "run"
    limits = ["--epochs", 2, "--max-iterations", 6, "--checkpoint-every", 5]
    jobs.train(2, pictures, out, *limits)
    assert jobs.summary(out)["iterations"] == 6
    return out


@pytest.fixture
def copy(halted, tmp_path):
    """Return a copy of the stopped run's folder, for a test that resumes the run."""
    return shutil.copytree(halted, tmp_path / "run")


def assert_same_run(expected, out):
    jobs.assert_same_end(expected, out)
    assert jobs.rehash(out / "model.h5") == jobs.weights_hash(expected)
    assert jobs.iterations(out) == list(range(1, 2 * jobs.ITERATIONS + 1))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow("jobs")), 3])
def test_on_other_ranks(copy, uninterrupted, ranks):
    result = jobs.resume(ranks, copy, "--max-iterations", "none")
    assert "Resumed after iteration 6, in epoch 2" in result.stdout
    assert_same_run(uninterrupted, copy)
    assert jobs.summary(copy)["ranks"] == ranks


@pytest.mark.slow("jobs")
def test_all_kinds_of_layers_on_other_ranks(pictures, tmp_path):
    keywords, hashes = {"network": jobs.network("varied")}, {}
    for stop in (None, 6):
        out, limits = tmp_path / str(stop), ["--epochs", 2, "--threads", 1]
        limits += ["--max-iterations", stop] if stop else []
        jobs.train(1 if stop is None else 2, pictures, out, *limits, **keywords)
        if stop:
            jobs.resume(3, out, "--max-iterations", "none", "--threads", 2)
        hashes[f"stopped after {stop}"] = jobs.weights_hash(out)
    jobs.assert_same_weights(hashes)


@pytest.mark.parametrize("ranks", [None, pytest.param(2, marks=pytest.mark.slow("jobs"))])
def test_a_checkpoint_of_another_arithmetic_is_refused(copy, ranks):
    path = copy / "checkpoint.h5"
    tables, attributes = model_file.read(path)
    attributes |= {"numerics": numerics.VERSION + 1, "mpidl_version": "7.8\n"}
    path.write_bytes(model_file.pack(tables, attributes))
    line = jobs.refusal(jobs.resume(ranks, copy, check=2))
    assert line == (
        f"--resume {copy}: expected a checkpoint of numerics {numerics.VERSION}, found one of "
        f"numerics {numerics.VERSION + 1}, whose arithmetic gives other weights: to continue "
        "the run, use mpidl 7.8\\n, which wrote the checkpoint"
    )
    # Weights are weights: a newer model is the start of a training.
    jobs.train(1, None, copy / "new", "--max-iterations", 1, "--weights", path, network=None)


def test_a_torn_checkpoint_is_skipped(copy, uninterrupted):
    path = copy / "checkpoint.h5"
    path.write_bytes(path.read_bytes()[:-1000])
    result = jobs.resume(2, copy, "--max-iterations", "none")
    (warning,) = jobs.error_lines(result)
    assert warning.startswith(f"warning: {path}: ")
    assert warning.endswith("continuing from checkpoint-previous.h5")
    assert "Resumed after iteration 5, in epoch 2" in result.stdout
    assert_same_run(uninterrupted, copy)


def test_two_torn_checkpoints(copy):
    for name in ("checkpoint.h5", "checkpoint-previous.h5"):
        (copy / name).write_bytes(b"torn")
    line = jobs.refusal(jobs.resume(None, copy, check=2))
    assert line.startswith(f"--resume {copy}: no checkpoint can be loaded: ")


def test_from_a_kept_checkpoint(pictures, uninterrupted, tmp_path):
    """A run continues in another folder from a checkpoint that it kept, and keeps its files."""
    first, second = tmp_path / "first", tmp_path / "second"
    jobs.train(2, pictures, first, "--epochs", 2, "--checkpoint-keep", 2)
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    path = first / "checkpoints" / "00000002.h5"
    result = jobs.resume(1, path, "--out", second)
    assert "Resumed after iteration 2, in epoch 1" in result.stdout
    assert_same_run(uninterrupted, second)
    assert before == {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    names = [f"0000000{iteration}.h5" for iteration in (0, 2, 4, 6, 8)]
    for folder in (first, second):
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == names
    for options in ([], ["--out", first]):
        line = jobs.refusal(jobs.resume(None, path, *options, check=2))
        assert line.startswith(f"--resume {path}: expected --out FOLDER with another folder")
    torn = tmp_path / "torn.h5"
    torn.write_bytes(path.read_bytes()[:-1000])
    line = jobs.refusal(jobs.resume(None, torn, "--out", tmp_path / "third", check=2))
    assert "no checkpoint can be loaded: " in line and str(torn) in line


def test_more_epochs_and_another_folder(pictures, uninterrupted, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    jobs.train(2, pictures, first, "--epochs", 1)
    result = jobs.resume(1, first)
    assert "Resumed after iteration 4, the end of epoch 1; increase --epochs" in result.stdout
    jobs.resume(1, first, "--epochs", 2, "--out", second)
    assert_same_run(uninterrupted, second)
    assert jobs.iterations(first) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", 1], "--seed was 0, is 1"),
        (["--batch-size", 49], "--batch-size was 50, is 49"),
        (["--epochs", 1], "--epochs was 2, is 1 (it may only increase)"),
        (["--network", "digits"], "--network: layer conv1 differs in"),
    ],
)
def test_a_resumed_run_refuses_changed_options(halted, options, message):
    before = {path.name: path.read_bytes() for path in halted.iterdir()}
    line = jobs.refusal(jobs.resume(None, halted, *options, check=2))
    assert line.startswith("--resume: ") and message in line
    assert {path.name: path.read_bytes() for path in halted.iterdir()} == before


def test_other_images(halted, tmp_path):
    other = jobs.draw_images(tmp_path / "other", per_class=69)
    line = jobs.refusal(jobs.resume(None, halted, "--data", other, check=2))
    assert "--data: the images are not those of the run" in line


def test_a_checkpoint_does_not_choose_the_code_that_runs(pictures, tmp_path):
    """A changed Python file runs only if --network is repeated; an unchanged one runs anyway."""
    code, out, executed = tmp_path / "net.py", tmp_path / "run", tmp_path / "executed"
    source = Path(jobs.SMALL.rpartition(":")[0]).read_text()
    code.write_text(source)
    jobs.train(1, pictures, out, "--max-iterations", 1, network=f"{code}:small")
    jobs.resume(2, out, "--max-iterations", 2)
    code.write_text(f"{source}\nopen({str(executed)!r}, 'w').close()\n")
    line = jobs.refusal(jobs.resume(2, out, "--max-iterations", 3, check=2))
    assert f"expected {code} with sha256 " in line and f"repeat --network {code}:small" in line
    assert not executed.exists()
    jobs.resume(2, out, "--max-iterations", 3, "--network", f"{code}:small")
    assert executed.exists() and jobs.iterations(out) == [1, 2, 3]
    jobs.resume(1, out, "--max-iterations", 4)  # the new checkpoint contains the new digest
