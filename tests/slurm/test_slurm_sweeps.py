"""Test run/sweep.slurm and run/scaling.slurm on a real Slurm: stop requests and arrays."""

import jobs
import pytest
import tomli_w
import trainings

pytestmark = [pytest.mark.slow("slurm"), pytest.mark.timeout(240)]


@pytest.fixture
def start(submit, shapes, tmp_path):
    """Return a function that submits a sweep or study and returns its first Training."""

    def start_study(name, *options):
        if name == "sweep":
            common = {"network": trainings.NETWORK, "data": str(shapes), "batch_size": 50}
            common |= {"epochs": int(trainings.LENGTH[1]), "threads": 1}
            path = tmp_path / "seeds.toml"
            path.write_text(tomli_w.dumps({"train": common, "grid": {"seed": [0, 1]}}))
            words = [path, "--out", tmp_path / "sweep"]
            return submit(*options, name=name, words=words, out=tmp_path / "sweep" / "trial-001")
        words = trainings.train_words(shapes, tmp_path / "study", "--ranks", 2)
        return submit(*options, name=name, words=words, out=tmp_path / "study" / "ranks-2")

    return start_study


@pytest.mark.parametrize("name", ["sweep", "scaling"])
def test_a_request_to_stop(start, expected_hash, name):
    """After a request to stop, the job must requeue itself and continue."""
    training = start(name)
    training.wait_for_steps()
    training.job.scancel("--batch", "--signal=USR1")
    training.job.wait_for_requeue()
    assert training.finish() == expected_hash


@pytest.mark.parametrize("name", ["sweep", "scaling"])
def test_scancel(start, expected_hash, name):
    training = start(name)
    training.wait_for_steps()
    training.job.scancel()
    training.job.wait("CANCELLED")
    assert training.job.facts()["Restarts"] == "0"
    assert start(name).finish() == expected_hash


def test_stop_file_of_a_trial(start):
    """A stop file must end only the trial in its folder; the job ends after the other trials."""
    training = start("sweep")
    training.wait_for_steps()
    (training.out / "stop").write_text("now\n")
    training.release()
    training.job.wait("FAILED")
    assert training.job.facts()["ExitCode"] == f"{jobs.STOPPED}:0"
    assert "stopped by a person: not requeued" in training.job.log()
    assert (training.out.parent / "trial-002" / "summary.json").exists()
    assert not (training.out / "summary.json").exists()


def test_stop_file_of_a_study(start):
    """A stop file must end the study, and the job must not be requeued."""
    training = start("scaling")
    training.wait_for_steps()
    (training.out / "stop").write_text("now\n")
    training.job.wait("FAILED")
    assert training.job.facts()["ExitCode"] == f"{jobs.STOPPED}:0"
    assert "stopped by a person: not requeued" in training.job.log()


def test_an_array_of_trials(start, expected_hash):
    first = start("sweep", "--array=1-2")
    first.release()
    for task in (1, 2):
        first.job.task(task).wait("COMPLETED")
    assert jobs.weights_hash(first.out) == expected_hash
    assert jobs.weights_hash(first.out.parent / "trial-002") != expected_hash
