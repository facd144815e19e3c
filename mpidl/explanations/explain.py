"""Explain the decisions of a network for a set of images, on any number of ranks.

Each image is explained exactly once, by the rank of its block, and no sum over images exists, so
the results have the same bytes on any number of ranks.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias, overload

import numpy as np

from mpidl import losses
from mpidl.core.blocks import Blocked
from mpidl.core.tape import value_of
from mpidl.data import MinibatchQueue
from mpidl.data.array_datastore import Arrays
from mpidl.data.datastore import Datastore
from mpidl.errors import UserError
from mpidl.evaluation.class_metrics import predicted_classes
from mpidl.evaluation.evaluate import evaluating_world
from mpidl.evaluation.predict import collect, images_for
from mpidl.explanations.class_scores import (
    count_classes,
    entries_of,
    is_regression,
    scores_of,
    table_of_probabilities,
    table_of_scores,
)
from mpidl.explanations.methods import Baseline, Method, MethodName, method_of
from mpidl.matlab_names import explain_arguments
from mpidl.nn import Network
from mpidl.ranks.world import World
from mpidl.text import class_names, did_you_mean

PREDICTED, TRUE = "predicted", "true"
BATCH = 32  # images per mini-batch and rank; a gradient needs the memory of a training step
Target: TypeAlias = int | str | np.ndarray | None


class Explanation(NamedTuple):
    """The result of `explain`, with an entry for each of n images.

    Attributes
    ----------
    method : str
        Name of the method.
    classes : ndarray
        Index of the explained class, int64 (n,); -1 if the predicted class was to be explained and
        a score is NaN.
    scores : ndarray
        Score of this class before softmax or sigmoid, float64 (n,). For scores of pixels, the sum
        over all pixels.
    probabilities : ndarray
        Probability of this class, float32 (n,); NaN for scores of pixels and for regression.
    predicted : ndarray
        Index of the predicted class, int64 (n,); -1 if a score is NaN, and for regression.
    maps : ndarray
        Importance of each pixel, float32 (n, H, W). For a method with attributions, their sum over
        the channels. Only "grad-cam" has no negative entries.
    attributions : ndarray or None
        For "gradient" and "integrated-gradients", the attribution of each input number, float32
        (n, C, H, W).
    """

    method: str
    classes: np.ndarray
    scores: np.ndarray
    probabilities: np.ndarray
    predicted: np.ndarray
    maps: np.ndarray
    attributions: np.ndarray | None

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.maps.shape[1:]))
        return f"Explanation({self.method}, {len(self.maps)} maps of {shape})"


class Explainer:
    """A function of a network and a mini-batch for `predict.by_batch`: its results are arrays.

    `classes` are the classes to explain, one per image of the set, or None for predicted ones.
    `net` is the network to pass to `by_batch`.
    """

    def __init__(self, net: Network, method: Method, classes: np.ndarray | None):
        self.method, self.classes, self.net = method, classes, method.prepared(net)
        self.entries = [
            (method.entry_shape(net), np.float32),
            ((), np.int64),
            ((), np.float64),
            ((), np.float32),
            ((), np.int64),
        ]

    def __call__(self, net: Network, images: Blocked) -> tuple[np.ndarray, ...]:
        """Return entries, classes, scores, probabilities and predicted classes of local images."""
        outputs = value_of(scores_of(net, images)).stored()
        table = table_of_scores(net, outputs)
        predicted = np.full(len(table), -1) if is_regression(net) else predicted_classes(table)
        classes = predicted if self.classes is None else self.classes[images.batch.indices]
        probabilities = entries_of(table_of_probabilities(net, outputs), classes)
        return (
            self.method(net, images, classes),
            classes,
            entries_of(table, classes),
            probabilities.astype(np.float32),
            predicted,
        )


@overload
def explain(
    net: Network,
    images: Datastore | MinibatchQueue | Arrays | np.ndarray,
    *,
    method: MethodName = "grad-cam",
    target: Target = None,
    layer: str | None = None,
    window: int | tuple[int, int] | None = None,
    stride: int | tuple[int, int] | None = None,
    steps: int | None = None,
    baseline: Baseline | None = None,
    world: World | None = None,
    batch_size: int | None = None,
    everywhere: Literal[True] = True,
) -> Explanation: ...
@overload
def explain(
    net: Network,
    images: Datastore | MinibatchQueue | Arrays | np.ndarray,
    *,
    method: MethodName = "grad-cam",
    target: Target = None,
    layer: str | None = None,
    window: int | tuple[int, int] | None = None,
    stride: int | tuple[int, int] | None = None,
    steps: int | None = None,
    baseline: Baseline | None = None,
    world: World | None = None,
    batch_size: int | None = None,
    everywhere: bool,
) -> Explanation | None: ...
@explain_arguments
def explain(
    net: Network,
    images: Datastore | MinibatchQueue | Arrays | np.ndarray,
    *,
    method: MethodName = "grad-cam",
    target: Target = None,
    layer: str | None = None,
    window: int | tuple[int, int] | None = None,
    stride: int | tuple[int, int] | None = None,
    steps: int | None = None,
    baseline: Baseline | None = None,
    world: World | None = None,
    batch_size: int | None = None,
    everywhere: bool = True,
) -> Explanation | None:
    """Return maps of the pixels that the score of a class depends on. Collective.

    The network runs in prediction mode, and the result does not depend on the number of ranks or on
    the other images.

    Parameters
    ----------
    net : Network
        The network. Its outputs are scores of classes, also of each pixel, or numbers.
    images : Datastore, MinibatchQueue, (images, labels) or ndarray of shape (n, C, H, W)
        The images, as in `predict`.
    method : {"grad-cam", "occlusion", "gradient", "integrated-gradients"}
        "grad-cam" weights the channels of a layer by the gradient of the score. "occlusion" hides
        windows of the image and measures how much the score falls. "gradient" multiplies the
        gradient by the pixels. "integrated-gradients" averages the gradient between a baseline and
        the image.
    target : int, str or ndarray, optional
        The class to explain: "predicted", the default; "true", the label of each image; the index
        or the name of a class; or an index per image, (n,). For a regression network, the index of
        an output.
    layer : str, optional
        For "grad-cam", the layer whose output is weighted. The default is the last layer before the
        scores whose output has rows and columns.
    window, stride : int or (int, int), optional
        For "occlusion", size and step of the window in pixels, (down, across). The defaults are an
        eighth of the image, and half of the window.
    steps : int, optional
        For "integrated-gradients", the number of gradients per image, by default 50.
    baseline : float, sequence of float or ndarray, optional
        For "occlusion" and "integrated-gradients", the pixels of an image without information,
        after normalization: a number, one per channel, or an image (C, H, W). The default is 0.
    world : World, optional
        The ranks that share the images. The default is all ranks.
    batch_size : int, optional
        Number of images per mini-batch, over all ranks. The default is 32 per rank.
    everywhere : bool
        Whether all ranks get the result. If False, only rank 0 gets it.

    Returns
    -------
    Explanation or None
        None on ranks other than 0 if `everywhere` is False.

    Raises
    ------
    UserError
        If the network expects images of another shape, or an argument does not fit the network, the
        images or the method.
    """
    store = images_for(net, images)
    options: dict[str, Any] = {"layer": layer, "window": window, "stride": stride}
    options |= {"steps": steps, "baseline": baseline}
    explainer = Explainer(net, method_of(method, options), target_classes(net, store, target))
    world, is_own = evaluating_world(world, store)
    arrays = collect(
        explainer.net,
        store,
        explainer,
        entries=explainer.entries,
        world=world,
        batch_size=BATCH * world.size if batch_size is None else batch_size,
        everywhere=everywhere,
        exact=True,
    )
    if is_own:
        world.close()
    if arrays is None:
        return None
    entries, classes, scores, probabilities, predicted = arrays
    return Explanation(
        method,
        classes,
        scores,
        probabilities,
        predicted,
        maps_of(entries),
        entries if explainer.method.of_channels else None,
    )


def maps_of(entries: np.ndarray) -> np.ndarray:
    """Return maps (n, H, W): entries (n, H, W), or the sum of entries (n, C, H, W) over channels.

    Channels are added in order.
    """
    if entries.ndim == 3:
        return entries
    maps = entries[:, 0].copy()
    for channel in range(1, entries.shape[1]):
        maps += entries[:, channel]
    return maps


def target_classes(net: Network, images: Datastore, target: Target) -> np.ndarray | None:
    """Return the class to explain of each image, int64 (n,), or None for the predicted ones.

    Raises UserError if the network does not have a class, or if the images have no labels.
    """
    if target is None or (isinstance(target, str) and target == PREDICTED):
        if is_regression(net):
            raise UserError(
                f"target: expected the index of an output, from 0 to {count_classes(net) - 1}, of "
                "a network that was trained for regression, found none"
            )
        return None
    if isinstance(target, str) and target == TRUE:
        if images.labels is None or images.targets_shape is not None or is_regression(net):
            raise UserError(
                f"target true: expected images with a class label each, found none in "
                f"{images.describe()}"
            )
        return _checked(net, images.labels, len(images))
    if isinstance(target, str):
        target = _index_of(net, target)
    if isinstance(target, np.ndarray | list | tuple):
        return _checked(net, np.asarray(target), len(images))
    if isinstance(target, bool) or not isinstance(target, int | np.integer):
        raise UserError(f"target: expected a class or an index per image, got {target!r}")
    return _checked(net, np.full(len(images), int(target)), len(images))


def names_of_classes(net: Network) -> tuple[str, ...]:
    """Return the names of the classes; a class without a name is named by its index."""
    return class_names(losses.label_names(net), count_classes(net))


def _index_of(net, name):
    names = names_of_classes(net)
    if name not in names:
        raise UserError(
            f"target {name}: expected predicted, true or a class of the network"
            f"{did_you_mean(name, [PREDICTED, TRUE, *names])}"
        )
    return names.index(name)


def _checked(net, classes, count):
    last = count_classes(net) - 1
    if classes.shape != (count,) or classes.dtype.kind not in "iu":
        raise UserError(
            f"target: expected a whole number for each of {count} images, got {classes.dtype} of "
            f"shape {classes.shape}"
        )
    if count and not 0 <= classes.min() <= classes.max() <= last:
        raise UserError(
            f"target: expected classes from 0 to {last}, found {classes.min()} to {classes.max()}"
        )
    return classes.astype(np.int64)
