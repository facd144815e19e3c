"""Test which images the commands use for training, tests and predictions, and preprocessing."""

import csv

import jobs
import numpy as np
import pool
import pytest
from image_sets import pixels_of, save

import mpidl as dl

SHORT = ("--max-iterations", 2)


def test_training_on_every_image(pictures, tmp_path):
    """With --test-fraction 0 or test_fraction = 0 in a config file, there are no test results."""
    (tmp_path / "run.toml").write_text("[run]\ntest_fraction = 0\n")
    for name, words in (
        ("flag", ("--test-fraction", 0)),
        ("file", ("--config", tmp_path / "run.toml")),
    ):
        result = jobs.train(2, pictures, tmp_path / name, *SHORT, *words)
        lines = jobs.output_lines(result)
        assert f"Data: {pictures}: 210 images of 1x12x12 in 3 classes" in lines
        assert not [line for line in lines if line.startswith("Test")]
        summary = jobs.summary(tmp_path / name)
        assert summary["accuracy"] is None and summary["loss"] is None
    assert "test_fraction = 0.0\n" in (tmp_path / "flag" / "options.toml").read_text()
    jobs.resume(1, tmp_path / "flag", "--max-iterations", 3)  # the resumed run has no test either
    assert jobs.summary(tmp_path / "flag")["accuracy"] is None


def test_a_larger_share_for_the_test(pictures, tmp_path):
    result = jobs.train(1, pictures, tmp_path / "a", *SHORT, "--test-fraction", 0.3)
    assert "(63 images)" in next(x for x in jobs.output_lines(result) if x.startswith("Test acc"))
    train, test = dl.ImageFolder(pictures).split(0.7, seed=0)
    assert (len(train), len(test)) == (147, 63)
    scores = dl.evaluate(dl.load_model(tmp_path / "a" / "model.h5")[0], test)
    assert scores.accuracy == jobs.summary(tmp_path / "a")["accuracy"]


def test_a_folder_of_validation_images(tmp_path):
    """The folder beside train/ is the validation set, unless --validation-data names another."""
    folder = tmp_path / "set"
    for i, part in enumerate(("train", "test", "validation", "other")):
        parent = tmp_path if part == "other" else folder
        jobs.draw_images(parent / part, per_class=16 if part == "train" else 3 + i)
    for name, words, expected in (
        ("a", (), f"{folder}/validation: 15 images of 1x12x12 in 3 classes"),
        ("b", ("--validation-data", tmp_path / "other"), f"{tmp_path}/other: 18 images"),
    ):
        result = jobs.train(2, folder, tmp_path / name, *SHORT, *words)
        lines = jobs.output_lines(result)
        assert [x for x in lines if x.startswith(f"Validation: {expected}")], lines
        assert f"Data: {folder}/train: 48 images of 1x12x12 in 3 classes" in lines
        assert f"Test: {folder}/test: 12 images of 1x12x12 in 3 classes" in lines
        assert jobs.summary(tmp_path / name)["validation_accuracy"] is not None
    result = jobs.train(1, folder, tmp_path / "d", *SHORT, "--fold", "1/2")
    unused = f"the validation images in --data are not used: {folder}/validation: 15 images"
    assert [x for x in jobs.output_lines(result) if x.startswith(f"note: --fold 1/2: {unused}")]
    (line,) = (x for x in jobs.output_lines(result) if x.startswith("Validation: "))
    assert f"{folder}/train" in line, line
    (folder / "validation").rename(tmp_path / "validation")
    jobs.train(1, folder, tmp_path / "e", *SHORT)
    (tmp_path / "validation").rename(folder / "validation")
    result = jobs.resume(1, tmp_path / "e", "--max-iterations", 3)
    assert f"note: the resumed run had no validation: {unused}" in result.stdout
    assert jobs.summary(tmp_path / "e")["validation_loss"] is None
    (folder / "validation" / "dot").rename(folder / "validation" / "other")  # no class of train/
    result = jobs.resume(1, tmp_path / "e", "--max-iterations", 4)
    assert f"note: the resumed run had no validation: {unused}" in result.stdout
    line = jobs.refusal(jobs.train(2, folder, tmp_path / "g", *SHORT, check=2))
    assert "sub-folder other is not one of the classes" in line
    (folder / "validation" / "other").rename(folder / "validation" / "dot")
    jobs.draw_images(folder / "more", per_class=2)
    line = jobs.refusal(jobs.train(2, folder, tmp_path / "c", *SHORT, check=2))
    assert f"{folder}: found images in more/ beside train/, validation/, test/" in line


def test_sets_that_contradict_each_other(pictures, tmp_path):
    few = jobs.draw_images(tmp_path / "few", per_class=1)
    jobs.draw_images(tmp_path / "split" / "train", per_class=2)
    jobs.draw_images(tmp_path / "split" / "test", per_class=2)
    for data, words, text in (
        (few, (), "expected training and test images, found 3 and 0; --test-fraction sets"),
        (
            pictures,
            ("--test-data", few, "--test-fraction", 0.2),
            f"--test-fraction 0.2: --test-data {few} already names the test images",
        ),
        (
            tmp_path / "split",
            ("--test-fraction", 0.2),
            f"--data {tmp_path / 'split'} already has test images",
        ),
        (
            pictures,
            ("--test-fraction", 0, "--validation-data", "test"),
            "--validation-data test: expected test images, found none (--test-fraction 0)",
        ),
        (pictures, ("--test-fraction", 1), "--test-fraction must be at least 0 and below 1"),
    ):
        result = jobs.train(1, data, tmp_path / "out", *words, check=2)
        assert text in jobs.refusal(result)
    jobs.train(1, few, tmp_path / "all", *SHORT, "--test-fraction", 0)


@pytest.mark.slow("jobs")
def test_verify_on_images_of_several_sizes(sizes):
    words = ("--resize", "12x12", "--colour", "gray", "--ranks", "1,2")
    words = jobs.command("verify", *SHORT, *words, data=sizes)
    lines = jobs.output_lines(pool.run(None, *words, check=0))
    assert lines[-1] == "the same weights, byte for byte, on 1, 2 ranks"
    for text in ("1-3", "0", "1,,2"):
        result = pool.run(None, *jobs.command("verify", "--ranks", text, data=sizes))
        expected = f"--ranks must be numbers of ranks such as 1,2,3, found {text}"
        assert jobs.refusal(result) == expected


def test_no_preview_if_training_refuses_the_options(pairs, tmp_path):
    keywords = {"network": jobs.network("pixels"), "data": pairs["pixels"], "out": tmp_path / "out"}
    for options in ((), ("--preview", tmp_path / "preview.png")):
        words = jobs.command("train", "--random-crop", 500, *options, **keywords)
        text = "--random-crop 500x500: expected at most the size of the images"
        assert text in jobs.refusal(pool.run(1, *words))
    assert list(tmp_path.iterdir()) == []


def test_prediction_with_another_preprocessing(sizes, tmp_path):
    """--colour, --cover and --centre-crop must replace the model's preprocessing."""
    net = dl.Network([dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(2)], (1, 12, 10), seed=3)
    dl.save_model(tmp_path / "bare.h5", net, ["bright", "dark"])
    net.preprocess = dl.Preprocess(size=(9, 9))
    dl.save_model(tmp_path / "other.h5", net, ["bright", "dark"])
    words = ("--colour", "gray", "--cover", "14x12", "--centre-crop", "12x10")
    preprocess = dl.Preprocess(size=(14, 12), colour="gray", cover=True, crop=(12, 10))
    expected = dl.evaluate(net, dl.ImageFolder(sizes, preprocess=preprocess)).accuracy
    for name in ("bare.h5", "other.h5"):
        lines = jobs.predict(tmp_path / name, sizes, *words, ranks=1)
        assert lines == [f"Accuracy: {expected:.4f} (80 images)"]
    large = tmp_path / "large"
    save(large / "a.png", pixels_of(0, 1, 20, 20))
    text = jobs.refused_prediction(tmp_path / "bare.h5", large, ranks=1)
    assert "found (1, 20, 20) (--resize, --cover, --centre-crop and --colour convert them)" in text


def test_unknown_labels_are_reported(pictures, tmp_path):
    net = dl.Network([dl.Dense(3)], (1, 12, 12))
    dl.save_model(tmp_path / "model.h5", net, list(jobs.CLASSES))
    other = jobs.draw_images(tmp_path / "other", per_class=2)
    (other / "box").rename(other / "Box")
    reason = f"sub-folder Box is not one of the classes ({', '.join(jobs.CLASSES)})"
    reason += ": did you mean box?"
    assert jobs.predict(tmp_path / "model.h5", other) == [f"6 images, no labels known: {reason}"]
    words = ("--confusion", tmp_path / "a.csv")
    text = jobs.refused_prediction(tmp_path / "model.h5", other, *words, ranks=1)
    assert text.endswith(f"expected images with labels, found none in --data {other}: {reason}")


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow("jobs")), 3])
def test_numbers_as_a_table(tmp_path, count):
    """--out FILE.csv contains the outputs of a regression network and the images' targets."""
    images = dl.ArrayDatastore(pixels_of(0, 50, 1, 4, 4))
    targets = np.linspace(-1, 1, 50 * count, dtype=np.float32).reshape(50, count)
    store = dl.data.combined(images, targets[:, 0] if count == 1 else targets)
    dl.data.pack({"train": store}, tmp_path / "set.h5")
    net = dl.Network([dl.Dense(count)], (1, 4, 4), seed=1)
    dl.save_model(tmp_path / "model.h5", net, [])
    out = tmp_path / "a.csv"
    words, content = ("--out", out, "--batch-size", 32), set()
    for ranks in (1, 3):
        lines = jobs.predict(tmp_path / "model.h5", tmp_path / "set.h5", *words, ranks=ranks)
        content.add(out.read_bytes())
    assert len(content) == 1 and lines[-1] == f"Outputs: {out}"
    head, *rows = csv.reader(out.open())
    several = [f"{name} {i}" for name in ("output", "target") for i in (1, 2, 3)]
    assert head == ["image", *(["output", "target"] if count == 1 else several)]
    table = np.array([row[1:] for row in rows], np.float32)
    assert np.array_equal(table, np.hstack([dl.predict(net, store, softmax=False), targets]))
    assert [row[0] for row in rows] == [images.name(i) for i in range(50)]


def test_outputs_that_are_images_are_no_table(pictures, tmp_path):
    net = dl.Network([dl.Conv2D(3, 1, padding=1)], (1, 12, 12))
    dl.save_model(tmp_path / "model.h5", net, [])
    words = ("--out", tmp_path / "a.csv")
    text = jobs.refused_prediction(tmp_path / "model.h5", pictures, *words, ranks=1)
    assert "an array is written as .npy or .h5, found .csv" in text
