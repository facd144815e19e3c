"""Test the check of a run's files, as in `mpidl.verify RUN`."""

import re
from pathlib import Path

import numpy as np
import pytest

import mpidl as dl
from mpidl import numerics
from mpidl.cli import verify
from mpidl.errors import UserError
from mpidl.nn import zoo
from mpidl.training.files import checkpoint, generations, model_file

OLD = Path(__file__).parents[2] / "fixtures" / "adam"
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
    assert head.split() == ["file", "iteration", "epoch", "written", "made", "by", "weights_sha256"]
    assert all(
        re.search(r" \d{4}-\d\d-\d\d \d\d:\d\d:\d\d .* +[0-9a-f]{64}  complete$", r) for r in rows
    )


def test_the_versions_that_made_files(tmp_path, capsys):
    net = network(1)
    options = dl.TrainingOptions(
        max_iterations=1, validation_frequency=0, verbose="off", plots="none"
    )
    images = np.zeros((4, 1, 6, 6), np.uint8), np.arange(4) % 3
    dl.train(net, images, options, out=str(tmp_path))
    dl.save_model(tmp_path / "model.h5", net)
    assert verify.check_run(str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    expected = f"numerics {numerics.VERSION}, mpidl {dl.__version__}"
    assert len(lines) == 2 and all(f" {expected} " in line for line in lines)
    for path in (OLD / "model.h5", OLD):  # of a version that did not record them
        assert verify.check_run(str(path)) == 0
        assert all(
            " before numerics 1 " in line for line in capsys.readouterr().out.splitlines()[1:]
        )


def test_a_copy_of_a_network_keeps_the_versions(tmp_path, monkeypatch):
    """A file that is loaded and saved again has the versions that trained its weights."""
    dl.save_model(tmp_path / "new.h5", network(1))
    monkeypatch.setattr(numerics, "VERSION", numerics.VERSION + 1)
    for path in tmp_path / "new.h5", OLD / "model.h5":
        net, description = dl.load_model(path)
        assert (net.numerics, net.mpidl_version) == (
            description.get("numerics"),
            description.get("mpidl_version"),
        )
        part = net.up_to(net.layer_names[-1]).append_layer(dl.Softmax())
        dl.save_model(tmp_path / "copy.h5", part)
        (old,), (new,) = (
            generations.generations(path),
            generations.generations(tmp_path / "copy.h5"),
        )
        assert new.origin == old.origin
    assert network(1).numerics == numerics.VERSION  # negative control


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
