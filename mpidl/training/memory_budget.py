"""Memory that `--cache-mb` leaves for decoded images.

The option bounds a node's memory for data, beyond the mini-batch in use. Mini-batches made ahead
and pixels being read take their part first.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidl.blocks import LANES, blocks_of
from mpidl.data.datastore import Datastore
from mpidl.data.loading.pipeline import blocks_per_task
from mpidl.evaluation import evaluate
from mpidl.fold import split_blocks
from mpidl.training import input_pipeline
from mpidl.training.options.training_options import TrainingOptions

MB = 10**6
COPIES = 2  # of pixels that a thread reads: as read, and merged with cached ones


def for_images(options: TrainingOptions, datastore: Datastore, world: Any) -> int:
    """Return the bytes per node for a `NodeCache` of the training set, 0 or more.

    Notes
    -----
    Validation between iterations reads ahead while training's mini-batches wait; at the end of an
    epoch none wait. If `--cache-mb` is too small for the mini-batches made ahead, no image is
    cached. Their number stays the same: with fewer, the step might wait for reading.
    """
    shape, staged = input_pipeline.image_shape(options, datastore.image_shape), 0
    if world.device is not None:
        # Loaded late: only ranks with a GPU import its backend.
        from mpidl.backends.gpu.program import ROWS as staged  # in pinned memory, for the device
    reserved = queue_bytes(options, datastore, shape, options.batch_size, world, staged)
    store = options.validation
    if store is not None:
        validation = queue_bytes(options, store, shape, evaluate.BATCH, world)
        concurrent = bool(options.validation_frequency)
        reserved = reserved + validation if concurrent else max(reserved, validation)
    return max(0, options.cache_mb * MB - reserved)


def queue_bytes(
    options: TrainingOptions,
    datastore: Datastore,
    shape: Sequence[int],
    batch_size: int,
    world: Any,
    staged: int = 0,
) -> int:
    """Return the bytes that a `MinibatchQueue` takes beyond the mini-batch in use.

    This counts mini-batches made ahead and pixels that threads are reading, on the node that holds
    most of a mini-batch.

    Parameters
    ----------
    shape : tuple of int
        (C, P, Q) of the network's images. They wait as float32 blocks; on a GPU, which makes the
        blocks, they wait as read.
    batch_size : int
        Images per mini-batch over all ranks.
    staged : int
        Further mini-batches in memory.
    """
    count, workers = len(datastore), options.workers if options.prefetch else 1
    load = None if options.worker_load == "measured" else options.load(world.size)
    shares = split_blocks(blocks_of(min(batch_size, count)), world.size, load)
    batches = min(options.prefetch, max(0, -(-count // batch_size) - 1))
    itemsize = datastore.dtype.itemsize
    raw_block = LANES * int(np.prod(datastore.image_shape)) * itemsize
    value_size = 4 if world.device is None else itemsize
    targets = 1 if datastore.targets_shape is None else int(np.prod(datastore.targets_shape))
    block = LANES * (value_size * int(np.prod(shape)) + 4 * targets)
    nodes: collections.Counter = collections.Counter()
    for host, (first, stop) in zip(world.hosts, shares, strict=True):
        blocks = stop - first
        read_ahead = max(1, batches) * blocks
        reading = min(read_ahead, workers * blocks_per_task(raw_block, blocks, workers))
        nodes[host] += (batches + staged) * blocks * block + COPIES * reading * raw_block
    return max(nodes.values())
