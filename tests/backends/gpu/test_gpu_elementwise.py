"""Test arithmetic on Arrays, and copies of several Arrays in one launch, on the emulated GPU."""

import numpy as np
import pytest

from mpidl.backends.gpu import array, elementwise, launching
from mpidl.core import fold

TYPES = pytest.mark.parametrize("dtype", ["f4", "f8"])


def values(dtype, *shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


@TYPES
@pytest.mark.parametrize("size", [0, 1, 255, 1030])
def test_add(device, dtype, size):
    a, b = values(dtype, size), values(dtype, size)[::-1]
    total = array.plain(a) + array.plain(b)
    assert total.dtype == dtype and total.numpy().tobytes() == (a + b).tobytes()


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
