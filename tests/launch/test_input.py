"""Augmented and normalized training as a command: the same bytes on any ranks, threads, workers."""

import itertools
import json

import numpy as np
import pool
import pytest
import small
from image_sets import pixels_of, save
from PIL import Image

import mpidl as dl

# All of it: a file of any size is decoded, covered, cut, turned, moved, cut at random, normalized.
WARPED = [
    *("--colour", "rgb", "--cover", "20x20", "--centre-crop", "20x18", "--flip", "xy"),
    *("--translate", 2, "--rotation", 15, "--scale", "0.9,1.2", "--shear", 5, "--fill", 40),
    *("--random-crop", "16x14", "--normalization", "zerocenter-element"),
]


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    """A folder of images of many sizes, gray and RGB, PNG and JPEG."""
    folder = tmp_path_factory.mktemp("sizes") / "set"
    random = np.random.default_rng(0)
    for c, name in enumerate(("bright", "dark")):
        for i in range(40):
            height, width = random.integers(20, 45, 2)
            pixels = pixels_of((c, i), 3 if i % 3 else 1, height, width) // 2 + 100 * c
            save(folder / name / f"{i:02}.{'png' if i % 2 else 'jpg'}", pixels)
    return folder


RANKS_THREADS_WORKERS = list(itertools.product((1, 2, 3), (1, 2), (1, 4)))


@pytest.mark.parametrize(
    "cases",
    [[(1, 1, 1), (3, 2, 4)], pytest.param(RANKS_THREADS_WORKERS, marks=pytest.mark.slow("ranks"))],
    ids=["some", "all"],
)
def test_the_cifar_network_by_its_recipe(cases, colours, tmp_path):
    """Its images are mirrored and moved by up to 4 pixels."""
    found = {}
    for how in cases:
        ranks, threads, workers = how
        out = tmp_path / "-".join(map(str, how))
        words = ("--max-iterations", 2, "--threads", threads, "--workers", workers)
        small.train(ranks, colours, out, *words, network="cifar")
        found[how] = small.summary(out)["weights_sha256"]
    small.assert_same(found)
    words = ("--max-iterations", 2, "--threads", 1, "--flip", "none", "--translate", 0)
    small.train(1, colours, tmp_path / "plain", *words, network="cifar")
    assert small.summary(tmp_path / "plain")["weights_sha256"] != found[1, 1, 1]


@pytest.fixture(scope="module")
def warped(sizes, tmp_path_factory):
    """{(ranks, workers, prefetch): folder} of the same run."""
    base = tmp_path_factory.mktemp("warped")
    found = {}
    for ranks, workers, prefetch in ((1, 1, 2), (1, 4, 3), (2, 2, 1), (3, 1, 0)):
        out = base / f"{ranks}-{workers}-{prefetch}"
        words = ("--workers", workers, "--prefetch", prefetch, "--epochs", 2, "--threads", 1)
        small.train(ranks, sizes, out, *WARPED, *words)
        found[ranks, workers, prefetch] = out
    return found


def test_warped_images(warped):
    small.assert_same({how: small.summary(o)["weights_sha256"] for how, o in warped.items()})
    assert len({(out / "model.h5").read_bytes() for out in warped.values()}) == 1


def test_negative_control_another_seed_draws_others(sizes, warped, tmp_path):
    small.train(1, sizes, tmp_path, *WARPED, "--seed", 1, "--epochs", 2, "--threads", 1)
    other = small.summary(tmp_path)["weights_sha256"]
    with pytest.raises(AssertionError, match="depend on the ranks"):
        small.assert_same({1: other, 2: small.summary(warped[1, 1, 2])["weights_sha256"]})


def test_resumed_on_other_ranks(sizes, warped, tmp_path):
    words = ("--epochs", 2, "--threads", 1, "--max-iterations", 1)
    small.train(3, sizes, tmp_path, *WARPED, *words)
    small.resume(2, tmp_path, "--max-iterations", "none", "--threads", 1, "--workers", 3)
    expected = small.summary(warped[1, 1, 2])["weights_sha256"]
    small.assert_same({1: expected, "resumed": small.summary(tmp_path)["weights_sha256"]})
    refused = small.resume(1, tmp_path, "--flip", "x", check=2)
    assert small.own_lines(refused) == [
        f"mpidl: --resume: the run in {tmp_path} cannot continue: --flip was xy, is x"
    ]


def test_the_model_shows_images_to_its_network_as_it_was_trained(sizes, warped, tmp_path):
    model = warped[1, 1, 2] / "model.h5"
    scores = {}
    for ranks in (1, 3):
        out = tmp_path / f"{ranks}.csv"
        words = small.command("predict", "--model", model, "--data", sizes, network=None, out=out)
        pool.run(ranks, *words, check=0)
        scores[ranks] = out.read_bytes()
    assert scores[1] == scores[3]
    # by hand: covered, cut, cut again in the centre, less the mean image, in float64
    net, about = dl.load_model(model)
    assert about["normalization"] == "zerocenter-element" and net.input_shape == (3, 16, 14)
    paths = sorted(sizes.glob("*/*"))
    images = np.stack([shown(path) for path in paths])
    expected = net.predict(images[:, :, 2:18, 2:16])
    rows = [line.split(",") for line in scores[1].decode().splitlines()[1:]]
    found = np.array([[float(v) for v in row[2:]] for row in rows])
    assert [row[0] for row in rows] == [str(path) for path in paths]
    assert abs(found - expected).max() < 1e-6


def shown(path):
    """An image as the options bring it to 20x18, by Pillow alone."""
    image = Image.open(path).convert("RGB")
    factor = max(20 / image.height, 20 / image.width)
    size = (max(20, int(image.width * factor + 0.5)), max(20, int(image.height * factor + 0.5)))
    image = image.resize(size, Image.Resampling.BILINEAR)
    left, top = (image.width - 18) // 2, (image.height - 20) // 2
    return np.asarray(image.crop((left, top, left + 18, top + 20))).transpose(2, 0, 1)


def test_preview(sizes, tmp_path):
    path = tmp_path / "seen.png"
    words = small.command("train", *WARPED, "--preview", path, data=sizes)
    found = pool.run(2, *words, check=0)
    assert small.printed(found)[-1] == f"Preview: {path}"
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width > 8 * 14 and image.height > 10 * 20
    assert json.dumps([p.name for p in tmp_path.iterdir()]) == '["seen.png"]'


@pytest.mark.parametrize(
    "words, text",
    [
        (("--random-crop", "30x30"), "--random-crop 30x30: expected at most the size of the"),
        (
            ("--centre-crop", "30x30"),
            "centre crop 30x30 (--centre-crop, or crop= in Python): expec",
        ),
        (("--resize", "5x5"), "--resize and --cover: expected one of them"),
        (("--centre-crop", "big"), "--centre-crop must be HEIGHTxWIDTH such as 224x192, or 224, "),
        (("--colour", "grey"), "--colour must be gray or rgb, found grey"),
        (("--flip", "z"), "--flip must be none, x, y or xy, found z"),
        (("--workers", 0), "--workers must be at least 1, found 0"),
        (("--normalization", "zero"), "--normalization must be none, rescale-zero-one"),
    ],
)
def test_what_is_refused(sizes, tmp_path, words, text):
    result = small.train(2, sizes, tmp_path / "out", *WARPED, *words, check=2)
    (line,) = small.own_lines(result)
    assert text in line and not (tmp_path / "out").exists()
