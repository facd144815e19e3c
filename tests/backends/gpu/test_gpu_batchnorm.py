"""Batch normalization on a GPU: statistics against NumPy in float64, and fused gradients."""

import numpy as np
import pytest

from mpidl import fold
from mpidl.backends import REFERENCE as reference
from mpidl.backends.gpu import activation as activations
from mpidl.backends.gpu import array, batchnorm, launching
from mpidl.blocks import LANES, DeferredInput

# (C, H, W) or (C,) of an image
SHAPES = [(1, 5, 7), (3, 1, 1), (4, 6, 6), (20, 3, 5), (5, 4, 4), (132, 2, 3), (129, 1, 2), (6,)]
SHAPES += [(8,), (260,), (1, 60, 60), (128, 9, 9)]
ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES, ids=str)


def tree(blocks):
    return fold.Tree(blocks, ((0, blocks),), 0)


def drawn(seed, *shape, low=-2, high=3):
    return np.random.default_rng(seed).uniform(low, high, shape).astype("f4")


def device_count(images):
    """Return the number of used images as kernels read it."""
    return array.plain(np.array([images], "i4"))


def cotangent(shape, images, blocks):
    """Draw a cotangent that is zero in unused lanes."""
    used = np.arange(blocks * LANES).reshape(blocks, *[1] * len(shape), LANES) < images
    return np.where(used, drawn(1, blocks, *shape, LANES), np.float32(0))


def vectors(channels, names):
    """Draw a (C,) float32 array for each letter of `names`."""
    return [drawn(ord(name), channels, low=0.5, high=2) for name in names]


def root(partial):
    """Return the folded value of a Partial of one rank."""
    (term,) = partial.terms
    if not term.nodes:
        return np.zeros(partial.shape, partial.dtype)
    (node,) = term.nodes
    return node.numpy()


def assert_near(value, exact, scale=None):
    """Check that errors are at most 1e-6 of the largest number, or of each element of `scale`."""
    assert value.shape == exact.shape
    bound = np.abs(exact).max(initial=0) if scale is None else scale
    assert (np.abs(value - exact) <= 1e-6 * bound).all()


@ALL_SHAPES
@pytest.mark.parametrize("images, blocks", [(32, 2), (19, 2), (1, 1), (7, 3), (0, 1), (0, 0)])
def test_moments(device, shape, images, blocks):
    x, channels = drawn(0, blocks, *shape, LANES), shape[0]
    partial = batchnorm.moments(array.lanes(x), device_count(images), tree(blocks))
    assert partial.shape == (1 + 2 * channels,) and partial.dtype == np.float64
    moments = root(partial)
    if images == 0:
        assert not moments.any()
        return
    used = np.moveaxis(x.astype("f8"), (0, -1), (0, 1)).reshape(-1, *shape)[:images]
    used = np.moveaxis(used, 1, 0).reshape(channels, -1)
    assert moments[0] == used.shape[1]
    assert_near(moments[1 : 1 + channels], used.mean(axis=1), np.abs(used).mean(axis=1))
    m2 = used.var(axis=1) * used.shape[1]
    assert_near(moments[1 + channels :], m2, m2 + 1e-12)


@pytest.mark.parametrize("shape", [(4, 12, 12), (3, 12, 12), (2,)], ids=str)
@pytest.mark.parametrize("values", ["far from 0", "an outlier first", "constant", "two levels"])
def test_moments_do_not_cancel(device, shape, values):
    """E[x^2] - E[x]^2, or a mean rounded to float32, would leave few digits."""
    x, channels = drawn(0, 2, *shape, LANES), shape[0]
    if values == "far from 0":
        x += 10000
    elif values == "an outlier first":
        (x[..., 0] if len(shape) == 1 else x[:, :, 0, 0])[...] = 50000
    elif values == "constant":
        x[...] = 0.1
    else:
        x[: len(x) // 2] *= 1e-3
    moments = root(batchnorm.moments(array.lanes(x), device_count(32), tree(2)))
    used = np.moveaxis(x.astype("f8"), 1, 0).reshape(channels, -1)
    m2 = used.var(axis=1) * used.shape[1]
    assert_near(moments[1 : 1 + channels], used.mean(axis=1), used.std(axis=1) + 1e-6)
    assert_near(moments[1 + channels :], m2, m2 + 1e-9)


@ALL_SHAPES
@pytest.mark.parametrize("images, blocks", [(32, 2), (19, 2), (5, 2), (0, 1), (0, 0)])
def test_fused_activations_have_the_bytes_of_the_separate_steps(device, shape, images, blocks):
    host_x, host_dy = drawn(0, blocks, *shape, LANES), cotangent(shape, images, blocks)
    x, dy, count = array.lanes(host_x), array.lanes(host_dy), device_count(images)
    host_vectors = vectors(shape[0], "msbABC")
    mean, scale, beta, *factors = map(array.plain, host_vectors)
    source = DeferredInput(x, mean, scale, beta)
    wide = [v.astype("f8") for v in (host_x, host_dy, *host_vectors)]

    y = batchnorm.batchnorm(x, mean, scale, beta)
    assert_near(y.numpy(), reference.batchnorm(wide[0], *wide[2:5]))
    activation = batchnorm.activation(source)
    assert np.array_equal(activation.numpy(), np.maximum(y.numpy(), 0))
    assert np.array_equal(activations.relu(y).numpy(), activation.numpy())

    dz = activations.relu_dx(dy, activation)
    assert np.array_equal(dz.numpy(), np.where(activation.numpy() > 0, host_dy, 0))
    dx = batchnorm.batchnorm_dx(dy, x, mean, *factors, count)
    counts = np.clip(images - LANES * np.arange(blocks), 0, LANES)
    exact = reference.batchnorm_dx(wide[1], wide[0], wide[2], *wide[5:], counts)
    assert_near(dx.numpy(), exact)
    assert not np.moveaxis(dx.numpy(), -1, 1).reshape(-1, *shape)[images:].any()

    expected = batchnorm.batchnorm_dx(dz, x, mean, *factors, count).numpy()
    fused = batchnorm.activation_dx(dy, source, *factors, count)
    assert fused is not dy and np.array_equal(fused.numpy(), expected)
    overwritten = batchnorm.activation_dx(dy, source, *factors, count, overwrite=True)
    assert overwritten is dy and np.array_equal(overwritten.numpy(), expected)
    for value in (y, activation, dz, dx, fused):
        assert value.shape == host_x.shape and value.order == x.order


@pytest.mark.parametrize("shape", [(128, 9, 9), (3, 40, 40)], ids=str)
def test_a_small_device_computes_the_same_bytes(emulated, shape):
    """With fewer blocks of threads than rows, each block computes several rows."""
    outputs = []
    for processors in (1, 132):
        with emulated(0, processors=processors):
            x = array.lanes(drawn(0, 1, *shape, LANES))
            dy = array.lanes(cotangent(shape, 13, 1))
            mean, scale, beta, *factors = map(array.plain, vectors(shape[0], "msbABC"))
            source = DeferredInput(x, mean, scale, beta)
            values = [
                batchnorm.activation(source),
                batchnorm.activation_dx(dy, source, *factors, device_count(13)),
                activations.relu(x),
                activations.relu_dx(dy, x),
            ]
            outputs.append(b"".join(value.numpy().tobytes() for value in values))
    assert outputs[0] == outputs[1]


def test_a_deferred_activation_is_computed_once(device):
    x, (mean, scale, beta) = array.lanes(drawn(0, 1, 4, 2, 2, LANES)), vectors(4, "msb")
    source = batchnorm.source(x, *map(array.plain, (mean, scale, beta)))
    assert isinstance(source, DeferredInput) and source.x is x and device.launched == []
    first = batchnorm.read(source)
    assert batchnorm.read(source) is first is batchnorm.activation(source)
    assert device.launched == ["batchnorm"]
    assert batchnorm.read(first) is first


def test_a_flattened_cotangent_is_read_in_the_order_of_its_value(device):
    x, dy = drawn(0, 1, 4, 1, 1, LANES), drawn(1, 1, 4, LANES)
    (mean,) = vectors(4, "m")
    sums = batchnorm.batchnorm_sums(array.lanes(dy), array.lanes(x), array.plain(mean), tree(1))
    exact = reference.batchnorm_sums(dy.astype("f8"), x[:, :, 0, 0].astype("f8"), mean, tree(1))
    assert_near(root(sums), exact.terms[0].nodes[0])
    with pytest.raises(ValueError, match="expected a cotangent of"):
        activations.relu_dx(array.lanes(drawn(0, 1, 3, LANES)), array.lanes(x))
    with pytest.raises(ValueError, match=r"expected \(blocks, C, ..., 16\) lanes"):
        batchnorm.channel_sums(array.plain(x), tree(1))


def test_statistics_without_images_are_finite(device):
    gamma = array.plain(drawn(1, 7))
    statistics = batchnorm.statistics(array.plain(np.zeros(15)), gamma, 1e-5)
    factors = batchnorm.batchnorm_factors(array.plain(np.zeros(14)), gamma, statistics)
    assert all(np.isfinite(v.numpy()).all() for v in [*statistics, *factors])


def test_all_running_statistics_are_updated_in_one_launch(device):
    olds = [array.plain(drawn(i, size)) for i, size in enumerate((3, 3, 200, 1))]
    batchnorm.running(olds, [array.plain(np.ones(old.size)) for old in olds], 0.1)
    assert device.launched == ["running"]
    with pytest.raises(TypeError, match="expected float32 and float64 arrays of equal size"):
        batchnorm.running([launching.empty((3,))], [launching.empty((3,))], 0.1)
