"""Test groups of ranks: parallel tasks, exceptions on some ranks, shared cores and GPUs."""

from types import SimpleNamespace

import numpy as np
import pytest
from image_sets import refusal
from test_devices import seeing

import mpidl as dl
from mpidl.errors import describe
from mpidl.ranks import devices, groups, thread_budget
from mpidl.ranks.groups import Group, Neighbours
from mpidl.ranks.thread_budget import Cores


class Unpicklable(Exception):
    """An exception that pickle cannot load, because the constructor needs two arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(groups, "GRACE", 0.05)


def total(group_world):
    """Run a task with a collective operation."""
    return group_world.rank, group_world.gop("sum", 1), dl.World(threads=1).size


def forget(error):
    raise AssertionError("only a group that cannot continue records an error")


def test_groups_of_one_and_of_all(world):
    for size in (1, world.size):
        group = Group(world, size)
        assert (group.index, group.count) == (world.rank // size, world.size // size)
        assert group.is_leader == (world.rank % size == 0)
        outcomes = [group.attempt(total, forget) for _ in range(3)]
        assert outcomes == [((0, size, size), None)] * 3
        group.wait_for_job()
    assert dl.World(threads=1).size == world.size


def test_a_group_divides_the_ranks(world):
    text = refusal(Group, world, world.size + 1)
    assert text.startswith(f"ranks_per_model {world.size + 1}: expected a divisor of the number ")
    assert text.endswith(f"{world.size}")


def test_an_exception_on_all_ranks(world):
    group = Group(world, world.size)

    def task(group_world):
        group_world.gop("sum", 1)
        raise Unpicklable("one", "two")

    outcome = group.attempt(task, forget)
    assert outcome.value is None and isinstance(outcome.error, dl.Fault)
    assert str(outcome.error) == "Unpicklable: one and two"
    assert group.attempt(total, forget).value == (0, world.size, world.size)


@pytest.mark.parametrize("failing", ["first", "last"])
def test_an_exception_on_one_rank_ends_the_waits_of_the_others(world, failing):
    """An exception on one rank cancels the other ranks' waits.

    The other ranks wait in a broadcast of a megabyte, in a sum, or in a barrier.
    """
    group = Group(world, world.size)
    rank = 0 if failing == "first" else world.size - 1
    for operation in (
        lambda w: w.broadcast(np.zeros(1 << 17)),
        lambda w: w.gop("sum", np.ones(1000)),
        lambda w: w.barrier(),
    ):

        def task(group_world, operation=operation):
            if group_world.rank == rank:
                raise ArithmeticError("this rank breaks")
            operation(group_world)
            operation(group_world)

        outcome = group.attempt(task, forget)
        assert outcome.value is None and isinstance(outcome.error, ArithmeticError)
        assert str(outcome.error) == "this rank breaks"
        assert group.attempt(total, forget).value == (0, world.size, world.size)


def test_an_error_in_one_group_leaves_the_others_alone(world):
    group = Group(world, 1)

    def task(group_world):
        if group.index == 0:
            raise dl.UserError("only here")
        return group.index

    outcome = group.attempt(task, forget)
    assert (str(outcome.error) if group.index == 0 else outcome.value) == (
        group.index or "only here"
    )
    assert world.gop("sum", 1) == world.size


def test_waits_end_although_the_task_handles_the_first_error(world):
    group = Group(world, world.size)

    def task(group_world):
        if group_world.rank == 0:
            raise ArithmeticError("this rank breaks")
        try:
            group_world.barrier()
        finally:
            group_world.gop("sum", 1)

    outcome = group.attempt(task, forget)
    assert str(outcome.error) == "this rank breaks"


def test_the_shared_memory_of_a_task_is_freed(world):
    """The shared memory of a task is freed. Otherwise the trials of a sweep would fill /dev/shm."""
    group = Group(world, world.size)

    def task(group_world):
        group_world.shared_array((2 << 20,), np.float32)[...] = 1
        return group_world.available_shared_bytes()

    free = [group.attempt(task, forget).value for _ in range(6)]
    assert max(free) - min(free) < 24 << 20  # less than three arrays


def test_describe():
    assert describe(dl.UserError("a line")) == "a line"
    assert describe(ValueError("one\ntwo")) == "ValueError: one"
    assert describe(KeyError()) == "KeyError"


def member(rank, size, neighbours):
    """Return a replacement for a group's World, for functions that call only `allgather`."""
    fake = SimpleNamespace(rank=rank, size=size, host="node0", neighbours=neighbours)
    fake.allgather = lambda value: [value] * size
    return fake


def test_groups_share_the_cores():
    """On four cores, four groups of one rank get one thread each, not four."""
    cores = [("node0", Cores((0, 1, 2, 3)))] * 4
    neighbours = Neighbours(2, cores, [])
    assert thread_budget.set_threads(member(0, 1, neighbours), 0) == ([1], [])
    single = SimpleNamespace(**vars(member(0, 1, None)))
    single.allgather = lambda value: cores[:1]
    assert thread_budget.set_threads(single, 0) == ([4], [])  # negative control


def test_groups_get_different_gpus():
    """On a host with four GPUs, the second group of two ranks gets the third and fourth GPU."""
    reports = [seeing("ABCD")] * 4
    for first, letters in ((0, "AB"), (2, "CD")):
        neighbours = Neighbours(first, [], reports)
        for rank, letter in enumerate(letters):
            gpu, _ = devices.choose_device(member(rank, 2, neighbours), "auto")
            assert gpu.identity == f"node0 {letter}"
    assert devices.choose_device(member(0, 2, neighbours), "gpu", "3,2,1,0")[0].index == 1
    assert devices.choose_device(member(0, 2, neighbours), "cpu") == (None, [])
