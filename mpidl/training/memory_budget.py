"""Compute how much of the memory limit `--cache-mb` is left for caching decoded images.

The option limits the memory that each node uses for data, not counting the current mini-batch.
Memory for prefetched mini-batches and for pixels that are being read is reserved first. The cache
gets the rest.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.core.blocks import LANES, blocks_of
from mpidl.core.fold import split_blocks
from mpidl.data.loading.pipeline import blocks_per_task
from mpidl.training import input_pipeline

if TYPE_CHECKING:
    from mpidl.data.datastore import Datastore
    from mpidl.training.options.training_options import TrainingOptions

MB = 10**6
COPIES = 2  # each thread holds its pixels twice: as read, and merged with cached images


def for_images(options: TrainingOptions, datastore: Datastore, world: Any) -> int:
    """Return the memory in bytes per node, at least 0, for a `NodeCache` of the training set.

    Notes
    -----
    When validation runs between iterations, the prefetched training mini-batches stay in memory,
    so memory is reserved for both the training queue and the validation queue. If validation runs
    only at the end of an epoch, the training queue is empty then, so only the larger of the two
    amounts is reserved. If `--cache-mb` is too small for the prefetched mini-batches, no image is
    cached. The number of prefetched mini-batches is not reduced, because training steps might then
    have to wait for images.
    """
    shape, staged = input_pipeline.image_shape(options, datastore.image_shape), 0
    if world.device is not None:
        # Only ranks with a GPU import its backend.
        from mpidl.backends.gpu.program import ROWS as staged  # mini-batches in pinned memory
    reserved = queue_bytes(options, datastore, shape, options.batch_size, world, staged)
    store = options.validation
    if store is not None:
        from mpidl.evaluation.evaluate import BATCH

        validation = queue_bytes(options, store, shape, BATCH, world)
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
    """Return how many bytes a `MinibatchQueue` needs per node besides the current mini-batch.

    The result includes prefetched mini-batches and pixels that threads are reading. If the nodes
    need different amounts, the result is the largest amount.

    Parameters
    ----------
    options : TrainingOptions
        The options of the run.
    datastore : Datastore
        The images that the queue delivers.
    shape : tuple of int
        (C, P, Q) of the network's images. The queue stores them as float32 blocks or, for a GPU,
        in the type of the datastore.
    batch_size : int
        Number of images per mini-batch, summed over all ranks.
    world : World
        The ranks.
    staged : int
        Number of mini-batches held in memory in addition to the prefetched mini-batches.
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
