"""Transfer learning: replace the last layer of a trained network, to predict other classes."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

from mpidl.errors import UserError
from mpidl.nn.layers import Conv2D, Dense, Softmax, Weighted
from mpidl.nn.network import Network
from mpidl.ops import check
from mpidl.text import did_you_mean, printable


def transfer(
    net: Network,
    classes: int | Sequence[str],
    *,
    new_layer_factor: float = 1.0,
    freeze_up_to: str | None = None,
    seed: int | None = None,
) -> Network:
    """Return a copy of a trained network with a new last layer for other classes.

    The new layer replaces the last layer with learnables and has the same name. All other layers
    keep their learnables and state, byte for byte. If the network already has the given classes,
    its last layer is kept too, and has the same learning rate as the other layers. If the outputs
    are not classes, a `Softmax` at the end is left out.

    Parameters
    ----------
    net : Network
        The trained network. Its last layer with learnables is a `Dense`, or a 1x1 `Conv2D` whose
        output is pooled to a vector. The network itself is not changed.
    classes : sequence of str, or int
        The names of the classes, or the number of outputs if the outputs are not classes.
    new_layer_factor : float
        Factor by which the learning rate of the new layer is multiplied, a number > 0.
    freeze_up_to : str, optional
        Name of a layer. This layer and all layers before it in the list are frozen: their
        learnables do not change, and they run as in prediction (see `Network.freeze`). Layers that
        are frozen in `net`, except for the last layer, stay frozen in any case.
    seed : int, optional
        Seed of the initial learnables of the new layer; by default the seed of the network.

    Returns
    -------
    Network
        The new network, in host memory. Its attribute `classes` has the names.

    Raises
    ------
    UserError
        If the last layer cannot be replaced, if `freeze_up_to` is not a layer before the last
        layer, if the normalization of a network from a file of another library is not known, or
        if another argument is invalid.
    """
    count, names = _count_and_names(classes)
    if not (check.are_numbers(new_layer_factor) and 0 < new_layer_factor < math.inf):
        raise UserError(f"new_layer_factor: expected a number above 0, found {new_layer_factor!r}")
    if net.normalization is not None:
        net.normalization.need_known()
    net, head = net.on(None), last_layer(net)
    layer = copy.copy(head)
    layer.trainable = True
    if is_kept(net, classes):
        layer.weight_learn_rate_factor = layer.bias_learn_rate_factor = 1.0
        edited = net.with_layers([layer if old is head else old for old in net.layers])
    else:
        layer.weight_learn_rate_factor = layer.bias_learn_rate_factor = float(new_layer_factor)
        if isinstance(layer, Dense):
            layer.outputs = count
        else:
            layer.filters = count
        if not names and isinstance(net.layers[-1], Softmax):
            net = net.up_to(net.reads[-1][0])
        edited = net.replace_layers({head.name: layer}, seed)
        edited.classes, edited.loss = names or None, None
    if freeze_up_to is not None:
        edited.freeze(*_names_up_to(edited, freeze_up_to, head.name))
    return edited


def is_kept(net: Network, classes: int | Sequence[str]) -> bool:
    """Return whether `transfer` would keep the last layer, because its classes are the same."""
    count, names = _count_and_names(classes)
    return net.output_shape == (count,) and net.classes == names


def last_layer(net: Network) -> Dense | Conv2D:
    """Return the last layer with learnables, which `transfer` replaces.

    Raises UserError if the layer cannot be replaced by a layer with another number of outputs.
    """
    table = net.table()
    if not table:
        raise UserError("transfer: expected a network with learnables, found none")
    head = net[table[-1][0]]
    is_wide = isinstance(head, Conv2D) and (head.size not in (1, (1, 1)) or head.groups != 1)
    if not isinstance(head, Dense | Conv2D) or is_wide:
        raise UserError(
            f"transfer: {head.name}: expected Dense or a 1x1 Conv2D as the last layer with "
            f"learnables, found {head!r}"
        )
    i = net.layer_number(head.name)
    for before, layer, reads in zip(
        net.layers[i:], net.layers[i + 1 :], net.reads[i + 1 :], strict=False
    ):
        if reads != (before.name,):
            raise UserError(
                f"transfer: {layer.name}: expected only layers with one input after {head.name}, "
                f"the last layer with learnables, found one that reads {', '.join(reads)}"
            )
    outputs = head.outputs if isinstance(head, Dense) else head.filters
    if net.output_shape != (outputs,):
        raise UserError(
            f"transfer: {head.name}: expected a network with a vector of {outputs} outputs, which "
            f"its last layer with learnables determines, found outputs of shape {net.output_shape}"
        )
    return head


def _count_and_names(classes):
    """Return (number of outputs, names of the classes or ())."""
    if isinstance(classes, int) and not isinstance(classes, bool):
        count, names = classes, ()
    elif isinstance(classes, Sequence) and not isinstance(classes, str):
        count, names = len(classes), tuple(map(str, classes))
    else:
        raise UserError(f"transfer: expected names of classes or a number, found {classes!r}")
    if count < 1:
        raise UserError(f"transfer: expected at least one class, found {classes!r}")
    return count, names


def _names_up_to(net, name, head):
    """Return the names of the layer `name` and of all layers before it."""
    spelled = f"freeze_up_to (--freeze-up-to) {name}"
    try:
        last = net.layer_number(name)
    except KeyError:
        weighted = [
            layer.name
            for layer in net.layers[: net.layer_number(head)]
            if isinstance(layer, Weighted)
        ]
        guess = did_you_mean(name, net.layer_names)
        raise UserError(
            f"{spelled}: no layer {printable(name)}{guess or ';'} the layers with weights before "
            f"{head} are, in order, {', '.join(map(printable, weighted)) or 'none'}"
        ) from None
    if last >= net.layer_number(head):
        raise UserError(f"{spelled}: expected a layer before {head}, which must be trained")
    return net.layer_names[: last + 1]
