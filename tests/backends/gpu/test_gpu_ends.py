"""The two ends of a step on the emulated GPU: images to lanes, and the optimizer's step."""

import numpy as np
import pytest
from single_rank import numbers

from mpidl.backends import REFERENCE as reference
from mpidl.backends.gpu import array, images, launching, optimizer
from mpidl.backends.gpu.array import Array
from mpidl.blocks import LANES, blocks_of

SHAPES = [(1, 28, 28), (3, 32, 32), (3, 5, 7), (1, 1, 1), (4, 2, 33), (2, 19, 31)]


def pixels_of(count, shape):
    return np.random.default_rng(count).integers(0, 256, (count, *shape), np.uint8)


def moves(count, shape, far=2):
    """What is done to each image: also such that nothing of it is left."""
    random = np.random.default_rng(count)
    first = [random.integers(-n - far, n + far + 1, count, dtype=np.int32) for n in shape[1:]]
    mirrored = random.integers(0, 4, count, dtype=np.int32)
    return {"mirrored": mirrored, "top": first[0], "left": first[1]}


def uploaded(options):
    return {name: array.plain(value) for name, value in options.items()}


def number(value):
    return launching.constant(np.array([value], np.int32))


def test_every_byte_is_divided_as_on_the_host(device):
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    found = images.images(array.plain(pixels)).numpy()
    assert found.tobytes() == reference.images(pixels).tobytes()


@pytest.mark.parametrize("valid, blocks", [(37, 3), (16, 3), (0, 2), (5, 1), (0, 0)])
def test_images_of_a_data_set(device, valid, blocks):
    """Of unused images neither the number nor the moves mean anything."""
    shape, images_of = (3, 6, 5), blocks * LANES
    data = pixels_of(100, shape)
    indices = np.full(images_of, 1 << 30, np.int32)
    indices[:valid] = np.random.default_rng(1).permutation(100)[:valid]
    options = moves(images_of, shape)
    for values in options.values():
        values[valid:] = 1 << 30
    used = {name: values[:valid] for name, values in options.items()}
    expected = np.zeros((blocks, 3, 7, 4, LANES), np.float32)
    chosen = reference.images(data[indices[:valid]], (7, 4), **used)
    expected[: len(chosen)] = chosen
    given = {"indices": array.plain(indices), "counts": number(valid), "blocks": blocks}
    found = images.images(array.plain(data), (7, 4), **uploaded(options), **given)
    assert found.numpy().tobytes() == expected.tobytes()
    found = images.images(
        array.plain(data.astype(np.float32)), (7, 4), **uploaded(options), **given
    )
    assert np.array_equal(found.numpy(), np.round(expected * 255))


@pytest.mark.parametrize("valid, blocks", [(37, 3), (16, 3), (0, 2), (0, 0)])
@pytest.mark.parametrize(
    "shape", [(), (7,), (5, 33), (1, 6, 5), (3, 5, 7), (3, 19, 23), (2, 3, 1, 2)]
)
def test_targets_of_a_data_set(device, shape, valid, blocks):
    """Any words, NaNs of all kinds too; as lanes lie, images as NHWC."""
    random = np.random.default_rng(blocks)
    words = random.integers(-(1 << 31), 1 << 31, (60, *shape)).astype(np.int32)
    indices = np.full(blocks * LANES, 1 << 30, np.int32)
    indices[:valid] = random.permutation(60)[:valid]
    expected = np.zeros((blocks * LANES, *shape), np.int32)
    expected[:valid] = words[indices[:valid]]
    expected = np.moveaxis(expected.reshape(blocks, LANES, *shape), 1, -1)
    given = {"indices": array.plain(indices), "counts": number(valid), "blocks": blocks}
    for kind in (np.int32, np.float32):
        found = images.targets(array.plain(words.view(kind)), **given)
        assert found.dtype == kind and found.order == array.order_of_lanes(found.dims)
        assert found.numpy().tobytes() == np.ascontiguousarray(expected).tobytes()
    first = images.targets(array.plain(words[:21])).numpy()  # as they come
    assert np.array_equal(np.moveaxis(first, -1, 1).reshape(-1, *shape)[:21], words[:21])
    assert first.shape == (2, *shape, LANES) and not first[1, ..., 5:].any()


def test_targets_of_other_types_are_refused(device):
    with pytest.raises(TypeError, match="expected float32 or int32, got float64"):
        images.targets(array.plain(np.zeros((3, 2))))


def test_unused_images_are_zero_whatever_their_numbers_say(device):
    data, indices = pixels_of(30, (2, 3, 3)), np.arange(32, dtype=np.int32) % 30
    given = {"indices": array.plain(indices), "counts": number(21), "blocks": 3}
    found = images.images(array.plain(data), **given).numpy()
    expected = np.zeros((3, 2, 3, 3, LANES), np.float32)
    expected[:2] = reference.images(data[:21])
    assert found.tobytes() == expected.tobytes()
    found = images.targets(array.plain(data.astype(np.float32)), **given).numpy()
    assert found.tobytes() == np.round(expected * 255).tobytes()


def test_indices_alone_say_how_many(device):
    data, indices = pixels_of(30, (2, 3, 3)), np.arange(20, dtype=np.int32)[::-1].copy()
    found = images.images(array.plain(data), indices=array.plain(indices)).numpy()
    assert found.tobytes() == reference.images(data[indices]).tobytes()
    assert len(found) == blocks_of(20)


def test_images_in_another_order_are_refused(device):
    with pytest.raises(ValueError, match="expected pixels"):
        images.images(array.lanes(np.zeros((1, 1, 2, 2, LANES), np.uint8)).reshape(16, 1, 2, 2))
    with pytest.raises(TypeError, match="pixels is of float32, got int32"):
        images.images(array.plain(np.zeros((1, 1, 2, 2), np.int32)))


# ---- the optimizer ----

LEARNABLES = [(5,), (4, 3, 3, 2), (), (7, 12), (1025,), (64,), (3, 2, 4, 4), (2050,)]
DECAYS = [0, 1e-4, 0.5, 1e-4, 0, 1e-4, 0.1, 0]
FACTORS = [1, 20, 0.1, 1, 0.3, 1e-3, 2, 1]


def layout(value):
    """Weights as layers have them; (7, 12) goes with images (3, 2, 2)."""
    if value.ndim == 4 or value.shape == (7, 12):
        return array.filters(value, (3, 2, 2))
    return array.plain(value)


def draws(what):
    return [numbers(f"{what} {i}", *s, dtype=np.float32) for i, s in enumerate(LEARNABLES)]


def stepped(weights, gradients, velocities, rate=0.1, momentum=0.9):
    """New weights and velocities by NumPy."""
    velocities = [np.array(v) for v in velocities]
    new = reference.optimizer_step(
        "sgdm", weights, gradients, [velocities], [rate, momentum], DECAYS, FACTORS
    )
    return [a.tobytes() for a in map(np.asarray, (*new, *velocities))]


@pytest.mark.parametrize("shifts", [(0, 0, 0), (1, 1, 1), (1, 0, 0), (0, 2, 0), (0, 0, 3)])
def test_a_step_has_the_bytes_of_numpy(device, shifts):
    """Aligned or not."""
    host = [draws(what) for what in ("weight", "gradient", "velocity")]

    def moved(value, shift):
        made = layout(value)
        flat = launching.empty((value.size + shift,))
        raw = array.in_memory(value, made.dims, made.order).ravel()
        launching.upload(flat, np.concatenate([np.zeros(shift, np.float32), raw]))
        made.buffer, made.offset = flat.buffer, 4 * shift
        return made

    weights, gradients, velocities = (
        [moved(v, shift) for v in values] for values, shift in zip(host, shifts, strict=True)
    )
    found = optimizer.optimizer_step(
        "sgdm", weights, gradients, [velocities], [0.1, 0.9], DECAYS, FACTORS
    )
    assert device.launched == ["sgdm"]
    for w, old in zip(found, weights, strict=True):
        assert (w.shape, w.dims, w.order) == (old.shape, old.dims, old.order)
    expected = stepped(*host)
    assert [a.numpy().tobytes() for a in (*found, *velocities)] == expected
    assert [a.numpy().tobytes() for a in weights] == [w.tobytes() for w in host[0]]


def test_steps_one_after_the_other(device):
    """New weights lie side by side at places that stay: they can be put in the old ones'."""
    weights, velocities = draws("weight"), draws("velocity")
    on_device = [layout(w) for w in weights], [layout(v) for v in velocities]
    offsets = []
    for step in range(3):
        gradients = draws(f"gradient {step}")
        rates = [0.1 / (step + 1), 0.9], DECAYS, FACTORS
        new = reference.optimizer_step("sgdm", weights, gradients, [velocities], *rates)
        slopes = [layout(g) for g in gradients]
        found = optimizer.optimizer_step("sgdm", on_device[0], slopes, [on_device[1]], *rates)
        weights, on_device = new, (found, on_device[1])
        offsets.append([w.offset for w in found])
        assert len({id(w.buffer) for w in found}) == 1
    found = [a.numpy().tobytes() for values in on_device for a in values]
    assert found == [np.asarray(a).tobytes() for a in (*weights, *velocities)]
    places, total = optimizer.places(tuple(w.size for w in weights))
    assert offsets == [[4 * place for place in places]] * 3
    assert all(place % 64 == 0 for place in places) and total % 64 == 0


@pytest.mark.parametrize("order", [0, 1, 2])
def test_new_weights_may_lie_where_the_old_ones_do(emulated, monkeypatch, order):
    host = [draws(what) for what in ("weight", "gradient", "velocity")]
    with emulated(order):
        places, total = optimizer.places(tuple(w.size for w in host[0]))
        flat = launching.empty((total,))
        weights = [layout(w) for w in host[0]]
        raw = np.zeros(total, np.float32)
        for w, value, place in zip(weights, host[0], places, strict=True):
            raw[place : place + w.size] = array.in_memory(value, w.dims, w.order).ravel()
            w.buffer, w.offset = flat.buffer, 4 * place
        launching.upload(flat, raw)
        velocities = [layout(v) for v in host[2]]
        monkeypatch.setattr(array, "empty", lambda shape: flat)
        gradients = [layout(g) for g in host[1]]
        found = optimizer.optimizer_step(
            "sgdm", weights, gradients, [velocities], [0.1, 0.9], DECAYS, FACTORS
        )
        assert [a.numpy().tobytes() for a in (*found, *velocities)] == stepped(*host)


@pytest.mark.parametrize("small", [1 << 22, 100])
def test_many_floats_are_stepped_in_larger_parts(device, monkeypatch, small):
    monkeypatch.setattr(optimizer, "SMALL", small)
    optimizer._blocks.cache_clear()
    shape = (11, 999)
    w, g, v = (numbers(what, *shape, dtype=np.float32) for what in "wgv")
    velocity = array.plain(v)
    numbers_of_step = [0.5, 0.25], [1e-3]
    (found,) = optimizer.optimizer_step(
        "sgdm", [array.plain(w)], [array.plain(g)], [[velocity]], *numbers_of_step
    )
    (new,) = reference.optimizer_step("sgdm", [w], [g], [[v]], *numbers_of_step)
    assert found.numpy().tobytes() == new.tobytes()
    assert velocity.numpy().tobytes() == v.tobytes()
    optimizer._blocks.cache_clear()


def test_no_parameters(device):
    assert (
        optimizer.optimizer_step("sgdm", [], [], [[]], [0.1, 0.9], []) == []
        and device.launched == []
    )


def test_what_does_not_go_together_is_refused(device):
    weight = array.filters(np.zeros((2, 3, 4, 5), np.float32))
    plain = array.plain(np.zeros((2, 3, 4, 5), np.float32))
    with pytest.raises(ValueError, match="gradient array lies in memory"):
        optimizer.optimizer_step("sgdm", [weight], [plain], [[weight]], [0.1, 0.9], [0])
    double = Array(weight.buffer, np.float64, weight.shape, weight.dims, weight.order)
    with pytest.raises(TypeError, match="float32"):
        optimizer.optimizer_step("sgdm", [weight], [weight], [[double]], [0.1, 0.9], [0])
