"""Define fixtures for the cluster and for trainings on the cluster."""

import shutil
import tempfile
from pathlib import Path

import cluster as slurm
import jobs
import pytest
import trainings


@pytest.fixture(scope="session")
def cluster():
    """Yield a Slurm of three nodes; skip the tests if it cannot be started here."""
    if reason := slurm.why_not():
        pytest.skip(f"no Slurm on this machine: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="mpidl-slurm-"))  # a short path
    try:
        with slurm.Cluster(folder) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """Return a folder of 210 small images in three classes."""
    return jobs.draw_images(tmp_path_factory.mktemp("shapes") / "shapes")


@pytest.fixture(scope="session")
def expected_hash(shapes, tmp_path_factory):
    """Return the hash of the weights after training by `trainings.train_words` on one rank."""
    out = tmp_path_factory.mktemp("one-rank") / "run"
    jobs.train(1, shapes, out, *trainings.LENGTH, network=trainings.NETWORK)
    return jobs.weights_hash(out)


@pytest.fixture
def submit(cluster, shapes, tmp_path):
    """Yield a function that submits run/NAME.slurm. Submitted jobs end with the test.

    By default, the job is the training of `trainings.train_words`, with additional `words` for
    mpidl.train.
    """
    submitted = []

    def submit(*options, name="train", words=(), out=tmp_path / "run", **keywords):
        if name == "train":
            words = trainings.train_words(shapes, tmp_path / "run", *words)
        training = trainings.start(cluster, tmp_path, name, words, out, options, **keywords)
        submitted.append(training)
        return training

    yield submit
    for training in submitted:
        cluster.finish("scancel", training.job.number)
    slurm.wait_until(cluster.is_idle, 0.2)
