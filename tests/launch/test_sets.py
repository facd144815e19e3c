"""Which images the commands train, test and predict on, and how they are brought to one size."""

import csv

import numpy as np
import pool
import pytest
import small
from image_sets import pixels_of, save

import mpidl as dl

SHORT = ("--max-iterations", 2)


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    """A folder of images of several sizes."""
    folder = tmp_path_factory.mktemp("several") / "sizes"
    for c, name in enumerate(("left", "right")):
        for i in range(10):
            pixels = pixels_of((c, i), 3 if i % 2 else 1, 12 + i, 15)
            save(folder / name / f"{i}.png", pixels // 2 + 100 * c)
    return folder


def refused(result):
    (line,) = small.own_lines(result)
    return line


def predicted(*words, ranks=1, check=0):
    result = pool.run(ranks, *small.command("predict", *words, network=None), check=check)
    return refused(result) if check else small.printed(result)


def test_training_on_every_image(pictures, tmp_path):
    """--test-fraction 0, by the command line and by [run]; what is left is as it was for others."""
    (tmp_path / "run.toml").write_text("[run]\ntest_fraction = 0\n")
    for name, words in (
        ("flag", ("--test-fraction", 0)),
        ("file", ("--config", tmp_path / "run.toml")),
    ):
        result = small.train(2, pictures, tmp_path / name, *SHORT, *words)
        lines = small.printed(result)
        assert f"Data: {pictures}: 210 images of 1x12x12 in 3 classes" in lines
        assert not [line for line in lines if line.startswith("Test")]
        found = small.summary(tmp_path / name)
        assert found["accuracy"] is None and found["loss"] is None
    assert "test_fraction = 0.0\n" in (tmp_path / "flag" / "options.toml").read_text()
    small.resume(1, tmp_path / "flag", "--max-iterations", 3)  # which knows that there is no test
    assert small.summary(tmp_path / "flag")["accuracy"] is None


def test_a_larger_share_for_the_test(pictures, tmp_path):
    result = small.train(1, pictures, tmp_path / "a", *SHORT, "--test-fraction", 0.3)
    assert "(63 images)" in next(x for x in small.printed(result) if x.startswith("Test acc"))
    train, test = dl.ImageFolder(pictures).split(0.7, seed=0)
    assert (len(train), len(test)) == (147, 63)
    found = dl.evaluate(dl.load_model(tmp_path / "a" / "model.h5")[0], test)
    assert found.accuracy == small.summary(tmp_path / "a")["accuracy"]


def test_sets_that_go_together_badly(pictures, tmp_path):
    few = small.draw(tmp_path / "few", per_class=1)
    small.draw(tmp_path / "split" / "train", per_class=2)
    small.draw(tmp_path / "split" / "test", per_class=2)
    for data, words, text in (
        (few, (), "expected images to train on and to test on, found 3 and 0; --test-fraction is"),
        (
            pictures,
            ("--test-data", few, "--test-fraction", 0.2),
            f"--test-fraction 0.2: --test-data {few} names the test images: expected one of them",
        ),
        (
            tmp_path / "split",
            ("--test-fraction", 0.2),
            f"--data {tmp_path / 'split'} has test images of its own: expected one of them",
        ),
        (
            pictures,
            ("--test-fraction", 0, "--validation-data", "test"),
            "--validation-data test: expected test images, found none (--test-fraction 0)",
        ),
        (pictures, ("--test-fraction", 1), "--test-fraction must be at least 0 and below 1"),
    ):
        result = small.train(1, data, tmp_path / "out", *words, check=2)
        assert text in refused(result)
    small.train(1, few, tmp_path / "all", *SHORT, "--test-fraction", 0)


@pytest.mark.slow("jobs")
def test_verify_on_images_of_several_sizes(sizes):
    words = ("--resize", "12x12", "--colour", "gray", "--ranks", "1,2")
    words = small.command("verify", *SHORT, *words, data=sizes)
    lines = small.printed(pool.run(None, *words, check=0))
    assert lines[-1] == "the same weights, byte for byte, on 1, 2 ranks"
    for text in ("1-3", "0", "1,,2"):
        result = pool.run(None, *small.command("verify", "--ranks", text, data=sizes), check=2)
        expected = f"mpidl: --ranks must be numbers of ranks such as 1,2,3, found {text}"
        assert refused(result) == expected


def test_no_preview_of_what_training_refuses(pairs, tmp_path):
    """An augmenter moves images, and not the label of each pixel."""
    for more in ((), ("--preview", tmp_path / "seen.png")):
        words = small.command(
            "train", "--flip", "x", *more, network=small.of("pixels"), data=pairs["pixels"],
            out=tmp_path / "out",
        )  # fmt: skip
        assert "an augmenter moves images and not their targets" in refused(
            pool.run(1, *words, check=2)
        )
    assert list(tmp_path.iterdir()) == []


def test_prediction_with_a_preprocessing_of_its_own(sizes, tmp_path):
    """In place of what the model does, which is nothing here: --colour, --resize and the others."""
    net = dl.Network([dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(2)], (1, 12, 10), seed=3)
    dl.save_model(tmp_path / "bare.h5", net, ["left", "right"])
    net.preprocess = dl.Preprocess(size=(9, 9))
    dl.save_model(tmp_path / "other.h5", net, ["left", "right"])
    words = ("--colour", "gray", "--cover", "14x12", "--centre-crop", "12x10", "--data", sizes)
    how = dl.Preprocess(size=(14, 12), colour="gray", cover=True, crop=(12, 10))
    expected = dl.evaluate(net, dl.ImageFolder(sizes, preprocess=how)).accuracy
    for name in ("bare.h5", "other.h5"):
        assert predicted("--model", tmp_path / name, *words) == [
            f"Accuracy: {expected:.4f} (20 images)"
        ]
    one = tmp_path / "one"
    save(one / "a.png", pixels_of(0, 1, 20, 20))
    text = predicted("--model", tmp_path / "bare.h5", "--data", one, check=2)
    assert "found (1, 20, 20) (--resize, --cover, --centre-crop and --colour convert them)" in text


def test_labels_that_are_not_known_are_told_of(pictures, tmp_path):
    net = dl.Network([dl.Dense(3)], (1, 12, 12))
    dl.save_model(tmp_path / "model.h5", net, list(small.CLASSES))
    other = small.draw(tmp_path / "other", per_class=2)
    (other / "box").rename(other / "Box")
    words = ("--model", tmp_path / "model.h5", "--data", other)
    why = f"sub-folder Box is none of the classes ({', '.join(small.CLASSES)}): did you mean box?"
    assert predicted(*words, ranks=2) == [f"6 images, no labels known: {why}"]
    text = predicted(*words, "--confusion", tmp_path / "a.csv", check=2)
    assert text.endswith(f"expected images with labels, found none in --data {other}: {why}")


@pytest.mark.parametrize("count", [1, 3])
def test_numbers_as_a_table(tmp_path, count):
    """--out FILE.csv of a network of numbers: these, and the targets where they are known."""
    images = dl.ArrayDatastore(pixels_of(0, 50, 1, 4, 4))
    targets = np.linspace(-1, 1, 50 * count, dtype=np.float32).reshape(50, count)
    store = dl.data.combined(images, targets[:, 0] if count == 1 else targets)
    dl.data.pack({"train": store}, tmp_path / "set.h5")
    net = dl.Network([dl.Dense(count)], (1, 4, 4), seed=1)
    dl.save_model(tmp_path / "model.h5", net, [])
    out = tmp_path / "a.csv"
    words = ("--model", tmp_path / "model.h5", "--data", tmp_path / "set.h5", "--out", out)
    lines, content = [], set()
    for ranks in (1, 3):
        lines = predicted(*words, "--batch-size", 32, ranks=ranks)
        content.add(out.read_bytes())
    assert len(content) == 1 and lines[-1] == f"Outputs: {out}"
    head, *rows = csv.reader(out.open())
    several = [f"{name} {i}" for name in ("output", "target") for i in (1, 2, 3)]
    assert head == ["image", *(["output", "target"] if count == 1 else several)]
    found = np.array([row[1:] for row in rows], np.float32)
    assert np.array_equal(found, np.hstack([dl.predict(net, store, softmax=False), targets]))
    assert [row[0] for row in rows] == [images.name(i) for i in range(50)]


def test_images_are_no_table(pictures, tmp_path):
    net = dl.Network([dl.Conv2D(3, 1, padding=1)], (1, 12, 12))
    dl.save_model(tmp_path / "model.h5", net, [])
    words = ("--model", tmp_path / "model.h5", "--data", pictures, "--out", tmp_path / "a.csv")
    assert "an array is written as .npy or .h5, found .csv" in predicted(*words, check=2)
