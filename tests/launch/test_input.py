"""Test that input options give the same bytes on any number of ranks, threads and workers."""

import itertools

import jobs
import numpy as np
import pool
import pytest
from PIL import Image

import mpidl as dl

# Options for all steps: images of any size are resized, cropped, transformed and normalized.
WARPED = [
    *("--colour", "rgb", "--cover", "20x20", "--centre-crop", "20x18", "--flip", "xy"),
    *("--translate", 2, "--rotation", 15, "--scale", "0.9,1.2", "--shear", 5, "--fill", 40),
    *("--random-crop", "16x14", "--normalization", "zerocenter-element"),
    *("--flip-mode", "alternate", "--brightness", 0.3, "--contrast", 0.3, "--saturation", 0.5),
    *("--hue", 0.1, "--posterize", 0.5, "--posterize-bits", 3, "--erase", 0.5),
]
# Options for transformations that are not in `WARPED`. `RESIZED` also applies to pixel labels.
MIXED = [
    *("--mixup", 0.5, "--cutmix", 1, "--mix-probability", 0.9, "--shuffle", "every-epoch"),
    *("--label-smoothing", 0.1, "--test-flips", "xy"),
]
RESIZED = [
    *("--resized-crop", 8, "--crop-area", "0.3,1", "--flip", "x", "--rotation", 20),
    *("--contrast", 0.4, "--erase", 1, "--erase-value", 90, "--erase-aspect", "0.5,2"),
]


RANKS_THREADS_WORKERS = list(itertools.product((1, 2, 3), (1, 2), (1, 4)))


@pytest.mark.slow("ranks")
@pytest.mark.parametrize(
    "cases",
    [[(1, 1, 1), (2, 2, 4)], pytest.param(RANKS_THREADS_WORKERS, marks=pytest.mark.slow("ranks"))],
    ids=["some", "all"],
)
def test_the_cifar_network_by_its_recipe(cases, colours, tmp_path):
    """The recipe, which mirrors and shifts images, gives the same bytes on any number of ranks."""

    def weights(ranks, out, *words):
        words = ("--batch-size", 20, "--max-iterations", 1, *words)
        return jobs.trained_hash(ranks, colours, tmp_path / out, *words, network="cifar")

    hashes = {}
    for ranks, threads, workers in cases:
        words = ("--threads", threads, "--workers", workers)
        out = f"{ranks}-{threads}-{workers}"
        hashes[ranks, threads, workers] = weights(ranks, out, *words)
    jobs.assert_same_weights(hashes)
    plain = weights(1, "plain", "--threads", 1, "--flip", "none", "--translate", 0)
    assert plain != hashes[1, 1, 1]


@pytest.fixture(scope="module")
def warped(sizes, tmp_path_factory):
    """Train with different settings; return {(ranks, workers, prefetch): output folder}."""
    base = tmp_path_factory.mktemp("warped")
    folders = {}
    for ranks, workers, prefetch in ((1, 1, 2), (2, 4, 3), (3, 2, 0)):
        out = base / f"{ranks}-{workers}-{prefetch}"
        words = ("--workers", workers, "--prefetch", prefetch, "--epochs", 2, "--threads", 1)
        jobs.train(ranks, sizes, out, *WARPED, *words)
        folders[ranks, workers, prefetch] = out
    return folders


def test_warped_images(warped):
    jobs.assert_same_weights({case: jobs.weights_hash(out) for case, out in warped.items()})
    assert len({(out / "model.h5").read_bytes() for out in warped.values()}) == 1


def test_negative_control_another_seed(sizes, warped, tmp_path):
    words = (*WARPED, "--seed", 1, "--epochs", 2, "--threads", 1)
    other = jobs.trained_hash(1, sizes, tmp_path, *words)
    with pytest.raises(AssertionError, match="depend on the ranks"):
        jobs.assert_same_weights({1: other, 2: jobs.weights_hash(warped[1, 1, 2])})


def test_resumed_on_other_ranks(sizes, warped, tmp_path):
    words = ("--epochs", 2, "--threads", 1, "--max-iterations", 1)
    jobs.train(3, sizes, tmp_path, *WARPED, *words)
    jobs.resume(2, tmp_path, "--max-iterations", "none", "--threads", 1, "--workers", 3)
    expected = jobs.weights_hash(warped[1, 1, 2])
    jobs.assert_same_weights({1: expected, "resumed": jobs.weights_hash(tmp_path)})
    text = f"--resume: the run in {tmp_path} cannot continue: --flip was xy, is x"
    assert jobs.refusal(jobs.resume(1, tmp_path, "--flip", "x", check=2)) == text


@pytest.mark.slow("jobs")
def test_replayed_steps_of_mixed_images_on_any_ranks_and_threads(pictures, tmp_path):
    """Replayed and eager steps give the same bytes, also if the run is stopped and resumed.

    An epoch of 189 images has 3 mini-batches of 50 and one of 39.
    """
    words = (*MIXED, "--epochs", 2)
    hashes = {}
    for ranks, threads, graphs in (*itertools.product((1, 2, 3), (1, 2), ("auto",)), (1, 1, "off")):
        out = f"{ranks}-{threads}-{graphs}"
        options = (*words, "--threads", threads, "--graphs", graphs)
        hashes[out] = jobs.trained_hash(ranks, pictures, tmp_path / out, *options)
    jobs.train(3, pictures, tmp_path / "halted", *words, "--threads", 1, "--max-iterations", 5)
    jobs.resume(2, tmp_path / "halted", "--max-iterations", "none", "--threads", 2)
    hashes["resumed"] = jobs.weights_hash(tmp_path / "halted")
    jobs.assert_same_weights(hashes)


@pytest.mark.slow("jobs")
@pytest.mark.parametrize(
    "kind, function, words",
    [
        ("classes", "small", ()),
        ("mixed", "small", MIXED),
        ("pixels", "pixels", ("--ignore-label", 255)),
        ("images", "shades", ("--loss", "mse")),
    ],
)
def test_images_with_their_targets_on_any_ranks(kind, function, words, pictures, pairs, tmp_path):
    """A run stopped on three ranks and resumed on two ranks has the bytes of a run on one rank."""
    words, network = (*words, "--epochs", 2, "--learning-rate", 0.01), jobs.network(function)
    data, halted = pairs.get(kind, pictures), tmp_path / "halted"

    def weights(out, *options):
        return jobs.trained_hash(1, data, tmp_path / out, *options, *words, network=network)

    expected = weights("1", *RESIZED, "--threads", 2)
    options = (*RESIZED, *words, "--threads", 1, "--max-iterations", 1)
    jobs.train(3, data, halted, *options, "--workers", 3, network=network)
    jobs.resume(2, halted, "--max-iterations", "none", "--threads", 1, "--workers", 2)
    jobs.assert_same_weights({1: expected, "resumed": jobs.weights_hash(halted)})
    test = [jobs.summary(out)["loss"] for out in (tmp_path / "1", halted)]
    assert test[0] == test[1]
    assert weights("plain", "--random-crop", 8, "--threads", 1) != expected


def test_prediction_preprocesses_images_as_the_training_did(sizes, warped, tmp_path):
    model = warped[1, 1, 2] / "model.h5"
    scores = {}
    for ranks in (1, 3):
        out = tmp_path / f"{ranks}.csv"
        jobs.predict(model, sizes, "--out", out, ranks=ranks)
        scores[ranks] = out.read_bytes()
    assert scores[1] == scores[3]
    # The expected images are resized and cropped with Pillow. The network crops the centre and
    # subtracts the mean.
    net, facts = dl.load_model(model)
    assert facts["normalization"] == "zerocenter-element" and net.input_shape == (3, 16, 14)
    paths = sorted(sizes.glob("*/*"))
    images = np.stack([preprocessed(path) for path in paths])
    expected = net.predict(images[:, :, 2:18, 2:16])
    rows = [line.split(",") for line in scores[1].decode().splitlines()[1:]]
    predicted = np.array([[float(v) for v in row[2:]] for row in rows])
    assert [row[0] for row in rows] == [str(path) for path in paths]
    assert abs(predicted - expected).max() < 1e-6


def preprocessed(path):
    """Return the image resized and cropped to 20x18, computed with Pillow only."""
    image = Image.open(path).convert("RGB")
    factor = max(20 / image.height, 20 / image.width)
    size = (max(20, int(image.width * factor + 0.5)), max(20, int(image.height * factor + 0.5)))
    image = image.resize(size, Image.Resampling.BILINEAR)
    left, top = (image.width - 18) // 2, (image.height - 20) // 2
    return np.asarray(image.crop((left, top, left + 18, top + 20))).transpose(2, 0, 1)


def test_preview(sizes, tmp_path):
    path = tmp_path / "preview.png"
    words = jobs.command("train", *WARPED, "--preview", path, data=sizes)
    result = pool.run(2, *words, check=0)
    assert jobs.output_lines(result)[-1] == f"Preview: {path}"
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width > 8 * 14 and image.height > 10 * 20
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "words, text",
    [
        (("--random-crop", 30), "--random-crop 30x30: expected at most the size of the images"),
        (("--centre-crop", 30), "centre crop 30x30 (--centre-crop, or crop= in Python): expected"),
        (("--resize", "5x5"), "--resize and --cover: expected at most one of them"),
        (("--centre-crop", "big"), "--centre-crop must be HEIGHTxWIDTH such as 224x192, or 224, "),
        (("--colour", "grey"), "--colour must be gray or rgb, found grey"),
        (("--flip", "z"), "--flip must be none, x, y or xy, found z"),
        (("--workers", 0), "--workers must be at least 1, found 0"),
        (("--normalization", "zero"), "--normalization must be none, rescale-zero-one"),
    ],
)
def test_unusable_options_are_refused(sizes, tmp_path, words, text):
    result = jobs.train(2, sizes, tmp_path / "out", *WARPED, *words, check=2)
    assert text in jobs.refusal(result) and not (tmp_path / "out").exists()
