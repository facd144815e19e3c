"""Compare the selection and movement of images and targets on a GPU with NumPy."""

import numpy as np
import pytest
from support.recorded import recorded

from mpidl.backends import REFERENCE as reference
from mpidl.backends import settings
from mpidl.backends.gpu import array, images, launching
from mpidl.backends.reference import bf16
from mpidl.core.blocks import LANES, blocks_of
from mpidl.core.values import BF16

NO_INDEX = 1 << 30  # invalid index for unused images


def pixels_of(count, shape):
    return np.random.default_rng(count).integers(0, 256, (count, *shape), np.uint8)


def random_moves(count, shape):
    """Return arguments that mirror and shift each image. Some images leave the window."""
    random = np.random.default_rng(count)
    top, left = (random.integers(-n - 2, n + 3, count, dtype=np.int32) for n in shape[1:])
    mirrored = random.integers(0, 4, count, dtype=np.int32)
    return {"mirrored": mirrored, "top": top, "left": left}


def selection(indices, valid, blocks):
    """Return the arguments that select `valid` images of a dataset on the device."""
    counts = launching.constant(np.array([valid], np.int32))
    return {"indices": array.plain(indices), "counts": counts, "blocks": blocks}


@pytest.mark.parametrize("valid, blocks", [(37, 3), (16, 3), (0, 2), (5, 1), (0, 0)])
def test_images_of_a_dataset(device, valid, blocks):
    """Gathered images match NumPy, and indices and moves of unused images are ignored."""
    shape, slots = (3, 6, 5), blocks * LANES
    data = pixels_of(100, shape)
    indices = np.full(slots, NO_INDEX, np.int32)
    indices[:valid] = np.random.default_rng(1).permutation(100)[:valid]
    moves = random_moves(slots, shape)
    for numbers in moves.values():
        numbers[valid:] = NO_INDEX
    valid_moves = {name: numbers[:valid] for name, numbers in moves.items()}
    expected = np.zeros((blocks, 3, 7, 4, LANES), np.float32)
    selected = reference.images(data[indices[:valid]], (7, 4), **valid_moves)
    expected[: len(selected)] = selected
    options = {name: array.plain(numbers) for name, numbers in moves.items()}
    options |= selection(indices, valid, blocks)
    lanes = images.images(array.plain(data), (7, 4), **options)
    assert lanes.numpy().tobytes() == expected.tobytes()
    lanes = images.images(array.plain(data.astype(np.float32)), (7, 4), **options)
    assert np.array_equal(lanes.numpy(), np.round(expected * 255))


def test_images_are_rounded_if_the_precision_is_bfloat16(device, monkeypatch):
    data = array.plain(pixels_of(21, (3, 6, 5)))
    lanes = images.images(data)
    monkeypatch.setattr(settings, "precision", "bf16")
    rounded = images.images(data)
    assert lanes.dtype == np.float32 and rounded.dtype == BF16
    assert rounded.numpy().tobytes() == bf16.narrowed(lanes.numpy()).tobytes()
    mirrored = [images.mirror(x, 3, factor=0.3) for x in (rounded, rounded.astype(np.float32))]
    assert mirrored[0].numpy().tobytes() == bf16.narrowed(mirrored[1].numpy()).tobytes()


@pytest.mark.parametrize("valid, blocks", [(37, 3), (16, 3), (0, 2), (0, 0)])
@pytest.mark.parametrize(
    "shape", [(), (7,), (5, 33), (1, 6, 5), (3, 5, 7), (3, 19, 23), (2, 3, 1, 2)]
)
def test_targets_of_a_dataset(device, shape, valid, blocks):
    """Targets are copied as 32-bit words, including NaNs. Targets that are images become NHWC."""
    random = np.random.default_rng(blocks)
    words = random.integers(-(1 << 31), 1 << 31, (60, *shape)).astype(np.int32)
    indices = np.full(blocks * LANES, NO_INDEX, np.int32)
    indices[:valid] = random.permutation(60)[:valid]
    expected = np.zeros((blocks * LANES, *shape), np.int32)
    expected[:valid] = words[indices[:valid]]
    expected = np.moveaxis(expected.reshape(blocks, LANES, *shape), 1, -1)
    for dtype in (np.int32, np.float32):
        options = selection(indices, valid, blocks)
        lanes = images.targets(array.plain(words.view(dtype)), **options)
        assert lanes.dtype == dtype and lanes.order == array.order_of_lanes(lanes.dims)
        assert lanes.numpy().tobytes() == np.ascontiguousarray(expected).tobytes()
    lanes = images.targets(array.plain(words[:21])).numpy()  # without indices: all, in order
    assert np.array_equal(np.moveaxis(lanes, -1, 1).reshape(-1, *shape)[:21], words[:21])
    assert lanes.shape == (2, *shape, LANES) and not lanes[1, ..., 5:].any()


def test_unused_images_are_zero_whatever_their_indices(device):
    data, indices = pixels_of(30, (2, 3, 3)), np.arange(32, dtype=np.int32) % 30
    options = selection(indices, 21, 3)
    lanes = images.images(array.plain(data), **options).numpy()
    expected = np.zeros((3, 2, 3, 3, LANES), np.float32)
    expected[:2] = reference.images(data[:21])
    assert lanes.tobytes() == expected.tobytes()
    lanes = images.targets(array.plain(data.astype(np.float32)), **options).numpy()
    assert lanes.tobytes() == np.round(expected * 255).tobytes()
    centre = [np.full(2, x, np.float32) for x in (7, 2)]
    expected[:2] = reference.images(data[:21], centre=centre[0], divisor=centre[1])
    centre = dict(zip(("centre", "divisor"), map(array.plain, centre), strict=True))
    lanes = images.images(array.plain(data), **centre, **options).numpy()
    assert lanes.tobytes() == expected.tobytes() and not lanes[1, ..., 5:].any()


def test_without_counts_every_index_is_an_image(device):
    data, indices = pixels_of(30, (2, 3, 3)), np.arange(20, dtype=np.int32)[::-1].copy()
    lanes = images.images(array.plain(data), indices=array.plain(indices)).numpy()
    assert lanes.tobytes() == reference.images(data[indices]).tobytes()
    assert len(lanes) == blocks_of(20)


def test_other_layouts_and_types_are_refused(device):
    with pytest.raises(ValueError, match="expected pixels"):
        images.images(array.lanes(np.zeros((1, 1, 2, 2, LANES), np.uint8)).reshape(16, 1, 2, 2))
    with pytest.raises(TypeError, match="expected pixels of type float32, got int32"):
        images.images(array.plain(np.zeros((1, 1, 2, 2), np.int32)))
    with pytest.raises(TypeError, match="expected float32 or int32, got float64"):
        images.targets(array.plain(np.zeros((3, 2))))


def test_images_and_targets_are_gathered_in_one_launch(device, monkeypatch):
    """In a recorded step, also if a launch has fewer blocks of threads than parts of images."""
    data, numbers = pixels_of(100, (3, 30, 29)), pixels_of(100, (1, 40, 30)).astype(np.int32)
    indices = np.random.default_rng(2).permutation(100)[:48].astype(np.int32)
    options = selection(indices, 37, 3)
    sources = [array.plain(values) for values in (data, data.astype(np.float32), numbers)]

    def step():
        lanes = [images.images(x, **options) for x in sources[:2]]
        return [*lanes, images.targets(sources[2], **options)]

    expected = [lanes.numpy().tobytes() for lanes in step()]
    monkeypatch.setattr(device, "processors", 0.5)
    lanes, names = recorded(device, step)
    assert names == ["program_begin", "images_gather", "program_end"]
    assert [x.tobytes() for x in lanes] == expected
