"""Test that commands on emulated GPUs give the same bytes on any number of ranks."""

import jobs
import pool
import pytest
import tomli_w
import trace_events
from launcher import mpirun

from mpidl.certificates import states
from mpidl.training.files import checkpoint, model_file

EMULATED = str(jobs.ROOT) + "/tests/launch/emulated.py"
NETWORK = jobs.network("convolutions")
SLOW = pytest.mark.slow("gpu")
CERTIFY = ["--certify", "--certify-every", 2, "--checkpoint-keep", 3]
# Many buckets go out during backward, and each of their values exceeds the limit of GATHERED.
BUCKETS = {"EMULATED_BUCKET": "256", "EMULATED_GATHERED": "16"}
CUDA_AWARE = {"EMULATED_GPUS": "4", "MPIDL_TRANSPORT": "mpi"}
NCCL = {"EMULATED_GPUS": "4", "EMULATED_NCCL": "1"}


def run(ranks, *words, env=None, check=0):
    return pool.run(ranks, EMULATED, *words, env=env, check=check)


def train(ranks, data, out, *options, network=NETWORK, check=0, **env):
    words = ["train", "--device", "gpu", "--batch-size", 50, "--threads", 1, *options]
    words += ["--network", network, "--data", data, "--out", out]
    return run(ranks, *words, env=env, check=check)


@pytest.fixture(scope="module")
def single(pictures, tmp_path_factory):
    """Return the folder of a run on one rank, with 3 mini-batches of 50 images and one of 39."""
    out = tmp_path_factory.mktemp("single")
    train(1, pictures, out, "--epochs", 1, *CERTIFY)
    return out


@pytest.mark.parametrize(
    "ranks, options, env",
    [
        (2, [], BUCKETS),
        pytest.param(3, [], {}, marks=SLOW),
        (3, [], NCCL | BUCKETS),
        pytest.param(2, [], NCCL, marks=SLOW),
        pytest.param(4, [], NCCL | BUCKETS, marks=SLOW),
        pytest.param(3, [], CUDA_AWARE | BUCKETS, marks=SLOW),
        pytest.param(2, [], CUDA_AWARE, marks=SLOW),
        pytest.param(2, ["--graphs", "off"], BUCKETS, marks=SLOW),
        pytest.param(2, ["--graphs", "off"], NCCL | BUCKETS, marks=SLOW),
    ],
    ids=[
        "2 share a GPU",
        "3 share a GPU, one bucket",
        "3 use NCCL",
        "2 use NCCL, one bucket",
        "4 use NCCL",
        "3 use CUDA-aware MPI",
        "2 use CUDA-aware MPI, one bucket",
        "2 share a GPU, no graphs",
        "2 use NCCL, no graphs",
    ],
)
def test_training_on_several_ranks(ranks, options, env, single, pictures, tmp_path):
    train(ranks, pictures, tmp_path, "--epochs", 1, *CERTIFY, *options, **env)
    jobs.assert_same_end(single, tmp_path)
    assert jobs.summary(tmp_path)["ranks"] == ranks
    expected, recorded = (jobs.states(folder) for folder in (single, tmp_path))
    assert recorded == expected and list(recorded) == [0, 2, 3, 4]
    for iteration, path in checkpoint.kept_paths(tmp_path).items():
        digests = states.table_digests(model_file.read(path)[0])
        assert digests == recorded[iteration]["tables"]


@pytest.mark.parametrize(
    "network",
    ["convolutions"]
    + [pytest.param(n, marks=SLOW) for n in ("varied", "bottlenecks", "inverted", "alexnet")],
)
def test_bf16_on_several_ranks(network, pictures, tmp_path):
    """Trainings in bf16 have the same bytes on 1, 2 and 3 ranks, and if resumed on other ranks."""
    words = ["--precision", "bf16", "--epochs", 1, "--max-iterations"]
    for ranks, env in ((1, {}), (2, BUCKETS), (3, NCCL | BUCKETS)):
        folder, end = tmp_path / str(ranks), 1 if ranks == 2 else 3
        train(ranks, pictures, folder, *words, end, network=jobs.network(network), **env)
    run(3, "train", "--resume", tmp_path / "2", "--max-iterations", 3)
    for folder in ("2", "3"):
        jobs.assert_same_end(tmp_path / "1", tmp_path / folder)
    assert jobs.summary(tmp_path / "1")["precision"] == "bf16"


@SLOW
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_a_timeline_has_the_work_of_the_gpus(graphs, single, pictures, tmp_path):
    train(2, pictures, tmp_path, "--epochs", 1, "--timeline", 3, "--graphs", graphs)
    jobs.assert_same_end(single, tmp_path)
    trace = trace_events.read(tmp_path / "timeline.json.gz")
    for rank in (0, 1):
        names = [event["name"] for event in trace_events.complete(trace, rank, "gpu")]
        assert names.count("update") == 3
        assert ("forward / conv2+batchnorm2+relu2" in names) == (graphs == "off")
    sums = {event["name"] for event in trace["traceEvents"] if event["ph"] == "b"}
    assert {"forward / conv2+batchnorm2+relu2", "sums of gradients"} <= sums


@SLOW
def test_mixed_images_on_several_ranks(single, pictures, tmp_path):
    words = ["--epochs", 1, "--mixup", 0.5, "--cutmix", 1, "--label-smoothing", 0.1]
    words += ["--shuffle", "every-epoch"]
    for ranks in (1, 3):
        train(ranks, pictures, tmp_path / str(ranks), *words)
    jobs.assert_same_end(tmp_path / "1", tmp_path / "3")
    assert jobs.weights_hash(tmp_path / "1") != jobs.weights_hash(single)


@SLOW
def test_stop_and_resume_on_more_ranks(single, pictures, tmp_path):
    train(2, pictures, tmp_path, "--epochs", 1, "--max-iterations", 2)
    words = ["train", "--resume", tmp_path, "--max-iterations", 4, "--epochs", 1]
    run(3, *words)
    jobs.assert_same_end(single, tmp_path)


@pytest.mark.slow("gpu")
def test_options_that_decide_during_the_training(pictures, tmp_path):
    """Adam with clipping, a schedule and validation gives the same bytes if one rank is idle."""
    words = ["--solver", "adam", "--learn-rate-schedule", "cosine", "--gradient-threshold", 0.1]
    words += ["--gradient-threshold-method", "global-l2norm", "--epochs", 2]
    words += ["--validation-data", "test", "--validation-frequency", 3]
    words += ["--output-network", "best-validation"]
    train(1, pictures, tmp_path / "1", *words)
    train(3, pictures, tmp_path / "3", *words, "--worker-load", "1,0,2")
    jobs.assert_same_end(tmp_path / "1", tmp_path / "3")


@pytest.mark.parametrize(
    "kind, network, loss",
    [("images", "shades", "mse"), ("pixels", "pixels", "crossentropy")],
)
@pytest.mark.parametrize("resident, precision", [("0.5", "fp32"), ("0", "fp32"), ("0.5", "bf16")])
@SLOW
def test_targets(kind, network, loss, resident, precision, pairs, tmp_path):
    """Training on images with targets gives the same bytes on 1 and 3 ranks.

    The mini-batches have 50 and 31 images. Of three ranks, two have none of the 9 test images.
    """
    words = ["--loss", loss, "--epochs", 2, "--validation-data", "test", "--precision", precision]
    for ranks in (1, 3):
        keywords = {"network": jobs.network(network), "EMULATED_RESIDENT": resident}
        train(ranks, pairs[kind], tmp_path / str(ranks), *words, **keywords)
    jobs.assert_same_end(tmp_path / "1", tmp_path / "3")


@SLOW
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_predict(precision, single, pictures, tmp_path):
    """Ranks that share a GPU must write the same scores and activations as a single rank."""
    files = {}
    for ranks in (1, 2):
        words = ["predict", "--device", "gpu", "--precision", precision, "--data", pictures]
        words += ["--model", single / "model.h5"]
        scores, layer = tmp_path / f"{ranks}.csv", tmp_path / f"{ranks}.npy"
        run(ranks, *words, "--out", scores, "--top-k", 2)
        run(ranks, *words, "--out", layer, "--activations", "relu1")
        files[ranks] = scores.read_bytes(), layer.read_bytes()
    assert files[1] == files[2]


def write_sweep(path, data, **tables):
    """Write a sweep file for GPUs, and return its path."""
    train = {"device": "gpu", "batch_size": 50, "threads": 1, "epochs": 1, "timeout": 30}
    train |= {"network": NETWORK, "data": str(data)}
    path.write_text(tomli_w.dumps({"train": train, **tables}))
    return path


@SLOW
@pytest.mark.parametrize("size", [1, 2])
def test_a_sweep_opens_a_gpu_for_each_trial(single, pictures, tmp_path, size):
    file = write_sweep(tmp_path / "sweep.toml", pictures, grid={"seed": [0, 1, 2]})
    words = ["sweep", file, "--out", tmp_path / "out", "--ranks-per-model", size]
    run(2, *words, env={"EMULATED_GPUS": "2"})
    jobs.assert_same_end(single, tmp_path / "out" / "trial-001")
    assert len({jobs.weights_hash(tmp_path / "out" / f"trial-00{i}") for i in (1, 2, 3)}) == 3


@SLOW
def test_an_exception_on_one_rank_with_gpus_ends_the_sweep(pictures, tmp_path):
    """An exception on one rank ends the job, but the failed trial is recorded.

    The same command can therefore continue with the other trials.
    """
    networks = [jobs.network("breaks_on_odd_ranks"), NETWORK]
    trials = [{"network": network} for network in networks]
    file = write_sweep(tmp_path / "sweep.toml", pictures, trial=trials)
    words = ["sweep", file, "--out", tmp_path / "out", "--ranks-per-model", 2]
    result = mpirun(2, EMULATED, *words, env=jobs.without_plots())
    assert result.returncode == 1
    assert "mpidl: rank 1 failed: this network breaks on odd ranks" in result.stderr
    result = run(2, *words, check=1)
    assert "Before: 1 failed; 1 to train" in result.stdout
    assert (tmp_path / "out" / "trial-002" / "summary.json").exists()


@SLOW
def test_an_audit_on_other_ranks(single, pictures):
    """A run on one GPU is replayed on two; CPUs compute differently, which the audit says."""
    words = ["audit", single, "--data", pictures, "--threads", 1]
    lines = run(2, *words, "--device", "gpu", env=NCCL, check=0).stdout.splitlines()
    assert lines[-1].startswith("equal: nothing differs, "), lines
    assert len([line for line in lines if line.startswith("iterations ")]) > 1
    lines = pool.run(1, "-m", "mpidl.audit", *words[1:], "--device", "cpu", check=1).stdout
    assert "; cause: the arithmetic of this machine" in lines and "--device gpu" in lines
