"""Test that planned memory gives the same predictions and holds no more than the live arrays."""

import numpy as np
from cpu_builds import needs_kernels
from image_sets import pixels_of

import mpidl as dl
from mpidl.backends.cpu import arenas
from mpidl.core.blocks import LANES, OneRank, from_images, share
from mpidl.evaluation import planned, predict
from mpidl.nn.inference import fold_batchnorm

SIDE, FILTERS = 64, 16
FULL = FILTERS * SIDE**2 * LANES * 4  # bytes of a layer's output in full resolution


def network():
    return fold_batchnorm(dl.nn.zoo.unet((3, SIDE, SIDE), 3, depth=2, filters=FILTERS))


def images(count):
    pixels = pixels_of(1, count, 3, SIDE, SIDE).astype(np.float32)
    return from_images(pixels, share(count, OneRank()))


@needs_kernels
def test_memory_is_that_of_the_arrays_that_are_needed_together(monkeypatch):
    """The U-Net's convolution of a skip connection needs three full arrays: x has two parts."""
    monkeypatch.setattr(arenas, "REGION", arenas.HUGE)
    net, memory = network(), planned.memory_for(network())
    expected = predict.class_scores(net, images(16))
    for _ in range(2):
        scores = memory.call(predict.class_scores, net, images(16))
        assert scores.tobytes() == expected.tobytes()
        assert 3 * FULL <= memory.memory.bytes <= 3.2 * FULL
    arena = arenas.Arena()
    with arenas.through(arena):  # negative control: without a plan, the memory is fragmented
        predict.class_scores(net, images(16))
    assert arena.bytes >= 4 * FULL


@needs_kernels
def test_each_number_of_blocks_has_a_plan():
    net, memory = network(), planned.memory_for(network())
    for count in (20, 3, 20):
        expected = predict.class_scores(net, images(count))
        scores = memory.call(predict.class_scores, net, images(count))
        assert scores.shape == (count, 3, SIDE, SIDE) and np.array_equal(scores, expected)
    assert sorted(memory.plans) == [1, 2] and all(memory.plans.values())


@needs_kernels
def test_a_function_that_needs_results_has_no_plan():
    def check_scores(net, x):
        result = predict.class_scores(net, x)
        assert result.any()  # fails while nothing is computed
        return result

    net, memory = network(), planned.memory_for(network())
    scores = memory.call(check_scores, net, images(2))
    assert memory.plans == {1: []}
    assert np.array_equal(scores, predict.class_scores(net, images(2)))


class Double(dl.Layer):
    """A custom layer, which may have effects that must not happen twice."""

    def forward(self, x, context):
        return 2 * x


@needs_kernels
def test_networks_with_custom_layers_have_no_plan():
    assert planned.memory_for(dl.Network([dl.ReLU(), Double()], (3, 4, 4))) is None
    assert planned.memory_for(dl.Network([dl.ReLU()], (3, 4, 4))) is not None
