"""Test that the examples run as described in their docstrings and give the expected weights."""

import os
import re
import runpy
import sys

import numpy as np
import pool
import pytest
import run_tutorial
from launcher import ROOT

from mpidl.core import keyed

GALLERY, TUTORIAL = ((ROOT / "docs" / page).read_text() for page in ("gallery.md", "tutorial.md"))
COMMAND = re.compile(r"^mpirun -n 2 python examples/(\w+)\.py.* --picture \1\.png$", re.M)
IN_GALLERY = COMMAND.findall(GALLERY)
# Arguments of a short run of each example in the gallery. FOLDER stands for the fixture `folder`.
FOLDER = object()
SHORT = {
    "angle": (1,),
    "cells": (1, 80),
    "custom_op": (FOLDER, 6),
    "denoise": (FOLDER, 6),
    "explain": (FOLDER, 1),
    "labels": (1, 160),
    "large_image": (1, 32),
    "rows": (1,),
    "search": (1, 100),
    "transfer": ("digits", 1, 1),
}
QUICK = ("denoise", "explain", "labels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of 200 gray images of 12 x 12 pixels in three classes.

    The classes differ in the position of a bright row.
    """
    from PIL import Image

    root = tmp_path_factory.mktemp("images")
    for i in range(200):
        pixels = (100 * keyed.uniform(0, "noise", 144, sample=i)).astype("u1").reshape(12, 12)
        pixels[4 * (i % 3) : 4 * (i % 3) + 4] += 80
        path = root / "abc"[i % 3] / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root


def run(name, ranks, *args):
    return pool.run(ranks, ROOT / "examples" / name, *args, check=0).stdout


@pytest.fixture
def run_here(monkeypatch):
    """Return a function that runs an example in this process, on one rank."""

    def call(name, *args):
        program = str(ROOT / "examples" / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [program, *map(str, args)])
        runpy.run_path(program, run_name="__main__")

    return call


def value_of(label, text):
    (value,) = re.findall(rf"^{label}: (\S+)$", text, re.M)
    return value


def test_custom_loop_is_the_training_command(folder, tmp_path):
    """custom_loop.py gives the same weights as the command `train`.

    Of 200 images, 180 are for training, in mini-batches of 128 and 52. The last block has 4 images.
    """
    args = ("-m", "mpidl.train", "--data", folder, "--epochs", 2, "--out", tmp_path / "out")
    command = pool.run(2, *args, check=0).stdout
    expected = value_of("weights_sha256", command)
    for ranks in (None, 3):
        printed = run("custom_loop.py", ranks, folder, 2)
        assert value_of("Weights sha256", printed) == expected
        assert "\nEpoch: 2, Loss: " in printed
    assert value_of("Accuracy", printed) in command


@pytest.mark.slow("jobs")
def test_custom_loop_is_dl_train(folder):
    text = "import sys, mpidl as dl; world = dl.World(); "
    text += "images, _ = dl.data.open_data(sys.argv[1], world); train, test = images.split(0.9); "
    text += "net = dl.nn.zoo.digits(train.image_shape, 3); "
    text += "options = dl.TrainingOptions.from_recipe('digits', epochs=2, validation=test); "
    text += "dl.train(net, train, options, world=world); "
    text += "world.report(weights_sha256=dl.weights_sha256(net))"
    library = pool.run(2, "-c", text, folder, check=0).stdout
    loop = run("custom_loop.py", 1, folder, 2)
    assert value_of("Weights sha256", loop) == value_of("Weights sha256", library)


@pytest.mark.slow("jobs")
def test_rows_learns_the_digits_on_any_number_of_ranks():
    printed = {run("rows.py", ranks).split("\nAccuracy: ")[1] for ranks in (1, 2, 3)}
    assert len(printed) == 1, printed  # accuracies and the hash of the weights
    (text,) = printed
    accuracy, after_seven = text.split("\n")[0], re.search(r"Rows: 7, Accuracy: (\S+)", text)[1]
    assert float(accuracy) >= 0.985 and f"Rows: 28, Accuracy: {accuracy}" in text
    assert float(after_seven) < 0.5  # the first rows of most digits are empty


@pytest.mark.slow("jobs")
def test_matlab_loop_learns_and_depends_on_the_ranks(folder):
    printed = [run("matlab_loop.py", ranks, folder, 15) for ranks in (2, 2, 3)]
    for text in printed:
        assert float(value_of("Accuracy", text)) > 0.9, text
    assert printed[0] == printed[1]  # the result is reproducible
    assert value_of("Weights sha256", printed[0]) != value_of("Weights sha256", printed[2])


def test_on_one_rank_matlab_loop_is_custom_loop_up_to_rounding(folder):
    losses = [
        float(re.search(r"Epoch: 2, Loss: (\S+)", run(f"{name}_loop.py", 1, folder, 2))[1])
        for name in ("matlab", "custom")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)


def test_custom_op_gives_one_hash(folder):
    printed = [run("custom_op.py", ranks, folder, 12) for ranks in (1, 2)]
    # check_vjp may round differently
    assert len({re.sub("^Check vjp: .*", "", text, flags=re.M) for text in printed}) == 1, printed
    losses = [float(x) for x in re.findall(r"Loss: (\S+)", printed[0])]
    assert losses[-1] < losses[0]


@pytest.mark.slow("jobs")
def test_from_a_notebook(folder):
    """The example must start the ranks itself and give the weights of the training loop."""
    text, loop = run("from_a_notebook.py", None, 2, folder, 2), run("custom_loop.py", 1, folder, 2)
    assert value_of("Weights sha256", text) == value_of("Weights sha256", loop)
    assert "true \\ predicted" in text and re.search(r"^Epoch: 2, Loss: ", text, re.M)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow("jobs")] * (name not in QUICK))
        for name in IN_GALLERY
    ],
)
def test_picture_and_hash(name, folder, tmp_path, run_here, capsys):
    """One rank draws a picture. Three ranks without matplotlib give the same results and hash.

    transfer.py is the negative control: its weights depend on the number of ranks.
    """
    from PIL import Image

    words = [folder if word is FOLDER else word for word in SHORT[name]]
    path = tmp_path / "picture.png"
    run_here(name, *words, "--picture", path)
    printed = [capsys.readouterr().out, run(f"{name}.py", 3, *words)]
    ends = {tuple(text.splitlines()[-2:]) for text in printed}
    assert len(ends) == (2 if name == "transfer" else 1), printed
    with Image.open(path) as picture:
        assert picture.format == "PNG" and picture.size == (800, 450)
        colours = picture.convert("RGB").getcolors(maxcolors=800 * 450)
    assert len(colours) > 20 and max(count for count, _ in colours) < 0.98 * 800 * 450


def test_every_example_is_on_a_page():
    """An example is in the gallery with a picture or a link, or the tutorial runs it."""
    assert len(IN_GALLERY) == 10 and set(IN_GALLERY) == set(SHORT)
    pictures = re.findall(r"\(pictures/gallery/(\w+)\.png\)", GALLERY)
    assert pictures == IN_GALLERY * 2  # at the top, and in the section of each example
    linked = re.findall(r"^\[examples/(\w+)\.py\]\(\.\./examples/\1\.py\)", GALLERY, re.M)
    assert [name for name in linked if name in IN_GALLERY] == IN_GALLERY
    run_there = re.findall(r"^python examples/(\w+)\.py", TUTORIAL, re.M)
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*linked, *run_there}


def test_results_are_printed_if_matplotlib_is_missing(
    folder, tmp_path, monkeypatch, run_here, capsys
):
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="matplotlib"):
        run_here("denoise", folder, 1, "--picture", tmp_path / "picture.png")
    assert "Weights sha256: " in capsys.readouterr().out
    run_here("denoise", folder, 1)


@pytest.mark.slow("site")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", IN_GALLERY)
def test_the_gallery_shows_what_an_example_prints(name, tmp_path, monkeypatch):
    source = (ROOT / "examples" / f"{name}.py").read_text()
    (photographs,) = re.findall('^FASHION = "(.*)"$', source, re.M) or ["/"]
    if not os.path.isdir(photographs):
        pytest.skip(f"the page shows results for Fashion-MNIST: no folder {photographs}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (block,) = (b for b in run_tutorial.BLOCKS.finditer(GALLERY) if f"/{name}.py" in b[0])
    ((_, output, printed),) = run_tutorial.outputs(block[0], tmp_path)
    assert run_tutorial.shortened(printed, output) == output
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow("jobs")
def test_angles_of_digits():
    """After training, the error is below 7 degrees; the angles' standard deviation is 17.6."""
    text = run("angle.py", 2, 3)
    assert float(re.search(r"Rmse: ([\d.]+)", text)[1]) < 7, text


@pytest.mark.slow("jobs")
def test_denoise_removes_noise(folder):
    text = run("denoise.py", 1, folder, 60)
    noisy, denoised = re.search(r"Noisy: (\S+), Denoised: (\S+)", text).groups()
    assert float(denoised) < 0.95 * float(noisy), text


@pytest.mark.slow("jobs")
def test_transfer_learns_other_classes(tmp_path):
    """transfer.py learns two new classes after pretraining on two other classes.

    The classes differ in the position of a bright row.
    """
    labels = np.arange(400) % 4
    images = (100 * keyed.uniform(0, "transfer", 400 * 144)).astype("u1").reshape(400, 12, 12)
    for i, label in enumerate(labels):
        images[i, 3 * label : 3 * label + 3] += 80
    np.savez(tmp_path / "rows.npz", images=images, labels=labels)
    printed = [run("transfer.py", ranks, tmp_path / "rows.npz", 6, 1) for ranks in (1, 2)]
    for text in printed:
        assert "Pretrained on: 0, 1, New: 2, 3\n" in text and "true \\ predicted" in text
        assert text.count("Images: 40, Epochs: 6, ") == 2
        assert float(re.search(r"Network: with pretraining, Accuracy: (\S+)", text)[1]) > 0.9
    hashes = {value_of("Weights sha256", text) for text in printed}
    assert len(hashes) == 2  # the weights differ, because the mini-batch grows with the ranks


def numbers(label, text):
    """Return all numbers that an output shows for a label."""
    return [float(value) for value in re.findall(rf"\b{label}: ([\d.]+)", text)]


@pytest.mark.slow("jobs")
def test_labels_are_found():
    """Most labels are correct, also the positive ones, a fifth of all labels."""
    text = run("labels.py", 2, 4, 4000)
    assert numbers("Correct labels", text)[0] > 0.94 and numbers("Missed labels", text)[0] < 0.1


@pytest.mark.slow("jobs")
def test_cells_are_found_in_a_large_image():
    """A fifth of the pixels are cells, so a network that finds none has an accuracy of 0.8."""
    text = run("large_image.py", 2, 4, 240)
    assert numbers("Iou cell", text)[0] > 0.5 and numbers("Accuracy", text)[-1] > 0.88
    assert numbers("Same class as in one piece", text)[0] > 0.999


@pytest.mark.slow("jobs")
def test_explained_pixels_decide():
    """Hiding the pixels that two of the maps mark must change more than hiding random pixels."""
    text = run("explain.py", 2, "digits", 1)
    before, _, occlusion, gradients, random = numbers("Mean probability", text)
    assert max(occlusion, gradients) < 0.6 * random and random < before, text


@pytest.mark.slow("jobs")
def test_search_returns_the_best_model():
    text = run("search.py", 2, 1, 400)
    accuracies = numbers("Validation accuracy", text)
    best = re.search(r"Best learning rate: (\S+), Best batch size: (\d+)", text)
    (accuracy,) = re.findall(
        rf"^Learning rate: {best[1]}, Batch size: {best[2]}, Validation accuracy: (\S+)$",
        text,
        re.M,
    )
    assert len(accuracies) == 20 and float(accuracy) == max(accuracies) > 0.5
    assert abs(numbers("Test accuracy", text)[0] - max(accuracies)) < 0.1
