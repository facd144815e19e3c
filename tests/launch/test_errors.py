"""Test that invalid options and data give one line from rank 0 and exit code 2.

No process of the job may remain.
"""

import shutil
import uuid
from pathlib import Path

import jobs
import pool
import pytest
from image_sets import pixels_of, save
from launcher import finish, marked, start
from limits import wait_until

from mpidl.nn import zoo

SLOW = pytest.mark.slow("jobs")
NETWORKS = jobs.network("")


def run_in_pool(ranks, *words, env=None):
    return jobs.refusal(pool.run(ranks, *words, env=env))


def run_as_job(ranks, *words):
    """Run a separate job, wait until its processes are gone, and return its one-line error."""
    mark = uuid.uuid4().hex
    with start(ranks, *words, env=jobs.without_plots() | {"MPIDL_TEST_MARK": mark}) as job:
        result = finish(job)
        wait_until(lambda: not marked(mark))
    return jobs.refusal(result)


def refused_training(ranks, *options, network=jobs.SMALL, run=run_in_pool, **paths):
    return run(ranks, *jobs.command("train", *options, network=network, **paths))


# All ranks parse the same command line before they communicate, and only rank 0 prints.
OPTIONS = {
    "unknown option": (["--lerning-rate", 1], "unknown option --lerning-rate: did you mean --lea"),
    "mini-batch of 0": (["--batch-size", 0], "--batch-size must be at least 1, found 0"),
    "negative rate": (["--learning-rate", -1], "--learning-rate must be positive, found -1"),
    "no number": (["--epochs", "many"], "--epochs must be a whole number, at least 1, found many"),
    "two sizes": (
        ["--batch-per-rank", 8, "--batch-size", 8],
        "--batch-size 8 (command line) and --batch-per-rank 8 (command line): expected at most "
        "one of them",
    ),
    "stray word": (["folder"], "unexpected argument folder"),
    "no value": (["--data"], "--data: expected one argument"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case):
    options, text = OPTIONS[case]
    assert text in refused_training(None, *options)


@SLOW
def test_an_option_of_a_job():
    text = refused_training(2, "--lerning-rate", 0.1, run=run_as_job)
    assert text.startswith("unknown option --lerning-rate: did you mean --learning-rate")


NETWORK = {
    "unknown": (
        "digit",
        f"--network digit: expected {', '.join(zoo.NETWORKS)} or FILE.py:FUNCTION: did you mean "
        "digits?",
    ),
    "no file": ("missing.py:small", "--network missing.py:small: no such file: missing.py"),
    "no function": (f"{NETWORKS}smal", "networks.py defines no function smal: did you mean small"),
    "output size": (
        f"{NETWORKS}one_output",
        "expected 3 outputs, one per class of the data (or per target value), found 1",
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
        "--gpus 0: expected --device gpu, found --device cpu",
    ),
}


@pytest.mark.parametrize("command", ["train", "predict"])
@pytest.mark.parametrize("case", DEVICES)
def test_devices(command, case, pictures, tmp_path):
    """An unusable device is reported by rank 0 before it reads data or creates a folder."""
    options, text = DEVICES[case]
    if command == "train":
        words = jobs.command("train", *options, data=pictures, out=tmp_path / "run")
    else:
        words = ["-m", "mpidl.predict", *options, "--model", "no.h5", "--data", pictures]
    assert run_in_pool(2, *words, env=NO_GPU).startswith(text)
    assert not (tmp_path / "run").exists()


PIXELS = pixels_of(0, 1, 12, 12)
FOLDERS = {
    "missing": (lambda folder: None, "no such folder"),
    "empty": (
        lambda folder: folder.mkdir(),
        "expected sub-folders named by class, with .png, .jpg, .jpeg, .bmp, .tif, .tiff files in "
        "them; found an",
    ),
    "without sub-folders": (
        lambda folder: save(folder / "a.png", PIXELS),
        "found images (a.png) and no class sub-folders",
    ),
    "a file": (
        lambda folder: folder.touch(),
        "expected a folder, an HDF5 file, a .mat file, an .npz file or a .csv table, "
        "found a file of another type",
    ),
    "an empty class": (
        lambda folder: [save(folder / "bar" / "a.png", PIXELS), (folder / "dot").mkdir()],
        "sub-folder dot has no images",
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders(case, tmp_path):
    folder, (write, expected) = tmp_path / "images", FOLDERS[case]
    write(folder)
    text = refused_training(2, data=folder, out=tmp_path / "run")
    assert str(folder) in text and expected in text
    assert not (tmp_path / "run").exists()


@pytest.fixture
def spoiled(pictures, tmp_path):
    """Return a copy of the images, for tests that damage an image."""
    return shutil.copytree(pictures, tmp_path / "images")


@SLOW
@pytest.mark.parametrize("name", ["box/33.png", pytest.param("dot/69.png", marks=SLOW)])
def test_a_corrupt_image(spoiled, tmp_path, name):
    """A damaged image is reported in training and in the test, whichever rank reads the image."""
    path = spoiled / name
    path.write_bytes(path.read_bytes()[:90])
    paths = {"data": spoiled, "out": tmp_path / "run"}
    text = refused_training(2, "--batch-size", 50, "--epochs", 1, run=run_as_job, **paths)
    assert text.startswith(f"{path}: the image cannot be read: ")


def test_an_image_of_another_size(spoiled, tmp_path):
    path = save(spoiled / "box" / "33.png", pixels_of(0, 1, 13, 12))
    paths = {"data": spoiled, "out": tmp_path / "run"}
    text = refused_training(2, "--batch-size", 50, "--epochs", 1, **paths)
    assert text.startswith(f"{path}: expected a 12x12 gray image like the first one")
    assert "found 13x12 gray" in text


def test_test_images_of_another_size(pictures, tmp_path):
    other = tmp_path / "other"
    for name in jobs.CLASSES:
        save(other / name / "a.png", pixels_of(0, 1, 16, 16))
    text = refused_training(2, "--test-data", other, data=pictures, out=tmp_path / "run")
    assert text.startswith("--test-data: expected images of shape (1, 12, 12)")


def test_resume_without_a_checkpoint(tmp_path):
    text = refused_training(2, "--resume", tmp_path, network=None)
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
    line = refused_training(2 if case == "bad value" else None, "--config", path)
    assert str(path) in line and text in line


def test_an_output_folder_that_cannot_be_made(pictures, tmp_path):
    (tmp_path / "file").touch()
    for out in (Path("/proc/mpidl/run"), tmp_path / "file"):
        text = refused_training(2, data=pictures, out=out)
        assert text.startswith(f"--out {out}: cannot be written: ")


# A program that limits the size of files. It first starts MPI, whose shared memory also consists of
# files, and disables the cache of images in shared memory.
FULL = """
import resource, sys
from mpi4py import MPI
from mpidl.cli.train import main
from mpidl.ranks import acts, failure
from mpidl.training import trainer

trainer.NodeCache = lambda images, *_: images
acts.record()  # creates a file in memory
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
failure.run(main)
"""


@pytest.mark.parametrize(
    ("limit", "file", "network", "options"),
    [
        (40_000, "checkpoint.h5", "digits", ["--epochs", 1, "--batch-size", 50]),
        pytest.param(300, "options.toml", "digits", ["--batch-size", 50], marks=SLOW),
        # only rank 0 detects the error, in the middle of an epoch
        pytest.param(
            *(31_000, "metrics.jsonl", jobs.SMALL, ["--epochs", 50, "--batch-size", 16]),
            marks=SLOW,
        ),
    ],
    ids=["checkpoint", "options", "metrics"],
)
def test_a_full_disk(pictures, tmp_path, limit, file, network, options):
    out, script = tmp_path / "run", tmp_path / "full.py"
    script.write_text(FULL)
    words = jobs.command("train", *options, network=network, data=pictures, out=out)
    text = run_as_job(2, script, limit, *words[2:])
    assert text == f"{out / file}: cannot be written: File too large"
    assert file == "metrics.jsonl" or not (out / file).exists()
