"""Define the losses that have names, and check that a dataset and a network match a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpidl import ops
from mpidl.autodiff import is_one_number
from mpidl.binary_cross_entropy_loss import BinaryCrossEntropy
from mpidl.blocks import Blocked
from mpidl.cross_entropy_loss import CrossEntropy, Sums
from mpidl.data.checks import check_classes
from mpidl.data.datastore import need_datastore
from mpidl.data.transforms.image_targets import moved_shape
from mpidl.errors import UserError
from mpidl.nn import Network
from mpidl.nn.layers import Sigmoid
from mpidl.ops.label_checks import squeezed
from mpidl.soft_dice_loss import Dice
from mpidl.text import class_names, name_list


def mean_squared_error(net: Network, images: Blocked, targets: Blocked) -> Sums:
    """Return the mean squared error of the outputs, as a tuple of one Partial."""
    return (ops.mean_squared_error(net(images), targets),)


def mean_absolute_error(net: Network, images: Blocked, targets: Blocked) -> Sums:
    """Return the mean absolute error of the outputs, as a tuple of one Partial."""
    return (ops.mean_absolute_error(net(images), targets),)


cross_entropy = CrossEntropy()  # the loss "crossentropy" without options

LossFunction: TypeAlias = Callable[[Network, Any, Any], Sums]
LabelLoss: TypeAlias = CrossEntropy | BinaryCrossEntropy | Dice

LOSSES: dict[str, LossFunction] = {
    "crossentropy": cross_entropy,
    "binary-crossentropy": BinaryCrossEntropy(),
    "dice": Dice(),
    "crossentropy+dice": Dice(cross_entropy=cross_entropy),
    "mse": mean_squared_error,
    "mae": mean_absolute_error,
}

# {training option: names of the losses that have this option}
TAKERS = {
    "class_weights": ("crossentropy", "dice", "crossentropy+dice"),
    "positive_weights": ("binary-crossentropy",),
    "label_smoothing": ("crossentropy", "crossentropy+dice"),
    "ignore_label": ("crossentropy", "binary-crossentropy", "dice", "crossentropy+dice"),
    "focal_gamma": ("crossentropy", "binary-crossentropy", "crossentropy+dice"),
}


def label_loss(loss: str | Callable[..., Any]) -> LabelLoss | None:
    """Return the label loss given by name or as an object, or None if it is another loss."""
    value = loss if callable(loss) else LOSSES.get(loss)
    return value if isinstance(value, LabelLoss) else None


def has_class_scores(loss: str | Callable[..., Any]) -> bool:
    """Return whether the outputs for this loss are class scores, and each label is one class."""
    return isinstance(label_loss(loss), CrossEntropy | Dice)


def has_label_scores(loss: str | Callable[..., Any]) -> bool:
    """Return whether the outputs for this loss are scores of labels that may occur together."""
    return isinstance(label_loss(loss), BinaryCrossEntropy)


def loss_with_options(name: str | Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Return a named loss with options.

    Parameters
    ----------
    name
        The value of the argument `loss`.
    options
        The options whose values differ from the defaults, as {name in TAKERS: value}.

    Returns
    -------
    str or callable
        `name` if there are no options, else a loss with the options.

    Raises
    ------
    UserError
        If the loss does not have one of the options, or if a value is out of range.
    """
    for option, value in options.items():
        if callable(name) or name not in TAKERS[option]:
            *losses, last = TAKERS[option]
            takers = f"{', '.join(losses)} or {last}" if losses else last
            raise UserError(
                f"--{option.replace('_', '-')} {value}: expected the loss {takers}, found {name}"
            )
    if not options:
        return name
    if name == "binary-crossentropy":
        return BinaryCrossEntropy(**options)
    if name == "dice":
        return Dice(**options)
    loss = CrossEntropy(**options)
    if name == "crossentropy":
        return loss
    return Dice(ignore_label=loss.ignore_label, cross_entropy=loss)


def loss_function(loss: str | Callable[..., Any]) -> LossFunction:
    """Return a loss as a function f(net, images, targets).

    Parameters
    ----------
    loss
        A name in LOSSES, or a function of (net, images, targets) that returns a loss or the tuple
        (loss, number of correct labels).

    Returns
    -------
    callable
        A function that returns a tuple of Partials: the loss to minimize and, optionally, the
        number of correct labels. A label loss may return more sums (see `CrossEntropy.of_scores`).

    Raises
    ------
    UserError
        If no loss has this name.
    TypeError
        Raised by the returned function if the user's function returns neither a loss nor such a
        tuple.
    """
    if not callable(loss):
        if loss not in LOSSES:
            raise UserError(f"loss must be {', '.join(LOSSES)} or a function, found {loss}")
        return LOSSES[loss]
    if isinstance(loss, LabelLoss):
        return loss
    name = getattr(loss, "__name__", loss)

    def checked_loss(net, images, targets):
        sums = loss(net, images, targets)
        sums = sums if isinstance(sums, tuple) else (sums,)
        if len(sums) not in (1, 2) or not all(map(is_one_number, sums)):
            raise TypeError(
                f"{name}: expected a loss, or (loss, number of correct labels), each a single "
                f"number, got {sums[0] if len(sums) == 1 else sums!r}"
            )
        return sums

    return checked_loss


def targets_shape(net: Network, datastore: Any) -> tuple[int, ...] | None:
    """Return the shape of the targets per image that the loss receives, or None without targets.

    Targets that are images or pixel labels are cropped with the input images (`Network.crop`).
    """
    if datastore.targets_shape is None:
        return None
    size = datastore.image_shape[1:] if net.crop is None else net.crop
    return moved_shape(datastore, (datastore.image_shape[0], *size))


def labels_per_image(net: Network, datastore: Any) -> int:
    """Return the number of labels per image.

    The number is 1 if the dataset has no targets, else the number of elements in the targets of an
    image.
    """
    return math.prod(targets_shape(net, datastore) or ())


def output_class_names(loss: str | Callable[..., Any], net: Network, datastore: Any) -> list[str]:
    """Return the dataset's class names if the outputs are scores of these classes, else `[]`."""
    names = [str(name) for name in datastore.classes]
    if has_label_scores(loss):
        names = names[1:] if net.output_shape[:1] == (1,) and len(names) == 2 else names
        return names if net.output_shape[:1] == (len(names),) else []
    if datastore.targets_shape is None:
        return names
    # If there are more names than outputs, the names belong to the labels of the images, not to the
    # classes of the targets.
    return names if has_class_scores(loss) and len(names) <= net.output_shape[0] else []


def trained_classes(
    loss: str | Callable[..., Any], net: Network, datastore: Any
) -> tuple[str, ...] | None:
    """Return the value of `Network.classes` for a network trained on the dataset.

    The value is () for the regression losses "mse" and "mae". The value is also () for
    `BinaryCrossEntropy` if the network does not end with a sigmoid. The value is None if the class
    names are unknown or do not match the outputs.
    """
    named_loss = label_loss(loss)
    is_function = callable(loss) and named_loss is None
    if not is_function and named_loss is None:
        return ()
    if has_label_scores(loss) and not isinstance(net.layers[-1], Sigmoid):
        return ()
    names, outputs = output_class_names(loss, net, datastore), net.output_shape[:1]
    if not names or len(names) > outputs[0] or (is_function and outputs != (len(names),)):
        return None
    return class_names(names, outputs[0])


def check_names(
    expected: Sequence[str] | None,
    loss: str | Callable[..., Any],
    net: Network,
    datastore: Any,
    owner: str,
) -> None:
    """Raise UserError if the class names of a dataset differ from the expected names.

    The two lists may have different lengths, because an ArrayDatastore may infer the number of
    classes from its largest label.

    Parameters
    ----------
    expected
        The expected class names, or None if they are unknown.
    owner
        Owner of the expected names for the error message, such as "the network".
    """
    names = output_class_names(loss, net, datastore)
    other = [i for i, (a, b) in enumerate(zip(expected or (), names, strict=False)) if a != b]
    if other:
        raise UserError(
            f"{datastore.describe()}: expected the classes of {owner} ({name_list(expected)}), "
            f"found {name_list(names)}, where label {other[0]} differs; set the class names with "
            "`classes=` of ImageFolder, ArrayDatastore or another datastore"
        )


def need_network(net: object) -> None:
    """Raise UserError unless the object is a Network."""
    if not isinstance(net, Network):
        layers = isinstance(net, list | tuple)
        hint = ": use dl.Network(layers, input_shape)" if layers else ""
        raise UserError(f"expected a network, found {type(net).__name__}{hint}")


def check(
    loss: str | Callable[..., Any], net: Network, datastore: Any, *, training: bool = False
) -> None:
    """Raise UserError if the network's outputs do not match the dataset, or the loss is unknown.

    If the loss is a function, the outputs are not compared with the dataset.

    Parameters
    ----------
    training
        Whether the dataset is used for training. Labels for training must have at least two
        classes.
    """
    loss_function(loss)
    need_network(net)
    need_datastore(datastore, "images")
    named_loss = label_loss(loss)
    if named_loss is None:
        if not callable(loss):
            _check_targets(loss, net, datastore)
        return
    has_targets = datastore.targets_shape is not None
    if training and not has_targets:
        check_classes(datastore)
    if isinstance(named_loss, BinaryCrossEntropy):
        named_loss.check(net, datastore)
    else:
        if net.output_shape:
            named_loss.check(net.output_shape[0], datastore.describe())
        if has_targets:
            _check_label_targets(_name_of(named_loss), net, datastore)
        else:
            _check_labels(net, datastore, named_loss.ignore_label)


def _name_of(loss):
    """Return the name of a label loss with class scores, as a value of --loss."""
    added = isinstance(loss, Dice) and loss.cross_entropy is not None
    return "crossentropy+dice" if added else "dice" if isinstance(loss, Dice) else "crossentropy"


def _check_labels(net, datastore, ignore_label):
    """Raise UserError unless the outputs have the shape (K,) and the images have labels below K."""
    dataset, outputs = datastore.describe(), net.output_shape
    if datastore.labels is None:
        raise UserError(f"{dataset}: the images have no labels to compare with")
    if len(outputs) != 1:
        raise UserError(
            f"{dataset}: expected a network with outputs (K,), one score per class, found "
            f"outputs of shape {outputs}"
        )
    labels = np.asarray(datastore.labels)
    highest = int(np.max(labels[labels != ignore_label], initial=0))
    if highest >= outputs[0]:
        raise UserError(
            f"{dataset}: expected labels below {outputs[0]}, the number of the network's outputs, "
            f"found {highest}"
        )


def _check_label_targets(name, net, datastore):
    """Raise UserError unless the targets are labels whose shape matches the outputs.

    The targets of an image are an array of labels, such as one label per pixel.
    """
    dataset, shape, outputs = datastore.describe(), targets_shape(net, datastore), net.output_shape
    if datastore.targets_dtype.kind not in "iu":
        gray = len(shape) == 3 and shape[0] == 1
        hint = "; pixel_labels=True of dl.data.combined reads pixels as labels" if gray else ""
        raise UserError(
            f"{dataset}: --loss {name}: expected labels, or whole numbers as targets, found "
            'targets that are floats; use --loss mse for these (in Python loss="mse", and '
            f"dl.regression_errors){hint}"
        )
    if len(outputs) < 1 or squeezed(outputs[1:]) != squeezed(shape):
        raise UserError(
            f"{dataset}: --loss {name}: expected a network with outputs (K, "
            f"{', '.join(map(str, shape))}), a score for each class and target, found {outputs}"
        )


def _check_targets(loss, net, datastore):
    """Raise UserError unless the targets are floats with the same shape as the outputs."""
    dataset, shape, outputs = datastore.describe(), targets_shape(net, datastore), net.output_shape
    if shape is None:
        contents = "only labels" if datastore.labels is not None else "none"
        raise UserError(f"{dataset}: --loss {loss}: expected images with targets, found {contents}")
    if datastore.targets_dtype.kind in "iu":
        raise UserError(
            f"{dataset}: --loss {loss}: expected targets that are floats, found whole numbers: "
            "write them as float32"
        )
    if squeezed(shape) != squeezed(outputs):
        raise UserError(
            f"{dataset}: --loss {loss}: expected a network with outputs of shape {tuple(shape)}, "
            f"like the targets, found {outputs}"
        )


def label_range(loss: str | Callable[..., Any], net: Network) -> dict[str, int | None]:
    """Return the arguments `classes` and `ignore_label` of a `MinibatchQueue` for a loss.

    Both arguments are None if the loss is not a label loss.
    """
    named_loss = label_loss(loss)
    if named_loss is None:
        return {"classes": None, "ignore_label": None}
    classes = 2 if has_label_scores(loss) else net.output_shape[0]
    classes = 2 if isinstance(named_loss, Dice) and classes == 1 else classes
    return {"classes": classes, "ignore_label": named_loss.ignore_label}
