"""The world: what the ranks of this session do together."""

import functools
import time

import numpy as np
import pytest
from single_rank import numbers

import mpidl as dl
from mpidl.comm import World
from mpidl.fold import replicated


def everyone(world, value):
    """All ranks' values on all ranks."""
    return world.broadcast(world.gather(value))


def test_ranks_are_numbered_once(world):
    from mpi4py import MPI

    assert world.size == MPI.COMM_WORLD.size == len(world.hosts)
    assert everyone(world, world.rank) == list(range(world.size))
    assert world.host == world.hosts[world.rank]
    # neighbours share a host
    assert len(set(world.hosts)) == 1 + sum(
        a != b for a, b in zip(world.hosts[:-1], world.hosts[1:], strict=True)
    )


PLAIN = {
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
@pytest.mark.parametrize("operation", PLAIN)
def test_gop(world, operation, kind):
    values = [VALUES[kind](rank) for rank in range(world.size)]
    with np.errstate(over="ignore"):
        expected = PLAIN[operation]([np.asarray(v) for v in values])
    if operation in ("and", "or"):
        expected = np.asarray(expected, bool)  # of one rank as well
    mine = VALUES[kind](world.rank)
    found = world.gop(operation, mine)
    assert np.array_equal(found, expected) and np.shape(found) == np.shape(mine)
    if np.ndim(mine) or isinstance(mine, np.ndarray):
        assert isinstance(found, np.ndarray) and found is not mine
        assert not np.shares_memory(found, np.asarray(mine))
        kinds = "b" if operation in ("and", "or") else "iu" if found.dtype.kind in "iu" else "f"
        assert found.dtype.kind in kinds + ("b" if operation in ("min", "max") else "")
    else:
        assert type(found) in (bool, int, float)
    assert len(set(everyone(world, np.asarray(found).tobytes()))) == 1


def test_gop_counts_what_is_true(world):
    assert world.gop("sum", True) == world.size
    assert world.gop("sum", world.rank == 0) == 1


def test_gop_applies_a_function_from_rank_0_upwards(world):
    found = world.gop(lambda left, right: 10 * left + right, world.rank + 1)
    assert found == int("".join(str(rank + 1) for rank in range(world.size)))
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


@pytest.mark.parametrize("shape", [(), (5,), (300, 1000)])
def test_gplus_of_plain_arrays_adds_in_the_order_of_the_ranks(world, shape):
    parts = [numbers(f"part {rank}", *shape, dtype=np.float32) for rank in range(world.size)]
    found = world.gplus(parts[world.rank])
    assert found.tobytes() == functools.reduce(np.add, parts).tobytes()
    assert found.dtype == np.float32


def test_gplus_of_dicts_lists_and_tuples(world):
    batch = dl.share(37, world)
    ones = dl.from_images(np.ones((batch.images[1] - batch.images[0], 3)), batch)
    total = dl.sum(ones)
    values = {"sum": total, "plain": np.arange(2.0), "count": 1, "same": replicated(7.0)}
    found = world.gplus(values)
    assert list(found) == list(values)
    assert found["sum"].tolist() == [37] * 3
    assert found["plain"].tolist() == [0, world.size] and found["count"] == world.size
    assert found["same"] == 7
    first, (second, third) = world.gplus((total * 2, [total, 1]))
    assert (first.tolist(), second.tolist(), third) == ([74] * 3, [37] * 3, world.size)
    assert world.gplus([]) == [] and world.gplus({}) == {}
    expected = found["sum"].tobytes()
    found["sum"][...] = 0  # a Partial is not used up, and its sum no part of it
    assert world.gplus(total).tobytes() == expected


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("operation", PLAIN)
def test_allreduce_is_gop(world, operation, kind):
    value = VALUES[kind](world.rank)
    with np.errstate(over="ignore"):
        expected = PLAIN[operation]([np.asarray(VALUES[kind](r)) for r in range(world.size)])
    reduced, by_gop = world.allreduce(value, op=operation), world.gop(operation, value)
    if operation in ("and", "or"):
        expected = np.asarray(expected, bool)  # of one rank as well
    assert np.array_equal(reduced, expected) and np.array_equal(reduced, by_gop)
    if kind == "list" and operation == "sum":  # item by item, as gplus
        assert reduced == expected.tolist()
    else:
        assert type(reduced) is type(by_gop)
        assert np.asarray(reduced).tobytes() == np.asarray(by_gop).tobytes()


def test_allreduce_adds_by_default_as_gplus_does(world):
    assert world.allreduce(world.rank) == sum(range(world.size))
    batch = dl.share(37, world)
    partial = dl.sum(dl.from_images(np.ones((batch.images[1] - batch.images[0], 3)), batch))
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
    mine = {"rank": world.rank, "data": np.full(size, world.rank, np.uint8), "none": None}
    gathered = world.gather(mine)
    world.gather("again")  # a second one does not overtake the first
    if world.rank == 0:
        assert [g["rank"] for g in gathered] == list(range(world.size))
        assert all((g["data"] == g["rank"]).all() and len(g["data"]) == size for g in gathered)
    else:
        assert gathered is None
    for root in range(world.size):
        found = world.broadcast(mine if world.rank == root else "not this", root)
        assert found["rank"] == root and found["none"] is None
        assert (found["data"] == root).all() and found["data"].shape == (size,)
        found["data"][:] = 1  # it is the rank's own, to be written to


def test_raise_if_any_raises_one_error_on_all_ranks(world):
    world.raise_if_any()
    world.raise_if_any(None)
    for failing in ({0}, {world.size - 1}, set(range(world.size)), {world.size // 2}):
        error = OSError(f"file {world.rank}: torn") if world.rank in failing else None
        with pytest.raises(dl.UserError, match=f"^file {min(failing)}: torn$"):
            world.raise_if_any(error)
    world.raise_if_any()


def test_every_message_has_arrived_at_the_barrier(world):
    mine, received = World(), []
    mine.after_each(received.append)
    for i in range(30):
        mine.send((mine.rank, i, np.full(100_000 if i == 7 else 3, i)))
        if i == 15:
            mine.gop("sum", 1)  # other calls go on between
    mine.barrier()
    if mine.rank == 0:
        assert len(received) == 30 * mine.size
        for rank in range(mine.size):  # those of one rank in their order
            of_rank = [message for message in received if message[0] == rank]
            assert [i for _, i, _ in of_rank] == list(range(30))
            assert all((data == i).all() for _, i, data in of_rank)
    else:
        assert received == []
    mine.barrier()  # rank 0 has counted before anyone sends more
    mine.send((mine.rank, "more", np.zeros(0)))
    mine.barrier()
    assert mine.gop("max", len(received)) == 31 * mine.size


def test_messages_arrive_while_rank_0_works(world):
    mine, received = World(), []
    mine.after_each(received.append)
    mine.send(mine.rank)
    if mine.rank == 0:
        while len(received) < mine.size:
            mine.progress()
        assert sorted(received) == list(range(mine.size))
    mine.barrier()


def test_send_without_a_handler_is_told(world):
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="after_each"):
            World(world.transport.MPI.COMM_SELF).send(1)


def test_a_shared_array_is_shared_by_the_ranks_of_a_host(world):
    neighbours = [r for r in range(world.size) if world.hosts[r] == world.host]
    for shape, dtype in (((world.size, 5), np.float64), ((3, 2, 2), np.uint8), ((0, 4), np.int32)):
        array = world.shared_array(shape, dtype)
        assert array.shape == shape and array.dtype == dtype and not array.any()
        world.barrier()  # everyone has seen the zeros
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


def test_nobody_leaves_a_barrier_before_all_came(world):
    for late in range(world.size):
        if world.rank == late:
            time.sleep(0.02)
        came = time.monotonic()
        world.barrier()
        left = time.monotonic()
        if len(set(world.hosts)) == 1:  # one clock
            assert world.gop("max", came) <= world.gop("min", left)


def test_worlds_of_some_of_the_ranks(world):
    from mpi4py import MPI

    half = World(MPI.COMM_WORLD.Split(world.rank % 2, world.rank))
    members = [r for r in range(world.size) if r % 2 == world.rank % 2]
    assert (half.rank, half.size) == (members.index(world.rank), len(members))
    assert half.gop("sum", world.rank) == sum(members)
    batch = dl.share(37, half)
    n = batch.images[1] - batch.images[0]
    assert half.gplus(dl.sum(dl.from_images(np.ones(n), batch))) == 37
    assert world.gop("sum", 1) == world.size  # the first world is as it was


def test_rank_0_reports(world, capsys):
    world.report(epoch=1, loss=np.float64(0.30712), learning_rate=0.01, note="fine")
    printed = capsys.readouterr().out
    expected = "Epoch: 1, Loss: 0.3071, Learning rate: 0.0100, Note: fine\n"
    assert printed == (expected if world.rank == 0 else "")
