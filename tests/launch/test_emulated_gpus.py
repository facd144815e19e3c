"""The commands on emulated GPUs, under a real mpirun: the same bytes on any number of ranks."""

import pool
import pytest
import small

EMULATED = str(small.ROOT) + "/tests/launch/emulated.py"
NETWORK = small.of("convolutions")
MORE = pytest.mark.slow("gpu")


def run(ranks, *words, env=None, check=0):
    return pool.run(ranks, EMULATED, *words, env=env, check=check)


def train(ranks, data, out, *options, network=NETWORK, check=0, **env):
    words = ["train", "--device", "gpu", "--batch-size", 50, "--threads", 1, *options]
    words += ["--network", network, "--data", data, "--out", out]
    return run(ranks, *words, env=env, check=check)


@pytest.fixture(scope="module")
def one(pictures, tmp_path_factory):
    """The results of a run on one rank: 3 mini-batches of 50 and one of 39, twice."""
    out = tmp_path_factory.mktemp("one")
    train(1, pictures, out, "--epochs", 2)
    return out


def same(one, other):
    expected, found = small.summary(one), small.summary(other)
    small.assert_same({"1": expected["weights_sha256"], "other": found["weights_sha256"]})
    assert (found["accuracy"], found["loss"]) == (expected["accuracy"], expected["loss"])
    return found


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=MORE), 3])
def test_ranks_that_share_a_gpu(ranks, one, pictures, tmp_path):
    train(ranks, pictures, tmp_path, "--epochs", 2)
    assert same(one, tmp_path)["ranks"] == ranks


@pytest.mark.parametrize(
    "most", [pytest.param("1000000", marks=MORE), "1000"]
)  # large sums go through the host
def test_ranks_with_a_gpu_each_whose_mpi_reads_device_memory(most, one, pictures, tmp_path):
    env = {"EMULATED_GPUS": "3", "MPIDL_TRANSPORT": "mpi", "EMULATED_GATHERED": most}
    train(3, pictures, tmp_path, "--epochs", 2, **env)
    same(one, tmp_path)


@MORE
def test_without_graphs(one, pictures, tmp_path):
    train(2, pictures, tmp_path, "--epochs", 2, "--graphs", "off")
    same(one, tmp_path)


@MORE
def test_stop_and_resume_on_more_ranks(one, pictures, tmp_path):
    train(2, pictures, tmp_path, "--epochs", 2, "--max-iterations", 5)
    words = ["train", "--resume", tmp_path, "--max-iterations", 8, "--epochs", 2]
    run(3, *words)
    same(one, tmp_path)


@pytest.mark.slow("gpu")
def test_options_that_decide_from_step_to_step(pictures, tmp_path):
    """Adam, its clipping and a schedule; a rank that has nothing to do."""
    words = ["--solver", "adam", "--learn-rate-schedule", "cosine", "--gradient-threshold", 0.1]
    words += ["--gradient-threshold-method", "global-l2norm", "--epochs", 2]
    words += ["--validation-data", "test", "--validation-frequency", 3]
    words += ["--output-network", "best-validation"]
    train(1, pictures, tmp_path / "one", *words)
    train(3, pictures, tmp_path / "three", *words, "--worker-load", "1,0,2")
    same(tmp_path / "one", tmp_path / "three")


@pytest.mark.parametrize(
    "kind, network, loss",
    [pytest.param("images", "shades", "mse", marks=MORE), ("pixels", "pixels", "crossentropy")],
)
@pytest.mark.parametrize("resident", ["0.5", pytest.param("0", marks=MORE)])
@pytest.mark.slow("gpu")
def test_targets(kind, network, loss, resident, pairs, tmp_path):
    """Mini-batches of 50 and of 31, of which two of three ranks have none; validation too."""
    words = ["--loss", loss, "--epochs", 2, "--validation-data", "test"]
    for ranks in (1, 3):
        how = {"network": small.of(network), "EMULATED_RESIDENT": resident}
        train(ranks, pairs[kind], tmp_path / str(ranks), *words, **how)
    same(tmp_path / "1", tmp_path / "3")


def test_predict(one, pictures, tmp_path):
    """Scores and activations, of ranks that share a GPU."""
    left = {}
    for ranks in (1, 3):
        words = ["predict", "--device", "gpu", "--model", one / "model.h5", "--data", pictures]
        scores, layer = tmp_path / f"{ranks}.csv", tmp_path / f"{ranks}.npy"
        run(ranks, *words, "--out", scores, "--top-k", 2)
        run(ranks, *words, "--out", layer, "--activations", "relu1")
        left[ranks] = scores.read_bytes(), layer.read_bytes()
    assert left[1] == left[3]
