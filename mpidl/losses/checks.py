"""Check that a dataset and a network match a loss, and find the class names of the outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mpidl.data.checks import check_classes
from mpidl.errors import UserError
from mpidl.losses.label_checks import targets_shape
from mpidl.losses.named import has_class_scores, has_label_scores, label_loss, loss_function
from mpidl.nn import Network
from mpidl.nn.network_check import need_network
from mpidl.ops.label_checks import squeezed
from mpidl.text import class_names, name_list


def labels_per_image(net: Network, datastore: Any) -> int:
    """Return the number of labels per image.

    The number is 1 if the dataset has no targets. Otherwise it is the number of target elements per
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
    # If there are more names than outputs, the names belong to the labels of the images, not to
    # classes in the targets.
    return names if has_class_scores(loss) and len(names) <= net.output_shape[0] else []


def trained_classes(
    loss: str | Callable[..., Any], net: Network, datastore: Any
) -> tuple[str, ...] | None:
    """Return the value of `Network.classes` for a network trained on the dataset.

    The value is () for the regression losses "mse" and "mae", and None if the class names are
    unknown or do not match the outputs.
    """
    named_loss = label_loss(loss)
    is_function = callable(loss) and named_loss is None
    if not is_function and named_loss is None:
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
    classes from its largest label. `expected` is None if the names are unknown, and `owner` is what
    has them, for the message, such as "the network".
    """
    names, owned = output_class_names(loss, net, datastore), expected or ()
    other = [i for i, (a, b) in enumerate(zip(owned, names, strict=False)) if a != b]
    if other:
        raise UserError(
            f"{datastore.describe()}: expected the classes of {owner} ({name_list(owned)}), "
            f"found {name_list(names)}, where label {other[0]} differs; set the class names with "
            "`classes=` of ImageFolder, ArrayDatastore or another datastore"
        )


def check(
    loss: str | Callable[..., Any], net: Network, datastore: Any, *, training: bool = False
) -> None:
    """Raise UserError if the network's outputs do not match the dataset, or the loss is unknown.

    If the loss is a function, the outputs are not compared with the dataset. Labels for training
    must have at least two classes.
    """
    loss_function(loss)
    need_network(net)
    named_loss = label_loss(loss)
    if named_loss is None:
        if not callable(loss):
            _check_targets(loss, net, datastore)
        return
    if training and datastore.targets_shape is None:
        check_classes(datastore)
    named_loss.check(net, datastore)


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
    classes = named_loss.label_classes(net.output_shape[0])
    return {"classes": classes, "ignore_label": named_loss.ignore_label}
