"""Evaluate a network that was trained through the `function` of a queue, on any number of ranks."""

import re
import warnings

import numpy as np
import pytest

import mpidl as dl
from mpidl.errors import UserError

SHAPE, CLASSES, COUNT = (1, 6, 6), 3, 83


def images():
    random = np.random.default_rng(5)
    pixels = random.integers(0, 256, (COUNT, *SHAPE), np.uint8)
    return dl.ArrayDatastore(pixels, np.arange(COUNT) % CLASSES, list("abc"))


def darkened(pixels, labels, keys):
    """Return other values than the default normalization does."""
    return 1 - 3 * (pixels.astype(np.float32) / 255), labels


def network(shape=SHAPE):
    return dl.Network([dl.Dense(CLASSES)], shape, seed=1)


def trained(net, queue):
    """Take one step of a custom loop, as docs/matlab.md does."""
    step = dl.value_and_grad(
        lambda net, images, labels: dl.softmax_cross_entropy(net(images), labels),
        reduce=queue.world,
    )
    for batch, labels in queue.epoch(1):
        _, gradients, net.state = step(net, batch, labels)
        net.parameters = dl.SGDM(0.5)(net.parameters, gradients)
    return net


def scores(net, pixels):
    """Return the outputs in float64 for pixels that are ready."""
    weight, bias = (np.float64(net.parameters[f"dense1.{name}"]) for name in ("weight", "bias"))
    return pixels.reshape(len(pixels), -1) @ weight.T + bias


def warned(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        result = function()
    return result, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("score", ["evaluate", "predict", "classify", "regression"])
def test_an_evaluation_without_the_function_warns_on_rank_0(world, score):
    store, net = images(), network()
    targets = dl.ArrayDatastore(store.images, targets=np.zeros((COUNT, CLASSES)))
    trained(net, dl.MinibatchQueue(store, 32, world=world, function=darkened))
    calls = {
        "evaluate": lambda: dl.evaluate(net, store, world=world),
        "predict": lambda: dl.predict(net, store, world=world),
        "classify": lambda: dl.classify(net, store, world=world),
        "regression": lambda: dl.regression_errors(net, targets, world=world),
    }
    _, texts = warned(lambda: [calls[score]() for _ in range(2)])
    expected = (
        "the network was trained with function=darkened of a MinibatchQueue, which is not applied "
        "to these images: pass dl.MinibatchQueue(images, function=darkened) instead of the images, "
        "or set net.input_function = None if the function is for training only"
    )
    assert texts == ([expected] if world.rank == 0 else [])  # once, for two calls
    net.input_function = None
    assert warned(calls[score])[1] == []


def test_an_evaluation_of_a_queue_applies_its_function(world):
    store, net = images(), network()
    trained(net, dl.MinibatchQueue(store, 32, world=world, function=darkened))
    ready, _ = darkened(store.images, None, None)
    expected = scores(net, np.float64(ready))
    default_scores = scores(net, store.images / 255)
    for ranks in (world, None):  # the world of the queue, or all ranks
        queue = dl.MinibatchQueue(store, 7, world=ranks, function=darkened)
        (outputs, result), texts = warned(
            lambda queue=queue: (dl.predict(net, queue, softmax=False), dl.evaluate(net, queue))
        )
        assert texts == []
        np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)
        assert result.accuracy == np.mean(expected.argmax(1) == store.labels)
        assert result.images == COUNT
    assert np.mean(default_scores.argmax(1) == store.labels) != result.accuracy


def test_an_evaluation_of_a_queue_has_the_shapes_of_its_function(world):
    def halved(pixels, labels, keys):
        return pixels[:, :, ::2, ::2], np.float32(pixels[:, 0, 0, :CLASSES])

    store, net = images(), network((1, 3, 3))
    queue = dl.MinibatchQueue(store, 16, world=world, function=halved)
    outputs = scores(net, store.images[:, :, ::2, ::2] / 255)
    errors = outputs - store.images[:, 0, 0, :CLASSES]
    result = dl.regression_errors(net, queue)
    np.testing.assert_allclose(result.rmse, np.sqrt(np.mean(errors**2)), rtol=1e-5)
    with pytest.raises(UserError, match=re.escape("expected images of shape (1, 3, 3)")):
        dl.predict(net, store, world=world)


def test_an_evaluation_of_a_queue_normalizes_as_the_queue(world):
    store, net = images(), network()
    queue = dl.MinibatchQueue(
        store, 16, world=world, normalization=dl.data.normalization("0.5/0.25", store, world)
    )
    expected = scores(net, (store.images / 255 - 0.5) / 0.25)
    np.testing.assert_allclose(dl.predict(net, queue, softmax=False), expected, rtol=1e-4)


def test_a_custom_loop_records_the_normalization_of_its_queue(world, tmp_path):
    """An evaluation of plain images, also of the saved network, sees the pixels of the training."""
    store, net = images(), network()
    trained(net, dl.MinibatchQueue(store, 32, world=world))
    assert net.normalization is None
    normalization = dl.data.normalization("0.5/0.25", store, world)
    trained(net, dl.MinibatchQueue(store, 32, world=world, normalization=normalization))
    expected = scores(net, (store.images / 255 - 0.5) / 0.25)
    np.testing.assert_allclose(dl.predict(net, store, softmax=False), expected, rtol=1e-4)
    dl.save_model(tmp_path / f"{world.rank}.h5", net)
    loaded = dl.load_model(tmp_path / f"{world.rank}.h5")[0]
    np.testing.assert_allclose(dl.predict(loaded, store, softmax=False), expected, rtol=1e-4)


def test_a_custom_loop_needs_the_normalization_of_its_network(world):
    """A queue without it divides by 255, and the network would be evaluated on other pixels."""
    store, net = images(), network()
    net.normalization = dl.data.normalization("0.5/0.25", store, world)
    plain = dl.MinibatchQueue(store, 32, world=world)
    _, warnings_of_plain = warned(lambda: trained(net, plain))
    expected = "the network expects the normalization 0.5/0.25 (minus 127.5, divided by 63.75), but"
    assert [text.startswith(expected) for text in warnings_of_plain] == [True] * (world.rank == 0)
    assert net.normalization.name == "0.5/0.25"
    queue = dl.MinibatchQueue(store, 32, world=world, **net.input_transform())
    assert warned(lambda: trained(net, queue))[1] == []
    net.normalization = dl.data.transforms.normalize.unknown("foreign.onnx: not known")
    with pytest.raises(UserError, match="foreign.onnx: not known; choose it with"):
        trained(net, plain)


def test_a_network_that_reads_no_images_has_no_normalization(world):
    """The head of a network that reads images, and a network that reads noise."""
    store, head = images(), dl.Network([dl.Dense(CLASSES)], (4, 1, 1), seed=1)
    normalization = dl.data.normalization("0.5/0.25", store, world)
    options = {"normalization": normalization, "function": darkened}
    queue = dl.MinibatchQueue(store, 32, world=world, **options)

    def loss(head, features, pixels, labels):
        return dl.softmax_cross_entropy(head(features), labels)

    for pixels, labels in queue.epoch(1):
        features = dl.from_images(np.ones((len(labels.local()), 4, 1, 1), np.float32), pixels.batch)
        dl.value_and_grad(loss, reduce=world)(head, features, pixels, labels)
        break
    assert head.normalization is None and head.input_function is None


@pytest.mark.parametrize("score", ["evaluate", "predict"])
def test_a_queue_without_the_function_warns_like_images(world, score):
    store, net = images(), network()
    trained(net, dl.MinibatchQueue(store, 32, world=world, function=darkened))
    plain, darkening = (dl.MinibatchQueue(store, 32, function=f) for f in (None, darkened))
    function = {"evaluate": dl.evaluate, "predict": dl.predict}[score]
    assert len(warned(lambda: function(net, plain, world=world))[1]) == (world.rank == 0)
    assert warned(lambda: function(net, darkening, world=world))[1] == []


def test_a_training_without_a_function_clears_the_note(world, tmp_path):
    store, net = images(), network()
    trained(net, dl.MinibatchQueue(store, 32, world=world, function=darkened))
    assert net.input_function == "darkened"
    assert net.up_to("dense1").input_function == "darkened"
    if world.rank == 0:
        dl.save_model(tmp_path / "model.h5", net)
        assert dl.load_model(tmp_path / "model.h5")[0].input_function == "darkened"
    queue = dl.MinibatchQueue(store, 32, world=world)
    assert warned(lambda: dl.evaluate(trained(net, queue), store, world=world))[1] == []
    trained(net, dl.MinibatchQueue(store, 32, world=world, function=darkened))
    options = dl.TrainingOptions(epochs=1, validation=store, verbose=False)
    assert warned(lambda: dl.train(net, store, options, world=world))[1] == []
    assert net.input_function is None
