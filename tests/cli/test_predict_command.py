"""Test that the command predict evaluates a network with the loss of its training."""

import csv
import re

import numpy as np
import pytest
from PIL import Image
from single_rank import numbers

import mpidl as dl
from mpidl.backends import settings
from mpidl.cli import predict

SIDE, COUNT, IGNORED = 6, 20, 255


@pytest.fixture(scope="module")
def images():
    return numbers("predict", COUNT, 1, SIDE, SIDE, low=0, high=255).astype(np.uint8)


def save_trained(folder, store, layers, **options):
    """Train a network for two iterations and save it in model.h5."""
    net = dl.Network(layers, store.image_shape, seed=1)
    options = dl.TrainingOptions(max_iterations=2, batch_size=10, learning_rate=0.5, **options)
    dl.train(net, store, options)
    dl.save_model(folder / "model.h5", net)
    return net


def run(folder, data, capsys, *words):
    """Run the command. Return the lines that it prints about the images."""
    arguments = ["--model", folder / "model.h5", "--data", data, *words]
    capsys.readouterr()
    assert predict.main([str(word) for word in arguments]) == 0
    printed = capsys.readouterr()
    assert re.search(rf"^Data: .*{COUNT} images", printed.err, re.M)
    lines = printed.out.splitlines()
    return lines[[line.startswith("Accuracy") for line in lines].index(True) :]


def refusal_of(folder, data, *words):
    with pytest.raises(dl.UserError) as error:
        predict.main([str(w) for w in ("--model", folder / "model.h5", "--data", data, *words)])
    return str(error.value)


def test_one_output_of_the_dice_loss_has_two_classes(images, tmp_path, capsys):
    labels = (images[:, 0] > 127).astype(np.int32)
    labels[:, 0] = IGNORED
    np.savez(tmp_path / "set.npz", images=images, targets=labels)
    store = dl.ArrayDatastore(images, targets=labels)
    options = {"loss": "dice", "ignore_label": IGNORED, "normalization": "none"}
    net = save_trained(tmp_path, store, [dl.Conv2D(3, 1, padding=1)], **options)
    assert dl.load_model(tmp_path / "model.h5")[0].loss == net.loss
    assert net.loss == {"name": "dice", "ignore_label": IGNORED}
    predicted = dl.predict(net, store)[:, 0] > 0
    counted = labels != IGNORED
    counts = np.zeros((2, 2), int)
    np.add.at(counts, (labels[counted], predicted[counted].astype(int)), 1)
    assert 0 < counts.trace() < counts.sum()
    table = tmp_path / "table.csv"
    lines = run(tmp_path, tmp_path / "set.npz", capsys, "--metrics", "iou", "--confusion", table)
    accuracy = counts.trace() / counts.sum()
    assert lines[0] == f"Accuracy: {accuracy:.4f} ({COUNT} images, {SIDE * SIDE} labels each)"
    union = counts.sum(axis=0) + counts.sum(axis=1) - counts.diagonal()
    ious = [f"{iou:.4f}" for iou in counts.diagonal() / union]
    assert [line.split()[-1] for line in lines[2:4]] == ious
    rows = list(csv.reader(table.open()))
    assert np.array_equal([row[1:3] for row in rows[1:3]], counts.astype(str))
    assert np.array_equal(dl.classify(net, store), predicted)


def test_several_labels_per_pixel(images, tmp_path, capsys):
    """The network has no sigmoid, and its targets have the shape of its outputs."""
    targets = np.concatenate([images > 127, images > 50], axis=1).astype(np.int32)
    np.savez(tmp_path / "set.npz", images=images, targets=targets)
    store, options = dl.ArrayDatastore(images, targets=targets), {"normalization": "none"}
    layers = [dl.Conv2D(3, 2, padding=1)]
    net = save_trained(tmp_path, store, layers, loss="binary-crossentropy", **options)
    predicted = dl.predict(net, store) > 0
    lines = run(tmp_path, tmp_path / "set.npz", capsys, "--metrics", "recall")
    accuracy, labels = (predicted == targets).mean(), 2 * SIDE * SIDE
    assert lines[0] == f"Accuracy: {accuracy:.4f} ({COUNT} images, {labels} labels each)"
    recalls = [(predicted & (targets == 1))[:, k].sum() / targets[:, k].sum() for k in range(2)]
    assert [line.split()[-1] for line in lines[2:4]] == [f"{recall:.4f}" for recall in recalls]
    text = refusal_of(tmp_path, tmp_path / "set.npz", "--confusion", tmp_path / "a.csv")
    assert text.startswith("--confusion: expected a model with a score for each class")


@pytest.mark.parametrize("has_sigmoid", [False, True])
def test_one_output_for_two_classes_of_a_folder(images, tmp_path, capsys, has_sigmoid):
    for i, pixels in enumerate(images):
        path = tmp_path / "set" / ("cat", "dog")[i % 3 == 0] / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[0]).save(path)
    store, out = dl.ImageFolder(tmp_path / "set"), tmp_path / "scores.csv"
    layers = [dl.Dense(1), *([dl.Sigmoid()] if has_sigmoid else [])]
    net = save_trained(tmp_path, store, layers, loss="binary-crossentropy")
    lines = run(tmp_path, tmp_path / "set", capsys, "--out", out)
    rows = list(csv.reader(out.open()))
    assert rows[0] == ["image", "predicted", "dog"]
    outputs = dl.predict(net, store)[:, 0].astype(np.float64)
    chances = outputs if has_sigmoid else 1 / (1 + np.exp(-outputs))
    assert np.allclose([float(row[2]) for row in rows[1:]], chances, rtol=1e-5)
    assert [row[1] for row in rows[1:]] == [("cat", "dog")[int(p > 0.5)] for p in chances]
    accuracy = np.mean((chances > 0.5) == (store.labels == 1))
    assert lines == [f"Accuracy: {accuracy:.4f} ({COUNT} images)", f"Scores: {out}"]


def test_a_model_of_an_unknown_loss(images, tmp_path, capsys):
    """The last layer and the targets determine what the outputs of an unknown loss mean."""
    targets = (images > 127).astype(np.int32)
    np.savez(tmp_path / "set.npz", images=images, targets=targets)
    net = dl.Network([dl.Conv2D(3, 1, padding=1), dl.Sigmoid()], images.shape[1:], seed=1)
    dl.save_model(tmp_path / "model.h5", net)
    lines = run(tmp_path, tmp_path / "set.npz", capsys, "--metrics", "all")
    accuracy = ((dl.predict(net, dl.ArrayDatastore(images)) > 0.5) == targets).mean()
    assert lines[0] == f"Accuracy: {accuracy:.4f} ({COUNT} images, {SIDE * SIDE} labels each)"
    assert "subset-accuracy" in lines[1]


def test_a_damaged_description_of_the_loss(images, tmp_path):
    net = dl.Network([dl.Dense(1)], images.shape[1:], seed=1)
    net.loss = {"name": "l1"}
    dl.save_model(tmp_path / "model.h5", net)
    with pytest.raises(dl.UserError) as error:
        dl.load_model(tmp_path / "model.h5")
    assert re.search("its network cannot be built: loss: expected one of .*'l1'", str(error.value))


def test_the_precision_is_printed_if_it_is_not_fp32(images, tmp_path, capsys, monkeypatch):
    """A model that was trained in bf16 predicts in fp32, unless the user chooses bf16."""
    monkeypatch.setattr(settings, "precision", "fp32")
    labels = np.arange(COUNT) % 2
    np.savez(tmp_path / "set.npz", images=images, labels=labels)
    store = dl.ArrayDatastore(images, labels)
    lines = {}
    for trained_in in ("fp32", "bf16"):
        net = save_trained(tmp_path, store, [dl.Dense(2)], precision=trained_in)
        assert net.trained_precision == (None if trained_in == "fp32" else trained_in)
        for precision in ("fp32", "bf16"):
            dl.configure(precision="fp32")
            words = ["--model", tmp_path / "model.h5", "--data", tmp_path / "set.npz"]
            assert (
                predict.main([*map(str, words), "--precision", precision, "--device", "cpu"]) == 0
            )
            assert settings.precision == precision
            printed = re.findall("^Precision: (.*)$", capsys.readouterr().err, re.M)
            lines[trained_in, precision] = printed
    assert lines == {
        ("fp32", "fp32"): [],
        ("fp32", "bf16"): ["bf16"],
        ("bf16", "fp32"): ["fp32, trained in bf16"],
        ("bf16", "bf16"): ["bf16, trained in bf16"],
    }
    net, description = dl.load_model(tmp_path / "model.h5")
    assert net.trained_precision == description["trained_precision"] == "bf16"
    assert net.up_to(net.layer_names[-1]).trained_precision == "bf16"
    dl.train(net, store, dl.TrainingOptions(max_iterations=1))
    assert net.trained_precision is None
    text = refusal_of(tmp_path, tmp_path / "set.npz", "--precision", "tf32")
    assert text == "--precision tf32: expected fp32 or bf16 on CPUs; tf32 needs --device gpu"


def test_a_line_says_that_only_the_centre_of_larger_images_is_used(images, tmp_path, capsys):
    labels = (images[:, 0] > 127).astype(np.int32)
    np.savez(tmp_path / "set.npz", images=images, targets=labels)
    store = dl.ArrayDatastore(images, targets=labels)
    for window in (SIDE, SIDE - 2):
        net = dl.Network([dl.Conv2D(3, 2, padding=1)], (1, window, window), seed=1)
        options = dl.TrainingOptions(max_iterations=1, batch_size=10, random_crop=window)
        dl.train(net, store, options)
        dl.save_model(tmp_path / "model.h5", net)
        capsys.readouterr()
        words = ["--model", tmp_path / "model.h5", "--data", tmp_path / "set.npz"]
        assert predict.main([str(word) for word in words]) == 0
        lines = re.findall("^Cropped: .*$", capsys.readouterr().err, re.M)
        text = f"Cropped: the centre {window}x{window} of each image, as in training; "
        assert lines == ([] if window == SIDE else [text + "--tile N predicts whole images"])
