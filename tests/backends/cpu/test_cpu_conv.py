"""Test the CPU's convolution kernels with more threads than blocks, and with non-finite numbers."""

import numpy as np
import pytest
from cases import BY_WINOGRAD, DEPTHWISE, WINOGRAD
from conformance import arguments, call, flat, results, share
from cpu_builds import BUILDS, VECTOR_BUILDS, bytes_of, needs_kernels, on_all_builds
from test_conformance import BY_NAME, assert_near

from mpidl.backends import CPU as cpu
from mpidl.backends import settings
from mpidl.backends.cpu.call import as_type
from mpidl.backends.shapes import Geometry
from mpidl.core.blocks import LANES, DeferredInput
from mpidl.core.values import BF16

pytestmark = needs_kernels

LABELS = ["digits 1", "digits 2", "16 channels a group", "depthwise 3x3 by 2", *BY_WINOGRAD]


@pytest.mark.parametrize("algorithm", WINOGRAD, ids=lambda values: values["winograd"])
@pytest.mark.parametrize("function", ["conv2d", "conv2d_backward"])
@pytest.mark.parametrize("label", LABELS)
def test_threads_share_one_block(label, function, algorithm, monkeypatch):
    """All threads share one block. In test_conformance.py, each of two blocks has a thread team."""
    monkeypatch.setattr(settings, "winograd", algorithm["winograd"])
    case = BY_NAME[f"{function}, {label}"]
    for actual in on_all_builds(lambda: results(case, cpu, blocks=1)).values():
        assert_near(case, actual, blocks=1)


QUICK_DEPTHWISE = ("depthwise 3x3", "depthwise 5x5 by 2", "depthwise of several bands")


@pytest.mark.parametrize(
    "label",
    [
        pytest.param(label, marks=[pytest.mark.slow("ranks")] * (label not in QUICK_DEPTHWISE))
        for label in DEPTHWISE
    ],
)
def test_a_filter_per_channel_gives_the_bytes_of_the_direct_kernels(label, monkeypatch):
    """With a second filter per channel, the direct kernels compute the same sums."""
    monkeypatch.setattr(settings, "winograd", "off")
    values = arguments(BY_NAME[f"conv2d_backward, {label}"], cpu, share(41))
    x, weight, geometry = (values[name] for name in ("x", "weight", "geometry"))
    weights = np.stack([weight, 3 * weight], 1).reshape(-1, *weight.shape[1:])
    bias = np.arange(len(weights), dtype=np.float32)
    rest = values["counts"], values["tree"], (True, True, True)

    def passes(weight, bias, dy):
        y = cpu.conv2d(x, weight, bias, geometry)
        dx, dweight, dbias, _ = cpu.conv2d_backward(dy, x, weight, geometry, *rest)
        return y, dx, *(np.stack(partial.terms[0].nodes) for partial in (dweight, dbias))

    def compare():
        outputs = passes(weight, bias[::2], values["dy"])
        other = np.zeros((len(x), len(weights), *values["dy"].shape[2:]), np.float32)
        other[:, ::2] = values["dy"]
        y, dx, dweight, dbias = passes(weights, bias, other)
        direct = y[:, ::2], dx, dweight[:, ::2], dbias[:, ::2]
        for a, b in zip(outputs, direct, strict=True):
            assert a.size > 0 and (a + 0.0).tobytes() == (b + 0.0).tobytes()  # -0 becomes 0
        return outputs

    on_all_builds(compare)


def test_nan_passes_convolutions_and_relu():
    """A NaN weight must make the loss NaN and must not vanish in a ReLU."""
    values = arguments(BY_NAME["conv2d_moments, large 1x1"], cpu, share(3))
    source = values["x"]
    source.x[0, 0, 0, 0, 3] = np.nan
    assert np.isnan(cpu.activation(source)[0, 0, 0, 0, 3])
    assert np.isnan(cpu.relu(source.x)[0, 0, 0, 0, 3])
    y = cpu.conv2d(source, values["weight"], values["bias"], values["geometry"])
    assert np.isnan(y[0, :, 0, 0, 3]).all() and np.isfinite(y[1:]).all()


@pytest.mark.parametrize("label", ["3x3", "3x3 by 2"])
def test_without_dx_the_gradient_of_y_may_overwrite_its_cotangent(label, monkeypatch):
    """A convolution that reads the images needs no copy of the cotangent with a border."""
    monkeypatch.setattr(settings, "winograd", "off")
    case = BY_NAME[f"conv2d_backward, {label}, between activations"]

    def gradients():
        outputs = []
        for overwrite in (False, True):
            needs = {"needs": (False, True, True), "overwrite": overwrite}
            values = arguments(case, cpu, share(2)) | needs
            dy = values["dy"].tobytes()
            outputs.append(flat(call(case, cpu, values)))
            assert (values["dy"].tobytes() != dy) == overwrite
        assert bytes_of(outputs[0]) == bytes_of(outputs[1])
        return outputs[0]

    on_all_builds(gradients)


STRIP = 32 << 20  # bytes of a padded copy above which a convolution copies strips of rows
TALL = {  # channels, outputs, side of the filter, Geometry, --winograd, type of the input
    "direct by 2": (16, 5, 3, Geometry((2, 2), ((0, 1), (0, 1))), "off", "f4"),
}
MORE_TALL = {
    "tiles of 4x4": (16, 16, 3, Geometry((1, 1), ((1, 1), (1, 1))), "fast", "f4"),
    "tiles of 2x2": (16, 16, 5, Geometry((1, 1), ((2, 2), (2, 2)), groups=2), "auto", "f4"),
    "tiles by 2": (32, 16, 3, Geometry((2, 2), ((1, 1), (1, 1))), "auto", "f4"),
    "dilated": (16, 6, 3, Geometry((1, 1), ((3, 1), (1, 3)), (3, 2)), "off", "f4"),
    "bfloat16": (33, 8, 3, Geometry((1, 1), ((1, 1), (1, 1))), "off", BF16),
}


@pytest.mark.parametrize(
    "label", [*TALL, *(pytest.param(label, marks=pytest.mark.slow("ranks")) for label in MORE_TALL)]
)
def test_strips_of_a_tall_image_have_the_bytes_of_separate_images(label, monkeypatch):
    """The oracle is the convolution of parts of the image that are small enough for one copy."""
    channels, outputs, side, geometry, policy, dtype = (TALL | MORE_TALL)[label]
    step, width, margin = geometry.stride[0], 12, 32
    height = STRIP // (channels * (width + 2) * LANES * 4) + 517
    generator = np.random.default_rng(1)
    x = generator.standard_normal((1, channels, height, width, LANES), np.float32)
    inputs = channels // geometry.groups
    weight = generator.standard_normal((outputs, inputs, side, side), np.float32)
    mean, scale, beta = generator.standard_normal((3, channels), np.float32)
    bias = np.arange(outputs, dtype=np.float32)
    monkeypatch.setattr(settings, "winograd", policy)

    def convolved(rows):
        source = as_type(np.ascontiguousarray(x[:, :, rows]), np.dtype(dtype))
        source = DeferredInput(source, mean, scale, beta)
        return cpu.conv2d(source, weight, bias, geometry)

    def compare():
        tall = convolved(slice(0, height))
        assert tall.any()
        for first in range(0, tall.shape[2], 640):
            before = min(margin, first)  # rows of the part whose results depend on its border
            start, stop = (first - before) * step, (first + 640 + margin) * step
            part = convolved(slice(start, min(stop, height)))[:, :, before : before + 640]
            assert np.array_equal(part, tall[:, :, first : first + 640])
        return tall

    on_all_builds(compare, VECTOR_BUILDS[-1:] if label in TALL else BUILDS)
