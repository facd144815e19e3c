"""Activations, dropout, cross-channel normalization, concatenation and transposed convolution on
GPUs against NumPy in float64, on the emulated device."""

import numpy as np
import pytest
from cpu_builds import BUILDS, on_all_builds

import mpidl as dl
from mpidl.backends import CPU as cpu
from mpidl.backends import REFERENCE as reference
from mpidl.backends.gpu import array
from mpidl.backends.gpu.backend import GPU as functions
from mpidl.blocks import LANES
from mpidl.training import trainer


def lanes(name, *shape, low=-3.0, high=3.0):
    drawn = np.random.default_rng([ord(c) for c in name]).uniform(low, high, (*shape, LANES))
    return drawn.astype(np.float32)


def test_activations_of_all_sizes(device):
    """At most 2.5 units of the last place off, relative to the result."""
    x = np.concatenate([np.linspace(-12, 12, 2000), np.geomspace(1e-30, 80, 1000)])
    x = np.concatenate([x, -x, [np.inf, -np.inf, 0, -0.0] + 44 * [np.nan]]).astype(np.float32)
    x = x.reshape(1, -1, LANES)
    for name in ("tanh", "sigmoid"):
        exact = getattr(reference, name)(x.astype(np.float64))
        found = getattr(functions, name)(array.lanes(x)).numpy()
        assert np.array_equal(np.isnan(found), np.isnan(x))
        places = np.spacing(np.maximum(abs(exact), 2.0**-125).astype(np.float32))
        normal = ~((abs(exact) < 2.0**-125) & (name == "sigmoid"))
        assert np.nanmax((abs(found - exact) / places)[normal]) <= 2.5


APPROXIMATIONS = pytest.mark.parametrize("approximate, most", [("none", 2.5), ("tanh", 3.0)])


@APPROXIMATIONS
def test_gelu_of_all_sizes(device, approximate, most):
    """Relative to the result where it is normal, and the bytes of the CPU's kernels with FMA."""
    x = np.concatenate([np.linspace(-14, 14, 4000), np.geomspace(1e-30, 80, 1000)])
    x = np.concatenate([x, -x, [np.inf, -np.inf, 0, -0.0] + 12 * [np.nan]]).astype(np.float32)
    x = x.reshape(1, -1, LANES)
    y = functions.gelu(array.lanes(x), approximate).numpy()
    dx = functions.gelu_dx(array.lanes(np.ones_like(x)), array.lanes(x), approximate).numpy()
    assert np.array_equal(np.isnan(y), np.isnan(x)) and np.array_equal(np.isnan(dx), np.isnan(x))
    exact = reference.gelu(x.astype(np.float64), approximate)
    normal = (abs(exact) >= 2.0**-126) & np.isfinite(exact)
    places = np.spacing(abs(exact[normal]).astype(np.float32))
    assert (abs(y[normal] - exact[normal]) / places).max() <= most
    assert y[x == np.inf].tolist() == [np.inf] and y[x == -np.inf].tolist() == [0]
    if "x86-64-v3" in BUILDS:
        with_fma = on_all_builds(
            lambda: (cpu.gelu(x, approximate), cpu.gelu_dx(np.ones_like(x), x, approximate))
        )["x86-64-v3"]
        valid = ~np.isnan(x)
        for found, expected in zip((y, dx), with_fma, strict=True):
            assert found[valid].tobytes() == expected[valid].tobytes()


def test_flattened_images_are_refused(device):
    x = array.lanes(lanes("x", 1, 3, 2, 2)).reshape(1, 12, LANES)
    with pytest.raises(ValueError, match="concat: on a GPU expected images or features"):
        functions.concat([x, x])
    with pytest.raises(ValueError, match="cross_channel_norm: on a GPU expected"):
        functions.cross_channel_norm(x, 5, 1e-4, 0.75, 2.0)


def test_a_window_that_needs_too_much_memory(device):
    x = array.lanes(lanes("x", 1, 7000))
    with pytest.raises(ValueError, match="at most 6144 channels, got 13999"):
        functions.cross_channel_norm_dx(x, x, 20000, 1e-4, 0.75, 2.0)


LAYERS = [
    dl.Conv2D(3, 8, padding="same", name="first"),
    dl.BatchNorm(),
    dl.ReLU(name="a"),
    dl.CrossChannelNorm(5),
    dl.LeakyReLU(),
    dl.GELU(),
    dl.Conv2D(3, 8, padding="same"),
    dl.Dropout(0.25),
    dl.Tanh(name="b"),
    dl.Add(inputs=("a", "b"), name="sum"),
    dl.TransposedConv2D(2, 4, 2, name="up"),
    dl.MaxPool2D(2, name="down"),
    dl.Concat(inputs=("sum", "down")),
    dl.Sigmoid(),
    dl.Flatten(),
    dl.Tanh(),
    dl.GELU("tanh"),
    dl.Dropout(0.1),
    dl.Dense(6),
    dl.Sigmoid(),
    dl.Dense(3),
]


def trained(world, **options):
    pixels = np.random.default_rng(0).integers(0, 256, (70, 1, 6, 6), dtype=np.uint8)
    store = dl.ArrayDatastore(pixels, np.arange(70) % 3)
    net = dl.Network(LAYERS, (1, 6, 6), seed=1)
    how = {"epochs": 2, "batch_size": 40, "verbose_every": 0, "learning_rate": 0.1} | options
    trainer.train(net, store, dl.TrainingOptions(**how), world=world)
    return net.parameters


def test_a_network_of_them_is_trained_as_on_the_cpu(world):
    """The same elements are dropped in every step, also of a second epoch and of a smaller last
    mini-batch; with another seed the weights are others."""
    found, replayed = trained(world, graphs="off"), trained(world)
    expected, other = trained(dl.World(threads=1)), trained(dl.World(threads=1), seed=2)
    for name, weights in expected.items():
        assert np.array_equal(found[name], replayed[name])
        assert abs(found[name] - weights).max() <= 1e-4 * max(abs(weights).max(), 0.1)
    assert abs(other["dense2.weight"] - expected["dense2.weight"]).max() > 1e-3
