"""Test batch normalization on a GPU: accurate moments, fused gradients, number of launches.

tests/backends/test_conformance.py compares the numbers with float64.
"""

import numpy as np
import pytest
from cases import CHANNELS
from conformance import arguments, share
from support.recorded import recorded
from test_conformance import BY_NAME

from mpidl.backends import REFERENCE as reference
from mpidl.backends.deferred import NormalizedInput
from mpidl.backends.gpu import activation as activations
from mpidl.backends.gpu import array, batchnorm, launching
from mpidl.backends.gpu.backend import GPU
from mpidl.core import fold
from mpidl.core.blocks import LANES, DeferredInput


def tree(blocks):
    return fold.Tree(blocks, ((0, blocks),), 0)


def drawn(seed, *shape, low=-2, high=3):
    return np.random.default_rng(seed).uniform(low, high, shape).astype("f4")


def device_count(images):
    """Return the number of used images as an Array that kernels read."""
    return array.plain(np.array([images], "i4"))


def vectors(channels, names):
    """Draw a (C,) float32 array for each letter of `names`."""
    return [drawn(ord(name), channels, low=0.5, high=2) for name in names]


def root(partial):
    """Return the total of a Partial of one rank."""
    (term,) = partial.terms
    (node,) = term.nodes
    return node.numpy()


def assert_near(value, exact, scale=None):
    """Check that errors are at most 1e-6 of the largest number, or of `scale`."""
    assert value.shape == exact.shape
    bound = np.abs(exact).max(initial=0) if scale is None else scale
    assert (np.abs(value - exact) <= 1e-6 * bound).all()


@pytest.mark.parametrize("shape", [(4, 12, 12), (3, 12, 12), (2,)], ids=str)
@pytest.mark.parametrize("values", ["far from 0", "an outlier first", "constant", "two levels"])
def test_moments_do_not_cancel(device, shape, values):
    """Computing E[x^2] - E[x]^2, or rounding the mean to float32, would leave few digits."""
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


@pytest.mark.parametrize("shape", CHANNELS, ids=str)
def test_the_fused_gradient_has_the_bytes_of_the_separate_steps(device, shape):
    values = arguments(BY_NAME[f"activation_sums, {shape}"], GPU, share(2))
    dy, source, count = (values[name] for name in ("dy", "source", "counts"))
    factors = list(map(array.plain, vectors(shape[0], "ABC")))
    dz = activations.relu_dx(dy, batchnorm.activation(source))
    separate = batchnorm.batchnorm_dx(dz, source.x, source.mean, *factors, count).numpy()
    fused = batchnorm.activation_dx(dy, source, *factors, count)
    assert fused is not dy and np.array_equal(fused.numpy(), separate)
    overwritten = batchnorm.activation_dx(dy, source, *factors, count, overwrite=True)
    assert overwritten is dy and np.array_equal(dy.numpy(), separate)


@pytest.mark.parametrize("shape", [(128, 9, 9), (3, 40, 40)], ids=str)
def test_a_small_device_computes_the_same_bytes(emulated, shape):
    """If there are fewer thread blocks than rows, a thread block computes several rows."""
    outputs = []
    for processors in (1, 132):
        with emulated(0, processors=processors):
            x = array.lanes(drawn(0, 1, *shape, LANES))
            dy = array.lanes(drawn(1, 1, *shape, LANES))
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
    assert device.launched == ["add_operands"]
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
    x, gamma = array.lanes(drawn(0, 1, 7, 2, 2, LANES)), array.plain(drawn(1, 7))
    moments = root(batchnorm.moments(x, device_count(0), tree(1)))
    assert not moments.any()
    statistics = batchnorm.statistics(array.plain(moments), gamma, 1e-5)
    factors = batchnorm.batchnorm_factors(array.plain(np.zeros(14)), gamma, statistics)
    assert all(np.isfinite(v.numpy()).all() for v in [*statistics, *factors])


def test_all_running_statistics_are_updated_in_one_launch(device):
    """The averages of all layers, whose decay may differ."""
    olds = [array.plain(drawn(i, size)) for i, size in enumerate((3, 3, 200, 200, 1, 1))]
    ones = [array.plain(np.ones(old.size)) for old in olds]

    def step():
        layers = (0, 0.1), (2, 0.25), (4, 1.0)
        news = [batchnorm.running(olds[i : i + 2], ones[i : i + 2], x) for i, x in layers]
        return [new for pair in news for new in pair]

    news, names = recorded(device, step)
    assert names == ["program_begin", "running", "program_end"]
    for old, new, decay in zip(olds, news, np.repeat([0.1, 0.25, 1.0], 2), strict=True):
        exact = old.numpy() + decay * (1 - old.numpy().astype("f8"))
        np.testing.assert_array_equal(new, exact.astype("f4"))
    with pytest.raises(TypeError, match="expected float32 and float64 arrays of equal size"):
        batchnorm.running([launching.empty((3,))], [launching.empty((3,))], 0.1)


@pytest.mark.parametrize("shape", CHANNELS, ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_the_gradient_of_a_sum_reads_bits_with_the_bytes_of_the_sum_itself(device, shape, parts):
    values = arguments(BY_NAME[f"batchnorm_sums, {shape}"], GPU, share(2))
    x, vectors_of_x = values["x"], map(array.plain, vectors(shape[0], "msb"))
    operand = NormalizedInput(x, *vectors_of_x)
    y = GPU.add_relu(operand, array.lanes(drawn(0, *x.shape)))
    assert (y.positive is not None) == (shape[0] % 4 == 0)
    copy = array.lanes(y.numpy())
    cotangents = [values["dy"]] * parts
    outputs = [
        GPU.add_relu_dx(cotangents, read, [None, operand], values["tree"]) for read in (y, copy)
    ]
    dz = activations.relu_dx(values["dy"] if parts == 1 else values["dy"] + values["dy"], copy)
    outputs.append((dz, [None, GPU.batchnorm_sums(dz, x, operand.mean, values["tree"])]))
    for gradient, (nothing, sums) in outputs:
        assert nothing is None and np.array_equal(root(sums), root(outputs[-1][1][1]))
        assert gradient.numpy().tobytes() == dz.numpy().tobytes()
    assert dz.numpy().any() and not dz.numpy().all()


def test_an_addition_of_normalizations_is_one_kernel_in_each_direction(device):
    lanes = [array.lanes(drawn(i, 1, 4, 6, 6, LANES)) for i in (0, 1)]
    sources = [NormalizedInput(x, *map(array.plain, vectors(4, "msb"))) for x in lanes]
    y = GPU.add_relu(*sources)
    GPU.add_relu_dx([y, y], y, sources, tree(1))
    assert device.launched[:2] == ["add_operands", "add_relu_dx"]
    assert {name.split("_")[0] for name in device.launched[2:]} <= {"fold"}
