"""Test that values and networks print as one readable line, and as a table in a notebook."""

import numpy as np
from single_rank import SingleRank

import mpidl as dl
from mpidl.core import fold
from mpidl.core.tape import backward
from mpidl.nn import zoo


def batch():
    return dl.share(41, SingleRank(), epoch=2, seed=7)


def test_batch():
    assert repr(batch()) == "Batch(41 images, blocks [0, 3) of 3 on rank 0 of 1, epoch=2, seed=7)"


def test_blocked():
    images = dl.from_images(np.zeros((41, 3, 8, 8), "f4"), batch())
    expected = "Blocked(shape=(41, 3, 8, 8), dtype=float32, 3 block(s) on this rank)"
    assert repr(images) == expected


def test_partial():
    loss = dl.mean(dl.from_images(np.ones((41, 2)), batch()))
    text = "Partial(shape=(2,), dtype=float64, terms=[1 node(s) x 0.0243902]"
    assert repr(loss) == f"{text})"
    assert repr(loss + np.ones(2)) == f"{text}, plus a replicated addend)"


def test_partial_with_a_late_factor():
    factor = fold.Late(None, 0.25)  # a number on a device, times 0.25
    assert "node(s) x 0.25]" in repr(dl.sum(dl.from_images(np.ones(41), batch())) * factor)


def test_var():
    weight = dl.Var(np.zeros((4, 3), "f4"), name="dense1.weight")
    assert repr(weight) == "Var('dense1.weight', ndarray of shape (4, 3), dtype=float32)"
    loss = dl.total(weight * weight)
    backward(loss, np.ones((), "f4"))
    assert repr(loss) == "Var('total', played back)"


def test_network():
    expected = "Network(10 layers, input 1x28x28, output 10, 123,090 learnables)"
    assert repr(zoo.digits()) == expected


def test_datastores():
    arrays = dl.ArrayDatastore(np.zeros((4, 8, 8), "u1"), [0, 1, 0, 1], source="squares")
    text = "squares: 4 images of 1x8x8 in 2 classes"
    assert repr(arrays) == f"ArrayDatastore({text})"
    assert repr(arrays.subset([0, 2])) == f"Subset(2 of {text})"

    class Letters(dl.data.Datastore):
        image_shape, labels, classes = (1, 8, 8), np.zeros(3, np.int64), ["a"]

    assert repr(Letters()) == "Letters(3 images of 1x8x8 in 1 classes)"
    queue = dl.MinibatchQueue(arrays, 3)
    assert repr(queue) == f"MinibatchQueue(2 mini-batches of 3, ArrayDatastore({text}))"


def test_options_show_what_differs_from_the_defaults():
    assert repr(dl.TrainingOptions()) == "TrainingOptions()"
    options = dl.TrainingOptions(solver="adam", epochs=2, learning_rate=0.1, scale=(0.9, 1.1))
    assert repr(options) == (
        "TrainingOptions(epochs=2, solver='adam', learning_rate=0.1, scale='0.9,1.1')"
    )


def test_networks_are_tables_in_notebooks():
    net = dl.Network([dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(2, name="<&>")], (3, 8, 8))
    html = net._repr_html_()
    assert html == net.analyze()._repr_html_()
    assert html.startswith("<table><tr><th>layer</th><th>type</th>")
    assert html.count("<tr>") == 1 + 1 + 3 + 1  # the header, the images, the layers, the totals
    assert "<td>conv1</td><td>Conv2D</td><td>4x6x6</td><td>112</td>" in html
    assert "<td>&lt;&amp;&gt;</td>" in html
    assert repr(net.analyze()) == "Analysis(3 layers, batch_size=128)"


def test_an_incomplete_datastore_has_the_representation_of_an_object():
    class Unfinished(dl.data.Datastore):
        image_shape = (1, 2, 2)

    assert " object at 0x" in repr(Unfinished())
