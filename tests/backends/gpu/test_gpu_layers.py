"""Activations, dropout, cross-channel normalization, concatenation and transposed convolution on
GPUs against NumPy in float64, on the emulated device."""

import numpy as np
import pytest
from cpu_builds import BUILDS, everywhere

import mpidl as dl
from mpidl.backends import CPU as cpu
from mpidl.backends import REFERENCE as reference
from mpidl.backends import settings
from mpidl.backends.gpu import array, batchnorm
from mpidl.backends.gpu.backend import GPU as functions
from mpidl.blocks import LANES, DeferredInput
from mpidl.fold import Tree
from mpidl.training import trainer

SHAPES = {"pixels": (5, 3, 7), "four channels at once": (8, 4, 4), "features": (21,)}
EACH = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
BLOCKS = pytest.mark.parametrize("blocks", [0, 2])


def lanes(name, *shape, low=-3.0, high=3.0):
    drawn = np.random.default_rng([ord(c) for c in name]).uniform(low, high, (*shape, LANES))
    return drawn.astype(np.float32)


def tree(blocks):
    return Tree(blocks, ((0, blocks),), 0)


def near(found, exact, relative=3e-7):
    found = found.numpy()
    assert found.dtype == np.float32 and found.shape == exact.shape
    if exact.size:
        assert abs(found - exact).max() <= relative * max(abs(exact).max(), 1e-3)


@EACH
@BLOCKS
@pytest.mark.parametrize("name", ["leaky_relu", "tanh", "sigmoid"])
def test_activations(device, name, shape, blocks):
    x, dy = lanes("x", blocks, *shape), lanes("dy", blocks, *shape)
    how = (0.2,) if name == "leaky_relu" else ()
    y = getattr(functions, name)(array.lanes(x), *how)
    exact = getattr(reference, name)(x.astype(np.float64), *how)
    near(y, exact)
    dx = getattr(functions, f"{name}_dx")(array.lanes(dy), y, *how)
    near(dx, getattr(reference, f"{name}_dx")(dy.astype(np.float64), exact, *how))
    assert dx.order == y.order


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


@EACH
@BLOCKS
@APPROXIMATIONS
def test_gelu(device, shape, blocks, approximate, most):
    x, dy = lanes("x", blocks, *shape), lanes("dy", blocks, *shape)
    doubles = dy.astype(np.float64), x.astype(np.float64)
    near(functions.gelu(array.lanes(x), approximate), reference.gelu(doubles[1], approximate))
    dx = functions.gelu_dx(array.lanes(dy), array.lanes(x), approximate)
    near(dx, reference.gelu_dx(*doubles, approximate))
    assert dx.order == array.lanes(x).order


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
        with_fma = everywhere(
            lambda: (cpu.gelu(x, approximate), cpu.gelu_dx(np.ones_like(x), x, approximate))
        )["x86-64-v3"]
        valid = ~np.isnan(x)
        for found, expected in zip((y, dx), with_fma, strict=True):
            assert found[valid].tobytes() == expected[valid].tobytes()


@pytest.mark.parametrize("shape", [(1,), (40,), (1, 2, 3), (40, 3, 5)])
@BLOCKS
def test_softmax_dx(device, shape, blocks):
    x, dy = lanes("scores", blocks, *shape), lanes("dy", blocks, *shape)
    p = functions.softmax(array.lanes(x))
    exact = reference.softmax_dx(dy.astype(np.float64), reference.softmax(x.astype(np.float64)))
    near(functions.softmax_dx(array.lanes(dy), p), exact)


def source(name, blocks, *shape):
    vectors = np.random.default_rng(3).uniform(-1, 1, (3, shape[0])).astype(np.float32)
    return DeferredInput(array.lanes(lanes(name, blocks, *shape)), *map(array.plain, vectors))


@EACH
@BLOCKS
def test_sums_and_concatenations(device, shape, blocks):
    a, b = source("a", blocks, *shape), array.lanes(lanes("b", blocks, *shape))
    x, y = batchnorm.read(a).numpy(), b.numpy()
    assert np.array_equal(functions.add(a, b).numpy(), x + y)
    assert np.array_equal(functions.add(b, b).numpy(), y + y)
    channels = (shape[0], 3, shape[0], 4)
    others = [array.lanes(lanes(f"part {c}", blocks, c, *shape[1:])) for c in (3, 4)]
    parts = [a, others[0], b, others[1]]
    whole = functions.concat(parts)
    plain = [batchnorm.read(p).numpy() for p in parts]
    assert np.array_equal(whole.numpy(), np.concatenate(plain, axis=1))
    for part, expected in zip(functions.split(whole, channels), plain, strict=True):
        assert np.array_equal(part.numpy(), expected)


def test_four_channels_at_once(device):
    parts = [lanes(f"part {c}", 1, c, 3, 2) for c in (4, 8, 12)]
    whole = functions.concat([array.lanes(p) for p in parts])
    assert np.array_equal(whole.numpy(), np.concatenate(parts, axis=1))
    for part, expected in zip(functions.split(whole, (4, 8, 12)), parts, strict=True):
        assert np.array_equal(part.numpy(), expected)


def test_flattened_images_are_refused(device):
    x = array.lanes(lanes("x", 1, 3, 2, 2)).reshape(1, 12, LANES)
    with pytest.raises(ValueError, match="concat: on a GPU expected images or features"):
        functions.concat([x, x])
    with pytest.raises(ValueError, match="cross_channel_norm: on a GPU expected"):
        functions.cross_channel_norm(x, 5, 1e-4, 0.75, 2.0)


DROPPED = SHAPES | {"8 pixels and 1": (3, 9, 1), "49 pixels": (6, 7, 7), "one pixel": (11, 1, 1)}


@pytest.mark.parametrize("shape", DROPPED.values(), ids=DROPPED)
@BLOCKS
@pytest.mark.parametrize("flat", [False, True])
def test_dropout(device, shape, blocks, flat):
    """The bytes of NumPy's, also of flattened images, whose features are counted as on CPUs."""
    x = lanes("x", blocks, *shape)
    samples = np.arange(blocks * LANES, dtype=np.int32) * 1234567
    for probability in (0.1, 0.5):
        threshold = round(probability * 65536)
        how = threshold, 65536 / (65536 - threshold), (0x89ABCDEF, 0xFEDCBA98)
        on_gpu, plain = array.lanes(x), x
        if flat:
            on_gpu, plain = (a.reshape(blocks, int(np.prod(shape)), LANES) for a in (on_gpu, x))
        last = array.plain(np.array([7], np.int32)), array.plain(samples)
        found = functions.dropout(on_gpu, *how, *last)
        expected = reference.dropout(plain, *how, 7, samples)
        assert found.order == on_gpu.order and np.array_equal(found.numpy(), expected)


NORMS = {
    "AlexNet's": (5, 1e-4, 0.75, 2.0),
    "strong": (5, 2.0, 0.75, 1.0),
    "even": (4, 1.5, 0.75, 0.5),
    "wider than the image": (30, 1.0, 0.75, 2.0),
    "another power": (3, 1.0, 0.6, 1.5),
}
WIDE = SHAPES | {"several tiles": (1100,), "one channel": (1, 2, 2)}


@pytest.mark.parametrize("shape", WIDE.values(), ids=WIDE)
@BLOCKS
@pytest.mark.parametrize("how", NORMS.values(), ids=NORMS)
def test_cross_channel_norm(device, shape, how, blocks):
    x, dy = lanes("x", blocks, *shape), lanes("dy", blocks, *shape)
    exact = reference.cross_channel_norm(x.astype(np.float64), *how)
    near(functions.cross_channel_norm(array.lanes(x), *how), exact, 1e-6)
    exact = reference.cross_channel_norm_dx(dy.astype(np.float64), x.astype(np.float64), *how)
    near(functions.cross_channel_norm_dx(array.lanes(dy), array.lanes(x), *how), exact, 3e-6)


def test_a_window_that_needs_too_much_memory(device):
    x = array.lanes(lanes("x", 1, 7000))
    with pytest.raises(ValueError, match="at most 6144 channels, got 13999"):
        functions.cross_channel_norm_dx(x, x, 20000, 1e-4, 0.75, 2.0)


# (C, H, W), (C, K, R, S), stride, cropping
TRANSPOSED = {
    "2x2/2": ((3, 4, 5), (3, 2, 2, 2), (2, 2), ((0, 0), (0, 0))),
    "4x4/2, same": ((4, 3, 4), (4, 8, 4, 4), (2, 2), ((1, 1), (1, 1))),
    "gaps": ((2, 3, 3), (2, 3, 2, 1), (3, 2), ((0, 0), (0, 0))),
    "asymmetric": ((2, 4, 3), (2, 3, 5, 3), (2, 1), ((3, 1), (0, 2))),
}


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("case", TRANSPOSED)
@BLOCKS
def test_transposed_conv2d(device, monkeypatch, case, blocks, direct):
    monkeypatch.setattr(settings, "direct", direct)
    shape, size, *how = TRANSPOSED[case]
    x, weight, bias = lanes("x", blocks, *shape), lanes("w", *size)[..., 0], lanes("b", size[1])
    bias = bias[:, 0].copy()
    exact = reference.transposed_conv2d(*(a.astype("f8") for a in (x, weight, bias)), *how)
    dy = lanes("dy", *exact.shape[:-1])
    on_gpu = [array.lanes(dy), array.lanes(x), array.filters(weight)]
    near(functions.transposed_conv2d(*on_gpu[1:], array.plain(bias), *how), exact, 1e-5)
    last = (*how, None, tree(blocks), (True, True, True))
    if not blocks:
        last = (*how, None, Tree(2, ((0, 0), (0, 2)), 0), (True, True, True))
    dx, *found = functions.transposed_conv2d_backward(*on_gpu, *last)
    doubles = (a.astype("f8") for a in (dy, x, weight))
    exact, *partials = reference.transposed_conv2d_backward(*doubles, *last)
    near(dx, exact, 1e-5)
    for partial, wanted in zip(found, partials, strict=True):
        assert partial.shape == wanted.shape
        if blocks:
            [node], [expected] = partial.terms[0].nodes, wanted.terms[0].nodes
            near(node, expected.reshape(wanted.shape), 1e-5)


def test_any_schedule_gives_the_same_bytes(emulated):
    x, found = lanes("x", 1, 6, 5, 3), []
    for order in (0, 1, 2):
        with emulated(order):
            on_gpu = array.lanes(x)
            results = [
                functions.cross_channel_norm_dx(on_gpu, on_gpu, *NORMS["strong"]),
                functions.tanh(on_gpu),
                functions.softmax_dx(
                    array.lanes(x[:, :, 0, 0]), functions.softmax(array.lanes(x[:, :, 0, 0]))
                ),
            ]
            found.append([r.numpy().tobytes() for r in results])
    assert found[0] == found[1] == found[2]


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
