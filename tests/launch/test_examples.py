"""Test that the examples run as described in their docstrings and give the expected weights."""

import re

import numpy as np
import pool
import pytest
from launcher import ROOT

from mpidl.core import keyed


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
    printed = {ranks: run("custom_op.py", ranks, folder, 12) for ranks in (1, 2)}
    assert len(set(printed.values())) <= 2, printed  # check_vjp may round differently
    assert len({value_of("Weights sha256", text) for text in printed.values()}) == 1
    losses = [float(x) for x in re.findall(r"Loss: (\S+)", printed[1])]
    assert losses[-1] < losses[0]


@pytest.mark.slow("jobs")
def test_from_a_notebook(folder):
    """The example must start the ranks itself and give the weights of the training loop."""
    text, loop = run("from_a_notebook.py", None, 2, folder, 2), run("custom_loop.py", 1, folder, 2)
    assert value_of("Weights sha256", text) == value_of("Weights sha256", loop)
    assert "true \\ predicted" in text and re.search(r"^Epoch: 2, Loss: ", text, re.M)


def test_denoise_gives_one_hash(folder):
    printed = {ranks: run("denoise.py", ranks, folder, 6) for ranks in (1, 2)}
    ends = {tuple(text.splitlines()[-2:]) for text in printed.values()}  # errors and hash
    assert len(ends) == 1, printed


@pytest.mark.slow("jobs")
@pytest.mark.parametrize("name, arguments", [("cells.py", (1, 80)), ("angle.py", (1,))])
def test_recipes_give_one_hash(name, arguments):
    """After one epoch, the printed figures and the weights are the same on any number of ranks."""
    ends = {tuple(run(name, ranks, *arguments).splitlines()[-2:]) for ranks in (1, 2, 3)}
    assert len(ends) == 1, ends


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
        assert "Pretrained on: 0, 1\n" in text and "The new classes: 2, 3\n" in text
        assert "Images: 40, Epochs: 6, " in text and "true \\ predicted" in text
        assert float(value_of("Accuracy", text)) > 0.9
    hashes = {value_of("Weights sha256", text) for text in printed}
    assert len(hashes) == 2  # the weights differ, because the mini-batch grows with the ranks
