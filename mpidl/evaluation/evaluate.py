"""How well a trained network does on a data set: exact, and the same on any number of ranks."""

import numbers
from typing import NamedTuple

import numpy as np

from mpidl import losses
from mpidl.blocks import LANES
from mpidl.comm import World
from mpidl.data import MinibatchQueue
from mpidl.data.datastore import need_datastore
from mpidl.errors import UserError
from mpidl.evaluation.confusion import Confusion, tally
from mpidl.fold import Counter, Partial, replicated
from mpidl.ops.loss import squeezed
from mpidl.text import class_names

BATCH = 128  # images in a mini-batch


class Evaluation(NamedTuple):
    """Share of the images that were classified right, mean loss, number of images.

    accuracy: of labels a pixel the share of pixels; None of a loss that classifies nothing. Where
    they were asked for: top_k, the share of the images whose class is among the k largest scores;
    confusion, a `Confusion`.
    """

    accuracy: float | None
    loss: float
    images: int
    top_k: float | None = None
    confusion: Confusion | None = None


class RegressionErrors(NamedTuple):
    """Over all elements of all targets: root of the mean squared error, mean absolute error; and
    the number of images."""

    rmse: float
    mae: float
    images: int


def agreed(batches, world, signals=None):
    """The same mini-batches, each once all ranks have theirs.

    What one rank alone can notice becomes common here: a UserError in reading is raised by all, and
    after a signal to any rank (`signals.name`) the mini-batches end on all, with `signals.agreed`
    set.
    """
    while True:
        found, problem = [None], None
        try:
            found = [next(batches, None)]
        except UserError as error:
            problem = error
        wanted = signals is not None and signals.name is not None
        level = world.gop("max", 2 if problem else int(wanted))
        if level == 2:
            world.raise_if_any(problem)
        if level == 1:
            signals.agreed = True
            batches.close()
            return
        if found[0] is None:
            return
        yield found.pop()  # not kept here: the next one may take its memory


def evaluate(
    net,
    datastore,
    *,
    world=None,
    batch_size=BATCH,
    prefetch=2,
    signals=None,
    top_k=None,
    confusion=False,
    loss="crossentropy",
):
    """Evaluation of a network on labelled images, in prediction mode. Collective.

    loss: as of `TrainingOptions`; another than cross-entropy goes by the images' targets. world:
    all ranks by default. prefetch: see `MinibatchQueue`. top_k: a number k of 1 to the number of
    classes, and confusion: whether to count which class was taken for which; both in the same pass.
    signals: those that end it early, see `agreed`; it is then of the images so far. Raises
    UserError where there are no labels, labels beyond the network's outputs, or labels of other
    classes than `net.classes`.
    """
    losses.check(loss, net, datastore)
    losses.check_names(net.classes, loss, net, datastore, "the network")
    classes = _classes(net, loss, top_k, confusion)
    world = World() if world is None else world
    totals, n, among = [0.0, 0.0], 0, 0
    table = np.zeros((classes, classes), np.int64) if confusion else None
    how = {"shuffle": "never", "prefetch": prefetch, **net.input_transform()}
    how["classes"] = losses.label_limit(loss, net)
    queue = MinibatchQueue(datastore, batch_size, world=world, **how)
    net, function = net.on(world.device), losses.loss_function(loss)
    for images, labels in agreed(queue.epoch(0), world, signals):
        if top_k or confusion:
            scores = net.logits(images)
            found = losses.cross_entropy_of(scores, labels)
        else:
            found = function(net, images, labels)
        # a number that is no sum over images is there already: it counts once
        found = {i: v if isinstance(v, Partial) else replicated(v) for i, v in enumerate(found)}
        sums = [float(value) for value in world.gplus(found).values()]
        totals[0] += sums[0] * images.batch.count
        totals[1] = None if len(sums) == 1 else totals[1] + sums[1]
        n += images.batch.count
        if top_k or confusion:  # whole numbers, whose sum is the same in any order
            mine, known = scores.local(), labels.local()
            if confusion:
                tally(table, known, mine.argmax(axis=1))
            if top_k:
                among += int((places(mine, known) < top_k).sum())
        del images, labels  # see `agreed`
    right = totals[1]
    return Evaluation(
        None if right is None else right / max(n * losses.labels_per_image(datastore), 1),
        totals[0] / max(n, 1),
        n,
        world.gop("sum", among) / max(n, 1) if top_k else None,
        Confusion(world.gop("sum", table), class_names(net.classes or datastore.classes, classes))
        if confusion
        else None,
    )


def _classes(net, loss, top_k, confusion):
    """How many classes top_k and confusion are of; UserError where the question has no answer."""
    if not confusion and top_k is None:
        return None
    asked = "confusion" if confusion else "top_k"
    if loss != "crossentropy":
        raise UserError(f"{asked}: expected loss crossentropy, whose outputs are scores of classes")
    classes = net.output_shape[0]
    whole = isinstance(top_k, numbers.Integral) and not isinstance(top_k, bool)
    if top_k is not None and not (whole and 1 <= top_k <= classes):
        raise UserError(
            f"top_k must be a whole number from 1 to {classes}, the number of classes, got {top_k}"
        )
    if top_k is not None and len(net.output_shape) > 1:
        raise UserError(
            f"top_k: expected a network with outputs (K,), found outputs of shape "
            f"{net.output_shape}"
        )
    return classes


def places(scores, labels):
    """(n,): how many classes come before the label's when scores (n, K) are sorted, the largest
    first and of equal ones the first class; K where the label's score is NaN."""
    own = np.take_along_axis(scores, labels[:, None], axis=1)
    earlier = np.arange(scores.shape[1]) < labels[:, None]
    before = (scores > own) | ((scores == own) & earlier)
    return np.where(np.isnan(own[:, 0]), scores.shape[1], before.sum(axis=1))


def regression_errors(net, datastore, *, world=None, batch_size=128):
    """RegressionErrors of the network's outputs against a datastore's targets, images or numbers.

    In prediction mode. world: all ranks by default. Collective. Raises UserError where there are no
    targets, or of another size than the outputs.
    """
    losses.need_network(net)
    need_datastore(datastore, "images")
    if datastore.targets_shape is None:
        raise UserError(f"{datastore.describe()}: the images have no targets to compare with")
    if squeezed(datastore.targets_shape) != squeezed(net.output_shape):
        raise UserError(
            f"{datastore.describe()}: expected targets of shape {net.output_shape}, as the "
            f"network's outputs, found {datastore.targets_shape}"
        )
    world = World() if world is None else world
    totals, n = np.zeros(2), 0
    queue = MinibatchQueue(
        datastore, batch_size, world=world, shuffle="never", **net.input_transform()
    )
    net = net.on(world.device)
    for images, targets in agreed(queue.epoch(0), world):
        totals += world.gplus(_errors(net(images), targets))
        n += images.batch.count
    elements = max(n * int(np.prod(net.output_shape)), 1)
    squared, absolute = totals / elements
    return RegressionErrors(float(np.sqrt(squared)), float(absolute), n)


def _errors(found, targets):
    """A Partial: the sums of squared and of absolute errors over all elements, (2,) float64."""
    counter, errors = Counter(found.batch.tree), found.local().astype(np.float64)
    errors -= targets.local().reshape(errors.shape)
    for b in range(found.batch.blocks):
        block = errors[b * LANES : (b + 1) * LANES].ravel()
        counter.push(np.array([np.square(block).sum(), np.abs(block).sum()]))
    return counter.partial((2,), np.float64)
