"""The probe: measure in about a minute what the prediction of `performance.model` needs.

A probe consists of rounds, and a round of turns. In a turn, some ranks of each node train at the
same time, each rank separately. The ranks therefore compete for cores and memory as in a real run.
The ranks call `dl.train`, with a different number of blocks of 16 images per mini-batch in each
turn. At the end of a round, all ranks train together, which shows how much longer a step takes than
the sum of its parts. After all rounds, the ranks measure their network.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.backends.cpu import builds
from mpidl.comm.reducer import BUCKET_BYTES
from mpidl.core.blocks import LANES, blocks_of
from mpidl.data import MinibatchQueue, NodeCache
from mpidl.data.transforms.augment import Augmenter
from mpidl.errors import Fault, UserError
from mpidl.performance import links
from mpidl.performance.model import most_blocks, rounds_of_blocks
from mpidl.performance.trace import BUCKET, StepClock, TracingWorld
from mpidl.ranks.thread_budget import SHARED_CORES
from mpidl.training import input_pipeline, memory_budget
from mpidl.training.progress import OUTPUT_FUNCTION
from mpidl.training.train import train

if TYPE_CHECKING:
    from mpidl.data.datastore import Datastore
    from mpidl.nn import Network
    from mpidl.ranks.world import World
    from mpidl.training.options.training_options import TrainingOptions

SECONDS = 60.0
ROUNDS = 5
MOST_ROUNDS_OF_BLOCKS = 16  # maximum measured blocks per thread; the model extrapolates beyond
TOGETHER = 4  # a turn in which all ranks train together lasts as long as 4 other turns
MOST_RANKS = 1024  # largest N for which `slowest_of` estimates the slowest of N ranks
LEARNING_RATE = 1e-4  # small, so that the weights stay finite with any mini-batch size
SUBSET = 2048  # minimum number of images that the probe reads from a dataset on disk
SLEEP_SECONDS = 0.005  # seconds between two checks whether the other ranks have ended their turn
READING_SECONDS = 1.0  # duration of the measurement of reading without training


def measure(
    job: World,
    net: Network,
    train_set: Datastore,
    options: TrainingOptions,
    seconds: float = SECONDS,
    rounds: int = ROUNDS,
    show: Callable[[str], object] = lambda line: None,
) -> dict[str, Any] | None:
    """Measure training steps, the reading of images, and the network.

    Collective. Return the record that `model.Model` reads, on rank 0. The ranks must fill their
    nodes as in a training run. The weights of the network change. The probe takes about `seconds`,
    in rounds from which the error of the prediction is estimated; `show` receives a line of
    progress in each. Raises UserError if the ranks compute on GPUs, if there is only one rank, or
    if there are too few images. Raises Fault if a signal stops the probe.
    """
    _check_ranks(job)
    lines = job.use_threads(max(options.threads, 1))
    threads = max(job.threads)
    store, capacity = _images(job, train_set, options)
    # An epoch needs two mini-batches, because the first mini-batch is not measured.
    limit = len(store) // (2 * LANES)
    if not limit:
        raise UserError(f"--predict: expected at least {2 * LANES} images, found {len(store)}")
    input_pipeline.prepare(net, store, options, job)
    reading = _reading_seconds(job, net, store, options)
    most_ranks = max(job.hosts.count(host) for host in job.hosts)
    kinds = [
        (active, blocks)
        for active in active_counts(most_ranks)
        for blocks in block_counts(min(_most_blocks(options, active), limit), threads)
    ]
    timed = _time_rounds(job, net, store, options, kinds, seconds, rounds, show)
    if job.rank == 0:
        show("messages and sums")
    leaves = max(blocks_of(options.batch_size), job.size)
    network = _network(
        job, timed["events"], timed["replays_steps"], leaves, 0.3 * seconds / rounds, rounds
    )
    shares_memory = builds.kernels() is not None
    if shares_memory and most_ranks > 1:
        shares_memory = job.host_memory() is not None
    if job.rank:
        return None
    return timed | {
        "ranks": job.size,
        "hosts": len(set(job.hosts)),
        "ranks_per_host": most_ranks,
        "shares_memory": shares_memory,
        "threads": threads,
        "is_oversubscribed": any(SHARED_CORES in line for line in lines),
        "images": len(train_set),
        "batch_size": options.batch_size,
        "batch_per_rank": options.batch_per_rank,
        "workers": options.workers,
        "cached_images": capacity,
        "copy_seconds_per_byte": _copy_seconds(),
        "reading_seconds_per_block": reading,
        "seconds": seconds,
        "rounds": rounds,
        "network": network,
    }


def _check_ranks(job):
    """Raise UserError if these ranks cannot be measured."""
    if job.device is not None:
        raise UserError(
            "--predict: expected ranks on CPUs (--device cpu), found GPUs; to measure GPUs, run "
            "the study without --predict"
        )
    if job.size == 1:
        raise UserError(
            "--predict: expected at least 2 ranks to measure the network between them, found 1; "
            "use fewer --threads, or --probe-ranks 2"
        )


def _time_rounds(job, net, store, options, kinds, seconds, rounds, show):
    """Time the turns of all rounds, for each (ranks per node, blocks) in `kinds`. Collective.

    Return a dict: "steps" has a record per turn, on rank 0; "coupled" the mean seconds per step of
    each round in which all ranks train together; "events" the messages and sums of a step.
    """
    initial = copy.deepcopy((net.parameters, net.state))
    is_coupled = 2 * options.batch_size <= len(store)
    turn = max(0.7 * seconds, 1.0) / (rounds * (len(kinds) + (TOGETHER if is_coupled else 0)))
    steps, coupled, events = [], [], None
    solo = TracingWorld(job.transport.MPI.COMM_SELF)
    solo.threads = [job.threads[job.rank]]
    for number in range(rounds):
        if job.rank == 0:
            show(f"round {number + 1} of {rounds}")
        for active, blocks in kinds if number % 2 == 0 else kinds[::-1]:
            times = None
            if job.hosts[: job.rank].count(job.host) < active:
                clock = StepClock(LANES * blocks, turn, solo, at_least=2)
                solo.take_events()
                _train(solo, net, store, options, clock, seed=options.seed + job.rank)
                times = clock.times()
            _meet(job)
            record = _gathered(job, times)
            if record is not None:
                record |= {"round": number, "active": active, "blocks": blocks}
                steps.append(record)
            if events is None and times is not None:
                events = times.events
        if is_coupled:
            net.parameters, net.state = copy.deepcopy(initial)  # must be equal on all ranks
            clock = StepClock(options.batch_size, TOGETHER * turn, at_least=2)
            _train(job, net, store, options, clock, seed=options.seed)
            coupled.append(clock.mean_seconds())
    events, replays_steps = job.broadcast((events, solo.replays_steps))
    return {
        "events": events,
        "replays_steps": replays_steps,
        "steps": steps,
        "coupled": coupled,
    }


def _most_blocks(options, ranks):
    """Return the largest number of blocks on a rank if `ranks` ranks train."""
    if options.batch_per_rank is not None:
        return blocks_of(options.batch_per_rank)
    return most_blocks(blocks_of(options.batch_size), ranks)[0]


def block_counts(largest: int, threads: int) -> list[int]:
    """Return the numbers of blocks per rank for which steps are timed: 1, T, 2T, 4T, ..., largest.

    T is the number of threads of a rank. The largest number is limited to MOST_ROUNDS_OF_BLOCKS *
    T.
    """
    largest = min(largest, MOST_ROUNDS_OF_BLOCKS * threads)
    powers = [threads << k for k in range(largest.bit_length())]
    counts = [count for count in (1, *powers) if count < largest] + [largest]
    # numbers with the same blocks per thread take the same time, so only the largest is kept
    return sorted({rounds_of_blocks(count, threads): count for count in counts}.values())


def active_counts(ranks: int) -> list[int]:
    """Return the numbers of ranks per node that train in the turns: 1, 2, 4, ..., `ranks`."""
    return sorted({1, ranks, *(1 << k for k in range(ranks.bit_length()) if 1 << k <= ranks)})


def _images(job, train_set, options):
    """Return (images for the probe, number of training images that fit into the cache)."""
    if train_set.in_memory:
        return train_set, len(train_set)
    budget = memory_budget.for_images(options, train_set, job)
    image_bytes = int(np.prod(train_set.image_shape)) * train_set.dtype.itemsize
    capacity = min(len(train_set), budget // max(image_bytes, 1))
    count = min(len(train_set), max(SUBSET, 4 * options.batch_size))
    subset = train_set.subset(np.arange(count) * len(train_set) // count)
    is_cached = capacity == len(train_set)  # otherwise, training would read images in every epoch
    return NodeCache(subset, job, budget if is_cached else 0), capacity


def _reading_seconds(job, net, store, options):
    """Measure the seconds per block that a rank needs to read images without training.

    The ranks of a node first fill the cache together.
    """
    keywords = {"augmenter": Augmenter.of_options(options), "workers": options.workers}
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
    """Measure the seconds per byte for copying gradients into a bucket."""
    source = np.ones(BUCKET_BYTES // 4, np.float32)
    target, times = np.empty_like(source), []
    for _ in range(9):
        start = time.perf_counter()
        target[...] = source
        times.append((time.perf_counter() - start) / source.nbytes)
    return float(np.median(times))


def _train(world, net, store, options, clock, seed):
    """Train until `clock`, a StepClock, has measured enough steps and stops the training."""
    turn_options = replace(
        options,
        batch_size=clock.batch_size,
        batch_per_rank=None,
        partial_minibatch="return",
        epochs=1_000_000,
        max_iterations=None,
        learning_rate=LEARNING_RATE,
        learn_rate_schedule="none",
        warmup_iterations=0,
        warmup_epochs=0,
        scale_rate=None,
        validation=None,
        validation_fraction=0.0,
        fold=None,
        validation_patience=math.inf,
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
        timeline=0,
        tensorboard="off",
        output_functions=(),
    )
    result = train(net, store, turn_options, world=world, hooks=[clock])
    if result.stopped != OUTPUT_FUNCTION:
        raise Fault(f"{result.stopped}: the probe was stopped")


def _meet(job):
    """Wait for all ranks. Sleep meanwhile, because polling would slow the ranks that compute."""
    request = job.transport.comm.Ibarrier()
    job.transport.wait_until(request.Test, "a turn of the probe", lambda: time.sleep(SLEEP_SECONDS))
    job.barrier()


def _gathered(job, times):
    """Return the record of a turn on rank 0, and None on other ranks. Collective.

    `times` are the StepTimes of this rank, or None if this rank did not train in the turn.
    """
    everyone = job.gather(times)
    if everyone is None:
        return None
    measured = [times for times in everyone if times is not None]
    return {
        "slowest": slowest_of([times.segments for times in measured]),
        "input": float(np.mean([times.input for times in measured])),
        "places": np.mean([times.places for times in measured], axis=0).tolist(),
    }


def slowest_of(segments: Sequence[np.ndarray]) -> list[float]:
    """Return the expected duration in seconds of a step on 1, 2, 4, ..., MOST_RANKS ranks.

    `segments` has for each measured rank an array (steps, segments) of seconds. At the end of each
    segment of a step, all N ranks wait for the slowest rank. The expected duration of a segment is
    therefore the expected maximum of N random times. An equal number of these times is drawn from
    each measured rank.
    """
    ordered = np.sort(np.concatenate(segments), axis=0)
    # logarithm of the product of the distribution functions of all ranks
    log_parts = np.zeros(ordered.shape)
    with np.errstate(divide="ignore"):
        for steps in segments:
            for column, values in enumerate(np.sort(steps, axis=0).T):
                below = np.searchsorted(values, ordered[:, column], side="right")
                log_parts[:, column] += np.log(below / len(values))
    seconds, ranks = [float(ordered.mean(axis=0).sum())], 2
    while ranks <= MOST_RANKS:
        largest = np.exp(log_parts * (ranks / len(segments)))
        weights = np.diff(largest, axis=0, prepend=0.0)
        seconds.append(float((weights * ordered).sum()))
        ranks *= 2
    return seconds


def _network(job, events, replays_steps, leaves, seconds, rounds):
    """Measure messages and exchanges, and return one record per round. Collective."""
    pairs, exchanges = links.pairs(job), links.distinct(events)
    slot = seconds / (6 * len(pairs) + len(exchanges) + 6)
    largest = max((e for e in exchanges if e.kind == BUCKET), key=lambda e: e.width, default=None)
    records = []
    for _ in range(rounds):
        record: dict[str, Any] = {
            kind: links.measure_pair(job, pair, slot) for kind, pair in pairs.items()
        }
        times = [
            links.measure_exchange(job, event, leaves, slot, replays_steps) for event in exchanges
        ]
        record["folds"] = list(zip(exchanges, times, strict=True))
        record["hidden"] = 0.0
        if largest is not None:
            record["hidden"] = links.measure_hidden(job, largest, leaves, 2 * slot)
        records.append(record)
    return records
