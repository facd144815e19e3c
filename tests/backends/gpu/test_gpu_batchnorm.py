"""Batch normalization and ReLU on GPUs against NumPy in float64, on the emulated device."""

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
EACH = pytest.mark.parametrize("shape", SHAPES, ids=str)


def tree(blocks):
    return fold.Tree(blocks, ((0, blocks),), 0)


def drawn(seed, *shape, low=-2, high=3):
    return np.random.default_rng(seed).uniform(low, high, shape).astype("f4")


def counts_of(images, blocks):
    """Per block, and as the GPU takes it."""
    counts = np.clip(images - LANES * np.arange(blocks), 0, LANES)
    return counts, array.plain(np.array([images], "i4"))


def unused(lanes, images):
    """A mask of the unused lanes, to index with."""
    mask = np.arange(len(lanes) * LANES).reshape(-1, LANES) >= images
    return np.broadcast_to(np.expand_dims(mask, tuple(range(1, lanes.ndim - 1))), lanes.shape)


def cotangent(shape, images, blocks):
    dy = drawn(1, blocks, *shape, LANES)
    dy[unused(dy, images)] = 0
    return dy


def vectors(channels, names):
    """Of each name a (C,) float32."""
    return [drawn(ord(name), channels, low=0.5, high=2) for name in names]


def root(partial, combine=fold.add):
    """The number of a Partial of one rank."""
    (term,) = partial.terms
    if not term.nodes:
        return np.zeros(partial.shape, partial.dtype)
    (node,) = term.nodes
    return node.numpy()


def near(found, exact, scale=None, tolerance=1e-6):
    """Relative to the largest, or to what was added up."""
    assert found.shape == exact.shape
    bound = np.abs(exact).max(initial=0) if scale is None else scale
    assert (np.abs(found - exact) <= tolerance * bound).all()


@EACH
@pytest.mark.parametrize("images, blocks", [(32, 2), (19, 2), (1, 1), (7, 3), (0, 1), (0, 0)])
def test_moments(device, shape, images, blocks):
    x = drawn(0, blocks, *shape, LANES)
    counts, valid = counts_of(images, blocks)
    found = batchnorm.moments(array.lanes(x), valid, tree(blocks))
    channels = shape[0]
    assert found.shape == (1 + 2 * channels,) and found.dtype == np.float64
    used = np.moveaxis(x.astype("f8"), (0, -1), (0, 1)).reshape(-1, *shape)[:images]
    used = np.moveaxis(used, 1, 0).reshape(channels, -1)
    found = root(found)
    if images == 0:
        assert not found.any()
        return
    assert found[0] == used.shape[1]
    near(found[1 : 1 + channels], used.mean(axis=1), np.abs(used).mean(axis=1))
    m2 = used.var(axis=1) * used.shape[1]
    near(found[1 + channels :], m2, m2 + 1e-12)


@pytest.mark.parametrize("shape", [(4, 12, 12), (3, 12, 12), (2,)], ids=str)
@pytest.mark.parametrize("kind", ["far from 0", "an outlier first", "constant", "two levels"])
def test_moments_do_not_cancel(device, shape, kind):
    """Where E[x^2] - E[x]^2, or a mean rounded to float32, would leave few digits."""
    x = drawn(0, 2, *shape, LANES)
    if kind == "far from 0":
        x += 10000
    elif kind == "an outlier first":
        (x[..., 0] if len(shape) == 1 else x[:, :, 0, 0])[...] = 50000
    elif kind == "constant":
        x[...] = 0.1
    else:
        x[: len(x) // 2] *= 1e-3
    channels = shape[0]
    _, valid = counts_of(32, 2)
    found = root(batchnorm.moments(array.lanes(x), valid, tree(2)))
    used = np.moveaxis(x.astype("f8"), 1, 0).reshape(channels, -1)
    m2 = used.var(axis=1) * used.shape[1]
    near(found[1 : 1 + channels], used.mean(axis=1), used.std(axis=1) + 1e-6)
    near(found[1 + channels :], m2, m2 + 1e-9)


@EACH
@pytest.mark.parametrize("images, blocks", [(32, 2), (19, 2), (5, 2), (0, 1), (0, 0)])
def test_what_is_computed_pixel_by_pixel(device, shape, images, blocks):
    x, dy = drawn(0, blocks, *shape, LANES), cotangent(shape, images, blocks)
    counts, valid = counts_of(images, blocks)
    mean, scale, beta, a, b, c = vectors(shape[0], "msbABC")
    on_gpu = [array.lanes(x), *map(array.plain, (mean, scale, beta))]
    source, factors = DeferredInput(*on_gpu), [array.plain(v) for v in (a, b, c)]
    wide = [v.astype("f8") for v in (x, mean, scale, beta)]

    y = batchnorm.batchnorm(*on_gpu)
    near(y.numpy(), reference.batchnorm(*wide))
    activation = batchnorm.activation(source)
    assert np.array_equal(activation.numpy(), np.maximum(y.numpy(), 0))
    assert np.array_equal(activations.relu(y).numpy(), activation.numpy())

    on_gpu_dy = array.lanes(dy)
    dz = activations.relu_dx(on_gpu_dy, activation)
    assert np.array_equal(dz.numpy(), np.where(activation.numpy() > 0, dy, 0))
    dx = batchnorm.batchnorm_dx(on_gpu_dy, on_gpu[0], on_gpu[1], *factors, valid)
    how = *(v.astype("f8") for v in (mean, a, b, c)), counts
    near(dx.numpy(), reference.batchnorm_dx(dy.astype("f8"), wide[0], *how))
    assert not dx.numpy()[unused(dy, images)].any()

    # fused: the bytes of the two steps
    expected = batchnorm.batchnorm_dx(dz, on_gpu[0], on_gpu[1], *factors, valid).numpy()
    fused = batchnorm.activation_dx(on_gpu_dy, source, *factors, valid)
    assert fused is not on_gpu_dy and np.array_equal(fused.numpy(), expected)
    again = batchnorm.activation_dx(on_gpu_dy, source, *factors, valid, overwrite=True)
    assert again is on_gpu_dy and np.array_equal(again.numpy(), expected)
    for made in (y, activation, dz, dx, fused):
        assert made.shape == x.shape and made.order == on_gpu[0].order


@pytest.mark.parametrize("shape", [(128, 9, 9), (3, 40, 40)], ids=str)
def test_a_small_device_goes_through_all(emulated, shape):
    """Fewer blocks of threads than there are rows for: each takes several runs of them."""
    x, dy = drawn(0, 1, *shape, LANES), cotangent(shape, 13, 1)
    found = []
    for processors in (1, 132):
        with emulated(0, processors=processors):
            on_gpu = array.lanes(x), array.lanes(dy)
            mean, scale, beta, *factors = map(array.plain, vectors(shape[0], "msbABC"))
            source, (_, valid) = DeferredInput(on_gpu[0], mean, scale, beta), counts_of(13, 1)
            made = [
                batchnorm.activation(source),
                batchnorm.activation_dx(on_gpu[1], source, *factors, valid),
                activations.relu(on_gpu[0]),
                activations.relu_dx(on_gpu[1], on_gpu[0]),
            ]
            found.append(b"".join(value.numpy().tobytes() for value in made))
    assert found[0] == found[1]


def test_nan_stays(device):
    x = np.zeros((1, 4, 1, 1, LANES), "f4")
    x[0, 0, 0, 0, :2] = np.nan, -0.0
    found = activations.relu(array.lanes(x)).numpy()
    assert np.isnan(found[0, 0, 0, 0, 0]) and not np.signbit(found[0, 0, 0, 0, 1])


def test_an_activation_is_computed_once(device):
    x, (mean, scale, beta) = array.lanes(drawn(0, 1, 4, 2, 2, LANES)), vectors(4, "msb")
    source = batchnorm.source(x, *map(array.plain, (mean, scale, beta)))
    assert isinstance(source, DeferredInput) and source.x is x and device.launched == []
    first = batchnorm.read(source)
    assert batchnorm.read(source) is first is batchnorm.activation(source)
    assert device.launched == ["batchnorm"]
    assert batchnorm.read(first) is first


def test_a_flattened_cotangent_lies_as_its_value(device):
    x, dy = drawn(0, 1, 4, 1, 1, LANES), drawn(1, 1, 4, LANES)
    (mean,) = vectors(4, "m")
    found = batchnorm.batchnorm_sums(array.lanes(dy), array.lanes(x), array.plain(mean), tree(1))
    exact = reference.batchnorm_sums(dy.astype("f8"), x[:, :, 0, 0].astype("f8"), mean, tree(1))
    near(root(found), exact.terms[0].nodes[0])
    with pytest.raises(ValueError, match="expected a cotangent of"):
        activations.relu_dx(array.lanes(drawn(0, 1, 3, LANES)), array.lanes(x))
    with pytest.raises(ValueError, match=r"expected \(blocks, C, ..., 16\) lanes"):
        batchnorm.channel_sums(array.plain(x), tree(1))


def test_without_images_all_is_finite(device):
    gamma = array.plain(drawn(1, 7))
    s = batchnorm.statistics(array.plain(np.zeros(15)), gamma, 1e-5)
    found = [*s, *batchnorm.batchnorm_factors(array.plain(np.zeros(14)), gamma, s)]
    assert all(np.isfinite(v.numpy()).all() for v in found)


def test_running_state(device):
    olds = [drawn(i, size) for i, size in enumerate((3, 3, 200, 1))]
    values = [drawn(9 + i, old.size).astype("f8") for i, old in enumerate(olds)]
    found = batchnorm.running([array.plain(v) for v in olds], [array.plain(v) for v in values], 0.1)
    for one, other in zip(found, reference.running(olds, values, 0.1), strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-6, atol=1e-7)
    assert device.launched == ["running"]
    with pytest.raises(TypeError, match="expected float32 and float64 of one size"):
        batchnorm.running([launching.empty((3,))], [launching.empty((3,))], 0.1)
