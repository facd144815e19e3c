"""A small set of images and short runs on it, with what they left."""

import hashlib
import json
import os
import re
from pathlib import Path

import h5py
import launcher
import numpy as np
import pool
from image_sets import save

CLASSES = ("bar", "box", "dot")
# Of 210 images a tenth is for the test, so that 189 are trained on: 3 mini-batches of 50 and one of
# 39, whose last blocks hold 2 and 7 images.
PER_CLASS, ITERATIONS = 70, 4


def of(function):
    """What --network calls a function of networks.py."""
    return f"{Path(__file__).with_name('networks.py')}:{function}"


SMALL = of("small")


def draw(folder, per_class=PER_CLASS, side=12, channels=1):
    """A folder of images in three classes that a small network can learn."""
    numbers = np.random.default_rng(0)
    for name in CLASSES:
        for i in range(per_class):
            pixels = numbers.integers(0, 60, (channels, side, side), dtype=np.uint8)
            row, column = numbers.integers(1, 7, 2)
            rows, columns = {"bar": (side, 1), "box": (4, 4), "dot": (1, 1)}[name]
            pixels[:, row : row + rows, column : column + columns] = 250
            save(folder / name / f"{i:02}.png", pixels)
    return folder


def pair(folder, count=90, side=10):
    """HDF5 files of images with targets that can be learned; {kind of targets: file}."""
    images = np.random.default_rng(0).integers(0, 256, (count, 1, side, side), dtype=np.uint8)
    targets = {
        "numbers": images.mean(axis=(2, 3), dtype=np.float32)[:, 0] / 255,
        "images": images.astype(np.float32) / 510,
        "pixels": (images[:, 0] // 86).astype(np.int32),
    }
    for name, values in targets.items():
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["images"], file["targets"] = images, values
    return {name: folder / f"{name}.h5" for name in targets}


def without_plots():
    """Environment in which matplotlib is missing: drawing takes longer than a small run."""
    return {"PYTHONPATH": os.pathsep.join([str(Path(__file__).with_name("no_plots")), ROOT])}


ROOT = str(launcher.ROOT)


def command(name, *options, network=SMALL, data=None, out=None):
    """The words after `python` of a command."""
    words = ["-m", name if name == "benchmarks" else f"mpidl.{name}", *options]
    for flag, value in (("--network", network), ("--data", data), ("--out", out)):
        words += [] if value is None else [flag, value]
    return words


def train(ranks, data, out, *options, network=SMALL, check=0, env=None):
    """Train to the end in mini-batches of 50; returns the job's Result."""
    words = command("train", "--batch-size", 50, *options, network=network, data=data, out=out)
    if env:
        return launcher.mpirun(ranks, *words, env=without_plots() | env, check=check)
    return pool.run(ranks, *words, check=check)


def resume(ranks, folder, *options, check=0):
    """Go on with the run in a folder; returns the job's Result."""
    words = command("train", "--resume", folder, *options, network=None)
    return pool.run(ranks, *words, check=check)


# What mpirun adds to stderr where a job ends early: MPICH a line and a box of "=", Open MPI boxes
# between lines of "-" and a NUL, both lines headed by a host.
NOISE = re.compile(
    r"\0|-{50,}$.*?^-{50,}$|^={50,}$.*|^Abort\([^\n]*|^\[(?:warn|[\w.-]+[:@][\w.]+)\][^\n]*",
    re.M | re.S,
)


def own_lines(result):
    """The lines of stderr that are the program's, but for the one on more ranks than cores."""
    lines = NOISE.sub("", result.stderr).splitlines()
    return [line for line in lines if line.strip() and "which slows all of them" not in line]


def printed(result):
    """The lines of stdout, but for the one that says that there are no kernels."""
    lines = result.stdout.splitlines()
    return [line for line in lines if not line.startswith("note: without C kernels ")]


def summary(out):
    return json.loads((out / "summary.json").read_text())


def iterations(out):
    """The iterations that metrics.jsonl has records of, in its order."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [r["iteration"] for r in records if r["kind"] == "iteration"]


def rehash(path):
    """SHA-256 of a model file's weights, in the order its description of the network calls for.

    All learnables, then all state, layer by layer, as little-endian float32 in C order. Written
    from the description of the file alone.
    """
    tables = {"learnables": ("weight", "bias", "gamma", "beta"), "state": ("mean", "variance")}
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


def assert_same(hashes):
    """The check that the promise of one result on any number of ranks is held to."""
    assert len(set(hashes.values())) == 1, f"the weights depend on the ranks: {hashes}"
