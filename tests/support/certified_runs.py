"""Train small certified runs in this process, and audit them."""

import contextlib
import functools
import io
import json
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

from mpidl.certificates import command
from mpidl.cli import train
from mpidl.cli import train_run as train_module
from mpidl.ranks.world import World

NETWORK = f"{Path(__file__).parents[1] / 'launch' / 'networks.py'}:small"
# 66 images to train on form 5 mini-batches per epoch, and 6 images are for validation.
TRAIN, TEST, SIDE, CLASSES, ITERATIONS = 72, 10, 10, ["bar", "box", "dot"], 15
OPTIONS = """
--batch-size 16 --epochs 3 --validation-fraction 0.1 --validation-frequency 4
--shuffle every-epoch --mixup 0.2 --average ema --average-decay 0.9 --normalization zerocenter
--certify-every 2 --checkpoint-keep 4 --plots none --verbose off --device cpu
""".split()


def arrays():
    """Return the arrays of a set: images whose class is the position of a bright row."""
    numbers = np.random.default_rng(0)
    images = numbers.integers(0, 200, (TRAIN + TEST, 1, SIDE, SIDE), dtype=np.uint8)
    labels = np.arange(TRAIN + TEST) * 7 % len(CLASSES)
    images[np.arange(TRAIN + TEST), 0, labels * 3] = 255
    return {
        "images": images[:TRAIN],
        "labels": labels[:TRAIN],
        "images_test": images[TRAIN:],
        "labels_test": labels[TRAIN:],
        "classes": np.array(CLASSES),
    }


def write_data(path, **changes):
    """Write the set, with some arrays replaced, and return the path."""
    np.savez(path, **{**arrays(), **changes})
    return path


@functools.cache
def one_world():
    """Return the world of all commands in this process, which has a limit of communicators."""
    return World(threads=None)


def train_run(data, out, *options, certify="public"):
    """Train in this process, and return the folder of the run."""
    words = ["--network", NETWORK, "--data", data, "--out", out, "--certify", certify, *OPTIONS]
    train_command(*words, *options)
    return Path(out)


def train_command(*words):
    """Run the command `train` in this process."""
    with contextlib.redirect_stdout(io.StringIO()), _one_world(train_module):
        code = train.main([str(word) for word in words])
    assert code == 0


def _one_world(module):
    return mock.patch.object(module, "World", lambda **options: one_world())


class Result(NamedTuple):
    """The result of the command `audit`: its exit code and its lines."""

    code: int
    lines: list[str]

    def rows(self, subject):
        """Return (verdict, text) of the lines about a subject."""
        lines = [line for line in self.lines if line.startswith(f"{subject}  ")]
        return [tuple(row[len(subject) :].split(maxsplit=1)) for row in lines]

    @property
    def differing(self):
        """The subjects that differ, from the last line."""
        verdict, _, text = self.lines[-1].partition(": ")
        assert verdict in ("equal", "DIFFERENT"), self.lines
        return text.split(", ") if verdict == "DIFFERENT" else []


def audit(run, data, *words):
    """Run the command `audit` in this process, and return its Result."""
    words = [run, *(() if data is None else ("--data", data)), "--device", "cpu", *words]
    output, errors = io.StringIO(), io.StringIO()
    silence = contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors)
    with silence[0], silence[1], _one_world(command):
        code = command.main([str(word) for word in words])
    return Result(code, output.getvalue().splitlines())


def chain(run):
    return json.loads((run / "certificate.json").read_text())["predicate"]["chain"]
