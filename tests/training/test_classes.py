"""Test class names in networks, files and evaluations, and errors about wrong arguments.

The tests pass on any number of ranks.
"""

import json

import h5py
import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl.training.files import checkpoint

SHAPE, NAMES = (1, 5, 5), ("circle", "square", "triangle")
pytestmark = pytest.mark.usefixtures("without_plots")


def small(outputs=3):
    return dl.Network([dl.Conv2D(3, 2), dl.ReLU(), dl.Dense(outputs)], SHAPE, seed=1)


def pixels(count=40):
    return numbers("classes", count, *SHAPE, low=0, high=255).astype(np.uint8)


def labelled(classes=NAMES, label_count=3):
    return dl.ArrayDatastore(pixels(), np.arange(40) % label_count, classes)


def measured():
    return dl.data.combined(dl.ArrayDatastore(pixels()), pixels().mean((1, 2, 3)) / 255)


def segmented(images=None, classes=3):
    """Return images with one label per pixel."""
    labels = (np.arange(40)[:, None, None] + np.arange(9).reshape(3, 3)) % classes
    images = dl.ArrayDatastore(pixels()) if images is None else images
    return dl.data.combined(images, labels.astype(np.int32))


def to_pixels():
    return dl.Network([dl.Conv2D(3, 3)], SHAPE, seed=1)


def settings(**options):
    return dl.TrainingOptions(epochs=1, batch_size=20, verbose="off", **options)


def trained(world, net, store, out=None, **options):
    dl.train(net, store, settings(**options), world=world, out=out)
    return net


def logit_loss(net, images, labels):
    return dl.softmax_cross_entropy(net.logits(images), labels)


def squared(net, images, targets):
    return dl.mean_squared_error(net(images), targets)


def test_training_tells_the_network_its_classes(world):
    assert small().classes is None
    assert trained(world, small(), labelled()).classes == NAMES
    assert trained(world, small(), labelled(), loss=logit_loss).classes == NAMES
    assert trained(world, small(4), labelled(None)).classes == ("0", "1", "2", "3")
    for loss in ("mse", "mae"):
        assert trained(world, small(1), measured(), loss=loss).classes == ()
    assert trained(world, small(1), measured(), loss=squared).classes is None
    assert trained(world, to_pixels(), segmented()).classes is None
    # Class names of image labels do not apply to pixel labels.
    assert trained(world, to_pixels(), segmented(labelled(list("abcd")))).classes is None


def test_edited_networks_keep_classes_of_unchanged_outputs(world):
    net = trained(world, small(), labelled())
    assert net.replace_layers({"dense1": dl.Dense(3)}).classes == NAMES
    assert net.replace_layers({"dense1": dl.Dense(4)}).classes is None
    assert net.up_to("dense1").classes == NAMES and net.up_to("conv1").classes is None
    regression = trained(world, small(1), measured(), loss="mse")
    assert regression.replace_layers({"dense1": dl.Dense(1)}).classes == ()


def test_model_files_store_classes(world, tmp_path):
    path = tmp_path / "model.h5"  # a separate file for each rank
    net = small()
    for classes in (NAMES, (), None):
        net.classes = classes
        dl.save_model(path, net)
        loaded, description = dl.load_model(path)
        assert loaded.classes == classes
        assert description["classes"] == (None if classes is None else list(classes))
        assert dl.weights_sha256(loaded) == dl.weights_sha256(net)
    dl.save_model(path, net, list("abc"))
    assert dl.load_model(path)[0].classes == ("a", "b", "c") and net.classes is None
    dl.save_model(path, net, [])
    assert dl.load_model(path)[0].classes == ()
    with pytest.raises(dl.UserError, match=r"model.h5: classes: .*\(3,\), found 2 \(a, b\)"):
        dl.save_model(path, net, ["a", "b"])
    net.classes = ("a", "b")
    with pytest.raises(dl.UserError, match="found 2"):
        dl.save_model(path, net)
    assert dl.load_model(path)[0].classes == ()  # the file is unchanged


def test_checkpoints_store_classes(world, tmp_path):
    out = world.broadcast(str(tmp_path))
    unstopped = trained(world, small(), labelled(), max_iterations=2)
    trained(world, small(), labelled(), out=out, max_iterations=1)
    arrays, facts = world.broadcast(checkpoint.load(out) if world.rank == 0 else None)
    assert tuple(facts["classes"]) == NAMES
    if world.rank == 0:
        with h5py.File(tmp_path / "checkpoint.h5") as file:
            assert json.loads(file.attrs["classes"]) == list(NAMES)
    net = small()
    resume = arrays, facts
    dl.train(net, labelled(), settings(max_iterations=2), world=world, resume=resume)
    assert net.classes == NAMES and dl.weights_sha256(net) == dl.weights_sha256(unstopped)


def test_evaluation_refuses_labels_of_other_classes(world):
    net = trained(world, small(), labelled())
    expected = dl.evaluate(net, labelled(), world=world, confusion=True)
    assert expected.confusion.classes == NAMES
    text = (
        r"of the network \(circle, square, triangle\), found square, triangle, where label 0 "
        "differs; set the class names with `classes=`"
    )
    with pytest.raises(dl.UserError, match=text):
        dl.evaluate(net, labelled(NAMES[1:], 2), world=world)
    for classes in (("square", "circle", "triangle"), ("circle", "triangle"), None):
        with pytest.raises(dl.UserError, match="expected the classes of the network"):
            dl.evaluate(net, labelled(classes, 2), world=world)
    # One list of class names may be the beginning of another list.
    two, four = labelled(NAMES[:2], 2), labelled((*NAMES, "star"))
    assert dl.evaluate(net, two, world=world, confusion=True).confusion.classes == NAMES
    assert dl.evaluate(net, four, world=world)[:3] == expected[:3]
    nameless = labelled()
    nameless.classes = []
    net.classes = None
    assert dl.evaluate(net, labelled(NAMES[::-1]), world=world)[:3] == expected[:3]
    net.classes = NAMES
    assert dl.evaluate(net, nameless, world=world, confusion=True).confusion.classes == NAMES


def test_classes_of_arrays_without_names_are_counted(world):
    net = trained(world, small(), labelled(None))
    for store in (labelled(None, 2), labelled(["0", "1", "2", "3"])):
        dl.evaluate(net, store, world=world)
    fewer = trained(world, small(), labelled(None, 2), validation=labelled(None))
    assert fewer.classes == ("0", "1", "2")


def test_validation_has_the_classes_of_training(world):
    for loss in ("crossentropy", logit_loss):
        for classes, label_count in ((NAMES[::-1], 3), (NAMES[1:], 2)):
            net, store = small(), labelled(classes, label_count)
            with pytest.raises(dl.UserError, match="expected the classes of the training set"):
                trained(world, net, labelled(), validation=store, loss=loss)
            assert net.classes is None and net.normalization is None  # the network is unchanged
        trained(world, small(), labelled(), validation=labelled(NAMES[:2], 2), loss=loss)


def test_class_names_of_pixels_are_compared_too(world):
    net = to_pixels()
    net.classes = NAMES
    dl.evaluate(net, segmented(labelled(list("abcd"))), world=world)
    with pytest.raises(dl.UserError, match="found a, b, c"):
        dl.evaluate(net, segmented(labelled(list("abc"))), world=world)


def test_an_error_lists_few_of_many_classes(world):
    net = small(40)
    net.classes = tuple(map(str, range(40)))
    with pytest.raises(
        dl.UserError, match=r"\(0, 1, .* 9 and 30 more\), .*label 20 differs"
    ) as error:
        dl.evaluate(net, labelled([*map(str, range(20)), *"xyz"]), world=world)
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)


def test_a_regression_network_does_not_classify(world):
    net = trained(world, small(2), dl.data.combined(labelled(), np.ones((40, 2))), loss="mse")
    with pytest.raises(
        dl.UserError, match="classify: expected a network whose outputs are class scores"
    ):
        dl.classify(net, pixels(), world=world)
    assert dl.predict(net, measured(), world=world).shape == (40, 2)
    net.classes = None  # the class names are unknown
    assert dl.classify(net, pixels(), world=world).shape == (40,)


def test_tuples_of_arrays_are_datastores(world):
    store = labelled()
    arrays = store.images, store.labels
    nets, losses = [small(), small()], []
    for net, images in zip(nets, (store, arrays), strict=True):
        result = dl.train(net, images, settings(validation=images), world=world)
        losses.append(result.validation_loss)
    assert losses[0] == losses[1]
    for name, weight in nets[0].parameters.items():
        assert weight.tobytes() == nets[1].parameters[name].tobytes()
    net = small()
    assert dl.evaluate(net, arrays, world=world) == dl.evaluate(net, store, world=world)
    names = np.array(["ant", "bee", "cat"])[store.labels]
    assert dl.evaluate(net, (store.images, names), world=world).images == len(store)
    targets = np.zeros((len(store), *net.output_shape))
    errors = dl.regression_errors(net, (store.images, targets), world=world)
    outputs = dl.predict(net, store.images, world=world, softmax=False)
    np.testing.assert_allclose(errors.rmse, np.sqrt(np.mean(np.float64(outputs) ** 2)), rtol=1e-6)


def test_arguments_of_other_types_are_refused(world):
    net, store, arrays = small(), labelled(), (pixels(), np.arange(40) % 3)
    for args, text in (
        (
            (net, arrays[0]),
            "images to train on: expected a datastore, found ndarray: use dl.ArrayDatastore",
        ),
        ((net, dl.MinibatchQueue(store)), "found MinibatchQueue: use queue.datastore"),
        ((net, "shapes"), r"expected a datastore, found str: use dl.ImageFolder\(folder\)"),
        (
            (net, store, {"epochs": 1}),
            r"TrainingOptions, found dict: use TrainingOptions\(\*\*options",
        ),
        (
            (list(net.layers), store),
            r"a network, found list: use dl.Network\(layers, input_shape\)",
        ),
        ((None, store), "expected a network, found NoneType$"),
        ((net, store.subset([])), "expected training images, found none"),
        (
            (net, store, settings(validation=list(arrays))),
            "validation: expected a datastore, found list: ",
        ),
    ):
        with pytest.raises(dl.UserError, match=text):
            dl.train(*args, world=world)
    for call in (dl.evaluate, dl.regression_errors):
        with pytest.raises(dl.UserError, match="expected a datastore, found ndarray: use dl.Arr"):
            call(net, arrays[0], world=world)
        with pytest.raises(dl.UserError, match="expected a network, found list"):
            call([], store, world=world)
    for call in (dl.predict, dl.classify):
        with pytest.raises(dl.UserError, match="expected a network, found list"):
            call([], store, world=world)


def test_plain_arrays_in_a_custom_loop_are_refused(world):
    images, labels = next(dl.MinibatchQueue(labelled(), 20, world=world).epoch(1))
    step = dl.value_and_grad(logit_loss)
    text = "expected a value per image .*, got ndarray; dl.MinibatchQueue .*dl.share"
    for net in (small(), dl.Network([*small().layers, dl.Softmax()], SHAPE)):
        for call in (net, net.logits, lambda x, net=net: step(net, x, labels)):
            with pytest.raises(TypeError, match=text):
                call(pixels().astype(np.float32))
    with pytest.raises(TypeError, match="integer labels.*, got ndarray; dl.MinibatchQueue"):
        step(small(), images, np.arange(20) % 3)


def test_from_images_gives_the_values_of_a_queue(world):
    """`dl.from_images` gives the same values as `dl.MinibatchQueue`."""
    batch = next(dl.MinibatchQueue(labelled(), 40, world=world, shuffle="never").epoch(0))
    share = dl.share(40, world)
    arrays = (pixels() / np.float32(255)).astype(np.float32), np.arange(40) % 3
    values = [dl.from_images(array[share.indices], share) for array in arrays]
    assert values[0].lanes.tobytes() == batch[0].lanes.tobytes()
    losses = [world.gplus(logit_loss(small(), *args)) for args in (batch, values)]
    assert losses[0] == losses[1]


def test_a_normalization_has_to_be_fitted(world):
    with pytest.raises(TypeError, match=r"expected a Normalization, got 'zscore'; dl\.data\.norm"):
        dl.MinibatchQueue(labelled(), 20, world=world, normalization="zscore")
    fitted = dl.data.normalization("zscore", labelled(), world)
    assert len(dl.MinibatchQueue(labelled(), 20, world=world, normalization=fitted)) == 2


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "u8", "i8"])
def test_a_confusion_matrix_of_any_integer_type(dtype):
    labels, predicted = np.array([0, 1, 2, 2], dtype), np.array([0, 2, 2, 1], dtype)
    confusion = dl.confusion_matrix(labels, predicted)
    assert confusion.counts.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 1]]
    assert dl.confusion_matrix(labels[:0], predicted[:0]).counts.shape == (0, 0)
    with pytest.raises(dl.UserError, match="labels from 0 to 1, found 2"):
        dl.confusion_matrix(labels, predicted, "ab")
