"""Create small sets of images, run short jobs on them, and read the output and files of jobs."""

import hashlib
import json
import os
import re
from pathlib import Path

import h5py
import launcher
import numpy as np
import pool
import pytest
from image_sets import save

CLASSES = ("bar", "box", "dot")
# A tenth of the 210 images is held out. The other 189 images form 3 mini-batches of 50 and one of
# 39 images. The last blocks of these mini-batches have 2 and 7 images.
PER_CLASS, ITERATIONS = 70, 4


def network(function):
    """Return the value of --network for a function in networks.py."""
    return f"{Path(__file__).with_name('networks.py')}:{function}"


SMALL = network("small")
STOPPED = 75  # exit code after a signal
ENDLESS = ["--epochs", 10**6]
ROOT = str(launcher.ROOT)


def draw_images(folder, per_class=PER_CLASS, side=12, channels=1):
    """Write a folder of images in three classes that a small network can learn."""
    numbers = np.random.default_rng(0)
    for name in CLASSES:
        for i in range(per_class):
            pixels = numbers.integers(0, 60, (channels, side, side), dtype=np.uint8)
            row, column = numbers.integers(1, 7, 2)
            rows, columns = {"bar": (side, 1), "box": (4, 4), "dot": (1, 1)}[name]
            pixels[:, row : row + rows, column : column + columns] = 250
            save(folder / name / f"{i:02}.png", pixels)
    return folder


def write_pairs(folder, count=90, side=10):
    """Write HDF5 files of images with different kinds of targets; return {kind: file}."""
    images = np.random.default_rng(0).integers(0, 256, (count, 1, side, side), dtype=np.uint8)
    targets = {
        "numbers": images.mean(axis=(2, 3), dtype=np.float32)[:, 0] / 255,
        "images": images.astype(np.float32) / 510,
        "pixels": (images[:, 0] // 86).astype(np.int32),
        "labels": (images[:, 0, :, 0] > 128)[:, :3].astype(np.uint8),
    }
    for name, values in targets.items():
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["images"], file["targets"] = images, values
    return {name: folder / f"{name}.h5" for name in targets}


def without_plots():
    """Return environment variables that hide matplotlib, because plots take longer than the run."""
    return {"PYTHONPATH": os.pathsep.join([str(Path(__file__).with_name("no_plots")), ROOT])}


def command(name, *options, network=SMALL, data=None, out=None):
    """Return the command-line arguments of `python` that run a command of mpidl."""
    words = ["-m", name if name == "benchmarks" else f"mpidl.{name}", *options]
    for flag, value in (("--network", network), ("--data", data), ("--out", out)):
        words += [] if value is None else [flag, value]
    return words


def train(ranks, data, out, *options, network=SMALL, check=0, env=None):
    """Train to the end with mini-batches of 50, and return the Result of the job."""
    words = command("train", "--batch-size", 50, *options, network=network, data=data, out=out)
    if env:
        return launcher.mpirun(ranks, *words, env=without_plots() | env, check=check)
    return pool.run(ranks, *words, check=check)


def trained_hash(ranks, data, out, *options, **keywords):
    """Train like `train`, and return the hash of the weights."""
    train(ranks, data, out, *options, **keywords)
    return weights_hash(out)


def resume(ranks, folder, *options, check=0):
    """Resume the run in a folder, and return the Result of the job."""
    words = command("train", "--resume", folder, *options, network=None)
    return pool.run(ranks, *words, check=check)


def predict(model, data, *options, ranks=2):
    """Return the lines that a prediction prints."""
    words = command("predict", "--model", model, *options, network=None, data=data)
    return output_lines(pool.run(ranks, *words, check=0))


def refused_prediction(model, data, *options, ranks=2):
    words = command("predict", "--model", model, *options, network=None, data=data)
    return refusal(pool.run(ranks, *words))


def start(ranks, data, out, *options, network=SMALL, until="Epoch: 2,"):
    """Start a run with mini-batches of 50; return the Job at the line that begins with `until`."""
    words = ["--batch-size", 50, *options]
    words = command("train", *words, network=network, data=data, out=out)
    job = launcher.start(ranks, *words, env=without_plots())
    for line in job.stdout:
        if line.startswith(until):
            return job
    pytest.fail(launcher.finish(job).stderr)


# Text that mpirun adds to stderr if a job ends early. MPICH adds a line and a box of "=". Open MPI
# adds a NUL character and boxes between lines of "-". Both add lines that start with a host name.
NOISE = re.compile(
    r"\0|-{50,}$.*?^-{50,}$|^={50,}$.*|^Abort\([^\n]*|^\[(?:warn|[\w.-]+[:@][\w.]+)\][^\n]*",
    re.M | re.S,
)


def error_lines(result):
    """Return the program's stderr lines, without the warning about too few cores."""
    lines = NOISE.sub("", result.stderr).splitlines()
    return [line for line in lines if line.strip() and "which slows all of them" not in line]


def output_lines(result):
    """Return the lines of stdout, without the note that the kernels are missing."""
    lines = result.stdout.splitlines()
    return [line for line in lines if not line.startswith("note: without C kernels ")]


def refusal(result):
    """Return the one-line error of a command that exited with code 2, without "mpidl: "."""
    assert result.returncode == 2, result.stdout + result.stderr
    lines = error_lines(result)
    assert len(lines) == 1 and lines[0].startswith("mpidl: "), result.stderr
    assert "Traceback" not in result.stdout
    return lines[0].removeprefix("mpidl: ")


def summary(out):
    return json.loads((out / "summary.json").read_text())


def weights_hash(out):
    return summary(out)["weights_sha256"]


def metrics(out):
    """Return the records of metrics.jsonl, without the records of the ranks' times."""
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] != "ranks"]


def iterations(out):
    """Return the iterations recorded in metrics.jsonl, in the order of the file."""
    return [record["iteration"] for record in metrics(out) if record["kind"] == "iteration"]


def states(out):
    """Return {iteration: state} of the certificate of a run, without bonds between states."""
    chain = json.loads((out / "certificate.json").read_text())["predicate"]["chain"]
    names = "epoch", "rollbacks", "tables", "progress", "losses"
    return {
        state["iteration"]: {name: state[name] for name in names}
        for state in chain
        if state["kind"] == "state"
    }


def rehash(path):
    """Return the SHA-256 of the weights in a model file, computed only with h5py.

    The hash covers all learnables, then all state, layer by layer, as little-endian float32 in C
    order.
    """
    learnables = (
        "weight",
        "recurrent_weight",
        "bias",
        "recurrent_bias",
        "gamma",
        "beta",
        "slope",
        "scale",
    )
    tables = {"learnables": learnables, "state": ("mean", "variance")}
    digest, count = hashlib.sha256(), 0
    with h5py.File(path) as file:
        layers = [layer["name"] for layer in json.loads(file.attrs["network"])]
        for table, names in tables.items():
            for layer in layers:
                for name in names:
                    if f"{table}/{layer}/{name}" in file:
                        array = file[f"{table}/{layer}/{name}"][()]
                        assert array.dtype == np.float32
                        digest.update(array.astype("<f4").tobytes(order="C"))
                        count += 1
        assert count == sum(len(group) for table in tables for group in file[table].values())
    return digest.hexdigest()


def assert_same_end(expected, out):
    """Assert that two runs, given by their folders, ended with the same results."""
    for name in ("weights_sha256", "accuracy", "loss", "iterations", "epochs"):
        assert summary(out)[name] == summary(expected)[name], name


def assert_same_weights(hashes):
    """Assert that all runs ended with the same weights, given {description: hash}."""
    assert len(set(hashes.values())) == 1, f"the weights depend on the ranks: {hashes}"
