"""Evaluate a trained network on a data set: accuracy, loss and regression errors.

Results are exact and do not depend on the number of ranks.
"""

import math
import numbers
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidl import losses
from mpidl.core.blocks import LANES, OneRank
from mpidl.core.fold import Counter, Partial, replicated
from mpidl.data import MinibatchQueue
from mpidl.data.agreement import agreed
from mpidl.data.array_datastore import Arrays, as_datastore
from mpidl.data.datastore import Datastore
from mpidl.data.loading.bad_images import BadImages
from mpidl.data.queue import QueueImages
from mpidl.errors import UserError
from mpidl.evaluation.class_metrics import ClassMetrics, Tally, predicted_classes, requested
from mpidl.evaluation.confusion import Confusion, tally
from mpidl.evaluation.mirrored import Flips, mirrored
from mpidl.nn import Network
from mpidl.nn.network_check import need_network
from mpidl.ops.label_checks import squeezed
from mpidl.ranks.failure import Signals
from mpidl.ranks.world import World
from mpidl.text import class_names

BATCH = 128  # images per mini-batch


class Evaluation(NamedTuple):
    """The result of `evaluate`.

    Attributes
    ----------
    accuracy : float or None
        Fraction of the labels that were predicted correctly. There is one label per image or per
        pixel. NaN if a score is NaN or if all labels are ignored; the top-k accuracy and the
        metrics are then NaN too. None if the loss does not count correct labels.
    loss : float
        Mean loss per image; NaN if all labels are ignored.
    images : int
        Number of evaluated images.
    top_k : float or None
        Fraction of the images whose class has one of the k largest scores; None if not requested.
    confusion : Confusion or None
        The confusion matrix; None if not requested.
    metrics : ClassMetrics or None
        The requested metrics; None if no metrics were requested.
    """

    accuracy: float | None
    loss: float
    images: int
    top_k: float | None = None
    confusion: Confusion | None = None
    metrics: ClassMetrics | None = None

    def __repr__(self) -> str:
        return _representation(self)


class RegressionErrors(NamedTuple):
    """The result of `regression_errors`.

    Attributes
    ----------
    rmse : float
        Square root of the mean squared error over all target elements.
    mae : float
        Mean absolute error over all target elements.
    images : int
        Number of evaluated images.
    """

    rmse: float
    mae: float
    images: int

    def __repr__(self) -> str:
        return _representation(self)


def _representation(record):
    """Format a named tuple with 6 digits per float, and without optional fields that are None."""
    fields = [
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value!r}"
        for name, value in record._asdict().items()
        if value is not None or name not in record._field_defaults
    ]
    return f"{type(record).__name__}({', '.join(fields)})"


def in_order(
    net: Network,
    datastore: Datastore,
    world: World,
    batch_size: int,
    signals: Signals | None = None,
    **options: Any,
) -> Generator[tuple, None, None]:
    """Yield all mini-batches in the datastore's order, with the network's input transform.

    All ranks stop at the same mini-batch; see `agreed`. `options` are passed to `MinibatchQueue`.
    Rank 0 warns if the images do not pass through the function with which the network was trained.
    """
    transform = net.input_transform()
    has_function = isinstance(datastore, QueueImages) and datastore.queue.function_name is not None
    if isinstance(datastore, QueueImages):
        transform, datastore = datastore.options(transform), datastore.parent
    if net.input_function is not None and not has_function and world.rank == 0:
        name = net.input_function
        warnings.warn(
            f"the network was trained with function={name} of a MinibatchQueue, which is not "
            f"applied to these images: pass dl.MinibatchQueue(images, function={name}) instead of "
            "the images, or set net.input_function = None if the function is for training only",
            stacklevel=1,  # one place, so that Python shows the warning once
        )
    options |= {"shuffle": "never", **transform}
    queue = MinibatchQueue(datastore, batch_size, world=world, **options)
    return agreed(queue.epoch(0), world, signals)


def evaluated_images(images: Any) -> Datastore:
    """Return the datastore to evaluate: a datastore, a queue's images, or (images, labels)."""
    if isinstance(images, MinibatchQueue):
        return QueueImages(images)
    return as_datastore(images, "images")


def evaluating_world(world: World | None, datastore: Datastore) -> tuple[World, bool]:
    """Return the ranks that share the images, and whether the caller must close this world.

    By default, they are the ranks of the queue, if the images are those of a queue that has ranks,
    or all ranks.
    """
    if world is None and isinstance(datastore, QueueImages):
        ranks = datastore.queue.world
        world = None if isinstance(ranks, OneRank) else ranks
    return (World(), True) if world is None else (world, False)


def evaluate(
    net: Network,
    datastore: Datastore | MinibatchQueue | Arrays,
    *,
    world: World | None = None,
    batch_size: int = BATCH,
    prefetch: int = 2,
    signals: Signals | None = None,
    top_k: int | None = None,
    confusion: bool = False,
    metrics: str | Sequence[str] = (),
    loss: str | Callable[..., Any] = "crossentropy",
    progress: Callable[[int], object] | None = None,
    bad_images: BadImages | None = None,
    test_flips: Flips = "none",
) -> Evaluation:
    """Evaluate a network on a data set, in prediction mode.

    The function is collective.

    Parameters
    ----------
    net : Network
        The network.
    datastore : Datastore, MinibatchQueue or (images, labels)
        Images with labels, or with targets that the loss compares with the outputs. For a queue,
        its images in the order of its datastore, with its function, but without its augmenter. A
        tuple of arrays must be the same on every rank; see `ArrayDatastore`.
    world : World, optional
        The ranks that share the images. The default is the world of the queue, or all ranks.
    batch_size : int
        Images per mini-batch.
    prefetch : int
        Number of mini-batches to prepare ahead; see `MinibatchQueue`.
    signals : Signals, optional
        Signals that end the evaluation early; see `agreed`. The result then covers only the images
        evaluated before the signal.
    top_k : int, optional
        If given, also compute the fraction of images whose class has one of the `top_k` largest
        scores. The value must be from 1 to the number of classes.
    confusion : bool
        Whether to compute the confusion matrix, in the same pass.
    metrics : str or sequence of str
        Names of metrics to compute in the same pass, such as "f1" or ["f1", "roc-auc"], or "all".
    loss : str or function
        Name of the loss, or a function, as in `TrainingOptions`.
    progress : function, optional
        Function to call after each mini-batch, with the number of images evaluated so far.
    bad_images : BadImages, optional
        Receives the images that cannot be read. The result then excludes these images. By default,
        an image that cannot be read raises an error.
    test_flips : {"none", "x", "y", "xy"}
        Average the scores over mirror images: left to right, top to bottom, or both ways.

    Returns
    -------
    Evaluation

    Raises
    ------
    UserError
        If there are no images, if the images lack the labels or targets that the loss needs, if a
        label is not less than the number of outputs, or if the class names of the dataset differ
        from ``net.classes``.
    """
    datastore = evaluated_images(datastore)
    losses.check(loss, net, datastore)
    losses.check_names(net.classes, loss, net, datastore, "the network")
    _check_count(datastore)
    classes = _classes(net, loss, top_k, confusion)
    names = requested(metrics, loss, net)
    world, is_own = evaluating_world(world, datastore)
    totals = _Totals(losses.labels_per_image(net, datastore))
    label_range = losses.label_range(loss, net)
    counts = Tally(names, loss, net, datastore) if names else None
    ranking = _Ranking(classes, top_k, confusion, label_range) if top_k or confusion else None
    queue = {"prefetch": prefetch, "bad_images": bad_images, **label_range}
    batches = in_order(net, datastore, world, batch_size, signals, **queue)
    net, function = mirrored(net.on(world.device), test_flips), losses.loss_function(loss)
    named_loss = losses.label_loss(loss)
    for images, labels in batches:
        if named_loss is not None and (ranking or counts):
            scores = named_loss.scores(net, images)
            terms = named_loss.of_scores(scores, labels)
        else:
            terms = function(net, images, labels)
        totals.add(terms, images.batch.count, world)
        if progress is not None:
            progress(totals.images)
        if counts is not None:
            counts.add(scores, labels)
        if ranking is not None:
            ranking.add(scores, labels)
        del images, labels  # free their memory for the next mini-batch
    is_defined = totals.accuracy is None or not math.isnan(totals.accuracy)
    result = Evaluation(accuracy=totals.accuracy, loss=totals.loss, images=totals.images)
    if top_k and ranking is not None:
        hits = world.gop("sum", ranking.hits)
        result = result._replace(top_k=hits / totals.labels if is_defined else math.nan)
    if ranking is not None and ranking.table is not None:
        class_list = class_names(net.classes or datastore.classes, classes)
        table = Confusion(world.gop("sum", ranking.table), class_list, is_complete=is_defined)
        result = result._replace(confusion=table)
    if counts is not None:
        result = result._replace(metrics=counts.metrics(world, is_defined))
    if is_own:
        world.close()
    return result


class _Totals:
    """Sums over the mini-batches of an evaluation."""

    def __init__(self, labels_per_image):
        self.labels_per_image = labels_per_image
        self.weighted_loss = self.weight = self.labels = 0.0
        self.correct: float | None = 0.0
        self.images = 0

    def add(self, terms, images, world):
        """Add the terms (`losses.base.Sums`) of a mini-batch of `images` images. Collective."""
        # A term that is not a sum over images is equal on all ranks and is added only once.
        addends = {i: v if isinstance(v, Partial) else replicated(v) for i, v in enumerate(terms)}
        sums = [float(value) for value in world.gplus(addends).values()]
        self.images += images
        labels = sums[2] if len(sums) > 2 else images * self.labels_per_image
        weight = sums[3] if len(sums) > 3 else images
        self.weighted_loss += sums[0] * weight
        self.weight, self.labels = self.weight + weight, self.labels + labels
        self.correct = None if len(sums) == 1 else (self.correct or 0.0) + sums[1]

    @property
    def loss(self):
        return self.weighted_loss / self.weight if self.weight else math.nan

    @property
    def accuracy(self):
        if self.correct is None:
            return None
        return self.correct / self.labels if self.labels else math.nan


class _Ranking:
    """This rank's confusion matrix and top-k hits: integers, whose sums do not depend on order."""

    def __init__(self, classes, top_k, confusion, label_range):
        self.top_k, self.label_range, self.hits = top_k, label_range, 0
        self.table = np.zeros((classes, classes), np.int64) if confusion else None

    def add(self, scores, labels):
        """Count the images of a mini-batch."""
        scores, labels = _counted(scores.local(), labels.local(), **self.label_range)
        if self.table is not None:
            tally(self.table, labels, predicted_classes(scores))
        if self.top_k:
            self.hits += int((places(scores, labels) < self.top_k).sum())


def _counted(scores, labels, classes, ignore_label):
    """Drop ignored labels. If there are any, return scores (n, K) and labels (n,)."""
    if ignore_label is None or not (labels == ignore_label).any():
        return scores, labels
    is_counted = labels.reshape(len(labels), *scores.shape[2:]) != ignore_label
    return np.moveaxis(scores, 1, -1)[is_counted], labels.reshape(is_counted.shape)[is_counted]


def _check_count(datastore):
    if not len(datastore):
        raise UserError(f"{datastore.describe()}: expected images, found none")


def _classes(net, loss, top_k, confusion):
    """Check top_k and confusion; return the number of classes, or None if neither is requested."""
    if not confusion and top_k is None:
        return None
    request = "confusion" if confusion else "top_k"
    if not losses.has_class_scores(loss):
        raise UserError(f"{request}: expected loss crossentropy, whose outputs are class scores")
    classes = max(net.output_shape[0], 2)  # one output: 2 classes
    is_integer = isinstance(top_k, numbers.Integral) and not isinstance(top_k, bool)
    if top_k is not None and not (is_integer and 1 <= top_k <= classes):
        raise UserError(
            f"top_k must be a whole number from 1 to {classes}, the number of classes, got {top_k}"
        )
    if top_k is not None and len(net.output_shape) > 1:
        raise UserError(
            f"top_k: expected a network with outputs (K,), found outputs of shape "
            f"{net.output_shape}"
        )
    return classes


def places(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the position of each label's class when the scores (n, K) are sorted in descending
    order. Among equal scores, the lower class comes first. The position is K if the label's score
    is NaN.
    """
    label_scores = np.take_along_axis(scores, labels[:, None], axis=1)
    earlier = np.arange(scores.shape[1]) < labels[:, None]
    ahead_of_label = (scores > label_scores) | ((scores == label_scores) & earlier)
    return np.where(np.isnan(label_scores[:, 0]), scores.shape[1], ahead_of_label.sum(axis=1))


def regression_errors(
    net: Network,
    datastore: Datastore | MinibatchQueue | Arrays,
    *,
    world: World | None = None,
    batch_size: int = BATCH,
    bad_images: BadImages | None = None,
    test_flips: Flips = "none",
) -> RegressionErrors:
    """Compare a network's outputs with targets, in prediction mode.

    The function is collective.

    Parameters
    ----------
    net : Network
        The network.
    datastore : Datastore, MinibatchQueue or (images, targets)
        Images with targets, such as images or scalars. The targets must have the shape of the
        network's outputs, except for axes of length 1.
    world : World, optional
        The ranks that share the images. The default is all ranks.
    batch_size : int
        Images per mini-batch.
    bad_images : BadImages, optional
        See `evaluate`.
    test_flips : {"none", "x", "y", "xy"}
        See `evaluate`.

    Returns
    -------
    RegressionErrors

    Raises
    ------
    UserError
        If the images have no targets, if the shapes of the targets and the outputs differ, or if
        there are no images.
    """
    need_network(net)
    datastore = evaluated_images(datastore)
    if datastore.targets_shape is None:
        raise UserError(f"{datastore.describe()}: the images have no targets to compare with")
    shape = losses.targets_shape(net, datastore) or ()
    if squeezed(shape) != squeezed(net.output_shape):
        raise UserError(
            f"{datastore.describe()}: expected targets of shape {net.output_shape}, like the "
            f"network's outputs, found {shape}"
        )
    _check_count(datastore)
    world, is_own = evaluating_world(world, datastore)
    totals, n = np.zeros(2), 0
    batches = in_order(net, datastore, world, batch_size, bad_images=bad_images)
    net = mirrored(net.on(world.device), test_flips)
    for images, targets in batches:
        totals += world.gplus(_errors(net(images), targets))
        n += images.batch.count
        del images, targets  # free their memory for the next mini-batch
    if is_own:
        world.close()
    elements = n * int(np.prod(net.output_shape))
    squared, absolute = totals / elements if elements else (math.nan, math.nan)
    return RegressionErrors(float(np.sqrt(squared)), float(absolute), n)


def _errors(outputs, targets):
    """Return [sum of squared errors, sum of absolute errors] as a float64 Partial of shape (2,)."""
    counter, errors = Counter(outputs.batch.tree), outputs.local().astype(np.float64)
    errors -= targets.local().reshape(errors.shape)
    for b in range(outputs.batch.blocks):
        block = errors[b * LANES : (b + 1) * LANES].ravel()
        counter.push(np.array([np.square(block).sum(), np.abs(block).sum()]))
    return counter.partial((2,), np.float64)
