"""What a network gives for images: scores, labels, what a layer computes.

Exact, and the same bytes on any number of ranks: each image is computed once, in its block, and no
image is there twice to fill a share.
"""

import numpy as np

from mpidl import losses, ops
from mpidl.comm import World
from mpidl.data import ArrayDatastore, MinibatchQueue
from mpidl.data.datastore import Datastore
from mpidl.errors import UserError
from mpidl.evaluation.evaluate import agreed


def predict(net, images, *, world=None, batch_size=128, softmax=None, everywhere=True):
    """The network's output for each image, in prediction mode: (n, *output shape) float32.

    images: a datastore, or an array (n, C, H, W) that every rank has (uint8 pixels are divided by
    255, floats taken as they are). world: all ranks by default, among which the images are shared
    out. softmax: whether the outputs go through it, so that they are class scores (of each pixel
    where they are (K, H, W)), unless the network ends in Softmax; None: where they are (K,) and the
    images have no targets. everywhere: every rank gets the result; False: rank 0, and the others
    None.

    Collective. Raises UserError where the images are of another shape than the network's.
    """
    images = as_datastore(net, images)
    if softmax is None:
        softmax = len(net.output_shape) == 1 and images.targets_shape is None
    given = scores if softmax else outputs
    return _collected(
        net, images, given, net.output_shape, np.float32, world, batch_size, everywhere
    )


def classify(net, images, *, world=None, batch_size=128, everywhere=True):
    """The class of each image, the number of its largest output, of equal ones the first: (n,)
    int64; of a network whose outputs are (K, ...), (n, ...). Arguments as of `predict`. Raises
    UserError of a network that was trained to give numbers."""
    losses.need_network(net)
    if net.classes == ():
        raise UserError(
            "classify: expected a network whose outputs are scores of classes, found one that was "
            "trained to give numbers (its `classes` are ()); dl.predict gives these"
        )
    images, how = as_datastore(net, images), (np.int64, world, batch_size, everywhere)
    return _collected(net, images, labels, net.output_shape[1:], *how)


def activations(net, images, layer, *, world=None, batch_size=128, everywhere=True):
    """What the layer of a name gives for each image, in prediction mode: (n, *its output shape)
    float32. Arguments as of `predict`; only the layers that it depends on are computed. KeyError
    for an unknown name."""
    part, images = net.up_to(layer), as_datastore(net, images)
    how = np.float32, world, batch_size, everywhere
    return _collected(part, images, outputs, part.output_shape, *how)


def scores(net, images):
    """This share's class scores (n, K)."""
    return ops.softmax(net.logits(images)).local()


def outputs(net, images):
    """This share's outputs, (n, *output shape)."""
    return net(images).local()


def labels(net, images):
    """This share's classes, (n, ...) int64."""
    return net.logits(images).local().argmax(axis=1)


def scores_and_labels(net, images):
    """This share's class scores, the outputs they come from, and the classes: where two scores are
    equal for want of digits, the outputs may not be."""
    found = net.logits(images)
    ranked = found.local()
    return ops.softmax(found).local(), ranked, ranked.argmax(axis=1)


def by_batch(net, datastore, function, *, world, batch_size=128):
    """Generate (indices, result) of each mini-batch on rank 0, in the datastore's order.

    function(net, images) gives an array, or a tuple of arrays, with an entry for each image of the
    share. The other ranks get (None, None). Collective: every rank must take all of them.
    """
    queue = MinibatchQueue(
        datastore, batch_size, world=world, shuffle="never", **net.input_transform()
    )
    net = net.on(world.device)
    for images, _ in agreed(queue.epoch(0), world):
        shares = world.gather((images.batch.indices, function(net, images)))
        if shares is None:
            yield None, None
            continue
        indices, results = zip(*shares, strict=True)
        if isinstance(results[0], tuple):
            joined = tuple(np.concatenate(parts) for parts in zip(*results, strict=True))
        else:
            joined = np.concatenate(results)
        yield np.concatenate(indices), joined


def as_datastore(net, images):
    """Images as a datastore that the network can take; UserError where their shape is another."""
    losses.need_network(net)
    if not isinstance(images, Datastore):
        images = np.asarray(images)
        images = ArrayDatastore(images[None] if images.shape == net.input_shape else images)
    if not net.takes(images.image_shape):
        raise UserError(
            f"{images.describe()}: expected images of shape {net.input_shape}, which the network "
            f"takes, found {images.image_shape}"
        )
    return images


def _collected(net, datastore, function, shape, dtype, world, batch_size, everywhere):
    """All results of a function in one array."""
    world = World() if world is None else world
    keeps = everywhere or world.rank == 0
    found = np.empty((len(datastore), *shape), dtype) if keeps else None
    for batch in by_batch(net, datastore, function, world=world, batch_size=batch_size):
        indices, values = world.broadcast(batch) if everywhere else batch
        if keeps:
            found[indices] = values
    return found
