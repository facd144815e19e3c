"""Measure in about a minute what the prediction of `performance.model` needs.

Every rank trains alone, at the same time as the other ranks of its node, so that the ranks compete
for cores and memory as in a real run. The training is that of `dl.train`, with mini-batches of
different numbers of blocks. Then the ranks measure their network together.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.blocks import LANES, blocks_of
from mpidl.comm.reducer import BUCKET_BYTES
from mpidl.comm.thread_budget import SHARED_CORES
from mpidl.data import MinibatchQueue, NodeCache
from mpidl.errors import UserError
from mpidl.performance import links
from mpidl.performance.trace import BUCKET, StepClock, TracingWorld
from mpidl.training import input_pipeline, memory_budget, trainer

if TYPE_CHECKING:
    from mpidl.comm import World
    from mpidl.data.datastore import Datastore
    from mpidl.nn import Network
    from mpidl.training.options.training_options import TrainingOptions

SECONDS = 60.0
ROUNDS = 5
MOST_RANKS = 1024  # of the table of the slowest of N ranks
LEARNING_RATE = 1e-4  # small, so that the weights stay finite at any batch size
SUBSET = 2048  # images of a set on disk that the probe reads
SLEEP_SECONDS = 0.005  # between two tests whether the other ranks have ended a turn
READING_SECONDS = 1.0  # of the measurement of reading without training


def measure(
    job: World,
    net: Network,
    train_set: Datastore,
    options: TrainingOptions,
    seconds: float = SECONDS,
    rounds: int = ROUNDS,
) -> dict[str, Any] | None:
    """Measure training steps, input and network. Collective.

    Parameters
    ----------
    job : World
        All ranks of the probe. They fill their nodes as the ranks of a training would.
    net : Network
        The network, whose weights the probe changes.
    train_set : Datastore
        The training images.
    options : TrainingOptions
        The options of the training. `threads` is the number of threads of a rank.
    seconds : float
        Approximate duration of the probe.
    rounds : int
        Number of repetitions, from which the error of the prediction is estimated.

    Returns
    -------
    dict or None
        The record that `model.Model` reads, on rank 0; None on the other ranks.

    Raises
    ------
    UserError
        If the ranks compute on GPUs, or if there is only one rank.
    """
    if job.device is not None:
        raise UserError(
            "--predict: expected ranks on CPUs (--device cpu), found GPUs; to measure GPUs, run "
            "the study without --predict"
        )
    if job.size == 1:
        raise UserError(
            "--predict: expected at least 2 ranks, between which the network is measured, found 1; "
            "fewer --threads, or --probe-ranks 2"
        )
    lines = job.use_threads(max(options.threads, 1))
    leaves = blocks_of(options.batch_size)
    store, capacity = _images(job, train_set, options)
    input_pipeline.prepare(net, store, options, job)
    reading = _reading_seconds(job, net, store, options)
    sizes = block_counts(min(leaves, blocks_of(len(store))), max(job.threads))
    levels = active_counts(max(job.hosts.count(host) for host in job.hosts))
    turn = max(0.7 * seconds, 1.0) / (rounds * len(sizes) * len(levels))
    steps, events = [], None
    solo = TracingWorld(job.transport.MPI.COMM_SELF)
    solo.threads = [job.threads[job.rank]]
    for number in range(rounds):
        for active, blocks in _in_turns(levels, sizes, number):
            times = None
            if job.hosts[: job.rank].count(job.host) < active:
                times = _turn(solo, net, store, options, blocks, turn, seed=options.seed + job.rank)
            _meet(job)
            record = _gathered(job, times)
            if record is not None:
                record |= {"round": number, "active": active, "blocks": blocks}
                steps.append(record)
            if events is None and times is not None:
                events = times.events
    events = job.broadcast(events)
    network = _network(job, events, max(leaves, job.size), 0.3 * seconds / rounds, rounds)
    if job.rank:
        return None
    return {
        "ranks": job.size,
        "hosts": len(set(job.hosts)),
        "ranks_per_host": max(levels),
        "threads": max(job.threads),
        "is_oversubscribed": any(SHARED_CORES in line for line in lines),
        "images": len(train_set),
        "batch_size": options.batch_size,
        "batch_per_rank": options.batch_per_rank,
        "batchnorm": options.batchnorm,
        "workers": options.workers,
        "cached_images": capacity,
        "copy_seconds_per_byte": _copy_seconds(),
        "reading_seconds_per_block": reading,
        "rounds": rounds,
        "events": [list(event) for event in events],
        "steps": steps,
        "network": network,
    }


def block_counts(leaves: int, threads: int) -> list[int]:
    """Return the numbers of blocks for which a step is timed: 1, T, 2T, 4T, 8T and no more."""
    counts = {1, *(threads * factor for factor in (1, 2, 4, 8))}
    return sorted({count for count in counts if count <= leaves} | {min(leaves, 8 * threads)})


def active_counts(ranks: int) -> list[int]:
    """Return the numbers of ranks per node that compute at the same time: 1, 2, 4, ..., all."""
    return sorted({1, ranks, *(1 << k for k in range(ranks.bit_length()) if 1 << k <= ranks)})


def _in_turns(levels, sizes, number):
    """Return the (active ranks, blocks) of a round; every other round reverses the order."""
    turns = [(active, blocks) for active in levels for blocks in sizes]
    return turns if number % 2 == 0 else turns[::-1]


def _images(job, train_set, options):
    """Return the images that the probe reads, and how many images of the run fit into the cache."""
    if train_set.in_memory:
        return train_set, len(train_set)
    budget = memory_budget.for_images(options, train_set, job)
    image_bytes = int(np.prod(train_set.image_shape)) * train_set.dtype.itemsize
    capacity = min(len(train_set), budget // max(image_bytes, 1))
    count = min(len(train_set), max(SUBSET, 4 * options.batch_size))
    subset = train_set.subset(np.arange(count) * len(train_set) // count)
    is_cached = capacity == len(train_set)  # else a real run reads images again in every epoch
    return NodeCache(subset, job, budget if is_cached else 0), capacity


def _reading_seconds(job, net, store, options):
    """Return the seconds per block in which a rank reads images while it does nothing else.

    The ranks of a node first fill the cache together.
    """
    keywords = {"augmenter": input_pipeline.augmenter_of(options), "workers": options.workers}
    keywords |= {"normalization": net.normalization, "prefetch": max(options.prefetch, 1)}
    size = min(options.batch_size, 8 * LANES * job.size)
    for _ in MinibatchQueue(store, size, options.seed, job, **keywords).epoch(1):
        pass
    job.barrier()
    size = min(options.batch_size, 8 * LANES)
    queue = MinibatchQueue(store, size, options.seed + job.rank, **keywords)
    blocks, start = 0, time.perf_counter()
    for images, _ in queue.epoch(1):
        blocks += images.batch.blocks
        if time.perf_counter() - start > READING_SECONDS:
            break
    return job.gop("max", (time.perf_counter() - start) / max(blocks, 1))


def _copy_seconds():
    """Return the seconds per byte for copying gradients into a bucket."""
    source = np.ones(BUCKET_BYTES // 4, np.float32)
    target, times = np.empty_like(source), []
    for _ in range(9):
        start = time.perf_counter()
        target[...] = source
        times.append((time.perf_counter() - start) / source.nbytes)
    return float(np.median(times))


def _turn(solo, net, store, options, blocks, seconds, seed):
    """Train alone for some seconds, and return the times of the steps."""
    clock = StepClock(solo, LANES * blocks, seconds)
    solo.events = []
    turn_options = replace(
        options,
        batch_size=LANES * blocks,
        batch_per_rank=None,
        epochs=1_000_000,
        max_iterations=None,
        learning_rate=LEARNING_RATE,
        learn_rate_schedule="none",
        warmup_iterations=0,
        warmup_epochs=0,
        scale_rate=None,
        validation=None,
        validation_fraction=0.0,
        output_network="last-iteration",
        batchnorm_statistics="moving",
        checkpoint_every=0,
        worker_load=None,
        device="cpu",
        threads=0,
        cache_mb=0,
        seed=seed,
        verbose="off",
        plots="none",
        output_functions=(),
    )
    trainer.train(net, store, turn_options, world=solo, hooks=[clock])
    return clock.times()


def _meet(job):
    """Wait for all ranks, asleep: waiting ranks that poll would slow the ranks that compute."""
    request = job.transport.comm.Ibarrier()
    while not request.Test():
        time.sleep(SLEEP_SECONDS)
    job.barrier()


def _gathered(job, times):
    """Return the record of a turn on rank 0, from the times of all active ranks; collective."""
    everyone = job.gather(times)
    if everyone is None:
        return None
    measured = [times for times in everyone if times is not None]
    return {
        "slowest": slowest_of(np.concatenate([times.segments for times in measured])),
        "input": float(np.mean([times.input for times in measured])),
        "places": np.mean([times.places for times in measured], axis=0).tolist(),
    }


def slowest_of(segments: np.ndarray) -> list[float]:
    """Return the expected seconds of a step of 1, 2, 4, ..., MOST_RANKS ranks.

    At the end of each segment, all ranks wait for the slowest. Its expected time is that of the
    largest of N values drawn from the measured ones.

    Parameters
    ----------
    segments : ndarray, shape (steps, segments)
        Seconds of each segment of each measured step.
    """
    ordered = np.sort(segments, axis=0)
    edges = np.arange(len(ordered) + 1)[:, None] / len(ordered)
    seconds, ranks = [], 1
    while ranks <= MOST_RANKS:
        seconds.append(float((np.diff(edges**ranks, axis=0) * ordered).sum()))
        ranks *= 2
    return seconds


def _network(job, events, leaves, seconds, rounds):
    """Measure messages and exchanges in each round. Collective."""
    pairs, exchanges = links.pairs(job), links.distinct(events)
    slot = seconds / (6 * len(pairs) + len(exchanges) + 4)
    largest = max((e for e in exchanges if e.kind == BUCKET), key=lambda e: e.width, default=None)
    records = []
    for _ in range(rounds):
        record: dict[str, Any] = {
            kind: links.measure_pair(job, pair, slot) for kind, pair in pairs.items()
        }
        times = [links.measure_exchange(job, event, leaves, slot) for event in exchanges]
        record["folds"] = [[list(e), t] for e, t in zip(exchanges, times, strict=True)]
        record["hidden"] = 0.0
        if largest is not None:
            duration = times[exchanges.index(largest)]
            record["hidden"] = links.measure_hidden(job, largest, leaves, duration, 2 * slot)
        records.append(record)
    return records
