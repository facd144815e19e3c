"""What a trained network does on a data set: exact, and the same bytes on any number of ranks."""

from typing import NamedTuple

import numpy as np

from mpidl import ops
from mpidl.data import MinibatchQueue
from mpidl.errors import UserError


class Evaluation(NamedTuple):
    """Share of the images that were classified right, mean cross-entropy, number of images."""

    accuracy: float
    loss: float
    images: int


def agreed(batches, world, signals=None):
    """The same mini-batches, each once all ranks have theirs.

    What one rank alone can notice becomes common here: a UserError in reading is raised by all, and
    after a signal to any rank (`signals.name`) the mini-batches end on all, with `signals.agreed`
    set.
    """
    while True:
        problem = None
        try:
            item = next(batches, None)
        except UserError as error:
            item, problem = None, error
        wanted = signals is not None and signals.name is not None
        level = world.gop("max", 2 if problem else int(wanted))
        if level == 2:
            world.together(problem)
        if level == 1:
            signals.agreed = True
            batches.close()
            return
        if item is None:
            return
        yield item


def evaluate(net, datastore, *, world, batch_size=128, signals=None):
    """Evaluation of a classifier on labelled images, in prediction mode. Collective.

    signals: those that end it early, see `agreed`; it is then of the images so far.
    """
    if datastore.labels is None:
        raise UserError(f"{datastore.describe()}: the images have no labels to compare with")
    totals, n = np.zeros(2), 0
    queue = MinibatchQueue(datastore, batch_size, world=world, shuffle="never")
    net = net.on(world.device)
    for images, labels in agreed(queue.epoch(0), world, signals):
        scores = net(images)
        found = {
            "loss": ops.softmax_cross_entropy(scores, labels),
            "correct": ops.correct_count(scores, labels),
        }
        sums = world.gplus(found)
        totals += float(sums["loss"]) * images.batch.count, float(sums["correct"])
        n += images.batch.count
    accuracy, loss = totals[::-1] / max(n, 1)
    return Evaluation(float(accuracy), float(loss), n)


def predict(net, datastore, *, world, batch_size=128):
    """Generate (indices, scores) of each mini-batch on rank 0, in the datastore's order.

    indices: (n,); scores: (n, K) float32 of softmax. The other ranks get (None, None). Collective:
    every rank must take all of them.
    """
    queue = MinibatchQueue(datastore, batch_size, world=world, shuffle="never")
    net = net.on(world.device)
    for images, _ in agreed(queue.epoch(0), world):
        shares = world.gather((images.batch.indices, net.predict(images).local()))
        if shares is None:
            yield None, None
        else:
            yield tuple(np.concatenate(parts) for parts in zip(*shares, strict=True))
