"""Test the U-Net of the zoo: its layers, its recipe, and its results on any number of ranks."""

import numpy as np
import pytest
from image_sets import pixels_of
from network_steps import bytes_of, step
from single_rank import SingleRank, blocked

from mpidl.losses import cross_entropy
from mpidl.nn import zoo


def learnables(channels, classes, depth, filters):
    """Count the learnables according to the layers in the paper."""

    def convolution(inputs, outputs, size):
        return (inputs * size * size + 1) * outputs

    def pair(inputs, outputs):  # includes the scales and offsets of two batch normalizations
        return convolution(inputs, outputs, 3) + convolution(outputs, outputs, 3) + 4 * outputs

    counts = [filters * 2**stage for stage in range(depth + 1)]
    total = sum(pair(a, b) for a, b in zip([channels, *counts], counts, strict=False))
    for outer, inner in zip(counts, counts[1:], strict=False):
        total += convolution(inner, outer, 2) + pair(2 * outer, outer)
    return total + convolution(filters, classes, 1)


@pytest.mark.parametrize("sizes", [(1, 2, 3, 16), (3, 5, 1, 4), (2, 1, 2, 6)])
def test_shape_and_learnables(sizes):
    channels, classes, depth, filters = sizes
    net = zoo.unet((channels, 16, 24), classes, depth=depth, filters=filters)
    assert net.output_shape == (classes, 16, 24)
    assert sum(value.size for value in net.parameters.values()) == learnables(*sizes)


def test_the_default_is_that_of_its_description():
    net = zoo.unet()
    count = sum(value.size for value in net.parameters.values())
    assert f"{count:,} learnables" in " ".join(zoo.unet.__doc__.split())
    assert "unet" in zoo.PIXEL_NETWORKS


def test_sides_must_be_halved():
    with pytest.raises(ValueError, match="unet: expected images whose sides are multiples of 8"):
        zoo.unet((1, 64, 60))


def test_one_result_on_any_number_of_ranks(world):
    net = zoo.unet((1, 8, 12), 3, seed=1, depth=2, filters=4)
    images = pixels_of(0, 37, 1, 8, 12) / np.float32(255)
    labels = (3 * images[:, 0]).astype(np.int32).clip(0, 2)
    expected, result = (
        step(ranks, net, blocked(ranks, images, labels), cross_entropy)
        for ranks in (SingleRank(), world)
    )
    assert bytes_of(result) == bytes_of(expected)
    loss, gradients, _ = result
    assert np.isfinite(loss[0]) and all(abs(g).max() > 0 for g in gradients.values())
