"""Test that weights, losses and predictions have the same bytes on any number of ranks."""

import json
from pathlib import Path

import jobs
import launcher
import pool
import pytest
from building import kernels
from cpu_builds import BUILDS, FUSED_BUILDS, needs_kernels

from mpidl.backends.cpu.builds import has_native_bf16

PLAIN = """
import sys
import mpidl as dl

world = dl.World(plain=sys.argv[2] == "plain")
train = dl.ImageFolder(sys.argv[1], world)
net = dl.Network(dl.nn.zoo.digits((1, 12, 12), 3).layers, (1, 12, 12))
dl.train(net, train, dl.TrainingOptions(epochs=1, batch_size=100), world=world)
if world.rank == 0:
    print(dl.weights_sha256(net))
"""

RANKS = (1, 3)
CASES = [(1, 1), (3, 1), (2, 2)]  # (ranks, threads per rank)
SLOW = pytest.mark.slow("ranks")


def hashes_on(cases, data, folder, *options, **keywords):
    """Train with each (ranks, threads) in `cases`; return {(ranks, threads): hash}."""
    return {
        (ranks, threads): jobs.trained_hash(
            ranks, data, folder / f"{ranks}-{threads}", *options, "--threads", threads, **keywords
        )
        for ranks, threads in cases
    }


@pytest.fixture(scope="module")
def runs(pictures, tmp_path_factory):
    """Train the digits network with each of `CASES`; return {ranks: output folder}."""
    folders = {ranks: tmp_path_factory.mktemp("same") for ranks, _ in CASES}
    for ranks, threads in CASES:
        words = ["--epochs", 1, "--threads", threads]
        jobs.train(ranks, pictures, folders[ranks], *words, network="digits")
        assert jobs.summary(folders[ranks])["threads"] == threads
    return folders


def test_weights_and_losses(runs):
    """The weights, the model files and the losses of all iterations have the same bytes."""
    jobs.assert_same_weights({ranks: jobs.weights_hash(out) for ranks, out in runs.items()})
    keys, losses = ("kind", "loss", "accuracy"), set()
    for ranks, out in runs.items():
        jobs.assert_same_end(runs[1], out)
        s = jobs.summary(out)
        assert (s["ranks"], s["epochs"], s["iterations"]) == (ranks, 1, jobs.ITERATIONS)
        assert jobs.rehash(out / "model.h5") == s["weights_sha256"]
        losses.add(tuple(tuple(record[key] for key in keys) for record in jobs.metrics(out)))
    assert len({(out / "model.h5").read_bytes() for out in runs.values()}) == len(losses) == 1


@SLOW
@pytest.mark.parametrize("ranks, threads", [(1, 2), (3, 2), (4, 2), (7, 2), (2, 1), (4, 1), (7, 1)])
def test_weights_on_other_ranks_and_threads(ranks, threads, runs, pictures, tmp_path):
    words = ("--epochs", 1, "--threads", threads)
    weights = jobs.trained_hash(ranks, pictures, tmp_path, *words, network="digits")
    jobs.assert_same_weights({1: jobs.weights_hash(runs[1]), f"{ranks} x {threads}": weights})
    assert (tmp_path / "model.h5").read_bytes() == (runs[1] / "model.h5").read_bytes()


@SLOW
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("build", [*BUILDS, "numpy"])
def test_weights_by_build(build, precision, runs, pictures, tmp_path):
    """Each kernel build gives one hash on any number of ranks, and AVX-512 gives AVX2's hash."""
    words, keywords = ("--epochs", 1, "--precision", precision), {"network": "digits"}
    env = {"MPIDL_CPU": build}
    hashes = hashes_on([(1, 1), (3, 2)], pictures, tmp_path, *words, env=env, **keywords)
    if build in FUSED_BUILDS:
        best = jobs.trained_hash(1, pictures, tmp_path / "best", *words, **keywords)
        hashes["the best build"] = best
        assert (best == jobs.weights_hash(runs[1])) == (precision == "fp32")
    jobs.assert_same_weights(hashes)


@pytest.mark.parametrize(
    "network, images, cases, options",
    [
        # dropout, normalization across channels, transposed convolution, concatenation and other
        # layers
        (jobs.network("varied"), "pictures", [(1, 1), (3, 2)], ["--max-iterations", 2]),
        # normalization within images
        (jobs.network("image_normalized"), "pictures", [(1, 1), (3, 2)], ["--max-iterations", 2]),
        (jobs.network("recurrent"), "pictures", [(1, 1), (3, 2)], ["--max-iterations", 2]),
        # layers that several layers read, and sums of layers
        pytest.param("resnet", "pictures", [(1, 1), (3, 2)], ["--max-iterations", 3], marks=SLOW),
        # convolutions with each algorithm
        *(
            pytest.param(
                "cifar", "colours", CASES, ["--max-iterations", 2, "--winograd", policy], marks=SLOW
            )
            for policy in ("auto", "off", "fast")
        ),
    ],
    ids=[
        "varied",
        "image_normalized",
        "recurrent",
        "resnet",
        "cifar-auto",
        "cifar-off",
        "cifar-fast",
    ],
)
def test_weights_of_networks(network, images, cases, options, request, tmp_path):
    data = request.getfixturevalue(images)
    hashes = hashes_on(cases, data, tmp_path, *options, network=network)
    jobs.assert_same_weights(hashes)
    for (ranks, threads), weights in hashes.items():
        assert jobs.rehash(tmp_path / f"{ranks}-{threads}" / "model.h5") == weights


NARROW = Path(__file__).with_name("narrow.py")
NETWORKS = ("digits", "cifar", "bottlenecks", "inverted", "alexnet", "unet", "image_normalized")
NETWORKS += ("recurrent",)
QUICK = ("bottlenecks", "inverted", "image_normalized", "recurrent")


def narrow_hashes(ranks, folder, names, build_names, threads, iterations=5, **env):
    """Train networks in bfloat16; return {network: hashes, one per build and number of threads}."""
    lists = (",".join(map(str, items)) for items in (names, build_names, threads))
    words = NARROW, *lists, iterations, folder
    if env:  # the pool has read its environment
        result = launcher.mpirun(ranks, *words, env=jobs.without_plots() | env, check=0)
    else:
        result = pool.run(ranks, *words, check=0)
    return json.loads(result.stdout.splitlines()[-1])


@needs_kernels
@pytest.mark.parametrize(
    "names, ranks",
    [
        (QUICK, 3),
        *(pytest.param(NETWORKS, ranks, marks=SLOW) for ranks in (1, 2, 3, 7)),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else f"{len(value)} networks",
)
@pytest.mark.timeout(180)
def test_weights_in_bf16(names, ranks, tmp_path):
    """Builds with fused multiply-adds give one hash, on any numbers of ranks and threads.

    In the slow variants, these are all such builds. The other runs stop after two iterations, and
    another number of ranks resumes them.
    """
    native, emulating = FUSED_BUILDS[0], FUSED_BUILDS if names == NETWORKS else FUSED_BUILDS[-1:]
    expected = narrow_hashes(1, tmp_path / "one", names, [native], [1])
    narrow_hashes(ranks, tmp_path / "stopped", names, emulating, [1, 2], iterations=2)
    hashes = narrow_hashes(ranks % 3 + 1, tmp_path / "stopped", names, emulating, [1, 2])
    for name in names:
        jobs.assert_same_weights(dict(enumerate(expected[name] + hashes[name])))


@needs_kernels
@pytest.mark.skipif(
    not has_native_bf16(BUILDS[0]), reason="no AVX512_BF16: no build has native products in bf16"
)
@SLOW
def test_negative_control_order_of_products(tmp_path):
    """Kernels that add the even product of each pair first have another hash."""
    build, names = FUSED_BUILDS[-1], ["bottlenecks"]
    failed = kernels.compile_builds([build], tmp_path, kernels.find_compiler(), ["-DODD_FIRST=0"])
    assert {name: error.output for name, error in failed.items()} == {}
    native = narrow_hashes(1, tmp_path / "native", names, [BUILDS[0]], [1])
    swapped = narrow_hashes(
        *(1, tmp_path / "swapped", names, [build], [1]),
        MPIDL_KERNELS=str(tmp_path),
        MPIDL_CPU=build,
    )
    hashes = {"native": native["bottlenecks"][0], "even first": swapped["bottlenecks"][0]}
    with pytest.raises(AssertionError, match="depend on the ranks"):
        jobs.assert_same_weights(hashes)


def test_predict(runs, pictures, tmp_path):
    """`predict` writes the same scores, confusion matrix and activations on any number of ranks."""
    arguments = (runs[3] / "model.h5", pictures, "--batch-size", 50)
    outputs = {}
    for ranks in RANKS:
        out = tmp_path / str(ranks)
        out.mkdir()
        scores = ["--out", out / "scores.csv", "--confusion", out / "confusion.csv", "--top-k", 2]
        lines = jobs.predict(*arguments, *scores, ranks=ranks)
        lines = [line for line in lines if not line.startswith("warning: ")]
        assert "(210 images)" in lines[0] and lines[1].startswith("Top-2 accuracy: ")
        layer = ["--activations", "relu1", "--out", out / "relu1.h5"]
        jobs.predict(*arguments, *layer, ranks=ranks)
        outputs[ranks] = {path.name: path.read_bytes() for path in out.iterdir()}
        outputs[ranks]["lines"] = lines[:2]
    assert set(outputs[1]) == {"scores.csv", "confusion.csv", "relu1.h5", "lines"}
    assert outputs[1] == outputs[3]
    rows = [line.split(",") for line in outputs[1]["scores.csv"].decode().splitlines()]
    assert rows[0] == ["image", "predicted", *jobs.CLASSES] and len(rows) == 211
    for row in rows[1:]:
        values = [float(text) for text in row[2:]]
        assert abs(sum(values) - 1) < 1e-5
        assert row[1] == jobs.CLASSES[values.index(max(values))]


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
scores = dl.evaluate(net, images, world=world, batch_size=50, top_k=2, confusion=True)
arrays["counts"] = scores.confusion.counts
digests = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}
results = world.broadcast(world.gather((digests, scores[:4])))
assert all(result == results[0] for result in results)
if world.rank == 0:
    print(digests, scores[:4])
"""


def test_scores_in_a_program(runs, pictures, tmp_path):
    """A program computes the same scores and activations on any number of ranks.

    The 210 images form mini-batches of 50 images and a last one of 10 images, a single block on
    rank 0.
    """
    script = tmp_path / "scores.py"
    script.write_text(SCORES)
    model = runs[1] / "model.h5"
    printed = {ranks: pool.run(ranks, script, pictures, model, check=0).stdout for ranks in RANKS}
    assert printed[1].count("'") == 20 and len(set(printed.values())) == 1, printed


def test_negative_control_local_batchnorm(pictures, tmp_path):
    words = ("--max-iterations", 2, "--batchnorm", "local")
    hashes = hashes_on([(1, 1), (3, 1)], pictures, tmp_path, *words)
    with pytest.raises(AssertionError, match="depend on the ranks"):
        jobs.assert_same_weights(hashes)


def test_negative_control_plain_sums(pictures, tmp_path):
    """Negative control: with plain sums by MPI_Allreduce, the weights depend on the ranks."""
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)

    def hashes(sums):
        results = {ranks: pool.run(ranks, script, pictures, sums, check=0) for ranks in (1, 3)}
        return {ranks: result.stdout.splitlines()[-1] for ranks, result in results.items()}

    jobs.assert_same_weights(hashes("folded"))
    with pytest.raises(AssertionError, match="depend on the ranks"):
        jobs.assert_same_weights(hashes("plain"))
