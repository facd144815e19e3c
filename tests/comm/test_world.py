"""Test `World` on the ranks of this session: reductions, messages and shared memory."""

import functools
import os
import time

import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl.core.fold import replicated
from mpidl.errors import FolderInUse, LostLock, StorageFault, UserError
from mpidl.ranks.job_guard import JobTransport
from mpidl.ranks.thread_budget import available_cores
from mpidl.ranks.world import World


def test_ranks_are_numbered_once(world):
    from mpi4py import MPI

    assert world.size == MPI.COMM_WORLD.size == len(world.hosts)
    assert world.allgather(world.rank) == list(range(world.size))
    assert world.host == world.hosts[world.rank]
    changes = sum(a != b for a, b in zip(world.hosts[:-1], world.hosts[1:], strict=True))
    assert len(set(world.hosts)) == 1 + changes  # the ranks of a host are consecutive


def test_ranks_bound_to_cores_of_their_own_share_none(world):
    """Ranks bound to one core each are oversubscribed only if two ranks have the same core."""
    allowed = os.sched_getaffinity(0)
    core = sorted(allowed)[world.rank % len(allowed)]
    os.sched_setaffinity(0, {core})
    try:
        transport = JobTransport(world.transport.comm, timeout=60)
    finally:
        os.sched_setaffinity(0, allowed)
    transport.close()
    quota = available_cores().quota or world.size
    assert transport.oversubscribed == (world.size > min(len(allowed), quota))


BY_NUMPY = {
    "and": lambda values: functools.reduce(np.logical_and, values),
    "or": lambda values: functools.reduce(np.logical_or, values),
    "min": lambda values: np.min(values, axis=0),
    "max": lambda values: np.max(values, axis=0),
    "sum": lambda values: np.sum(np.asarray(values), axis=0),
    "prod": lambda values: np.prod(np.asarray(values), axis=0),
}
VALUES = {
    "bool": lambda rank: rank != 1,
    "all true": lambda rank: True,
    "int": lambda rank: 3 - 2 * rank,
    "large int": lambda rank: 2**40 + rank,
    "float": lambda rank: 0.5 + rank,
    "float of zero": lambda rank: float(rank > 0),
    "float32 scalar": lambda rank: np.float32(rank + 0.25),
    "list": lambda rank: [rank, 2, -rank],
    "bool array": lambda rank: np.array([rank == 0, rank > 0, True]),
    "uint8 array": lambda rank: np.array([[rank, 3], [1, rank]], np.uint8),
    "int array": lambda rank: np.arange(4) - rank,
    "float32 array": lambda rank: np.array([rank, -0.5, 2], np.float32),
    "float64 array": lambda rank: np.linspace(-1, rank + 1, 12).reshape(3, 2, 2),
    "0-d array": lambda rank: np.array(rank + 0.5),
    "empty array": lambda rank: np.empty((0, 3)),
    "turned array": lambda rank: (np.arange(12.0).reshape(3, 4) + rank).T,
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("operation", BY_NUMPY)
def test_gop_and_allreduce(world, operation, kind):
    with np.errstate(over="ignore"):
        expected = BY_NUMPY[operation]([np.asarray(VALUES[kind](r)) for r in range(world.size)])
    if operation in ("and", "or"):
        expected = np.asarray(expected, bool)  # with one rank, `reduce` returns the value itself
    value = VALUES[kind](world.rank)
    total, reduced = world.gop(operation, value), world.allreduce(value, op=operation)
    assert np.array_equal(total, expected) and np.shape(total) == np.shape(value)
    if np.ndim(value) or isinstance(value, np.ndarray):
        assert isinstance(total, np.ndarray) and total is not value
        assert not np.shares_memory(total, np.asarray(value))
        kinds = "b" if operation in ("and", "or") else "iu" if total.dtype.kind in "iu" else "f"
        assert total.dtype.kind in kinds + ("b" if operation in ("min", "max") else "")
    else:
        assert type(total) in (bool, int, float)
    assert len(set(world.allgather(np.asarray(total).tobytes()))) == 1
    if kind == "list" and operation == "sum":  # like gplus, allreduce sums each item of a list
        assert reduced == expected.tolist()
    else:
        assert type(reduced) is type(total)
        assert np.asarray(reduced).tobytes() == np.asarray(total).tobytes()


def test_gop_applies_a_function_from_rank_0_upwards(world):
    digits = world.gop(lambda left, right: 10 * left + right, world.rank + 1)
    assert digits == int("".join(str(rank + 1) for rank in range(world.size)))
    pairs = np.array([[1.0, world.rank], [0.0, 1.0]])
    product = world.gop(np.matmul, pairs)
    assert product[0, 1] == sum(range(world.size))


def test_gop_refuses_what_it_cannot_combine(world):
    with pytest.raises(ValueError, match="one of and, or, min, .* or a function, got 'mean'"):
        world.gop("mean", 1)
    with pytest.raises(TypeError, match="gplus"):
        world.gop("sum", replicated(1.0))
    with pytest.raises(TypeError, match="expected numbers, got None"):
        world.gop("max", None)


def partial_of_ones(world, *shape):
    """Return the sum of 37 images of ones as a Partial."""
    batch = dl.share(37, world)
    images = np.ones((batch.images[1] - batch.images[0], *shape))
    return dl.sum(dl.from_images(images, batch))


@pytest.mark.parametrize("shape", [(), (5,), (300, 1000)])
def test_gplus_of_plain_arrays_adds_in_the_order_of_the_ranks(world, shape):
    parts = [numbers(f"part {rank}", *shape, dtype=np.float32) for rank in range(world.size)]
    total = world.gplus(parts[world.rank])
    assert total.tobytes() == functools.reduce(np.add, parts).tobytes()
    assert total.dtype == np.float32


def test_gplus_of_dicts_lists_and_tuples(world):
    partial = partial_of_ones(world, 3)
    values = {"sum": partial, "plain": np.arange(2.0), "count": 1, "same": replicated(7.0)}
    totals = world.gplus(values)
    assert list(totals) == list(values)
    assert totals["sum"].tolist() == [37] * 3
    assert totals["plain"].tolist() == [0, world.size] and totals["count"] == world.size
    assert totals["same"] == 7
    first, (second, third) = world.gplus((partial * 2, [partial, 1]))
    assert (first.tolist(), second.tolist(), third) == ([74] * 3, [37] * 3, world.size)
    assert world.gplus([]) == [] and world.gplus({}) == {}
    expected = totals["sum"].tobytes()
    totals["sum"][...] = 0  # folding leaves the Partial unchanged, and its sum is a new array
    assert world.gplus(partial).tobytes() == expected


def test_allreduce_adds_by_default_as_gplus_does(world):
    assert world.allreduce(world.rank) == sum(range(world.size))
    partial = partial_of_ones(world, 3)
    assert world.allreduce(partial).tobytes() == world.gplus(partial).tobytes()
    values = {"sum": partial, "pair": (1, np.arange(2.0))}
    reduced = world.allreduce(values)
    assert reduced["sum"].tolist() == [37] * 3
    assert reduced["pair"][0] == world.size
    assert reduced["pair"][1].tolist() == [0, world.size]
    assert world.allreduce(np.eye(2), op=np.matmul).tolist() == np.eye(2).tolist()
    with pytest.raises(TypeError, match="gplus"):
        world.allreduce(partial, op="max")
    with pytest.raises(ValueError, match="expected one of .* got 'mean'"):
        world.allreduce(1, op="mean")


@pytest.mark.parametrize("kind", VALUES)
def test_allgather(world, kind):
    gathered = world.allgather(VALUES[kind](world.rank))
    assert type(gathered) is list and len(gathered) == world.size
    for rank, value in enumerate(gathered):
        expected = VALUES[kind](rank)
        assert type(value) is type(expected)
        assert np.asarray(value).dtype == np.asarray(expected).dtype
        np.testing.assert_array_equal(value, expected)


def test_allgather_of_objects(world):
    words = [{"rank": rank, "none": None} for rank in range(world.size)]
    assert world.allgather(words[world.rank]) == words
    assert world.allgather(f"rank {world.rank}")[world.size - 1] == f"rank {world.size - 1}"


def test_a_world_shows_its_ranks(world):
    small = World(world.transport.MPI.COMM_SELF, threads=None)
    assert repr(small) == f"World(rank=0, size=1, host={small.host!r}, threads=None)"
    small.threads = [2]
    assert repr(small) == f"World(rank=0, size=1, host={small.host!r}, threads=2)"
    assert f"<tr><td>0</td><td>{small.host}</td><td>2</td></tr>" in small._repr_html_()
    assert repr(world).startswith(f"World(rank={world.rank}, size={world.size}, host=")
    assert world._repr_html_().count("<tr>") == 1 + world.size


@pytest.mark.parametrize("size", [0, 10, 3_000_000])
def test_gather_and_broadcast(world, size):
    message = {"rank": world.rank, "data": np.full(size, world.rank, np.uint8), "none": None}
    gathered = world.gather(message)
    world.gather("again")  # a second message does not overtake the first
    if world.rank == 0:
        assert [g["rank"] for g in gathered] == list(range(world.size))
        assert all((g["data"] == g["rank"]).all() and len(g["data"]) == size for g in gathered)
    else:
        assert gathered is None
    for root in range(world.size):
        received = world.broadcast(message if world.rank == root else "not this", root)
        assert received["rank"] == root and received["none"] is None
        assert (received["data"] == root).all() and received["data"].shape == (size,)
        received["data"][:] = 1  # each rank has a writable copy


def test_raise_if_any_raises_one_error_on_all_ranks(world):
    world.raise_if_any()
    world.raise_if_any(None)
    for failing in ({0}, {world.size - 1}, set(range(world.size)), {world.size // 2}):
        error = OSError(f"file {world.rank}: torn") if world.rank in failing else None
        with pytest.raises(dl.UserError, match=f"^file {min(failing)}: torn$"):
            world.raise_if_any(error)
    world.raise_if_any()


@pytest.mark.parametrize("kind", [FolderInUse, LostLock, StorageFault])
def test_raise_if_any_keeps_the_type_of_these_errors(world, kind):
    last = world.size - 1
    with pytest.raises(kind, match="^run: lost$"):
        world.raise_if_any(kind("run: lost") if world.rank == last else None)


def test_every_message_has_arrived_at_the_barrier(world):
    world, received = World(), []
    world.after_each(received.append)
    for i in range(30):
        world.send((world.rank, i, np.full(100_000 if i == 7 else 3, i)))
        if i == 15:
            world.gop("sum", 1)  # other collective calls are allowed between messages
    world.barrier()
    if world.rank == 0:
        assert len(received) == 30 * world.size
        for rank in range(world.size):  # messages of one rank arrive in order
            from_rank = [message for message in received if message[0] == rank]
            assert [i for _, i, _ in from_rank] == list(range(30))
            assert all((data == i).all() for _, i, data in from_rank)
    else:
        assert received == []
    world.barrier()  # no rank sends more before rank 0 has counted the messages
    world.send((world.rank, "more", np.zeros(0)))
    world.barrier()
    assert world.gop("max", len(received)) == 31 * world.size


def test_messages_arrive_while_rank_0_works(world):
    world, received = World(), []
    world.after_each(received.append)
    world.send(world.rank)
    if world.rank == 0:
        while len(received) < world.size:
            world.progress()
        assert sorted(received) == list(range(world.size))
    world.barrier()


def test_send_without_a_handler_is_an_error(world):
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="after_each"):
            World(world.transport.MPI.COMM_SELF).send(1)


def test_a_shared_array_is_shared_by_the_ranks_of_a_host(world):
    neighbours = [r for r in range(world.size) if world.hosts[r] == world.host]
    for shape, dtype in (((world.size, 5), np.float64), ((3, 2, 2), np.uint8), ((0, 4), np.int32)):
        array = world.shared_array(shape, dtype)
        assert array.shape == shape and array.dtype == dtype and not array.any()
        world.barrier()  # all ranks have checked the zeros
        if world.rank == neighbours[0]:
            array[...] = 7
        world.barrier()
        assert (array == 7).all()
    array = world.shared_array((world.size,), np.int64)
    world.barrier()
    array[world.rank] = world.rank + 1
    world.barrier()
    expected = [r + 1 if r in neighbours else 0 for r in range(world.size)]
    assert array.tolist() == expected


def test_no_rank_leaves_a_barrier_before_all_have_entered(world):
    for late in range(world.size):
        if world.rank == late:
            time.sleep(0.02)
        entered = time.monotonic()
        world.barrier()
        left = time.monotonic()
        if len(set(world.hosts)) == 1:  # ranks on one host share a clock
            assert world.gop("max", entered) <= world.gop("min", left)


def test_a_world_of_some_of_the_ranks(world):
    from mpi4py import MPI

    half = World(MPI.COMM_WORLD.Split(world.rank % 2, world.rank))
    members = [r for r in range(world.size) if r % 2 == world.rank % 2]
    assert (half.rank, half.size) == (members.index(world.rank), len(members))
    assert half.gop("sum", world.rank) == sum(members)
    assert half.gplus(partial_of_ones(half)) == 37
    assert world.gop("sum", 1) == world.size  # the whole world still works


def test_rank_0_reports(world, capsys):
    world.report(epoch=1, loss=np.float64(0.30712), learning_rate=0.01, note="fine")
    printed = capsys.readouterr().out
    expected = "Epoch: 1, Loss: 0.3071, Learning rate: 0.0100, Note: fine\n"
    assert printed == (expected if world.rank == 0 else "")


def test_a_world_continues_with_some_of_its_ranks(world):
    """After the last rank has left, the other ranks can continue to use the world."""
    job = World(threads=1)
    array = job.shared_array((3,), np.int32)
    last = job.size - 1
    survivors = list(range(last)) or [0]
    is_lost = job.size > 1 and job.rank == last
    comm = job.transport.comm.Split(int(is_lost), job.rank)
    if not is_lost:
        job.continue_with(JobTransport(comm, 60), survivors)
        assert (job.size, job.rank) == (len(survivors), comm.rank)
        assert job.first_ranks == survivors and len(job.hosts) == len(job.threads) == job.size
        lost = [(last, job.host)] if last else []
        assert [tuple(rank) for rank in job.lost_ranks] == lost
        assert job.gop("sum", 1) == job.size and job.allgather(job.rank) == survivors
        array[...] = 7  # memory that was shared with the lost rank is still valid
        job.free(array)
        job.barrier()


def test_a_world_that_cannot_outlive_its_ranks_says_what_would(world, monkeypatch):
    monkeypatch.delenv("OMPI_MCA_mpi_ft_enable", raising=False)
    monkeypatch.setattr(world, "outlives_ranks", False)
    if world.size == 1:
        world.outlive_ranks()
        assert world.outlives_ranks
        return
    with pytest.raises(UserError) as error:
        world.outlive_ranks("--on-lost-rank shrink")
    start = "--on-lost-rank shrink: expected Open MPI 5 and mpirun --with-ft ulfm -n"
    assert str(error.value).startswith(start) and not world.outlives_ranks
