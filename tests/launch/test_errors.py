"""Options and data that cannot be used: one line from rank 0, exit code 2, nothing left running."""

import contextlib
import shutil
from pathlib import Path

import pool
import pytest
import small
from image_sets import pixels_of, save
from launcher import finish, start
from limits import wait_until

NETWORKS = small.of("")


def refusal(ranks, *words, env=None):
    """The one line that a command refuses with, without its "mpidl: "."""
    return the_line(pool.run(ranks, *words, env=env))


def refusal_of_a_job(ranks, *words):
    """The same for a job of its own; wait until none of its processes is left."""
    with start(ranks, *words, env=small.without_plots()) as job:
        result = finish(job)
    tail = b"".join(str(word).encode() + b"\0" for word in words)

    def is_gone():
        return not any(_command_line(p).endswith(tail) for p in Path("/proc").glob("[0-9]*"))

    wait_until(is_gone)
    return the_line(result)


def the_line(result):
    assert result.returncode == 2, result.stdout + result.stderr
    assert len(small.own_lines(result)) == 1, result.stderr
    (line,) = small.own_lines(result)
    assert line.startswith("mpidl: ")
    assert "Traceback" not in result.stdout
    return line.removeprefix("mpidl: ")


def _command_line(process):
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_bytes()
    return b""


def refused_training(ranks, *options, network=small.SMALL, refused=refusal, **places):
    return refused(ranks, *small.command("train", *options, network=network, **places))


# Before there are ranks: each parses the same command line, rank 0 speaks.
OPTIONS = {
    "unknown option": (
        ["--lerning-rate", 0.1],
        "unknown option --lerning-rate: did you mean --lea",
    ),
    "mini-batch of 0": (["--batch-size", 0], "--batch-size must be at least 1, found 0"),
    "negative rate": (["--learning-rate", -1], "--learning-rate must be positive, found -1"),
    "no number": (["--epochs", "many"], "--epochs must be a whole number, at least 1, found many"),
    "two sizes": (
        ["--batch-per-rank", 8, "--batch-size", 8],
        "--batch-size 8 (command line) and --batch-per-rank 8 (command line): expected one of them",
    ),
    "stray word": (["folder"], "unexpected argument folder"),
    "no value": (["--data"], "--data: expected one argument"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case, tmp_path):
    options, text = OPTIONS[case]
    assert text in refused_training(None, *options)


def test_an_option_of_a_job():
    text = refused_training(2, "--lerning-rate", 0.1, refused=refusal_of_a_job)
    assert text.startswith("unknown option --lerning-rate: did you mean --learning-rate")


NETWORK = {
    "unknown": (
        "digit",
        "--network digit: expected digits, cifar, resnet, alexnet or FILE.py:FUNCTION: did you "
        "mean digits?",
    ),
    "no file": ("missing.py:small", "--network missing.py:small: no file missing.py"),
    "no function": (f"{NETWORKS}smal", "networks.py defines no function smal: did you mean small"),
    "output size": (
        f"{NETWORKS}one_output",
        "expected 3 outputs, one per class of the data (or per number, if the targets are "
        "numbers), found 1",
    ),
}


@pytest.mark.parametrize("case", NETWORK)
def test_networks(case, pictures, tmp_path):
    network, text = NETWORK[case]
    assert text in refused_training(2, network=network, data=pictures, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
DEVICES = {
    "none": (
        ["--device", "gpu"],
        "--device gpu: expected a GPU that mpidl can train on, found none on ",
    ),
    "none of that number": (["--gpus", "0,1"], "--gpus 0,1: expected a GPU that mpidl can train"),
    "for no GPU": (
        ["--device", "cpu", "--gpus", "0"],
        "--gpus 0: expected --device gpu with it, found --device cpu",
    ),
}


@pytest.mark.parametrize("command", ["train", "predict"])
@pytest.mark.parametrize("case", DEVICES)
def test_devices(command, case, pictures, tmp_path):
    """Told by rank 0 alone, before the data are read or a folder is made."""
    options, text = DEVICES[case]
    if command == "train":
        words = small.command("train", *options, data=pictures, out=tmp_path / "run")
    else:
        words = ["-m", "mpidl.predict", *options, "--model", "no.h5", "--data", pictures]
    assert refusal(2, *words, env=NO_GPU).startswith(text)
    assert not (tmp_path / "run").exists()


FOLDERS = {
    "missing": lambda folder: None,
    "empty": lambda folder: folder.mkdir(),
    "without sub-folders": lambda folder: save(folder / "a.png", pixels_of(0, 1, 12, 12)),
    "a file": lambda folder: folder.touch(),
    "an empty class": lambda folder: [
        save(folder / "bar" / "a.png", pixels_of(0, 1, 12, 12)),
        (folder / "dot").mkdir(),
    ],
}
FOUND = {
    "missing": "no such folder",
    "empty": "expected sub-folders named by class, with .png, .jpg, .jpeg, .bmp, .tif, .tiff files "
    "in them; found an",
    "without sub-folders": "found images (a.png) and no class sub-folders",
    "a file": "expected a folder, an HDF5 file, a .mat file or an .npz file, found another file",
    "an empty class": "sub-folder dot has no images",
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders(case, tmp_path):
    folder = tmp_path / "images"
    FOLDERS[case](folder)
    text = refused_training(2, data=folder, out=tmp_path / "run")
    assert str(folder) in text and FOUND[case] in text
    assert not (tmp_path / "run").exists()


@pytest.fixture
def spoiled(pictures, tmp_path):
    """A copy of the images, to spoil one of."""
    return shutil.copytree(pictures, tmp_path / "images")


@pytest.mark.parametrize(
    "which", ["box/33.png", pytest.param("dot/69.png", marks=pytest.mark.slow("jobs"))]
)
def test_a_corrupt_image(spoiled, tmp_path, which):
    """Whichever rank reads it, in training or in the test."""
    path = spoiled / which
    path.write_bytes(path.read_bytes()[:90])
    words = ["--batch-size", 50, "--epochs", 1]
    places = {"data": spoiled, "out": tmp_path / "run"}
    text = refused_training(3, *words, refused=refusal_of_a_job, **places)
    assert text.startswith(f"{path}: the image cannot be read: ")


def test_an_image_of_another_size(spoiled, tmp_path):
    path = save(spoiled / "box" / "33.png", pixels_of(0, 1, 13, 12))
    text = refused_training(
        2, "--batch-size", 50, "--epochs", 1, data=spoiled, out=tmp_path / "run"
    )
    assert text.startswith(f"{path}: expected a 12x12 gray image like the first one")
    assert "found 12x13 gray" in text


def test_test_images_of_another_size(pictures, tmp_path):
    other = tmp_path / "other"
    for name in small.CLASSES:
        save(other / name / "a.png", pixels_of(0, 1, 16, 16))
    text = refused_training(2, "--test-data", other, data=pictures, out=tmp_path / "run")
    assert text.startswith("--test-data: expected images of shape (1, 12, 12)")


def test_resume_of_nothing(tmp_path):
    text = refusal(2, *small.command("train", "--resume", tmp_path, network=None))
    assert text == f"--resume {tmp_path}: expected a folder with checkpoint.h5, found none"


CONFIGS = {
    "missing": (None, "cannot be read: No such file or directory"),
    "no TOML": ("epochs = = 3\n", "not a TOML file: "),
    "unknown name": ("epoch = 3\n", "unknown option epoch: did you mean epochs"),
    "bad value": ("[options]\nbatch_size = 0\n", "batch_size must be at least 1, found 0"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config(case, tmp_path):
    content, text = CONFIGS[case]
    path = tmp_path / "options.toml"
    if content is not None:
        path.write_text(content)
    found = refused_training(2 if case == "bad value" else None, "--config", path)
    assert str(path) in found and text in found


def test_an_output_folder_that_cannot_be_made(pictures, tmp_path):
    (tmp_path / "file").touch()
    for out in (Path("/proc/mpidl/run"), tmp_path / "file"):
        text = refused_training(2, data=pictures, out=out)
        assert text.startswith(f"--out {out}: cannot be written: ")


# Limits the size of files, once MPI has its own; shared memory is a file, too.
FULL = """
import resource, sys
from mpi4py import MPI
from mpidl.cli.train import main
from mpidl.comm import failure
from mpidl.training import trainer

trainer.NodeCache = lambda images, *_: images
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
failure.run(main)
"""


@pytest.mark.parametrize(("limit", "file"), [(40_000, "checkpoint.h5"), (300, "options.toml")])
def test_a_full_disk(pictures, tmp_path, limit, file):
    out = tmp_path / "run"
    script = tmp_path / "full.py"
    script.write_text(FULL)
    options = ["--epochs", 1, "--batch-size", 50]
    words = small.command("train", *options, network="digits", data=pictures, out=out)
    text = refusal_of_a_job(2, script, limit, *words[2:])
    assert text == f"{out / file}: cannot be written: File too large"
    assert not (out / file).exists()


@pytest.mark.slow("jobs")
def test_metrics_on_a_full_disk(pictures, tmp_path):
    """Found by rank 0 alone, in the middle of an epoch."""
    out, script = tmp_path / "run", tmp_path / "full.py"
    script.write_text(FULL)
    options = ["--epochs", 50, "--batch-size", 16]
    words = small.command("train", *options, data=pictures, out=out)
    text = refusal_of_a_job(2, script, 31_000, *words[2:])
    assert text == f"{out / 'metrics.jsonl'}: cannot be written: File too large"
