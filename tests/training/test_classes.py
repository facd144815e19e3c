"""The names of a network's classes: where they come from, who keeps them, who compares them; and
what is refused that is no network, no set, no options. Right on any number of ranks."""

import json

import h5py
import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl.training import input_pipeline
from mpidl.training.files import checkpoint

SHAPE, NAMES = (1, 5, 5), ("circle", "square", "triangle")
pytestmark = pytest.mark.usefixtures("without_plots")


@pytest.fixture(scope="module")
def world():
    return dl.World(threads=1)


def small(outputs=3):
    return dl.Network([dl.Conv2D(3, 2), dl.ReLU(), dl.Dense(outputs)], SHAPE, seed=1)


def pixels(count=40):
    return numbers("classes", count, *SHAPE, low=0, high=255).astype(np.uint8)


def labelled(classes=NAMES, most=3):
    return dl.ArrayDatastore(pixels(), np.arange(40) % most, classes)


def measured():
    return dl.data.combined(dl.ArrayDatastore(pixels()), pixels().mean((1, 2, 3)) / 255)


def segmented(images=None, classes=3):
    """A label a pixel."""
    labels = (np.arange(40)[:, None, None] + np.arange(9).reshape(3, 3)) % classes
    images = dl.ArrayDatastore(pixels()) if images is None else images
    return dl.data.combined(images, labels.astype(np.int32))


def to_pixels():
    return dl.Network([dl.Conv2D(3, 3)], SHAPE, seed=1)


def known(**options):
    return dl.TrainingOptions(epochs=1, batch_size=20, verbose="off", **options)


def trained(world, net, store, out=None, **options):
    dl.train(net, store, known(**options), world=world, out=out)
    return net


def named(net, images, labels):
    return dl.softmax_cross_entropy(net.logits(images), labels)


def squared(net, images, targets):
    return dl.mean_squared_error(net(images), targets)


def test_training_tells_the_network_its_classes(world):
    assert small().classes is None
    assert trained(world, small(), labelled()).classes == NAMES
    assert trained(world, small(), labelled(), loss=named).classes == NAMES
    assert trained(world, small(4), labelled(None)).classes == ("0", "1", "2", "3")
    for loss in ("mse", "mae"):
        assert trained(world, small(1), measured(), loss=loss).classes == ()
    assert trained(world, small(1), measured(), loss=squared).classes is None
    assert trained(world, to_pixels(), segmented()).classes is None
    of_images = segmented(labelled(list("abcd")))
    assert trained(world, to_pixels(), of_images).classes is None  # those of the images' labels


def test_a_network_made_of_another(world):
    net = trained(world, small(), labelled())
    assert net.replace_layers({"dense1": dl.Dense(3)}).classes == NAMES
    assert net.replace_layers({"dense1": dl.Dense(4)}).classes is None
    assert net.up_to("dense1").classes == NAMES and net.up_to("conv1").classes is None
    of_numbers = trained(world, small(1), measured(), loss="mse")
    assert of_numbers.replace_layers({"dense1": dl.Dense(1)}).classes == ()


def test_model_files_keep_them(world, tmp_path):
    path = tmp_path / "model.h5"  # each rank's own
    net = small()
    for classes, read in ((NAMES, list(NAMES)), ((), []), (None, None)):
        net.classes = classes
        dl.save_model(path, net)
        again, about = dl.load_model(path)
        assert again.classes == classes and about["classes"] == read
        assert dl.weights_sha256(again) == dl.weights_sha256(net)
    dl.save_model(path, net, list("abc"))
    assert dl.load_model(path)[0].classes == ("a", "b", "c") and net.classes is None
    dl.save_model(path, net, [])
    assert dl.load_model(path)[0].classes == ()
    with pytest.raises(dl.UserError, match=r"model.h5: classes: .*\(3,\), found 2 \(a, b\)"):
        dl.save_model(path, net, ["a", "b"])
    net.classes = ("a", "b")
    with pytest.raises(dl.UserError, match="found 2"):
        dl.save_model(path, net)
    assert dl.load_model(path)[0].classes == ()  # what was there


def test_checkpoints_keep_them(world, tmp_path):
    out = world.broadcast(str(tmp_path))
    whole = trained(world, small(), labelled(), max_iterations=2)
    trained(world, small(), labelled(), out=out, max_iterations=1)
    kept = world.broadcast(checkpoint.load(out) if world.rank == 0 else None)
    assert tuple(kept[1]["classes"]) == NAMES
    if world.rank == 0:
        with h5py.File(tmp_path / "checkpoint.h5") as file:
            assert json.loads(file.attrs["classes"]) == list(NAMES)
    net = small()
    dl.train(net, labelled(), known(max_iterations=2), world=world, resume=kept)
    assert net.classes == NAMES and dl.weights_sha256(net) == dl.weights_sha256(whole)


def test_labels_of_other_classes_are_not_evaluated(world):
    net = trained(world, small(), labelled())
    found = dl.evaluate(net, labelled(), world=world, confusion=True)
    assert found.confusion.classes == NAMES
    text = (
        r"of the network \(circle, square, triangle\), found square, triangle, where label 0 is "
        "another; `classes=`"
    )
    with pytest.raises(dl.UserError, match=text):
        dl.evaluate(net, labelled(NAMES[1:], 2), world=world)
    for classes in (("square", "circle", "triangle"), ("circle", "triangle"), None):
        with pytest.raises(dl.UserError, match="expected the classes of the network"):
            dl.evaluate(net, labelled(classes, 2), world=world)
    # one begins with the other
    two, more = labelled(NAMES[:2], 2), labelled((*NAMES, "star"))
    assert dl.evaluate(net, two, world=world, confusion=True).confusion.classes == NAMES
    assert dl.evaluate(net, more, world=world)[:3] == found[:3]
    nameless = labelled()
    nameless.classes = []
    net.classes, classes = None, net.classes
    assert dl.evaluate(net, labelled(NAMES[::-1]), world=world)[:3] == found[:3]
    net.classes = classes
    assert dl.evaluate(net, nameless, world=world, confusion=True).confusion.classes == NAMES


def test_arrays_without_names_count_by_their_labels(world):
    net = trained(world, small(), labelled(None))
    for store in (labelled(None, 2), labelled(["0", "1", "2", "3"])):
        dl.evaluate(net, store, world=world)
    fewer = trained(world, small(), labelled(None, 2), validation=labelled(None))
    assert fewer.classes == ("0", "1", "2")


def test_validation_counts_as_training_does(world):
    for loss in ("crossentropy", named):
        for classes, most in ((NAMES[::-1], 3), (NAMES[1:], 2)):
            net, store = small(), labelled(classes, most)
            with pytest.raises(dl.UserError, match="expected the classes of the training set"):
                trained(world, net, labelled(), validation=store, loss=loss)
            assert net.classes is None and net.normalization is None  # nothing was begun
        trained(world, small(), labelled(), validation=labelled(NAMES[:2], 2), loss=loss)


def test_names_of_images_are_not_those_of_their_pixels(world):
    net = to_pixels()
    net.classes = NAMES
    dl.evaluate(net, segmented(labelled(list("abcd"))), world=world)
    with pytest.raises(dl.UserError, match="found a, b, c"):
        dl.evaluate(net, segmented(labelled(list("abc"))), world=world)


def test_many_classes_are_not_all_listed(world):
    net = small(40)
    net.classes = tuple(map(str, range(40)))
    with pytest.raises(dl.UserError, match=r"\(0, 1, .* 9 and 30 more\), .*label 20 is") as caught:
        dl.evaluate(net, labelled([*map(str, range(20)), *"xyz"]), world=world)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_numbers_are_not_classified(world):
    net = trained(world, small(2), dl.data.combined(labelled(), np.ones((40, 2))), loss="mse")
    with pytest.raises(dl.UserError, match="classify: expected a network whose outputs are scores"):
        dl.classify(net, pixels(), world=world)
    assert dl.predict(net, measured(), world=world).shape == (40, 2)
    net.classes = None  # not known
    assert dl.classify(net, pixels(), world=world).shape == (40,)


def test_what_is_no_network_set_or_options(world):
    net, store, arrays = small(), labelled(), (pixels(), np.arange(40) % 3)
    for args, text in (
        ((net, arrays), "images to train on: expected a datastore, found tuple: dl.ArrayDatastore"),
        ((net, "shapes"), r"expected a datastore, found str: dl.ImageFolder\(folder\)"),
        ((net, store, {"epochs": 1}), r"TrainingOptions, found dict: TrainingOptions\(\*\*options"),
        ((list(net.layers), store), r"a network, found list: dl.Network\(layers, input_shape\)"),
        ((None, store), "expected a network, found NoneType$"),
        ((net, store.subset([])), "expected images to train on, found none"),
        ((net, store, known(validation=arrays)), "validation: expected a datastore, found tuple: "),
    ):
        with pytest.raises(dl.UserError, match=text):
            dl.train(*args, world=world)
    for call in (dl.evaluate, dl.regression_errors):
        with pytest.raises(dl.UserError, match="expected a datastore, found tuple: dl.Array"):
            call(net, arrays, world=world)
        with pytest.raises(dl.UserError, match="expected a network, found list"):
            call([], store, world=world)
    for call in (dl.predict, dl.classify):
        with pytest.raises(dl.UserError, match="expected a network, found list"):
            call([], store, world=world)
    input_pipeline.check_types(net, store, known())


def test_arrays_in_a_loop_of_ones_own(world):
    images, labels = next(dl.MinibatchQueue(labelled(), 20, world=world).epoch(1))
    step, ended = dl.value_and_grad(named), dl.Network([*small().layers, dl.Softmax()], SHAPE)
    text = "expected a value per image .*, got ndarray; a dl.MinibatchQueue .*dl.share"
    for net in (small(), ended):
        for use in (net, net.logits, lambda x, net=net: step(net, x, labels)):
            with pytest.raises(TypeError, match=text):
                use(pixels().astype(np.float32))
    with pytest.raises(TypeError, match="labels as integers.*, got ndarray; a dl.MinibatchQueue"):
        step(small(), images, np.arange(20) % 3)


def test_the_way_from_arrays_to_values(world):
    """What the message names is what a queue does."""
    images, labels = next(dl.MinibatchQueue(labelled(), 40, world=world, shuffle="never").epoch(0))
    batch = dl.share(40, world)
    mine = (pixels()[batch.indices] / np.float32(255)).astype(np.float32)
    made = dl.from_images(mine, batch)
    assert made.lanes.tobytes() == images.lanes.tobytes()
    again = dl.from_images((np.arange(40) % 3)[batch.indices], batch)
    losses = [world.gplus(named(small(), *given)) for given in ((images, labels), (made, again))]
    assert losses[0] == losses[1]


def test_a_normalization_by_name_is_told_how(world):
    with pytest.raises(TypeError, match=r"expected a Normalization, got 'zscore'; dl\.data\.norm"):
        dl.MinibatchQueue(labelled(), 20, world=world, normalization="zscore")
    found = dl.data.normalization("zscore", labelled(), world)
    assert len(dl.MinibatchQueue(labelled(), 20, world=world, normalization=found)) == 2


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "u8", "i8"])
def test_a_confusion_matrix_of_any_whole_numbers(dtype):
    labels, predicted = np.array([0, 1, 2, 2], dtype), np.array([0, 2, 2, 1], dtype)
    found = dl.confusion_matrix(labels, predicted)
    assert found.counts.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 1]]
    assert dl.confusion_matrix(labels[:0], predicted[:0]).counts.shape == (0, 0)
    with pytest.raises(dl.UserError, match="labels from 0 to 1, found 2"):
        dl.confusion_matrix(labels, predicted, "ab")
