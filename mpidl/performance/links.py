"""Measure the network of real ranks: messages, exchanges of sums, and their overlap with work."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.backends.cpu.recorder import Recorder
from mpidl.core import fold
from mpidl.errors import Fault
from mpidl.performance.trace import AGREE, FINISH, Event

if TYPE_CHECKING:
    from mpidl.ranks.world import World

SIZES = (8, 1024, 16384, 131072, 1048576)  # sizes of messages in bytes
BURST = 16  # number of messages in each direction in a burst
PARTS = 9  # number of parts of a measurement, whose median is the result
SLICE_SECONDS = 5e-4  # duration of the work between two attempts to advance an exchange
TAG = 9  # MPI message tag, which is below the tags of exchanges
COMBINES = {"add": fold.add, "moments": fold.merge_moments}


def repeat(function: Callable[[], object], world: World, seconds: float) -> float:
    """Measure the duration of a call in seconds. Collective.

    The call is repeated for about `seconds` seconds. The measurement has several parts, and the
    result is the median over the parts, so a short interruption does not change it.
    """
    world.barrier()
    start = time.perf_counter()
    function()
    first = world.gop("max", time.perf_counter() - start)
    count = int(min(max(seconds / max(first, 1e-7), 3), 2000))
    part, times = -(-count // PARTS), []
    world.barrier()
    while len(times) * part < count:
        start = time.perf_counter()
        for _ in range(part):
            function()
        times.append((time.perf_counter() - start) / part)
    return world.gop("max", float(np.median(times)))


def pairs(world: World) -> dict[str, tuple[int, int]]:
    """Return {"inside": two ranks of one host, "between": two ranks of different hosts}.

    A key is missing if there are no such ranks.
    """
    hosts = world.hosts
    by_kind = {}
    for kind, is_wanted in (("inside", True), ("between", False)):
        partners = (
            (a, b)
            for b in range(1, world.size)
            for a in (0, b - 1)
            if a != b and (hosts[a] == hosts[b]) is is_wanted
        )
        pair = next(partners, None)
        if pair is not None:
            by_kind[kind] = pair
    return by_kind


def measure_pair(world: World, pair: tuple[int, int], seconds: float) -> dict[str, Any]:
    """Measure the messages between two ranks.

    Collective. "sizes" lists the sizes of messages in bytes. "ping_pong" lists the seconds that a
    message of each size takes in one direction. "burst" is the seconds per message if both ranks
    send `BURST` small messages at once.
    """
    transport, partner = world.transport, None
    if world.rank in pair:
        partner = pair[1 - pair.index(world.rank)]

    def ping_pong(buffer):
        if partner is None:
            return
        first, second = transport.isend, transport.irecv
        if world.rank == pair[1]:
            first, second = second, first
        for post in (first, second):
            transport.wait([post(buffer, partner, TAG)], "a measurement of the network")

    def burst(buffers):
        if partner is None:
            return
        requests = [transport.irecv(buffer, partner, TAG) for buffer in buffers[1]]
        requests += [transport.isend(buffer, partner, TAG) for buffer in buffers[0]]
        transport.wait(requests, "a measurement of the network")

    times = []
    for size in SIZES:
        buffer = np.zeros(size, np.uint8)
        ping_pong(buffer)  # which may open a connection
        times.append(repeat(functools.partial(ping_pong, buffer), world, seconds) / 2)
    buffers = np.zeros((2, BURST, 8), np.uint8)
    burst_seconds = repeat(functools.partial(burst, buffers), world, seconds)
    return {"sizes": list(SIZES), "ping_pong": times, "burst": burst_seconds / BURST}


def distinct(events: Sequence[Event]) -> list[Event]:
    """Return the events at which ranks exchange values, without repetitions."""
    return list(dict.fromkeys(event for event in events if event.kind != FINISH))


def measure_exchange(
    world: World, event: Event, leaves: int, seconds: float, is_replayed: bool = False
) -> float:
    """Measure the duration in seconds of an event if all ranks arrive at the same time.

    Collective. `leaves` is the number of blocks of the mini-batch, and `seconds` the duration of
    the measurement. A replayed step starts sums without Python if all ranks share memory.
    """
    if event.kind == AGREE:
        return repeat(lambda: world.gop("max", 0), world, seconds)
    if event.operation == "gather":
        array = np.zeros(event.width)
        return repeat(lambda: world.gop("sum", array), world, seconds)
    tree, matrix, combine = _arguments(world, event, leaves)
    term = fold.Term(tree, list(matrix), combine, matrix.dtype)
    partial = fold.Partial([term], None, (event.width,), matrix.dtype)
    if is_replayed:
        return repeat(recorded_sum(world, partial), world, seconds)
    return repeat(lambda: world.gplus(partial), world, seconds)


def recorded_sum(world: World, partial: fold.Partial) -> Callable[[], np.ndarray]:
    """Return a function that sums a Partial as replayed steps do. Collective.

    If a rank cannot record the sum, all ranks raise Fault.
    """
    recorder = Recorder([])
    for term in partial.terms:
        for node in term.nodes:
            recorder.constant(node)
    with recorder.recording():
        place = recorder.place(world.gplus(partial))
    program, total = recorder.finish(), place.view()
    # Without this agreement, the other ranks would wait for a rank that has raised an error.
    problem = next(filter(None, world.allgather(recorder.problem)), None)
    if problem is not None:
        raise Fault(f"a sum cannot be replayed: {problem}")

    def replay():
        program.run(0)
        return total

    return replay


def _arguments(world, event, leaves):
    """Return arguments of `World.exchange` for an event. All nodes are zeros."""
    tree = fold.Tree(leaves, fold.split_blocks(leaves, world.size), world.rank)
    dtype = np.dtype(f"f{event.itemsize}")
    matrix = np.zeros((len(tree.nodes[world.rank]), event.width), dtype)
    return tree, matrix, COMBINES[event.operation]


def measure_hidden(world: World, event: Event, leaves: int, seconds: float) -> float:
    """Measure which fraction of an exchange's duration overlaps with computations.

    Collective. The ranks make a sequence of short computations. Between the computations, they
    advance the exchange, as kernels do. Each of the three measurements (exchange, computations, and
    both) takes `seconds`.
    """
    arguments = _arguments(world, event, leaves)
    duration = repeat(lambda: world.exchange(*arguments), world, seconds)
    values = np.ones((96, 96), np.float32)
    products = world.gop("max", _count_products(values, SLICE_SECONDS))
    slices = int(max(2, 2 * duration / SLICE_SECONDS))

    def work(pending=None):
        for _ in range(slices):
            for _ in range(products):
                values @ values
            world.advance()
        if pending is not None:
            world.wait(pending)

    def work_alone():
        work()
        world.barrier()

    def work_and_exchange():
        tree, matrix, combine = arguments
        pieces = [(matrix.shape[1], list(matrix))]
        work(world.start_sum(tree, pieces, combine, matrix.dtype))
        world.barrier()

    idle = repeat(work_alone, world, seconds)
    busy = repeat(work_and_exchange, world, seconds)
    return float(np.clip(1 - (busy - idle) / duration, 0, 1))


def _count_products(values, seconds):
    """Return how many products `values @ values` can be computed in this many seconds."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 20 * seconds:
        values @ values
        count += 1
    return max(1, count // 20)
