"""What a run minimizes: the losses that have a name, and what they ask of images and network."""

import math

import numpy as np

from mpidl import ops
from mpidl.autodiff import is_one_number
from mpidl.data.datastore import check_classes, need_datastore
from mpidl.errors import UserError
from mpidl.nn import Network
from mpidl.ops.loss import squeezed
from mpidl.text import class_names, name_list


def cross_entropy(net, images, labels):
    """(mean cross-entropy, how many labels have the largest score), of labels an image or a pixel.

    Both are Partials; the first is differentiated.
    """
    return cross_entropy_of(net.logits(images), labels)


def cross_entropy_of(scores, labels):
    """`cross_entropy` of what a network gave."""
    return ops.softmax_cross_entropy(scores, labels), ops.correct_count(scores, labels)


def mean_squared_error(net, images, targets):
    """(mean of the squared differences between outputs and targets,), a Partial."""
    return (ops.mean_squared_error(net(images), targets),)


def mean_absolute_error(net, images, targets):
    """(mean of the absolute differences between outputs and targets,), a Partial."""
    return (ops.mean_absolute_error(net(images), targets),)


LOSSES = {
    "crossentropy": cross_entropy,
    "mse": mean_squared_error,
    "mae": mean_absolute_error,
}


def of(loss):
    """f(net, images, targets) of a loss's name, or of a function: a tuple of Partials, of which the
    first is minimized, and the second, where there is one, is how many labels were right."""
    if not callable(loss):
        if loss not in LOSSES:
            raise UserError(f"loss must be {', '.join(LOSSES)} or a function, found {loss}")
        return LOSSES[loss]
    name = getattr(loss, "__name__", loss)

    def own(net, images, targets):
        found = loss(net, images, targets)
        found = found if isinstance(found, tuple) else (found,)
        if len(found) not in (1, 2) or not all(map(is_one_number, found)):
            raise TypeError(
                f"{name}: expected a loss, or (loss, how many labels were right), one number each, "
                f"got {found[0] if len(found) == 1 else found!r}"
            )
        return found

    return own


def labels_of(datastore):
    """How many labels an image has: 1, or as many as its targets have elements."""
    return math.prod(datastore.targets_shape or ())


def names_known(loss, net, datastore):
    """The names that a set has for what the outputs are scores of, a list, [] where it has none."""
    names = [str(name) for name in datastore.classes]
    if datastore.targets_shape is None:
        return names
    # the names are of the images' labels where they are more than the targets'
    return names if loss == "crossentropy" and len(names) <= net.output_shape[0] else []


def classes(loss, net, datastore):
    """What `Network.classes` are once the network was trained on a set."""
    if not callable(loss) and loss != "crossentropy":
        return ()
    names, outputs = names_known(loss, net, datastore), net.output_shape[:1]
    if not names or len(names) > outputs[0] or (callable(loss) and outputs != (len(names),)):
        return None
    return class_names(names, outputs[0])


def check_names(known, loss, net, datastore, whose):
    """A UserError where a set's labels stand for other classes than those `known`.

    One list may be longer: a set of arrays has as many as its largest label says.
    """
    found = names_known(loss, net, datastore)
    other = [i for i, (a, b) in enumerate(zip(known or (), found, strict=False)) if a != b]
    if other:
        raise UserError(
            f"{datastore.describe()}: expected the classes of {whose} ({name_list(known)}), found "
            f"{name_list(found)}, where label {other[0]} is another; `classes=` of ImageFolder, "
            "ArrayDatastore and the like says what labels stand for"
        )


def need_network(net):
    """A UserError where this is none."""
    if not isinstance(net, Network):
        layers = isinstance(net, list | tuple)
        hint = ": dl.Network(layers, input_shape) makes one" if layers else ""
        raise UserError(f"expected a network, found {type(net).__name__}{hint}")


def check(loss, net, datastore, *, training=False):
    """A UserError where a network's outputs cannot be compared with what a set has of its images,
    or where no loss has that name.

    training: whether the set is one to train on, which has more than one class. What a function
    takes is its own matter.
    """
    of(loss)
    need_network(net)
    need_datastore(datastore, "images")
    if callable(loss):
        return
    if loss != "crossentropy":
        _check_targets(loss, net, datastore)
    elif datastore.targets_shape is not None:
        _check_label_targets(net, datastore)
    else:
        if training:
            check_classes(datastore)
        _check_labels(net, datastore)


def _check_labels(net, datastore):
    """A label an image, (K,) outputs."""
    about, outputs = datastore.describe(), net.output_shape
    if datastore.labels is None:
        raise UserError(f"{about}: the images have no labels to compare with")
    if len(outputs) != 1:
        raise UserError(
            f"{about}: expected a network with outputs (K,) to compare their labels with, found "
            f"outputs of shape {outputs}"
        )
    highest = int(np.max(datastore.labels, initial=0))
    if highest >= outputs[0]:
        raise UserError(
            f"{about}: expected labels below {outputs[0]}, the number of the network's outputs, "
            f"found {highest}"
        )


def _check_label_targets(net, datastore):
    """A label a pixel, say: targets that are whole numbers."""
    about, shape, outputs = datastore.describe(), datastore.targets_shape, net.output_shape
    if datastore.targets_dtype.kind not in "iu":
        gray = len(shape) == 3 and shape[0] == 1
        hint = "; pixel_labels=True of dl.data.combined takes pixels as labels" if gray else ""
        raise UserError(
            f"{about}: --loss crossentropy: expected labels, or whole numbers as targets, found "
            'targets that are floats; --loss mse is for these (in Python loss="mse", and '
            f"dl.regression_errors){hint}"
        )
    if len(outputs) < 1 or squeezed(outputs[1:]) != squeezed(shape):
        raise UserError(
            f"{about}: --loss crossentropy: expected a network with outputs (K, "
            f"{', '.join(map(str, shape))}), a score for each class and target, found {outputs}"
        )


def _check_targets(loss, net, datastore):
    """Targets that are floats."""
    about, shape, outputs = datastore.describe(), datastore.targets_shape, net.output_shape
    if shape is None:
        found = "labels alone" if datastore.labels is not None else "none"
        raise UserError(f"{about}: --loss {loss}: expected images with targets, found {found}")
    if datastore.targets_dtype.kind in "iu":
        raise UserError(
            f"{about}: --loss {loss}: expected targets that are floats, found whole numbers: write "
            "them as float32"
        )
    if squeezed(shape) != squeezed(outputs):
        raise UserError(
            f"{about}: --loss {loss}: expected a network with outputs of shape {tuple(shape)}, as "
            f"the targets', found {outputs}"
        )


def limit(loss, net):
    """What labels must be below, as a `MinibatchQueue` is told; None of a loss that has none."""
    return net.output_shape[0] if loss == "crossentropy" else None
