"""Compare explanations with closed forms, finite differences and axioms, and test their targets."""

import numpy as np
import pytest
from image_sets import refusal
from single_rank import numbers

import mpidl as dl
from mpidl.explanations import explain as module
from mpidl.explanations.methods import METHODS, Occlusion

SHAPE = (3, 8, 10)
COUNT = 37  # two full blocks, and one of 5 images


@pytest.fixture
def images():
    return numbers("explained", COUNT, *SHAPE, dtype=np.float32)


def linear():
    """Return a network whose score of class k is the sum of weight[k] times the pixels."""
    return dl.Network([dl.Dense(4), dl.Softmax()], SHAPE, seed=1)


def pooled():
    """Return a network of a convolution, the mean over pixels, and a dense layer."""
    layers = [dl.Conv2D(3, 6, padding=1, name="features"), dl.ReLU(name="relu")]
    return dl.Network([*layers, dl.GlobalAveragePool2D(), dl.Dense(4, name="scores")], SHAPE)


def smooth(*end, channels=4):
    """Return a network without kinks, with a residual block and running statistics."""
    layers = [
        *(dl.Conv2D(3, 5, padding=1, name="first"), dl.BatchNorm(name="norm"), dl.Swish(name="a")),
        *(dl.Conv2D(3, 5, padding=1, name="inner"), dl.Tanh(name="b")),
        *(dl.Add(("a", "b"), name="sum"), dl.Dense(channels, name="scores"), *end),
    ]
    net = dl.Network(layers, SHAPE, seed=2)
    net.state = {
        name: numbers(name, *a.shape, low=0.5, dtype=np.float32) for name, a in net.state.items()
    }
    return net


def scores(net, images):
    return dl.predict(net, images, softmax=False).astype(np.float64)


def close(values, expected, limit=1e-5):
    assert values.shape == expected.shape and np.abs(expected).max() > 0
    return np.abs(values - expected).max() <= limit * np.abs(expected).max()


def test_a_linear_network(images):
    """All methods of pixels have a closed form: the weight times the pixel."""
    net = linear()
    weight = net.parameters["dense1.weight"].reshape(4, *SHAPE).astype(np.float64)
    result = dl.explain(net, images, method="gradient")
    classes = (images.reshape(COUNT, -1) @ weight.reshape(4, -1).T).argmax(axis=1)
    assert np.array_equal(result.classes, classes) and np.array_equal(result.predicted, classes)
    expected = weight[classes] * images
    assert close(result.attributions, expected) and close(result.maps, expected.sum(axis=1))
    baseline = numbers("baseline", *SHAPE)
    result = dl.explain(net, images, method="integrated-gradients", steps=3, baseline=baseline)
    assert close(result.attributions, weight[classes] * (images - baseline))
    options = {"window": (4, 5), "stride": (4, 5), "baseline": (0.5, -1.0, 2.0)}
    result = dl.explain(net, images, method="occlusion", **options)
    falls = (weight[classes] * (images - np.reshape([0.5, -1, 2], (3, 1, 1)))).sum(axis=1)
    falls = falls.reshape(COUNT, 2, 4, 2, 5).sum(axis=(2, 4))
    assert close(result.maps, falls.repeat(4, 1).repeat(5, 2)) and result.attributions is None


def test_occlusion_averages_over_overlapping_windows(images):
    """The entry of a pixel is the mean over the windows that cover it; the last may be smaller."""
    net, size = linear(), SHAPE[1:]
    weight = net.parameters["dense1.weight"].reshape(4, *SHAPE).astype(np.float64)
    result = dl.explain(net, images, method="occlusion", target=2, window=(3, 4), stride=(2, 3))
    totals, counts = np.zeros((COUNT, *size)), np.zeros(size)
    products = (weight[2] * images).sum(axis=1)
    for row in (0, 2, 4, 6):
        for column in (0, 3, 6):
            window = np.s_[..., row : row + 3, column : column + 4]
            totals[window] += products[window].sum(axis=(1, 2))[:, None, None]
            counts[window] += 1
    assert counts.min() == 1 and counts.max() == 4
    assert close(result.maps, totals / counts)


def test_grad_cam(images):
    """The weights of a layer before a mean over pixels are those of the dense layer."""
    net = pooled()
    values = dl.activations(net, images, "relu").astype(np.float64)
    weight = net.parameters["scores.weight"] / np.prod(SHAPE[1:])
    for layer in (None, "relu"):
        result = dl.explain(net, images, target=1, layer=layer)
        expected = np.maximum((weight[1][:, None, None] * values).sum(axis=1), 0)
        assert close(result.maps, expected)
    other = dl.explain(net, images, target=1, layer="features")
    assert not close(other.maps, expected)


def test_a_layer_beside_a_shortcut(images):
    """Grad-CAM differentiates all that follows the layer, and nothing that bypasses it."""
    net = smooth()
    result = dl.explain(net, images, target=3, layer="b")
    values = dl.activations(net, images, "b").astype(np.float64)
    weight = net.parameters["scores.weight"][3].reshape(values.shape[1:]).astype(np.float64)
    means = weight.mean(axis=(1, 2), keepdims=True)
    assert close(result.maps, np.maximum((means * values).sum(axis=1), 0))


@pytest.mark.parametrize(
    "end", [(), (dl.Softmax(),), (dl.Sigmoid(),)], ids=["none", "softmax", "sigmoid"]
)
def test_finite_differences(images, end):
    """The gradient is that of the score before the last activation, along random directions."""
    net, step = smooth(*end), 1e-2
    result = dl.explain(net, images, method="gradient", target=np.arange(COUNT) % 4)
    gradient = result.attributions.astype(np.float64) / images
    direction = np.sign(numbers("direction", *images.shape, dtype=np.float32))
    before, after = (
        scores(smooth(), images + sign * np.float32(step) * direction) for sign in (-1, 1)
    )
    expected = ((after - before) / (2 * step))[np.arange(COUNT), np.arange(COUNT) % 4]
    assert close((gradient * direction).sum(axis=(1, 2, 3)), expected, 2e-3)
    expected = scores(smooth(), images)[np.arange(COUNT), result.classes]
    assert close(result.scores, expected)


def test_integrated_gradients_are_complete(images):
    """They add up to the difference of the scores of image and baseline; fewer steps do not."""
    net, baseline = smooth(), np.full(SHAPE, 0.25, np.float32)
    images, errors = images[:16], []
    for steps in (32, 1):
        result = dl.explain(
            net, images, method="integrated-gradients", target=0, baseline=baseline, steps=steps
        )
        sums = result.attributions.sum(axis=(1, 2, 3), dtype=np.float64)
        expected = scores(net, images)[:, 0] - scores(net, baseline[None])[0, 0]
        errors.append(np.abs(sums - expected).max() / np.abs(expected).max())
    assert errors[0] < 1e-4 < errors[1]


@pytest.mark.parametrize("method", METHODS)
def test_an_image_does_not_depend_on_others(images, method, monkeypatch):
    """Negative control: in training mode, batch normalization mixes the images."""
    net = smooth()
    few = {"occlusion": {"window": 4}, "integrated-gradients": {"steps": 3}}
    options = {"method": method, "target": 1, "batch_size": 48, **few.get(method, {})}
    everything = dl.explain(net, images, **options).maps
    assert np.array_equal(dl.explain(net, images[20:23], **options).maps, everything[20:23])
    kind = METHODS[method]
    prepared = kind.prepared
    monkeypatch.setattr(kind, "prepared", lambda self, net: prepared(self, net).bind({}))
    mixed = dl.explain(net, images, **options).maps
    single = dl.explain(net, images[20:23], **options).maps
    assert not np.allclose(single, mixed[20:23])


def test_targets(images):
    net, labels = smooth(dl.Softmax()), np.arange(COUNT) % 4
    net.classes = ("ant", "bee", "cat", "dog")
    store = dl.ArrayDatastore(images, labels, net.classes)
    predicted = scores(smooth(), images).argmax(axis=1)
    for target, classes in (
        (None, predicted),
        ("predicted", predicted),
        ("true", labels),
        ("cat", np.full(COUNT, 2)),
        (3, np.full(COUNT, 3)),
        (predicted.tolist(), predicted),
        (np.arange(COUNT) % 3, np.arange(COUNT) % 3),  # the second mini-batch begins with class 2
    ):
        result = dl.explain(net, store, target=target)
        assert np.array_equal(result.classes, classes)
        assert np.array_equal(result.predicted, predicted)
        chances = dl.predict(net, store)[np.arange(COUNT), classes]
        np.testing.assert_allclose(result.probabilities, chances, atol=1e-5)
    assert repr(result) == "Explanation(grad-cam, 37 maps of 8x10)"


def test_one_output_for_two_classes(images):
    """The score of the first class is the negative of the output."""
    net = smooth(dl.Sigmoid(), channels=1)
    first, second = (dl.explain(net, images, method="gradient", target=k) for k in (0, 1))
    assert np.array_equal(first.maps, -second.maps) and np.array_equal(first.scores, -second.scores)
    chances = dl.predict(net, images)[:, 0]
    np.testing.assert_allclose(second.probabilities, chances, rtol=1e-5)
    np.testing.assert_allclose(first.probabilities, 1 - chances, rtol=1e-4)
    predicted = dl.explain(net, images)
    assert np.array_equal(predicted.classes, (chances > 0.5).astype(int))
    assert (predicted.scores >= 0).all()


def test_scores_of_pixels(images):
    """The score of a class is the sum over all pixels."""
    net = dl.Network([dl.Conv2D(1, 3, name="mixed"), dl.Softmax()], SHAPE, seed=1)
    weight = net.parameters["mixed.weight"][:, :, 0, 0].astype(np.float64)
    result = dl.explain(net, images, method="gradient", target=2)
    assert close(result.attributions, weight[2][:, None, None] * images)
    sums = np.einsum("kc,nchw->nk", weight, images)
    assert close(result.scores, sums[:, 2]) and np.isnan(result.probabilities).all()
    assert np.array_equal(result.predicted, sums.argmax(axis=1))
    text = refusal(dl.explain, net, images)
    assert text.startswith("grad-cam: expected a network with a layer before the scores")


def test_regression(images):
    net = dl.Network([dl.Dense(2)], SHAPE, seed=1)
    net.classes = ()
    assert "expected the index of an output, from 0 to 1" in refusal(dl.explain, net, images)
    result = dl.explain(net, images, method="gradient", target=1)
    assert close(result.scores, scores(net, images)[:, 1])
    assert (result.predicted == -1).all() and np.isnan(result.probabilities).all()


def test_undefined_scores(images):
    """An image with NaN scores has no predicted class; the other images are not affected."""
    net = dl.Network([dl.Dense(2, name="first"), dl.Dense(4, name="last")], SHAPE, seed=1)
    net.parameters["first.weight"][:, 0] = 10, -10
    net.parameters["last.weight"][...] = 1
    images[5, 0, 0, 0] = 3e38  # the first layer has infinite outputs of both signs
    result = dl.explain(net, images, method="gradient")
    assert result.classes[5] == result.predicted[5] == -1
    assert np.isnan([result.scores[5], result.probabilities[5]]).all()
    rest = np.arange(COUNT) != 5
    assert np.isfinite(result.maps[rest]).all() and (result.classes[rest] >= 0).all()


def test_an_empty_set():
    for method in METHODS:
        result = dl.explain(smooth(), np.zeros((0, *SHAPE), np.float32), method=method)
        assert result.maps.shape == (0, *SHAPE[1:]) and len(result.classes) == 0


def test_refusals(images):
    net, store = smooth(), (images, np.arange(COUNT) % 4)
    for options, text in (
        ({"method": "grad-cams"}, "method must be grad-cam, occlusion, gradient, integrated"),
        ({"window": 3}, "window: expected the method occlusion, found grad-cam"),
        (
            {"method": "gradient", "baseline": 1.0},
            "baseline: expected the method occlusion or integrated-gradients, found gradient",
        ),
        ({"layer": "scorse"}, "layer: no layer scorse: did you mean scores?"),
        (
            {"layer": "scores"},
            "layer scores: expected an output (C, H, W), found one of shape (4,)",
        ),
        ({"method": "occlusion", "window": 11}, "window: expected one or two whole numbers from 1"),
        ({"method": "occlusion", "window": 2, "stride": 3}, "stride: expected one or two whole"),
        ({"method": "integrated-gradients", "steps": 0}, "steps: expected a whole number from 1"),
        ({"method": "integrated-gradients", "steps": 10**6}, "steps: expected a whole number from"),
        ({"method": "integrated-gradients", "steps": True}, "steps: expected a whole number from"),
        ({"method": "occlusion", "baseline": [1, 2]}, "baseline: expected a number, one per"),
        ({"method": "occlusion", "baseline": "black"}, "baseline: expected a number, one per"),
        ({"method": "occlusion", "baseline": {}}, "baseline: expected a number, one per"),
        ({"method": "integrated-gradients", "baseline": np.nan}, "baseline: expected finite pix"),
        ({"method": "occlusion", "baseline": [0, 1e40, 0]}, "baseline: expected finite pixels, g"),
        ({"batch_size": 0}, "--batch-size must be at least 1, got 0"),
        ({"target": 4}, "target: expected classes from 0 to 3, found 4 to 4"),
        ({"target": "5x"}, "target 5x: expected predicted, true or a class of the network"),
        ({"target": [1, 2]}, "target: expected a whole number for each of 37 images, got"),
        ({"target": 1.5}, "target: expected a class or an index per image, got 1.5"),
    ):
        assert refusal(dl.explain, net, store, **options).startswith(text)
    assert "expected images with a class label each" in refusal(
        dl.explain, net, images, target="true"
    )
    assert "expected images of shape (3, 8, 10)" in refusal(dl.explain, net, images[:, :, 1:])


def test_the_windows_of_occlusion():
    method = Occlusion()
    method.prepared(dl.Network([dl.Dense(2)], (1, 224, 224)))
    assert (method.window, method.stride) == ((28, 28), (14, 14))
    assert len(method.windows((224, 224))) == 15 * 15


def test_rank_0_alone_gets_the_result(images):
    options = {"method": "gradient", "everywhere": False}
    assert module.explain(smooth(), images, **options).maps.shape == (COUNT, *SHAPE[1:])
