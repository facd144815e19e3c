"""Test that predictions in tiles equal those of the whole image."""

import numpy as np
import pytest
from image_sets import ReadArrays, pixels_of, refusal

import mpidl as dl
from mpidl.tiles import networks

REACH = 24  # pixels: an output of the U-Net below does not depend on pixels further away
TILE, OVERLAP = 128, 64  # 3/8 of the overlap is REACH


def unet(size=(32, 32), classes=3, channels=3):
    """Return a U-Net that shrinks images by 4, with weights that depend only on their names."""
    net = dl.nn.zoo.unet((channels, *size), classes, seed=1, depth=2, filters=4)
    generator, limits = np.random.default_rng(2), {"mean": (-0.1, 0.1), "variance": (0.5, 2)}
    net.state = {
        name: generator.uniform(*limits[name.rpartition(".")[2]], array.shape).astype(np.float32)
        for name, array in net.state.items()
    }
    return net


def predict_whole(images, **options):
    """Return the prediction for images (n, C, H, W) that are extended by their last pixels."""
    height, width = (-(-n // 4) * 4 for n in images.shape[2:])
    padding = [(0, 0), (0, 0), (0, height - images.shape[2]), (0, width - images.shape[3])]
    net = unet((height, width), channels=images.shape[1])
    outputs = dl.predict(net, np.pad(images, padding, mode="edge"), **options)
    return outputs[..., : images.shape[2], : images.shape[3]]


@pytest.mark.parametrize("size", [(192, 256), (201, 333), (3, 150), (40, 17)])
def test_tiles_give_the_scores_of_the_whole_image(size):
    """The sizes are multiples of the alignment, odd, and smaller than a tile."""
    images = pixels_of(1, 2, 3, *size)
    expected = predict_whole(images)
    scores = dl.predict(unet(), images, tile=TILE, overlap=OVERLAP)
    assert scores.shape == expected.shape and scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)


def test_without_overlap_the_scores_differ_at_the_seams_only():
    """Negative control: the padding of a tile changes the scores near its inner borders."""
    images = pixels_of(2, 1, 3, 2 * TILE, 2 * TILE)
    difference = np.abs(dl.predict(unet(), images, tile=TILE, overlap=0) - predict_whole(images))[0]
    distance = np.abs(np.arange(2 * TILE) + 0.5 - TILE)
    is_near = np.minimum(distance[:, None], distance) < REACH
    assert difference[:, ~is_near].max() <= 1e-6
    assert difference[:, is_near].max() > 1e-2
    overlapped = np.abs(
        dl.predict(unet(), images, tile=TILE, overlap=OVERLAP) - predict_whole(images)
    )
    assert overlapped.max() <= 1e-6


def test_classes_and_options():
    """Ragged mini-batches, datastores, one image, floats, softmax and mirror images."""
    net, images = unet(), pixels_of(3, 3, 3, 150, 131)
    options = {"tile": 64, "overlap": 20}
    expected = dl.predict(net, images, **options)
    assert np.array_equal(dl.predict(net, images, batch_size=5, **options), expected)
    assert np.array_equal(dl.predict(net, ReadArrays(images), **options), expected)
    assert np.array_equal(dl.predict(net, images[1], **options), expected[1:2])
    assert np.array_equal(dl.predict(net, images[:0], **options), expected[:0])
    floats = images / np.float32(255)
    np.testing.assert_allclose(dl.predict(net, floats, **options), expected, atol=1e-6)
    assert np.array_equal(dl.classify(net, images, **options), expected.argmax(1))
    net.classes = ("sky", "sea", "sand")
    names = dl.classify(net, images, names=True, **options)
    assert np.array_equal(names, np.array(net.classes)[expected.argmax(1)])
    options = {"tile": TILE, "overlap": OVERLAP, "softmax": True, "test_flips": "xy"}
    scores = dl.predict(net, images[:, :, :148, :128], **options)
    expected = predict_whole(images[:, :, :148, :128], softmax=True, test_flips="xy")
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)


def test_one_score_per_pixel():
    net, images = unet(classes=1, channels=1), pixels_of(4, 2, 80, 90)
    scores = dl.predict(net, images[:, None], tile=32)
    assert scores.shape == (2, 1, 80, 90)
    assert np.array_equal(dl.classify(net, images[:, None], tile=32), scores[:, 0] > 0)


def test_the_alignment_of_networks():
    assert networks.alignment_of(unet()) == 4
    assert networks.alignment_of(dl.nn.zoo.unet((1, 64, 64), depth=4, filters=2)) == 16
    assert networks.alignment_of(dl.Network([dl.Conv2D(3, 2, padding=1)], (1, 9, 9))) == 1
    layers = [dl.MaxPool2D((3, 2)), dl.Resize2D(scale=(3, 2))]
    assert networks.alignment_of(dl.Network(layers, (1, 12, 12))) == 6


def test_layers_that_resize_to_a_fixed_size():
    """As in DeepLabV3: the size of such a layer belongs to the size of the network's images."""

    def network(size):
        halves = tuple(n // 2 for n in size)
        layers = [
            dl.Conv2D(3, 4, stride=2, padding=1, name="half"),
            dl.Resize2D(size, mode="bilinear", name="large"),
            dl.Resize2D(halves, mode="nearest", name="small"),
            dl.Conv2D(3, 2, padding=1, name="scores"),
            dl.Resize2D(size, mode="bilinear"),
        ]
        return dl.Network(layers, (3, *size), seed=1)

    net, images = network((32, 32)), pixels_of(6, 1, 3, 160, 200)
    assert networks.alignment_of(net) == 2
    scores = dl.predict(net, images, tile=64, overlap=32)
    expected = dl.predict(network((160, 200)), images)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)


def test_weights_are_shared_and_the_network_is_unchanged():
    net = unet()
    net.crop = (32, 32)
    part = networks.for_tiles(net, (64, 128))
    assert part.input_shape == (3, 64, 128) and part.crop is None and net.crop == (32, 32)
    assert all(part.parameters[name] is array for name, array in net.parameters.items())
    assert part.normalization is net.normalization


def test_refusals():
    images = pixels_of(5, 1, 3, 64, 64)
    dense = dl.Network([dl.Conv2D(3, 2, padding=1), dl.Dense(2)], (3, 32, 32))
    fixed = dl.Network([dl.MaxPool2D(2), dl.AdaptiveAveragePool2D(32)], (3, 32, 32))
    odd = dl.Network([dl.Resize2D(20), dl.Resize2D(32)], (3, 32, 32))
    elements = dl.Network([dl.LayerNorm("image")], (3, 32, 32))
    ragged = dl.Network(
        [dl.AveragePool2D(3, stride=2), dl.TransposedConv2D(3, 1, stride=2)], (3, 33, 33)
    )
    for net, options, text in (
        (dense, {"tile": 64}, "tile: expected a network with outputs (K, 32, 32) for images"),
        (fixed, {"tile": 64}, "tile: expected a network with one output per pixel of images of"),
        (ragged, {"tile": 64}, "tile: expected a network with one output per pixel of images of"),
        (odd, {"tile": 64}, "tile: expected layers that divide or multiply the size of images"),
        (elements, {"tile": 64}, "tile: expected a network that accepts images of any size"),
        (unet(), {"tile": 66}, "tile must be a multiple of 4"),
        (unet(), {"overlap": 8}, "overlap 8: expected it together with tile"),
        (unet(channels=1), {"tile": 64}, "arrays: image 0: expected an image of 1 channels"),
    ):
        assert refusal(dl.predict, net, images, **options).startswith(text)
    queue = dl.MinibatchQueue(dl.ArrayDatastore(images), 1)
    text = refusal(dl.predict, unet(), queue, tile=64)
    assert text == "tile: expected images or a datastore, found a MinibatchQueue"
