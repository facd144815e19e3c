"""What `--cache-mb` leaves for decoded images. It bounds all memory of a node for data, beyond the
mini-batch in use: mini-batches made ahead come first, and pixels that are being read."""

import collections

import numpy as np

from mpidl.blocks import LANES, blocks_of
from mpidl.data.loading.pipeline import span_of
from mpidl.evaluation import evaluate
from mpidl.fold import split_blocks
from mpidl.training import input_pipeline

MB = 10**6
COPIES = 2  # of pixels that a thread reads: as they come, and put together with those that are kept


def for_images(options, datastore, world):
    """Bytes of each node for a `NodeCache` of the training set, 0 or more.

    Validation between iterations reads ahead while training's mini-batches wait; at the end of an
    epoch none wait. Where `--cache-mb` does not hold what is made ahead, no image is kept, and as
    many are made ahead all the same: with fewer the step may wait for reading.
    """
    shape, staged = input_pipeline.image_shape(options, datastore.image_shape), 0
    if world.device is not None:
        from mpidl.backends.gpu.program import ROWS as staged  # in pinned memory, for the device
    taken = ahead(options, datastore, shape, options.batch_size, world, staged)
    store = options.validation
    if store is not None:
        found = ahead(options, store, shape, evaluate.BATCH, world)
        taken = taken + found if options.validation_frequency else max(taken, found)
    return max(0, options.cache_mb * MB - taken)


def ahead(options, datastore, shape, batch_size, world, staged=0):
    """Bytes that a `MinibatchQueue` takes beyond the mini-batch in use, on the node that holds most
    of one: mini-batches made ahead, `staged` more, and pixels that threads are reading.

    shape: (C, P, Q) of the images as the network gets them: float32, in blocks; on a GPU, which
    makes those, pixels wait as they were read.
    """
    count, workers = len(datastore), options.workers if options.prefetch else 1
    load = None if options.worker_load == "measured" else options.load(world.size)
    shares = split_blocks(blocks_of(min(batch_size, count)), world.size, load)
    batches = min(options.prefetch, max(0, -(-count // batch_size) - 1))
    pixel = datastore.dtype.itemsize
    raw = LANES * int(np.prod(datastore.image_shape)) * pixel
    value = 4 if world.device is None else pixel
    targets = 1 if datastore.targets_shape is None else int(np.prod(datastore.targets_shape))
    block = LANES * (value * int(np.prod(shape)) + 4 * targets)
    nodes = collections.Counter()
    for host, (first, last) in zip(world.hosts, shares, strict=True):
        blocks = last - first
        reading = min(max(1, batches) * blocks, workers * span_of(raw, blocks, workers))
        nodes[host] += (batches + staged) * blocks * block + COPIES * reading * raw
    return max(nodes.values())
