"""Record and read the training loss of a network: `Network.loss`, which model files store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpidl.losses.binary_cross_entropy_loss import BinaryCrossEntropy
from mpidl.losses.named import LOSSES, has_label_scores, label_loss, loss_with_options
from mpidl.nn import Network
from mpidl.nn.layers import Sigmoid


def trained_loss(
    loss: str | Callable[..., Any], net: Network, datastore: Any
) -> dict[str, str | int] | None:
    """Return the value of `Network.loss` for a network trained on the dataset.

    "name" is the name of the loss in LOSSES. "ignore_label" is the ignored label, if there is one.
    "negative" is the name of class 0, if the network's only output is the score of the other class.
    The value is None if the loss is a user-defined function.
    """
    named_loss = label_loss(loss)
    if named_loss is None:
        return None if callable(loss) else {"name": loss}
    facts: dict[str, str | int] = {"name": named_loss.name}
    if named_loss.ignore_label is not None:
        facts["ignore_label"] = int(named_loss.ignore_label)
    if isinstance(named_loss, BinaryCrossEntropy) and net.output_shape == (1,):
        if datastore.targets_shape is None and len(datastore.classes) == 2:
            facts["negative"] = str(datastore.classes[0])
    return facts


def check_trained_loss(facts: Any) -> dict[str, str | int] | None:
    """Return a value of `Network.loss` from a file; raise ValueError if it is invalid."""
    if facts is None:
        return None
    types = {"name": str, "ignore_label": int, "negative": str}
    if (
        not isinstance(facts, dict)
        or facts.get("name") not in LOSSES
        or not all(isinstance(value, types.get(key, ())) for key, value in facts.items())
    ):
        raise ValueError(f"loss: expected one of {', '.join(LOSSES)}, found {facts!r:.100}")
    return facts


def loss_of(net: Network) -> str | Callable[..., Any] | None:
    """Return the loss with which a network was trained, or None if it is unknown.

    The result is a value for the argument `loss` of `evaluate`, without class weights.
    """
    if net.loss is None:
        return None
    options = {key: net.loss[key] for key in ("ignore_label",) if key in net.loss}
    return loss_with_options(str(net.loss["name"]), options)


def has_separate_labels(net: Network) -> bool:
    """Return whether the outputs of a trained network are scores of labels that may occur together.

    If the training loss is unknown, the result is True if the last layer is a `Sigmoid`.
    """
    loss = loss_of(net)
    return isinstance(net.layers[-1], Sigmoid) if loss is None else has_label_scores(loss)


def label_names(net: Network) -> tuple[str, ...] | None:
    """Return the class names of the labels, which may be one more than the network's outputs.

    The network's only output may be the score of the second of two classes. The names are for the
    argument `classes` of a dataset, or None if they are unknown.
    """
    negative = (net.loss or {}).get("negative")
    if negative is None or not net.classes:
        return net.classes
    return (str(negative), *net.classes)
