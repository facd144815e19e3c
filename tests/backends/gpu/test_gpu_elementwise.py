"""Test arithmetic on Arrays, and copies of several Arrays in one launch, on the emulated GPU."""

import numpy as np
import pytest

from mpidl.backends.gpu import array, elementwise, launching
from mpidl.backends.reference import bf16
from mpidl.core import fold
from mpidl.core.values import BF16

TYPES = pytest.mark.parametrize("dtype", ["f4", "f8"])


def values(dtype, *shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


@TYPES
@pytest.mark.parametrize("size", [0, 1, 255, 1030])
def test_add(device, dtype, size):
    a, b = values(dtype, size), values(dtype, size)[::-1]
    total = array.plain(a) + array.plain(b)
    assert total.dtype == dtype and total.numpy().tobytes() == (a + b).tobytes()


def nearest(x):
    """Round to numbers of 8 bits, ties to even, by the definition."""
    fraction, exponent = np.frexp(np.float64(x))
    return np.ldexp(np.rint(fraction * 256), exponent - 8).astype("f4")


def in_bf16(x):
    return array.plain(bf16.narrowed(x))


@pytest.mark.parametrize("size", [0, 1, 255, 1030])
def test_conversion_to_bfloat16_and_back(device, size):
    x = values("f4", size) * np.logspace(-30, 30, size, dtype="f4")
    x[::3] = nearest(x[::3]) * np.float32(1 + 2.0**-8)  # ties
    narrow = array.plain(x).astype(BF16)
    assert narrow.dtype == BF16 and narrow.nbytes == 2 * size
    assert np.array_equal(narrow.astype(np.float32).numpy(), nearest(x))
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 3.4e38], "f4")
    converted = array.plain(special).astype(BF16).astype(np.float32).numpy()
    assert converted.tobytes() != special.tobytes()  # the largest number becomes infinity
    assert np.array_equal(converted, [*special[:5], np.inf], equal_nan=True)
    assert np.array_equal(np.signbit(converted[3:5]), [False, True])
    with pytest.raises(TypeError, match="no kernel converts"):
        narrow.astype(np.float64)


@pytest.mark.parametrize("size", [255, 1028])
def test_arithmetic_in_bfloat16_is_rounded_once(device, size):
    a, b = nearest(values("f4", size)), nearest(values("f4", size)[::-1])
    total = (in_bf16(a) + in_bf16(b)).astype(np.float32).numpy()
    assert np.array_equal(total, nearest(a + b)) and not np.array_equal(total, a + b)
    scaled = elementwise.scaled(in_bf16(a), 1 / 3).astype(np.float32).numpy()
    assert np.array_equal(scaled, nearest(a * np.float32(1 / 3)))


def test_a_small_device_computes_all_elements(emulated):
    a = values("f4", 20001)
    with emulated(0, processors=1):
        on_gpu = array.plain(a)
        assert np.array_equal((on_gpu + on_gpu).numpy(), 2 * a)
        assert np.array_equal(elementwise.scaled(on_gpu, 3).numpy(), 3 * a)
        assert not on_gpu.zeros_like().numpy().any()
        matrices = [on_gpu.reshape(1, 20001), array.plain(a[None, :9])]
        packed = elementwise.pack(matrices, 1).numpy()
    assert np.array_equal(packed, np.hstack([a, a[:9]])[None])


def test_add_keeps_shape_and_order(device):
    a, b = values("f4", 2, 3, 2, 5), values("f4", 2, 3, 2, 5)
    total = array.filters(a) + array.filters(b)
    assert total.order == array.FILTERS and np.array_equal(total.numpy(), a + b)
    with pytest.raises(ValueError, match="they differ in shape, type or order"):
        array.filters(a) + array.plain(b)
    with pytest.raises(TypeError, match="expected float32, bfloat16 or float64"):
        array.plain(np.arange(3)) + array.plain(np.arange(3))


@TYPES
def test_scaled_rounds_the_scale_as_the_host(device, dtype):
    x = values(dtype, 300)
    kind = np.dtype(dtype).type
    assert np.array_equal(elementwise.scaled(array.plain(x), -1 / 7).numpy(), x * kind(-1 / 7))
    late = fold.Late(array.plain(np.array([1 / 48])), 0.3)
    scaled = elementwise.scaled(array.plain(x), late).numpy()
    assert np.array_equal(scaled, x * kind(float(late)))


def test_zeros_like_keeps_type_and_order(device):
    for like in (values("f8", 5), np.ones(7, "u1"), values("f4", 0)):
        zeros = array.plain(like).zeros_like()
        assert zeros.dtype == like.dtype and np.array_equal(zeros.numpy(), 0 * like)
    weight = array.filters(values("f4", 2, 3, 2, 5))
    zeros = weight.zeros_like()
    assert zeros.order == weight.order and not zeros.numpy().any()


@TYPES
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_pack_joins_columns_in_one_launch(device, dtype, rows):
    matrices = [values(dtype, rows, width) for width in (1, 0, 1200, 7)]
    packed = elementwise.pack([array.plain(m) for m in matrices], rows, dtype)
    assert packed.shape == (rows, 1208)
    assert np.array_equal(packed.numpy(), np.hstack(matrices))
    assert len(device.launched) == min(rows, 1)


def test_pack_refuses_other_numbers_of_rows(device):
    a, b = launching.empty((2, 3)), launching.empty((3, 3))
    with pytest.raises(ValueError, match="expected 2 rows of float32"):
        elementwise.pack([a, b], 2)
