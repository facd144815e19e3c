"""Test the command explain: files, tables, the page of mistakes, errors, any number of ranks."""

import csv
import hashlib
import os
import re
import shutil

import jobs
import numpy as np
import pool
import pytest
from image_sets import refusal, save
from PIL import Image
from single_rank import numbers

import mpidl as dl
from mpidl.explanations import command, pictures

CLASSES, PER_CLASS, SIDE = ("ant", "bee", "cat"), 13, 12  # 39 images: 2 full blocks, and 7 images
METHODS = {
    "grad-cam": (),
    "occlusion": ("--window", "6", "--stride", "4x5"),
    "gradient": (),
    "integrated-gradients": ("--steps", "3"),
}
SLOW = pytest.mark.slow("jobs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a model, and images in three classes."""
    folder = tmp_path_factory.mktemp("explained")
    pixels = numbers("command", len(CLASSES) * PER_CLASS, 1, SIDE, SIDE, low=0, high=256)
    for i, image in enumerate(pixels.astype(np.uint8)):
        save(folder / "set" / CLASSES[i % 3] / f"{i:02}.png", image)
    layers = [dl.Conv2D(3, 6, padding=1), dl.BatchNorm(), dl.ReLU(), dl.MaxPool2D(2), dl.Dense(3)]
    net = dl.Network([*layers, dl.Softmax()], (1, SIDE, SIDE), seed=4)
    net.state = {
        name: numbers(name, *a.shape, low=0.5, dtype=np.float32) for name, a in net.state.items()
    }
    net.classes = CLASSES
    dl.save_model(folder / "model.h5", net)
    return folder


def explain(folder, ranks, out, *words, images=None, check=0):
    images = [folder / "set"] if images is None else images
    arguments = [folder / "model.h5", *images, "--out", folder / out, *words]
    return pool.run(ranks, "-m", "mpidl.explain", *arguments, check=check)


def hashes(out):
    """Return {name of a file: SHA-256}."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(out.iterdir())}


def table(out):
    return list(csv.DictReader((out / "table.csv").open()))


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name == "grad-cam" else SLOW) for name in METHODS],
)
def test_any_number_of_ranks_writes_the_same_files(folder, method):
    """The mini-batches have 20 images, so that 3 ranks share 2 blocks, of 16 and of 4 images.

    Negative control: another target changes the files.
    """
    words = ("--method", method, "--batch-size", 20, *METHODS[method])
    results = {}
    for ranks in (1, 2, 3):
        explain(folder, ranks, f"{method}-{ranks}", *words)
        results[ranks] = hashes(folder / f"{method}-{ranks}")
    assert len(results[1]) == 41 and "table.csv" in results[1]
    assert results[1] == results[2] == results[3]
    explain(folder, 2, f"{method}-other", *words, "--target", "bee")
    other = hashes(folder / f"{method}-other")
    name = "attributions.npy" if "gradient" in method else "maps.npy"
    assert other[name] != results[1][name]


def test_default_mini_batches_write_the_same_files(folder):
    """The default size of a mini-batch depends on the number of ranks, and changes no byte."""
    for ranks, threads in ((1, 2), (3, 1)):
        explain(folder, ranks, f"default-{ranks}", "--threads", threads)
    assert hashes(folder / "default-1") == hashes(folder / "default-3")


def test_the_files(folder):
    result = explain(folder, 1, "files", "--target", "true")
    net, store = dl.load_model(folder / "model.h5")[0], dl.ImageFolder(folder / "set")
    expected = dl.explain(net, store, target="true")
    maps = np.load(folder / "files" / "maps.npy")
    assert np.array_equal(maps, expected.maps) and maps.dtype == np.float32
    rows = table(folder / "files")
    names = np.array(CLASSES)
    assert [row["label"] for row in rows] == names[store.labels].tolist()
    assert [row["explained"] for row in rows] == names[store.labels].tolist()
    assert [row["predicted"] for row in rows] == names[expected.predicted].tolist()
    assert [row["image"] for row in rows] == [store.name(i) for i in range(len(store))]
    np.testing.assert_allclose([float(r["score"]) for r in rows], expected.scores, rtol=1e-5)
    chances = [float(row["probability"]) for row in rows]
    np.testing.assert_allclose(chances, expected.probabilities, atol=1e-4)
    assert rows[1]["picture"] == "01-03.png"
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["image", "label", "predicted", "explained", "score", "probability"]
    assert len(lines) == 22 and lines[-1].startswith("and 19 more images: ")
    with Image.open(folder / "files" / "01-03.png") as picture:
        assert picture.size == (192, 192)
        drawn = np.asarray(picture)[::16, ::16]
    assert np.array_equal(drawn, pictures.overlay(store.read([1])[0], maps[1], False))


def test_image_files(folder):
    """Files are explained in the order of the command line, and have no labels."""
    paths = [folder / "set" / "bee" / "04.png", folder / "set" / "ant" / "00.png"]
    explain(folder, 2, "two", "--method", "gradient", images=paths)
    store = dl.ImageFolder(folder / "set")
    indices = [store.files.index(name) for name in ("bee/04.png", "ant/00.png")]
    net = dl.load_model(folder / "model.h5")[0]
    expected = dl.explain(net, store.subset(indices), method="gradient")
    values = np.load(folder / "two" / "attributions.npy")
    assert np.array_equal(values, expected.attributions)
    assert [row["image"] for row in table(folder / "two")] == list(map(str, paths))
    assert "label" not in table(folder / "two")[0]


def test_a_page_of_mistakes(folder):
    for ranks in (1, 3):
        result = explain(folder, ranks, f"worst-{ranks}", "--worst", 4)
    assert hashes(folder / "worst-1") == hashes(folder / "worst-3")
    net, store = dl.load_model(folder / "model.h5")[0], dl.ImageFolder(folder / "set")
    scores = dl.predict(net, store)
    predicted = scores.argmax(axis=1)
    mistakes = np.nonzero(predicted != store.labels)[0]
    worst = mistakes[np.argsort(-scores[mistakes].max(axis=1), kind="stable")][:4]
    text = (folder / "worst-1" / "mistakes.html").read_text()
    captions = re.findall(r"<figcaption><b>(.*?)</b>(.*?)</figcaption>", text)
    assert [name for name, _ in captions] == [store.name(i) for i in worst]
    for i, (_, caption) in zip(worst, captions, strict=True):
        label = CLASSES[store.labels[i]]
        assert f"predicted {CLASSES[predicted[i]]}: probability {scores[i].max():.4f}" in caption
        assert f"true {label}: probability {scores[i, store.labels[i]]:.4f}" in caption
    assert text.count('src="data:image/png;base64,') == 12
    assert not re.search(r"(src|href)=\"(?!data:)", text) and "<script" not in text
    count = len(store) - len(mistakes)
    assert f"{count} of {len(store)} images are classified correctly" in result.stdout


def test_a_page_without_mistakes(folder):
    net, store = dl.load_model(folder / "model.h5")[0], dl.ImageFolder(folder / "set")
    right = np.nonzero(dl.classify(net, store) == store.labels)[0]
    for i in right:
        save(folder / "right" / store.files[i], store.read([i])[0])
    result = explain(folder, 2, "none", "--worst", 4, images=[folder / "right"])
    assert f"{len(right)} of {len(right)} images are classified correctly" in result.stdout
    assert "The 0 most confident mistakes" in (folder / "none" / "mistakes.html").read_text()


def test_images_with_nan_scores_are_not_classified_correctly(folder, tmp_path):
    net = dl.load_model(folder / "model.h5")[0]
    net.parameters["dense1.weight"][:, 0] = np.nan
    dl.save_model(tmp_path / "model.h5", net)
    result = explain(tmp_path, 1, "out", "--worst", 3, images=[folder / "set"])
    assert "0 of 39 images are classified correctly" in result.stdout


def test_an_image_that_cannot_be_read(folder):
    """Its map is NaN; the maps of the other images are the same."""
    for name in ("ant/00.png", "ant/03.png", "bee/01.png", "cat/02.png"):
        save(folder / "damaged" / name, dl.ImageFolder(folder / "set").read([0])[0])
    (folder / "damaged" / "ant" / "03.png").write_bytes(b"no image")
    words = ("--on-bad-image", "skip")
    for ranks in (1, 3):
        result = explain(folder, ranks, f"bad-{ranks}", *words, images=[folder / "damaged"])
        assert "Skipped images: 1 of 4" in result.stdout
    assert hashes(folder / "bad-1") == hashes(folder / "bad-3")
    maps = np.load(folder / "bad-1" / "maps.npy")
    assert np.isnan(maps).all(axis=(1, 2)).tolist() == [False, True, False, False]
    line = jobs.refusal(explain(folder, 2, "bad", images=[folder / "damaged"], check=2))
    assert "03.png" in line


def test_images_of_other_classes_than_those_of_the_network(folder, tmp_path):
    net = dl.Network([dl.Conv2D(3, 2, padding=1), dl.Dense(1), dl.Sigmoid()], (1, SIDE, SIDE))
    dl.save_model(tmp_path / "model.h5", net)
    explain(tmp_path, 2, "out", images=[folder / "set"])
    assert [row["label"] for row in table(tmp_path / "out")] == sorted(CLASSES * PER_CLASS)
    result = explain(tmp_path, 2, "out", "--worst", 3, images=[folder / "set"], check=2)
    assert "--worst: expected classes from 0 to 1, found 0 to 2" in jobs.refusal(result)


def test_maps_that_are_not_finite(folder, recwarn):
    """A broken network gives NaN and infinite entries; NaN is drawn like 0."""
    net = dl.load_model(folder / "model.h5")[0]
    net.parameters["conv1.weight"][0] = 1e38
    net.parameters["dense1.weight"][:, 0] = np.inf
    for method in METHODS:
        assert not np.isfinite(
            dl.explain(net, dl.ImageFolder(folder / "set"), method=method).maps
        ).all()
    values, image = np.array([[np.nan, np.inf, 1], [0, -np.inf, -1]]), np.zeros((1, 2, 3), np.uint8)
    for is_signed in (True, False):
        drawn = pictures.overlay(image, values, is_signed)
        assert np.array_equal(drawn[0, 0], drawn[1, 0]) and np.array_equal(drawn[0, 1], drawn[0, 2])
    assert not [w for w in recwarn if "explanations" in w.filename]


def test_a_file_that_cannot_be_written(folder):
    """All ranks finish computing before the error; no part of a file and no old table remain."""
    (folder / "blocked" / "00-00.png").mkdir(parents=True)
    result = explain(folder, 2, "blocked", "--batch-size", 20, check=2)
    line = jobs.refusal(result)
    assert "00-00.png: cannot be written: " in line
    assert sorted(os.listdir(folder / "blocked")) == ["00-00.png", "maps.npy"]


def test_refusals(folder, tmp_path):
    (tmp_path / "file").write_text("")
    words = [folder / "model.h5", folder / "set", "--out", tmp_path / "out"]
    for options, text in (
        (("--method", "grad"), "--method must be grad-cam, occlusion, gradient or integrated-"),
        (("--steps", "3"), "--steps: expected the method integrated-gradients, found grad-cam"),
        (("--window", "a"), "--window must be HEIGHTxWIDTH such as 224x192, or 224, found a"),
        (("--layer", "conv3"), "--layer: no layer conv3: did you mean conv1?"),
        (("--target", "dog"), "--target dog: expected predicted, true or a class of the network"),
        (("--target", "3"), "--target: expected classes from 0 to 2, found 3 to 3"),
        (("--target", "ant", "--worst", "2"), "--target: expected no --worst with it"),
        (("--out", tmp_path / "file" / "out"), "--out "),
    ):
        line = refusal(command.main, [str(word) for word in (*words, *options)])
        assert line.startswith(text), line
    mixture = [folder / "model.h5", folder / "set", folder / "set" / "ant" / "00.png"]
    line = refusal(command.main, [str(word) for word in mixture])
    assert line.endswith("expected image files, or a single data set, found another file among 2")
    image = folder / "set" / "ant" / "00.png"
    words = [folder / "model.h5", image, "--out", tmp_path / "out", "--worst", 2]
    line = refusal(command.main, [str(word) for word in words])
    assert line.startswith("--worst: expected images with a class label each, found none in")
    (tmp_path / "strange" / "asp").mkdir(parents=True)
    shutil.copy(image, tmp_path / "strange" / "asp")
    words = [folder / "model.h5", tmp_path / "strange", "--out", tmp_path / "out"]
    for options in (["--worst", 2], ["--target", "true"]):
        line = refusal(command.main, [str(word) for word in (*words, *options)])
        assert line.startswith(options[0]) and "sub-folder asp is not one of the" in line
    result = explain(folder, 2, "refused", "--steps", 3, check=2)
    assert "--steps: expected the method integrated-gradients" in jobs.refusal(result)


@SLOW
def test_emulated_gpus_write_the_same_files(folder):
    for ranks in (1, 2, 3):
        words = [folder / "model.h5", folder / "set", "--out", folder / f"gpu-{ranks}"]
        program = jobs.ROOT + "/tests/launch/emulated.py"
        words += ["--device", "gpu", "--threads", 1, "--batch-size", 20]
        pool.run(ranks, program, "explain", *words, check=0)
    assert hashes(folder / "gpu-1") == hashes(folder / "gpu-2") == hashes(folder / "gpu-3")
