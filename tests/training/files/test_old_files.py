"""Test that files of an earlier version of mpidl load, predict and resume with the same bytes.

For each run in `RUNS`, tests/fixtures contains the model after 12 iterations, and the checkpoint of
the same run stopped after 5 iterations. The earlier version also computed `expected.json`. Its
modules and classes had other names.
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from cpu_builds import needs_kernels

import mpidl as dl
from mpidl.core import keyed

FIXTURES = Path(__file__).parents[2] / "fixtures"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
RUNS = {
    "sgdm": {
        "solver": "sgdm",
        "learning_rate": 0.02,
        "l2": 1e-3,
        "validation_frequency": 2,
        "output_network": "best-validation",
    },
    "adam": {
        "solver": "adam",
        "gradient_threshold": 0.5,
        "learn_rate_schedule": "cosine",
        "warmup_iterations": 2,
        "validation_frequency": 0,
        "shuffle": "every-epoch",
    },
}


def images(count, name):
    uniform = keyed.uniform(0, f"fixture {name}", count * 2 * 9 * 8)
    pixels = (uniform.reshape(count, 2, 9, 8) * 200).astype(np.uint8)
    labels = np.arange(count) * 7 % 3
    pixels[np.arange(count), 0, labels] = 255
    return dl.ArrayDatastore(pixels, labels, ["circle", "square", "triangle"])


def network():
    layers = [
        *(dl.Conv2D(3, 4, padding=1), dl.BatchNorm(), dl.ReLU(), dl.MaxPool2D(2), dl.Dropout(0.3)),
        *(dl.Conv2D(3, 3, padding=1, name="branch"), dl.LeakyReLU(0.1), dl.CrossChannelNorm(3)),
        dl.Dense(3),
    ]
    return dl.Network(layers, (2, 9, 8), seed=5)


@needs_kernels
@pytest.mark.parametrize("run", RUNS)
def test_a_model_predicts_the_same_bytes(world, run):
    net, description = dl.load_model(FIXTURES / run / "model.h5")
    assert description["classes"] == ["circle", "square", "triangle"]
    assert dl.weights_sha256(net) == EXPECTED[run]["weights"]
    store = images(20, "test")
    scores = np.ascontiguousarray(net.predict(store.images), "<f4")
    assert hashlib.sha256(scores).hexdigest() == EXPECTED[run]["scores"]
    predicted = dl.predict(net, store, world=world)  # with folded batch normalization
    np.testing.assert_allclose(predicted, scores, rtol=0, atol=1e-6)


@pytest.mark.slow_on_ranks
@needs_kernels
@pytest.mark.parametrize("run", RUNS)
def test_a_checkpoint_resumes_to_the_same_bytes(world, tmp_path, run):
    folder = world.broadcast(str(tmp_path / "run"))
    if world.rank == 0:
        shutil.copytree(FIXTURES / run, folder)
    world.barrier()
    net = network()
    options = dl.TrainingOptions(
        **{"epochs": 4, "batch_size": 40, "seed": 3, "verbose": "off", "plots": "none"},
        **{"validation": images(30, "others"), "normalization": "zerocenter", **RUNS[run]},
    )
    pictures = images(100, "pictures")
    result = dl.train(net, pictures, options, world=world, resume=folder)
    assert dl.weights_sha256(net) == EXPECTED[run]["weights"]
    for name in ("iterations", "best_iteration", "loss"):
        assert getattr(result, name) == EXPECTED[run][name], name
