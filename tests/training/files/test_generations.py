"""Test the check of a run's files, as in `mpidl.verify RUN`."""

import re

import numpy as np
import pytest

import mpidl as dl
from mpidl.cli import verify
from mpidl.errors import UserError
from mpidl.nn import zoo
from mpidl.training.files import checkpoint, generations, model_file

FACTS = {"classes": None, "input_shape": (1, 6, 6), "normalization": "none"}


def network(seed):
    layers = [dl.Conv2D(3, 2), dl.BatchNorm(), dl.ReLU(), dl.Dense(3)]
    return dl.Network(layers, (1, 6, 6), seed=seed)


def save(folder, net, **position):
    tables = {"learnables": net.parameters, "state": net.state, "optimizer": {}}
    checkpoint.save(folder, tables, {**FACTS, "network": net.spec(), "position": position})


@pytest.fixture
def run(tmp_path):
    """Return the folder of a run with two checkpoints and a model."""
    save(tmp_path, network(1), iteration=10, epoch=2, batch=0)
    save(tmp_path, network(2), iteration=14, epoch=2, batch=4)
    model_file.save_model(tmp_path / "model.h5", network(3))
    return tmp_path


def test_complete_files(run, capsys):
    files = generations.generations(run)
    assert [file.name for file in files] == [
        "checkpoint.h5",
        "checkpoint-previous.h5",
        "model.h5",
    ]
    hashes = [dl.weights_sha256(network(seed)) for seed in (2, 1, 3)]
    assert [file.weights_sha256 for file in files] == hashes
    assert [(file.iteration, file.epoch) for file in files] == [(14, 2), (10, 1), (None, None)]
    assert [file.problem for file in files] == [None] * 3
    assert verify.check_run(str(run)) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["file", "iteration", "epoch", "written", "weights_sha256"]
    assert all(
        re.search(r" \d{4}-\d\d-\d\d \d\d:\d\d:\d\d +[0-9a-f]{64}  complete$", r) for r in rows
    )


@pytest.mark.parametrize(
    "name, code", [("checkpoint.h5", 2), ("checkpoint-previous.h5", 0), ("model.h5", 2)]
)
def test_damaged_files(run, name, code, capsys):
    content = bytearray((run / name).read_bytes())
    weight = network(2).parameters["conv1.weight"] if name == "checkpoint.h5" else None
    place = len(content) // 2 if weight is None else content.index(weight.tobytes())
    content[place] ^= 1
    (run / name).write_bytes(content[: None if weight is not None else -100])
    assert verify.check_run(str(run)) == code
    lines = capsys.readouterr().out.splitlines()[1:]
    damaged = [line for line in lines if not line.endswith("  complete")]
    assert len(lines) == 3 and len(damaged) == 1 and damaged[0].startswith(name)
    assert "cannot be read" in damaged[0] or "does not match its checksum" in damaged[0]


def test_missing_files(run, tmp_path):
    (run / "checkpoint.h5").unlink()  # as if the process ended between the two renames of a save
    files = generations.generations(run)
    assert files[0].problem == "it is missing" and not generations.are_newest_complete(files)
    (run / "checkpoint-previous.h5").unlink()
    assert [file.name for file in generations.generations(run)] == ["model.h5"]
    assert generations.generations(run / "model.h5") == generations.generations(run)
    (run / "model.h5").unlink()
    with pytest.raises(UserError, match="found neither checkpoint.h5 nor model.h5 in it"):
        generations.generations(run)
    with pytest.raises(UserError, match="nothing: expected the folder of a run, found nothing"):
        generations.generations(run / "nothing")


@pytest.mark.parametrize("name", ["digits", "resnet"])
def test_the_arrays_of_a_file_are_in_the_order_of_the_network(name, tmp_path):
    """The hash of a file's arrays equals the hash of the network's weights.

    Computing the hash of a file needs no layer classes.
    """
    net = zoo.NETWORKS[name]((3, 32, 32), 10, seed=1)
    net.state = {key: np.full_like(a, i) for i, (key, a) in enumerate(net.state.items())}
    save(tmp_path, net, iteration=1, epoch=1, batch=1)
    assert generations.generations(tmp_path)[0].weights_sha256 == dl.weights_sha256(net)


def test_a_run_is_the_only_argument():
    assert verify.parse(["runs/a"]).run == "runs/a"
    assert verify.parse([]).run is None and verify.parse([]).ranks == [1, 2, 3, 4]
    with pytest.raises(UserError, match="^--ranks: expected no RUN with it, found runs/a$"):
        verify.parse(["runs/a", "--ranks", "2"])
    with pytest.raises(UserError, match="^--seed: expected no RUN with it, found runs/a$"):
        verify.parse(["runs/a", "--seed", "2"])
