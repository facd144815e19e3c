"""Test whitening filters: agreement with NumPy and between ranks, and which filters are kept."""

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from short_training import pictures, trained
from single_rank import numbers

import mpidl as dl
from mpidl.errors import UserError
from mpidl.training import whitening
from mpidl.training.files.model_file import weights_sha256

WHITENING = {"weight_initializer": "whitening", "trainable": False}


def network(shape=(1, 6, 6), filters=6, size=2, **options):
    layers = [dl.Conv2D(size, filters, name="whiten", **WHITENING | options), dl.ReLU()]
    return dl.Network([*layers, dl.Dense(3)], shape, seed=1)


def store_of(count, *shape, dtype=np.uint8):
    """Return images whose neighbouring pixels and channels are correlated."""
    pixels = numbers("whitening", count, *shape, low=0, high=90)
    pixels[:, :, :, 1:] += pixels[:, :, :, :-1]
    pixels[:, 1:] += pixels[:, :-1] / 2
    return dl.ArrayDatastore(pixels.astype(dtype), np.arange(count) % 3)


def patches_of(images, size, dilation=1):
    """Return all patches of images (n, C, H, W) as rows (patches, C * size * size), float64."""
    reach = dilation * (size - 1) + 1
    windows = sliding_window_view(images.astype(np.float64), (reach, reach), axis=(2, 3))
    windows = windows[..., ::dilation, ::dilation]
    return np.moveaxis(windows, 1, 3).reshape(-1, images.shape[1] * size * size)


@pytest.mark.parametrize("size", [1, 2, 9, 27])
def test_eigenvectors_are_those_of_lapack(size):
    rows = numbers("eigen", 2 * size, size)
    matrix = rows.T @ rows
    values, vectors = whitening.eigen(matrix)
    expected = np.linalg.eigvalsh(matrix)[::-1]
    assert np.allclose(values, expected, rtol=1e-12, atol=1e-12 * expected[0])
    assert np.allclose(vectors @ vectors.T, np.eye(size), atol=1e-13)
    assert np.allclose(vectors @ matrix @ vectors.T, np.diag(values), atol=1e-12 * expected[0])
    assert (vectors[np.arange(size), abs(vectors).argmax(axis=1)] > 0).all()


@pytest.mark.parametrize("matrix", [np.zeros((3, 3)), 2 * np.eye(4), np.ones((5, 5))])
def test_eigenvectors_of_repeated_eigenvalues(matrix):
    values, vectors = whitening.eigen(matrix)
    assert np.allclose(vectors.T @ (values[:, None] * vectors), matrix, atol=1e-14)
    assert np.allclose(vectors @ vectors.T, np.eye(len(matrix)), atol=1e-14)


@pytest.mark.parametrize(
    "shape, size, dilation, dtype, normalization",
    [
        ((1, 7, 6), 3, 1, np.uint8, "zscore"),
        ((3, 8, 9), 2, 1, np.uint8, "rescale-zero-one"),
        ((2, 7, 8), 2, 3, np.float32, "zerocenter-element"),
    ],
)
def test_outputs_are_uncorrelated(shape, size, dilation, dtype, normalization):
    store, pixels = store_of(75, *shape, dtype=dtype), shape[0] * size**2
    net = network(shape, 2 * pixels, size, dilation=dilation)
    net.normalization = dl.data.normalization(normalization, store)
    dl.whiten(net, store)
    weight, bias = (net.parameters[f"whiten.{name}"] for name in ("weight", "bias"))
    assert weight.dtype == bias.dtype == np.float32
    assert (weight[pixels:] == -weight[:pixels]).all() and (bias[pixels:] == -bias[:pixels]).all()
    patches = patches_of(net.normalization(store.read(np.arange(75))), size, dilation)
    outputs = patches @ weight[:pixels].reshape(pixels, -1).astype(np.float64).T + bias[:pixels]
    covariance = np.cov(patches.T, bias=True)
    epsilon = whitening.EPSILON * np.trace(covariance) / pixels
    variances = np.linalg.eigvalsh(covariance)[::-1]
    assert abs(outputs.mean(axis=0)).max() < 2e-3
    expected = np.diag(variances / (variances + epsilon))
    assert np.allclose(np.cov(outputs.T, bias=True), expected, atol=2e-3)


def test_crops_few_images_and_constant_images(world):
    """Only patches of the central window are used, and constant images give finite filters."""
    store = store_of(5, 1, 9, 9)
    net, window = network((1, 6, 6), 4), store.read(np.arange(5))[:, :, 1:7, 1:7]
    net.normalization = dl.data.normalization("none", store)
    dl.whiten(net, store, world)
    outputs = patches_of(window, 2) @ net.parameters["whiten.weight"].reshape(4, 4).T
    outputs = outputs + net.parameters["whiten.bias"]
    assert np.allclose(np.cov(outputs.T, bias=True), np.eye(4), atol=0.03)
    for value in (0, 200):
        flat = dl.ArrayDatastore(np.full((3, 1, 6, 6), value, np.uint8), np.arange(3))
        net = network(filters=8)
        net.normalization = dl.data.normalization("none", flat)
        dl.whiten(net, flat, world)
        assert all(np.isfinite(array).all() for array in net.parameters.values())


class Unshared:
    """A faulty world: each rank gets its own value instead of the sum over the ranks."""

    def __init__(self, world):
        self.rank, self.size, self.raise_if_any = world.rank, world.size, world.raise_if_any

    def gop(self, operation, value):
        return value


@pytest.mark.parametrize("count", [1, 37])
def test_one_result_on_any_number_of_ranks(world, count, monkeypatch):
    """The filters have the same bytes, even if ranks have no images and chunks differ in scale.

    A chunk has 16 images. In the negative control, ranks do not add up their sums.
    """
    monkeypatch.setattr(whitening, "CHUNK", 16)
    monkeypatch.setattr(whitening, "POSITIONS", 100)
    pixels = store_of(count, 2, 6, 6).read(np.arange(count)).astype(np.float32)
    pixels[count // 2 :] *= 300
    store = dl.ArrayDatastore(pixels, np.arange(count) % 3)
    results = []
    for ranks in (None, world, *([Unshared(world)] if count > 1 and world.size > 1 else [])):
        net = network((2, 6, 6), 16)
        net.normalization = dl.data.normalization("none", store)
        dl.whiten(net, store, ranks)
        results.append(weights_sha256(net))
    assert results[0] == results[1]
    assert results[0] not in results[2:]


def test_only_the_layer_of_a_training_has_new_filters(world):
    """Training sets the filters before its first step, and a second training keeps the filters."""
    net, initial = network(filters=8), network(filters=8).parameters["whiten.weight"]
    reference = network(filters=8)
    reference.normalization = dl.data.normalization("zscore", pictures(100))
    dl.whiten(reference, pictures(100))
    trained(world, net, normalization="zscore")
    filters = net.parameters["whiten.weight"]
    assert filters.tobytes() == reference.parameters["whiten.weight"].tobytes()
    assert filters.tobytes() != initial.tobytes()
    trained(world, net, store=pictures(60, "others"), normalization="zscore")
    assert net.parameters["whiten.weight"].tobytes() == filters.tobytes()


def test_a_model_file_keeps_the_filters(world, tmp_path):
    net, path = network(filters=8), f"{world.broadcast(str(tmp_path))}/model.h5"
    trained(world, net)
    if world.rank == 0:
        dl.save_model(path, net)
    world.barrier()
    loaded, _ = dl.load_model(path)
    assert loaded["whiten"].weight_initializer == "whitening" and not loaded["whiten"].trainable
    before = weights_sha256(loaded)
    assert before == weights_sha256(net)
    filters = loaded.parameters["whiten.weight"].tobytes()
    trained(world, loaded, store=pictures(60, "others"))
    assert loaded.parameters["whiten.weight"].tobytes() == filters
    assert weights_sha256(loaded) != before
    world.barrier()


@pytest.mark.parametrize("seed", [1, None])
def test_weights_that_were_set_to_zero_stay_zero(world, seed):
    """A declared state decides, not the values: new weights of a seedless network are 0, too."""
    layers = [dl.Conv2D(2, 6, name="whiten", **WHITENING), dl.ReLU(), dl.Dense(3)]
    net, zeroed = (dl.Network(layers, (1, 6, 6), seed=seed) for _ in range(2))
    assert net.unwhitened == ["whiten"]
    zeros = np.zeros_like(net.parameters["whiten.weight"])
    zeroed.parameters = {**zeroed.parameters, "whiten.weight": zeros}
    zeroed.unwhitened = [] if seed is None else zeroed.unwhitened
    assert zeroed.unwhitened == []
    trained(world, net)
    trained(world, zeroed)
    assert net.parameters["whiten.weight"].all() and net.unwhitened == []
    assert not zeroed.parameters["whiten.weight"].any()


def test_edited_networks_keep_the_state(tmp_path):
    zeroed = network()
    zeroed.parameters = {k: v * 0 for k, v in zeroed.parameters.items()}
    zeroed.normalization = dl.data.normalization("none", store_of(5, 1, 6, 6))
    for net, expected in ((network(), ["whiten"]), (zeroed, [])):
        net.normalization = zeroed.normalization
        dl.save_model(tmp_path / "model.h5", net)
        loaded, _ = dl.load_model(tmp_path / "model.h5")
        assert loaded.unwhitened == expected
        assert loaded.replace_layers({"dense1": dl.Dense(4)}).unwhitened == expected
        for seed in (None, 0, 2):
            edited = net.replace_layers({"dense1": dl.Dense(4)}, seed=seed)
            assert edited.unwhitened == expected
        assert net.append_layer(dl.Softmax()).unwhitened == expected
        assert net.up_to("whiten").unwhitened == expected
        assert net.replace_layers({"whiten": net["whiten"]}).unwhitened == ["whiten"]


def test_without_a_bias_and_trained_further(world):
    net = network(filters=4, bias=False, trainable=True)
    trained(world, net)
    assert "whiten.bias" not in net.parameters
    reference = network(filters=4, bias=False)
    trained(world, reference)
    difference = net.parameters["whiten.weight"] - reference.parameters["whiten.weight"]
    assert 0 < abs(difference).max() < 1


def test_a_layer_with_weights_may_read_another_layer(world):
    second = dl.Conv2D(2, 4, weight_initializer="whitening", name="second")
    net = dl.Network([dl.Conv2D(3, 2), second, dl.Dense(3)], (1, 6, 6))
    weight = np.ones_like(net.parameters["second.weight"])
    net.parameters = {**net.parameters, "second.weight": weight}
    assert whitening.layers_to_whiten(net) == []


def test_pixels_without_a_normalization_are_divided_by_255():
    store, net, reference = store_of(40, 1, 6, 6), network(), network()
    dl.whiten(net, store)
    reference.normalization = lambda images: images / 255
    dl.whiten(reference, store)
    assert weights_sha256(net) == weights_sha256(reference)


@pytest.mark.parametrize("shape", [(9, 1, 5, 6), (9, 2, 6, 6), (0, 1, 6, 6)])
def test_unusable_images_are_refused(shape):
    with pytest.raises(UserError, match=r"expected images of shape \(1, 6, 6\) or larger, found"):
        dl.whiten(network(), store_of(*shape))


def test_unusable_layers_are_refused(world):
    second = dl.Conv2D(2, 4, weight_initializer="whitening", name="second")
    net = dl.Network([dl.Conv2D(3, 2), second, dl.Dense(3)], (1, 6, 6))
    with pytest.raises(UserError, match="layer second: .* that reads the images, found .* conv1"):
        trained(world, net)
    with pytest.raises(UserError, match=r"expected filters that fit into images .*, found size 7"):
        trained(world, network(size=7, padding=1))
    with pytest.raises(ValueError, match="one group and at most 8 filters, .* and 9 filters"):
        network(filters=9)
    with pytest.raises(ValueError, match=r"got 2 group\(s\) and 4 filters"):
        network((2, 6, 6), 4, groups=2)
    with pytest.raises(ValueError, match="weight_initializer must be one of glorot, whitening"):
        network(weight_initializer="he")
