"""The weights, and what a trained network says, are the same bytes on any number of ranks."""

import json

import pool
import pytest
import small
from launcher import mpirun

from mpidl.backends.cpu import builds

PLAIN = """
import json, sys
import mpidl as dl
from mpidl.training.files.model_file import weights_sha256

world = dl.World(plain=sys.argv[2] == "plain")
train = dl.ImageFolder(sys.argv[1], world)
net = dl.Network(dl.nn.zoo.digits((1, 12, 12), 3).layers, (1, 12, 12))
dl.train(net, train, dl.TrainingOptions(epochs=1, batch_size=100), world=world)
if world.rank == 0:
    print(json.dumps(weights_sha256(net)))
"""


BUILDS = [build for build in builds.built() if builds.runs_here(build)]
RANKS = (1, 2, 3)
MORE = pytest.mark.slow("ranks")


@pytest.fixture(scope="module")
def runs(pictures, tmp_path_factory):
    """{ranks: folder of its results}, of the digits network."""
    base = tmp_path_factory.mktemp("same")
    for ranks in RANKS:
        words = ["--epochs", 1, "--threads", 1, "--batch-size", 50]
        words = small.command(
            "train", *words, network="digits", data=pictures, out=base / str(ranks)
        )
        mpirun(ranks, *words, env=small.without_plots(), check=0)
    return {ranks: base / str(ranks) for ranks in RANKS}


def test_weights(runs):
    found = {ranks: small.summary(out) for ranks, out in runs.items()}
    small.assert_same({ranks: s["weights_sha256"] for ranks, s in found.items()})
    for ranks, s in found.items():
        assert (s["ranks"], s["epochs"], s["iterations"]) == (ranks, 1, small.ITERATIONS)
        assert (s["accuracy"], s["loss"]) == (found[1]["accuracy"], found[1]["loss"])


@MORE
@pytest.mark.parametrize("ranks", [4, 7])
def test_weights_on_more_ranks(ranks, runs, pictures, tmp_path):
    small.train(ranks, pictures, tmp_path, "--epochs", 1, "--threads", 1, network="digits")
    expected = small.summary(runs[1])["weights_sha256"]
    small.assert_same({1: expected, ranks: small.summary(tmp_path)["weights_sha256"]})
    assert (tmp_path / "model.h5").read_bytes() == (runs[1] / "model.h5").read_bytes()


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=MORE) for n in (1, 3, 4, 7))])
def test_weights_on_two_threads_a_rank(ranks, runs, pictures, tmp_path):
    small.train(ranks, pictures, tmp_path, "--epochs", 1, "--threads", 2, network="digits")
    found = small.summary(tmp_path)
    assert found["threads"] == 2
    expected = small.summary(runs[1])["weights_sha256"]
    small.assert_same({1: expected, f"{ranks} x 2": found["weights_sha256"]})


@MORE
@pytest.mark.parametrize("build", [*BUILDS, "numpy"])
def test_weights_by_build(build, runs, pictures, tmp_path):
    """Each build has one hash; those of AVX-512 and AVX2 are the same."""
    hashes = {}
    for ranks, threads in ((1, 1), (3, 2)):
        out = tmp_path / str(ranks)
        words = ("--epochs", 1, "--threads", threads)
        small.train(ranks, pictures, out, *words, network="digits", env={"MPIDL_CPU": build})
        hashes[ranks] = small.summary(out)["weights_sha256"]
    if build in ("x86-64-v4", "x86-64-v3") and BUILDS[0] in ("x86-64-v4", "x86-64-v3"):
        hashes["the best build"] = small.summary(runs[1])["weights_sha256"]
    small.assert_same(hashes)


@MORE
@pytest.mark.parametrize("policy", ["auto", "off", "fast"])
def test_weights_of_the_cifar_network(policy, colours, tmp_path):
    """Its convolutions run by every algorithm there is."""
    hashes = {}
    for ranks, threads in ((1, 1), (3, 1), (2, 2)):
        out = tmp_path / str(ranks)
        words = ("--max-iterations", 2, "--threads", threads, "--winograd", policy)
        small.train(ranks, colours, out, *words, network="cifar")
        hashes[ranks] = small.summary(out)["weights_sha256"]
    small.assert_same(hashes)


@MORE
def test_weights_of_the_residual_network(pictures, tmp_path):
    """Layers that several read, and sums of layers, on shares of other sizes."""
    hashes = {}
    for ranks, threads in ((1, 1), (3, 2)):
        out = tmp_path / str(ranks)
        words = ("--max-iterations", 3, "--threads", threads)
        small.train(ranks, pictures, out, *words, network="resnet")
        hashes[ranks] = small.summary(out)["weights_sha256"]
        assert small.rehash(out / "model.h5") == hashes[ranks]
    small.assert_same(hashes)


def test_weights_of_varied_layers(pictures, tmp_path):
    """Dropout, normalization across channels, transposed convolution, concatenation and others."""
    hashes = {}
    for ranks, threads in ((1, 1), (3, 1), (2, 2)):
        out = tmp_path / str(ranks)
        words = ("--max-iterations", 5, "--threads", threads)
        small.train(ranks, pictures, out, *words, network=small.of("varied"))
        hashes[ranks] = small.summary(out)["weights_sha256"]
    small.assert_same(hashes)


def test_the_hash_is_that_of_the_model_file(runs):
    for out in runs.values():
        assert small.rehash(out / "model.h5") == small.summary(out)["weights_sha256"]
    assert len({(out / "model.h5").read_bytes() for out in runs.values()}) == 1


def test_losses(runs):
    """Of each iteration, to the last bit."""
    losses = set()
    for out in runs.values():
        records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        losses.add(tuple((r["kind"], r["loss"], r["accuracy"]) for r in records))
    assert len(losses) == 1


def test_predict(runs, pictures, tmp_path):
    """Scores, which was taken for which, and what a layer computes."""
    words = ["--model", runs[3] / "model.h5", "--data", pictures, "--batch-size", 50]
    left = {}
    for ranks in (1, 2, 3):
        out = tmp_path / str(ranks)
        out.mkdir()
        more = ["--out", out / "scores.csv", "--confusion", out / "confusion.csv", "--top-k", 2]
        result = pool.run(ranks, *small.command("predict", *words, *more, network=None), check=0)
        lines = [line for line in small.printed(result) if not line.startswith("warning: ")]
        assert "(210 images)" in lines[0] and lines[1].startswith("Top-2 accuracy: ")
        more = ["--activations", "relu1", "--out", out / "relu1.h5"]
        pool.run(ranks, *small.command("predict", *words, *more, network=None), check=0)
        left[ranks] = {path.name: path.read_bytes() for path in out.iterdir()}
        left[ranks]["lines"] = lines[:2]
    assert set(left[1]) == {"scores.csv", "confusion.csv", "relu1.h5", "lines"}
    assert left[1] == left[2] == left[3]
    rows = [line.split(",") for line in left[1]["scores.csv"].decode().splitlines()]
    assert rows[0] == ["image", "predicted", *small.CLASSES] and len(rows) == 211
    for row in rows[1:]:
        values = [float(text) for text in row[2:]]
        assert abs(sum(values) - 1) < 1e-5
        assert row[1] == small.CLASSES[values.index(max(values))]


SCORES = """
import hashlib, sys
import mpidl as dl

world = dl.World()
images = dl.ImageFolder(sys.argv[1], world)
net, _ = dl.load_model(sys.argv[2])
arrays = {
    "predict": dl.predict(net, images, world=world, batch_size=50),
    "classify": dl.classify(net, images, world=world, batch_size=50),
    "conv1": dl.activations(net, images, "conv1", world=world, batch_size=50),
    "relu2": dl.activations(net, images, "relu2", world=world, batch_size=50),
}
found = dl.evaluate(net, images, world=world, batch_size=50, top_k=2, confusion=True)
arrays["counts"] = found.confusion.counts
digests = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}
everywhere = world.broadcast(world.gather((digests, found[:4])))
assert all(other == everywhere[0] for other in everywhere)  # all ranks have all of it
if world.rank == 0:
    print(digests, found[:4])
"""


def test_scores_in_a_program(runs, pictures, tmp_path):
    """210 images: mini-batches of 50 and of 10, which is a block for rank 0 and none for others."""
    script = tmp_path / "scores.py"
    script.write_text(SCORES)
    model = runs[1] / "model.h5"
    printed = {
        ranks: pool.run(ranks, script, pictures, model, check=0).stdout for ranks in (1, 2, 3)
    }
    assert printed[1].count("'") == 20 and len(set(printed.values())) == 1, printed


def test_negative_control_local_batchnorm(pictures, tmp_path):
    hashes = {}
    for ranks in (1, 3):
        out = tmp_path / str(ranks)
        small.train(ranks, pictures, out, "--max-iterations", 2, "--batchnorm", "local")
        hashes[ranks] = small.summary(out)["weights_sha256"]
    with pytest.raises(AssertionError, match="depend on the ranks"):
        small.assert_same(hashes)


def test_negative_control_plain_sums(pictures, tmp_path):
    """Sums by MPI_Allreduce: 7 blocks, so that each rank but one adds up several by itself."""
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)

    def hashes(how):
        results = {ranks: pool.run(ranks, script, pictures, how, check=0) for ranks in (1, 3)}
        return {ranks: json.loads(r.stdout.splitlines()[-1]) for ranks, r in results.items()}

    small.assert_same(hashes("folded"))
    with pytest.raises(AssertionError, match="depend on the ranks"):
        small.assert_same(hashes("plain"))
